"""Checkpoints of fits: background saves, the files that Lightning's callback keeps, the choice of the
last one, and training that resumes bit for bit in the same or another layout.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_megatron import CausalLM, GPTConfig, TokenDataModule
from lightning_megatron.checkpoint import (
    is_sharded_checkpoint,
    load_metadata,
    save,
    verify_checkpoint,
)
from lightning_megatron.checkpoint.consolidate import consolidate
from lightning_megatron.checkpoint.save import CollectiveSave
from lightning_megatron.data.token_file import TokenFileWriter
from lightning_megatron.errors import (
    CheckpointMismatchError,
    CheckpointSaveError,
    CorruptDataError,
    UnsupportedError,
)
from lightning_megatron.strategy.checkpoints.weight_changes import only_steps_change_weights
from tests.fits import (
    GPT2,
    MIXTURE,
    Job,
    Language,
    Record,
    Report,
    Tokens,
    run_job,
    trainer_of,
)
from tests.world import run_world

SMALL = replace(GPT2, num_layers=2)
BEHIND: dict[str, Any] = {"async_save": True}
BOTH = pytest.mark.parametrize("strategy", [{}, BEHIND], ids=["at once", "behind training"])


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
def runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Let a function run before every save, in the thread that writes it."""

    def install(before: Any) -> None:
        run = CollectiveSave.run

        def run_later(save: CollectiveSave) -> None:
            before(save)
            run(save)

        monkeypatch.setattr(CollectiveSave, "run", run_later)

    return install


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


# ---- files


@pytest.mark.parametrize("name", ["same", "{score:.0f}", "last", "{step}"])
def test_names_versions_and_choices_of_files_match_those_of_lightning(
    name: str, tmp_path: Path, runs: Any
) -> None:
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


def test_the_previous_checkpoint_stays_until_the_next_one_is_complete(
    tmp_path: Path, runs: Any
) -> None:
    complete: list[list[str]] = []

    def note(save: CollectiveSave) -> None:
        slowly(save)
        # During a save the previous checkpoint exists and the new one is not visible.
        complete.append(sorted(p.name for p in tmp_path.iterdir() if is_sharded_checkpoint(p)))

    runs(note)
    fit(BEHIND, 3, every_step(tmp_path, save_top_k=1))
    assert complete == [[], ["step=1.ckpt"], ["step=2.ckpt"]]
    assert os.listdir(tmp_path) == ["step=3.ckpt"]


def test_a_failed_background_save_ends_training_and_keeps_the_previous_checkpoint(
    tmp_path: Path, runs: Any
) -> None:
    runs(fail_at_step_3)
    with pytest.raises(CheckpointSaveError, match="No space left on device"):
        fit(BEHIND, 40, every_step(tmp_path, save_top_k=1, save_last="link"))
    assert os.readlink(tmp_path / "last.ckpt") == "step=2.ckpt"
    verify_checkpoint(tmp_path / "last.ckpt")
    assert sorted(os.listdir(tmp_path)) == ["last.ckpt", "step=2.ckpt"]


@BOTH
def test_restarts_from_the_last_checkpoint_keep_no_more_than_top_k(
    strategy: Any, tmp_path: Path
) -> None:
    for steps, resume in ((2, None), (3, "last"), (5, "last")):
        fit(strategy, steps, every_step(tmp_path, save_top_k=1), resume=resume)
        assert os.listdir(tmp_path) == [f"step={steps}.ckpt"]
    # As in Lightning, a checkpoint that the user names stays.
    fit(strategy, 6, every_step(tmp_path, save_top_k=1), resume=tmp_path / "step=5.ckpt")
    assert sorted(os.listdir(tmp_path)) == ["step=5.ckpt", "step=6.ckpt"]


# ---- the last checkpoint


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


@contextmanager
def clock_ahead(days: float) -> Iterator[None]:
    """Let the clock of saves be wrong."""
    with pytest.MonkeyPatch.context() as patch:
        now = time.time
        patch.setattr(save, "time", SimpleNamespace(time=lambda: now() + days * 86400))
        yield


@pytest.mark.parametrize("days", [-1, 1])
def test_last_goes_by_the_order_of_saving_and_ignores_clocks_and_broken_links(
    tmp_path: Path, days: int
) -> None:
    with clock_ahead(days):
        fit({}, 4, every_step(tmp_path))
    # This run continues from the second step, so step 3 is saved after step 4.
    fit({}, 3, every_step(tmp_path), resume=tmp_path / "step=2.ckpt")
    (tmp_path / "last.ckpt").symlink_to("step=99.ckpt")
    trainer, _ = fit({}, 4, every_step(tmp_path, save_top_k=0), resume="last")
    assert load_metadata(str(trainer.ckpt_path))["global_step"] == 3


