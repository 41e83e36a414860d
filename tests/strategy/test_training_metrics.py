"""Metrics of a training: options, parts of its time, precision, and loggers that fail."""

from __future__ import annotations

import csv
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lightning_megatron import MegatronStrategy, TrainingMetrics
from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.strategy.callbacks import model_flops
from lightning_megatron.strategy.callbacks.step_clock import StepClock
from lightning_megatron.strategy.optimization.precision import MegatronPrecision
from tests.cli_modules import Line, Points


def fit(folder: Path, *callbacks: Callback, module: Any = None, **options: Any) -> Trainer:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    limits = {"max_steps": 4, "log_every_n_steps": 1, "enable_checkpointing": False}
    trainer = Trainer(
        accelerator="cpu", devices=1, default_root_dir=folder, num_sanity_val_steps=0,
        callbacks=list(callbacks), **{**quiet, **limits, **options},
    )  # fmt: skip
    trainer.fit(module or Line(), Points(context=8))
    return trainer


def test_only_chosen_metrics_are_logged(tmp_path):
    chosen: Any = ["train/learning_rate", "train/step_seconds"]
    trainer = fit(tmp_path, TrainingMetrics(metrics=chosen))
    assert sorted(one for one in trainer.callback_metrics if "/" in one) == chosen
    everything = fit(tmp_path, TrainingMetrics(), strategy=MegatronStrategy()).callback_metrics
    assert {"train/tokens_per_second", "train/gradient_norm"} <= set(everything)


def test_an_unknown_metric_is_refused_with_the_nearest_one():
    with pytest.raises(ParallelPlanError, match=r"metrics\[1\] must be .*Did you mean train/mfu\?"):
        TrainingMetrics(metrics=["train/step_seconds", "train/mfuu"])


def test_groups_with_rates_of_their_own_have_names_of_their_own(tmp_path):
    class TwoRates(Line):
        def configure_optimizers(self):
            groups = [{"params": [self.layer.weight]}, {"params": [self.layer.bias], "lr": 0.3}]
            return torch.optim.SGD(groups, lr=0.1)

    logged = fit(tmp_path, TrainingMetrics(), module=TwoRates()).callback_metrics
    rates = {name: float(value) for name, value in logged.items() if "rate" in name}
    assert rates == pytest.approx({"train/learning_rate": 0.1, "train/learning_rate/1": 0.3})


def test_skipped_steps_and_loss_scale_are_logged(tmp_path):
    class Overflowing(Line):
        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            return loss * (torch.inf if batch_idx == 1 else 1)

    precision = MegatronPrecision("16-mixed")
    module = Overflowing()
    options = {"plugins": [precision], "strategy": MegatronStrategy()}
    logged = fit(tmp_path, TrainingMetrics(), module=module, **options).callback_metrics
    assert precision.skipped_steps >= 1
    assert logged["train/skipped_steps"] == precision.skipped_steps
    assert logged["train/loss_scale"] == precision.loss_factor
    assert 0 < logged["train/gradient_norm"] < 100


def test_time_belongs_to_the_part_that_takes_it(tmp_path):
    class Slow(Callback):
        def on_validation_batch_start(self, *_: Any) -> None:
            time.sleep(0.02)

        def on_save_checkpoint(self, *_: Any) -> None:
            time.sleep(0.1)

    metrics = TrainingMetrics()
    saver = ModelCheckpoint(monitor="val_loss", save_top_k=-1)
    started = time.perf_counter()
    limits = {"limit_val_batches": 4, "val_check_interval": 2, "enable_checkpointing": True}
    fit(tmp_path, Slow(), metrics, saver, **limits)
    took = time.perf_counter() - started
    totals = metrics.clock.totals
    assert totals["validation"] >= 2 * 4 * 0.02
    assert totals["saves"] >= 2 * 0.1
    assert min(totals.values()) > 0
    # No part has the time of another one.
    assert sum(totals.values()) <= took
    assert metrics.values["train/step_seconds"] <= totals["training"] + totals["data"]
    assert len(metrics.saved) == 2


def test_a_clock_returns_to_the_part_before():
    clock = StepClock()
    with clock.during("saves"):
        assert clock.enter("saves") == "saves"
    assert clock.enter("training") == "training"
    first = clock.lap()
    assert clock.totals == first
    assert clock.lap()["saves"] == 0.0 < first["saves"]


def test_a_logger_that_fails_is_named_once_and_the_training_goes_on(tmp_path, recwarn):
    class Failing(CSVLogger):
        tries = 0

        def log_metrics(self, *args: Any, **options: Any) -> None:
            Failing.tries += 1
            raise ConnectionError("the service is gone")

    healthy = CSVLogger(tmp_path, "healthy")
    trainer = fit(tmp_path, TrainingMetrics(), logger=[Failing(tmp_path), healthy])
    assert (trainer.global_step, Failing.tries) == (4, 4)
    said = [str(one.message) for one in recwarn if "failed to log" in str(one.message)]
    assert len(said) == 1
    assert said[0].startswith("Failing failed to log: ConnectionError: the service is gone.")
    assert (Path(healthy.log_dir) / "metrics.csv").read_text().count("\n") == 5
    # The loggers are as they were.
    with pytest.raises(ConnectionError):
        trainer.loggers[0].log_metrics({"a": 1.0})


def test_a_step_that_reads_values_has_no_flops_and_says_why(tmp_path, monkeypatch):
    class Reading(Line):
        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
            assert float(batch[0][0, 0]) == 1.0, "the points are ones"
            return super().training_step(batch, batch_idx)

    messages: list[str] = []
    monkeypatch.setattr(model_flops, "rank_zero_info", messages.append)
    logged = fit(tmp_path, TrainingMetrics(), module=Reading()).callback_metrics
    assert "train/tflops_per_gpu" not in logged
    assert len(messages) == 1
    assert messages[0].startswith("No FLOPs are logged")
    assert "train/tflops_per_gpu" in fit(tmp_path, TrainingMetrics()).callback_metrics


def test_each_step_and_epoch_logs_its_own_values_beside_those_of_other_callbacks(tmp_path):
    class Other(Callback):
        def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
            pl_module.log("other", float(trainer.global_step))

    class Rates(Line):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            falling = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": falling, "interval": "step"},
            }

    logger = CSVLogger(tmp_path, "metrics")
    limits: dict[str, Any] = {"max_steps": 6, "limit_train_batches": 3}
    fit(tmp_path, TrainingMetrics(), Other(), module=Rates(), logger=logger, **limits)
    rows = list(csv.DictReader((Path(logger.log_dir) / "metrics.csv").read_text().splitlines()))
    rates = [float(row["train/learning_rate"]) for row in rows if row["train/learning_rate"]]
    assert rates == pytest.approx([rates[0] / step for step in range(1, 7)])
    assert [float(row["other"]) for row in rows if row["other"]] == [1, 2, 3, 4, 5, 6]
