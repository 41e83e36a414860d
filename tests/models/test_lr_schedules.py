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
    ParallelPlanError,
    WeightDecaySchedule,
    WSDSchedule,
)

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


TRANSFORMERS_SCHEDULES: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "constant": (lambda o: ConstantSchedule(o, warmup_steps=W), "constant_with_warmup", {}),
    "linear": (lambda o: LinearSchedule(o, N, W), "linear", {}),
    "cosine": (lambda o: CosineSchedule(o, N, W), "cosine", {}),
    "cosine with a floor": (
        lambda o: CosineSchedule(o, N, W, min_ratio=0.1),
        "cosine_with_min_lr",
        {"min_lr_rate": 0.1},
    ),
    "inverse square root": (lambda o: InverseSqrtSchedule(o, W), "inverse_sqrt", {}),
    "inverse square root with a time scale": (
        lambda o: InverseSqrtSchedule(o, W, timescale=30),
        "inverse_sqrt",
        {"timescale": 30},
    ),
    "cosine without a warm-up": (lambda o: CosineSchedule(o, N), "cosine", {"warmup": 0}),
}


@pytest.mark.parametrize("name", TRANSFORMERS_SCHEDULES)
def test_learning_rates_equal_those_of_transformers(name):
    optimization = pytest.importorskip("transformers.optimization")
    make, kind, options = TRANSFORMERS_SCHEDULES[name]
    warmup = options.get("warmup", W)
    reference = optimization.get_scheduler(
        kind,
        adamw(),
        num_warmup_steps=warmup,
        num_training_steps=N,
        scheduler_specific_kwargs={k: v for k, v in options.items() if k != "warmup"},
    )
    # The cosine of transformers rises again after its end; ours stays at the floor.
    num_steps = N + 1 if kind.startswith("cosine") else N + 10
    actual = values_of_steps(make(adamw()))
    for step, rates in enumerate(values_of_steps(reference, num_steps)):
        assert actual[step] == pytest.approx(rates, rel=1e-13, abs=1e-18), step
    if "inverse" not in name:
        assert actual[N:] == [actual[N]] * len(actual[N:])


@pytest.mark.parametrize("decay", ["linear", "cosine", "1-sqrt"])
def test_wsd_rates_equal_those_of_transformers(decay):
    optimization = pytest.importorskip("transformers.optimization")
    optimizer = adamw()
    reference = optimization.get_wsd_schedule(
        optimizer, W, D, num_training_steps=N, decay_type=decay, min_lr_ratio=0.0
    )
    actual = values_of_steps(WSDSchedule(adamw(), N, D, decay, W))
    for step, rates in enumerate(values_of_steps(reference)):
        assert actual[step] == pytest.approx(rates, rel=1e-13, abs=1e-18), step
    assert actual[W] == actual[N - D] == list(PEAKS)
    assert actual[N] == actual[N + 9] == [0.0, 0.0]


def megatron_rate(step: int, peak: float, floor: float, initial: float, style: str) -> float:
    """Return the learning rate that Megatron-LM documents for its options after some steps."""
    decays = {"linear": lambda u: 1 - u, "cosine": lambda u: (math.cos(math.pi * u) + 1) / 2}
    if step <= W:
        return initial + (peak - initial) * step / W
    if step > N:
        return floor
    if style == "inverse-square-root":
        return max(floor, peak * W**0.5 / step**0.5)
    if style.startswith("WSD "):
        fraction = max(0.0, (step - (N - D)) / D)
        factor = (
            1 - math.sqrt(fraction) if style == "WSD minus_sqrt" else decays[style[4:]](fraction)
        )
    else:
        factor = decays[style]((step - W) / (N - W))
    return floor + (peak - floor) * factor


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
    # The inverse square root reaches the floor before step N, where Megatron-LM jumps to it.
    floor, initial = 0.0045, 0.001
    actual = values_of_steps(MEGATRON_STYLES[style](adamw(), initial_lr=initial, min_lr=floor))
    for step, rates in enumerate(actual):
        if style == "inverse-square-root" and step > N:
            expected = [max(floor, peak * math.sqrt(W / step)) for peak in PEAKS]
        else:
            expected = [megatron_rate(step, peak, floor, initial, style) for peak in PEAKS]
        assert rates == pytest.approx(expected, rel=1e-13), step
    assert actual[0] == [initial, initial]
    assert actual[W] == list(PEAKS)


