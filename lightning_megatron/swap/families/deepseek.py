"""DeepSeek-V2 and DeepSeek-V3: latent attention, and experts that are selected by groups."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lightning_megatron.plan.latent_attention import LatentAttentionConfig
from lightning_megatron.swap.families.experts import (
    EXPERT_NAMES,
    MLP,
    OWN_SETTINGS,
    PACKED_EXPERTS,
    PARTS,
    mixture,
)
from lightning_megatron.swap.families.field_kinds import Size
from lightning_megatron.swap.families.fields import (
    NO_OUTPUTS,
    ConfigTable,
    Field,
    Values,
    only,
    refusal,
)
from lightning_megatron.swap.families.layer_names import LatentNames
from lightning_megatron.swap.families.llama import (
    ACTIVATION,
    ATTENTION_BIAS,
    LLAMA_NAMES,
    OUTDATED,
    like_llama,
    sizes,
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
#: Settings of losses that only the code of the first releases has. Hugging Face's class and this
#: package do not compute these losses.
_SKIPPED = "aux_loss_alpha seq_aux ep_size"


def _rotary_fields(family: str) -> tuple[Field, ...]:
    """Return the rules for positions, which rotate ``qk_rope_head_dim`` elements of a head."""
    first, *others = rotary_fields()

    def rule(values: Values) -> Mapping[str, Any]:
        size = values["qk_rope_head_dim"]
        for name, expected in (
            ("head_dim", size),
            ("qk_head_dim", size + values["qk_nope_head_dim"]),
        ):
            if values[name] not in (None, expected):
                reason = "the sizes of a head follow from qk_nope_head_dim and qk_rope_head_dim"
                raise refusal(family, name, values[name], reason, (expected, None))
        rotate = first.target
        assert callable(rotate), "the rule of rope_parameters is a function"
        fields = dict(rotate({**values, "head_dim": size}))
        del fields["rotary_dim"]
        return {**fields, "attention_scale": _scale(values)}

    return (replace(first, target=rule), *others, Field("head_dim"), Field("qk_head_dim"))


def _scale(values: Values) -> float | None:
    """Return the factor of scores, which grows with the supported length; None without a factor.

    Source: Peng et al. 2023 (yarn), section 3.4.
    """
    rope = values["rope_scaling"] or values["rope_parameters"] or {}
    growth = rope.get("mscale_all_dim")
    factor = rope.get("factor")
    if not growth or factor is None or factor <= 1:
        return None
    head_dim = values["qk_nope_head_dim"] + values["qk_rope_head_dim"]
    return float(head_dim**-0.5 * (0.1 * growth * math.log(factor) + 1.0) ** 2)


def _latents(family: str) -> ConfigTable:
    fields = (
        Field("kv_lora_rank", 512, "key_value_rank"),
        Field("q_lora_rank", 1536, "query_rank"),
        Field("qk_nope_head_dim", 128, "plain_dim"),
        Field("qk_rope_head_dim", 64, "rotary_dim"),
        Field("v_head_dim", 128, "value_dim"),
    )
    return ConfigTable(family, fields, {}, build=LatentAttentionConfig)


def _attention_fields(family: str) -> tuple[Field, ...]:
    return (
        *_rotary_fields(family),
        Field("qk_nope_head_dim", 128),
        Field("qk_rope_head_dim", 64),
        ACTIVATION,
        ATTENTION_BIAS,
        only("output_router_logits", False, NO_OUTPUTS, None),
    )


def _later_layers(values: Values) -> Mapping[str, Any]:
    num_layers = values["num_hidden_layers"]
    num_dense = values["first_k_dense_replace"] or 0
    return {"layers": tuple(layer >= num_dense for layer in range(num_layers)) if num_dense else 1}


def _shared(values: Values) -> Mapping[str, Any]:
    count = values["n_shared_experts"]
    return {"shared_ffn_hidden_size": count * values["moe_intermediate_size"] if count else None}


_NUM_EXPERTS = Field(
    "n_routed_experts", None, "num_experts", aliases=("num_local_experts", "num_experts")
)


def _expert_fields(
    num_layers: int, num_experts: int, top_k: int | None, inner: int, num_shared: int, dense: int
) -> tuple[Field, ...]:
    """Return the rules for experts that both families share, with a family's defaults.

    Args:
        top_k: Experts of a token; None has no default (experts).
        inner: Inner features of an expert (elements).
        dense: Number of first layers without experts.
    """
    return (
        Field("num_hidden_layers", num_layers),
        replace(_NUM_EXPERTS, default=num_experts),
        Field("num_experts_per_tok", top_k, "top_k"),
        Field("moe_intermediate_size", inner, "ffn_hidden_size"),
        Field("n_shared_experts", num_shared, _shared),
        Field("first_k_dense_replace", dense, _later_layers),
        only("moe_layer_freq", 1, "all layers after the dense ones have experts", None),
        OWN_SETTINGS,
    )


def _greedy_groups(values: Values) -> Mapping[str, Any]:
    method = values["topk_method"]
    legal = ("greedy", "group_limited_greedy")
    if method not in legal:
        raise refusal("DeepSeek-V2", "topk_method", method, _NO_CODE, legal)
    if method == "greedy":
        return {}
    names = {"n_group": "num_groups", "topk_group": "top_k_groups"}
    for name in names:
        if values[name] is None:
            reason = "experts are selected from the best groups"
            raise refusal("DeepSeek-V2", name, None, reason, ("a number",))
    return {target: values[name] for name, target in names.items()}


DEEPSEEK_V2 = like_llama(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    "DeepSeek-V2",
    (
        *sizes(102400, 4096, 11008, 32, 32, 2048),
        *_attention_fields("DeepSeek-V2"),
        only("mlp_bias", False, "experts have no biases", None),
    ),
    _NAMES,
    parts={
        "latent_attention": _latents("DeepSeek-V2"),
        "experts": mixture(
            "DeepSeek-V2",
            *_expert_fields(32, 64, None, 1407, 2, 0),
            Field("routed_scaling_factor", 1.0, "score_scale"),
            Field("topk_method", "greedy", _greedy_groups),
            Field("n_group", None, kind=Size | None),
            Field("topk_group", None, kind=Size | None),
            only("scoring_func", "softmax", _NO_CODE),
            only(
                "norm_topk_prob",
                False,
                "versions of transformers disagree about whether it counts",
                None,
            ),
            scoring="softmax",
            normalize_top_k=False,
            best_of_group=1,
        ),
    },
    packed=PACKED_EXPERTS,
    skipped=_SKIPPED,
    rotary_interleaved=True,
)

_V3 = like_llama(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    "DeepSeek-V3",
    (
        *sizes(129280, 7168, 18432, 61, 128, 4096, 128),
        *_attention_fields("DeepSeek-V3"),
        Field(
            "rope_interleave",
            True,
            lambda values: {"rotary_interleaved": bool(values["rope_interleave"])},
        ),
    ),
    _NAMES,
    parts={
        "latent_attention": _latents("DeepSeek-V3"),
        "experts": mixture(
            "DeepSeek-V3",
            *_expert_fields(61, 256, 8, 2048, 1, 3),
            Field("norm_topk_prob", True, "normalize_top_k"),
            Field("routed_scaling_factor", 2.5, "score_scale"),
            Field("n_group", 8, "num_groups"),
            Field("topk_group", 4, "top_k_groups"),
            only("scoring_func", "sigmoid", _NO_CODE),
            only("topk_method", "noaux_tc", _NO_CODE),
            scoring="sigmoid",
            expert_bias=True,
        ),
    },
    packed=PACKED_EXPERTS,
    skipped=f"{_SKIPPED} num_nextn_predict_layers num_mtp_layers",
)
# Layers for multi-token prediction are not trained.
DEEPSEEK_V3 = replace(_V3, ignored=(*OUTDATED, r"model\.layers\.61\..*"))

FAMILIES = (DEEPSEEK_V2, DEEPSEEK_V3)
