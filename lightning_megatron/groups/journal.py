"""Remember which collectives a rank has started, so that the ranks can be compared when one does not arrive."""

from __future__ import annotations

from typing import NamedTuple


class Call(NamedTuple):
    """Name one collective of one rank.

    Args:
        kind: What it does, such as ``all_reduce``.
        axis: Name of the axis.
        number: How many collectives this rank had started on the axis, this one included.
        ranks: Global ranks that take part, this one among them or not.
    """

    kind: str
    axis: str
    number: int
    ranks: tuple[int, ...]


class Journal:
    """Count the collectives of one rank by axis.

    All ranks of an axis run the same collectives in the same order, so a rank whose count is smaller than another's has
    not arrived yet. Exchanges between neighbours are counted apart: ranks need not run equally many of them.
    """

    __slots__ = ("_last", "counts")

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self._last: tuple[str, str, int, tuple[int, ...]] | None = None

    def note(self, kind: str, axis: str, ranks: tuple[int, ...]) -> tuple[str, str, int, tuple[int, ...]]:
        """Count a collective that is about to start, and return what :meth:`again` takes."""
        # A plain tuple: this runs before every collective, and is to cost less than a microsecond.
        number = self.counts[axis] = self.counts.get(axis, 0) + 1
        self._last = call = (kind, axis, number, ranks)
        return call

    def again(self, call: tuple[str, str, int, tuple[int, ...]] | None) -> None:
        """Make a collective that was started before the last one: its result is waited for now."""
        self._last = call

    @property
    def last(self) -> Call | None:
        """Return the collective that was started, or waited for, last."""
        last = self._last
        return None if last is None else Call(*last)
