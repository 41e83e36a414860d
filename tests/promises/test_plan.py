"""README: rank lists and orders of schedules are Megatron-Core's, and every schedule runs to its end.

The golden files were written by Megatron-Core's own code.
"""

from __future__ import annotations

import json
from collections import Counter
from itertools import combinations, pairwise, permutations
from pathlib import Path
from typing import Any

import pytest

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.plan import ParallelLayout, build_schedule, simulate
from lightning_megatron.plan.microbatches import MicrobatchRule
from lightning_megatron.plan.partition import LayerCosts, partition_of
from lightning_megatron.plan.schedule import NAMED_SCHEDULES
from tests.plan.pipelines import order_of

GOLDEN = Path(__file__).parents[1] / "golden"
ARGUMENTS = ("world_size", "tp", "pp", "cp", "ep", "etp", "order", "rank_offset")


def cases_of(name: str) -> list[dict[str, Any]]:
    return json.loads((GOLDEN / name).read_text(encoding="utf-8"))["cases"]


def text_of(groups: list[list[int]]) -> str:
    return "|".join(" ".join(map(str, group)) for group in groups)


def test_rank_lists_equal_megatron_core_for_every_order() -> None:
    orders = set()
    for case in cases_of("rank_groups.json"):
        arguments = {name: case[name] for name in ARGUMENTS}
        if "dense" not in case:
            with pytest.raises(ParallelPlanError):
                ParallelLayout(**arguments)
            continue
        orders.add(case["order"])
        layout = ParallelLayout(**arguments)
        dense = {name: text_of(layout.groups(name)) for name in case["dense"]}
        expert = {name: text_of(layout.expert_groups(name)) for name in case["expert"]}
        assert (dense, expert) == (case["dense"], case["expert"]), case
        assert_each_rank_finds_its_own_groups(layout)
        if "embedding" in case:
            assert text_of(layout.embedding_groups()) == case["embedding"], case
            assert text_of(layout.position_embedding_groups()) == case["position_embedding"], case
    assert {"-".join(order) for order in permutations(["tp", "cp", "ep", "dp", "pp"])} <= orders


def assert_each_rank_finds_its_own_groups(layout: ParallelLayout) -> None:
    for grid in (layout.dense_grid, layout.expert_grid):
        for axes in (grid.axes[:1], grid.axes[1:3], grid.axes[::2]):
            for group in grid.groups(axes):
                assert grid.group_of(group[0], axes) == grid.group_of(group[-1], axes)
                assert list(grid.group_of(group[-1], axes)) == group


def test_orders_of_1f1b_and_interleaved_schedules_equal_megatron_core() -> None:
    cases = cases_of("pipeline_orders.json")
    assert len(cases) > 150
    assert any(case["group"] and case["group"] > case["pp"] for case in cases)
    for case in cases:
        name = "1f1b" if case["vpp"] == 1 else "interleaved"
        schedule = build_schedule(
            name, case["pp"], case["m"], case["vpp"], microbatch_group_size=case["group"]
        )
        orders = [" ".join(map(str, order_of(schedule, rank))) for rank in range(case["pp"])]
        assert orders == case["orders"], case


@pytest.mark.parametrize("name", list(NAMED_SCHEDULES))
def test_no_schedule_deadlocks_and_every_microbatch_passes_once(name: str) -> None:
    chunks = NAMED_SCHEDULES[name].chunks or 2
    built = 0
    for stages in range(1, 7):
        for microbatches in range(1, 15):
            try:
                schedule = build_schedule(name, stages, microbatches, chunks)
            except ParallelPlanError:
                continue
            built += 1
            assert simulate(schedule).length > 0  # a deadlock raises
            once = {(chunk, one): 1 for chunk in range(chunks) for one in range(microbatches)}
            for rank in range(stages):
                passes: dict[str, Counter] = {kind: Counter() for kind in "FBIW"}
                for action in schedule.actions(rank):
                    passes[action.kind][action.chunk, action.microbatch] += 1
                assert passes["F"] == once
                assert passes["B"] + passes["I"] == once
                assert passes["I"] == passes["W"]
    assert built > 10


def test_stages_are_idle_as_long_as_the_formulas_say() -> None:
    for stages, microbatches in ((1, 1), (2, 3), (4, 8), (6, 6)):
        bubble = simulate(build_schedule("1f1b", stages, microbatches)).bubble
        assert bubble == pytest.approx((stages - 1) / (microbatches + stages - 1))
    for name, stages, microbatches, chunks in (
        ("1f1b", 2, 3, 1),
        ("1f1b", 4, 8, 1),
        ("interleaved", 4, 8, 2),
        ("interleaved", 2, 6, 3),
    ):
        schedule = build_schedule(name, stages, microbatches, chunks)
        rule = MicrobatchRule(None, name, stages, chunks, None)
        assert rule.idle_share(microbatches) == pytest.approx(simulate(schedule).bubble)


def test_no_division_of_the_layers_would_give_the_busiest_stage_less() -> None:
    for layers, head, stages in (
        ((1.0,) * 7, 0.0, 3),
        ((1.0,) * 8, 2.5, 4),
        ((1.0, 4.0, 1.5, 1.0, 4.0, 1.0), 1.0, 3),
        ((1.0,) * 7 + (4.0, 1.0), 1.0, 4),
        ((4.0, 1.0, 1.0, 1.0), 0.5, 2),
    ):
        costs = LayerCosts(layers, 0.0, head)
        divisions = [
            [end - start for start, end in pairwise((0, *cuts, len(layers)))]
            for cuts in combinations(range(1, len(layers) + 1), stages - 1)
        ]
        best = min(max(costs.of_virtual_stages(division)) for division in divisions)
        counts = partition_of(costs, ParallelLayout(stages, pp=stages)).counts
        assert max(costs.of_virtual_stages(counts)) == pytest.approx(best)
