"""Asynchronous collectives and transfers between pairs of ranks, without autograd.

On an axis of one rank, they are complete when they return.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron.groups.axis import MeshAxis, Work
from lightning_megatron.groups.collectives import (
    REDUCE_OPS,
    ReduceOp,
    all_gather_into,
    reduce_scatter_into,
)
from lightning_megatron.groups.journal import NEIGHBOURS


class Pending:
    """Collective in flight; its result is available after :meth:`wait`.

    ``after`` completes the result, ``keep`` stays alive until then, and ``on_wait`` notes the wait.
    """

    def __init__(
        self,
        work: Work | None = None,
        after: Callable[[], None] | None = None,
        keep: tuple[Tensor, ...] = (),
        on_wait: Callable[[], None] = lambda: None,
    ) -> None:
        self._work = work
        self._then = after
        self._keep = keep
        self._on_wait = on_wait

    def wait(self) -> None:
        """Wait until the result is available; later calls do nothing.

        On a GPU, only the current stream waits; on a CPU, the host waits.
        """
        work = self._work
        on_result = self._then
        self._work = None
        self._then = None
        if work is not None:
            self._on_wait()
            work.wait()
        if on_result is not None:
            on_result()
        self._keep = ()

    def is_done(self) -> bool:
        """Return whether the result is known to be available, without waiting.

        The result is False inside a capture of a CUDA graph, where a query would end the capture.
        """
        if self._work is None:
            return True
        is_on_gpu = any(tensor.is_cuda for tensor in self._keep)
        if is_on_gpu and torch.cuda.is_current_stream_capturing():
            return False
        return self._work.is_completed()


def start_all_gather(out: Tensor, x: Tensor, axis: MeshAxis) -> Pending:
    """Start to join the tensors of all ranks along the first dimension.

    Shapes: x ``(N, ...)``, contiguous; out ``(axis.size * N, ...)``. ``x`` may be this rank's part
        of ``out``.
    """
    if axis.group is None:
        if out.data_ptr() != x.data_ptr():
            out.copy_(x)
        return Pending()
    on_wait = _note("all_gather", axis)
    work = axis.launcher.start(
        lambda: all_gather_into(out, _apart(x, axis), group=axis.group, async_op=True), out
    )
    return Pending(work, keep=(out, x), on_wait=on_wait)


def start_reduce_scatter(out: Tensor, x: Tensor, axis: MeshAxis, op: ReduceOp = "sum") -> Pending:
    """Start to reduce ``x`` over the ranks; each rank gets one part of the result.

    Shapes: x ``(axis.size * N, ...)``, contiguous; out ``(N, ...)``, which may be this rank's part
        of ``x``.
    """
    if axis.group is None:
        if out.data_ptr() != x.data_ptr():
            out.copy_(x)
        return Pending()
    native, scale = _native_op(op, axis)
    result = out if _works_in_place(axis) else out.new_empty(out.shape)
    on_wait = _note("reduce_scatter", axis)
    work = axis.launcher.start(
        lambda: reduce_scatter_into(result, x, op=native, group=axis.group, async_op=True), result
    )
    return Pending(work, _finish(out, result, scale), keep=(out, x, result), on_wait=on_wait)


def start_all_reduce(x: Tensor, axis: MeshAxis, op: ReduceOp = "sum") -> Pending:
    """Start to reduce ``x`` over the ranks, in place."""
    if axis.group is None:
        return Pending()
    native, scale = _native_op(op, axis)
    on_wait = _note("all_reduce", axis)
    work = axis.launcher.start(
        lambda: dist.all_reduce(x, op=native, group=axis.group, async_op=True), x
    )
    return Pending(work, _finish(x, x, scale), keep=(x,), on_wait=on_wait)


def start_all_to_all(
    out: Tensor, x: Tensor, sends: Sequence[int], receives: Sequence[int], axis: MeshAxis
) -> Pending:
    """Start to send rows to every rank of the axis, and to join the rows that they send.

    Shapes: x ``(sum(sends), ...)``, contiguous; out ``(sum(receives), ...)``.
    """
    if axis.group is None:
        out.copy_(x)
        return Pending()
    on_wait = _note("all_to_all", axis)
    received_sizes = list(receives)
    sent_sizes = list(sends)
    work = axis.launcher.start(
        lambda: dist.all_to_all_single(
            out, x, received_sizes, sent_sizes, group=axis.group, async_op=True
        ),
        out,
    )
    return Pending(work, keep=(out, x), on_wait=on_wait)


def start_transfers(
    sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], axis: MeshAxis
) -> Pending:
    """Start sends and receives as one batch of contiguous tensors with positions on the axis.

    Both ranks of a pair must list their transfers in the same order, because they are matched by
    order.

    Communication: one batched send/receive over the axis's group.
    """
    if not sends and not receives:
        return Pending()
    peers = tuple(axis.ranks[peer] for _, peer in (*sends, *receives))
    call = axis.journal.note("exchange", axis.name + NEIGHBOURS, peers)
    operations = [
        dist.P2POp(dist.isend, tensor, axis.ranks[peer], group=axis.group) for tensor, peer in sends
    ]
    operations += [
        dist.P2POp(dist.irecv, buffer, axis.ranks[peer], group=axis.group)
        for buffer, peer in receives
    ]
    work = axis.launcher.start(
        lambda: _Batch(dist.batch_isend_irecv(operations)), *(buffer for buffer, _ in receives)
    )
    tensors = tuple(operation.tensor for operation in operations)
    return Pending(work, keep=tensors, on_wait=lambda: axis.journal.record_wait(call))


class _Batch:
    """Handles of transfers that start together, as one handle."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


def _note(kind: str, axis: MeshAxis) -> Callable[[], None]:
    """Count a collective; return a function that records the wait for it in the journal."""
    call = axis.note(kind)
    return lambda: axis.journal.record_wait(call)


def _finish(out: Tensor, result: Tensor, scale: int) -> Callable[[], None] | None:
    if result is out and scale == 1:
        return None

    def finish() -> None:
        if scale != 1:
            result.div_(scale)
        if result is not out:
            out.copy_(result)

    return finish


def _native_op(op: ReduceOp, axis: MeshAxis) -> tuple[Any, int]:
    """Return the operation to run, and the remaining divisor of its result."""
    if op == "mean" and dist.get_backend(axis.group) == "nccl":
        return dist.ReduceOp.AVG, 1
    return REDUCE_OPS[op], axis.size if op == "mean" else 1


def _works_in_place(axis: MeshAxis) -> bool:
    return dist.get_backend(axis.group) == "nccl"


def _apart(x: Tensor, axis: MeshAxis) -> Tensor:
    """Return ``x``, or a copy of it if the backend cannot read and write the same memory."""
    return x if _works_in_place(axis) else x.clone()
