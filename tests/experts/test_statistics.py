"""What a step's statistics say against a loop over tokens, and on two ranks against one process."""

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


def microbatch(layer: int, number: int) -> Tensor:
    """Draw the tokens that a layer has in a microbatch of the step, so that layers and microbatches
    differ.
    """
    return draw(S, B, D, seed=10 * layer + number)


def count(
    settings: Mapping[str, Any], mesh: ParallelMesh
) -> tuple[dict[int, RouterStatistics], Mapping[int, StepStatistics]]:
    """Route this rank's part of a step."""
    config = config_of(**settings)
    router = router_of(config, mesh)
    layers = {layer: RouterStatistics(config, mesh.device) for layer in LAYERS}
    for layer, statistics in layers.items():
        for number in range(mesh.dp.rank, MICROBATCHES, mesh.dp.size):
            hidden = microbatch(layer, number).chunk(mesh.cp.size)[mesh.cp.rank]
            statistics.add_(router(sequence_part(hidden, mesh)))
    return layers, step_statistics(layers, mesh)


def test_a_step_equals_a_loop_over_its_tokens() -> None:
    for name, settings in SETTINGS.items():
        layers, found = count(settings, ParallelMesh.single())
        router = router_of(config_of(**settings))
        assert tuple(found) == LAYERS
        for layer, step in found.items():
            twins = [
                route_by_hand(microbatch(layer, number), router) for number in range(MICROBATCHES)
            ]
            assert step.load.tolist() == [
                sum(loads) for loads in zip(*(twin.load for twin in twins), strict=True)
            ]
            assert int(step.dropped) == sum(twin.dropped for twin in twins), name
            assert_equal(
                step.entropy, sum(twin.entropy for twin in twins) / MICROBATCHES, f"{name}: entropy"
            )
            balance = sum(twin.balance_loss for twin in twins) / MICROBATCHES / LOSSES["aux_loss"]
            assert_equal(step.balance_loss, balance, f"{name}: balance_loss")
            z = sum(twin.z_loss for twin in twins) / MICROBATCHES / LOSSES["z_loss"]
            assert_equal(step.z_loss, z, f"{name}: z_loss")
            assert torch.equal(step.load, layers[layer].load), name


def test_even_experts_have_the_entropy_of_their_number_and_a_balance_loss_of_one() -> None:
    config = config_of()
    router, statistics = router_of(config), RouterStatistics(config, torch.device("cpu"))
    with torch.no_grad():
        router.weight.zero_()
    statistics.add_(router(draw(S, B, D)))
    found = step_statistics({0: statistics}, ParallelMesh.single())[0]
    assert math.isclose(float(found.entropy), math.log(E), rel_tol=1e-12)
    assert math.isclose(float(found.balance_loss), 1.0, rel_tol=1e-12)


def test_counting_keeps_its_tensors_and_begins_again_when_cleared() -> None:
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


def test_layers_without_losses_and_steps_without_microbatches_have_zeros() -> None:
    config = config_of(aux_loss=0.0, z_loss=0.0)
    statistics = RouterStatistics(config, torch.device("cpu"))
    empty = step_statistics({0: statistics}, ParallelMesh.single())[0]
    assert float(empty.entropy) == float(empty.balance_loss) == 0.0
    statistics.add_(router_of(config)(draw(S, B, D)))
    found = step_statistics({0: statistics}, ParallelMesh.single())[0]
    assert float(found.balance_loss) == float(found.z_loss) == 0.0
    assert step_statistics({}, ParallelMesh.single()) == {}


CUTS: dict[str, tuple[dict[str, int], bool]] = {
    "dp": ({}, False),
    "cp": ({"cp": 2}, False),
    "tp": ({"tp": 2}, False),
    "tp with sequence parallelism": ({"tp": 2}, True),
}


def check_cuts(rank: int, size: int) -> None:
    for cut, (sizes, sequence_parallel) in CUTS.items():
        mesh = ParallelMesh.create(
            ParallelLayout(size, **sizes), sequence_parallel=sequence_parallel
        )
        for settings in ({"scoring": "sigmoid"}, {"capacity_factor": 0.7}):
            if mesh.cp.size > 1 and "capacity_factor" in settings:
                continue  # A capacity is that of a cp rank.
            _, expected = count(settings, ParallelMesh.single())
            layers, found = count(settings, mesh)
            for layer in LAYERS:
                for field in ("load", "dropped", "entropy", "balance_loss", "z_loss"):
                    actual, wanted = getattr(found[layer], field), getattr(expected[layer], field)
                    assert_equal(actual.double(), wanted.double(), f"{cut}, layer {layer}: {field}")
                assert torch.equal(
                    found[layer].load,
                    add_over_tokens_(layers[layer].load.to(torch.int64, copy=True), mesh),
                ), cut
        mesh.destroy()


def test_two_ranks_say_what_one_process_says() -> None:
    run_world(check_cuts, 2)
