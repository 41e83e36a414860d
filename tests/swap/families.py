"""Small Hugging Face models of every family and class, with random numbers in all their tensors.

``twin_of`` builds a model of a case, and ``exact_twin`` one that computes in float64 throughout.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_megatron.families import Family, family_of
from tests.oracles import float32_as_float64

transformers = pytest.importorskip("transformers")
eager_mask = pytest.importorskip("transformers.masking_utils").eager_mask

V, LAYERS, HEADS, PADDING = 53, 3, 12, 3
#: Cases and model types whose attention scores fall with the distance of tokens.
WITH_SLOPES = ("bloom", "mpt")
_SIZES = {"vocab_size": V, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": LAYERS}
_SIZES |= {"num_attention_heads": HEADS, "max_position_embeddings": 64}
_LLAMA = {**_SIZES, "num_key_value_heads": 6, "pad_token_id": None, "bos_token_id": 1}
_LLAMA |= {"eos_token_id": 2}
_LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0}
_LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 32}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}
_YARN |= {"original_max_position_embeddings": 16}
_TYPED = {
    "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 50000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
}
_TYPES = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
_PART = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
_LONG = {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
_LONG |= {"short_factor": [1.5], "long_factor": [2.5]}
_GEMMA = {**_LLAMA, "head_dim": 8, "pad_token_id": 0}

#: Decoders. Name of a case: class of the model, and the settings that differ from its defaults.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", {"vocab_size": V, "n_positions": 64, "n_embd": 48, "n_layer": LAYERS, "n_head": HEADS}),
    "gpt_bigcode": ("GPTBigCodeForCausalLM", {
        "vocab_size": V, "n_positions": 64, "n_embd": 48, "n_layer": LAYERS, "n_head": HEADS, "n_inner": 72,
    }),
    "llama": ("LlamaForCausalLM", _LLAMA),
    "llama tied with biases": ("LlamaForCausalLM", {
        **_LLAMA, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "head_dim": 6, "rope_parameters": _LLAMA3,
    }),
    "llama with one key head": ("LlamaForCausalLM", {**_LLAMA, "num_key_value_heads": 1}),
    "mistral": ("MistralForCausalLM", {**_LLAMA, "sliding_window": 7, "rope_parameters": _YARN}),
    "qwen2": ("Qwen2ForCausalLM", {**_LLAMA, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("Qwen3ForCausalLM", {**_LLAMA, "head_dim": 8, "tie_word_embeddings": True}),
    "gemma": ("GemmaForCausalLM", _GEMMA),
    "phi3": ("Phi3ForCausalLM", {
        **_LLAMA, "original_max_position_embeddings": 16, "rope_parameters": _LONG, "sliding_window": 9,
    }),
    "gemma2": ("Gemma2ForCausalLM", {
        **_GEMMA, "query_pre_attn_scalar": 5, "sliding_window": 4, "attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.5,
    }),
    "gemma3": ("Gemma3ForCausalLM", {
        **_GEMMA, "query_pre_attn_scalar": 5, "sliding_window": 4, **_TYPES, "rope_parameters": _TYPED,
    }),
    "olmo2": ("Olmo2ForCausalLM", {**_LLAMA, "num_key_value_heads": 1, "attention_bias": True}),
    "olmo3": ("Olmo3ForCausalLM", {
        **_LLAMA, "sliding_window": 5, "rope_parameters": {**_TYPED, "full_attention": _YARN}, **_TYPES,
    }),
    "granite": ("GraniteForCausalLM", {
        **_LLAMA, "embedding_multiplier": 3.0, "attention_multiplier": 0.25, "mlp_bias": True,
        "residual_multiplier": 0.5, "logits_scaling": 4.0, "tie_word_embeddings": True,
    }),
    "glm": ("GlmForCausalLM", {**_LLAMA, "head_dim": 8, "rope_parameters": _PART}),
    "glm4": ("Glm4ForCausalLM", {**_LLAMA, "num_key_value_heads": 2, "head_dim": 8, "attention_bias": False}),
    "ernie4_5": ("Ernie4_5ForCausalLM", {**_LLAMA, "head_dim": 8, "use_bias": True}),
    "helium": ("HeliumForCausalLM", {**_LLAMA, "num_key_value_heads": 1, "head_dim": 4, "attention_bias": True}),
    "exaone4": ("Exaone4ForCausalLM", {
        **_LLAMA, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 5, "sliding_window_pattern": 2,
    }),
    "smollm3": ("SmolLM3ForCausalLM", {
        **_LLAMA, "no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 4,
    }),
    "starcoder2": ("Starcoder2ForCausalLM", {**_SIZES, "num_key_value_heads": 2, "sliding_window": 6, "pad_token_id": 0}),
    "bloom": ("BloomForCausalLM", {"vocab_size": V, "hidden_size": 48, "n_layer": LAYERS, "n_head": HEADS}),
    "mpt": ("MptForCausalLM", {"vocab_size": V, "d_model": 48, "n_layers": LAYERS, "n_heads": HEADS, "max_seq_len": 64}),
    "gpt_neox": ("GPTNeoXForCausalLM", {**_SIZES, "rope_parameters": _PART}),
    "gpt_neox in sequence without biases": ("GPTNeoXForCausalLM", {
        **_SIZES, "use_parallel_residual": False, "attention_bias": False, "tie_word_embeddings": True,
        "rope_parameters": {**_PART, "partial_rotary_factor": 1.0},
    }),
}  # fmt: skip

_SMALL = {"vocab_size": V, "hidden_size": 24, "intermediate_size": 20, "num_attention_heads": 6}
_SMALL |= {"num_key_value_heads": 2, "max_position_embeddings": 64, "num_hidden_layers": 2}
_DEEPSEEK = {
    **_SMALL, "num_hidden_layers": 3, "num_key_value_heads": 6, "n_routed_experts": 6, "num_experts_per_tok": 2,
    "moe_intermediate_size": 14, "first_k_dense_replace": 1, "n_shared_experts": 2, "n_group": 3, "topk_group": 2,
    "kv_lora_rank": 8, "q_lora_rank": 10, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 8,
    # The factor scales attention scores, cosines and sines.
    "rope_parameters": {**_YARN, "mscale": 0.9, "mscale_all_dim": 0.7},
}  # fmt: skip
_FOUR = {**_SMALL, "num_experts": 4, "num_experts_per_tok": 2}

#: Decoders with experts.
EXPERTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("MixtralForCausalLM", {**_SMALL, "num_local_experts": 5}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {
        **_FOUR, "num_hidden_layers": 3, "num_experts_per_tok": 3, "moe_intermediate_size": 14, "mlp_only_layers": [1],
        "head_dim": 8, "norm_topk_prob": True,
    }),
    "qwen2_moe": ("Qwen2MoeForCausalLM", {
        **_FOUR, "moe_intermediate_size": 14, "shared_expert_intermediate_size": 10, "use_sliding_window": True,
        "sliding_window": 4,
    }),
    "olmoe": ("OlmoeForCausalLM", _FOUR),
    "deepseek_v2": ("DeepseekV2ForCausalLM", {
        **_DEEPSEEK, "q_lora_rank": None, "routed_scaling_factor": 1.5, "topk_method": "group_limited_greedy",
    }),
    "deepseek_v3": ("DeepseekV3ForCausalLM", {**_DEEPSEEK, "attention_bias": True}),
    "gpt_oss": ("GptOssForCausalLM", {
        **_SMALL, "num_hidden_layers": 3, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8,
        "sliding_window": 4,
    }),
}  # fmt: skip

_BERT = {**_SIZES, "num_hidden_layers": 2, "max_position_embeddings": 20, "type_vocab_size": 3}
_BERT |= {"pad_token_id": PADDING}

#: Encoders.
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertModel", {**_BERT, "hidden_act": "relu"}),
    "bert masked": ("BertForMaskedLM", {**_BERT, "hidden_act": "gelu_new"}),
    "bert classes": ("BertForSequenceClassification", {**_BERT, "num_labels": 5}),
    "bert choices": ("BertForMultipleChoice", {**_BERT, "classifier_dropout": 0.2}),
    "bert spans": ("BertForQuestionAnswering", _BERT),
    "roberta": ("RobertaModel", _BERT),
    "roberta masked": ("RobertaForMaskedLM", {**_BERT, "hidden_act": "relu"}),
    "roberta classes": ("RobertaForSequenceClassification", {**_BERT, "num_labels": 5}),
    "roberta choices": ("RobertaForMultipleChoice", _BERT),
    "roberta spans": ("RobertaForQuestionAnswering", _BERT),
}
ALL = CASES | EXPERTS | ENCODERS


def family_of_case(case: str) -> Family:
    """Return the family of a case."""
    return family_of(ALL[case][0])


def config_of(case: str, **changes: Any) -> Any:
    """Return the Hugging Face configuration of a case."""
    architecture, settings = ALL[case]
    return getattr(transformers, architecture).config_class(**{**settings, **changes})


def our_config_of(case: str, **changes: Any) -> Any:
    """Convert the configuration of a case, with further or changed fields, into ours."""
    return family_of_case(case).config(config_of(case, **changes).to_dict())


def twin_of(case: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """Return a model of a case with random values, so that no two elements are equal by design."""
    generator = torch.Generator().manual_seed(0)
    kind, config = getattr(transformers, ALL[case][0]), config_of(case, **changes)
    if case in ENCODERS:
        twin = kind(config).to(dtype)
    else:
        twin = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    assert type(twin) is kind, "a case names the class of its configuration"
    with torch.no_grad():
        for tensor in twin.parameters() if case not in EXPERTS else twin.state_dict().values():
            values = torch.randn(tensor.shape, generator=generator)
            tensor.copy_(values * 0.2 if case in ENCODERS else values)
    return twin


class ExactNorm(nn.Module):
    """Normalise like a family's RMSNorm, but in the dtype of the input; Hugging Face's module rounds
    float64 to float32.
    """

    def __init__(self, source: nn.Module, eps: float, offset: float) -> None:
        nn.Module.__init__(self)
        self.weight, self.eps, self.offset = source.weight, eps, offset

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight + self.offset, self.eps)


class ExactGelu(nn.Module):
    """Approximate gelu with all digits of its constants; BLOOM's module has eight digits."""

    def __init__(self) -> None:
        nn.Module.__init__(self)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x, approximate="tanh")


