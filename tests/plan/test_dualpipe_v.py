"""The bubble of dualpipe-v has its stated size if forwards and backwards overlap in one unit."""

from __future__ import annotations

from itertools import pairwise

import pytest

from lightning_megatron.plan import Action, Schedule, build_schedule

# Time of a forward, of both halves of a backward, and of a forward and a backward together.
TIMES = [
    (1, 1, 1, 3),
    (10, 10, 10, 30),
    (10, 11, 9, 30),
    (10, 12, 8, 30),
    (10, 12, 8, 25),
    (10, 13, 7, 26),
]


def units_of(schedule: Schedule, rank: int) -> list[tuple[Action, ...]]:
    """Join each full backward with the forward of the other chunk before it.

    As in the source, the last stage does not join its first pair.
    """
    units: list[tuple[Action, ...]] = []
    joins = rank < schedule.num_stages - 1
    for action in schedule.actions(rank):
        follows_forward = bool(units) and [part.kind for part in units[-1]] == ["F"]
        if action.kind == "B" and follows_forward and joins:
            units[-1] = (*units[-1], action)
            continue
        joins = joins or action.kind == "B"
        units.append((action,))
    return units


def inputs_of(schedule: Schedule, rank: int, action: Action) -> list[tuple[str, int, int]]:
    virtual = schedule.virtual_stage(rank, action.chunk)
    if action.kind == "F":
        return [("F", virtual - 1, action.microbatch)] if virtual else []
    if action.kind == "W":
        return []
    if virtual == schedule.placement.num_virtual_stages - 1:
        return [("F", virtual, action.microbatch)]
    return [("B", virtual + 1, action.microbatch)]


def longest_wait(schedule: Schedule, times: dict[str, int], together: int) -> int:
    """Simulate units whose results all come at their end; return the longest wait of a stage."""
    rows = [units_of(schedule, rank) for rank in range(schedule.num_stages)]
    done: dict[tuple[str, int, int], int] = {}
    spans: list[list[tuple[int, int]]] = [[] for _ in rows]
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while len(spans[rank]) < len(row):
                unit = row[len(spans[rank])]
                needs = [name for action in unit for name in inputs_of(schedule, rank, action)]
                if any(name not in done for name in needs):
                    break
                free = spans[rank][-1][1] if spans[rank] else 0
                start = max([free, *(done[name] for name in needs)])
                stop = start + (together if len(unit) == 2 else times[unit[0].kind])
                spans[rank].append((start, stop))
                for action in unit:
                    virtual = schedule.virtual_stage(rank, action.chunk)
                    kind = "B" if action.kind == "I" else action.kind
                    done[kind, virtual, action.microbatch] = stop
                moved = True
    assert [len(row) for row in spans] == [len(row) for row in rows]
    return max(sum(after[0] - before[1] for before, after in pairwise(row)) for row in spans)


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(("forward", "half", "weight", "together"), TIMES)
def test_the_bubble_equals_the_stated_size_at_equal_times_and_is_never_larger(
    stages: int, forward: int, half: int, weight: int, together: int
) -> None:
    backward = half + weight
    times = {"F": forward, "B": backward, "I": half, "W": weight}
    stated = (stages - 1) * (together + backward - 3 * weight)
    for microbatches in (2 * stages, 4 * stages + 1):
        wait = longest_wait(build_schedule("dualpipe-v", stages, microbatches, 2), times, together)
        assert wait <= stated
        if forward == half == weight:
            assert wait == stated


def test_most_backwards_are_joined_with_a_forward() -> None:
    schedule = build_schedule("dualpipe-v", 4, 32, 2)
    for rank in range(4):
        pairs = [unit for unit in units_of(schedule, rank) if len(unit) == 2]
        assert all(forward.chunk != backward.chunk for forward, backward in pairs)
        assert len(pairs) >= 2 * 32 - 4 * 4
