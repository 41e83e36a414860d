"""Sharding of trained parameters over the data-parallel ranks: layout, and who trains what."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.pending import (
    Pending,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from lightning_megatron.plan.buckets import (
    BufferPlan,
    FlatParameter,
    Slice,
    plan_by_elements,
    plan_by_parameters,
)
from lightning_megatron.shapes import Shaped

logger = logging.getLogger(__name__)

#: Bucket groups besides those of the chunks of a pipeline stage: gradients that need a sum over
#: another axis first, and gradients of parameters outside of the pipelined model.
LATE_GROUP = -2
OUTSIDE_GROUP = -1
#: Smallest part that one rank may own: ``elements`` of parameters, whole ``parameters``, or only
#: the whole ``model``.
ShardGranularity = Literal["elements", "parameters", "model"]
_STEPS = 3
_COARSER: tuple[ShardGranularity, ...] = ("elements", "parameters", "model")
_SPEED_ONLY = frozenset({"fused", "foreach", "capturable", "differentiable"})
_STEP_ERRORS = (TypeError, ValueError, RuntimeError, NotImplementedError)
#: Group entries that are not settings, or that schedulers change: with a learning rate of zero,
#: all trials would have equal results.
_EXCLUDED_SETTINGS = frozenset({"params", "param_names", "lr", "initial_lr", "max_lr", "min_lr"})


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
        bucket_size: Approximate size of one gradient message (elements).
        moments_dtype: Dtype of Adam's moments if the fused kernel updates them.
        exchanges_rows: Whether :class:`RowSums` may exchange gradients of embeddings by rows. This
            needs a decision on the host in each step, which a captured CUDA graph cannot make.
    """

    main_dtype: torch.dtype | None = None
    gradient_dtype: torch.dtype | None = None
    zero: int = 1
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
    collectives run, and do not distinguish the cases themselves. A sharding with other parts or
    collectives is a second class with the methods of this one, beside it in this file, and
    :meth:`BufferPlanner.shard` chooses between them; ``OptimizerOptions.zero`` and ``plan.budget``
    must know it. A sharding that frees the gradients or parameters of other ranks between their
    uses must also own the memory that
    :class:`~lightning_megatron.optimizer.flat_buffer.FlatBuffer` allocates once: gradient slots and
    main parameters are views of it, and would have to ask for it before each use.

    Args:
        part: Index of this rank's part; 0 if the plan has only one part.

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
        """Start to average one bucket of the buffer's gradients over the replicas, in place.

        With ``is_whole``, every rank gets the full bucket instead of its part.

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
        """Return the granularity at which the ranks divide an optimizer's parameters."""
        if self._mesh.data.size == 1 and self._mesh.model.size == 1:
            return "model"
        granularity = finest_granularity(optimizer)
        mesh = self._mesh
        etp = mesh.etp.size if mesh.tp.size == 1 else 1
        sizes = {"tp": mesh.tp.size, "etp": etp, "pp": mesh.pp.size, "ep": mesh.ep.size}
        check_granularity(optimizer, granularity, sizes)
        return "model" if self._config.zero == 0 else granularity

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


def finest_granularity(optimizer: Optimizer) -> ShardGranularity:
    """Find the smallest part of a model that an optimizer trains independently of the rest.

    New optimizers of the same class and settings train two small matrices: both in one optimizer,
    each in a separate optimizer, and cut into flat pieces. The result is the finest division that
    changes only rounding. State that is not shaped like its parameter, such as one scale per block
    of elements, cannot be saved in pieces, so parameters stay whole. Groups with different settings
    are tried one by one, because a setting may select another algorithm; the coarsest result
    counts. An optimizer that cannot be tried, such as one around another, may need the whole model.
    """
    if isinstance(optimizer, LBFGS):
        # L-BFGS has one search direction for the whole model.
        return "model"
    tried: dict[str, ShardGranularity] = {}
    for group in optimizer.param_groups:
        settings = _changed_settings(group, optimizer.defaults)
        if repr(settings) not in tried:
            tried[repr(settings)] = _granularity_with(optimizer, settings)
    return max(tried.values(), key=_COARSER.index)


def _granularity_with(
    optimizer: Optimizer, changed_settings: Mapping[str, Any]
) -> ShardGranularity:
    """Find the finest granularity of an optimizer with the settings of one of its groups."""
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    # Some optimizers run only where their parameters are, such as those with kernels for GPUs.
    devices = [torch.device("cpu"), *(parameter.device for parameter in trained[:1])]
    reason: Exception | None = None
    for device, dtype in zip(devices, (torch.float64, torch.float32), strict=False):
        try:
            return _granularity_on(_matrices(device, dtype), optimizer, changed_settings)
        except (*_STEP_ERRORS, KeyError, AttributeError, AssertionError) as error:
            reason = reason or error
    logger.warning(
        "%s could not be tried on small matrices (%s: %s), so every rank keeps the whole of its "
        "state, as with optimizer.zero=0.",
        type(optimizer).__name__,
        type(reason).__name__,
        reason,
    )
    return "model"