@pytest.mark.parametrize(("shape", "start", "end"), [("linear", 0.02, 0.1), ("cosine", 0.3, 0.0)])
def test_weight_decays_equal_those_of_megatron(shape, start, end):
    optimizer = adamw(0.1, 0.0)
    before = [group["lr"] for group in optimizer.param_groups]
    actual = values_of_steps(
        WeightDecaySchedule(optimizer, start, end, N, shape), key="weight_decay"
    )
    assert [group["lr"] for group in optimizer.param_groups] == before
    for step, (decay, zero_decay) in enumerate(actual):
        fraction = min(1.0, step / N)
        factor = fraction if shape == "linear" else (math.cos(math.pi * (1 - fraction)) + 1) / 2
        assert decay == pytest.approx(start + factor * (end - start), rel=1e-13, abs=1e-17), step
        assert zero_decay == 0.0
    assert actual[0][0] == start
    assert actual[N:] == [[end, 0.0]] * 10


def test_weight_decays_of_groups_keep_their_proportions():
    actual = values_of_steps(WeightDecaySchedule(adamw(0.1, 0.05), 0.2, 0.4, 2), 4, "weight_decay")
    assert actual == [[0.2, 0.1], [pytest.approx(0.3), pytest.approx(0.15)], *[[0.4, 0.2]] * 2]
    constant = WeightDecaySchedule(adamw(0.1, 0.0), 0.2, 0.2, 2, "constant")
    assert values_of_steps(constant, 4, "weight_decay") == [[0.2, 0.0]] * 4


def make_schedulers(optimizer: torch.optim.Optimizer, num_steps: int = N) -> list[LRScheduler]:
    rates = WSDSchedule(optimizer, num_steps, D, warmup_steps=W, min_ratio=0.1)
    return [rates, WeightDecaySchedule(optimizer, 0.0, 0.2, num_steps)]


def rates_and_decays_of_steps(
    optimizer: torch.optim.Optimizer, schedulers: list[LRScheduler]
) -> list[Any]:
    values = []
    for _ in range(15):
        values.append([(group["lr"], group["weight_decay"]) for group in optimizer.param_groups])
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
    return values


@pytest.mark.parametrize("num_steps", [3, 30])
def test_resumed_schedules_continue_exactly(num_steps):
    optimizer = adamw(0.1, 0.0)
    schedulers = make_schedulers(optimizer)
    for _ in range(num_steps):
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
    states = [scheduler.state_dict() for scheduler in schedulers]
    assert all(type(value) in (int, float, list) for state in states for value in state.values()), (
        "states are plain values"
    )
    resumed_optimizer = adamw(0.1, 0.0)
    resumed_schedulers = make_schedulers(resumed_optimizer)
    resumed_optimizer.load_state_dict(optimizer.state_dict())
    for scheduler, state in zip(resumed_schedulers, states, strict=True):
        scheduler.load_state_dict(state)
        assert scheduler.get_last_lr() == [group["lr"] for group in resumed_optimizer.param_groups]
    assert rates_and_decays_of_steps(
        resumed_optimizer, resumed_schedulers
    ) == rates_and_decays_of_steps(optimizer, schedulers)


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
    (lambda o: LinearSchedule(o, 10, 12), "Use warmup_steps from 0 to 9"),
    (lambda o: WSDSchedule(o, 10, 6, warmup_steps=5), "num_steps of at least 11"),
    (lambda o: WSDSchedule(o, 10, 6, "square"), "decay must be linear, cosine or 1-sqrt"),
    (lambda o: CosineSchedule(o, 10, min_lr=0.01), r"min_lr \(0.01\) must be at most .* group 1"),
    (lambda o: ConstantSchedule(o, 3, initial_lr=1), "initial_lr .* Use a value from 0 to 0.02"),
    (lambda o: CosineSchedule(o, 10, min_ratio=1.5), "min_ratio must be a finite number of at"),
    (lambda o: CosineSchedule(o, 10, min_lr=0.0, min_ratio=0.1), "must not both be given"),
    (lambda o: CosineSchedule(o, 0), "num_steps must be a whole number of at least 1: it is 0"),
    (lambda o: InverseSqrtSchedule(o), "timescale must be given if warmup_steps is 0"),
    (lambda o: WeightDecaySchedule(o, 0.1, 0.2, 5, "constant"), "must be equal"),
    (lambda o: WeightDecaySchedule(o, 0.1, 0.2, 5, "cubic"), "shape must be constant, linear"),
    (lambda o: WeightDecaySchedule(adamw(0.0, 0.0), 0.1, 0.2, 5), "must be above 0"),
    (lambda o: WeightDecaySchedule(o, -0.1, 0.2, 5), "start must be a finite number of at least 0"),
    (lambda o: CosineSchedule(None, 5), "optimizer must be"),
]


def test_invalid_settings_raise():
    for make, message in INVALID_SETTINGS:
        with pytest.raises(ParallelPlanError, match=message):
            make(adamw())
