"""Counted rows of ranks in a step equal the plans of clones in Python numbers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron.experts.layer import MixtureOfExperts
from lightning_megatron.experts.transport import cloning_dispatcher
from lightning_megatron.experts.transport.cloning import PlacedClones, place_clones
from lightning_megatron.experts.transport.rank_rows import RankRows, gather_rows
from lightning_megatron.groups.collectives import all_gather_objects
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.plan.cloning import ClonePlan, CloneSettings, plan_clones
from lightning_megatron.plan.experts import ExpertsConfig
from lightning_megatron.plan.layout import ParallelLayout
from tests.world import run_world

SIZE, MICROBATCHES = 6, 3
CONFIG = ExpertsConfig(num_experts=8, top_k=3, ffn_hidden_size=8, capacity_factor=1.5)
LAYOUTS: dict[str, dict[str, Any]] = {
    "ep4": {"ep": 4},
    "ep2": {"ep": 2},
    "tp2, etp2": {"tp": 2, "ep": 2, "etp": 2},
    "tp2, etp1": {"tp": 2, "ep": 4, "etp": 1},
}


def count_rows(mesh: ParallelMesh, clones: CloneSettings | None) -> RankRows:
    """Train on microbatches, and return the counted rows of a layer."""
    layer = MixtureOfExperts(SIZE, CONFIG, mesh, transport="all_gather", clones=clones).double()
    weight = torch.randn(8, SIZE, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    # Larger scores of the first experts make the first rank the busiest.
    weight[:2] += 0.5
    layer.router.weight.data = weight
    layer.rank_rows.is_on = True
    for microbatch in range(MICROBATCHES):
        generator = torch.Generator().manual_seed(10 * mesh.dp.rank + microbatch)
        hidden = torch.randn(8, 2, SIZE, generator=generator, dtype=torch.float64) + 0.5
        layer.train(microbatch != 1)
        layer(hidden)
    return layer.rank_rows


def gather_figures(counts: Mapping[int, Tensor], mesh: ParallelMesh) -> dict[str, Any]:
    (step,) = gather_rows(counts, mesh).values()
    return {name: value.tolist() for name, value in vars(step).items()}


def figures_of_plans(plans: list[list[ClonePlan]], counts: list[list[Any]]) -> dict[str, Any]:
    """Return the figures of a step from the plans of all replicas and microbatches."""
    all_plans = [plan for of_replica in plans for plan in of_replica]
    homes = all_plans[0].layout.homes
    before = [
        [
            sum(map(sum, (row[first : first + homes] for row in of_microbatch)))
            for first in range(0, 8, homes)
        ]
        for of_replica in counts
        for of_microbatch in of_replica
    ]
    moved = sum(sum(plan.amounts) for plan in all_plans)
    after = [sum(rows) for rows in zip(*(plan.rows for plan in all_plans), strict=True)]
    return {
        "before": [sum(rows) for rows in zip(*before, strict=True)],
        "after": after,
        "moved": moved / sum(after),
        "clones": sum(owner >= 0 for plan in all_plans for owner in plan.owners) / len(all_plans),
        "away": [
            sum(owner // homes == rank for plan in all_plans for owner in plan.owners)
            / len(all_plans)
            for rank in range(8 // homes)
        ],
        "num_microbatches": len(all_plans),
        "needed": max(max(plan.rows) for plan in all_plans),
    }


def record_and_place(
    planned: list[Any], counts: Tensor, places: int, min_rows: int
) -> PlacedClones:
    planned.append(counts.tolist())
    return place_clones(counts, places, min_rows)


def _compare_layouts(rank: int, size: int) -> dict[str, tuple[Any, ...]]:
    results = {}
    for name, sizes in LAYOUTS.items():
        mesh = ParallelMesh.create(ParallelLayout(size, **sizes))
        plain = gather_figures({5: count_rows(mesh, None).sums}, mesh)
        planned: list[Any] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cloning_dispatcher, "place_clones", partial(record_and_place, planned))
            cloned = gather_figures({5: count_rows(mesh, CloneSettings(2, min_rows=2)).sums}, mesh)
        # The second microbatch is an evaluation.
        del planned[1]
        counts = all_gather_objects(planned, mesh.on_cpu("edp"))
        plans = [
            [plan_clones(of_microbatch, 2, 2) for of_microbatch in of_replica]
            for of_replica in counts
        ]
        results[name] = plain, cloned, figures_of_plans(plans, counts)
        mesh.destroy()
    return results


def test_counted_rows_equal_those_of_the_plans() -> None:
    ranks = run_world(_compare_layouts, 4)
    for name in LAYOUTS:
        plain, cloned, planned = ranks[0][name]
        assert cloned.keys() == planned.keys()
        for figure, value in planned.items():
            assert cloned[figure] == pytest.approx(value), f"{name}: {figure}"
        assert cloned["moved"] > 0.05, name
        assert max(cloned["after"]) < max(cloned["before"]), name
        assert plain["before"] == plain["after"] == cloned["before"], name
        assert (plain["moved"], plain["clones"]) == (0, 0), name
        assert plain["needed"] > cloned["needed"], name
        assert all(results[name][:2] == (plain, cloned) for results in ranks), name


def test_rows_are_counted_only_while_counting_is_on() -> None:
    rows = RankRows(torch.device("cpu"))
    rows.add_(torch.tensor([7]), None, 0)
    assert rows.counted() is None
    assert not rows.sums.any()
    rows.is_on = True
    rows.add_(torch.tensor([7]), None, 0)
    rows.add_(torch.tensor([5]), None, 0)
    counts = rows.counted()
    assert counts is not None
    rows.sums.zero_()
    assert counts.tolist() == [12, 0, 0, 0, 0, 2, 7]
    assert gather_rows({}, ParallelMesh.single()) == {}