def exact_twin(case: str, **changes: Any) -> Any:
    """Return a model in evaluation mode that computes in float64 throughout, if calls of experts run
    inside :func:`tests.oracles.float32_as_float64`.

    Experts can be divided among four ranks, and the features of an expert between two.
    """
    changes = {"attn_implementation": attention_of(case), **changes}
    if case in EXPERTS:
        changes = {"num_hidden_layers": 4, "num_attention_heads": 4, **changes}
        if case.startswith("deepseek"):
            changes = {"num_key_value_heads": 4, "n_routed_experts": 8, "n_group": 4, **changes}
        elif case != "olmoe":  # its norms of queries have as many features as the residual stream
            changes = {"head_dim": 8, **changes}
        changes = {"num_local_experts": 4, **changes} if case == "mixtral" else changes
        # Fused experts do not support float64.
        changes = {"experts_implementation": "eager", **changes}
    twin = normalise_exactly(twin_of(case, torch.float64, **changes).eval())
    if case not in ENCODERS:
        with torch.no_grad():
            for tensor in (*twin.parameters(), *correction_biases(twin)):
                tensor.mul_(0.1)
    return twin


def correction_biases(twin: nn.Module) -> list[Tensor]:
    """Return the buffers that balance the experts of DeepSeek's models."""
    return [b for name, b in twin.named_buffers() if name.endswith("e_score_correction_bias")]


