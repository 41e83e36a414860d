"""Captured updates equal eager updates bit for bit, and unsupported updates are refused."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_megatron import CudaGraphs, MegatronStrategy, UnsupportedError
from lightning_megatron.errors import CaptureError, SpeedWarning
from lightning_megatron.graphs.update_graph import UpdateGraph
from lightning_megatron.strategy.checkpoints.run_checkpoints import RunCheckpoints
from lightning_megatron.strategy.step.whole_captures import WholeCaptures
from lightning_megatron.training.group_numbers import GroupNumbers
from tests.strategy.graph_fits import strategy_of
from tests.strategy.update_fits import FULL, SEGMENTS, ScheduledLM, UpdatedLM, differences, run
from tests.training.fused_fits import FusedLM

CASES: dict[str, dict[str, Any]] = {
    "clipped by norm": {"cycles": True},
    "accumulated": {"accumulate_grad_batches": 2, "num_samples": 64, "max_steps": 5},
    "Adam": {"module": UpdatedLM(torch.optim.Adam), "cycles": True},
}


@pytest.mark.parametrize("name", CASES)
def test_captured_updates_equal_eager_updates(name: str) -> None:
    case = CASES[name]
    make = case["module"].make if "module" in case else torch.optim.AdamW
    expected = run(None, **{**case, "module": UpdatedLM(make)})
    settings = (SEGMENTS, FULL) if name == "clipped by norm" else (FULL,)
    for graphs in settings:
        actual = run(graphs, **{**case, "module": UpdatedLM(make)})
        assert differences(actual, expected) == [], graphs.mode
        assert len(actual[1].states) == len(expected[1].states) > 0
        num_steps = case.get("max_steps", 6)
        assert {int(state["step"]) for state in actual[1].states} == {num_steps}
        # Two eager updates and the capture call the kernel; replays run no Python.
        assert actual[1].num_calls[-1] * num_steps == expected[1].num_calls[-1] * 3
        assert expected[1].num_calls[-1] > 0


class CollectiveSave(Callback):
    """Save a checkpoint after the first epoch, of four steps."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == 4:
            trainer.save_checkpoint(self.path)


