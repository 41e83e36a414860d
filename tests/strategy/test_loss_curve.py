"""The loss plot is saved next to the metrics, and a message explains why a plot is missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger

from lightning_megatron.errors import MissingExtraError
from lightning_megatron.strategy.callbacks import loss_curve
from lightning_megatron.strategy.callbacks.loss_curve import LossCurve, read_curve
from tests.cli_modules import Line, Points


def fit(folder: Path, logger: Any) -> None:
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        default_root_dir=folder,
        logger=logger,
        max_steps=6,
        log_every_n_steps=1,
        val_check_interval=3,
        num_sanity_val_steps=0,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        callbacks=[LossCurve()],
    )
    trainer.fit(Line(), Points(context=8))


@pytest.fixture
def shown_messages(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collect the messages that the callback shows to the user."""
    messages: list[str] = []
    monkeypatch.setattr(loss_curve, "rank_zero_info", messages.append)
    return messages


def test_plot_is_saved_next_to_the_metrics(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason='needs pip install "lightning-megatron[plot]"')
    logger = CSVLogger(tmp_path)
    fit(tmp_path, logger)
    folder = Path(logger.log_dir)
    assert (folder / "metrics.csv").is_file()
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_curves_have_every_logged_value(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    fit(tmp_path, logger)
    metrics = Path(logger.log_dir, "metrics.csv")
    assert [step for step, _ in read_curve(metrics, "train_loss")] == [0, 1, 2, 3, 4, 5]
    assert [step for step, _ in read_curve(metrics, "val_loss")] == [2, 5]


def test_curve_has_the_step_values_of_a_loss_logged_by_step_and_epoch(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.csv"
    metrics.write_text("step,loss_step,loss_epoch\n0,2.5,\n1,2.0,\n1,,2.25\n")
    assert read_curve(metrics, "loss") == [(0, 2.5), (1, 2.0)]


def test_missing_matplotlib_is_reported_with_the_extra_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shown_messages: list[str]
) -> None:
    def raise_missing_extra(module: str, extra: str) -> None:
        raise MissingExtraError(f'pip install "lightning-megatron[{extra}]"')

    monkeypatch.setattr(loss_curve, "import_extra", raise_missing_extra)
    fit(tmp_path, CSVLogger(tmp_path))
    assert 'pip install "lightning-megatron[plot]"' in shown_messages[-1]


def test_missing_csv_logger_is_reported(tmp_path: Path, shown_messages: list[str]) -> None:
    fit(tmp_path, logger=False)
    assert "no CSVLogger" in shown_messages[-1]
