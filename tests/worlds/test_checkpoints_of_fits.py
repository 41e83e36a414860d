"""Checkpoints of fits: background saves, the files that Lightning's callback keeps, the choice of the
last one, and training that resumes with the next samples.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_megatron import CausalLM, GPTConfig, TokenDataModule
from lightning_megatron.checkpoint import (
    is_sharded_checkpoint,
    load_metadata,
    verify_checkpoint,
    writer,
)
from lightning_megatron.checkpoint.save import CollectiveSave
from lightning_megatron.data.token_file import TokenFileWriter
from lightning_megatron.errors import (
    CheckpointMismatchError,
    CheckpointSaveError,
    CorruptDataError,
    UnsupportedError,
)
from lightning_megatron.strategy.checkpoints.saved_weights import only_steps_change_weights
from tests.fits import GPT2, Job, Language, Record, Tokens, run_jobs_on, trainer_of

SMALL = replace(GPT2, num_layers=2)
BEHIND: dict[str, Any] = {"async_save": True}


def every_step(folder: Path, **options: Any) -> ModelCheckpoint:
    return ModelCheckpoint(folder, "{step}", every_n_train_steps=1, **{"save_top_k": -1, **options})


def fit(
    strategy: Any, steps: int, *callbacks: pl.Callback, resume: Any = None, **options: Any
) -> tuple[pl.Trainer, list[float]]:
    """Train on five batches an epoch; return the Trainer and the losses of all steps."""
    record, weights_only = Record(), options.pop("weights_only", None)
    options |= {"enable_checkpointing": any(isinstance(c, ModelCheckpoint) for c in callbacks)}
    job = Job(SMALL, strategy, steps=steps, trainer=options)
    trainer = trainer_of(job, 1, record, *callbacks)
    data = DataLoader(Tokens(40), batch_size=8)
    trainer.fit(Language(SMALL), data, ckpt_path=resume, weights_only=weights_only)
    return trainer, record.report.losses


def damage(checkpoint: Path) -> None:
    """Flip one bit of the tensors."""
    file = checkpoint / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let a function run before every save, in the thread that writes it."""
    run = CollectiveSave.run
    return lambda before: monkeypatch.setattr(
        CollectiveSave, "run", lambda save: (before(save), run(save))
    )


def slowly(save: CollectiveSave) -> None:
    """Take longer than the steps up to the next save."""
    time.sleep(0.2)


def fail_at_step_3(save: CollectiveSave) -> None:
    assert threading.current_thread() is not threading.main_thread()
    if "step=3" in str(save.path):
        raise CheckpointSaveError("every rank must write its part: No space left on device")


