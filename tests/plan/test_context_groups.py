"""Context groups hold every token once, divide no document, and are as small as possible."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.plan.context import ContextCut
from lightning_megatron.plan.context_groups import ContextGroups, context_group_sizes

CPS = st.sampled_from([2, 4, 8])


@st.composite
def packed(draw: st.DrawFn) -> tuple[int, int, list[int]]:
    """Draw cp, the length of rows, and the borders of the documents of one or two rows."""
    cp = draw(CPS)
    length = 2 * cp * draw(st.integers(1, 4))
    inner = draw(st.lists(st.integers(0, 2 * length), max_size=12))
    return cp, length, sorted([0, length, 2 * length, *inner])


@given(packed())
def test_documents_stay_in_the_smallest_groups(case: tuple[int, int, list[int]]) -> None:
    cp, length, borders = case
    groups = ContextGroups.of(borders, length, cp)
    document = [sum(stop <= token for stop in borders[1:]) for token in range(2 * length)]

    def has_shared_document(size: int) -> bool:
        holders: dict[int, set[int]] = {}
        for rank in range(cp):
            for position in ContextGroups(cp, size, length).positions(rank):
                for row in (0, length):
                    holders.setdefault(document[row + position], set()).add(rank // size)
        return any(len(holding_groups) > 1 for holding_groups in holders.values())

    assert not has_shared_document(groups.size)
    assert groups.size == 1 or has_shared_document(groups.size // 2)


@given(CPS, st.data(), st.integers(1, 4))
def test_every_position_is_held_once(cp: int, data: st.DataObject, piece: int) -> None:
    groups = ContextGroups(cp, data.draw(st.sampled_from(context_group_sizes(cp))), 2 * cp * piece)
    held = [groups.positions(rank) for rank in range(cp)]
    assert sorted(sum(held, [])) == list(range(groups.seq_length))
    assert {len(positions) for positions in held} == {2 * piece}
    for rank in range(cp):
        joined = sum((held[peer] for peer in groups.ranks(rank)), [])
        assert rank in groups.ranks(rank)
        assert sorted(joined) == list(groups.window_of(rank))


@given(CPS, st.integers(1, 4))
def test_a_single_group_equals_the_context_cut_of_rows(cp: int, piece: int) -> None:
    length = 2 * cp * piece
    cut = ContextCut(cp, length)
    for rank in range(cp):
        assert ContextGroups(cp, cp, length).positions(rank) == cut.positions(rank)
        contiguous = range(rank * 2 * piece, (rank + 1) * 2 * piece)
        assert ContextGroups(cp, 1, length).positions(rank) == list(contiguous)


@pytest.mark.parametrize(
    ("lengths", "size"),
    [([4, 4, 4, 4], 1), ([3, 1, 0, 4, 8], 2), ([2, 4, 2, 8], 2), ([6, 4, 6], 4), ([16], 4)],
)
def test_group_sizes_of_worked_examples(lengths: list[int], size: int) -> None:
    assert ContextGroups.of([0, *accumulate(lengths)], 16, 4).size == size


@pytest.mark.parametrize(("cp", "legal"), [(1, "Use 2."), (3, "Use 2 or 4."), (6, "Use 4 or 8.")])
def test_cp_must_be_a_power_of_two(cp: int, legal: str) -> None:
    with pytest.raises(ParallelPlanError, match=legal):
        context_group_sizes(cp)


def test_invalid_sizes_and_rows_are_refused() -> None:
    with pytest.raises(ParallelPlanError, match=r"size \(3\).*Use 1, 2 or 4\."):
        ContextGroups(4, 3, 16)
    with pytest.raises(ParallelPlanError, match=r"seq_length \(12\) must be a multiple"):
        ContextGroups.of([0, 12], 12, 4)
    with pytest.raises(ParallelPlanError, match="must end at the ends of rows"):
        ContextGroups.of([0, 10, 32], 16, 4)
