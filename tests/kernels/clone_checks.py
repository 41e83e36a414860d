"""Checks that compare kernels that plan clones with the Python plan and with torch operators."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lightning_megatron.experts.transport.cloning import (
    PlacedClones,
    physical_by_torch,
    place_by_torch,
)
from lightning_megatron.experts.transport.permute import sort_by_expert
from lightning_megatron.kernels import triton as kernels
from lightning_megatron.plan.expert_clones import ExpertPlaces
from tests.clone_oracle import physical_experts, plan_clones
from tests.kernels.checks import Draw
from tests.plan.clone_draws import drawn_counts, drawn_selections


@dataclass(frozen=True)
class CloneSizes:
    """Sizes for the checks of clones.

    Args:
        plans: Number of plans of drawn counts.
        routings: Number of routings of drawn selections.
        layers: Ranks, experts, places per rank, tokens per rank, choices per token.
    """

    plans: int
    routings: int
    layers: tuple[tuple[int, int, int, int, int], ...]


def check_clones(draw: Draw, sizes: CloneSizes) -> None:
    """Compare plans and physical experts with those of the Python plan."""
    for number, drawn in enumerate(drawn_counts(sizes.plans)):
        plan = plan_clones(drawn.counts, drawn.places, drawn.min_rows)
        dtype = torch.int32 if number % 2 else torch.int64
        counts = torch.tensor(drawn.counts, dtype=dtype, device=draw.device)
        owners, amounts, off, rows = kernels.assign_clones(counts, drawn.places, drawn.min_rows)
        actual = owners.tolist(), amounts.tolist(), [*map(tuple, off.tolist())], rows.tolist()
        expected = [*plan.owners], [*plan.amounts], [*plan.off], [*plan.rows]
        assert actual == expected, f"{drawn}: {actual} instead of {expected}"
        assert {owners.dtype, amounts.dtype, off.dtype, rows.dtype} == {torch.int64}
    for routing in drawn_selections(sizes.routings):
        plan = plan_clones(routing.counts, routing.places)
        layout = plan.layout
        counts = torch.tensor(routing.counts, device=draw.device)
        clones = PlacedClones(layout, *kernels.assign_clones(counts, routing.places, 0))
        for rank, selections in enumerate(routing.selections):
            experts = torch.tensor(selections, device=draw.device)
            row_map = sort_by_expert(experts, 0, layout.num_experts)
            physical = kernels.physical_experts(
                experts, row_map.rows, row_map.ends, clones.owners, clones.off[rank],
                layout.homes, layout.places,
            )  # fmt: skip
            expected_ways = physical_experts(selections, plan, rank)
            assert [*map(tuple, physical.tolist())] == [*expected_ways], f"{routing}, rank {rank}"
    for layer in sizes.layers:
        check_layer(draw, *layer)


def check_layer(
    draw: Draw, ranks: int, num_experts: int, places: int, tokens: int, top_k: int
) -> None:
    """Compare the plan of a layer of any size with operators of torch."""
    what = f"{ranks, num_experts, places, tokens, top_k}"
    layout = ExpertPlaces(ranks, num_experts, places)
    popularity = torch.rand(num_experts, generator=draw.generator, device=draw.device)
    noise = torch.rand(ranks, tokens, num_experts, generator=draw.generator, device=draw.device)
    selected = (noise + popularity).topk(top_k).indices
    nowhere = torch.rand(selected.shape, generator=draw.generator, device=draw.device) < 0.1
    selected[nowhere] = -1
    maps = [sort_by_expert(experts, 0, num_experts) for experts in selected]
    counts = torch.stack([row_map.ends.diff(prepend=row_map.ends.new_zeros(1)) for row_map in maps])
    expected = place_by_torch(counts, layout, 3)
    actual = PlacedClones(layout, *kernels.assign_clones(counts, places, 3))
    for name in ("owners", "amounts", "off", "rows"):
        assert torch.equal(getattr(actual, name), getattr(expected, name)), f"{what}: {name}"
    assert expected.amounts.any(), f"{what}: nothing moves"
    for rank, (experts, row_map) in enumerate(zip(selected, maps, strict=True)):
        physical = kernels.physical_experts(
            experts, row_map.rows, row_map.ends, actual.owners, actual.off[rank],
            layout.homes, places,
        )  # fmt: skip
        expected_physical = physical_by_torch(experts, row_map, expected, rank)
        assert torch.equal(physical, expected_physical), f"{what}: physical experts of rank {rank}"