def eager_in_float64(module: nn.Module, *inputs: Any, **options: Any) -> Any:
    """Return the result of the eager attention of a module's own code, in float64 throughout."""
    with float32_as_float64():
        own_code = sys.modules[type(module).__module__]
        return own_code.eager_attention_forward(module, *inputs, **options)


def attention_of(case: str) -> str:
    """Return the name of an attention that computes a family's attention in float64."""
    if case in (*WITH_SLOPES, "gpt_oss"):  # fused attention does not support sinks
        return "eager"
    if case != "gemma2":
        return "sdpa"
    transformers.AttentionInterface.register("eager_in_float64", eager_in_float64)
    transformers.AttentionMaskInterface.register("eager_in_float64", eager_mask)
    return "eager_in_float64"


def normalise_exactly(twin: nn.Module) -> nn.Module:
    """Replace all norms of a model by norms that compute in the dtype of their input."""
    for module in list(twin.modules()):
        for name, child in module.named_children():
            kind = type(child)
            if kind.__name__.endswith("RMSNorm"):
                eps = getattr(child, "variance_epsilon", None) or child.eps
                offset = 1.0 if "Gemma" in kind.__name__ else 0.0
                setattr(module, name, type("Exact", (ExactNorm, kind), {})(child, eps, offset))
            if kind.__name__ == "BloomGelu":
                setattr(module, name, type("Exact", (ExactGelu, kind), {})())
    return twin
