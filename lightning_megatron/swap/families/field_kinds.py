"""Types and ranges of configuration fields that have the same name in all families."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeAlias

from lightning_megatron.errors import CheckpointMismatchError, ParallelPlanError
from lightning_megatron.plan.settings import Count, NotNegative, Probability, Range, coerced, shown

#: Size that can be multiplied by another size and the bytes of an element in 64 bits.
Size: TypeAlias = Annotated[int, Range(minimum=1, maximum=1 << 28)]
#: Number of layers. The maximum prevents that a list of all layers exhausts the memory before the
#: weights are checked.
Layers: TypeAlias = Annotated[int, Range(minimum=1, maximum=10_000)]
Number: TypeAlias = Annotated[int, Range(minimum=0, maximum=1 << 28)]
Share: TypeAlias = Annotated[float, Range(above=0, maximum=1)]
Factor: TypeAlias = Annotated[float, Range(above=0, maximum=1e18)]
Small: TypeAlias = Annotated[float, Range(minimum=0, maximum=1)]
Token: TypeAlias = Annotated[int, Range(minimum=-(1 << 28), maximum=1 << 28)]

_ROTARY: Mapping[str, Any] = {
    **dict.fromkeys(("rope_type", "type"), str | None),
    **dict.fromkeys(("rope_theta", "factor", "low_freq_factor", "high_freq_factor"), Factor | None),
    **dict.fromkeys(("attention_factor", "beta_fast", "beta_slow"), Factor | None),
    **dict.fromkeys(("mscale", "mscale_all_dim"), NotNegative | None),
    **dict.fromkeys(("short_factor", "long_factor"), list[Factor] | None),
    # Some kinds divide by its logarithm.
    "original_max_position_embeddings": Annotated[int, Range(minimum=2, maximum=2**31 - 1)] | None,
    "partial_rotary_factor": Share | None,
    "truncate": bool | None,
}

#: Legal values of each field, by name; for a mapping by the names of its entries.
KINDS: Mapping[str, Any] = {
    **dict.fromkeys(("vocab_size", "hidden_size", "n_embd", "d_model", "intermediate_size"), Size),
    **dict.fromkeys(
        (
            "num_attention_heads",
            "n_head",
            "n_heads",
            "type_vocab_size",
            "num_experts_per_tok",
            "moe_intermediate_size",
            "shared_expert_intermediate_size",
        ),
        Size,
    ),
    **dict.fromkeys(
        ("num_experts", "num_local_experts", "n_routed_experts", "n_group", "topk_group"), Size
    ),
    **dict.fromkeys(("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), Size),
    **dict.fromkeys(("num_key_value_heads", "head_dim", "n_inner", "num_labels"), Size | None),
    **dict.fromkeys(("q_lora_rank", "qk_head_dim"), Size | None),
    **dict.fromkeys(
        (
            "num_hidden_layers",
            "n_layer",
            "n_layers",
            "decoder_sparse_step",
            "no_rope_layer_interval",
        ),
        Layers,
    ),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), Count),
    **dict.fromkeys(("sliding_window", "original_max_position_embeddings"), Count | None),
    **dict.fromkeys(
        ("n_shared_experts", "first_k_dense_replace", "max_window_layers"), Number | None
    ),
    **dict.fromkeys(
        ("hidden_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob"), Probability
    ),
    **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), Probability),
    **dict.fromkeys(("attention_dropout", "classifier_dropout"), Probability | None),
    **dict.fromkeys(
        ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"), Small
    ),
    **dict.fromkeys(
        ("tie_word_embeddings", "mlp_bias", "norm_topk_prob", "use_parallel_residual", "qkv_bias"),
        bool,
    ),
    "scale_attn_weights": bool,
    "rope_interleave": bool | None,
    "query_pre_attn_scalar": Size,
    **dict.fromkeys(("embedding_multiplier", "logits_scaling"), Factor),
    **dict.fromkeys(("attention_multiplier", "residual_multiplier"), Factor),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), Factor | None),
    "rope_local_base_freq": Factor | None,
    "sliding_window_pattern": Layers | None,
    **dict.fromkeys(
        (
            "attention_bias",
            "use_sliding_window",
            "output_router_logits",
            "use_bidirectional_attention",
        ),
        bool | None,
    ),
    **dict.fromkeys(("hidden_act", "activation_function", "topk_method"), str),
    **dict.fromkeys(("rope_theta", "rotary_emb_base"), Factor | None),
    **dict.fromkeys(("partial_rotary_factor", "rotary_pct"), Share | None),
    **dict.fromkeys(("rope_parameters", "rope_scaling"), _ROTARY),
    "initializer_range": Annotated[float, Range(minimum=0, maximum=1000)],
    "hidden_activation": str | None,
    "pad_token_id": Token | None,
    "routed_scaling_factor": Factor,
    "router_aux_loss_coef": NotNegative | None,
    "layer_types": list[str] | None,
    **dict.fromkeys(("mlp_only_layers", "no_rope_layers"), list[Number] | None),
    "attn_config": dict[Any, Any] | None,
    "id2label": dict[Any, Any] | None,
}


def check_kind(name: str, value: Any, kind: Any, family: str) -> None:
    """Refuse a value whose type or range is wrong for its field.

    Args:
        name: Name of the field.
        value: Value of the field.
        kind: Kind as in :func:`~lightning_megatron.plan.settings.coerced`, or a mapping of the
            kinds of nested fields; other nested fields may have any value.
        family: Name of the family, for errors.

    Raises:
        CheckpointMismatchError: With the field, its value and the legal values.
    """
    if not isinstance(kind, Mapping):
        try:
            coerced(f"{name} of a {family} configuration", value, kind)
        except ParallelPlanError as error:
            raise CheckpointMismatchError(f"{error} Correct the configuration.") from error
        return
    if value is None:
        return
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise CheckpointMismatchError(
            f"{name} of a {family} configuration must be a mapping or None, because it describes "
            f"the rotary positions: it is {shown(value)}. Correct the configuration."
        )
    for key, nested in value.items():
        if key in kind:
            check_kind(f"{name}.{key}", nested, kind[key], family)
