"""A layer as a list of pieces that say what they read and write, and whether their sizes are known in advance."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Segment:
    """Describe one piece of a layer.

    Args:
        name: What it does.
        run: Takes the values of ``reads`` in their order and returns the one of ``writes``, or a tuple of several.
        reads: Names of the values that it takes.
        writes: Names of the values that it makes.
        is_static: Whether sizes follow from those of its inputs and nothing is read back from the device, so that a
            CUDA graph can hold it.
    """

    name: str
    run: Callable[..., Any]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    is_static: bool = True


class SegmentList:
    """Run segments one after the other, and let go of every value after the last one that reads it.

    Args:
        segments: What to run, in order.
        inputs: Names of the values that are given.
        output: Name of the value to return.

    Raises:
        ValueError: If a segment reads what none before it has written, or none writes the output.
    """

    def __init__(self, segments: Iterable[Segment], inputs: tuple[str, ...], output: str) -> None:
        self.segments, self.inputs, self.output = tuple(segments), inputs, output
        self._check()
        self._dropped = tuple(self._last_reads())

    def __iter__(self) -> Iterator[Segment]:
        return iter(self.segments)

    def __call__(self, *inputs: Any) -> Any:
        """Return the output.

        Args:
            inputs: In the order of their names.
        """
        values = dict(zip(self.inputs, inputs, strict=True))
        for segment, dropped in zip(self.segments, self._dropped, strict=True):
            found = segment.run(*[values[name] for name in segment.reads])
            if len(segment.writes) == 1:
                values[segment.writes[0]] = found
            else:
                values.update(zip(segment.writes, found, strict=True))
            # A value that is left would keep its memory until the end of the layer.
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
                    f"a segment may read what is there before it: {segment.name!r} reads {missing}, and there is "
                    f"{sorted(known)}. Segments run in order. Move it behind the one that writes it."
                )
            known.update(segment.writes)
        if self.output not in known:
            raise ValueError(
                f"a segment must write the output {self.output!r}: they write {sorted(known)}. Name one of these."
            )

    def _last_reads(self) -> Iterator[tuple[str, ...]]:
        """Name the values that are not needed any more after every segment."""
        alive = set(self.inputs)
        for number, segment in enumerate(self.segments):
            alive.update(segment.writes)
            needed = {self.output}.union(*(later.reads for later in self.segments[number + 1 :]))
            yield tuple(sorted(alive - needed))
            alive &= needed
