"""Layout of trained parameters in flat buffers: their order, buckets and parts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch.optim import Optimizer

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.optimizer.shard_granularity import (
    ShardGranularity,
    check_granularity,
    finest_granularity,
)
from lightning_megatron.plan.buckets import (
    BufferPlan,
    FlatParameter,
    plan_by_elements,
    plan_by_parameters,
)

#: Bucket groups besides those of the chunks of a pipeline stage: gradients that need a sum over
#: another axis first, and gradients of parameters outside of the pipelined model.
LATE_GROUP = -2
OUTSIDE_GROUP = -1


@dataclass(frozen=True)
class DistributedOptimizerConfig:
    """Dtypes and partitioning of the trained parameters.

    Args:
        main_dtype: Dtype of the main parameters of half-precision parameters; None trains the
            parameters themselves.
        gradient_dtype: Dtype of the accumulated gradients of half-precision parameters; None means
            ``main_dtype``.
        zero: ZeRO stage: 1 shards the main parameters over the data-parallel ranks, 0 replicates
            them.
        slices: Granularity of a rank's part: ``elements``, complete ``parameters``, or ``auto`` for
            the finest granularity that the optimizer supports.
        bucket_size: Approximate size of one gradient message (elements).
        moments_dtype: Dtype of Adam's moments if the fused kernel updates them.
        exchanges_rows: Whether :class:`RowSums` may exchange gradients of embeddings by rows. This
            needs a decision on the host in each step, which a captured CUDA graph cannot make.
    """

    main_dtype: torch.dtype | None = None
    gradient_dtype: torch.dtype | None = None
    zero: int = 1
    slices: Literal["auto", "elements", "parameters"] = "auto"
    bucket_size: int = 40_000_000
    moments_dtype: torch.dtype = torch.float32
    exchanges_rows: bool = True


class BufferPlanner:
    """Assignment of parameters to buckets, and of parts of the buckets to data-parallel ranks.

    Args:
        mesh: Process groups of this rank.
        config: Dtypes and partitioning.
        chunk_of: Function that returns the chunk of this stage that contains a parameter; None for
            a parameter outside of the pipelined model.
        stacks: Names of parameters that one matrix product reads, from the first row to the last.
            They are adjacent in the buffer if they are trained in the same way.
    """

    def __init__(
        self,
        mesh: ParallelMesh,
        config: DistributedOptimizerConfig,
        chunk_of: Callable[[str], int | None],
        stacks: Iterable[tuple[str, ...]],
    ) -> None:
        self._mesh = mesh
        self._config = config
        self._chunk_of = chunk_of
        self._stack_of = {
            name: (number, stack) for number, stack in enumerate(stacks) for name in stack
        }
        #: Tied parameters that each have a separate bucket, so that both stages divide it equally.
        self.ties_alone: set[str] = set()

    def granularity_for(self, optimizer: Optimizer) -> ShardGranularity:
        """Return the granularity at which the ranks divide an optimizer's parameters.

        Raises:
            UnsupportedError: If the optimizer needs whole parameters, but ranks hold parts of them.
        """
        if self._mesh.data.size == 1 and self._mesh.model.size == 1:
            return "model"
        granularity = finest_granularity(optimizer)
        mesh = self._mesh
        etp = mesh.etp.size if mesh.tp.size == 1 else 1
        sizes = {"tp": mesh.tp.size, "etp": etp, "pp": mesh.pp.size, "ep": mesh.ep.size}
        check_granularity(optimizer, granularity, sizes)
        if self._config.zero == 0 or granularity == "model":
            return "model"
        if self._config.slices == "elements" and granularity != "elements":
            raise UnsupportedError(
                "optimizer_slices 'elements' needs an optimizer that treats every element alike: "
                f"{type(optimizer).__name__} uses whole parameters. The update of a part would "
                "differ from that of the whole parameter. Use optimizer_slices='auto' or "
                "'parameters', or zero=0."
            )
        return granularity if self._config.slices == "auto" else self._config.slices

    def plan(
        self,
        sizes: Mapping[str, int],
        granularity: ShardGranularity,
        num_copies: int,
        partial: Collection[str],
        tied: Collection[str],
    ) -> BufferPlan:
        """Plan one flat buffer.

        Args:
            sizes: Number of elements of each parameter by name, in the order of the model
                (elements).
            granularity: Granularity at which the ranks divide the parameters.
            num_copies: Number of ranks that have the same parameters (ranks).
            partial: Parameters whose gradients are partial sums over tp.
            tied: Parameters with a copy on another pipeline stage.
        """
        late = set(partial)
        if granularity == "elements":
            self.ties_alone.update(tied)
        else:
            # The two stages may divide their copies differently, so the full gradients are summed
            # over the stages before the reduction.
            late.update(tied)
        pieces = []
        for name in self._with_neighbours(sizes):
            group = LATE_GROUP if name in late else self._group_of(name)
            stack, _ = self._stack_of.get(name, (None, ()))
            pieces.append(FlatParameter(name, sizes[name], group, name in self.ties_alone, stack))
        pieces.sort(key=lambda piece: piece.group)
        num_parts = 1 if granularity == "model" else num_copies
        if granularity == "parameters":
            return plan_by_parameters(pieces, num_parts)
        return plan_by_elements(pieces, num_parts, self._config.bucket_size)

    def _with_neighbours(self, names: Collection[str]) -> list[str]:
        """Order names so that the members of a stack are next to each other.

        Buffers are laid out from the last name to the first, so the member with the last rows of a
        stack comes first in this order.
        """
        ordered: dict[str, None] = {}
        for name in names:
            _, stack = self._stack_of.get(name, (0, (name,)))
            ordered |= dict.fromkeys(member for member in reversed(stack) if member in names)
        return list(ordered)

    def _group_of(self, name: str) -> int:
        """Return a parameter's bucket group; gradients of one group are complete together."""
        if self._mesh.pp.size == 1:
            return 0
        chunk = self._chunk_of(name)
        return OUTSIDE_GROUP if chunk is None else chunk
