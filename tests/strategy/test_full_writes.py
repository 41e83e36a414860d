"""Hooks before the training initialise and load sharded weights as in one process."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.oracles import assert_equal
from tests.strategy.replica_runs import Outcome, Regress, run
from tests.world import run_world

PLAN = {"net.*.up": "column", "net.*.down": "row"}
TP = {"tp": 2, "tensor_parallel_plan": PLAN}
PP = {"pp": 2, "pipeline_plan": {"net": "blocks"}, "microbatch_size": 2}
Act = Callable[["Writes"], Any]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh())


class Writes(Regress):
    """Write all weights in a hook, and keep a number that is drawn afterwards."""

    def __init__(self, hook: str, act: Act) -> None:
        super().__init__(lambda: nn.Sequential(Block(), Block()))
        setattr(self, hook, self.write)
        self.act, self.next_draw = act, 0.0

    def write(self) -> None:
        torch.manual_seed(5)
        self.act(self)
        self.next_draw = float(torch.rand(()))


def each(draw: Callable[[Tensor], Any], smallest_dim: int = 1) -> Act:
    """Return a function that draws all weights with as many dimensions."""
    return lambda module: [draw(p) for p in module.parameters() if p.dim() >= smallest_dim]


def full_state(module: nn.Module) -> dict[str, Tensor]:
    with torch.device("cpu"):
        whole = nn.Sequential(Block(), Block()).double()
    return whole.state_dict()


EQUAL: dict[str, tuple[str, Act]] = {
    "normal_": ("on_fit_start", each(lambda p: nn.init.normal_(p, std=0.2))),
    "keywords": ("on_fit_start", each(lambda p: nn.init.uniform_(tensor=p, a=-0.2, b=0.2))),
    "kaiming": ("on_train_start", each(nn.init.kaiming_uniform_, 2)),
    "data": ("on_fit_start", each(lambda p: p.data.normal_(0.0, 0.2))),
    "no gradients": ("on_train_start", torch.no_grad()(each(lambda p: p.uniform_(-0.2, 0.2)))),
    "load": ("on_fit_start", lambda module: module.net.load_state_dict(full_state(module))),
    "load a part": (
        "on_train_start",
        lambda module: module.net[1].up.load_state_dict(nn.Linear(8, 12).double().state_dict()),
    ),
}
REFUSED: dict[str, tuple[dict[str, Any], Act, str]] = {
    "xavier": (TP, each(nn.init.xavier_uniform_, 2), r"'net.0.up.weight' .*cut over tp \(2\)"),
    "orthogonal": (TP, each(nn.init.orthogonal_, 2), r"'net.0.up.weight' .*cut over tp \(2\)"),
    "stages": (PP, each(nn.init.normal_), r"'net\S+' .*with pp \(2\) .*not those of one process"),
}


def train(rank: int, size: int) -> tuple[dict[str, tuple[Outcome, float]], dict[str, str]]:
    equal = {}
    for name, (hook, act) in EQUAL.items():
        module = Writes(hook, act)
        equal[name] = run(module, size, TP, 2), module.next_draw
    refused = {
        name: run(Writes("on_fit_start", act), size, layout).error
        for name, (layout, act, _) in REFUSED.items()
    }
    return equal, refused


def test_hooks_draw_and_load_sharded_weights_as_in_one_process_or_are_refused() -> None:
    for equal, refused in run_world(train, 2):
        for name, (hook, act) in EQUAL.items():
            module = Writes(hook, act)
            expected = run(module, steps=2)
            outcome, next_draw = equal[name]
            assert not outcome.error, f"{name}: {outcome.error}"
            assert outcome.losses == pytest.approx(expected.losses, rel=1e-10), name
            assert next_draw == module.next_draw, f"{name}: the next random number"
            for key, weight in expected.weights.items():
                assert_equal(outcome.weights[key], weight, f"{name}: {key}")
        for name, (_, _, message) in REFUSED.items():
            expected_error = rf"UnsupportedError: .*test_full_writes.py:\d+ .*{message}"
            assert re.search(expected_error, refused[name]), f"{name}: {refused[name]!r}"
            assert "Initialise weights in __init__ or configure_model." in refused[name]
