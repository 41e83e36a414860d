"""Axis of the mesh: one group of ranks, from the view of one of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch.distributed import ProcessGroup

from lightning_megatron.groups.journal import Journal
from lightning_megatron.groups.launcher import CollectiveLauncher
from lightning_megatron.groups.peer_memory import PeerMemory


@dataclass(frozen=True)
class MeshAxis:
    """Group of ranks that differ from this rank only on one axis, or only on a set of axes.

    Args:
        name: Name of the axis, such as ``tp``.
        ranks: Global ranks of the group, in axis order.
        rank: Position of this rank in ``ranks``.
        group: Process group; None for a group of one rank, which never communicates.
        overlaps_matmul: Whether matrix products on GPUs are cut into pieces that overlap with their
            communication.
        journal: Counter of this rank's collectives.
        launcher: Object through which this rank starts its collectives.
        peer_memory: Symmetric memory that the ranks of the group write into.
    """

    name: str
    ranks: tuple[int, ...] = (0,)
    rank: int = 0
    group: ProcessGroup | None = field(default=None, compare=False)
    journal: Journal = field(default_factory=Journal, compare=False, repr=False)
    launcher: CollectiveLauncher = field(
        default_factory=CollectiveLauncher, compare=False, repr=False
    )
    overlaps_matmul: bool = False
    peer_memory: PeerMemory = field(default_factory=PeerMemory, compare=False, repr=False)

    @property
    def size(self) -> int:
        """Return the number of ranks in the group."""
        return len(self.ranks)

    @property
    def is_first(self) -> bool:
        """Return whether this rank is the first one of the group."""
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        """Return whether this rank is the last one of the group."""
        return self.rank == self.size - 1

    def note(self, kind: str) -> tuple[str, str, int, tuple[int, ...]]:
        """Record in the journal that this rank starts a collective next."""
        return self.journal.note(kind, self.name, self.ranks)

    def __deepcopy__(self, memo: dict[int, Any]) -> MeshAxis:
        """Return the axis itself: a copied module uses the same groups."""
        return self
