"""Gradients of one process: norms, clipping, recordings, the dynamic loss scale, and the names of
what ranks share.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_megatron.errors import ParallelPlanError, UnsupportedError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.slot_states import state_of
from lightning_megatron.training import (
    DynamicLossScale,
    clip_by_norm_,
    clip_by_value_,
    grad_norm,
)
from lightning_megatron.training.shared_gradients import (
    original_name,
    overlapping_pieces,
    resolve_ties,
)
from tests.training.runs import Run, single
from tests.training.synthetic import (
    recorded_messages,
)


def test_norm_without_gradients_is_a_float32_zero() -> None:
    run = Run({"weight": nn.Parameter(torch.ones(2))}, ParallelMesh.single())
    norm = grad_norm(run.main)
    assert norm.dtype == torch.float32
    assert norm.item() == 0
    clip_by_norm_(run.main, 1.0)
    clip_by_value_(run.main, 1.0)


def test_norm_of_half_precision_gradients_is_summed_in_float32() -> None:
    run = Run(
        {"weight": nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))}, ParallelMesh.single()
    )
    gradient = torch.full((4096,), 0.01, dtype=torch.bfloat16)
    run.backward({"weight": gradient})
    run.finish()
    assert grad_norm(run.main).item() == pytest.approx(gradient.double().norm().item(), rel=1e-5)


def test_norm_follows_replaced_and_changed_gradients() -> None:
    run = Run({name: nn.Parameter(torch.ones(2)) for name in "abc"}, ParallelMesh.single())
    for step in (1, 2):
        run.backward({name: torch.full((2,), float(step)) for name in "abc"})
        run.finish()
        assert grad_norm(run.main).item() == pytest.approx(step * 6**0.5)
        assert grad_norm(run.main, {"b", "c"}).item() == pytest.approx(step * 2.0)
        run.main.main("a").grad = torch.full((2,), 5.0)
        assert grad_norm(run.main).item() == pytest.approx((50 + 4 * step**2) ** 0.5)
        run.main.main("b").grad.fill_(0.0)
        assert grad_norm(run.main).item() == pytest.approx((50 + 2 * step**2) ** 0.5)
        run.main.main("c").grad = None
        assert grad_norm(run.main).item() == pytest.approx(50**0.5)


def test_norm_and_clipping_can_be_limited_to_names() -> None:
    run = Run({name: nn.Parameter(torch.ones(1)) for name in "ab"}, ParallelMesh.single())
    run.backward({name: torch.tensor([4.0]) for name in "ab"})
    run.finish()
    assert clip_by_norm_(run.main, 1.0, names=["b"]).item() == 4.0
    assert run.main.main("a").grad.item() == 4.0
    assert run.main.main("b").grad.item() == pytest.approx(1.0)


def test_clip_by_value_equals_torch() -> None:
    run = Run({"weight": nn.Parameter(torch.ones(5))}, ParallelMesh.single())
    run.backward({"weight": torch.tensor([-3.0, -0.5, 0.0, 0.5, 3.0])})
    run.finish()
    clip_by_value_(run.main, 0.75)
    assert run.main.main("weight").grad.tolist() == [-0.75, -0.5, 0.0, 0.5, 0.75]


def test_gradients_start_from_zero_after_a_step_without_zero_grad() -> None:
    run = Run({"weight": nn.Parameter(torch.ones(1))}, ParallelMesh.single())
    with recorded_messages() as records:
        for _ in range(3):
            run.backward({"weight": torch.tensor([4.0])})
            run.finish()
    assert run.main.main("weight").grad.item() == 4.0
    (record,) = records
    assert "zero_grad() was not called" in record


def test_sparse_gradients_are_refused() -> None:
    run = Run({"weight": nn.Parameter(torch.ones(4, 2))}, ParallelMesh.single())
    out = nn.functional.embedding(torch.tensor([1]), run.main.parameter("weight"), sparse=True)
    with pytest.raises(UnsupportedError, match="sparse=False"):
        out.sum().backward()


def test_overlapping_pieces_are_the_ranges_of_several_ranks() -> None:
    assert overlapping_pieces([[(0, 4), (8, 10)], [(4, 8), (8, 10)]]) == [(8, 10)]
    assert overlapping_pieces([[(0, 4)], [(0, 4)]]) == [(0, 4)]
    assert overlapping_pieces([[(0, 4)], [(2, 6)]]) == [(2, 4)]
    assert overlapping_pieces([[(0, 4)], [(4, 8)]]) == []
    assert overlapping_pieces([[(0, 0)], [(0, 4)]]) == []


def test_a_tied_copy_finds_its_original_below_the_longest_common_prefix() -> None:
    names = {"word.weight", "model.word.weight"}
    assert original_name("model.head.weight", "word.weight", names) == "model.word.weight"
    assert original_name("head.weight", "word.weight", names) == "word.weight"
    assert original_name("head.weight", "absent.weight", names) is None
    with pytest.raises(UnsupportedError, match="no stage holds"):
        resolve_ties([[("a", None)], [("head", "b")]])


def single_training() -> Run:
    return Run({name: nn.Parameter(torch.ones(2)) for name in "ab"}, ParallelMesh.single())


def test_reductions_and_nested_recordings_inside_a_recording_are_refused() -> None:
    run = single_training()
    with (
        pytest.raises(RuntimeError, match="no gradient sum over the ranks may start"),
        run.reducer.recording(),
    ):
        run.reducer.start_reduction(0)
    with (
        pytest.raises(RuntimeError, match="must not be nested"),
        run.reducer.recording(),
        run.reducer.recording(),
    ):
        pass
    # Both recordings have ended with their errors.
    run.backward({"a": torch.ones(2), "b": torch.ones(2)})
    run.finish()
    assert len(run.main.gradients()) == 2


@pytest.mark.parametrize("state", ["empty", "filled"])
def test_recording_in_a_requested_state_does_not_depend_on_the_slots(state: Any) -> None:
    run = single_training()
    run.backward({"a": torch.ones(2)}, is_last=False)
    slots = run.reducer._slots
    for slot in slots.values():
        slot.gradient.fill_(8.0)
    with run.reducer.recording(state) as recorder:
        assert state_of(slots.values()) == state
        run.backward({"a": torch.ones(2), "b": torch.ones(2)}, is_last=False)
    assert recorder.recorded.is_first == (state == "empty")
    assert [slot.is_empty for slot in slots.values()] == [False, True]
    expected = 1.0 if state == "empty" else 9.0
    assert all(slot.gradient.eq(expected).all() for slot in slots.values())


def test_a_recording_over_mixed_sums_is_refused() -> None:
    run = single_training()
    run.backward({"a": torch.ones(2)}, is_last=False)
    with run.reducer.recording() as recorder:
        run.backward({"a": torch.ones(2), "b": torch.ones(2)}, is_last=False)
    with pytest.raises(RuntimeError, match="overwrote 1 of 2, such as that of 'b'") as error:
        _ = recorder.recorded
    assert "state 'empty' or 'filled'" in str(error.value)


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


def test_scale_after_every_step_follows_overflows_and_clean_steps() -> None:
    for steps, expected in TRANSITIONS:
        scale = DynamicLossScale(8, growth_interval=2, hysteresis=2, minimum=2)
        actual = []
        for step in steps:
            scale.update(step == "x")
            actual.append(scale.scale)
        assert actual == expected, steps
