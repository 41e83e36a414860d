"""The progress is a bar on a terminal, and lines elsewhere, for readers or programs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger

from lightning_megatron import MegatronStrategy
from lightning_megatron.pipeline.microbatch import count_tokens
from lightning_megatron.strategy.callbacks import progress
from lightning_megatron.strategy.callbacks.progress import TokensProgressBar, count_steps
from lightning_megatron.strategy.callbacks.training_metrics import count_replicas
from lightning_megatron.strategy.cli import MegatronCLI
from tests.cli_modules import Line, Points

TOKENS = torch.zeros(3, 5, dtype=torch.long)


def fit(folder: Path, callbacks: Callback | list[Callback], **options: Any) -> None:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    trainer = Trainer(
        accelerator="cpu", devices=1, default_root_dir=folder, num_sanity_val_steps=0, callbacks=callbacks,
        **{**quiet, **options},
    )  # fmt: skip
    trainer.fit(Line(), Points(context=8))


def test_tokens_are_the_elements_of_the_first_integer_matrix():
    weights = {"weights": torch.ones(3, 5), "tokens": TOKENS}
    for batch in (TOKENS, [TOKENS, TOKENS], weights, (torch.ones(3), {"labels": TOKENS})):
        assert count_tokens(batch) == 15
    for batch in (torch.ones(3, 5), torch.zeros(3, dtype=torch.long), "text", None, []):
        assert count_tokens(batch) == 0


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


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setattr(progress, "is_terminal", lambda: True)


def test_bar_shows_loss_rate_and_time_left(tmp_path, capsys, terminal):
    limits = {"max_steps": 12, "val_check_interval": 4, "log_every_n_steps": 3}
    fit(tmp_path, TokensProgressBar(refresh_rate=2), **limits)
    last = capsys.readouterr().out.split("\r")[-1]
    for words in ("12/12 steps", "train_loss=", "tokens/s=", "left=0:00:00"):
        assert words in last


def test_lines_show_every_logged_step_where_there_is_no_terminal(tmp_path, capsys):
    limits = {"max_steps": 12, "val_check_interval": 4, "log_every_n_steps": 3}
    fit(tmp_path, TokensProgressBar(), strategy=MegatronStrategy(), **limits)
    printed = capsys.readouterr().out
    assert "\r" not in printed
    lines = [line for line in printed.splitlines() if line.startswith("step ")]
    assert [line.split("  ")[0] for line in lines] == [f"step {n}/12" for n in (3, 6, 9, 12)]
    number = r"[\d.,e+-]+"
    pattern = (
        rf"step 12/12  train_loss {number}  grad norm {number}  lr 0\.1  tokens/s/GPU {number}  "
        r"left 0:00:00"
    )
    assert re.fullmatch(pattern, lines[-1])


def test_lines_for_programs_are_strict_json(tmp_path, capsys, terminal):
    class Infinite(Callback):
        def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
            module.log("infinite", torch.inf, prog_bar=True)

    bar = TokensProgressBar(json=True)
    fit(tmp_path, [Infinite(), bar], max_steps=4, limit_val_batches=0, log_every_n_steps=2)
    lines = capsys.readouterr().out.splitlines()
    rows = [json.loads(line, parse_constant=pytest.fail) for line in lines if line[:1] == "{"]
    assert [(row["step"], row["steps"], row["infinite"]) for row in rows] == [
        (2, 4, None),
        (4, 4, None),
    ]
    assert rows[-1]["train/tokens_per_second"] > 0
    assert rows[-1]["seconds_left"] == 0.0


def test_bar_of_its_own_metrics_logs_none(tmp_path, capsys):
    logger = CSVLogger(tmp_path)
    fit(tmp_path, TokensProgressBar(), logger=logger, max_steps=2, log_every_n_steps=1)
    assert "tokens/s/GPU" in capsys.readouterr().out
    assert "train/" not in (Path(logger.log_dir) / "metrics.csv").read_text()


def test_tokens_bar_does_not_convert_logged_values_at_every_step(
    tmp_path, capsys, monkeypatch, terminal
):
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


def test_the_option_json_of_fit_prints_objects_alone_in_the_place_of_the_bars(tmp_path, capsys):
    recipe = tmp_path / "recipe.yaml"
    bar = "{class_path: TQDMProgressBar}"
    recipe.write_text(
        f"trainer: {{accelerator: cpu, devices: 1, logger: false, max_steps: 4, log_every_n_steps: 2,\n"
        f"  enable_checkpointing: false, enable_model_summary: false, default_root_dir: {tmp_path},\n"
        f"  callbacks: [{bar}]}}\n"
        "model: {class_path: tests.cli_modules.Line}\n"
        "data: {class_path: tests.cli_modules.Points, init_args: {context: 8}}\n"
    )
    cli = MegatronCLI(args=["fit", "-c", str(recipe), "--json"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["step"], line["steps"]) for line in lines] == [(2, 4), (4, 4)]
    assert all(line["train_loss"] > 0 and line["train/tokens_per_second"] > 0 for line in lines)
    assert not any(type(one) is TQDMProgressBar for one in cli.trainer.callbacks)
