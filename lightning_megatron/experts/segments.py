"""Layers as lists of segments with declared inputs and outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Segment:
    """One piece of a layer's forward pass.

    Args:
        name: Name of the segment.
        run: Function from the values of ``reads``, in order, to the value of ``writes``, or to a
            tuple of several.
        reads: Names of the input values.
        writes: Names of the output values.
        is_static: Whether all sizes follow from input shapes, without a copy from device to host,
            so that a CUDA graph can capture the segment.
    """

    name: str
    run: Callable[..., Any]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    is_static: bool = True


class SegmentList:
    """Sequence of segments that releases every value after its last read.

    Args:
        segments: Segments in execution order.
        inputs: Names of the input values.
        output: Name of the value to return.

    Raises:
        ValueError: If a segment reads a value that no earlier one writes, or none writes the
            output.
    """

    def __init__(self, segments: Iterable[Segment], inputs: tuple[str, ...], output: str) -> None:
        self.segments = tuple(segments)
        self.inputs = inputs
        self.output = output
        self._check()
        self._dropped = tuple(self._last_reads())

    def __iter__(self) -> Iterator[Segment]:
        return iter(self.segments)

    def __call__(self, *inputs: Any) -> Any:
        """Run all segments and return the output.

        Args:
            inputs: Input values, in the order of their names.
        """
        values = dict(zip(self.inputs, inputs, strict=True))
        for segment, dropped in zip(self.segments, self._dropped, strict=True):
            found = segment.run(*[values[name] for name in segment.reads])
            if len(segment.writes) == 1:
                values[segment.writes[0]] = found
            else:
                values.update(zip(segment.writes, found, strict=True))
            # A remaining reference would keep a value's memory until the end of the layer.
            del found
            for name in dropped:
                del values[name]
        return values[self.output]

    def _check(self) -> None:
        known = set(self.inputs)
        for segment in self.segments:
            missing = [name for name in segment.reads if name not in known]
            if missing:
                raise ValueError(
                    f"a segment can only read values of earlier segments: {segment.name!r} reads "
                    f"{missing}, available are {sorted(known)}. Move it after the segment that "
                    "writes this value."
                )
            known.update(segment.writes)
        if self.output not in known:
            raise ValueError(
                f"a segment must write the output {self.output!r}: the segments write "
                f"{sorted(known)}. Use one of these names."
            )

    def _last_reads(self) -> Iterator[tuple[str, ...]]:
        """Yield, for each segment, the names of the values that no later segment reads."""
        alive = set(self.inputs)
        for number, segment in enumerate(self.segments):
            alive.update(segment.writes)
            needed = {self.output}.union(*(later.reads for later in self.segments[number + 1 :]))
            yield tuple(sorted(alive - needed))
            alive &= needed
