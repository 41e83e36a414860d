"""Small Hugging Face models with experts, with random numbers in all their tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.swap.families import transformers
from tests.swap.test_language_models import normalise_exactly

_SIZES = {"vocab_size": 53, "hidden_size": 24, "intermediate_size": 20, "num_attention_heads": 6}
_SIZES |= {"num_key_value_heads": 2, "max_position_embeddings": 64}

_DEEPSEEK = {
    **_SIZES,
    "num_hidden_layers": 3,
    "num_key_value_heads": 6,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 14,
    "first_k_dense_replace": 1,
    "n_shared_experts": 2,
    "n_group": 3,
    "topk_group": 2,
    "kv_lora_rank": 8,
    "q_lora_rank": 10,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 8,
    # The factor scales attention scores, cosines and sines.
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "mscale": 0.9,
        "mscale_all_dim": 0.7,
    },
}

#: Name of a case: class of the model, and the settings that differ from its defaults.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("MixtralForCausalLM", {**_SIZES, "num_hidden_layers": 2, "num_local_experts": 5}),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        {
            **_SIZES,
            "num_hidden_layers": 3,
            "num_experts": 4,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 14,
        }
        | {"mlp_only_layers": [1], "head_dim": 8, "norm_topk_prob": True},
    ),
    "qwen2_moe": (
        "Qwen2MoeForCausalLM",
        {**_SIZES, "num_hidden_layers": 2, "num_experts": 4, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 14, "shared_expert_intermediate_size": 10}
        | {"use_sliding_window": True, "sliding_window": 4},
    ),
    "olmoe": (
        "OlmoeForCausalLM",
        {**_SIZES, "num_hidden_layers": 2, "num_experts": 4, "num_experts_per_tok": 2},
    ),
    "deepseek_v2": (
        "DeepseekV2ForCausalLM",
        {
            **_DEEPSEEK,
            "q_lora_rank": None,
            "routed_scaling_factor": 1.5,
            "topk_method": "group_limited_greedy",
        },
    ),
    "deepseek_v3": ("DeepseekV3ForCausalLM", {**_DEEPSEEK, "attention_bias": True}),
    "gpt_oss": (
        "GptOssForCausalLM",
        {
            **_SIZES,
            "num_hidden_layers": 3,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 8,
            "sliding_window": 4,
        },
    ),
}


def config_of(case: str, **changes: Any) -> Any:
    """Return the Hugging Face configuration of a case."""
    architecture, settings = CASES[case]
    return getattr(transformers, architecture).config_class(**{**settings, **changes})


def twin_of(case: str, **changes: Any) -> nn.Module:
    """Return a model of a case with random values, so that no two elements are equal by design."""
    generator = torch.Generator().manual_seed(0)
    twin: nn.Module = transformers.AutoModelForCausalLM.from_config(config_of(case, **changes))
    with torch.no_grad():
        for tensor in twin.state_dict().values():
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return twin


def exact_twin_of(case: str, **changes: Any) -> nn.Module:
    """Return a float64 model whose experts can be divided among four ranks, and the features of an
    expert between two ranks.
    """
    sizes = {"num_hidden_layers": 4, "num_attention_heads": 4, "attn_implementation": "sdpa"}
    if case.startswith("deepseek"):
        sizes |= {"num_key_value_heads": 4, "n_routed_experts": 8, "n_group": 4}
    else:
        sizes |= {"head_dim": 8}
    sizes |= {"num_local_experts": 4} if case == "mixtral" else {}
    # Fused attention does not support sinks.
    sizes |= {"attn_implementation": "eager"} if case == "gpt_oss" else {}
    if case == "olmoe":
        # OLMoE's norms of queries have as many features as the residual stream.
        del sizes["head_dim"]
    config = config_of(case, **{**sizes, **changes})
    # Fused experts do not support float64.
    config._experts_implementation = "eager"
    twin: nn.Module = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float64
    ).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in (*twin.parameters(), *_biases(twin)):
            tensor.copy_(torch.randn(tensor.shape, generator=generator).mul_(0.1))
    return normalise_exactly(twin)


def _biases(twin: nn.Module) -> list[torch.Tensor]:
    return [
        buffer for name, buffer in twin.named_buffers() if name.endswith("e_score_correction_bias")
    ]
