"""Graphs of a rank's steps as a run sees them: their numbers, and a log line about them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from lightning_megatron.plan.cuda_graphs import GraphMode


@dataclass(frozen=True)
class GraphCounts:
    """Graphs of this rank in numbers.

    Args:
        num_graphs: Number of graphs (graphs).
        num_evaluating: Number of them without a backward pass (graphs).
        num_slots: Number of slots of all chunks; 0 in mode ``full`` (slots).
        num_shapes: Largest number of forms of microbatches for which one chunk has graphs of one
            mode.
        seconds: Time of all captures so far (seconds).
    """

    num_graphs: int = 0
    num_evaluating: int = 0
    num_slots: int = 0
    num_shapes: int = 1
    seconds: float = 0.0

    def words(self) -> str:
        """Return the numbers as the end of a sentence."""
        details = []
        if self.num_slots:
            details.append(_plural(self.num_slots, "slot"))
        if self.num_shapes > 1:
            details.append(_plural(self.num_shapes, "shape"))
        if self.num_evaluating:
            details.append(f"{self.num_evaluating} for evaluation")
        more = f" ({', '.join(details)})" if details else ""
        return f"{_plural(self.num_graphs, 'graph')}{more}, captured in {self.seconds:.2f} s"


class StepCaptures(ABC):
    """Graphs of the steps of this rank, in one of the modes."""

    #: Whether graphs contain collectives with ranks that read other data, which then must agree
    #: before each step.
    communicates_across_data = False
    #: Whether all ranks capture in the same steps, and exchange failures in them.
    is_joint = False

    def __init__(self) -> None:
        #: Number of eager runs of a microbatch, a part or a step, by its name and the reason.
        self.eager = Counter[tuple[str, str]]()

    @property
    @abstractmethod
    def counts(self) -> GraphCounts:
        """Return what exists now, in numbers."""

    @property
    def num_graphs(self) -> int:
        """Return the number of graphs that exist now."""
        return self.counts.num_graphs

    @property
    @abstractmethod
    def failure(self) -> str | None:
        """Return what could not be captured, and why; None without a failure."""

    @abstractmethod
    def begin(self, kind: str) -> None:
        """Start to capture, at the next step of a kind, the graphs that its microbatches need."""

    @abstractmethod
    def permit(self, kind: str, replays: bool) -> None:
        """Permit or forbid captures and replays in the next step, which has this kind."""

    @abstractmethod
    def end_step(self) -> None:
        """Undo the changes that :meth:`permit` made for one step."""

    @abstractmethod
    def report(self) -> str:
        """Return a log line about what is captured, and what is not."""

    @abstractmethod
    def release(self) -> None:
        """Free all graphs, and capture no more until the next :meth:`begin`."""

    @abstractmethod
    def close(self) -> None:
        """Free all graphs, and run everything eagerly from now on."""


def report_line(
    mode: GraphMode,
    captured: Sequence[str],
    counts: GraphCounts,
    eager: Mapping[str, str] | None = None,
) -> str:
    """Return a log line about the captured and eager parts of the steps of this rank.

    Args:
        captured: Captured parts, such as "layers 0..3".
        eager: Reasons of the parts that stay eager, by part.
    """
    words = "nothing is captured"
    if captured:
        words = f"{', '.join(captured)} in {counts.words()}"
    by_reason: dict[str, list[str]] = {}
    for part, reason in (eager or {}).items():
        by_reason.setdefault(reason, []).append(part)
    listed = "; ".join(f"{', '.join(parts)}: {reason}" for reason, parts in by_reason.items())
    return f"CUDA graphs ({mode}): {words}.{f' Eager: {listed}.' if listed else ''}"


def runs_of(names: Sequence[str], left_out: Collection[str]) -> tuple[str, ...]:
    """Return the parts of a chunk that are not left out, in order and in few words.

    Whole layers are named together, such as "layers 0..3". Of other layers each run of neighbouring
    segments is named as "first to last".

    Args:
        names: Names of all segments of the chunk in order. Those of layer 3 begin with "layers.3".
    """
    cut = {_layer_of(name) for name in left_out}

    def kind_of(name: str) -> Literal["layer", "part", "left out"]:
        layer = _layer_of(name)
        if layer is not None and layer not in cut:
            return "layer"
        return "left out" if name in left_out else "part"

    words = []
    for kind, group in groupby(names, kind_of):
        run = [str(_layer_of(name)) if kind == "layer" else name for name in group]
        first = run[0]
        last = run[-1]
        if kind == "layer":
            words.append(f"layer {first}" if first == last else f"layers {first}..{last}")
        elif kind == "part":
            words.append(first if first == last else f"{first} to {last}")
    return tuple(words)


def beyond(most: int) -> str:
    """Return why a further shape runs eagerly.

    Args:
        most: Shapes that are captured (shapes).
    """
    return f"cuda_graphs.max_shapes ({most}) others are captured"


def _layer_of(name: str) -> str | None:
    """Return the index of the layer to which a segment belongs; None outside of layers."""
    kind, _, rest = name.partition(".")
    return rest.partition(".")[0] if kind == "layers" and rest else None


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