def test_last_resumes_from_lightning_files_and_skips_weights_only_checkpoints(
    tmp_path: Path,
) -> None:
    fit(None, 2, every_step(tmp_path))
    options = {"save_weights_only": True, "save_top_k": 1, "auto_insert_metric_name": False}
    fit({}, 1, every_step(tmp_path, **options))
    trainer, losses = fit({}, 3, every_step(tmp_path, save_top_k=0), resume="last")
    assert trainer.ckpt_path == str(tmp_path / "step=2.ckpt")
    assert len(losses) == 1


def test_last_finds_checkpoints_of_an_earlier_logger_version(tmp_path: Path) -> None:
    for steps, resume, days in ((2, None, 1), (3, "last", 0), (4, "last", 0)):
        saver = ModelCheckpoint(every_n_train_steps=1)
        with clock_ahead(days):
            trainer, _ = fit({}, steps, saver, resume=resume, logger=CSVLogger(tmp_path))
        if resume is not None:
            version = f"version_{steps - 3}/checkpoints/epoch=0-step={steps - 1}.ckpt"
            assert trainer.ckpt_path == str(tmp_path / "lightning_logs" / version)
    assert "version_2" in saver.best_model_path


class UserObject:
    """Object that only unpickling can restore."""


def test_pickled_objects_are_saved_with_a_warning_and_loaded_only_on_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
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

    class InheritedHooks(CausalLM):
        """Have the hooks of the package and no others."""

    class OverridesHook(CausalLM):
        def on_validation_epoch_end(self) -> None:
            super().on_validation_epoch_end()

    class UserCallback(pl.Callback):
        pass

    def trainer(*callbacks: pl.Callback) -> pl.Trainer:
        return trainer_of(Job(strategy={}, trainer={"enable_checkpointing": True}), 1, *callbacks)

    config = GPTConfig.gpt2(num_layers=1, hidden_size=16, num_heads=2)
    for unchanged in (pl.LightningModule(), InheritedHooks(config)):
        assert only_steps_change_weights(unchanged, trainer(every_step(tmp_path)))
    for changed in (ClipsWeights(), OverridesHook(config)):
        assert not only_steps_change_weights(changed, trainer(every_step(tmp_path)))
    for callback in (UserCallback(), EMAWeightAveraging()):
        assert not only_steps_change_weights(pl.LightningModule(), trainer(callback))


# ---- resuming on four ranks

NUM_TOKENS, WINDOW, SAVED, STEPS = 288, 4, 2, 4
NUM_SAMPLES = (NUM_TOKENS - 1) // WINDOW


class Samples(Language):
    """Record the samples of each step, and draw from every generator that a user's step may use."""

    def __init__(self, augments: bool = False) -> None:
        super().__init__(replace(SMALL, num_layers=4, hidden_dropout=0.2, attention_dropout=0.1))
        self.augments, self.samples, self.losses = augments, list[list[int]](), list[float]()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if self.augments:
            draws = torch.rand(()) + float(np.random.normal()) + random.random()
            loss = loss * (1.0 + 0.1 * draws)
        return loss

    def on_train_batch_start(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.samples.append(batch["tokens"][:, 0].tolist())

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))


class SaveAt(pl.Callback):
    """Save a checkpoint after a step; the training continues."""

    def __init__(self, step: int, path: str) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


def windows(
    folder: Path, strategy: Any, steps: int, save: tuple[int, str] | None = None, resume: str | None = None,
    augments: bool = False, batch_size: int = 2,
) -> Samples:  # fmt: skip
    """Train on windows of a token file on four ranks."""
    callbacks = [SaveAt(save[0], str(folder / save[1]))] if save is not None else []
    job = Job(strategy=strategy, precision="32-true", steps=steps, trainer={"max_epochs": 1})
    module, trainer = Samples(augments), trainer_of(job, 4, *callbacks)
    data = TokenDataModule(f"{folder}/corpus", seq_length=WINDOW, batch_size=batch_size)
    trainer.fit(module, datamodule=data, ckpt_path=resume and folder / resume)
    return module


#: Layouts that resume bit for bit, and whether their steps draw random numbers.
EXACT: dict[str, tuple[dict[str, Any], bool]] = {
    "tp2 dp2": ({"tp": 2}, True),
    "dp4 behind training": (BEHIND, True),
    "tp2 pp2": ({"tp": 2, "pp": 2, **BEHIND}, False),
}
EXPERTS = replace(MIXTURE, num_layers=2)
#: Layouts that continue Lightning's files, and whose files Lightning continues.
EXCHANGED: dict[str, tuple[GPTConfig, dict[str, Any]]] = {
    "pp2 zb-v dp2": (GPT2, {"pp": 2, "vpp": 2, "schedule": "zb-v"}),
    "dp4": (GPT2, {"zero": 0}),
    "tp2 +sp ep2": (EXPERTS, {"tp": 2, "ep": 2, "etp": 1}),
}


