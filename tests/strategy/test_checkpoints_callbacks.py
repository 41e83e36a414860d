"""Background saves look to Lightning's checkpoint callbacks like saves that complete at once."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch.utils.data import DataLoader

from lightning_megatron.checkpoint import load_metadata, verify_checkpoint
from lightning_megatron.checkpoint.save import CollectiveSave
from lightning_megatron.errors import CheckpointSaveError
from tests.proof.training import Tokens
from tests.strategy.checkpoint_runs import Trained, trainer_of
from tests.strategy.test_checkpoints_last import BEHIND, every_step

#: Monitored value after each step.
SCORES = (0.1, 0.5, 0.3, 0.2, 0.6, 0.05)


class Scores(Callback):
    """Set the value by which checkpoints are chosen."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        trainer.callback_metrics["score"] = torch.tensor(SCORES[trainer.global_step - 1])


def fit(layout: dict[str, Any] | None, steps: int, *callbacks: Callback) -> None:
    """Train on five batches an epoch."""
    trainer_of(layout, 1, steps, callbacks=callbacks).fit(
        Trained(), DataLoader(Tokens(), batch_size=8)
    )


@pytest.fixture
def slow_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every save take longer than the steps up to the next save."""
    run = CollectiveSave.run

    def run_slowly(save: CollectiveSave) -> None:
        time.sleep(0.2)
        run(save)

    monkeypatch.setattr(CollectiveSave, "run", run_slowly)


@pytest.mark.usefixtures("slow_saves")
@pytest.mark.parametrize("name", ["same", "{score:.0f}", "last"])
def test_versions_of_taken_file_names_match_those_without_background_saves(
    name: str, tmp_path: Path
) -> None:
    results = []
    for number, layout in enumerate((None, {}, BEHIND)):
        folder = tmp_path / str(number)
        saver = every_step(folder, save_top_k=2, monitor="score")
        saver.filename = name
        fit(layout, 5, saver, Scores())
        best = {Path(path).name: float(score) for path, score in saver.best_k_models.items()}
        steps = {}
        if layout is not None:
            steps = {
                path: load_metadata(folder / path)["global_step"] for path in os.listdir(folder)
            }
        results.append((sorted(os.listdir(folder)), Path(saver.best_model_path).name, best, steps))
    assert results[0][:3] == results[1][:3]
    assert results[1] == results[2]


@pytest.mark.usefixtures("slow_saves")
def test_the_last_link_points_to_complete_checkpoints_only(tmp_path: Path) -> None:
    targets = []

    class RecordLink(Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if os.path.islink(tmp_path / "new" / "last.ckpt"):
                # Even during a save the link leads to a complete checkpoint.
                verify_checkpoint(tmp_path / "new" / "last.ckpt")
                targets.append(os.readlink(tmp_path / "new" / "last.ckpt"))

    saver = every_step(tmp_path / "new", save_top_k=1, save_last="link")
    fit(BEHIND, 4, saver, RecordLink())
    assert targets == ["step=1.ckpt", "step=2.ckpt"]
    assert sorted(os.listdir(tmp_path / "new")) == ["last.ckpt", "step=4.ckpt"]
    assert os.readlink(tmp_path / "new" / "last.ckpt") == "step=4.ckpt"
    assert saver.last_model_path == str(tmp_path / "new" / "last.ckpt")


def test_a_failed_save_leaves_the_last_link_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = CollectiveSave.run

    def fail_at_step_3(save: CollectiveSave) -> None:
        if "step=3" in str(save.path):
            raise CheckpointSaveError(
                "every rank must write its part of a checkpoint: No space left on device"
            )
        run(save)

    monkeypatch.setattr(CollectiveSave, "run", fail_at_step_3)
    with pytest.raises(CheckpointSaveError, match="No space left on device"):
        fit(BEHIND, 40, every_step(tmp_path, save_top_k=1, save_last="link"))
    assert os.readlink(tmp_path / "last.ckpt") == "step=2.ckpt"
    verify_checkpoint(tmp_path / "last.ckpt")


def test_checkpoint_callbacks_have_no_replaced_methods_after_a_run(tmp_path: Path) -> None:
    saver = every_step(tmp_path, save_top_k=1, save_last="link")
    fit(BEHIND, 1, saver)
    assert not {"file_exists", "_link_checkpoint"} & set(vars(saver))
