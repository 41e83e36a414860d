"""Record of the collectives that a rank has started, for the comparison of ranks when one hangs."""

from __future__ import annotations

from typing import NamedTuple


class Call(NamedTuple):
    """One collective of one rank.

    Args:
        kind: Kind of collective, such as ``all_reduce``.
        axis: Name of the axis.
        number: Number of collectives that this rank has started on the axis, including this one.
        ranks: Global ranks that take part; for an exchange with neighbours only the other ranks.
    """

    kind: str
    axis: str
    number: int
    ranks: tuple[int, ...]


class Journal:
    """Counter of one rank's collectives by axis.

    All ranks of an axis run the same collectives in the same order, so that the rank with the
    smaller count has not arrived yet. Exchanges between neighbours have counters of their own,
    because their number may differ between ranks.
    """

    __slots__ = ("_last", "counts")

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self._last: tuple[str, str, int, tuple[int, ...]] | None = None

    def note(
        self, kind: str, axis: str, ranks: tuple[int, ...]
    ) -> tuple[str, str, int, tuple[int, ...]]:
        """Count a collective just before it starts, and return the argument of :meth:`again`."""
        # A plain tuple, because this runs before every collective and must take less than a
        # microsecond.
        number = self.counts[axis] = self.counts.get(axis, 0) + 1
        self._last = call = (kind, axis, number, ranks)
        return call

    def again(self, call: tuple[str, str, int, tuple[int, ...]] | None) -> None:
        """Set the last collective to an earlier one, which this rank now waits for."""
        self._last = call

    @property
    def last(self) -> Call | None:
        """Return the collective that was last started or waited for."""
        last = self._last
        return None if last is None else Call(*last)
