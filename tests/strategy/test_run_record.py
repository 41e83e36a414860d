"""What recipes' callbacks and logger leave: checkpoints and metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback

from lightning_megatron import MegatronStrategy, RunCheckpoint, RunLogger
from lightning_megatron.strategy.callbacks import run_record
from tests.cli_modules import Line, Points

MONITORED: Any = {"monitor": "val_loss", "filename": "step{step}", "auto_insert_metric_name": False}


class Worse(Callback):
    """Make the module worse from a step on, and note the step of each checkpoint."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.saved: list[int] = []

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        if trainer.global_step >= self.step:
            torch.nn.init.constant_(module.layer.weight, 10.0 * trainer.global_step)

    def on_save_checkpoint(self, trainer: pl.Trainer, module: Any, checkpoint: Any) -> None:
        self.saved.append(trainer.global_step)


def fit(folder: Path, callbacks: list[Callback], **options: Any) -> pl.Trainer:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    options = {"logger": False, "val_check_interval": 2, "max_steps": 5, **quiet, **options}
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, default_root_dir=folder, callbacks=callbacks, **options
    )
    trainer.fit(Line(), Points(8))
    return trainer


def step_of(path: Path) -> int:
    return int(torch.load(path, weights_only=False)["global_step"])


@pytest.mark.parametrize("save_last", ["link", True])
def test_last_checkpoint_is_the_newest_beside_the_best(tmp_path, save_last):
    worse = Worse(3)
    fit(tmp_path, [worse, RunCheckpoint(save_last=save_last, **MONITORED)])
    folder = tmp_path / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["last.ckpt", "step2.ckpt"]
    assert (step_of(folder / "step2.ckpt"), step_of(folder / "last.ckpt")) == (2, 5)
    # The best one at step 2, once more unless that is a link, and the newest one after it.
    assert worse.saved == ([2, 4, 5] if save_last == "link" else [2, 2, 4, 5])


def test_last_checkpoint_links_to_the_best_one_that_is_the_newest(tmp_path):
    noted = Worse(1)
    fit(tmp_path, [noted, RunCheckpoint(**MONITORED, mode="max")], max_steps=4)
    last = tmp_path / "checkpoints/last.ckpt"
    assert last.is_symlink()
    assert last.resolve().name == "step4.ckpt"
    assert noted.saved == [2, 4]


def test_run_without_a_validation_saves_its_last_step_and_names_it(tmp_path, caplog):
    strategy = MegatronStrategy()
    caplog.set_level("INFO", "lightning.pytorch")
    fit(
        tmp_path, [RunCheckpoint(**MONITORED)], max_steps=3, val_check_interval=8, strategy=strategy
    )
    (saved,) = (tmp_path / "checkpoints").iterdir()
    assert saved.name == "last.ckpt"
    assert f"Checkpoint: {saved}; --ckpt_path last continues the run" in caplog.messages
    assert fit(tmp_path / "other", [RunCheckpoint(**MONITORED)], fast_dev_run=True).global_step == 1
    assert not (tmp_path / "other").exists()


def test_metrics_go_to_tensorboard_beside_csv_if_it_is_installed(tmp_path, monkeypatch):
    calls: list[tuple[str, Any]] = []

    class Events:
        def __init__(self, *args: Any, **options: Any) -> None:
            calls.append(("init", (*args, *options.values())))

        def __getattr__(self, name: str) -> Any:
            return lambda *args: calls.append((name, args))

    monkeypatch.setattr(run_record, "TensorBoardLogger", Events)
    for installed in (False, True):
        monkeypatch.setattr(run_record, "find_spec", lambda name, found=installed: found or None)
        logger = RunLogger(str(tmp_path), "run", 3)
        logger.log_metrics({"loss": 1.0}, 7)
        assert bool(calls) == installed
    assert calls == [("init", (str(tmp_path), "run", 3)), ("log_metrics", ({"loss": 1.0}, 7))]
