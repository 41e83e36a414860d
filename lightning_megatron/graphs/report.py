"""Log line about the parts that a run has captured, and those that run eagerly."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

#: Mark of a whole layer among the names of segments, which have no spaces.
_LAYER = "whole layer "


@dataclass(frozen=True)
class GraphCounts:
    """Graphs of this rank in numbers.

    Args:
        num_graphs: Number of graphs (graphs).
        num_evaluating: Number of them without a backward pass (graphs).
        slots: Number of slots of each chunk; empty in mode ``full``.
        num_shapes: Largest number of forms of microbatches for which one chunk has graphs of one
            mode.
        seconds: Time of all captures so far (seconds).
    """

    num_graphs: int = 0
    num_evaluating: int = 0
    slots: tuple[int, ...] = ()
    num_shapes: int = 1
    seconds: float = 0.0

    def words(self) -> str:
        """Return the numbers as the end of a sentence."""
        details = []
        if len(self.slots) == 1:
            details.append(_plural(self.slots[0], "slot"))
        elif self.slots:
            details.append(f"slots of its chunks: {', '.join(map(str, self.slots))}")
        if self.num_shapes > 1:
            details.append(_plural(self.num_shapes, "shape"))
        if self.num_evaluating:
            details.append(f"{self.num_evaluating} for evaluation")
        more = f" ({', '.join(details)})" if details else ""
        return f"{_plural(self.num_graphs, 'graph')}{more}, captured in {self.seconds:.2f} s"


@dataclass(frozen=True)
class GraphReport:
    """Captured and eager parts of the steps of this rank.

    Args:
        mode: ``segments`` or ``full``.
        captured: Captured parts, such as "layers 0..3".
        eager: Reasons of the parts that stay eager, by part.
        notes: Further sentences, such as those about values that graphs keep from the capture.
    """

    mode: str
    captured: tuple[str, ...]
    counts: GraphCounts = GraphCounts()
    eager: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def line(self) -> str:
        """Return the report as one log line."""
        if not self.captured:
            return f"CUDA graphs ({self.mode}): nothing is captured.{self._eager_words()}"
        parts = ", ".join(self.captured)
        words = f"CUDA graphs ({self.mode}): {parts} in {self.counts.words()}.{self._eager_words()}"
        return " ".join([words, *self.notes])

    def _eager_words(self) -> str:
        if not self.eager:
            return ""
        listed = "; ".join(f"{part}: {reason}" for part, reason in _merged(self.eager.items()))
        return f" Eager: {listed}."


def runs_of(names: Sequence[str], left_out: Collection[str]) -> tuple[str, ...]:
    """Return the parts of a chunk that are not left out, in order and in few words.

    Whole layers are named together, such as "layers 0..3". Of other layers each run of neighbouring
    segments is named as "first to last".

    Args:
        names: Names of all segments of the chunk in order. Those of layer 3 begin with "layers.3".
    """
    # None ends a run.
    runs: list[list[str] | None] = []
    for layer, group in groupby(names, _layer_of):
        parts = list(group)
        is_whole = layer is not None and not any(part in left_out for part in parts)
        for part in [f"{_LAYER}{layer}"] if is_whole else parts:
            last = runs[-1] if runs else None
            if not is_whole and part in left_out:
                runs.append(None)
            elif last is not None and last[0].startswith(_LAYER) == is_whole:
                last.append(part)
            else:
                runs.append([part])
    return tuple(_words_of(run) for run in runs if run is not None)


def beyond(most: int) -> str:
    """Return why a further shape runs eagerly.

    Args:
        most: Shapes that are captured (shapes).
    """
    return f"cuda_graphs.max_shapes ({most}) others are captured"


def _words_of(run: list[str]) -> str:
    """Return a run of whole layers, or of other parts, in words."""
    first, last = (part.removeprefix(_LAYER) for part in (run[0], run[-1]))
    if run[0].startswith(_LAYER):
        return f"layer {first}" if first == last else f"layers {first}..{last}"
    return first if first == last else f"{first} to {last}"


def _layer_of(name: str) -> str | None:
    """Return the index of the layer to which a segment belongs; None outside of layers."""
    kind, _, rest = name.partition(".")
    return rest.partition(".")[0] if kind == "layers" and rest else None


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _merged(items: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Join the names of parts that stay eager for the same reason."""
    parts: dict[str, list[str]] = {}
    for part, reason in items:
        parts.setdefault(reason, []).append(part)
    return [(", ".join(names), reason) for reason, names in parts.items()]
