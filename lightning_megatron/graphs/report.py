"""What a run has captured, and what it leaves eager, in one line of the log."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class GraphReport:
    """Captured and eager parts of the steps of this rank.

    Args:
        mode: ``segments`` or ``full``.
        captured: Captured parts, such as "layers 0..3".
        num_graphs: Number of graphs (graphs).
        eager: Reasons of the parts that stay eager, by part.
        notes: Further sentences, such as what the graphs keep as it was at the capture.
    """

    mode: str
    captured: tuple[str, ...]
    num_graphs: int
    eager: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def line(self) -> str:
        """Return the report as one line of a log."""
        if not self.captured:
            return f"CUDA graphs ({self.mode}): nothing is captured.{self._eager_words()}"
        parts = ", ".join(self.captured)
        graphs = "graph" if self.num_graphs == 1 else "graphs"
        words = (
            f"CUDA graphs ({self.mode}): {parts} in {self.num_graphs} {graphs}."
            f"{self._eager_words()}"
        )
        return " ".join([words, *self.notes])

    def _eager_words(self) -> str:
        if not self.eager:
            return ""
        listed = "; ".join(f"{part}: {reason}" for part, reason in _merged(self.eager.items()))
        return f" Eager: {listed}."


def runs_of(names: Sequence[str], left_out: Collection[str]) -> tuple[str, ...]:
    """Return runs of neighbouring names as "first to last", without those that are left out.

    Args:
        names: All names in order.
        left_out: Names that end a run.
    """
    runs: list[list[str]] = []
    is_open = False
    for name in names:
        if name in left_out:
            is_open = False
        elif is_open:
            runs[-1].append(name)
        else:
            runs.append([name])
            is_open = True
    return tuple(run[0] if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)


def _merged(items: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Join the names of parts that stay eager for the same reason."""
    parts: dict[str, list[str]] = {}
    for part, reason in items:
        parts.setdefault(reason, []).append(part)
    return [(", ".join(names), reason) for reason, names in parts.items()]
