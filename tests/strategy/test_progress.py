"""The progress bar counts tokens and steps and measures the token rate."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import TQDMProgressBar

from lightning_megatron import MegatronStrategy
from lightning_megatron.strategy.callbacks.progress import (
    TokenRate,
    TokensProgressBar,
    count_replicas,
    count_steps,
)
from lightning_megatron.strategy.logs.token_count import count_tokens
from tests.cli_modules import Line, Points

TOKENS = torch.zeros(3, 5, dtype=torch.long)


@pytest.mark.parametrize(
    "batch",
    [
        TOKENS,
        [TOKENS, TOKENS],
        {"weights": torch.ones(3, 5), "tokens": TOKENS},
        (torch.ones(3), {"labels": TOKENS}),
    ],
)
def test_tokens_are_the_elements_of_the_first_integer_matrix(batch: Any) -> None:
    assert count_tokens(batch) == 15


@pytest.mark.parametrize(
    "batch", [torch.ones(3, 5), torch.zeros(3, dtype=torch.long), "text", None, []]
)
def test_batches_without_an_integer_matrix_have_zero_tokens(batch: Any) -> None:
    assert count_tokens(batch) == 0


def test_rate_excludes_pauses() -> None:
    rate = TokenRate()
    rate.start(0.0)
    rate.add(100, 1.0)
    rate.pause()
    rate.start(50.0)
    rate.add(300, 51.0)
    assert rate.per_second == 200.0


def test_rate_covers_only_the_most_recent_batches() -> None:
    rate = TokenRate(window=2)
    rate.start(0.0)
    for end, tokens in ((10.0, 1), (11.0, 8), (12.0, 8)):
        rate.add(tokens, end)
    assert rate.per_second == 8.0


def test_rate_is_zero_before_the_first_batch() -> None:
    assert TokenRate().per_second == 0.0


def test_number_of_replicas_is_that_of_the_sampler_or_one() -> None:
    strategy = SimpleNamespace(distributed_sampler_kwargs={"num_replicas": 2, "rank": 0})
    assert count_replicas(SimpleNamespace(strategy=strategy)) == 2
    assert count_replicas(SimpleNamespace(strategy=SimpleNamespace())) == 1


@pytest.mark.parametrize(
    ("limits", "steps"),
    [
        ({"max_steps": 5}, 5),
        ({"max_epochs": 2}, 16),
        ({"max_epochs": 2, "max_steps": 3}, 3),
        ({"max_epochs": -1}, None),
    ],
)
def test_number_of_steps_follows_the_limits_of_the_trainer(
    limits: dict[str, int], steps: int | None, tmp_path: Path
) -> None:
    counts = []

    class Bar(TokensProgressBar):
        def on_train_start(self, trainer: Trainer, *args: Any) -> None:
            super().on_train_start(trainer, *args)
            counts.append(count_steps(trainer))
            trainer.should_stop = True

    fit(tmp_path, Bar(), **limits)
    assert counts == [steps]


def test_bar_shows_loss_rate_and_time_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(tmp_path, TokensProgressBar(refresh_rate=2), max_steps=12, val_check_interval=4)
    last = capsys.readouterr().out.split("\r")[-1]
    assert "12/12 steps" in last
    assert "train_loss=" in last
    assert "tokens/s=" in last
    assert "left=0:00:00" in last


def test_tokens_bar_does_not_convert_logged_values_at_every_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    converted = []
    monkeypatch.setattr(
        "lightning.pytorch.trainer.connectors.logger_connector.result.convert_tensors_to_scalars",
        lambda value: converted.append(value) or float(value),
    )
    fit(
        tmp_path,
        TokensProgressBar(refresh_rate=4),
        strategy=MegatronStrategy(),
        max_steps=8,
        limit_val_batches=0,
    )
    assert "train_loss=" in capsys.readouterr().out.split("\r")[-1]
    assert converted == []
    fit(tmp_path, TQDMProgressBar(), strategy=MegatronStrategy(), max_steps=8, limit_val_batches=0)
    assert len(converted) >= 8


def fit(folder: Path, bar: TQDMProgressBar, strategy: Any = "auto", **limits: Any) -> None:
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=[bar],
        **limits,
    )
    trainer.fit(Line(), Points(context=8))
