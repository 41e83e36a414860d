"""The report of a fit says what was trained, how fast, and where it is kept."""

from __future__ import annotations

import errno
import json
import time
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import CSVLogger

from lightning_megatron import MegatronStrategy, RunCheckpoint, RunReport, TrainingMetrics
from lightning_megatron.errors import MissingExtraError
from lightning_megatron.strategy.callbacks import run_report
from lightning_megatron.strategy.callbacks.run_report import read_curve
from tests.cli_modules import Line, Points

#: Time between two fits (seconds).
PAUSE = 0.3


def fit(
    folder: Path, callbacks: list[Callback], ckpt_path: Path | None = None, **options: Any
) -> Trainer:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    limits = {"max_steps": 6, "log_every_n_steps": 1, "val_check_interval": 3}
    trainer = Trainer(
        accelerator="cpu", devices=1, default_root_dir=folder, num_sanity_val_steps=0,
        callbacks=callbacks, **{**quiet, **limits, **options},
    )  # fmt: skip
    trainer.fit(Line(), Points(context=8), ckpt_path=ckpt_path)
    return trainer


def test_a_report_has_losses_speed_lost_time_checkpoints_and_settings(tmp_path):
    logger = CSVLogger(tmp_path)
    callbacks = [RunReport(), TrainingMetrics(), RunCheckpoint(monitor="val_loss")]
    fit(tmp_path, callbacks, logger=logger, strategy=MegatronStrategy())
    folder = Path(logger.log_dir)
    report = json.loads((folder / "report.json").read_text())
    assert report["steps"] == {"first": 0, "last": 6, "epochs": 1, "restarts": 0}
    losses = read_curve(folder / "metrics.csv", "train_loss")
    assert report["losses"]["train_loss"] == {
        "first": losses[0][1],
        "last": losses[-1][1],
        "lowest": min(value for _, value in losses),
    }
    assert report["last logged step"]["train/learning_rate"] == 0.1
    assert set(report["seconds"]) == {"training", "data", "validation", "saves"}
    assert min(report["seconds"].values()) > 0
    # The best one of two validations, and a link to it or the last.
    assert report["checkpoints"]
    assert all(Path(path).exists() for path in report["checkpoints"])
    assert report["layout"]["tp"] == 1
    assert report["settings"]["trainer.max_steps"] == "6"
    page = (folder / "report.md").read_text()
    for words in ("| train/learning_rate | 0.1 |", "## Checkpoints", "%) |", "| world_size | 1 |"):
        assert words in page


def test_a_continued_fit_reports_the_time_of_all_fits_and_what_restarts_lost(tmp_path):
    def times_of(steps: int, path: Any, *callbacks: Callback) -> dict[str, Any]:
        logger = CSVLogger(tmp_path)
        saver = RunCheckpoint(dirpath=tmp_path)
        callbacks = (RunReport(), TrainingMetrics(), saver, *callbacks)
        fit(tmp_path, [*callbacks], logger=logger, max_steps=steps, ckpt_path=path)
        return json.loads((Path(logger.log_dir) / "report.json").read_text())

    last = tmp_path / "last.ckpt"
    first = times_of(3, None)
    time.sleep(PAUSE)
    second = times_of(6, last)
    assert (second["steps"]["first"], second["steps"]["restarts"]) == (3, 1)
    assert PAUSE < second["seconds"]["restarts"] < time.time() - last.stat().st_mtime + 60
    # The clock of the first fit goes on after the save.
    assert second["seconds"]["training"] > 0.5 * first["seconds"]["training"]
    third = times_of(8, last)
    assert third["steps"]["restarts"] == 2
    assert third["seconds"]["restarts"] > second["seconds"]["restarts"]
    fit(tmp_path, [RunCheckpoint(dirpath=tmp_path / "bare")], max_steps=3)
    bare = times_of(6, tmp_path / "bare" / "last.ckpt")
    assert bare["steps"]["restarts"] == "not known"
    assert "restarts" not in bare["seconds"]


def test_a_full_disk_is_a_warning(tmp_path, monkeypatch):
    def fails(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", fails)
    with pytest.warns(UserWarning, match=r"could not be written .*No space left.*are complete"):
        trainer = fit(tmp_path, [RunReport()], logger=CSVLogger(tmp_path))
    assert (trainer.global_step, trainer.state.finished) == (6, True)


def test_a_plot_of_every_logged_value_is_saved_next_to_the_metrics(tmp_path):
    pytest.importorskip("matplotlib", reason='needs pip install "lightning-megatron[plot]"')
    logger = CSVLogger(tmp_path)
    fit(tmp_path, [RunReport()], logger=logger)
    folder = Path(logger.log_dir)
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "![Losses](loss.png)" in (folder / "report.md").read_text()
    train, val = (read_curve(folder / "metrics.csv", name) for name in ("train_loss", "val_loss"))
    assert [step for step, _ in train] == [0, 1, 2, 3, 4, 5]
    assert [step for step, _ in val] == [2, 5]
    # A loss that is logged by step and by epoch.
    metrics = tmp_path / "metrics.csv"
    metrics.write_text("step,loss_step,loss_epoch\n0,2.5,\n1,2.0,\n1,,2.25\n")
    assert read_curve(metrics, "loss") == [(0, 2.5), (1, 2.0)]


def test_a_message_explains_what_is_missing(tmp_path, monkeypatch):
    messages: list[str] = []
    monkeypatch.setattr(run_report, "rank_zero_info", messages.append)
    fit(tmp_path, [RunReport()])
    assert "no logger has a folder" in messages[-1]

    def raise_missing_extra(module, extra):
        raise MissingExtraError(f'pip install "lightning-megatron[{extra}]"')

    monkeypatch.setattr(run_report, "import_extra", raise_missing_extra)
    logger = CSVLogger(tmp_path)
    fit(tmp_path, [RunReport()], logger=logger)
    assert 'pip install "lightning-megatron[plot]"' in messages[-2]
    assert "![" not in (Path(logger.log_dir) / "report.md").read_text()
