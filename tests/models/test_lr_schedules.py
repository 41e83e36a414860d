"""Schedules equal those of transformers and Megatron-LM at every step, and resume exactly."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from lightning_megatron import (
    ConstantSchedule,
    CosineSchedule,
    InverseSqrtSchedule,
    LinearSchedule,
    WeightDecaySchedule,
    WSDSchedule,
)
from lightning_megatron.errors import ParallelPlanError

PEAKS = (0.02, 0.005)
W, N, D = 7, 40, 12


def adamw(*decays: float) -> torch.optim.AdamW:
    """Return an optimizer whose groups have different learning rates and given weight decays."""
    groups = [
        {"params": [torch.nn.Parameter(torch.ones(2))], "lr": peak, "weight_decay": decay}
        for peak, decay in zip(PEAKS, decays or (0.1, 0.0), strict=True)
    ]
    return torch.optim.AdamW(groups)


def values_of_steps(
    scheduler: LRScheduler, num_steps: int = N + 10, key: str = "lr"
) -> list[list[float]]:
    """Return a value of each parameter group before every step."""
    values = []
    for _ in range(num_steps):
        values.append([group[key] for group in scheduler.optimizer.param_groups])
        scheduler.optimizer.step()
        scheduler.step()
    return values


TRANSFORMERS_SCHEDULES: dict[str, tuple[Any, str, int, dict[str, Any]]] = {
    "cosine with a floor": (
        lambda o: CosineSchedule(o, N, W, min_ratio=0.1), "cosine_with_min_lr", W, {"min_lr_rate": 0.1}
    ),
    "inverse square root": (lambda o: InverseSqrtSchedule(o, W), "inverse_sqrt", W, {}),
    "inverse square root with a time scale": (
        lambda o: InverseSqrtSchedule(o, W, timescale=30), "inverse_sqrt", W, {"timescale": 30}
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TRANSFORMERS_SCHEDULES)
def test_learning_rates_equal_those_of_transformers(name):
    optimization = pytest.importorskip("transformers.optimization")
    make, kind, warmup, options = TRANSFORMERS_SCHEDULES[name]
    steps = {"num_warmup_steps": warmup, "num_training_steps": N}
    reference = optimization.get_scheduler(
        kind, adamw(), **steps, scheduler_specific_kwargs=options
    )
    actual = values_of_steps(make(adamw()))
    # The cosine of transformers rises again after its end.
    for step, rates in enumerate(values_of_steps(reference, N + 1)):
        assert actual[step] == pytest.approx(rates, rel=1e-13, abs=1e-18), step


def megatron_rate(step: int, peak: float, floor: float, initial: float, style: str) -> float:
    """Return the learning rate that Megatron-LM documents for its options after some steps."""
    decays = {"linear": lambda u: 1 - u, "cosine": lambda u: (math.cos(math.pi * u) + 1) / 2}
    decays |= {"minus_sqrt": lambda u: 1 - math.sqrt(u)}
    if step <= W:
        return initial + (peak - initial) * step / W
    if style == "inverse-square-root":
        # It reaches the floor before step N, where Megatron-LM jumps to it.
        return max(floor, peak * W**0.5 / step**0.5)
    if step > N:
        return floor
    done = (step - W) / (N - W) if "WSD" not in style else max(0.0, (step - (N - D)) / D)
    return floor + (peak - floor) * decays[style.removeprefix("WSD ")](done)


MEGATRON_STYLES: dict[str, Callable[..., LRScheduler]] = {
    "linear": lambda o, **rates: LinearSchedule(o, N, W, **rates),
    "cosine": lambda o, **rates: CosineSchedule(o, N, W, **rates),
    "inverse-square-root": lambda o, **rates: InverseSqrtSchedule(o, W, **rates),
    "WSD linear": lambda o, **rates: WSDSchedule(o, N, D, "linear", W, **rates),
    "WSD cosine": lambda o, **rates: WSDSchedule(o, N, D, "cosine", W, **rates),
    "WSD minus_sqrt": lambda o, **rates: WSDSchedule(o, N, D, warmup_steps=W, **rates),
}


@pytest.mark.parametrize("style", MEGATRON_STYLES)
def test_learning_rates_equal_those_of_megatron(style):
    floor, initial = 0.0045, 0.001
    actual = values_of_steps(MEGATRON_STYLES[style](adamw(), initial_lr=initial, min_lr=floor))
    for step, rates in enumerate(actual):
        expected = [megatron_rate(step, peak, floor, initial, style) for peak in PEAKS]
        assert rates == pytest.approx(expected, rel=1e-13), step
    assert actual[0] == [initial, initial]
    assert actual[W] == list(PEAKS)


@pytest.mark.parametrize(("shape", "start", "end"), [("linear", 0.02, 0.1), ("cosine", 0.3, 0.0)])
def test_weight_decays_equal_those_of_megatron(shape, start, end):
    schedule = WeightDecaySchedule(adamw(0.1, 0.0), start, end, N, shape)
    actual = values_of_steps(schedule, key="weight_decay")
    for step, (decay, zero_decay) in enumerate(actual):
        fraction = min(1.0, step / N)
        factor = fraction if shape == "linear" else (math.cos(math.pi * (1 - fraction)) + 1) / 2
        assert decay == pytest.approx(start + factor * (end - start), rel=1e-13, abs=1e-17), step
        assert zero_decay == 0.0
    assert actual[N:] == [[end, 0.0]] * 10
    constant = WeightDecaySchedule(adamw(0.1, 0.0), 0.2, 0.2, 2, "constant")
    assert values_of_steps(constant, 4, "weight_decay") == [[0.2, 0.0]] * 4


RESUMED: dict[str, Callable[[Any], LRScheduler]] = {
    "lr": lambda o: WSDSchedule(o, N, D, warmup_steps=W, min_ratio=0.1),
    "weight_decay": lambda o: WeightDecaySchedule(o, 0.0, 0.2, N),
}


@pytest.mark.parametrize("key", RESUMED)
@pytest.mark.parametrize("num_steps", [3, 30])
def test_resumed_schedules_continue_exactly(num_steps, key):
    whole, resumed = (RESUMED[key](adamw(0.1, 0.0)) for _ in range(2))
    values_of_steps(whole, num_steps)
    resumed.optimizer.load_state_dict(whole.optimizer.state_dict())
    state = whole.state_dict()
    assert all(type(value) in (int, float, list) for value in state.values()), "plain values"
    resumed.load_state_dict(state)
    assert resumed.get_last_lr() == [group["lr"] for group in resumed.optimizer.param_groups]
    assert values_of_steps(resumed, 15, key) == values_of_steps(whole, 15, key)


def test_a_wsd_schedule_resumes_with_a_new_end_from_another_scheduler():
    optimizer = adamw()
    first = LambdaLR(optimizer, lambda step: 1.0)
    for _ in range(20):
        optimizer.step()
        first.step()
    resumed_optimizer = adamw()
    second = WSDSchedule(resumed_optimizer, 30, 10, "linear")
    second.load_state_dict(first.state_dict())
    actual = values_of_steps(second, 12)
    assert actual[0] == list(PEAKS)
    assert actual[5] == pytest.approx([peak / 2 for peak in PEAKS])
    assert actual[10] == actual[11] == [0.0, 0.0]


def test_learning_rates_that_are_tensors_are_filled_in_place():
    optimizer = adamw()
    rate = optimizer.param_groups[0]["lr"] = torch.tensor(0.02)
    scheduler = LinearSchedule(optimizer, 4)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == pytest.approx(0.015)


INVALID_SETTINGS: list[tuple[Callable[[Any], LRScheduler], str]] = [
    (lambda o: CosineSchedule(o, 10, 10), r"warmup_steps \(10\) must be below num_steps \(10\)"),
    (lambda o: WSDSchedule(o, 10, 6, warmup_steps=5), "num_steps of at least 11"),
    (lambda o: WSDSchedule(o, 10, 6, "square"), "decay must be linear, cosine or 1-sqrt"),
    (lambda o: CosineSchedule(o, 10, min_lr=0.01), r"min_lr \(0.01\) must be at most .* group 1"),
    (lambda o: ConstantSchedule(o, 3, initial_lr=1), "initial_lr .* Use a value from 0 to 0.02"),
    (lambda o: CosineSchedule(o, 10, min_ratio=1.5), "min_ratio must be a finite number of at"),
    (lambda o: CosineSchedule(o, 10, min_lr=0.0, min_ratio=0.1), "must not both be given"),
    (lambda o: InverseSqrtSchedule(o), "timescale must be given if warmup_steps is 0"),
    (lambda o: WeightDecaySchedule(o, 0.1, 0.2, 5, "constant"), "must be equal"),
    (lambda o: WeightDecaySchedule(adamw(0.0, 0.0), 0.1, 0.2, 5), "must be above 0"),
]


def test_invalid_settings_raise():
    for make, message in INVALID_SETTINGS:
        with pytest.raises(ParallelPlanError, match=message):
            make(adamw())
