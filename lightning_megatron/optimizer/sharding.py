"""Sharding of trained parameters over the data-parallel ranks: layout, and who trains what."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.pending import (
    Pending,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from lightning_megatron.optimizer.shard_granularity import (
    ShardGranularity,
    check_granularity,
    finest_granularity,
)
from lightning_megatron.plan.buckets import (
    BufferPlan,
    FlatParameter,
    Slice,
    plan_by_elements,
    plan_by_parameters,
)
from lightning_megatron.shapes import Shaped

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


@dataclass(frozen=True)
class Zero1Sharding:
    """Sharding of one flat buffer over its replicas, as in ZeRO-1.

    Every rank holds all parameters and gradients of the buffer, and trains one part of each bucket:
    a reduce-scatter averages the gradients of its part, and an all-gather collects the updated
    parts of all ranks. If there is one part, every rank trains the whole buffer: an all-reduce
    averages the gradients, and nothing is gathered (``zero=0``, or an optimizer that needs the
    whole model).

    Buffers, buckets, gathers and 8-bit weights ask this object what a rank owns and which
    collectives run, and do not distinguish the cases themselves. Another sharding, for example one
    that frees the gradients or parameters of other ranks between their uses, is a second class with
    the methods of this one, beside it in this file. :meth:`BufferPlanner.shard` chooses between
    them, and :class:`FlatBuffer` gets its memory from them.

    Args:
        plan: Layout of the buffer, and the part of it that each rank trains.
        part: Index of this rank's part; 0 if the plan has only one part.
        is_expert: Whether the parameters belong to experts, which are replicated over fewer ranks.

    Source: Rajbhandari et al. 2020 (https://arxiv.org/abs/1910.02054).
    """

    plan: BufferPlan
    part: int
    is_expert: bool

    @property
    def is_exclusive(self) -> bool:
        """Return whether no other replica trains this rank's part."""
        return self.plan.num_parts > 1

    @property
    def gathered(self) -> range:
        """Return the numbers of the buckets whose updated parts must be gathered."""
        return range(len(self.plan.buckets) if self.is_exclusive else 0)

    def slices(self) -> tuple[Slice, ...]:
        """List the ranges of parameters that this rank trains, in buffer order."""
        return self.plan.slices(self.part)

    def own_part(self, flat: Shaped[Tensor, "_"], bucket: int) -> Shaped[Tensor, "_"]:
        """Return this rank's part of a bucket of the flat parameters or gradients."""
        start, stop = self.plan.buckets[bucket].part(self.part, self.plan.num_parts)
        return flat[start:stop]

    def start_reduction(
        self, gradients: Shaped[Tensor, "_"], bucket: int, mesh: ParallelMesh, is_whole: bool
    ) -> Pending:
        """Start to average one bucket of the gradients over the replicas, in place.

        Args:
            gradients: Gradients of the buffer.
            bucket: Number of the bucket.
            mesh: Process groups of this rank.
            is_whole: Whether every rank gets the full bucket instead of its part.

        Communication: one reduce-scatter over the data axis, or over that of experts; an all-reduce
        if ranks get whole buckets.
        """
        axis = mesh.replica_axis(self.is_expert)
        whole = self._whole(gradients, bucket)
        if is_whole or not self.is_exclusive:
            return start_all_reduce(whole, axis, "mean")
        return start_reduce_scatter(self.own_part(gradients, bucket), whole, axis, "mean")

    def start_gather(
        self, parameters: Shaped[Tensor, "_"], bucket: int, mesh: ParallelMesh
    ) -> Pending:
        """Start the all-gather of the parts of one bucket of the parameters.

        Args:
            parameters: Parameters of the buffer.
            bucket: Number of the bucket.
            mesh: Process groups of this rank.

        Communication: an all-gather over the data axis, or over that of experts.
        """
        axis = mesh.replica_axis(self.is_expert)
        part = self.own_part(parameters, bucket)
        return start_all_gather(self._whole(parameters, bucket), part, axis)

    def _whole(self, flat: Tensor, bucket: int) -> Tensor:
        planned = self.plan.buckets[bucket]
        return flat[planned.start : planned.stop]


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

    @property
    def gathers(self) -> bool:
        """Return whether updates of parameters end with a gather, the same on all ranks."""
        return self._config.zero > 0

    def shard(
        self,
        sizes: Mapping[str, int],
        granularity: ShardGranularity,
        is_expert: bool,
        partial: Collection[str],
        tied: Collection[str],
    ) -> Zero1Sharding:
        """Plan one flat buffer, and which part of it each rank trains.

        Args:
            sizes: Number of elements of each parameter by name, in the order of the model
                (elements).
            granularity: Granularity at which the ranks divide the parameters.
            is_expert: Whether the parameters belong to experts.
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
        axis = self._mesh.replica_axis(is_expert)
        num_parts = 1 if granularity == "model" else axis.size
        if granularity == "parameters":
            plan = plan_by_parameters(pieces, num_parts)
        else:
            plan = plan_by_elements(pieces, num_parts, self._config.bucket_size)
        return Zero1Sharding(plan, axis.rank if num_parts > 1 else 0, is_expert)

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
