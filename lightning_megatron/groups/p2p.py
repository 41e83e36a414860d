"""Batched point-to-point transfers between pipeline stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import Tensor

from lightning_megatron.groups.axis import MeshAxis


class PendingTransfers:
    """Batch of transfers in flight; it keeps the tensors alive until the transfers complete."""

    def __init__(
        self,
        works: Sequence[dist.Work] = (),
        tensors: Sequence[Tensor] = (),
        noted: Callable[[], None] = lambda: None,
    ) -> None:
        self._works = tuple(works)
        self._tensors = tuple(tensors)
        self._noted = noted

    def wait(self) -> None:
        """Wait for all transfers, on a GPU with the current stream only; later calls do nothing."""
        if self._works:
            self._noted()
        for work in self._works:
            work.wait()
        self._works = ()
        self._tensors = ()

    def is_done(self) -> bool:
        """Return whether all transfers are known to be complete, without waiting."""
        return all(work.is_completed() for work in self._works)


def start_transfers(
    sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], axis: MeshAxis
) -> PendingTransfers:
    """Start sends and receives as one batch.

    Both ranks of a pair must list their transfers in the same order, because they are matched by
    order.

    Args:
        sends: Contiguous tensors, each with the destination's position on the axis.
        receives: Contiguous buffers, each with the source's position on the axis.
        axis: Axis of the positions.

    Communication: one batched send/receive over the axis's group.
    """
    if not sends and not receives:
        return PendingTransfers()
    peers = tuple(axis.ranks[peer] for _, peer in (*sends, *receives))
    call = axis.journal.note("exchange", f"{axis.name} neighbours", peers)
    operations = [
        dist.P2POp(dist.isend, tensor, axis.ranks[peer], group=axis.group) for tensor, peer in sends
    ]
    operations += [
        dist.P2POp(dist.irecv, buffer, axis.ranks[peer], group=axis.group)
        for buffer, peer in receives
    ]
    works = dist.batch_isend_irecv(operations)
    return PendingTransfers(
        works, [op.tensor for op in operations], lambda: axis.journal.again(call)
    )
