"""Graphs of full steps train bit by bit like eager steps, or a log says why a step stays eager."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torchmetrics import MeanMetric

from lightning_megatron.errors import CaptureError, UnsupportedError
from lightning_megatron.graphs import step_graph
from lightning_megatron.graphs.step_graph import StepGraph
from lightning_megatron.strategy.optimization.layer_states import LayerStates
from tests.fits import Job, Language, Report, Tokens
from tests.graphs.jobs import DROPOUT, FULL, ROUTED, SEGMENTS, VARIED, check_same, run_graphs
from tests.optimizer.fused_fits import SMALL

CAPTURING = replace(FULL, on_new_shape="capture")
LENIENT = replace(FULL, on_failure="eager")


@contextmanager
def counted_steps() -> Iterator[tuple[list[str], list[StepGraph]]]:
    """Record what users are told of graphs, and the graphs of full steps that are replayed."""
    texts, replays = list[str](), list[StepGraph]()
    replay = StepGraph.replay

    def counted(graph, *args):
        replays.append(graph)
        return replay(graph, *args)

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patch.setattr(StepGraph, "replay", counted)
        yield texts, replays
    messages = [str(warning.message) for warning in caught]
    texts += [message for message in messages if message.startswith("CUDA graphs")]


def run_both(
    job: Job, graphs: Any = FULL, is_captured: bool = True
) -> tuple[Report, list[str], int]:
    """Train by graphs of full steps and eagerly, compare, and return the report by graphs, what
    users are told, and the number of replays.
    """
    expected = run_graphs(job)
    with counted_steps() as (texts, replays):
        actual = run_graphs(job, graphs)
    if is_captured:
        check_same(actual, expected)
    assert actual.losses == expected.losses
    return actual, texts, len(replays)


def job_of(model: Any = SMALL, **options: Any) -> Job:
    return Job(model, {}, **{"steps": 5, "data": VARIED, **options})


@pytest.mark.parametrize("model", [DROPOUT, ROUTED], ids=["dropout", "mixture"])
def test_replayed_steps_match_eager_steps(model):
    _, said, num_replays = run_both(job_of(model))
    assert not said
    assert num_replays == 4, "the capture is replayed, too"


def test_accumulation_has_one_graph_for_the_first_batch_and_one_for_later_batches():
    accumulated = job_of(steps=4, trainer={"accumulate_grad_batches": 3})
    report, _, num_replays = run_both(accumulated)
    assert report.outcomes["graphs"][-1] == 2
    assert num_replays == 12 - 2


def test_routers_are_updated_inside_the_graph_of_the_last_batch_of_an_accumulation():
    calls = []
    end_step = LayerStates.end_step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LayerStates, "end_step", lambda self: (calls.append(self), end_step(self))[1])
        run_both(job_of(ROUTED, steps=4, trainer={"accumulate_grad_batches": 3}))
    assert 4 < len(calls) < 8, "four eager steps, and no replay calls Python"


class Kept(Language):
    """Keep outputs of steps, count tokens on the host, and log in every way."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        loss, num_tokens = super().training_step(batch, batch_idx), batch["tokens"].numel()
        self.log("both", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("largest", loss, on_step=False, on_epoch=True, reduce_fx="max")
        self.log("tokens", float(num_tokens), on_step=False, on_epoch=True, reduce_fx="sum")
        return {"loss": loss, "own": loss.detach(), "num_tokens": num_tokens}

    def on_train_batch_end(self, outputs: Any, *args: Any) -> None:
        self.outcomes.setdefault("kept", []).append(outputs["own"])
        self.outcomes.setdefault("read", []).append(float(outputs["own"]))
        logged = {name: float(value) for name, value in self.trainer.callback_metrics.items()}
        self.outcomes.setdefault("logged", []).append(logged)


@pytest.mark.parametrize("graphs", [FULL, SEGMENTS], ids=["full", "segments"])
def test_outputs_that_users_keep_are_not_overwritten_and_logged_values_are_those_of_eager_steps(
    graphs,
):
    job = job_of(partial(Kept, SMALL), data=partial(Tokens, 24, 24), steps=8)
    report, _, _ = run_both(job, graphs)
    assert [float(loss) for loss in report.outcomes["kept"]] == report.outcomes["read"]
    assert {"both_step", "both_epoch", "largest", "tokens"} < report.outcomes["logged"][-1].keys()


#: The last of three batches has one microbatch less, and one of its microbatches has one sample.
RAGGED = partial(Tokens, 21, 21)


def test_a_new_shape_runs_eagerly_with_a_warning_or_raises_or_gets_a_graph():
    ragged = job_of(data=RAGGED, steps=8)
    report, said, _ = run_both(ragged)
    assert report.outcomes["graphs"][-1] == 1
    (text,) = said
    assert "3 microbatches, captured for 4: run eagerly" in text
    report, said, _ = run_both(ragged, CAPTURING)
    assert report.outcomes["graphs"][-1] == 2
    assert not said
    report, (text,), _ = run_both(ragged, replace(CAPTURING, max_shapes=1))
    assert report.outcomes["graphs"][-1] == 1
    assert "cuda_graphs.max_shapes (1) others are captured: run eagerly (said once" in text
    with pytest.raises(UnsupportedError, match=r"training_step .*captured for"):
        run_graphs(ragged, replace(FULL, on_new_shape="error"))


@pytest.mark.parametrize("evaluation", [False, True])
def test_validation_between_replayed_steps_does_not_change_the_training(evaluation):
    trainer = {"val_check_interval": 2, "num_sanity_val_steps": 0}
    job = job_of(DROPOUT, validation=partial(Tokens, 24, 24), trainer=trainer, steps=6)
    report, _, num_replays = run_both(job, replace(FULL, evaluation=evaluation))
    # Three validations of three batches each, of which the first is eager.
    assert num_replays == 5 + (8 if evaluation else 0)
    assert len(report.outcomes["validated"]) == 3


class Unrepeatable(Language):
    """Do something in the step that no replay can repeat."""

    def __init__(self, name: str) -> None:
        super().__init__(SMALL)
        self.read: Callable[[Any, Tensor, int], Any] = READS[name][0]
        self.seen: list[Tensor] = []
        self.metric = MeanMetric(nan_strategy="disable")

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.read(self, loss, batch_idx)
        return loss


READS: dict[str, tuple[Callable[[Any, Tensor, int], Any], str]] = {
    "value": (lambda module, loss, index: loss.item(), "aten._local_scalar_dense"),
    "index": (lambda module, loss, index: index % 2, "must not read the index of its batch"),
    "python": (lambda module, loss, index: random.random(), "Python's random has drawn"),
    "numpy": (lambda module, loss, index: np.random.rand(), "numpy.random has drawn"),
    "list": (lambda module, loss, index: module.seen.append(loss), "changes self.seen"),
    "attribute": (lambda module, loss, index: setattr(module, "last", loss), "changes self.last"),
    "metric": (lambda module, loss, index: module.metric.update(loss), "self.metric (metric)"),
}


@pytest.mark.parametrize("name", READS)
def test_a_step_that_no_replay_can_repeat_continues_eagerly_without_side_effects(name):
    job = job_of(partial(Unrepeatable, name), steps=3)
    _, (said,), num_replays = run_both(job, LENIENT, is_captured=False)
    assert num_replays == 0
    assert "the whole training_step: UnsupportedError: " in said
    assert READS[name][1] in said


def test_a_rank_drops_its_graph_if_another_rank_has_none():
    def fail(failure, world, settings):
        return failure or "rank 1 could not capture."

    def raise_error(failure, world, settings):
        raise CaptureError("on every rank")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_graph, "failure_of_any", fail)
        report, said, num_replays = run_both(job_of(steps=3), LENIENT, is_captured=False)
        assert (report.outcomes["graphs"][-1], num_replays) == (0, 0)
        assert "steps are off: rank 1 could not capture. All ranks run their" in said[0]
        patch.setattr(step_graph, "failure_of_any", raise_error)
        with pytest.raises(CaptureError, match="on every rank"):
            run_graphs(job_of(steps=3), FULL)


class Hooked(Language):
    """Record hooks inside of and around the step."""

    def note(self, name: str) -> None:
        self.outcomes.setdefault("hooks", []).append(name)

    def on_after_backward(self) -> None:
        self.note("after_backward")

    def on_before_zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        self.note("before_zero_grad")


class HookedInside(Hooked):
    def on_before_backward(self, loss: Tensor) -> None:
        self.note("before_backward")


@pytest.mark.parametrize("kind", [Hooked, HookedInside])
def test_hooks_inside_of_and_around_the_step_run_as_in_eager_training(kind):
    job = job_of(partial(kind, SMALL), steps=4)
    is_inside = kind is HookedInside
    report, _, _ = run_both(job, LENIENT, is_captured=not is_inside)
    assert report.outcomes["hooks"] == run_graphs(job).outcomes["hooks"]