def test_captured_updates_follow_schedules_of_rate_and_weight_decay(tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_steps": 9, "num_samples": 16}
    expected = run(
        None, module=ScheduledLM(), callbacks=(CollectiveSave(tmp_path / "4.ckpt"),), **options
    )
    actual = run(FULL, module=ScheduledLM(), **options)
    assert differences(actual, expected) == []
    rates = [(group["lr"], group["weight_decay"]) for group in actual[1].groups]
    assert rates == [(0.002, 1.0), (0.0005, 0.0)], "the last values of both schedules"
    assert actual[1].num_calls[-1] < expected[1].num_calls[-1], "updates are replayed"
    without_decay = run(FULL, module=ScheduledLM(decays=False), **options)
    assert differences(without_decay, expected), "the weight decay reaches the update"
    resumed = run(None, module=ScheduledLM(), ckpt_path=tmp_path / "4.ckpt", **options)[1]
    assert resumed.groups == expected[1].groups
    for resumed_state, expected_state in zip(resumed.states, expected[1].states, strict=True):
        assert all(resumed_state[name].equal(expected_state[name]) for name in expected_state), (
            "a resume is exact"
        )


@pytest.mark.parametrize("column", ["learning rate", "others"])
def test_numbers_of_a_group_frozen_at_the_capture_change_the_results(
    column: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run(None, cycles=True)
    fill = GroupNumbers.fill

    def fill_frozen(self: GroupNumbers, groups: Any, are_decoupled: Any) -> None:
        old_table = None if len(groups) != len(self.rows) else self._table.clone()
        fill(self, groups, are_decoupled)
        columns = slice(0, 1) if column == "learning rate" else slice(1, None)
        if old_table is not None and self._is_late:  # type: ignore[attr-defined]
            self._table[:, columns] = old_table[:, columns]
        self.num_fills = getattr(self, "num_fills", 0) + 1

    monkeypatch.setattr(GroupNumbers, "_is_late", property(lambda self: self.num_fills > 2), False)
    monkeypatch.setattr(GroupNumbers, "fill", fill_frozen)
    actual = run(SEGMENTS, cycles=True)
    assert {"exp_avg 0", "losses"} & set(differences(actual, expected))


class SaveAndLoad(Callback):
    """Save a checkpoint after the fourth step, and load it again after the fifth."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "saved.ckpt")

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == 4:
            trainer.save_checkpoint(self.path)
        elif trainer.global_step == 5:
            strategy = strategy_of(trainer)
            strategy.finish_saves()
            strategy.load_checkpoint(self.path)


def _run_with_a_load(graphs: CudaGraphs | None, folder: Path, devices: int = 1) -> list[Any]:
    """Train with a load of a checkpoint in between, and resume from it in another fit."""
    folder.mkdir(exist_ok=True)
    layout = {"async_save": True}
    options: dict[str, Any] = {"num_samples": 64, "layout": layout}
    loads = SaveAndLoad(folder)
    first = run(graphs, devices, callbacks=(loads,), max_steps=9, **options)
    return [first, run(graphs, devices, ckpt_path=loads.path, max_steps=8, **options)]


def test_updates_are_captured_again_after_a_load_and_after_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = _run_with_a_load(None, tmp_path / "eager")
    order: list[str] = []
    _record_calls(monkeypatch, RunCheckpoints, "wait_for_snapshot", order)
    _record_calls(monkeypatch, UpdateGraph, "run", order)
    actual = _run_with_a_load(SEGMENTS, tmp_path / "graphs")
    # A background save may still copy weights; each update waits for it, also a replayed one.
    assert order == ["wait_for_snapshot", "run"] * (9 + 4)
    assert [differences(*pair) for pair in zip(actual, expected, strict=True)] == [[], []]
    # Two groups; two eager updates and a capture before and after the load.
    assert [result[1].num_calls[-1] for result in actual] == [2 * 6, 2 * 3]


def _record_calls(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, order: list[str]
) -> None:
    method = getattr(owner, name)

    def recorded(self: Any, *args: Any) -> Any:
        order.append(name)
        return method(self, *args)

    monkeypatch.setattr(owner, name, recorded)


# ---- refused updates, and failed captures


@dataclass(frozen=True)
class RefusedFit:
    """A fit that must be refused.

    Args:
        words: Part of the error.
        module: Module.
        options: Further arguments of the fit.
    """

    words: str
    module: LightningModule
    options: dict[str, Any] = field(default_factory=dict)


class OwnClipping(UpdatedLM):
    """Clip in a hook that claims to read no gradients."""

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.clip_gradients(optimizer, 0.1, "norm")


class AddsReader(UpdatedLM):
    """Add a callback that reads gradients."""

    def configure_callbacks(self) -> list[Callback]:
        return [Reads()]


class Reads(Callback):
    """Read gradients."""

    def on_before_optimizer_step(self, *_: Any) -> None:
        pass


def _not_fused(groups: Any, fused: bool, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, **options)


def _sgd(groups: Any, fused: bool, eps: float, lr: float, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=lr, **options)


REFUSED = {
    "precision": RefusedFit("needs precision", UpdatedLM(), {"precision": "64-true"}),
    "sums": RefusedFit(
        "gradient_dtype is 'bfloat16'",
        UpdatedLM(),
        {"precision": "bf16-mixed", "layout": {"gradient_dtype": "bfloat16"}},
    ),
    "callback": RefusedFit("Reads.on_before_opt", UpdatedLM(), {"callbacks": (Reads(),)}),
    "late callback": RefusedFit("Reads.on_before_opt", AddsReader()),
    "module": RefusedFit("FusedLM.on_after_backward", FusedLM()),
    "clipping": RefusedFit("OwnClipping.configure_gradient_clipping", OwnClipping()),
    "not fused": RefusedFit("group 0 of AdamW does not set fused=True", UpdatedLM(_not_fused)),
    "SGD": RefusedFit("SGD is not torch's AdamW or Adam", UpdatedLM(_sgd)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_fit_whose_update_cannot_be_captured_is_refused(name: str) -> None:
    case = REFUSED[name]
    with pytest.raises(UnsupportedError, match=case.words) as error:
        run(SEGMENTS, module=case.module, **case.options)
    assert "optimizer=False" in str(error.value)
    assert not hasattr(case.module, "losses") or case.module.losses == []


def test_precision_and_gradient_hook_are_refused_before_processes_start() -> None:
    with pytest.raises(UnsupportedError, match="needs precision 32-true or bf16-mixed"):
        _trainer(precision="64-true")
    trainer = _trainer(callbacks=[Reads()])
    with pytest.raises(UnsupportedError, match="Reads.on_before_optimizer_step"):
        trainer.fit(UpdatedLM(), [])


def _trainer(**options: Any) -> Trainer:
    """Return a trainer whose processes would fail."""
    strategy = MegatronStrategy(cuda_graphs=SEGMENTS)
    strategy._make_backend = lambda mesh: pytest.fail("nothing must be captured")
    return Trainer(accelerator="cpu", devices=2, strategy=strategy, logger=False, **options)


class FailsToUpdate(Callback):
    """Let every capture of an update fail."""

    def on_train_start(self, trainer: Trainer, module: Any) -> None:
        graph = strategy_of(trainer).run.state.update_graph
        assert graph is not None

        def capture(*_: Any) -> Any:
            raise RuntimeError("no memory")

        graph._backend = type("Fails", (), {"capture": capture, "make_pool": lambda self: None})()


def test_failed_capture_leaves_the_update_eager() -> None:
    with pytest.warns(SpeedWarning, match="off: rank 0 could not capture the update .*no memory"):
        actual = run(FULL, callbacks=(FailsToUpdate(),))
    assert differences(actual, run(None)) == []
    strict = CudaGraphs("full", warmup_steps=2, optimizer=True, on_failure="error")
    with pytest.raises(CaptureError, match="the update of the parameters: RuntimeError: no mem"):
        run(strict, callbacks=(FailsToUpdate(),))


class FailsToStep(Callback):
    """Let every capture of a step or of its segments fail, but not that of the update."""

    def on_train_start(self, trainer: Trainer, module: Any) -> None:
        graphs = strategy_of(trainer).run.graphs
        assert graphs is not None

        def capture(*_: Any) -> Any:
            raise RuntimeError("no memory")

        fails = type("Fails", (), {"capture": capture, "make_pool": lambda self: None})()
        captures: Any = graphs._captures
        if isinstance(captures, WholeCaptures):
            captures._graphs._backend = fails
        else:
            object.__setattr__(captures._runner._tools, "backend", fails)


def test_failed_capture_of_a_step_leaves_the_update_captured() -> None:
    settings = FULL
    words = "CUDA graphs of steps are off: rank 0 .*no memory.* update of the parameters keeps its own graph"
    with pytest.warns(SpeedWarning, match=words):
        actual = run(settings, callbacks=(FailsToStep(),))
    assert differences(actual, run(None)) == []
    assert actual[0].num_graphs[-1] == 1
    # Two eager updates and the capture call the kernel.
    assert actual[1].num_calls[-1] == actual[1].num_calls[2]
