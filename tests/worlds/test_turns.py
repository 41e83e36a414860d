"""Two microbatches whose passes switch in every layer with experts train bitwise as they do one
after the other.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from lightning_megatron import GPTConfig
from lightning_megatron.experts.transport.dispatchers import SwitchingDispatcher
from lightning_megatron.layers.parameters.weight_gradient_queue import WeightGradientQueue
from tests.fits import EXPERTS, LLAMA_SIZES, Job, Language, Tokens, differences, run_job
from tests.world import run_world

BATCH, STEPS = 16, 2
SHARED = GPTConfig.llama(**LLAMA_SIZES, experts={**EXPERTS, "shared_ffn_hidden_size": 24})
DROPPED = GPTConfig.llama(
    **{**LLAMA_SIZES, "num_layers": 2},
    experts={**EXPERTS, "jitter": 0.1},
    hidden_dropout=0.1,
    attention_dropout=0.1,
)
ONE = {"microbatch_size": 1, "ep": 2}
#: The model, and the options of the strategy.
CASES: dict[str, tuple[GPTConfig, dict[str, Any]]] = {
    "one stage": (SHARED, ONE),
    "one stage, recomputed": (
        DROPPED,
        {**ONE, "experts.transport": "all_to_all", "recompute": "full", "tp": 2, "etp": 1},
    ),
    "dualpipe-v": (
        SHARED,
        {**ONE, "pp": 2, "vpp": 2, "schedule": "dualpipe-v", "recompute": "experts"},
    ),
}


class Gradients(pl.Callback):
    """Keep the gradients of all main parameters before every update."""

    def __init__(self) -> None:
        self.outcomes: dict[str, list[Tensor]] = {"gradients": []}

    def on_before_optimizer_step(self, trainer: Any, *_: Any) -> None:
        slices = trainer.strategy.run.state.main.slices
        self.outcomes["gradients"] += [part.main.grad.clone() for part in slices.values()]


class Failing(Language):
    """Fail in the forward pass of the third microbatch, or in the backward pass of the second."""

    def __init__(self, is_forward: bool) -> None:
        super().__init__(SHARED)
        self.is_forward, self.num_calls = is_forward, 0

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        self.num_calls += 1
        if self.is_forward and self.num_calls == 3:
            raise ValueError("a forward pass fails")
        if self.num_calls == 2:
            loss.register_hook(self.fail)
        return loss

    def fail(self, gradient: Tensor) -> None:
        if not self.is_forward:
            raise ValueError("a backward pass fails")


def job_of(model: Any, options: dict[str, Any]) -> Job:
    data = partial(Tokens, STEPS * BATCH, BATCH)
    return Job(model, options, steps=STEPS, data=data, batch=BATCH, callbacks=lambda: [Gradients()])


def note_events(patch: pytest.MonkeyPatch, events: list[str]) -> None:
    """Record the dispatches of forward passes and the products of backward passes in turns."""
    send, put = SwitchingDispatcher.send, WeightGradientQueue.put

    def send_and_note(self: SwitchingDispatcher, prepared: Any) -> Any:
        if threading.current_thread() is threading.main_thread():
            events.append("dispatch")
        return send(self, prepared)

    def put_and_note(self: WeightGradientQueue, *args: Any) -> None:
        events.append("product")
        put(self, *args)

    patch.setattr(SwitchingDispatcher, "send", send_and_note)
    patch.setattr(WeightGradientQueue, "put", put_and_note)


def train_all(rank: int, size: int) -> tuple[dict[str, list[str]], list[str], list[str]]:
    """Return what differs in each case, the events of one case, and the errors of failures."""
    found, events, errors = {}, list[str](), list[str]()
    for name, (model, options) in CASES.items():
        plain = run_job(job_of(model, options), size)
        with pytest.MonkeyPatch.context() as patch:
            if name == "one stage":
                note_events(patch, events)
            in_turns = job_of(model, {**options, "experts.overlap": True})
            turns = run_job(in_turns, size)
        gradients = [report.outcomes["gradients"] for report in (plain, turns)]
        found[name] = differences(turns, plain)
        if not all(map(torch.equal, *gradients)) or not gradients[0]:
            found[name].append("gradients")
    for is_forward in (True, False):
        failing = job_of(partial(Failing, is_forward), {**ONE, "experts.overlap": True})
        with pytest.raises(ValueError, match="pass fails") as caught:
            run_job(replace(failing, steps=1), size)
        errors.append(str(caught.value))
    return found, events, errors


@pytest.fixture(scope="module")
def ranks() -> Sequence[Any]:
    return run_world(train_all, 4)


@pytest.mark.parametrize("name", CASES)
def test_turns_train_bitwise_as_one_pass_after_the_other(name: str, ranks: Any) -> None:
    assert [found[name] for found, *_ in ranks] == [[]] * 4


def test_dispatches_of_one_microbatch_lie_between_products_of_another(ranks: Any) -> None:
    events = ranks[0][1]
    assert all(other == events for _, other, _ in ranks), "all ranks switch at the same points"
    # In each of two steps three of four forward passes have a partner. The first of their four
    # dispatches follows products of the pair before, if there is one.
    neighbours = zip(events, events[1:], events[2:], strict=False)
    number = sum(three == ("product", "dispatch", "product") for three in neighbours)
    assert number == 2 * (3 * 3 + 2)


def test_the_error_of_one_pass_ends_both(ranks: Any) -> None:
    for _, _, errors in ranks:
        assert errors == ["a forward pass fails", "a backward pass fails"]
