"""Graphs of full steps train bit by bit like eager steps, or a log says why a step stays eager."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from torch import Tensor
from torchmetrics import MeanMetric

from lightning_megatron import MegatronStrategy, UnsupportedError
from lightning_megatron.errors import CaptureError
from lightning_megatron.graphs.step_graph import OwnAgreement
from lightning_megatron.plan.cuda_graphs import CudaGraphs
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.strategy.optimization.mixtures import MixtureRuntime
from tests.graphs.whole_fits import LM, Shown, assert_equal, fit
from tests.sweeps import chosen
from tests.world import run_world

FULL = CudaGraphs("full", warmup_steps=2)


@pytest.mark.parametrize("kind", chosen(["gpt2", "llama", "experts"], "experts"))
def test_replayed_steps_match_eager_steps(kind: str) -> None:
    eager, graphs = fit(LM(kind), None), fit(LM(kind), FULL)
    assert_equal(graphs, eager, kind)
    assert graphs.num_replays == 5, "two of seven steps warm up"


def test_accumulation_has_one_graph_for_the_first_batch_and_one_for_later_batches() -> None:
    options: dict[str, Any] = {"accumulate_grad_batches": 3, "num_samples": 4 * 17}
    eager, graphs = fit(LM("gpt2"), None, **options), fit(LM("gpt2"), FULL, **options)
    assert_equal(graphs, eager)
    assert graphs.num_graphs == 2
    assert graphs.num_replays == 17 - 2 * FULL.warmup_steps


def test_routers_are_updated_inside_the_graph_of_the_last_batch_of_an_accumulation() -> None:
    options: dict[str, Any] = {"accumulate_grad_batches": 3, "num_samples": 4 * 17}
    with pytest.MonkeyPatch.context() as patch:
        calls = []
        end_step = MixtureRuntime.end_step
        patch.setattr(
            MixtureRuntime, "end_step", lambda self: (calls.append(self), end_step(self))[1]
        )
        eager = fit(LM("experts"), None, **options)
        num_eager = len(calls)
        graphs = fit(LM("experts"), FULL, **options)
    assert_equal(graphs, eager)
    assert eager.routed, "the routers have counted"
    assert num_eager == 6
    # The second batch of an accumulation also counts as an eager step of the third batch.
    assert len(calls) - num_eager == 2, "one eager step and one capture, and no replay"


def test_a_last_batch_of_another_shape_runs_eagerly_and_is_logged() -> None:
    eager = fit(LM("gpt2"), None, num_samples=27)
    graphs = fit(LM("gpt2"), FULL, num_samples=27)
    assert_equal(graphs, eager)
    assert graphs.num_replays == 4
    assert graphs.said == [
        "CUDA graphs: microbatch tokens (1, 8), captured for (2, 8): run eagerly (said once for each "
        "shape)"
    ]


def test_a_new_shape_raises_or_gets_a_graph_as_configured() -> None:
    with pytest.raises(UnsupportedError, match=r"training_step got 1 microbatches, captured for 2"):
        fit(LM("gpt2"), CudaGraphs("full", on_new_shape="error"), num_samples=26)
    settings = CudaGraphs("full", warmup_steps=1, on_new_shape="capture")
    options: dict[str, Any] = {"num_samples": 10, "max_epochs": 3}
    eager, graphs = fit(LM("gpt2"), None, **options), fit(LM("gpt2"), settings, **options)
    assert_equal(graphs, eager)
    assert graphs.num_graphs == 2
    assert graphs.num_replays == 5 + 2
    graphs = fit(LM("gpt2"), replace(settings, max_shapes=1), **options)
    assert_equal(graphs, eager)
    assert (graphs.num_graphs, graphs.num_replays) == (1, 5)
    assert graphs.said == [
        "CUDA graphs: a training_step of a further shape, cuda_graphs.max_shapes (1) others are "
        "captured: run eagerly (said once)"
    ]


@pytest.mark.parametrize("evaluation", [False, True])
def test_validation_between_replayed_steps_does_not_change_the_training(evaluation: bool) -> None:
    options: dict[str, Any] = {"val_check_interval": 2, "num_samples": 32}
    settings = CudaGraphs("full", warmup_steps=2, evaluation=evaluation)
    eager, graphs = fit(LM("gpt2"), None, **options), fit(LM("gpt2"), settings, **options)
    assert_equal(graphs, eager)
    # Four validations of three batches each. The sanity check comes before the graphs.
    assert graphs.num_replays == 6 + (10 if evaluation else 0)


class CountingTokens(LM):
    """Count tokens on the host."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        return {**super().training_step(batch, batch_idx), "num_tokens": batch["tokens"].numel()}


def test_replayed_steps_that_count_tokens_match_eager_steps() -> None:
    assert_equal(fit(CountingTokens("llama"), FULL), fit(CountingTokens("llama"), None))


