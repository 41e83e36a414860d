"""A small Llama with random weights and a tokenizer of bytes, as a local Hugging Face folder, and batches for it."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM


def save_tiny_llama(folder: Path) -> None:
    """Write config.json, model.safetensors and tokenizer.json."""
    names = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<|endoftext|>"]
    tokenizer = Tokenizer(models.BPE(vocab={name: number for number, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    config = LlamaConfig(
        vocab_size=len(names),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=256,
        pad_token_id=256,
    )
    torch.manual_seed(1)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))


rows = torch.randint(256, (16, 24), generator=torch.Generator().manual_seed(1))
dataloader = DataLoader([{"input_ids": row, "labels": row} for row in rows], batch_size=4)

if __name__ == "__main__" and not Path("my_model").exists():
    save_tiny_llama(Path("my_model"))
