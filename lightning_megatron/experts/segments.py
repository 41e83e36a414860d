"""A layer as a list of pieces that say what they read and write, and whether their sizes are known in advance."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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


def run_segments(segments: Sequence[Segment], inputs: dict[str, Any], output: str) -> Any:
    """Run segments one after the other, and let go of every value after the last one that reads it.

    Args:
        segments: What to run, in order.
        inputs: Values by name.
        output: Name of the value to return.
    """
    values = dict(inputs)
    for number, segment in enumerate(segments):
        found = segment.run(*(values[name] for name in segment.reads))
        values.update(zip(segment.writes, found if len(segment.writes) > 1 else (found,), strict=True))
        needed = {output}.union(*(later.reads for later in segments[number + 1 :]))
        for name in values.keys() - needed:
            del values[name]
    return values[output]


def check_segments(segments: Iterable[Segment], inputs: Iterable[str], output: str) -> None:
    """Refuse segments that read what no earlier one has written, or of which none writes the output.

    Raises:
        ValueError: If a value is missing.
    """
    known = set(inputs)
    for segment in segments:
        missing = [name for name in segment.reads if name not in known]
        if missing:
            raise ValueError(
                f"a segment may read what is there before it: {segment.name!r} reads {missing}, and there is "
                f"{sorted(known)}. Segments run in order. Move it behind the one that writes it."
            )
        known.update(segment.writes)
    if output not in known:
        raise ValueError(f"a segment must write the output {output!r}: they write {sorted(known)}. Name one of these.")