def _granularity_on(
    matrices: list[Tensor], optimizer: Optimizer, changed_settings: Mapping[str, Any]
) -> ShardGranularity:
    """Find the finest granularity by training copies of some matrices."""
    together, is_cut_alike = _train([matrices], optimizer, changed_settings)
    apart, _ = _train([[matrix] for matrix in matrices], optimizer, changed_settings)
    if not all(map(torch.allclose, together, apart)):
        return "model"
    if not is_cut_alike:
        return "parameters"
    try:
        # Cut inside a row, as flat buffers cut their parameters.
        pieces, _ = _train(
            [[matrix.flatten()[:5], matrix.flatten()[5:]] for matrix in matrices],
            optimizer,
            changed_settings,
        )
    except (*_STEP_ERRORS, IndexError, AssertionError):
        return "parameters"
    joined = [torch.cat(pieces[i : i + 2]) for i in (0, 2)]
    whole = [matrix.flatten() for matrix in together]
    return "elements" if all(map(torch.allclose, whole, joined)) else "parameters"


def check_granularity(
    optimizer: Optimizer, granularity: ShardGranularity, sizes: Mapping[str, int]
) -> None:
    """Raise an error if an optimizer needs more of the model than one rank has.

    ``sizes`` has the axes that cut the model, by the names of their options (ranks).
    """
    # Pipeline and expert parallelism leave parameters whole.
    cutting = {"elements": (), "parameters": ("tp", "etp"), "model": ("tp", "etp", "pp", "ep")}
    cuts = [name for name in cutting[granularity] if sizes[name] > 1]
    if cuts:
        needed = "whole parameters" if granularity == "parameters" else "the whole model"
        shown = " and ".join(f"{name} ({sizes[name]})" for name in cuts)
        raise UnsupportedError(
            f"{type(optimizer).__name__} cannot be used with {shown} above 1, because it needs "
            f"{needed}. Each rank has only a part, and the result would depend on the layout. Use "
            "an element-wise optimizer such as AdamW, SGD or Adagrad, or "
            f"{' and '.join(f'{name}=1' for name in cuts)}."
        )


def _matrices(device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [
        torch.randn(shape, generator=generator, dtype=dtype).to(device)
        for shape in ((4, 3), (5, 6))
    ]


def _changed_settings(group: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value
        for key, value in group.items()
        if key not in _EXCLUDED_SETTINGS | _SPEED_ONLY
        and not isinstance(value, Tensor)
        and (key not in defaults or repr(defaults[key]) != repr(value))
    }


def _train(
    owners: list[list[Tensor]], like: Optimizer, changed_settings: Mapping[str, Any]
) -> tuple[list[Tensor], bool]:
    """Train copies of tensors, each inner list in a separate optimizer.

    The second result says whether all state is shaped like its parameter or a scalar, so that it
    can be saved in parts.
    """
    trained: list[Tensor] = []
    is_cut_alike = True
    for tensors in owners:
        parameters = [nn.Parameter(tensor.clone()) for tensor in tensors]
        optimizer: Any = _new(like, parameters, changed_settings)
        for step in range(_STEPS):
            closure = partial(_backward, parameters, step + 2)
            closure()
            optimizer.step(closure=closure)
        trained += [parameter.detach() for parameter in parameters]
        is_cut_alike &= all(
            not isinstance(value, Tensor) or value.shape in (parameter.shape, (), (1,))
            for parameter, state in optimizer.state.items()
            for value in state.values()
        )
    return trained, is_cut_alike


@torch.no_grad()
def _backward(parameters: list[nn.Parameter], factor: int) -> Tensor:
    """Set the gradients of a loss, and return the loss.

    Each element of a gradient depends on its parameter element alone, so the gradients do not
    depend on how a tensor is cut.
    """
    for parameter in parameters:
        parameter.grad = torch.sin(parameter * factor)
    return -torch.stack([torch.cos(parameter * factor).sum() for parameter in parameters]).sum()


def _new(
    like: Optimizer, parameters: list[nn.Parameter], changed_settings: Mapping[str, Any]
) -> Optimizer:
    """Create an optimizer of the same class, without settings that only affect speed."""
    accepted = inspect.signature(type(like)).parameters
    takes_all = any(argument.kind is argument.VAR_KEYWORD for argument in accepted.values())
    settings = {
        key: copy.deepcopy(value)
        for key, value in like.defaults.items()
        if key not in _SPEED_ONLY
        and not isinstance(value, Tensor)
        and (takes_all or key in accepted)
    }
    # Some optimizers accept no groups, so create a group only for settings that are not defaults.
    groups: list[Any] = parameters
    if changed_settings:
        groups = [{"params": parameters, **copy.deepcopy(dict(changed_settings))}]
    return type(like)(groups, **settings)
