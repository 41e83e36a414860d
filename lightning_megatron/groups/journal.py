"""Record of the collectives that a rank has started, for the comparison of ranks when one hangs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from lightning_megatron.errors import UnsupportedError


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

    __slots__ = ("_destroyed", "_last", "counts")

    def __init__(self) -> None:
        self._destroyed: frozenset[str] = frozenset()
        self.counts: dict[str, int] = {}
        self._last: tuple[str, str, int, tuple[int, ...]] | None = None

    def note(
        self, kind: str, axis: str, ranks: tuple[int, ...]
    ) -> tuple[str, str, int, tuple[int, ...]]:
        """Count a collective just before it starts, and return the argument of :meth:`again`.

        Raises:
            UnsupportedError: If the groups of the axis have been destroyed.
        """
        if self._destroyed and axis.split()[0] in self._destroyed:
            raise _after_the_run(kind, axis, ranks)
        # A plain tuple, because this runs before every collective and must take less than a
        # microsecond.
        number = self.counts[axis] = self.counts.get(axis, 0) + 1
        self._last = call = (kind, axis, number, ranks)
        return call

    def end(self, axes: Iterable[str]) -> None:
        """Refuse further collectives on these axes, because their groups have been destroyed."""
        self._destroyed = frozenset(axes)

    def again(self, call: tuple[str, str, int, tuple[int, ...]] | None) -> None:
        """Set the last collective to an earlier one, which this rank now waits for."""
        self._last = call

    @property
    def last(self) -> Call | None:
        """Return the collective that was last started or waited for."""
        last = self._last
        return None if last is None else Call(*last)


def _after_the_run(kind: str, axis: str, ranks: tuple[int, ...]) -> UnsupportedError:
    return UnsupportedError(
        "a model that is divided by tp, cp, pp or ep can be called only while fit, validate, test "
        f"or predict runs: {kind} over {axis} (ranks {list(ranks)}) was called after the end of "
        "the run, which destroyed its process groups. Call the model in a hook such as "
        "on_train_end or on_fit_end, or by trainer.predict. To use it in one process, save it "
        "(save_pretrained, or lightning-megatron checkpoint consolidate) and load its files there."
    )
