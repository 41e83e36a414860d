"""Gradients of one process: norms, clipping, recordings, the dynamic loss scale, and the names of
what ranks share.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_megatron.errors import ParallelPlanError, UnsupportedError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.optimizer import DynamicLossScale, grad_norm
from lightning_megatron.optimizer.clip import clip_by_value_
from lightning_megatron.optimizer.gradient_buckets import overlapping_pieces
from lightning_megatron.optimizer.main_parameters import original_name, resolve_ties
from tests.optimizer.runs import Run


def run_of(names: str, size: int = 1, dtype: torch.dtype = torch.float32) -> Run:
    named = {name: nn.Parameter(torch.ones(size, dtype=dtype)) for name in names}
    return Run(named, ParallelMesh.single())


def gradient_of(run: Run, name: str) -> list[float]:
    gradient = run.main.main(name).grad
    assert gradient is not None
    return gradient.tolist()


def test_norm_without_gradients_is_zero_and_of_half_precision_is_summed_in_float32():
    run = run_of("a", 2)
    assert grad_norm(run.main).dtype == torch.float32
    assert grad_norm(run.main).item() == 0
    run.clip(1.0)
    clip_by_value_(run.main, 1.0)
    run, gradient = run_of("a", 4096, torch.bfloat16), torch.full((4096,), 0.01).bfloat16()
    run.backward({"a": gradient})
    run.finish()
    assert grad_norm(run.main).item() == pytest.approx(gradient.double().norm().item(), rel=1e-5)


def test_norm_follows_replaced_and_changed_gradients():
    run = run_of("abc", 2)
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


def test_clipping_by_norm_can_be_limited_to_names_and_clipping_by_value_equals_torch():
    run = run_of("ab")
    run.backward({name: torch.tensor([4.0]) for name in "ab"})
    run.finish()
    assert run.clip(1.0, names=["b"]) == 4.0
    assert gradient_of(run, "a") + gradient_of(run, "b") == pytest.approx([4.0, 1.0])
    run = run_of("a", 5)
    run.backward({"a": torch.tensor([-3.0, -0.5, 0.0, 0.5, 3.0])})
    run.finish()
    clip_by_value_(run.main, 0.75)
    assert gradient_of(run, "a") == [-0.75, -0.5, 0.0, 0.5, 0.75]


def test_gradients_start_from_zero_after_a_step_without_zero_grad(caplog):
    run = run_of("a")
    for _ in range(3):
        run.backward({"a": torch.tensor([4.0])})
        run.finish()
    assert gradient_of(run, "a") == [4.0]
    assert len(caplog.records) == 1
    assert "zero_grad() was not called" in caplog.text


def test_sparse_gradients_are_refused():
    run = Run({"weight": nn.Parameter(torch.ones(4, 2))}, ParallelMesh.single())
    out = nn.functional.embedding(torch.tensor([1]), run.main.parameter("weight"), sparse=True)
    with pytest.raises(UnsupportedError, match="sparse=False"):
        out.sum().backward()


def test_overlapping_pieces_are_the_ranges_of_several_ranks():
    assert overlapping_pieces([[(0, 4), (8, 10)], [(4, 8), (8, 10)]]) == [(8, 10)]
    assert overlapping_pieces([[(0, 4)], [(0, 4)]]) == [(0, 4)]
    assert overlapping_pieces([[(0, 4)], [(2, 6)]]) == [(2, 4)]
    assert overlapping_pieces([[(0, 4)], [(4, 8)]]) == []
    assert overlapping_pieces([[(0, 0)], [(0, 4)]]) == []


def test_a_tied_copy_finds_its_original_below_the_longest_common_prefix():
    names = {"word.weight", "model.word.weight"}
    assert original_name("model.head.weight", "word.weight", names) == "model.word.weight"
    assert original_name("head.weight", "word.weight", names) == "word.weight"
    assert original_name("head.weight", "absent.weight", names) is None
    with pytest.raises(UnsupportedError, match="no stage holds"):
        resolve_ties([[("a", None)], [("head", "b")]])


def test_reductions_and_nested_recordings_inside_a_recording_are_refused():
    reducer = run_of("ab", 2).reducer
    with pytest.raises(RuntimeError, match="no gradient sum over"), reducer.recording():
        reducer.start_reduction(0)
    # The recording has ended with its error.
    nested = pytest.raises(RuntimeError, match="must not be nested")
    with reducer.recording(), nested, reducer.recording():
        pass


@pytest.mark.parametrize("state", ["empty", "filled"])
def test_recording_in_a_requested_state_does_not_depend_on_the_slots(state):
    run = run_of("ab", 2)
    run.backward({"a": torch.ones(2)}, is_last=False)
    slots = run.reducer._slots
    for slot in slots.values():
        slot.gradient.fill_(8.0)
    with run.reducer.recording(state) as recorded:
        assert {slot.is_empty for slot in slots.values()} == {state == "empty"}
        run.backward({"a": torch.ones(2), "b": torch.ones(2)}, is_last=False)
    assert recorded.overwritten == (recorded.slots if state == "empty" else ())
    assert [slot.is_empty for slot in slots.values()] == [False, True]
    expected = 1.0 if state == "empty" else 9.0
    assert all(slot.gradient.eq(expected).all() for slot in slots.values())


def test_a_recording_over_mixed_sums_names_those_that_it_overwrites():
    run = run_of("ab", 2)
    run.backward({"a": torch.ones(2)}, is_last=False)
    with run.reducer.recording() as recorded:
        run.backward({"a": torch.ones(2), "b": torch.ones(2)}, is_last=False)
    slots = run.reducer._slots
    assert set(recorded.slots) == set(slots.values())
    assert recorded.overwritten == (slots["b"],)


# ---- the dynamic loss scale

# Each row: the steps (x overflow, . clean), and the scale after every step, with
# growth_interval 2, hysteresis 2, minimum 2 and initial scale 8.
TRANSITIONS = [
    ("xxxx", [8, 4, 2, 2]),
    ("x.x", [8, 8, 4]),  # a clean step does not restore the hysteresis
    ("x..x", [8, 8, 16, 16]),  # growth does
    (".x..", [8, 8, 8, 16]),  # an overflow restarts the count of clean steps
]


def scales_of(scale: DynamicLossScale, steps: str) -> list[float]:
    """Return the scale after each step."""
    scales = []
    for step in steps:
        scale.update(step == "x")
        scales.append(scale.scale)
    return scales


def test_scale_after_every_step_follows_overflows_and_clean_steps():
    for steps, expected in TRANSITIONS:
        scale = DynamicLossScale(8, growth_interval=2, hysteresis=2, minimum=2)
        assert scales_of(scale, steps) == expected, steps


def test_restored_scale_continues_like_an_uninterrupted_one():
    steps = "x..xx.x...xx"
    for cut in range(len(steps)):
        whole, first = (DynamicLossScale(64, growth_interval=2) for _ in range(2))
        second = DynamicLossScale(1024, growth_interval=2)
        scales_of(first, steps[:cut])
        second.load_state_dict(first.state_dict())
        assert scales_of(whole, steps)[cut:] == scales_of(second, steps[cut:])
        assert second.state_dict() == whole.state_dict()


def test_repeated_overflows_at_the_lowest_scale_and_arguments_out_of_range_raise():
    scale = DynamicLossScale(1, floor_patience=3)
    scales_of(scale, "xx.xx")
    with pytest.raises(RuntimeError, match="3 steps in a row overflowed at the lowest scale, 1.0"):
        scale.update(True)
    for arguments in ({"initial": 0.5}, {"minimum": 0}, {"growth_interval": 0}, {"hysteresis": 0}):
        with pytest.raises(ParallelPlanError):
            DynamicLossScale(**arguments)  # type: ignore[arg-type]


def test_gradients_are_scaled_and_only_values_that_are_not_finite_overflow():
    run = run_of("a", 2)
    run.give("a", torch.tensor([8.0, -16.0]))
    run.main.scale_gradients_(1 / 8)
    assert run.main.gradients()[0].tolist() == [1.0, -2.0]
    for dtype in (torch.float32, torch.float16):
        run, largest = run_of("a", 3, dtype), 65504.0
        for value in (1.0, largest, torch.inf, -torch.inf, torch.nan):
            run.give("a", torch.tensor([1.0, value, 2.0], dtype=dtype))
            assert DynamicLossScale().found_nonfinite(run.main) is not (abs(value) <= largest)
