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


def _by_name(*kinds: tuple[Any, str]) -> Mapping[str, Any]:
    return {name: kind for kind, names in kinds for name in names.split()}


_ROTARY = _by_name(
    (str | None, "rope_type type"),
    (bool | None, "truncate"),
    (Factor | None, "rope_theta factor low_freq_factor high_freq_factor"),
    (Factor | None, "attention_factor beta_fast beta_slow"),
    (NotNegative | None, "mscale mscale_all_dim"),
    (list[Factor] | None, "short_factor long_factor"),
    (Share | None, "partial_rotary_factor"),
    # Some kinds divide by its logarithm.
    (
        Annotated[int, Range(minimum=2, maximum=2**31 - 1)] | None,
        "original_max_position_embeddings",
    ),
)

#: Legal values of each field, by name; for a mapping by the names of its entries.
KINDS = _by_name(
    (Size, "vocab_size hidden_size n_embd d_model intermediate_size num_attention_heads n_head"),
    (Size, "n_heads type_vocab_size num_experts_per_tok moe_intermediate_size num_experts"),
    (Size, "shared_expert_intermediate_size num_local_experts n_routed_experts n_group topk_group"),
    (Size, "kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim query_pre_attn_scalar"),
    (Size | None, "num_key_value_heads head_dim n_inner num_labels q_lora_rank qk_head_dim"),
    (Layers, "num_hidden_layers n_layer n_layers decoder_sparse_step no_rope_layer_interval"),
    (Layers | None, "sliding_window_pattern"),
    (Count, "max_position_embeddings n_positions max_seq_len"),
    (Count | None, "sliding_window original_max_position_embeddings"),
    (Number | None, "n_shared_experts first_k_dense_replace max_window_layers"),
    (list[Number] | None, "mlp_only_layers no_rope_layers"),
    (Token | None, "pad_token_id"),
    (Probability, "hidden_dropout hidden_dropout_prob attention_probs_dropout_prob"),
    (Probability, "attn_pdrop embd_pdrop resid_pdrop"),
    (Probability | None, "attention_dropout classifier_dropout"),
    (Small, "rms_norm_eps layer_norm_eps layer_norm_epsilon norm_epsilon"),
    (Annotated[float, Range(minimum=0, maximum=1000)], "initializer_range"),
    (Factor, "embedding_multiplier logits_scaling attention_multiplier residual_multiplier"),
    (Factor, "routed_scaling_factor"),
    (Factor | None, "attn_logit_softcapping final_logit_softcapping rope_local_base_freq"),
    (Factor | None, "rope_theta rotary_emb_base"),
    (NotNegative | None, "router_aux_loss_coef"),
    (Share | None, "partial_rotary_factor rotary_pct"),
    (_ROTARY, "rope_parameters rope_scaling"),
    (bool, "tie_word_embeddings mlp_bias norm_topk_prob use_parallel_residual qkv_bias"),
    (bool, "scale_attn_weights"),
    (bool | None, "attention_bias use_sliding_window output_router_logits rope_interleave"),
    (bool | None, "use_bidirectional_attention"),
    (str, "hidden_act activation_function topk_method"),
    (str | None, "hidden_activation"),
    (list[str] | None, "layer_types"),
    (dict[Any, Any] | None, "attn_config id2label"),
)


def check_kind(name: str, value: Any, kind: Any, family: str) -> None:
    """Refuse a value whose type or range is wrong for its field.

    Args:
        kind: Kind as in :func:`~lightning_megatron.plan.settings.coerced`, or a mapping of the
            kinds of nested fields; other nested fields may have any value.
        family: Name of the family, for errors.
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