def _fit_in(
    rank: int, size: int, case: tuple[str, dict[str, Any], dict[str, Any]], is_captured: bool
) -> Shown:
    kind, sizes, options = case
    num_batches = 17 if options else 10
    layout = ParallelLayout(size, tp=sizes.get("tp", 1), pp=sizes.get("pp", 1))
    module = LM(kind, num_layers=4 if "vpp" in sizes else 2)
    return fit(
        module,
        FULL if is_captured else None,
        devices=size,
        strategy=MegatronStrategy(microbatch_size=2, zero=1, **sizes),
        data=(layout.coordinates(rank)["dp"], layout.dp),
        num_samples=4 * num_batches * layout.dp,
        **options,
    )


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dp2 zero 1": ("gpt2", {}, {}),
    "dp2 zero 1, accumulation": ("llama", {}, {"accumulate_grad_batches": 3}),
    "pp2": ("gpt2", {"pp": 2}, {}),
    "pp2, experts": ("experts", {"pp": 2}, {}),
    "pp2 vpp2": ("gpt2", {"pp": 2, "vpp": 2}, {}),
    "tp2 with sequence parallelism": ("llama", {"tp": 2, "sequence_parallel": True}, {}),
}


CHOSEN_CASES = chosen(CASES, "dp2 zero 1", "pp2, experts", "tp2 with sequence parallelism")


def _two_ranks(rank: int, size: int) -> list[tuple[str, int, int]]:
    outcomes = []
    for name, case in CHOSEN_CASES.items():
        graphs = _fit_in(rank, size, case, True)
        eager = _fit_in(rank, size, case, False)
        assert_equal(graphs, eager, name)
        if name == "dp2 zero 1":
            # Python starts sums in four eager steps and in one capture, and not in replays.
            assert 10 * graphs.num_sums == 5 * eager.num_sums, name
        outcomes.append((name, graphs.num_replays, len(graphs.said)))
    return outcomes


def test_replayed_steps_of_two_ranks_match_eager_steps() -> None:
    # The first two optimizer steps of dp2 and tp2 compare replicas and run eagerly.
    replays = {"dp2 zero 1, accumulation": 7}
    expected = [(name, replays.get(name, 8 if "pp" in name else 6), 0) for name in CHOSEN_CASES]
    assert run_world(_two_ranks, 2) == [expected, expected]


class Unrepeatable(LM):
    """Do something in the step that no replay can repeat."""

    def __init__(self, name: str) -> None:
        super().__init__("llama")
        self.read: Callable[[Any, Tensor, int], Any] = READS[name][0]
        self.seen: list[Tensor] = []
        self.metric = MeanMetric(nan_strategy="disable")

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        self.read(self, output["loss"], batch_idx)
        return output


READS: dict[str, tuple[Callable[[Any, Tensor, int], Any], str]] = {
    "value": (lambda module, loss, index: loss.item(), r"aten._local_scalar_dense"),
    "index": (lambda module, loss, index: index % 2, r"must not read the index of its batch"),
    "text": (lambda module, loss, index: f"{index}", r"must not read the index of its batch"),
    "python": (lambda module, loss, index: random.random(), r"Python's random has drawn"),
    "numpy": (lambda module, loss, index: np.random.rand(), r"numpy.random has drawn"),
    "list": (lambda module, loss, index: module.seen.append(loss), r"changes self.seen"),
    "attribute": (lambda module, loss, index: setattr(module, "last", loss), r"changes self.last"),
    "metric": (lambda module, loss, index: module.metric.update(loss), r"self.metric \(metric\)"),
}


@pytest.mark.parametrize("name", chosen(list(READS), "value", "index", "python", "metric"))
def test_a_step_that_no_replay_can_repeat_continues_eagerly_without_side_effects(
    name: str,
) -> None:
    eager, graphs = fit(Unrepeatable(name), None), fit(Unrepeatable(name), FULL)
    assert_equal(graphs, eager, name)
    assert graphs.num_replays == 0
    assert len(graphs.said) == 1
    assert graphs.said[0].startswith("the whole training_step: UnsupportedError: ")
    assert re.search(READS[name][1], graphs.said[0])


class FailingPeer(OwnAgreement):
    """A rank that learns of the failure of another rank, or raises."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error

    def failure_of_any(self, failure: str | None) -> str | None:
        if self.error is not None:
            raise self.error
        return failure or "rank 1 could not capture"


def test_a_rank_drops_its_graph_if_another_rank_has_none() -> None:
    graphs = fit(LM("llama"), FULL, agreement=FailingPeer(None))
    assert_equal(graphs, fit(LM("llama"), None))
    assert (graphs.num_replays, graphs.num_graphs) == (0, 0)
    assert graphs.said == ["rank 1 could not capture"]
    with pytest.raises(CaptureError, match="on every rank"):
        fit(LM("llama"), FULL, agreement=FailingPeer(CaptureError("on every rank")))


def test_a_hook_inside_of_the_step_runs_as_in_eager_training() -> None:
    class Hooked(LM):
        def on_before_backward(self, loss: Tensor) -> None:
            self.hooks.append("before_backward")

    modules = Hooked("llama"), Hooked("llama")
    assert_equal(fit(modules[0], FULL), fit(modules[1], None))
    assert modules[0].hooks == modules[1].hooks


def test_hooks_around_the_step_run_in_every_step() -> None:
    modules = LM("llama"), LM("llama")
    fit(modules[0], FULL)
    fit(modules[1], None)
    assert modules[0].hooks == modules[1].hooks
