"""DPO trains in every layout as in one process, because the loss is a mean over all pairs."""

from __future__ import annotations

import math
from typing import Any

import pytest
from lightning.pytorch import Trainer, seed_everything

from lightning_megatron import DPO, MegatronStrategy, PreferenceDataModule
from tests.chat_folder import preferences, save_chat_llama, write_lines
from tests.world import run_world

pytest.importorskip("transformers")

LENGTH, STEPS = 160, 3
LAYOUTS: dict[str, dict[str, Any]] = {"tp2": {"tp": 2}, "dp2": {}, "pp2": {"pp": 2}}
#: Trained parameters; the adapters are also trained with a loss other than the default.
KINDS: dict[str, dict[str, Any]] = {
    "whole": {},
    "lora": {"lora": {"r": 4}, "loss_type": "ipo", "learning_rate": 0.01},
}


class ValueRecorder(DPO):
    """DPO that records the logged values after each step."""

    def on_train_batch_end(self, *_: Any) -> None:
        values = {name: float(value) for name, value in self.trainer.callback_metrics.items()}
        self.logged = [*getattr(self, "logged", []), values]


def train(folder: str, rows: str, strategy: Any, devices: int, kind: str) -> list[dict[str, float]]:
    """Return the values logged after each step, and by a validation before and after training."""
    seed_everything(1, verbose=False)
    # Five pairs for validation: the last batch of two data ranks is not full.
    data = PreferenceDataModule(rows, folder, val=rows, seq_length=LENGTH, global_batch_size=4)
    trainer = Trainer(
        accelerator="cpu", devices=devices, precision="64-true", strategy=strategy,
        max_steps=STEPS, max_epochs=-1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
        limit_val_batches=1.0, val_check_interval=STEPS, check_val_every_n_epoch=None,
    )  # fmt: skip
    options = {"beta": 0.3, "learning_rate": 0.003, "schedule": "constant", **KINDS[kind]}
    module = ValueRecorder(folder, **options)
    trainer.fit(module, data)
    return [
        *module.logged,
        {name: float(value) for name, value in trainer.callback_metrics.items()},
    ]


def train_all(rank: int, size: int, folder: str, rows: str) -> dict[str, Any]:
    return {
        f"{name} {kind}": train(
            folder, rows, MegatronStrategy(microbatch_size=1, **layout), size, kind
        )
        for name, layout in LAYOUTS.items()
        for kind in KINDS
    }


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Write a small Llama with a chat template, and files of pairs."""
    folder = tmp_path_factory.mktemp("pairs")
    return save_chat_llama(folder / "model"), write_lines(folder / "a.jsonl", preferences(5))


@pytest.fixture(scope="module")
def single_process(paths: tuple[str, str]) -> dict[str, list[dict[str, float]]]:
    """Train in this process under MegatronStrategy."""
    pytest.importorskip("peft")
    return {kind: train(*paths, MegatronStrategy(), 1, kind) for kind in KINDS}


def test_layouts_train_like_one_process(paths: Any, single_process: Any) -> None:
    assert single_process["whole"][0]["train_loss"] == pytest.approx(math.log(2), rel=0, abs=1e-12)
    for losses in single_process.values():
        assert losses[STEPS - 1]["train_loss"] < losses[0]["train_loss"] - 0.01
        assert losses[-1]["val_rewards/accuracies"] > 0.5
        assert losses[-1].keys() >= {"val_loss", "val_rewards/chosen", "rewards/margins"}
    for runs in run_world(train_all, 2, *paths):
        for name, logged in runs.items():
            expected = single_process[name.split()[1]]
            assert len(logged) == len(expected) == STEPS + 1
            for actual, expected_step in zip(logged, expected, strict=True):
                assert actual == pytest.approx(expected_step, rel=0, abs=1e-10), name


@pytest.mark.parametrize("kind", KINDS)
def test_plain_lightning_trains_like_the_strategy(
    paths: Any, single_process: Any, kind: str
) -> None:
    # Hugging Face's norms compute in float32.
    for actual, expected in zip(train(*paths, "auto", 1, kind), single_process[kind], strict=True):
        assert actual == pytest.approx(expected, rel=0, abs=1e-5)
