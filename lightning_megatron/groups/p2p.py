"""Batched point-to-point exchange between pipeline stages."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from lightning_megatron.groups.axis import MeshAxis


class PendingExchange:
    """Hold an exchange that has started, and keep its tensors alive until it is over."""

    def __init__(self, works: Sequence[dist.Work] = (), tensors: Sequence[Tensor] = ()) -> None:
        self._works, self._tensors = tuple(works), tuple(tensors)

    def wait(self) -> None:
        """Wait for all transfers; on a GPU the current stream waits, not the host. Further calls do nothing."""
        for work in self._works:
            work.wait()
        self._works = self._tensors = ()

    def is_done(self) -> bool:
        """Tell, without waiting, whether all transfers are known to be over."""
        return all(work.is_completed() for work in self._works)


def exchange(
    sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], axis: MeshAxis
) -> PendingExchange:
    """Start sending and receiving as one batch.

    Both ends of a pair must list their transfers in the same order: they are matched by it.

    Args:
        sends: Contiguous tensors with the position on the axis of the rank that gets them.
        receives: Contiguous buffers with the position on the axis of the rank that fills them.
        axis: The axis whose positions are meant.

    Communication: one batched send/receive over the axis's group.
    """
    operations = [dist.P2POp(dist.isend, tensor, axis.ranks[peer], group=axis.group) for tensor, peer in sends]
    operations += [dist.P2POp(dist.irecv, buffer, axis.ranks[peer], group=axis.group) for buffer, peer in receives]
    if not operations:
        return PendingExchange()
    works = dist.batch_isend_irecv(operations)
    return PendingExchange(works, [op.tensor for op in operations])
