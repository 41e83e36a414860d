"""Collectives over one axis of the mesh: conjugate pairs for autograd, and plain collectives.

Every function returns its input unchanged on an axis of one rank. No function modifies a tensor
that autograd has recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron.groups.axis import MeshAxis

_T = TypeVar("_T")
ReduceOp = Literal["sum", "mean", "max", "min"]

# torch 2.13 renamed both and warns about the old names.
all_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    # gloo has no mean, so the sum is divided afterwards.
    "mean": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}


def copy_to_axis(x: Tensor, axis: MeshAxis) -> Tensor:
    """Copy a replicated tensor into a parallel region: identity in forward, all-reduce in backward.

    Source: Shoeybi et al. 2019 (f).
    """
    return x if axis.group is None else _Conjugate.apply(x, axis, _same, _summed, 0)


def reduce_from_axis(x: Tensor, axis: MeshAxis) -> Tensor:
    """Sum the partial results of a parallel region: all-reduce in forward, identity in backward.

    Source: Shoeybi et al. 2019 (g).
    """
    return x if axis.group is None else _Conjugate.apply(x, axis, _summed, _same, 0)


def split_to_axis(x: Tensor, axis: MeshAxis, dim: int) -> Tensor:
    """Return this rank's part of a replicated tensor along ``dim``.

    Forward is a split, backward an all-gather.
    """
    return x if axis.group is None else _Conjugate.apply(x, axis, _split, _gathered, dim)


def gather_from_axis(x: Tensor, axis: MeshAxis, dim: int) -> Tensor:
    """Join the parts of a tensor along ``dim`` for replicated use.

    Forward is an all-gather, backward a split.
    """
    return x if axis.group is None else _Conjugate.apply(x, axis, _gathered, _split, dim)


def all_gather_sequence(x: Tensor, axis: MeshAxis, dim: int = 0) -> Tensor:
    """Join sequence shards before a tensor-parallel region.

    Forward is an all-gather along ``dim``, backward a reduce-scatter.

    Source: Korthikanti et al. 2022, section 4.2.2 (g in the forward pass).
    """
    return x if axis.group is None else _Conjugate.apply(x, axis, _gathered, _scattered_sum, dim)


def reduce_scatter_sequence(x: Tensor, axis: MeshAxis, dim: int = 0) -> Tensor:
    """Sum the partial results of a tensor-parallel region into sequence shards.

    Forward is a reduce-scatter along ``dim``, backward an all-gather.

    Source: Korthikanti et al. 2022, section 4.2.2 (conjugate of g).
    """
    return x if axis.group is None else _Conjugate.apply(x, axis, _scattered_sum, _gathered, dim)


def all_to_all_rows(
    x: Tensor, sends: Sequence[int], receives: Sequence[int], axis: MeshAxis
) -> Tensor:
    """Send rows, sorted by destination rank, over the axis, and join those that arrive.

    Backward sends the gradients the opposite way.

    Shapes: x ``(sum(sends), ...)``; output ``(sum(receives), ...)``.
    """
    return x if axis.group is None else _AllToAllRows.apply(x, tuple(sends), tuple(receives), axis)


class _AllToAllRows(torch.autograd.Function):
    """All-to-all in forward, and the reverse all-to-all in backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, sends: tuple[int, ...], receives: tuple[int, ...], axis: MeshAxis
    ) -> Tensor:
        ctx.sizes = (sends, receives)
        ctx.axis = axis
        return _all_to_all(x, sends, receives, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        sends, receives = ctx.sizes
        return _all_to_all(grads[0], receives, sends, ctx.axis), None, None, None


def _all_to_all(
    x: Tensor, sends: tuple[int, ...], receives: tuple[int, ...], axis: MeshAxis
) -> Tensor:
    result = x.new_empty((sum(receives), *x.shape[1:]))
    rows = x.contiguous()
    received_sizes = list(receives)
    sent_sizes = list(sends)
    axis.note("all_to_all")
    axis.launcher.run(
        lambda: dist.all_to_all_single(result, rows, received_sizes, sent_sizes, group=axis.group),
        result,
    )
    return result


@dataclass(frozen=True)
class BoundaryGradients:
    """Gradients at a function on the border of a tensor-parallel region.

    Args:
        gives_parts: For each input, whether the gradient that backward returns is only this rank's
            part of a sum; otherwise it is equal on all ranks. Inputs without an entry get zeros.
        takes_parts: Whether the gradient that backward receives may be only this rank's part of a
            sum.
    """

    gives_parts: tuple[bool, ...]
    takes_parts: bool


class _Conjugate(torch.autograd.Function):
    """Collective in forward and its conjugate in backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, axis: MeshAxis, forward: Any, backward: Any, dim: int
    ) -> Tensor:
        ctx.axis = axis
        ctx.forward_collective = forward
        ctx.backward_collective = backward
        ctx.dim = dim
        return forward(x, axis, dim)

    @staticmethod
    def border(ctx: Any) -> BoundaryGradients | None:
        """Return the gradients at the border of the tensor-parallel region; None for other axes."""
        if ctx.axis.name != "tp":
            return None
        backward = ctx.backward_collective
        forward = ctx.forward_collective
        # Backward returns a complete gradient if it sums over all ranks, or gathers the parts of a
        # tensor that forward has split.
        is_whole = backward is _summed or (backward is _gathered and forward is _split)
        return BoundaryGradients(
            (not is_whole,),
            takes_parts=is_whole or backward is _scattered_sum or forward is _scattered_sum,
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.backward_collective(grads[0], ctx.axis, ctx.dim), None, None, None, None


def _same(x: Tensor, axis: MeshAxis, dim: int) -> Tensor:
    return x.view_as(x)


def _summed(x: Tensor, axis: MeshAxis, dim: int) -> Tensor:
    result = x.clone(memory_format=torch.contiguous_format)
    axis.note("all_reduce")
    axis.launcher.run(lambda: dist.all_reduce(result, group=axis.group), result)
    return result


def _split(x: Tensor, axis: MeshAxis, dim: int) -> Tensor:
    _check_divides(x, axis, dim)
    return x.chunk(axis.size, dim)[axis.rank].contiguous()


def _gathered(x: Tensor, axis: MeshAxis, dim: int) -> Tensor:
    part = x.contiguous()
    result = x.new_empty((axis.size * x.shape[0], *x.shape[1:]))
    axis.note("all_gather")
    axis.launcher.run(lambda: all_gather_into(result, part, group=axis.group), result)
    return result if dim == 0 else torch.cat(result.chunk(axis.size), dim)


def _scattered_sum(x: Tensor, axis: MeshAxis, dim: int) -> Tensor:
    _check_divides(x, axis, dim)
    rows = x.contiguous() if dim == 0 else torch.cat(x.chunk(axis.size, dim))
    result = rows.new_empty((rows.shape[0] // axis.size, *rows.shape[1:]))
    axis.note("reduce_scatter")
    axis.launcher.run(lambda: reduce_scatter_into(result, rows, group=axis.group), result)
    return result


def _check_divides(x: Tensor, axis: MeshAxis, dim: int) -> None:
    if x.shape[dim] % axis.size:
        raise ValueError(
            f"dimension {dim} ({x.shape[dim]}) must be a multiple of {axis.name} ({axis.size}), "
            "because each rank takes an equal part. Pad it to "
            f"{-(-x.shape[dim] // axis.size) * axis.size}."
        )


def all_reduce_(x: Tensor, axis: MeshAxis, op: ReduceOp = "sum") -> Tensor:
    """Reduce ``x`` over the axis in place and return it, without autograd."""
    for line in axis.lines:
        all_reduce_(x, line, op)
    if axis.group is not None and not axis.lines:
        axis.note("all_reduce")
        axis.launcher.run(lambda: dist.all_reduce(x, op=REDUCE_OPS[op], group=axis.group), x)
        if op == "mean":
            x.div_(axis.size)
    return x


def broadcast_(x: Tensor, axis: MeshAxis, source: int = 0) -> Tensor:
    """Copy ``x`` from position ``source`` to all ranks in place and return it, without autograd."""
    for line, place in _lines_from(axis, source):
        broadcast_(x, line, place)
    if axis.group is not None and not axis.lines:
        axis.note("broadcast")
        axis.launcher.run(lambda: dist.broadcast(x, axis.ranks[source], group=axis.group), x)
    return x


def all_gather_objects(obj: Any, axis: MeshAxis) -> list[Any]:
    """Gather a picklable object from every rank of the axis, as a list by position."""
    if axis.group is None:
        return [obj]
    if axis.lines:
        row, column = axis.lines
        return list(chain.from_iterable(all_gather_objects(all_gather_objects(obj, row), column)))
    objects: list[Any] = [None] * axis.size
    axis.note("all_gather_object")
    axis.launcher.wait(lambda: dist.all_gather_object(objects, obj, group=axis.group))
    return objects


def gather_objects(obj: Any, axis: MeshAxis) -> list[Any]:
    """Gather a picklable object from every rank of the axis on its first rank; others get none."""
    if axis.group is None:
        return [obj]
    if axis.lines:
        row, column = axis.lines
        parts = gather_objects(obj, row)
        return list(chain.from_iterable(gather_objects(parts, column) if row.is_first else []))
    objects: list[Any] | None = [None] * axis.size if axis.rank == 0 else None
    axis.note("gather_object")
    root = axis.ranks[0]
    axis.launcher.wait(lambda: dist.gather_object(obj, objects, root, group=axis.group))
    return objects or []


def gather_some(obj: _T | None, axis: MeshAxis) -> dict[int, _T]:
    """Gather the objects of the ranks that have one, such as an error, by position on every rank.

    Communication: one all-reduce of a flag; if a rank has an object, one gather of objects.
    """
    if not is_true_anywhere(obj is not None, axis):
        return {}
    gathered: list[_T | None] = all_gather_objects(obj, axis)
    return {position: found for position, found in enumerate(gathered) if found is not None}


def merge_objects(obj: _T, axis: MeshAxis, merge: Callable[[list[_T]], _T]) -> _T:
    """Merge objects of all ranks of the axis, on every rank.

    For many ranks, the objects of rows are merged first, so that a rank receives few objects.

    Args:
        merge: Function that merges objects, and also merged ones, in any order.
    """
    for line in axis.lines or (axis,):
        obj = merge(all_gather_objects(obj, line))
    return obj


def is_true_anywhere(flag: bool, axis: MeshAxis) -> bool:
    """Return whether a condition holds on a rank of an axis on the CPU, by one all-reduce."""
    return bool(all_reduce_(torch.tensor(int(flag)), axis, "max"))


def broadcast_object(obj: Any, axis: MeshAxis, source: int = 0) -> Any:
    """Return the picklable object of position ``source`` on all ranks of the axis."""
    if axis.group is None:
        return obj
    for line, place in _lines_from(axis, source):
        obj = broadcast_object(obj, line, place)
    if axis.lines:
        return obj
    objects = [obj]
    axis.note("broadcast_object")
    root = axis.ranks[source]
    axis.launcher.wait(lambda: dist.broadcast_object_list(objects, root, group=axis.group))
    return objects[0]


def _lines_from(axis: MeshAxis, source: int) -> Iterator[tuple[MeshAxis, int]]:
    """Yield the lines over which a broadcast passes this rank, with the senders' positions."""
    if axis.lines:
        row, column = axis.lines
        row_of_source, place = divmod(source, row.size)
        if column.rank == row_of_source:
            yield row, place
        yield column, row_of_source


def is_world(group: Any) -> bool:
    """Return whether a process group contains all ranks."""
    return group is not None and dist.is_initialized() and group is dist.group.WORLD


def ranks_of_call(arguments: Sequence[Any]) -> tuple[int, ...] | None:
    """Return the global ranks of a collective from its operator's arguments; None for others."""
    for value in arguments:
        if not isinstance(value, torch.ScriptObject):
            continue
        kind: Any = value._type()
        if kind.name() == "ProcessGroup":
            return tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(value)))
    return None


def barrier(axis: MeshAxis, device: torch.device | None = None) -> None:
    """Wait until every rank of the axis has arrived."""
    for line in axis.lines:
        barrier(line, device)
    if axis.group is None or axis.lines:
        return
    axis.note("barrier")
    devices = None
    if device is not None and device.type == "cuda" and dist.get_backend(axis.group) == "nccl":
        devices = [torch.cuda.current_device() if device.index is None else device.index]
    axis.launcher.wait(lambda: dist.barrier(group=axis.group, device_ids=devices))
