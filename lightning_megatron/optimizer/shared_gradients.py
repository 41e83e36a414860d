"""Search for parameters that several ranks have, whose gradients must be summed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from lightning_megatron.errors import UnsupportedError


def overlapping_pieces(
    ranges_by_rank: Sequence[Sequence[tuple[int, int]]],
) -> list[tuple[int, int]]:
    """List the row ranges [start, stop) that more than one rank has, in order."""
    borders = sorted(
        {border for ranges in ranges_by_rank for row_range in ranges for border in row_range}
    )
    pieces = []
    for start, stop in zip(borders, borders[1:], strict=False):
        starts = [local_start(ranges, start, stop) for ranges in ranges_by_rank]
        if len(starts) - starts.count(None) > 1:
            pieces.append((start, stop))
    return pieces


def local_start(ranges: Sequence[tuple[int, int]], start: int, stop: int) -> int | None:
    """Return the first local row of a piece on a rank that has some ranges; None without it."""
    before = 0
    for low, high in ranges:
        if low <= start and stop <= high:
            return before + start - low
        before += high - low
    return None


def resolve_ties(stages: Sequence[Sequence[tuple[str, str | None]]]) -> list[tuple[str, str]]:
    """Pair the full name of each tied copy's original with the copy, in the order of the stages.

    Every stage lists its names, each with that of its original in the same model, or None.
    """
    originals = {name for stage in stages for name, tied_to in stage if tied_to is None}
    pairs = []
    for stage in stages:
        for copy, tied_to in stage:
            if tied_to is None:
                continue
            original = original_name(copy, tied_to, originals)
            if original is None:
                raise UnsupportedError(
                    f"a tied parameter must have its original on another stage: {copy!r} is a copy "
                    f"of {tied_to!r}, which no stage holds. Its gradient would be incomplete. "
                    "Build all stages from the same model."
                )
            pairs.append((original, copy))
    return pairs


def repeated_names(stages: Sequence[Sequence[tuple[str, str | None]]]) -> frozenset[str]:
    """Return the names of the parameters that several stages have, such as those of a teacher."""
    counts = Counter(name for stage in stages for name, tied_to in stage if tied_to is None)
    return frozenset(name for name, count in counts.items() if count > 1)


def check_on_one_stage(trained: Sequence[str], repeated: Collection[str]) -> None:
    """Refuse to train parameters that several stages have."""
    names = [name for name in trained if name in repeated]
    if names:
        raise UnsupportedError(
            "a parameter that several pipeline stages have cannot be trained: "
            f"{', '.join(map(repr, names[:5]))} {'are' if len(names) > 1 else 'is'} outside of the "
            "model that is cut into stages. The gradients would differ from stage to stage. Keep "
            "such parameters frozen during the whole fit, move them into that model, or use pp=1."
        )


def original_name(copy: str, tied_to: str, names: Collection[str]) -> str | None:
    """Return the full name of a tied copy's original; None if there is none.

    Args:
        copy: Full name of the copy, such as ``model.head.weight``.
        tied_to: Name of the original within the same model, such as ``embedding.word.weight``.
    """
    parts = copy.split(".")
    for length in range(len(parts) - 1, -1, -1):
        candidate = ".".join([*parts[:length], tied_to])
        if candidate in names:
            return candidate
    return None
