"""Base of the configurations of models, and checks of sizes, layouts and sequence lengths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.plan.context import check_context_length, context_multiple
from lightning_megatron.plan.experts import ExpertsConfig
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.plan.model_shape import LossChunk
from lightning_megatron.plan.partition import LayerCosts, LayerPartition, partition_of
from lightning_megatron.plan.shards import attention_ranges, even_range


@dataclass(frozen=True)
class NormPosition:
    """Norms of a model with a norm position, besides those of its embedding."""

    #: Norm of each sublayer's input; with ``post`` that of each residual sum.
    has_input_norms: bool = True
    #: Norm of each sublayer's output, before the residual sum.
    has_output_norms: bool = False
    #: Norm of the last block's output.
    has_final_norm: bool = True

    @property
    def num_per_block(self) -> int:
        """Return the number of norms of the residual stream in a block."""
        return 2 * (self.has_input_norms + self.has_output_norms)


#: What follows from each norm position. ``models.gpt_block`` chooses the class of the blocks.
NORM_POSITIONS: Mapping[str, NormPosition] = {
    "pre": NormPosition(),
    "post": NormPosition(has_final_norm=False),
    "sandwich": NormPosition(has_output_norms=True),
    "output": NormPosition(has_input_norms=False, has_output_norms=True),
}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes of a model with numbered layers, and how they divide over a layout.

    It has no fields: those of a configuration stay in the order in which it lists them. It is a
    dataclass because the command line reads nested fields of dataclasses without other bases.
    """

    if TYPE_CHECKING:
        # Fields of some configurations; others derive them.
        @property
        def hidden_size(self) -> int: ...
        @property
        def num_layers(self) -> int: ...
        @property
        def num_heads(self) -> int: ...
        @property
        def ffn_size(self) -> int: ...
        @property
        def max_seq_length(self) -> int: ...
        @property
        def attention_dropout(self) -> float: ...
        def _costs(self, loss_chunk: LossChunk, tp: int) -> LayerCosts: ...

    @property
    def experts(self) -> ExpertsConfig | None:
        """Return the mixture of experts of all or some layers; None without experts."""
        return None

    @property
    def kv_heads(self) -> int:
        """Return the number of key/value heads."""
        return self.num_heads

    @property
    def head_size(self) -> int:
        """Return the size of a query or key head (elements)."""
        return self.hidden_size // self.num_heads

    def partition(self, layout: ParallelLayout, loss_chunk: LossChunk = None) -> LayerPartition:
        """Return the number of layers of each virtual stage, given by the layout or else by cost.

        ``loss_chunk`` is the number of tokens whose logits exist at once; None stores all logits.
        It has no effect on encoders.
        """
        return partition_of(self._costs(loss_chunk, layout.tp), layout)

    def check_layout(
        self, layout: ParallelLayout, sequence_parallel: bool = False, seq_length: int | None = None
    ) -> None:
        """Raise if this model cannot be divided over a layout. No process group is needed.

        The length of sequences (tokens) is checked if it is known.
        """
        attention_ranges(self.num_heads, self.kv_heads, self.head_size, layout.tp, 0)
        even_range(self.ffn_size, layout.tp, 0, what="ffn_hidden_size")
        self.partition(layout)
        check_expert_axes(layout, self.experts)
        if seq_length is not None:
            self.check_seq_length(seq_length, layout.tp if sequence_parallel else 1, layout.cp)

    def check_seq_length(self, seq_length: int, sequence_shards: int = 1, cp: int = 1) -> None:
        """Raise if sequences do not suit this model, as :func:`check_length` does."""
        check_length(seq_length, self.max_seq_length, sequence_shards, cp)


def check_expert_axes(layout: ParallelLayout, experts: ExpertsConfig | None) -> None:
    """Raise if a model's experts, or their absence, do not fit the expert axes of a layout."""
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
                f"{name} ({value}) needs a model with experts, because it divides experts among "
                f"ranks. This model has no experts. Leave {name} out. If you wrote experts in an "
                "nn.ModuleList, give the list the kind 'experts' in tensor_parallel_plan; if in "
                "stacked parameters of three dimensions, their module. It tells what is missing."
            )


def check_length(seq_length: int, max_seq_length: int, sequence_shards: int, cp: int = 1) -> None:
    """Raise if sequences are too long, or do not divide over the ranks that share them.

    ``sequence_shards`` is the size of tp under sequence parallelism, else 1.
    """
    if seq_length > max_seq_length:
        multiple = context_multiple(cp, sequence_shards)
        longest = max_seq_length // multiple * multiple or max_seq_length
        # Callers pad rows to the multiple, so the rows of the user may be shorter than seq_length.
        padding = f", and the layout needs rows of a multiple of {multiple} tokens"
        raise ParallelPlanError(
            f"seq_length ({seq_length}) must not exceed max_seq_length ({max_seq_length}), because "
            f"the model has no later positions{padding if longest < max_seq_length else ''}. Use "
            f"at most {longest} tokens or a larger max_seq_length."
        )
    check_context_length(seq_length, cp, sequence_shards)
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


def check_padding(padding_id: int | None, vocab_size: int) -> None:
    """Raise if the padding token is not in the vocabulary."""
    is_legal = padding_id is None or 0 <= padding_id < vocab_size
    rule = f"be in [0, {vocab_size}) or None"
    require(is_legal, "padding_id", padding_id, rule, "it is a token of the vocabulary")


def require(holds: bool, name: str, value: object, rule: str, why: str) -> None:
    """Raise a ``ParallelPlanError`` if a setting breaks a rule.

    ``rule`` are the words after "must", ``why`` those after "because".
    """
    if not holds:
        raise ParallelPlanError(f"{name} ({value}) must {rule}, because {why}. Change {name}.")
