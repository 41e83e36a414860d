"""Small models with random weights and a tokenizer of bytes, as local Hugging Face folders, and
batches for them.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig

_SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
_SIZES |= {"num_hidden_layers": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
_TOKENS = {"vocab_size": 257, "bos_token_id": None, "eos_token_id": 256, "pad_token_id": 256}


def save_tiny_llama(folder: Path, **sizes: int) -> None:
    """Write config.json, model.safetensors and tokenizer.json of a Llama."""
    _save(LlamaConfig(**{**_SIZES, **_TOKENS, **sizes}), folder)


def save_tiny_mixtral(folder: Path) -> None:
    """Write the same files of a Mixtral with four experts."""
    sizes = {**_SIZES, "num_hidden_layers": 2, "num_local_experts": 4}
    _save(MixtralConfig(**sizes, **_TOKENS), folder)


def _save(config: LlamaConfig | MixtralConfig, folder: Path) -> None:
    names = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<|endoftext|>"]
    tokenizer = Tokenizer(
        models.BPE(vocab={name: number for number, name in enumerate(names)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))


rows = torch.randint(256, (16, 24), generator=torch.Generator().manual_seed(1))
dataloader = DataLoader([{"input_ids": row, "labels": row} for row in rows], batch_size=4)

if __name__ == "__main__" and not Path("my_model").exists():
    save_tiny_llama(Path("my_model"))