def exchanged(config: GPTConfig, strategy: Any, **options: Any) -> Job:
    """Train groups of parameters with and without weight decay."""

    class Grouped(Language):
        def configure_optimizers(self) -> Any:
            decayed = [p for p in self.parameters() if p.dim() > 1]
            others = [p for p in self.parameters() if p.dim() <= 1]
            groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others}]
            optimizer = torch.optim.AdamW(groups, lr=1e-2, eps=1e-3, weight_decay=0.0)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
            rates = {"scheduler": schedule, "interval": "step"}
            return {"optimizer": optimizer, "lr_scheduler": rates}

    return Job(partial(Grouped, config), strategy, data=partial(Tokens, 40), **options)


@cache
def lightnings(config: GPTConfig) -> tuple[str, list[float]]:
    """Return Lightning's file after two steps, and the losses of four steps."""
    path = f"{mkdtemp()}/plain.ckpt"
    run_job(exchanged(config, None, steps=SAVED, save=path))
    return path, run_job(exchanged(config, None, steps=STEPS)).losses


def four_ranks(rank: int, size: int, folder: Path, files: dict[str, str]) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    results: dict[str, Any] = {}
    for name, (layout, augments) in EXACT.items():
        whole = windows(folder, layout, STEPS, save=(SAVED, name), augments=augments)
        resumed = windows(folder, layout, STEPS, resume=name, augments=augments)
        results[name] = whole.losses, resumed.losses, whole.samples, resumed.samples
    # Four data ranks take 24 samples, then two take 12, then one takes the remaining samples; batch
    # sizes differ.
    one: dict[str, Any] = {"microbatch_size": 1}
    first = windows(folder, one, 3, save=(3, "four"))
    second = windows(folder, {"tp": 2, **one}, 5, save=(5, "two"), resume="four", batch_size=3)
    third = windows(folder, {"tp": 2, "pp": 2, **one}, -1, resume="two", batch_size=5)
    results["samples"] = first.samples, second.samples, third.samples
    layout = {"tp": 4, "microbatch_size": NUM_SAMPLES}
    results["once"] = windows(folder, layout, -1, batch_size=NUM_SAMPLES).samples
    for name, (config, layout) in EXCHANGED.items():
        job = exchanged(config, layout, steps=STEPS, resume=files[name])
        results["exchanged", name] = run_job(job, size).losses
        run_job(exchanged(config, layout, steps=SAVED, save=str(folder / f"{name}.ckpt")), size)
    return results


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[Any, Any]]]:
    folder = tmp_path_factory.mktemp("resume")
    with TokenFileWriter(folder / "corpus", dtype="i4") as writer:
        writer.add_document(np.arange(NUM_TOKENS))
    files = {name: lightnings(config)[0] for name, (config, _) in EXCHANGED.items()}
    return folder, run_world(four_ranks, 4, folder, files)


@pytest.mark.parametrize("name", EXACT)
def test_a_resumed_run_equals_an_uninterrupted_run_bit_for_bit(name: str, ranks: Any) -> None:
    for results in ranks[1]:
        losses, resumed_losses, samples, resumed_samples = results[name]
        assert len(losses) == STEPS
        assert resumed_losses == losses[SAVED:]
        assert resumed_samples == samples[SAVED:]


def test_each_sample_is_taken_once_in_order_when_the_number_of_data_ranks_changes(
    ranks: Any,
) -> None:
    parts = [results["samples"] for results in ranks[1]]
    # By the order "tp-cp-ep-dp-pp": four data ranks, then ranks 0 and 2, then rank 0 for all.
    taken: list[int] = []
    for number, data_ranks in enumerate(((0, 1, 2, 3), (0, 2), (0,))):
        for step in zip(*(parts[rank][number] for rank in data_ranks), strict=True):
            taken += [sample for batch in step for sample in batch]
    expected = [sample for batch in ranks[1][0]["once"] for sample in batch]
    assert sorted(expected) == list(range(0, NUM_SAMPLES * WINDOW, WINDOW))
    assert taken == expected


@pytest.mark.parametrize("name", EXCHANGED)
def test_training_resumes_between_lightning_and_every_layout(name: str, ranks: Any) -> None:
    folder, results = ranks
    config = EXCHANGED[name][0]
    _, losses = lightnings(config)
    for result in results:
        assert result["exchanged", name] == pytest.approx(losses[SAVED:], abs=1e-10)
    back = str(folder / f"{name} back.ckpt")
    consolidate(folder / f"{name}.ckpt", back)
    report: Report = run_job(exchanged(config, None, steps=STEPS, resume=back))
    assert report.losses == pytest.approx(losses[SAVED:], abs=1e-10)
