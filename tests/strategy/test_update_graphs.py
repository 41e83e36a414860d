"""Captured updates equal eager updates bit for bit, and unsupported updates are refused."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_megatron import CudaGraphs, WeightDecaySchedule, WSDSchedule
from lightning_megatron.errors import CaptureError, SpeedWarning, UnsupportedError
from lightning_megatron.graphs.update_graph import UpdateGraph
from lightning_megatron.strategy.checkpoints.run_checkpoints import RunCheckpoints
from tests.graphs.jobs import MODES, VARIED, differences, run_updates, strategy_of
from tests.optimizer.fused_fits import FusedLanguage
from tests.strategy.test_cuda_graphs import trainer

#: Updates are captured in the third step.
SEGMENTS, FULL = (
    replace(mode, warmup_steps=2, optimizer=True, on_failure="eager") for mode in MODES
)
ADAM = partial(FusedLanguage, make=torch.optim.Adam)
CASES: dict[str, tuple[CudaGraphs, dict[str, Any]]] = {
    "segments, settings that change": (SEGMENTS, {"cycles": True}),
    "full, settings that change": (FULL, {"cycles": True}),
    "segments, sums in bfloat16": (
        SEGMENTS,
        {"precision": "bf16-mixed", "strategy": {"optimizer.gradient_dtype": "bfloat16"}},
    ),
    "full, Adam, accumulated": (
        FULL,
        {"model": ADAM, "cycles": True, "trainer": {"accumulate_grad_batches": 2}},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_captured_updates_equal_eager_updates(name):
    graphs, options = CASES[name]
    expected = run_updates(None, data=VARIED, **options)
    actual = run_updates(graphs, data=VARIED, **options)
    assert differences(actual, expected) == []
    assert {int(state["step"]) for state in actual.outcomes["states"]} == {6}
    # Two eager updates and the capture call the kernel; replays run no Python.
    assert actual.outcomes["calls"][-1] * 6 == expected.outcomes["calls"][-1] * 3 > 0


class Scheduled(FusedLanguage):
    """Train under a schedule of the learning rate and, with ``decays``, one of the weight decay."""

    decays = True

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()["optimizer"]
        for group in optimizer.param_groups:
            group["lr"] = group.pop("initial_lr")
        schedulers: list[Any] = [WSDSchedule(optimizer, 8, 4, warmup_steps=2, min_ratio=0.1)]
        if self.decays:
            schedulers.append(WeightDecaySchedule(optimizer, 0.0, 1.0, 6))
        return [optimizer], [{"scheduler": item, "interval": "step"} for item in schedulers]


class WithoutDecay(Scheduled):
    decays = False


def test_captured_updates_follow_schedules_of_rate_and_weight_decay(tmp_path):
    half = str(tmp_path / "half")
    options: dict[str, Any] = {"model": Scheduled, "steps": 9}
    expected, actual = run_updates(None, **options), run_updates(FULL, **options)
    assert differences(actual, expected) == []
    rates = [(group["lr"], group["weight_decay"]) for group in actual.outcomes["groups"]]
    assert rates == [(0.002, 1.0), (0.0005, 0.0)], "the last values of both schedules"
    without_decay = run_updates(FULL, **{**options, "model": WithoutDecay})
    assert differences(without_decay, expected), "the weight decay reaches the update"
    run_updates(None, **{**options, "steps": 3}, save=half)
    resumed = run_updates(None, **options, resume=half)
    for name in ("groups", "states"):
        assert resumed.outcomes[name] == expected.outcomes[name], "a resume is exact"


class SaveAndLoad(pl.Callback):
    """Save a checkpoint after some step, and load it after the next one."""

    def __init__(self, path: Path, step: int) -> None:
        self.path, self.step = str(path / "saved.ckpt"), step

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        strategy = strategy_of(trainer)
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)
        elif trainer.global_step == self.step + 1:
            strategy.finish_saves()
            strategy.load_checkpoint(self.path)


def run_with_a_load(graphs: CudaGraphs | None, folder: Path) -> list[Any]:
    """Train with a load of a checkpoint in between, and resume from it in another fit."""
    options: dict[str, Any] = {"data": VARIED, "strategy": {"async_save": True}}
    loads = SaveAndLoad(folder, 4)
    first = run_updates(graphs, callbacks=[loads], steps=9, **options)
    return [first, run_updates(graphs, resume=loads.path, steps=8, **options)]


def test_updates_are_captured_again_after_a_load_and_after_a_resume(tmp_path, monkeypatch):
    expected = run_with_a_load(None, tmp_path / "eager")
    order: list[str] = []

    def record_calls(owner, name):
        method = getattr(owner, name)

        def recorded(self, *args):
            order.append(name)
            return method(self, *args)

        monkeypatch.setattr(owner, name, recorded)

    record_calls(RunCheckpoints, "wait_for_snapshot")
    record_calls(UpdateGraph, "run")
    actual = run_with_a_load(SEGMENTS, tmp_path / "graphs")
    # A background save may still copy weights; each update waits for it, also a replayed one.
    assert order == ["wait_for_snapshot", "run"] * (9 + 4)
    assert [differences(*pair) for pair in zip(actual, expected, strict=True)] == [[], []]
    # Two groups; two eager updates and a capture before and after the load.
    assert [report.outcomes["calls"][-1] for report in actual] == [2 * 6, 2 * 3]


# ---- refused updates, and failed captures


class Reads(pl.Callback):
    """Have a hook that may read gradients."""

    def on_before_optimizer_step(self, *_: Any) -> None:
        pass


class AddsReader(FusedLanguage):
    def configure_callbacks(self) -> list[pl.Callback]:
        return [Reads()]


class ReadsItself(FusedLanguage):
    def on_after_backward(self) -> None:
        pass


class OwnClipping(FusedLanguage):
    """Clip in a hook that claims to read no gradients."""

    reads_gradients = False

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.clip_gradients(optimizer, 0.1, "norm")


def not_fused(groups: Any, fused: bool, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, **options)


def sgd(groups: Any, fused: bool, eps: float, lr: float, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=lr, **options)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"precision": "64-true"}, "needs precision"),
    ({"callbacks": [Reads()]}, "Reads.on_before_opt"),
    ({"model": AddsReader}, "Reads.on_before_opt"),
    ({"model": ReadsItself}, "ReadsItself.on_after_backward"),
    ({"model": OwnClipping}, "OwnClipping.configure_gradient_clipping"),
    ({"model": partial(FusedLanguage, make=not_fused)}, "group 0 of AdamW does not set fused=True"),
    ({"model": partial(FusedLanguage, make=sgd)}, "SGD is not torch's AdamW or Adam"),
]


def test_fits_whose_updates_cannot_be_captured_are_refused():
    for options, words in REFUSED:
        with pytest.raises(UnsupportedError, match=f"(?s){words}.*optimizer=False"):
            run_updates(SEGMENTS, **options)
    # What is known before processes start is refused before.
    with pytest.raises(UnsupportedError, match="ReadsItself.on_after_backward"):
        trainer(SEGMENTS).fit(ReadsItself(), [])


class FailsToCapture(pl.Callback):
    """Let every capture of the update, or else of the step, fail."""

    def __init__(self, fails_to_update: bool) -> None:
        self.fails_to_update = fails_to_update

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        def capture(*_):
            raise RuntimeError("no memory")

        run: Any = strategy_of(trainer).run
        fails = type("Fails", (), {"capture": capture, "make_pool": lambda self: None})()
        owner = run.state.update_graph if self.fails_to_update else run.graphs._captures
        owner._backend = fails


def test_failed_capture_leaves_the_update_eager():
    fails = [FailsToCapture(True)]
    with pytest.warns(SpeedWarning, match="off: rank 0 could not capture the update .*no memory"):
        actual = run_updates(FULL, callbacks=fails)
    assert differences(actual, run_updates(None)) == []
    with pytest.raises(CaptureError, match="the update of the parameters: RuntimeError: no mem"):
        run_updates(replace(FULL, on_failure="error"), callbacks=fails)


def test_failed_capture_of_a_step_leaves_the_update_captured():
    words = "CUDA graphs of steps are off: rank 0 .*no memory"
    with pytest.warns(SpeedWarning, match=words):
        actual = run_updates(FULL, callbacks=[FailsToCapture(False)])
    assert differences(actual, run_updates(None)) == []
    assert actual.graphs[-1] == 1
    # Two eager updates and the capture call the kernel.
    assert actual.outcomes["calls"][-1] == actual.outcomes["calls"][2]