class Scores(pl.Callback):
    """Set the value by which checkpoints are chosen."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        score = (0.1, 0.5, 0.3, 0.2, 0.6)[trainer.global_step - 1]
        trainer.callback_metrics["score"] = torch.tensor(score)


@pytest.mark.parametrize("name", ["last", "{step}"])
def test_names_versions_and_choices_of_files_match_those_of_lightning(name, tmp_path, runs):
    runs(slowly)
    results = []
    for number, strategy in enumerate((None, {}, BEHIND)):
        folder = tmp_path / str(number)
        saver = every_step(folder, save_top_k=2, monitor="score", save_last=name == "{step}")
        saver.filename = name
        fit(strategy, 5, saver, Scores())
        best = {Path(path).name: float(score) for path, score in saver.best_k_models.items()}
        steps = {}
        if strategy is not None:
            assert all(is_sharded_checkpoint(path) for path in folder.iterdir())
            verify_checkpoint(saver.best_model_path)
            steps = {path.name: load_metadata(path)["global_step"] for path in folder.iterdir()}
        results.append((sorted(os.listdir(folder)), Path(saver.best_model_path).name, best, steps))
    assert results[0][:3] == results[1][:3]
    assert results[1] == results[2]


def test_the_last_link_points_to_complete_checkpoints_only(tmp_path: Path, runs: Any) -> None:
    runs(slowly)
    targets, link = [], tmp_path / "new" / "last.ckpt"

    class RecordLink(pl.Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            if link.is_symlink():
                # Even during a save the link leads to a complete checkpoint.
                verify_checkpoint(link)
                targets.append(os.readlink(link))

    saver = every_step(tmp_path / "new", save_top_k=1, save_last="link", save_weights_only=True)
    fit(BEHIND, 4, saver, RecordLink())
    assert targets == ["step=1.ckpt", "step=2.ckpt"]
    assert sorted(os.listdir(tmp_path / "new")) == ["last.ckpt", "step=4.ckpt"]
    assert os.readlink(link) == "step=4.ckpt"
    assert saver.last_model_path == str(link)
    assert not {"file_exists", "_link_checkpoint"} & set(vars(saver)), "the run restores methods"
    with pytest.raises(CheckpointMismatchError, match="must hold optimizer states"):
        fit({}, 5, every_step(tmp_path / "other"), resume=link)


def test_a_failed_background_save_ends_training_and_keeps_the_previous_checkpoint(tmp_path, runs):
    runs(fail_at_step_3)
    with pytest.raises(CheckpointSaveError, match="No space left on device"):
        fit(BEHIND, 40, every_step(tmp_path, save_top_k=1, save_last="link"))
    assert os.readlink(tmp_path / "last.ckpt") == "step=2.ckpt"
    verify_checkpoint(tmp_path / "last.ckpt")
    assert sorted(os.listdir(tmp_path)) == ["last.ckpt", "step=2.ckpt"]


def test_restarts_from_the_last_checkpoint_keep_no_more_than_top_k(tmp_path: Path) -> None:
    for steps, resume in ((2, None), (3, "last"), (5, "last")):
        fit(BEHIND, steps, every_step(tmp_path, save_top_k=1), resume=resume)
        assert os.listdir(tmp_path) == [f"step={steps}.ckpt"]
    # As in Lightning, a checkpoint that the user names stays.
    fit(BEHIND, 6, every_step(tmp_path, save_top_k=1), resume=tmp_path / "step=5.ckpt")
    assert sorted(os.listdir(tmp_path)) == ["step=5.ckpt", "step=6.ckpt"]


def test_last_resumes_from_the_newest_undamaged_checkpoint_of_any_name(tmp_path: Path) -> None:
    with pytest.warns(match="finds no complete checkpoint"):
        _, losses = fit(BEHIND, 5, every_step(tmp_path), resume="last")
    assert len(losses) == 5
    (tmp_path / ".step=9.ckpt.unfinished").mkdir()
    (tmp_path / "step=10.ckpt").mkdir()
    damage(tmp_path / "step=5.ckpt")
    with pytest.raises(CorruptDataError, match=r"step=5.ckpt/__0_0.distcp"):
        fit({}, 5, every_step(tmp_path / "new"), resume=tmp_path / "step=5.ckpt")
    with pytest.warns(match=r"skips .*step=5.ckpt/__0_0.distcp"):
        trainer, resumed = fit({}, 5, every_step(tmp_path, save_top_k=0), resume="last")
    assert trainer.ckpt_path == str(tmp_path / "step=4.ckpt")
    assert resumed == losses[4:]
    # A background save holds the state of its step.
    _, resumed = fit({}, 5, every_step(tmp_path / "again"), resume=tmp_path / "step=1.ckpt")
    assert resumed == losses[1:]
    for step in (1, 2, 3, 4):
        damage(tmp_path / f"step={step}.ckpt")
    with pytest.warns(match="skips"), pytest.raises(CorruptDataError, match="are damaged"):
        fit({}, 5, every_step(tmp_path), resume="last")


@pytest.mark.parametrize("days", [-1, 1])
def test_last_goes_by_the_order_of_saving_and_ignores_clocks_and_broken_links(tmp_path, days):
    with pytest.MonkeyPatch.context() as patch:
        now = time.time
        patch.setattr(writer, "time", SimpleNamespace(time=lambda: now() + days * 86400))
        fit({}, 4, every_step(tmp_path))
    # This run continues from the second step, so step 3 is saved after step 4.
    fit({}, 3, every_step(tmp_path), resume=tmp_path / "step=2.ckpt")
    (tmp_path / "last.ckpt").symlink_to("step=99.ckpt")
    trainer, _ = fit({}, 4, every_step(tmp_path, save_top_k=0), resume="last")
    assert load_metadata(str(trainer.ckpt_path))["global_step"] == 3


def test_last_resumes_from_lightning_files_and_skips_weights_only_checkpoints(tmp_path):
    fit(None, 2, every_step(tmp_path))
    fit({}, 1, every_step(tmp_path, save_weights_only=True, save_top_k=1))
    trainer, losses = fit({}, 3, every_step(tmp_path, save_top_k=0), resume="last")
    assert trainer.ckpt_path == str(tmp_path / "step=2.ckpt")
    assert len(losses) == 1


class UserObject:
    """Object that only unpickling can restore."""


def test_pickled_objects_are_saved_with_a_warning_and_loaded_only_on_request(tmp_path, caplog):
    class SavesObject(ModelCheckpoint):
        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "thing": UserObject()}

    fit({}, 1, SavesObject(tmp_path, "{step}", every_n_train_steps=1))
    assert "thing" in caplog.text
    path = tmp_path / "step=1.ckpt"
    with pytest.raises(UnsupportedError, match=r"add_safe_globals.*weights_only=False"):
        fit({}, 2, every_step(tmp_path / "a"), resume=path)
    trainer, _ = fit({}, 2, every_step(tmp_path / "b"), resume=path, weights_only=False)
    assert trainer.global_step == 2
    with torch.serialization.safe_globals([UserObject]):
        fit({}, 2, every_step(tmp_path / "c"), resume=path)


def test_user_hooks_and_callbacks_count_as_changing_weights(tmp_path: Path) -> None:
    class ClipsWeights(pl.LightningModule):
        def on_train_batch_end(self, *_: Any) -> None:
            for parameter in self.parameters():
                parameter.data.clamp_(-1, 1)

    class UserCallback(pl.Callback):
        pass

    config = GPTConfig.gpt2(num_layers=1, hidden_size=16, num_heads=2)
    inherited: Any = type("InheritsHooks", (CausalLM,), {})
    job = Job(strategy={}, trainer={"enable_checkpointing": True})
    for module, callback, is_unchanged in (
        (pl.LightningModule(), every_step(tmp_path), True),
        (inherited(config), every_step(tmp_path), True),
        (ClipsWeights(), every_step(tmp_path), False),
        (pl.LightningModule(), UserCallback(), False),
        (pl.LightningModule(), EMAWeightAveraging(), False),
    ):
        assert only_steps_change_weights(module, trainer_of(job, 1, callback)) == is_unchanged


def savers(folder: Path) -> list[pl.Callback]:
    return [every_step(folder)]


NUM_TOKENS, WINDOW = 288, 4
NUM_SAMPLES = (NUM_TOKENS - 1) // WINDOW


class Samples(Language):
    """Record the first tokens of the samples of each step."""

    def __init__(self) -> None:
        super().__init__(SMALL)
        self.outcomes["samples"] = []

    def on_train_batch_start(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.outcomes["samples"].append(batch["tokens"][:, 0].tolist())


def test_each_sample_is_taken_once_in_order_when_the_number_of_data_ranks_changes(tmp_path):
    with TokenFileWriter(tmp_path / "corpus", dtype="i4") as writer:
        writer.add_document(np.arange(NUM_TOKENS))

    def windows(name: str, strategy: Any, steps: int, batch_size: int, resume: str = "") -> Job:
        corpus = str(tmp_path / "corpus")
        return Job(
            Samples, {"microbatch_size": 1, **strategy}, "32-true", steps=steps,
            data=partial(TokenDataModule, corpus, seq_length=WINDOW, batch_size=batch_size),
            trainer={"max_epochs": 1, "enable_checkpointing": True},
            callbacks=partial(savers, tmp_path / name), resume=str(tmp_path / resume) if resume else None,
        )  # fmt: skip

    # Four data ranks take 24 samples, then two take 12, then one takes the remaining samples; batch
    # sizes differ. Of the last job, each rank takes all samples at once.
    jobs = {
        "dp4": windows("dp4", {}, 3, 2),
        "dp2": windows("dp2", {"tp": 2}, 5, 3, "dp4/step=3.ckpt"),
        "dp1": windows("dp1", {"tp": 2, "pp": 2}, -1, 5, "dp2/step=5.ckpt"),
        "whole": windows("whole", {"tp": 4, "microbatch_size": NUM_SAMPLES}, -1, NUM_SAMPLES),
    }
    reports = run_jobs_on(4, jobs)
    taken: list[int] = []
    # By the order "tp-cp-ep-dp-pp".
    for name, data_ranks in (("dp4", (0, 1, 2, 3)), ("dp2", (0, 2)), ("dp1", (0,))):
        samples = [reports[name][rank].outcomes["samples"] for rank in data_ranks]
        taken += [s for step in zip(*samples, strict=True) for batch in step for s in batch]
    (expected,) = reports["whole"][0].outcomes["samples"]
    assert sorted(expected) == list(range(0, NUM_SAMPLES * WINDOW, WINDOW))
    assert taken == expected
