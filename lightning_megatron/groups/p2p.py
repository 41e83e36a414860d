"""Batched point-to-point exchange between pipeline stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import Tensor

from lightning_megatron.groups.axis import MeshAxis


class PendingExchange:
    """Hold an exchange that has started, and keep its tensors alive until it is over."""

    def __init__(
        self,
        works: Sequence[dist.Work] = (),
        tensors: Sequence[Tensor] = (),
        noted: Callable[[], None] = lambda: None,
    ) -> None:
        self._works, self._tensors, self._noted = tuple(works), tuple(tensors), noted

    def wait(self) -> None:
        """Wait for all transfers; on a GPU the current stream waits, not the host. Further calls do nothing."""
        if self._works:
            self._noted()
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
    peers = tuple(axis.ranks[peer] for _, peer in (*sends, *receives))
    call = axis.journal.note("exchange", f"{axis.name} neighbours", peers)
    works = dist.batch_isend_irecv(operations)
    return PendingExchange(works, [op.tensor for op in operations], lambda: axis.journal.again(call))
