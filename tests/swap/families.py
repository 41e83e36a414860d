"""Small Hugging Face models of every family, with random numbers in all their parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")

V, LAYERS, HEADS = 53, 3, 12
_SIZES = {"vocab_size": V, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": LAYERS}
_SIZES |= {"num_attention_heads": HEADS, "max_position_embeddings": 64}
_LLAMA = {
    **_SIZES,
    "num_key_value_heads": 6,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0}
_LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 32}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
_TYPED = {
    "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 50000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
}
_PART = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
_LONG = {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
_LONG |= {"short_factor": [1.5], "long_factor": [2.5]}

#: Name of a case: class of the model, and the settings that differ from its defaults.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": (
        "GPT2LMHeadModel",
        {"vocab_size": V, "n_positions": 64, "n_embd": 48, "n_layer": LAYERS, "n_head": HEADS},
    ),
    "llama": ("LlamaForCausalLM", _LLAMA),
    "llama tied with biases": (
        "LlamaForCausalLM",
        {
            **_LLAMA,
            "tie_word_embeddings": True,
            "attention_bias": True,
            "mlp_bias": True,
            "head_dim": 6,
        }
        | {"rope_parameters": _LLAMA3},
    ),
    "llama with one key head": ("LlamaForCausalLM", {**_LLAMA, "num_key_value_heads": 1}),
    "mistral": ("MistralForCausalLM", {**_LLAMA, "sliding_window": 7, "rope_parameters": _YARN}),
    "qwen2": (
        "Qwen2ForCausalLM",
        {**_LLAMA, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3ForCausalLM", {**_LLAMA, "head_dim": 8, "tie_word_embeddings": True}),
    "gemma": ("GemmaForCausalLM", {**_LLAMA, "head_dim": 8, "pad_token_id": 0}),
    "phi3": (
        "Phi3ForCausalLM",
        {
            **_LLAMA,
            "original_max_position_embeddings": 16,
            "rope_parameters": _LONG,
            "sliding_window": 9,
        },
    ),
    "gemma2": (
        "Gemma2ForCausalLM",
        {
            **_LLAMA,
            "head_dim": 8,
            "query_pre_attn_scalar": 5,
            "sliding_window": 4,
            "pad_token_id": 0,
        }
        | {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.5},
    ),
    "gemma3": (
        "Gemma3ForCausalLM",
        {
            **_LLAMA,
            "head_dim": 8,
            "query_pre_attn_scalar": 5,
            "sliding_window": 4,
            "pad_token_id": 0,
        }
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
        | {"rope_parameters": _TYPED},
    ),
    "olmo2": ("Olmo2ForCausalLM", {**_LLAMA, "num_key_value_heads": 1, "attention_bias": True}),
    "olmo3": (
        "Olmo3ForCausalLM",
        {**_LLAMA, "sliding_window": 5, "rope_parameters": {**_TYPED, "full_attention": _YARN}}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "granite": (
        "GraniteForCausalLM",
        {**_LLAMA, "embedding_multiplier": 3.0, "attention_multiplier": 0.25, "mlp_bias": True}
        | {"residual_multiplier": 0.5, "logits_scaling": 4.0, "tie_word_embeddings": True},
    ),
    "glm": ("GlmForCausalLM", {**_LLAMA, "head_dim": 8, "rope_parameters": _PART}),
    "glm4": (
        "Glm4ForCausalLM",
        {**_LLAMA, "num_key_value_heads": 2, "head_dim": 8, "attention_bias": False},
    ),
    "ernie4_5": ("Ernie4_5ForCausalLM", {**_LLAMA, "head_dim": 8, "use_bias": True}),
    "helium": (
        "HeliumForCausalLM",
        {**_LLAMA, "num_key_value_heads": 1, "head_dim": 4, "attention_bias": True},
    ),
    "smollm3": (
        "SmolLM3ForCausalLM",
        {**_LLAMA, "no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 4},
    ),
    "starcoder2": (
        "Starcoder2ForCausalLM",
        {**_SIZES, "num_key_value_heads": 2, "sliding_window": 6, "pad_token_id": 0},
    ),
    "bloom": (
        "BloomForCausalLM",
        {"vocab_size": V, "hidden_size": 48, "n_layer": LAYERS, "n_head": HEADS},
    ),
    "mpt": (
        "MptForCausalLM",
        {"vocab_size": V, "d_model": 48, "n_layers": LAYERS, "n_heads": HEADS, "max_seq_len": 64},
    ),
    "gpt_neox": ("GPTNeoXForCausalLM", {**_SIZES, "rope_parameters": _PART}),
    "gpt_neox in sequence without biases": (
        "GPTNeoXForCausalLM",
        {
            **_SIZES,
            "use_parallel_residual": False,
            "attention_bias": False,
            "tie_word_embeddings": True,
        }
        | {"rope_parameters": {**_PART, "partial_rotary_factor": 1.0}},
    ),
}


def config_of(case: str, **changes: Any) -> Any:
    """Return the Hugging Face configuration of a case."""
    architecture, settings = CASES[case]
    return getattr(transformers, architecture).config_class(**{**settings, **changes})


def twin_of(case: str, dtype: torch.dtype = torch.float32, **changes: Any) -> nn.Module:
    """Return a model of a case with random values, so that no two elements are equal by design."""
    generator = torch.Generator().manual_seed(0)
    twin: nn.Module = transformers.AutoModelForCausalLM.from_config(
        config_of(case, **changes), dtype=dtype
    )
    assert type(twin).__name__ == CASES[case][0], "a case names the class of its configuration"
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return twin
