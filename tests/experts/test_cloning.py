"""Clones planned by operators of torch are those of the plan in whole numbers."""

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
    """Read a plan from the device."""
    return ClonePlan(
        clones.layout,
        tuple(clones.owners.tolist()),
        tuple(clones.amounts.tolist()),
        tuple(map(tuple, clones.off.tolist())),
        tuple(clones.rows.tolist()),
    )


def test_the_plan_is_that_in_whole_numbers() -> None:
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


def test_selections_go_where_the_plan_sends_them() -> None:
    num_moved = 0
    for drawn in drawn_selections(150):
        plan = plan_clones(drawn.counts, drawn.places)
        clones = place_clones(torch.tensor(drawn.counts), drawn.places)
        for rank, selections in enumerate(drawn.selections):
            expected = physical_experts(selections, plan, rank)
            found = physical_of(drawn, clones, rank)
            assert found.tolist() == list(map(list, expected))
            num_moved += sum(plan.off[rank])
    assert num_moved > 1000, "hardly any selection moves"


def test_an_expert_in_several_places_fills_them_in_order() -> None:
    counts = [[12, 0, 0], [0, 0, 0], [0, 1, 0]]
    experts = torch.zeros(12, 1, dtype=torch.int64)
    clones = place_clones(torch.tensor(counts), 1)
    found = to_physical(experts, sort_by_expert(experts, 0, 3), clones, 0)
    assert clones.owners.tolist() == [-1, 0, 0]
    assert found.flatten().tolist() == [3] * 3 + [5] * 4 + [0] * 5
    assert clones.rows.tolist() == [5, 4, 4]


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ParallelPlanError, match=r"places \(3\) must be at most 2"):
        place_clones(torch.zeros(2, 4, dtype=torch.int64), 3)


def test_more_experts_or_places_than_the_kernels_take_are_said_once(
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
def test_the_host_reads_nothing(device: str) -> None:
    # On the device without storage no number can be read, and nothing of another device joined.
    mode = FakeTensorMode() if device == "cpu" else nullcontext()
    with mode:
        counts = torch.zeros(4, 8, dtype=torch.int64, device=device)
        with pytest.raises(RuntimeError):
            int(counts.sum())
        clones = place_clones(counts, 2, 5)
        experts = torch.zeros(10, 3, dtype=torch.int64, device=device)
        found = to_physical(experts, sort_by_expert(experts, 0, 8), clones, 1)
        assert found.shape == (10, 3)
        assert clones.off.shape == (4, 8)
        assert {found.device.type, clones.rows.device.type} == {device}


def drawn_routing(ranks: int, experts: int, top_k: int, exponent: float, seed: int) -> Tensor:
    """Count the selections of 1024 tokens a rank; the experts' popularity follows Zipf's law."""
    draw = torch.Generator().manual_seed(seed)
    order = torch.randperm(experts, generator=draw)
    popularity = -exponent * torch.log(1.0 + order)
    noise = -torch.log(-torch.log(torch.rand(ranks, 1024, experts, generator=draw)))
    selected = (popularity + noise).topk(top_k).indices.flatten(1)
    return torch.stack([torch.bincount(own, minlength=experts) for own in selected])


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
def test_ranks_are_as_even_as_reckoned(
    ranks: int,
    experts: int,
    top_k: int,
    exponent: float,
    before: float,
    one_shot: float,
    after: dict[int, float],
) -> None:
    # Rows of the busiest rank over the mean, averaged over 30 draws.
    found: dict[object, float] = dict.fromkeys(("before", "one shot", *after), 0.0)
    for seed in range(30):
        counts = drawn_routing(ranks, experts, top_k, exponent, seed)
        share = ranks / int(counts.sum()) / 30
        found["before"] += share * int(counts.sum(0).view(ranks, -1).sum(1).max())
        found["one shot"] += share * max(plan_clones(counts.tolist(), 1, 0, assign_one_shot).rows)
        for places in after:
            found[places] += share * int(place_clones(counts, places).rows.max())
    # Without clones the mean of 30 draws itself scatters by up to 0.05.
    assert found.pop("before") == pytest.approx(before, abs=0.1)
    assert found == {
        name: pytest.approx(value, abs=0.03)
        for name, value in {"one shot": one_shot, **after}.items()
    }
