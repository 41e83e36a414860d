"""Clones planned by operators of torch equal the plan in Python numbers."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_megatron.errors import ParallelPlanError, SpeedWarning
from lightning_megatron.experts.transport import cloning
from lightning_megatron.experts.transport.cloning import PlacedClones, place_clones, to_physical
from lightning_megatron.experts.transport.permute import sort_by_expert
from lightning_megatron.layers import choose_kernels
from lightning_megatron.plan.cloning import (
    ClonePlan,
    assign_one_shot,
    physical_experts,
    plan_clones,
)
from tests.plan.clone_draws import DrawnSelections, drawn_counts, drawn_selections


def as_plan(clones: PlacedClones) -> ClonePlan:
    """Copy a plan from the device to Python numbers."""
    return ClonePlan(
        clones.layout,
        tuple(clones.owners.tolist()),
        tuple(clones.amounts.tolist()),
        tuple(map(tuple, clones.off.tolist())),
        tuple(clones.rows.tolist()),
    )


def test_plans_of_torch_operators_equal_plans_in_python_numbers() -> None:
    for number, drawn in enumerate(drawn_counts(1000)):
        dtype = torch.int32 if number % 2 else torch.int64
        counts = torch.tensor(drawn.counts, dtype=dtype)
        clones = place_clones(counts, drawn.places, drawn.min_rows)
        assert as_plan(clones) == plan_clones(drawn.counts, drawn.places, drawn.min_rows)
        assert {clones.owners.dtype, clones.off.dtype, clones.rows.dtype} == {torch.int64}
        assert counts.tolist() == drawn.counts, "the counts have changed"


def physical_of(drawn: DrawnSelections, clones: PlacedClones, rank: int) -> Tensor:
    experts = torch.tensor(drawn.selections[rank])
    return to_physical(experts, sort_by_expert(experts, 0, drawn.experts), clones, rank)


def test_selections_go_to_the_places_of_the_plan() -> None:
    num_moved = 0
    for drawn in drawn_selections(150):
        plan = plan_clones(drawn.counts, drawn.places)
        clones = place_clones(torch.tensor(drawn.counts), drawn.places)
        for rank, selections in enumerate(drawn.selections):
            expected = physical_experts(selections, plan, rank)
            actual = physical_of(drawn, clones, rank)
            assert actual.tolist() == list(map(list, expected))
            num_moved += sum(plan.off[rank])
    assert num_moved > 1000, "hardly any selection moves"


def test_an_expert_in_several_places_fills_the_places_in_order() -> None:
    counts = [[12, 0, 0], [0, 0, 0], [0, 1, 0]]
    experts = torch.zeros(12, 1, dtype=torch.int64)
    clones = place_clones(torch.tensor(counts), 1)
    actual = to_physical(experts, sort_by_expert(experts, 0, 3), clones, 0)
    assert clones.owners.tolist() == [-1, 0, 0]
    assert actual.flatten().tolist() == [3] * 3 + [5] * 4 + [0] * 5
    assert clones.rows.tolist() == [5, 4, 4]


def test_too_many_places_are_refused() -> None:
    with pytest.raises(ParallelPlanError, match=r"places \(3\) must be at most 2"):
        place_clones(torch.zeros(2, 4, dtype=torch.int64), 3)


def test_more_experts_and_places_than_the_kernels_support_warn_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    choose_kernels.warn_of_slow_path.cache_clear()
    kernels = SimpleNamespace(MAX_PLACED_EXPERTS=7)
    monkeypatch.setattr(cloning, "fused_kernels", lambda tensor: kernels)
    counts = torch.tensor([[9, 0, 0, 0], [5, 1, 0, 2]])
    with pytest.warns(SpeedWarning, match="4 experts in 8 places .* at most 7 of both"):
        clones = place_clones(counts.repeat(2, 1), 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert as_plan(place_clones(counts.repeat(2, 1), 2)) == as_plan(clones)
    assert as_plan(clones) == plan_clones(counts.repeat(2, 1).tolist(), 2)
    with pytest.raises(AttributeError, match="assign_clones"):
        place_clones(counts, 1)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_planning_reads_nothing_from_the_device(device: str) -> None:
    # Fake and meta tensors raise if a number is read or devices are mixed.
    mode = FakeTensorMode() if device == "cpu" else nullcontext()
    with mode:
        counts = torch.zeros(4, 8, dtype=torch.int64, device=device)
        with pytest.raises(RuntimeError):
            int(counts.sum())
        clones = place_clones(counts, 2, 5)
        experts = torch.zeros(10, 3, dtype=torch.int64, device=device)
        physical = to_physical(experts, sort_by_expert(experts, 0, 8), clones, 1)
        assert physical.shape == (10, 3)
        assert clones.off.shape == (4, 8)
        assert {physical.device.type, clones.rows.device.type} == {device}


def draw_counts(ranks: int, experts: int, top_k: int, exponent: float, seed: int) -> Tensor:
    """Count selections of 1024 tokens for each rank; popularity of experts follows Zipf's law."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(experts, generator=generator)
    popularity = -exponent * torch.log(1.0 + order)
    noise = -torch.log(-torch.log(torch.rand(ranks, 1024, experts, generator=generator)))
    selected = (popularity + noise).topk(top_k).indices.flatten(1)
    return torch.stack([torch.bincount(of_rank, minlength=experts) for of_rank in selected])


@pytest.mark.parametrize(
    ("ranks", "experts", "top_k", "exponent", "before", "one_shot", "after"),
    [
        (4, 16, 4, 0.3, 1.14, 1.015, {1: 1.015, 2: 1.003, 4: 1.0}),
        (4, 16, 4, 1.0, 1.47, 1.038, {1: 1.038, 2: 1.007, 4: 1.0}),
        (4, 64, 8, 0.6, 1.20, 1.039, {1: 1.035, 2: 1.002, 4: 1.0}),
        (4, 128, 8, 1.0, 1.33, 1.045, {1: 1.041, 2: 1.008, 4: 1.0}),
        (8, 64, 8, 1.0, 1.73, 1.142, {1: 1.082, 2: 1.01, 4: 1.0}),
    ],
)
def test_clones_balance_ranks_by_the_expected_amount(
    ranks: int,
    experts: int,
    top_k: int,
    exponent: float,
    before: float,
    one_shot: float,
    after: dict[int, float],
) -> None:
    # Ratio of rows of the busiest rank to the mean, averaged over 30 draws.
    imbalances: dict[object, float] = dict.fromkeys(("before", "one shot", *after), 0.0)
    for seed in range(30):
        counts = draw_counts(ranks, experts, top_k, exponent, seed)
        weight = ranks / int(counts.sum()) / 30
        imbalances["before"] += weight * int(counts.sum(0).view(ranks, -1).sum(1).max())
        imbalances["one shot"] += weight * max(
            plan_clones(counts.tolist(), 1, 0, assign_one_shot).rows
        )
        for places in after:
            imbalances[places] += weight * int(place_clones(counts, places).rows.max())
    # Without clones the mean of 30 draws varies by up to 0.05.
    assert imbalances.pop("before") == pytest.approx(before, abs=0.1)
    assert imbalances == {
        name: pytest.approx(value, abs=0.03)
        for name, value in {"one shot": one_shot, **after}.items()
    }
