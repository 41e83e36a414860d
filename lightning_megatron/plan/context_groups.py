"""Choice of how many neighbouring ranks of context parallelism share the documents of a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from lightning_megatron.errors import ParallelPlanError, UnsupportedError
from lightning_megatron.plan.context import ContextCut, check_context_length
from lightning_megatron.plan.settings import (
    join_or,
    powers_of_two_around,
    require_index,
    require_positive,
)

#: Ranks of cp that share a document: all of them, or the smallest groups that documents allow.
ContextGroupsChoice = Literal["all", "documents"]


@dataclass(frozen=True)
class ContextGroups:
    """Cut of rows into windows, each of which is divided over ``size`` neighbouring ranks of cp.

    Group ``g`` holds the positions from ``g * window`` to ``(g + 1) * window``, cut zig-zag over
    its ranks as in :class:`~lightning_megatron.plan.context.ContextCut`. With ``size`` equal to
    ``cp`` this is the zig-zag cut of the whole rows, and with ``size`` 1 every rank holds
    neighbouring tokens and needs no key of another rank.

    Args:
        cp: Ranks that share the rows (ranks).
        size: Ranks of a group, a power of two that is at most ``cp`` (ranks).
        seq_length: Length of the rows (tokens).

    Raises:
        ParallelPlanError: If ``cp`` is not a power of two of at least 2, ``size`` is not a power of
            two up to it, or the length is not a multiple of ``2 cp``.
    """

    cp: int
    size: int
    seq_length: int

    def __post_init__(self) -> None:
        sizes = context_group_sizes(self.cp)
        require_positive("seq_length", self.seq_length)
        check_context_length(self.seq_length, self.cp)
        if self.size not in sizes:
            raise ParallelPlanError(
                f"size ({self.size}) of the groups must be a power of two up to cp ({self.cp}), "
                f"because cp is divided into groups of equal size. Use {join_or(sizes)}."
            )

    @classmethod
    def of(cls, borders: Sequence[int], seq_length: int, cp: int) -> ContextGroups:
        """Choose the smallest groups such that no document lies in two windows.

        All ranks that see the same lengths make the same choice.

        Args:
            borders: Cumulative lengths of the documents of all rows, from 0; documents may be empty
                (tokens).
            seq_length: Length of the rows (tokens).
            cp: Ranks that share the rows (ranks).

        Raises:
            ParallelPlanError: If ``cp`` is not a power of two of at least 2, the length is not a
                multiple of ``2 cp``, or a document lies in two rows.
        """
        for size in context_group_sizes(cp):
            groups = cls(cp, size, seq_length)
            if not crosses(borders, groups.window):
                return groups
        raise ParallelPlanError(
            f"documents must end at the ends of rows of {seq_length} tokens, because the ranks of "
            f"cp divide single rows: their cumulative lengths are {list(borders)}. Use lengths "
            "that add up to the length of each row."
        )

    @property
    def window(self) -> int:
        """Return the number of tokens of a row that a group holds (tokens)."""
        return self.seq_length // self.cp * self.size

    def ranks(self, rank: int) -> range:
        """Return the ranks of cp in the group of a rank."""
        first = self._group(rank) * self.size
        return range(first, first + self.size)

    def window_of(self, rank: int) -> range:
        """Return the positions that the group of a rank holds."""
        first = self._group(rank) * self.window
        return range(first, first + self.window)

    def positions(self, rank: int) -> list[int]:
        """Return the position of each token of a rank, in the order in which it holds them."""
        first = self.window_of(rank).start
        in_group = ContextCut(self.size, self.window).positions(rank % self.size)
        return [first + position for position in in_group]

    def _group(self, rank: int) -> int:
        require_index("rank", rank, "cp", self.cp)
        return rank // self.size


def check_groups_option(
    groups: ContextGroupsChoice, cp: int, transport: str, has_graphs: bool
) -> None:
    """Refuse ``context.groups="documents"`` without cp, or with fixed groups.

    Args:
        groups: Ranks that share a document.
        cp: Ranks that share a sequence (ranks).
        has_graphs: Whether steps are captured as CUDA graphs.

    Raises:
        ParallelPlanError: If ``cp`` is not a power of two of at least 2.
        UnsupportedError: If the transport is hierarchical, or steps are captured.
    """
    if groups == "all":
        return
    try:
        context_group_sizes(cp)
    except ParallelPlanError as error:
        raise ParallelPlanError(
            f"context.groups ({groups!r}) cannot be used with this cp: {error} Or leave "
            "context.groups out."
        ) from None
    if transport == "hierarchical":
        raise UnsupportedError(
            f"context.groups ({groups!r}) cannot be used with context.transport 'hierarchical', "
            "whose two levels are fixed when training starts. Use 'auto', 'ring', 'all_to_all' or "
            "'all_gather', or leave context.groups out."
        )
    if has_graphs:
        raise UnsupportedError(
            f"context.groups ({groups!r}) cannot be used with cuda_graphs, because a captured step "
            "repeats the communication of its capture, but every batch of documents needs its own "
            "groups. Use context.groups='all', or leave cuda_graphs out."
        )


def context_group_sizes(cp: int) -> list[int]:
    """Return the sizes of groups that can share documents: the powers of two up to ``cp`` (ranks).

    Args:
        cp: Ranks that share the rows (ranks).

    Raises:
        ParallelPlanError: If ``cp`` is not a power of two of at least 2.
    """
    require_positive("cp", cp)
    if cp == 1 or cp & (cp - 1):
        legal = [max(2, power) for power in powers_of_two_around(cp)]
        raise ParallelPlanError(
            f"cp ({cp}) must be a power of two of at least 2, because it is divided into groups of "
            f"1, 2, 4 or more ranks. Use {join_or(sorted(set(legal)))}."
        )
    return [1 << power for power in range(cp.bit_length())]


def crosses(borders: Sequence[int], window: int) -> bool:
    """Return whether a document has tokens in two windows.

    Args:
        borders: Cumulative lengths of the documents, from 0 (tokens).
        window: Length of the windows (tokens).
    """
    return any(
        start < stop and start // window != (stop - 1) // window
        for start, stop in pairwise(borders)
    )
