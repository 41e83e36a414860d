"""Batched point-to-point transfers between pipeline stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron.groups.axis import MeshAxis, Work
from lightning_megatron.groups.journal import NEIGHBOURS


class PendingTransfers:
    """Batch of transfers in flight; it keeps the tensors alive until the transfers complete."""

    def __init__(
        self,
        work: Work | None = None,
        tensors: Sequence[Tensor] = (),
        on_wait: Callable[[], None] = lambda: None,
    ) -> None:
        self._work = work
        self._tensors = tuple(tensors)
        self._on_wait = on_wait

    def wait(self) -> None:
        """Wait for all transfers, on a GPU with the current stream only; later calls do nothing."""
        if self._work is not None:
            self._on_wait()
            self._work.wait()
        self._work = None
        self._tensors = ()

    def is_done(self) -> bool:
        """Return whether all transfers are known to be complete, without waiting.

        The result is False inside a capture of a CUDA graph, where a query would end the capture.
        """
        if self._work is None:
            return True
        is_on_gpu = any(tensor.is_cuda for tensor in self._tensors)
        if is_on_gpu and torch.cuda.is_current_stream_capturing():
            return False
        return self._work.is_completed()


class _Batch:
    """Handles of transfers that start together, as one handle."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


def start_transfers(
    sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], axis: MeshAxis
) -> PendingTransfers:
    """Start sends and receives as one batch of contiguous tensors with positions on the axis.

    Both ranks of a pair must list their transfers in the same order, because they are matched by
    order.

    Communication: one batched send/receive over the axis's group.
    """
    if not sends and not receives:
        return PendingTransfers()
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
    return PendingTransfers(
        work, [op.tensor for op in operations], lambda: axis.journal.record_wait(call)
    )
