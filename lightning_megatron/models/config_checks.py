"""Validation of configurations, layouts and sequence lengths."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from lightning_megatron.errors import ParallelPlanError, UnsupportedError
from lightning_megatron.plan.experts import ExpertsConfig
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.plan.shards import attention_ranges, even_range

if TYPE_CHECKING:
    from lightning_megatron.models.config import GPTConfig

Activation = Literal["gelu", "gelu_tanh", "relu", "swiglu", "geglu", "geglu_tanh"]


def check_config(config: GPTConfig) -> None:
    """Raise if settings of a configuration are inconsistent.

    Raises:
        ParallelPlanError: If two settings contradict each other.
    """
    padding = config.padding_id
    rule = f"lie in [0, {config.vocab_size}) or be None"
    _require(
        padding is None or 0 <= padding < config.vocab_size,
        "padding_id",
        padding,
        rule,
        "it is a token",
    )
    _check_heads(config)
    _check_rotary(config)
    _check_combinations(config)


def check_axes(layout: ParallelLayout, model: str, experts: ExpertsConfig | None = None) -> None:
    """Raise if a layout needs expert or context parallelism that the model does not support.

    Args:
        layout: Sizes of the axes.
        model: Name of the kind of model, for errors.
        experts: Mixture of experts of the model; None means none.

    Raises:
        ParallelPlanError: If experts do not divide by the layout, or the layout has expert axes and
            the model has no experts.
        UnsupportedError: If cp is above 1.
    """
    check_expert_axes(layout, experts)
    if layout.cp > 1:
        raise UnsupportedError(
            f"cp ({layout.cp}) is not available for {model}, because its attention sees whole "
            "sequences. Use cp 1."
        )


def check_expert_axes(layout: ParallelLayout, experts: ExpertsConfig | None) -> None:
    """Raise if the experts cannot be divided over the expert axes of a layout.

    Args:
        layout: Sizes of the axes.
        experts: Mixture of experts of the model; None means none.

    Raises:
        ParallelPlanError: If sizes do not divide, or the layout has expert axes without experts.
    """
    if experts is not None:
        even_range(experts.num_experts, layout.ep, 0, what="num_experts", axis="ep")
        even_range(
            experts.ffn_hidden_size, layout.etp, 0, what="ffn_hidden_size of experts", axis="etp"
        )
        if experts.shared_ffn_hidden_size is not None:
            even_range(experts.shared_ffn_hidden_size, layout.tp, 0, what="shared_ffn_hidden_size")
        return
    for name, value, neutral in (("ep", layout.ep, 1), ("etp", layout.etp, layout.tp)):
        if value != neutral:
            raise ParallelPlanError(
                f"{name} ({value}) needs a model with experts, because it says how experts are "
                f"divided among ranks. This model has none. Leave {name} out."
            )


def check_length(seq_length: int, max_seq_length: int, sequence_shards: int) -> None:
    """Raise if sequences are too long, or do not divide over the ranks that share them.

    Args:
        seq_length: Length of the sequences (tokens).
        max_seq_length: Longest sequence that the model supports (tokens).
        sequence_shards: Size of tp under sequence parallelism, else 1 (ranks).

    Raises:
        ParallelPlanError: If the length is too large or not divisible.
    """
    if seq_length > max_seq_length:
        raise ParallelPlanError(
            f"seq_length ({seq_length}) must not exceed max_seq_length ({max_seq_length}), because "
            f"the model knows no later position. Use at most {max_seq_length} tokens or a larger "
            "max_seq_length."
        )
    if seq_length % sequence_shards:
        below = seq_length // sequence_shards * sequence_shards
        legal = " or ".join(
            str(n) for n in (below, below + sequence_shards) if 0 < n <= max_seq_length
        )
        raise ParallelPlanError(
            f"seq_length ({seq_length}) must be a multiple of tp ({sequence_shards}) under "
            "sequence parallelism, because each rank holds an equal part of the sequence. Use "
            f"{legal or 'another tp'}, or sequence_parallel=False."
        )


def _check_heads(config: GPTConfig) -> None:
    if config.head_dim is None and config.hidden_size % config.num_heads:
        raise ParallelPlanError(
            f"hidden_size ({config.hidden_size}) must be a multiple of num_heads "
            f"({config.num_heads}), because each head takes an equal part. Use a hidden_size of "
            f"{-(-config.hidden_size // config.num_heads) * config.num_heads}, or give head_dim."
        )
    attention_ranges(config.num_heads, config.kv_heads, config.head_size, 1, 0)


def _check_rotary(config: GPTConfig) -> None:
    if config.position != "rotary":
        for name in ("rotary_dim", "rotary_scaling"):
            value = getattr(config, name)
            _require(
                value is None,
                name,
                value,
                "be None",
                f"position ({config.position}) turns no angles",
            )
        return
    if config.rotary_dim is None and config.head_size % 2:
        raise ParallelPlanError(
            f"head_dim ({config.head_size}) must be even, because rotary positions turn pairs. Use "
            f"{config.head_size + 1} or learned positions."
        )
    size = config.rotary_size
    holds = size % 2 == 0 and 2 <= size <= config.head_size
    rule = f"be even and at most head_dim ({config.head_size})"
    _require(holds, "rotary_dim", size, rule, "rotary positions turn pairs of a head's elements")
    if config.rotary_scaling is not None and config.rotary_scaling.kind == "longrope":
        found = len(config.rotary_scaling.short_factors)
        why = f"each pair of rotary_dim ({size}) elements has a factor"
        _require(
            found == size // 2,
            "the number of rotary_scaling's factors",
            found,
            f"be {size // 2}",
            why,
        )


def _check_combinations(config: GPTConfig) -> None:
    layers = config.window_layers
    if layers is not None:
        why = f"each of num_layers ({config.num_layers}) has a window or has none"
        _require(
            len(layers) == config.num_layers,
            "the number of window_layers",
            len(layers),
            "be num_layers",
            why,
        )
        has_window = config.sliding_window is not None
        _require(
            has_window,
            "window_layers",
            layers,
            "be None without sliding_window",
            "there is no window",
        )
    if config.experts is not None:
        config.experts.check_num_layers(config.num_layers)
        why = "experts have none, and layers without experts are like them"
        _require(
            not config.has_mlp_bias, "mlp_bias", config.has_mlp_bias, "be False with experts", why
        )
    is_legal = not config.norm_offset or config.norm == "rmsnorm"
    why = f"norm ({config.norm}) adds no offset to its weight, only a bias to its output"
    _require(is_legal, "norm_offset", config.norm_offset, "be 0", why)
    if config.parallel_residual:
        why = "norms after the residual sums have an order"
        _require(
            config.norm_position == "pre", "norm_position", config.norm_position, "be pre", why
        )


def _require(holds: bool, name: str, value: object, rule: str, why: str) -> None:
    if not holds:
        raise ParallelPlanError(f"{name} ({value}) must {rule}, because {why}. Change {name}.")
