"""The dynamic loss scale changes as documented, and all ranks agree on an overflow."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.training import DynamicLossScale
from tests.training.runs import Run, single
from tests.world import run_world

# Each row: the steps (x overflow, . clean), and the scale after every step, with
# growth_interval 2, hysteresis 2, minimum 2 and initial scale 8.
TRANSITIONS = [
    ("..", [8, 16]),
    ("....", [8, 16, 16, 32]),
    ("xx", [8, 4]),
    ("xxx", [8, 4, 2]),
    ("xxxx", [8, 4, 2, 2]),
    ("x.x", [8, 8, 4]),  # a clean step does not restore the hysteresis
    ("x..x", [8, 8, 16, 16]),  # growth does
    (".x..", [8, 8, 8, 16]),  # an overflow restarts the count of clean steps
    ("xx..x", [8, 4, 4, 8, 8]),
]


@pytest.mark.parametrize(
    ("steps", "expected"), TRANSITIONS, ids=[steps for steps, _ in TRANSITIONS]
)
def test_scale_after_every_step_follows_overflows_and_clean_steps(
    steps: str, expected: list[float]
) -> None:
    scale = DynamicLossScale(8, growth_interval=2, hysteresis=2, minimum=2)
    actual = []
    for step in steps:
        scale.update(step == "x")
        actual.append(scale.scale)
    assert actual == expected


def test_restored_scale_continues_like_an_uninterrupted_one() -> None:
    steps = "x..xx.x...xx"
    uninterrupted = DynamicLossScale(64, growth_interval=2)
    for cut in range(len(steps)):
        uninterrupted, first = (
            DynamicLossScale(64, growth_interval=2),
            DynamicLossScale(64, growth_interval=2),
        )
        second = DynamicLossScale(1024, growth_interval=2)
        for step in steps[:cut]:
            first.update(step == "x")
        second.load_state_dict(first.state_dict())
        for step in steps[cut:]:
            second.update(step == "x")
        for step in steps:
            uninterrupted.update(step == "x")
        assert second.state_dict() == uninterrupted.state_dict()


def test_repeated_overflows_at_the_lowest_scale_raise() -> None:
    scale = DynamicLossScale(1, floor_patience=3)
    for step in "xx.xx":
        scale.update(step == "x")
    with pytest.raises(RuntimeError, match="3 steps in a row overflowed at the lowest scale, 1.0"):
        scale.update(True)


@pytest.mark.parametrize(
    "arguments", [{"initial": 0.5}, {"minimum": 0}, {"growth_interval": 0}, {"hysteresis": 0}]
)
def test_arguments_out_of_range_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ParallelPlanError):
        DynamicLossScale(**arguments)


def test_unscaling_divides_by_the_scale() -> None:
    run = single({"weight": nn.Parameter(torch.ones(2))})
    run.give("weight", torch.tensor([8.0, -16.0]))
    DynamicLossScale(8).unscale_(run.main)
    assert run.main.gradients()[0].tolist() == [1.0, -2.0]


@pytest.mark.parametrize(
    ("value", "overflows"),
    [
        (1.0, False),
        (65504.0, False),
        (float("inf"), True),
        (float("-inf"), True),
        (float("nan"), True),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_only_values_that_are_not_finite_count_as_overflow(
    value: float, overflows: bool, dtype: torch.dtype
) -> None:
    run = single({"weight": nn.Parameter(torch.ones(3, dtype=dtype))})
    run.give("weight", torch.tensor([1.0, value, 2.0], dtype=dtype))
    assert DynamicLossScale().found_nonfinite(run.main) is overflows


def _overflow_on_the_last_rank(rank: int, size: int) -> list[bool]:
    mesh = ParallelMesh.create(ParallelLayout(size, pp=2))
    run = Run({f"weight{rank}": nn.Parameter(torch.ones(1))}, mesh)
    overflows = []
    for value in (1.0, float("nan")):
        # The last rank alone has a value that is not finite, and rank 0 has no gradient at all.
        if rank:
            run.give(f"weight{rank}", torch.tensor([value if rank == size - 1 else 1.0]))
        overflows.append(DynamicLossScale().found_nonfinite(run.main))
    mesh.destroy()
    return overflows


def test_all_ranks_agree_on_an_overflow() -> None:
    assert run_world(_overflow_on_the_last_rank, 2) == [[False, True]] * 2
