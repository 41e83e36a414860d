"""DeepSeek-V2 and DeepSeek-V3: latent attention, and experts that are selected by groups."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lightning_megatron.swap.families.experts import (
    EXPERT_NAMES,
    MLP,
    PACKED_EXPERTS,
    PARTS,
    mixture,
)
from lightning_megatron.swap.families.fields import NO_OUTPUTS, Field, Values, only, refusal
from lightning_megatron.swap.families.layer_names import LatentNames
from lightning_megatron.swap.families.llama import (
    ATTENTION_BIAS,
    COMMON,
    LLAMA_NAMES,
    OUTDATED,
    like_llama,
)
from lightning_megatron.swap.families.rotary import rotary_fields

_ATTENTION = "model.layers.{}.self_attn"
_NAMES = replace(
    LLAMA_NAMES,
    latent=LatentNames(
        query_down=f"{_ATTENTION}.q_a_proj",
        query_norm=f"{_ATTENTION}.q_a_layernorm",
        query_up=f"{_ATTENTION}.q_b_proj",
        query=f"{_ATTENTION}.q_proj",
        key_value_down=f"{_ATTENTION}.kv_a_proj_with_mqa",
        key_value_norm=f"{_ATTENTION}.kv_a_layernorm",
        key_value=f"{_ATTENTION}.kv_b_proj",
    ),
    experts=replace(
        EXPERT_NAMES,
        bias=f"{MLP}.gate.e_score_correction_bias",
        shared_up=tuple(f"{MLP}.shared_experts.{part}" for part in PARTS[:2]),
        shared_down=f"{MLP}.shared_experts.{PARTS[2]}",
    ),
)
_NO_CODE = "only these routers are implemented"
#: Settings of losses that only the code of the first releases has, which Hugging Face's class and
#: this package do not compute; and a size that follows from others.
_SKIPPED = "aux_loss_alpha seq_aux ep_size qk_head_dim"
#: Names of the sizes of latent vectors and heads in ``LatentAttentionConfig``.
_LATENT = {
    "kv_lora_rank": "key_value_rank",
    "q_lora_rank": "query_rank",
    "qk_nope_head_dim": "plain_dim",
    "qk_rope_head_dim": "rotary_dim",
    "v_head_dim": "value_dim",
}


def _latent_attention(values: Values) -> Mapping[str, Any]:
    sizes = {ours: values[name] for name, ours in _LATENT.items()}
    # Rotary positions are those of the rotated part of a head, which Hugging Face calls head_dim.
    return {"latent_attention": sizes, "head_dim": None, "attention_scale": _scale(values)}


def _scale(values: Values) -> float | None:
    """Return the factor of scores, which grows with the supported length; None without a factor.

    Source: Peng et al. 2023 (yarn), section 3.4.
    """
    growth = values["rope_parameters"].get("mscale_all_dim")
    factor = values["rope_parameters"].get("factor")
    if not growth or factor is None or factor <= 1:
        return None
    head_dim = values["qk_nope_head_dim"] + values["qk_rope_head_dim"]
    return float(head_dim**-0.5 * (0.1 * growth * math.log(factor) + 1.0) ** 2)


def _later_layers(values: Values) -> Mapping[str, Any]:
    num_layers = values["num_hidden_layers"]
    num_dense = values["first_k_dense_replace"] or 0
    return {"layers": tuple(layer >= num_dense for layer in range(num_layers)) if num_dense else 1}


def _shared(values: Values) -> Mapping[str, Any]:
    count = values["n_shared_experts"]
    return {"shared_ffn_hidden_size": count * values["moe_intermediate_size"] if count else None}


_COMMON = (
    *COMMON,
    *rotary_fields(),
    Field("kv_lora_rank", _latent_attention),
    *map(Field, _LATENT),
    ATTENTION_BIAS,
    only("output_router_logits", NO_OUTPUTS, False, None),
    only("moe_layer_freq", "all layers after the dense ones have experts", 1, None),
)
_EXPERTS = (
    Field("n_routed_experts", "num_experts"),
    Field("num_experts_per_tok", "top_k"),
    Field("moe_intermediate_size", "ffn_hidden_size"),
    Field("n_shared_experts", _shared),
    Field("first_k_dense_replace", _later_layers),
    Field("routed_scaling_factor", "score_scale"),
)


def _greedy_groups(values: Values) -> Mapping[str, Any]:
    if values["topk_method"] == "greedy":
        return {}
    names = {"n_group": "num_groups", "topk_group": "top_k_groups"}
    for name in names:
        if values[name] is None:
            raise refusal(name, None, "a number", "experts are selected from the best groups")
    return {target: values[name] for name, target in names.items()}


DEEPSEEK_V2 = like_llama(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    (
        *_COMMON,
        only("mlp_bias", "experts have no biases", False, None),
        only("scoring_func", _NO_CODE, "softmax"),
        only(
            "norm_topk_prob",
            "versions of transformers disagree about whether it counts",
            False,
            None,
        ),
        *mixture(
            *_EXPERTS,
            Field("topk_method", _greedy_groups, ("greedy", "group_limited_greedy"), _NO_CODE),
            Field("n_group"),
            Field("topk_group"),
            scoring="softmax",
            normalize_top_k=False,
            best_of_group=1,
        ),
    ),
    _NAMES,
    packed=PACKED_EXPERTS,
    skipped=_SKIPPED,
    rotary_interleaved=True,
)

_V3 = like_llama(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    (
        *_COMMON,
        Field(
            "rope_interleave",
            lambda values: {"rotary_interleaved": bool(values["rope_interleave"])},
        ),
        only("scoring_func", _NO_CODE, "sigmoid"),
        only("topk_method", _NO_CODE, "noaux_tc"),
        *mixture(
            *_EXPERTS,
            Field("norm_topk_prob", "normalize_top_k"),
            Field("n_group", "num_groups"),
            Field("topk_group", "top_k_groups"),
            scoring="sigmoid",
            expert_bias=True,
        ),
    ),
    _NAMES,
    packed=PACKED_EXPERTS,
    skipped=f"{_SKIPPED} num_nextn_predict_layers num_mtp_layers",
)
# Layers for multi-token prediction are not trained.
DEEPSEEK_V3 = replace(_V3, ignored=(*OUTDATED, r"model\.layers\.61\..*"))

FAMILIES = (DEEPSEEK_V2, DEEPSEEK_V3)
