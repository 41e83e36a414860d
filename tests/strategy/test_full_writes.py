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
PP = {"pp": 2, "pipeline_plan": {"net.blocks": "blocks"}, "microbatch_size": 2}
Act = Callable[["Writes"], Any]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh())


class Net(nn.Module):
    """Blocks between modules and a parameter of the first stage and a module of the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.ones(8))
        self.first = nn.ModuleList([nn.Linear(8, 8)])
        self.blocks = nn.Sequential(Block(), Block())
        self.last = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.blocks(self.first[0](x) + self.shift))


class Writes(Regress):
    """Write all weights in a hook, and keep a number that is drawn afterwards."""

    def __init__(self, hook: str, act: Act) -> None:
        super().__init__(Net)
        setattr(self, hook, self.write)
        self.act, self.next_draw = act, 0.0

    def write(self) -> None:
        torch.manual_seed(5)
        self.act(self)
        self.next_draw = float(torch.rand(()))


def each(draw: Callable[[Tensor], Any], smallest_dim: int = 1) -> Act:
    """Return a function that draws all weights with as many dimensions."""
    return lambda module: [draw(p) for p in module.parameters() if p.dim() >= smallest_dim]


def full_state(**others: Tensor) -> dict[str, Tensor]:
    """Return the state of an undivided network, and other tensors."""
    return Net().double().state_dict(prefix="net.") | others


def load_copy(module: nn.Module) -> None:
    """Load what the module has, from a copy that a hook made."""
    module.load_state_dict({name: 2 * value for name, value in module.state_dict().items()})


def load_part(module: nn.Module) -> None:
    module.net.blocks[1].up.load_state_dict(nn.Linear(8, 12).double().state_dict())


EQUAL: dict[str, tuple[dict[str, Any], str, Act]] = {
    "normal_": (TP, "on_fit_start", each(lambda p: nn.init.normal_(p, std=0.2))),
    "keywords": (TP, "on_fit_start", each(lambda p: nn.init.uniform_(tensor=p, a=-0.2, b=0.2))),
    "kaiming": (TP, "on_train_start", each(nn.init.kaiming_uniform_, 2)),
    "data": (TP, "on_fit_start", each(lambda p: p.data.normal_(0.0, 0.2))),
    "no gradients": (TP, "on_train_start", torch.no_grad()(each(lambda p: p.uniform_(-0.2, 0.2)))),
    "load": (TP, "on_fit_start", lambda module: module.load_state_dict(full_state())),
    "load a part": (TP, "on_train_start", load_part),
    "load into stages": (PP, "on_fit_start", lambda module: module.load_state_dict(full_state())),
    "load a part of a stage": (PP, "on_train_start", load_part),
    "load a copy": (PP, "on_train_start", load_copy),
}
REFUSED: dict[str, tuple[dict[str, Any], Act, str]] = {
    "xavier": (TP, each(nn.init.xavier_uniform_, 2), r"'net\S+up.weight' .*cut over tp \(2\)"),
    "orthogonal": (TP, each(nn.init.orthogonal_, 2), r"'net\S+up.weight' .*cut over tp \(2\)"),
    "stages": (PP, each(nn.init.normal_), r"'net\S+' .*with pp \(2\) .*not those of one process"),
}
#: Names that no stage has, each next to a name of one stage.
WRONG = ("net.blocks.0.up.weights", "net.blocks.2.up.weight", "net.first.0.scale", "net.last.scale")


def train(
    rank: int, size: int
) -> tuple[dict[str, tuple[Outcome, float]], dict[str, str], dict[str, str]]:
    equal = {}
    for name, (layout, hook, act) in EQUAL.items():
        module = Writes(hook, act)
        equal[name] = run(module, size, layout, 2), module.next_draw
    refused = {
        name: run(Writes("on_fit_start", act), size, layout).error
        for name, (layout, act, _) in REFUSED.items()
    }
    wrong = {}
    for name in WRONG:
        state = full_state(**{name: torch.ones(())})
        module = Writes("on_fit_start", lambda module, state=state: module.load_state_dict(state))
        wrong[name] = run(module, size, PP).error
    return equal, refused, wrong


def test_hooks_draw_and_load_sharded_weights_as_in_one_process_or_are_refused() -> None:
    ranks = run_world(train, 2)
    for name, (_, hook, act) in EQUAL.items():
        module = Writes(hook, act)
        expected = run(module, steps=2)
        outcomes = [equal[name] for equal, _, _ in ranks]
        for outcome, next_draw in outcomes:
            assert not outcome.error, f"{name}: {outcome.error}"
            assert outcome.losses == pytest.approx(expected.losses, rel=1e-10), name
            assert next_draw == module.next_draw, f"{name}: the next random number"
            for key, weight in outcome.weights.items():
                assert_equal(weight, expected.weights[key], f"{name}: {key}")
        assert set().union(*(outcome.weights for outcome, _ in outcomes)) == set(expected.weights)
    for _, refused, wrong in ranks:
        for name, (_, _, message) in REFUSED.items():
            expected_error = rf"UnsupportedError: .*test_full_writes.py:\d+ .*{message}"
            assert re.search(expected_error, refused[name]), f"{name}: {refused[name]!r}"
            assert "Initialise weights in __init__ or configure_model." in refused[name]
        for name, error in wrong.items():
            assert re.search(rf'Unexpected key\(s\) in state_dict: "{name}"', error), error
