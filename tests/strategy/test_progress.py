"""The progress bar counts tokens and measures their rate, and the loss is plotted beside its logs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger

from lightning_megatron import MegatronStrategy
from lightning_megatron.errors import MissingExtraError
from lightning_megatron.pipeline.microbatch import count_tokens
from lightning_megatron.strategy.callbacks import loss_curve
from lightning_megatron.strategy.callbacks.loss_curve import LossCurve, read_curve
from lightning_megatron.strategy.callbacks.progress import (
    TokenRate,
    TokensProgressBar,
    count_replicas,
    count_steps,
)
from tests.cli_modules import Line, Points

TOKENS = torch.zeros(3, 5, dtype=torch.long)


def fit(folder: Path, callback: Callback, **options: Any) -> None:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    trainer = Trainer(
        accelerator="cpu", devices=1, default_root_dir=folder, num_sanity_val_steps=0, callbacks=[callback],
        **{**quiet, **options},
    )  # fmt: skip
    trainer.fit(Line(), Points(context=8))


def test_tokens_are_the_elements_of_the_first_integer_matrix():
    weights = {"weights": torch.ones(3, 5), "tokens": TOKENS}
    for batch in (TOKENS, [TOKENS, TOKENS], weights, (torch.ones(3), {"labels": TOKENS})):
        assert count_tokens(batch) == 15
    for batch in (torch.ones(3, 5), torch.zeros(3, dtype=torch.long), "text", None, []):
        assert count_tokens(batch) == 0


def test_rates_exclude_pauses_and_cover_the_most_recent_batches():
    rate = TokenRate()
    assert rate.per_second == 0.0
    rate.start(0.0)
    rate.add(100, 1.0)
    rate.pause()
    rate.start(50.0)
    rate.add(300, 51.0)
    assert rate.per_second == 200.0
    rate = TokenRate(window=2)
    rate.start(0.0)
    for end, tokens in ((10.0, 1), (11.0, 8), (12.0, 8)):
        rate.add(tokens, end)
    assert rate.per_second == 8.0


def test_numbers_of_replicas_and_steps_follow_the_trainer(tmp_path):
    strategy = SimpleNamespace(distributed_sampler_kwargs={"num_replicas": 2, "rank": 0})
    assert count_replicas(SimpleNamespace(strategy=strategy)) == 2
    assert count_replicas(SimpleNamespace(strategy=SimpleNamespace())) == 1
    counts = []

    class Bar(TokensProgressBar):
        def on_train_start(self, trainer: Trainer, *args: Any) -> None:
            super().on_train_start(trainer, *args)
            counts.append(count_steps(trainer))
            trainer.should_stop = True

    epochs = {"max_epochs": 2}
    for limits in ({"max_steps": 5}, epochs, {**epochs, "max_steps": 3}, {"max_epochs": -1}):
        fit(tmp_path, Bar(), **limits)
    assert counts == [5, 16, 3, None]


def test_bar_shows_loss_rate_and_time_left(tmp_path, capsys):
    fit(tmp_path, TokensProgressBar(refresh_rate=2), max_steps=12, val_check_interval=4)
    last = capsys.readouterr().out.split("\r")[-1]
    for words in ("12/12 steps", "train_loss=", "tokens/s=", "left=0:00:00"):
        assert words in last


def test_tokens_bar_does_not_convert_logged_values_at_every_step(tmp_path, capsys, monkeypatch):
    converted = []
    monkeypatch.setattr(
        "lightning.pytorch.trainer.connectors.logger_connector.result.convert_tensors_to_scalars",
        lambda value: converted.append(value) or float(value),
    )
    options: dict[str, Any] = {"max_steps": 8, "limit_val_batches": 0}
    fit(tmp_path, TokensProgressBar(refresh_rate=4), strategy=MegatronStrategy(), **options)
    assert "train_loss=" in capsys.readouterr().out.split("\r")[-1]
    assert converted == []
    fit(tmp_path, TQDMProgressBar(), strategy=MegatronStrategy(), **options)
    assert len(converted) >= 8


# ---- the loss curve


def plot(folder: Path, logger: Any) -> None:
    options = {"max_steps": 6, "log_every_n_steps": 1, "val_check_interval": 3}
    fit(folder, LossCurve(), logger=logger, enable_progress_bar=False, **options)


def test_a_plot_of_every_logged_value_is_saved_next_to_the_metrics(tmp_path):
    pytest.importorskip("matplotlib", reason='needs pip install "lightning-megatron[plot]"')
    logger = CSVLogger(tmp_path)
    plot(tmp_path, logger)
    folder = Path(logger.log_dir)
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    train, val = (read_curve(folder / "metrics.csv", name) for name in ("train_loss", "val_loss"))
    assert [step for step, _ in train] == [0, 1, 2, 3, 4, 5]
    assert [step for step, _ in val] == [2, 5]
    # A loss that is logged by step and by epoch.
    metrics = tmp_path / "metrics.csv"
    metrics.write_text("step,loss_step,loss_epoch\n0,2.5,\n1,2.0,\n1,,2.25\n")
    assert read_curve(metrics, "loss") == [(0, 2.5), (1, 2.0)]


def test_a_message_explains_why_a_plot_is_missing(tmp_path, monkeypatch):
    messages: list[str] = []
    monkeypatch.setattr(loss_curve, "rank_zero_info", messages.append)
    plot(tmp_path, False)
    assert "no CSVLogger" in messages[-1]

    def raise_missing_extra(module, extra):
        raise MissingExtraError(f'pip install "lightning-megatron[{extra}]"')

    monkeypatch.setattr(loss_curve, "import_extra", raise_missing_extra)
    plot(tmp_path, CSVLogger(tmp_path))
    assert 'pip install "lightning-megatron[plot]"' in messages[-1]
