"""Stages have contiguous layers, all of them, and the lowest possible maximum cost."""

from __future__ import annotations

from functools import cache
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.plan import split_layers

COSTS = st.sampled_from([0.0, 0.3, 1.0, 2.5])


def counts_of(layers: tuple[tuple[range, ...], ...]) -> list[list[int]]:
    return [[len(chunk) for chunk in stage] for stage in layers]


@cache
def compositions(total: int, parts: int, least: int) -> tuple[tuple[int, ...], ...]:
    spare = total - parts * least
    found = []
    for bars in combinations(range(spare + parts - 1), parts - 1):
        edges = (-1, *bars, spare + parts - 1)
        found.append(
            tuple(least + right - left - 1 for left, right in zip(edges, edges[1:], strict=False))
        )
    return tuple(found)


@given(st.integers(1, 12), st.integers(1, 5), st.integers(1, 3), COSTS, COSTS)
def test_the_busiest_stage_is_as_light_as_can_be(
    num_layers: int, stages: int, chunks: int, embedding: float, loss: float
) -> None:
    if stages * chunks > num_layers:
        with pytest.raises(ParallelPlanError, match="every virtual stage holds at least one layer"):
            split_layers(num_layers, stages, chunks, embedding, loss)
        return
    layers = split_layers(num_layers, stages, chunks, embedding, loss)
    in_order = [
        layer
        for chunk in range(chunks)
        for stage in range(stages)
        for layer in layers[stage][chunk]
    ]
    assert in_order == list(range(num_layers))
    assert all(count >= 1 for stage in counts_of(layers) for count in stage)

    def busiest(totals: tuple[int, ...]) -> float:
        costs = [float(total) for total in totals]
        costs[0] += embedding
        costs[-1] += loss
        return max(costs)

    best = min(busiest(totals) for totals in compositions(num_layers, stages, chunks))
    assert busiest(tuple(sum(stage) for stage in counts_of(layers))) == pytest.approx(best)


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 4))
def test_an_even_division_is_even(stages: int, chunks: int, each: int) -> None:
    layers = split_layers(stages * chunks * each, stages, chunks)
    assert {count for stage in counts_of(layers) for count in stage} == {each}


@pytest.mark.parametrize(
    ("arguments", "counts"),
    [
        ((10, 4), [2, 3, 3, 2]),
        ((9, 4), [2, 2, 3, 2]),
        ((11, 4), [2, 3, 3, 3]),
        ((8, 4, 1, 1.0, 1.0), [1, 3, 3, 1]),
        ((8, 4, 1, 0.0, 1.0), [2, 2, 3, 1]),
        ((7, 4, 1, 0.0, 1.0), [2, 2, 2, 1]),
        ((4, 4, 1, 9.0, 9.0), [1, 1, 1, 1]),
    ],
)
def test_first_and_last_stage_hold_fewer_layers(
    arguments: tuple[int, ...], counts: list[int]
) -> None:
    assert [sum(stage) for stage in counts_of(split_layers(*arguments))] == counts


def test_virtual_stages_alternate_between_the_stages() -> None:
    assert split_layers(8, 2, 2) == ((range(0, 2), range(4, 6)), (range(2, 4), range(6, 8)))
    assert counts_of(split_layers(9, 2, 2)) == [[2, 2], [3, 2]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (3, 4),
            "num_layers (3) must be at least pp x vpp (4 x 1 = 4), because every virtual stage holds at least one "
            "layer. Use pp of 1, 2 or 3 with vpp 1.",
        ),
        (
            (6, 4, 2),
            "num_layers (6) must be at least pp x vpp (4 x 2 = 8), because every virtual stage holds at least one "
            "layer. Use pp of 1, 2 or 3 with vpp 2, or vpp of 1 with pp 4.",
        ),
        (
            (30, 32),
            "num_layers (30) must be at least pp x vpp (32 x 1 = 32), because every virtual stage holds at least one "
            "layer. Use pp of 1 to 30 with vpp 1.",
        ),
        ((4, 2, 1, -1.0), "embedding_cost must not be negative: it is -1.0 layers. Use 0 or more."),
        (
            (0, 1),
            (
                "num_layers must be a whole number of at least 1: it is 0. Use num_layers of 1 or "
                "more."
            ),
        ),
    ],
)
def test_layers_that_cannot_be_cut_are_refused(arguments: tuple[int, ...], message: str) -> None:
    with pytest.raises(ParallelPlanError) as error:
        split_layers(*arguments)
    assert str(error.value) == message
