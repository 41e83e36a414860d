"""Statistics of a step equal a loop over tokens, and statistics of two ranks equal one process."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.experts.routing.balance import add_over_tokens_
from lightning_megatron.experts.routing.statistics import (
    RouterStatistics,
    StepStatistics,
    clear_statistics_,
    step_statistics,
)
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.plan.layout import ParallelLayout
from tests.experts.routed_by_hand import (
    LOSSES,
    SETTINGS,
    B,
    D,
    E,
    S,
    config_of,
    draw,
    route_by_hand,
    router_of,
)
from tests.oracles import assert_equal, sequence_part
from tests.world import run_world

LAYERS, MICROBATCHES = (1, 3), 4


def draw_microbatch(layer: int, number: int) -> Tensor:
    """Draw the tokens of a layer in a microbatch, which differ between layers and microbatches."""
    return draw(S, B, D, seed=10 * layer + number)


def count_step(
    settings: Mapping[str, Any], mesh: ParallelMesh
) -> tuple[dict[int, RouterStatistics], Mapping[int, StepStatistics]]:
    """Route the tokens of this rank in a step; return counts of layers and statistics of the step."""
    config = config_of(**settings)
    router = router_of(config, mesh)
    layers = {layer: RouterStatistics(config, mesh.device) for layer in LAYERS}
    for layer, statistics in layers.items():
        for number in range(mesh.dp.rank, MICROBATCHES, mesh.dp.size):
            hidden = draw_microbatch(layer, number).chunk(mesh.cp.size)[mesh.cp.rank]
            statistics.add_(router(sequence_part(hidden, mesh)))
    return layers, step_statistics(layers, mesh)


def test_statistics_of_a_step_equal_a_loop_over_its_tokens() -> None:
    for name, settings in SETTINGS.items():
        layers, statistics = count_step(settings, ParallelMesh.single())
        router = router_of(config_of(**settings))
        assert tuple(statistics) == LAYERS
        for layer, step in statistics.items():
            references = [
                route_by_hand(draw_microbatch(layer, number), router)
                for number in range(MICROBATCHES)
            ]
            assert step.load.tolist() == [
                sum(loads)
                for loads in zip(*(reference.load for reference in references), strict=True)
            ]
            assert int(step.dropped) == sum(reference.dropped for reference in references), name
            assert_equal(
                step.entropy,
                sum(reference.entropy for reference in references) / MICROBATCHES,
                f"{name}: entropy",
            )
            balance = (
                sum(reference.balance_loss for reference in references)
                / MICROBATCHES
                / LOSSES["aux_loss"]
            )
            assert_equal(step.balance_loss, balance, f"{name}: balance_loss")
            z = sum(reference.z_loss for reference in references) / MICROBATCHES / LOSSES["z_loss"]
            assert_equal(step.z_loss, z, f"{name}: z_loss")
            assert torch.equal(step.load, layers[layer].load), name


def test_even_experts_have_maximal_entropy_and_a_balance_loss_of_one() -> None:
    config = config_of()
    router, statistics = router_of(config), RouterStatistics(config, torch.device("cpu"))
    with torch.no_grad():
        router.weight.zero_()
    statistics.add_(router(draw(S, B, D)))
    step = step_statistics({0: statistics}, ParallelMesh.single())[0]
    assert math.isclose(float(step.entropy), math.log(E), rel_tol=1e-12)
    assert math.isclose(float(step.balance_loss), 1.0, rel_tol=1e-12)


def test_statistics_are_counted_and_cleared_in_place() -> None:
    config = config_of(capacity_factor=0.7)
    with torch.device("meta"):
        statistics = RouterStatistics(config, ParallelMesh.single().device)
    sums = statistics.sums
    routing = router_of(config)(draw(S, B, D))
    statistics.add_(routing)
    once = sums.clone()
    assert float(once[0]) > 0
    assert torch.equal(statistics.load, routing.load.long())
    statistics.add_(routing)
    assert_equal(sums, 2 * once, "two microbatches")
    clear_statistics_([statistics])
    assert float(sums.abs().max()) == 0.0
    assert statistics.sums is sums


def test_statistics_without_losses_or_microbatches_are_zero() -> None:
    config = config_of(aux_loss=0.0, z_loss=0.0)
    statistics = RouterStatistics(config, torch.device("cpu"))
    empty = step_statistics({0: statistics}, ParallelMesh.single())[0]
    assert float(empty.entropy) == float(empty.balance_loss) == 0.0
    statistics.add_(router_of(config)(draw(S, B, D)))
    step = step_statistics({0: statistics}, ParallelMesh.single())[0]
    assert float(step.balance_loss) == float(step.z_loss) == 0.0
    assert step_statistics({}, ParallelMesh.single()) == {}


LAYOUTS: dict[str, tuple[dict[str, int], bool]] = {
    "dp": ({}, False),
    "cp": ({"cp": 2}, False),
    "tp": ({"tp": 2}, False),
    "tp with sequence parallelism": ({"tp": 2}, True),
}


def check_layouts(rank: int, size: int) -> None:
    for layout_name, (sizes, sequence_parallel) in LAYOUTS.items():
        mesh = ParallelMesh.create(
            ParallelLayout(size, **sizes), sequence_parallel=sequence_parallel
        )
        for settings in ({"scoring": "sigmoid"}, {"capacity_factor": 0.7}):
            if mesh.cp.size > 1 and "capacity_factor" in settings:
                continue  # The capacity depends on the tokens of a cp rank.
            _, expected_steps = count_step(settings, ParallelMesh.single())
            layers, actual_steps = count_step(settings, mesh)
            for layer in LAYERS:
                for field in ("load", "dropped", "entropy", "balance_loss", "z_loss"):
                    actual, expected = (
                        getattr(actual_steps[layer], field),
                        getattr(expected_steps[layer], field),
                    )
                    assert_equal(
                        actual.double(), expected.double(), f"{layout_name}, layer {layer}: {field}"
                    )
                assert torch.equal(
                    actual_steps[layer].load,
                    add_over_tokens_(layers[layer].load.to(torch.int64, copy=True), mesh),
                ), layout_name
        mesh.destroy()


def test_statistics_of_two_ranks_match_one_process() -> None:
    run_world(check_layouts, 2)
