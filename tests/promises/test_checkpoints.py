"""README: checkpoints load under another layout, and a training that was killed continues."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import IO

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_megatron import FP8
from lightning_megatron.checkpoint import verify_checkpoint, writer
from lightning_megatron.checkpoint.storage import LocalFolder
from lightning_megatron.errors import CheckpointSaveError, CorruptDataError
from tests.fits import (
    GPT2,
    LLAMA,
    MIXTURE,
    STEPS,
    Job,
    Language,
    Report,
    gpt_twin,
    joined,
    run_job,
    run_jobs,
    run_jobs_on,
)
from tests.world import run_world

SAVED = STEPS - 1
LAYOUTS = {
    "tp4": {"tp": 4},
    "pp2 vpp2 dp2": {"pp": 2, "vpp": 2, "optimizer.zero": 0},
    "cp2 dp2": {"cp": 2, "optimizer.bucket_size": 500, "async_save": True},
}
MOVES = [(saver, reader) for saver in LAYOUTS for reader in LAYOUTS]


class Noisy(Language):
    """Weight the losses by numbers that every data rank draws for itself."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        if self.global_step == 0:
            random.seed(self.trainer.strategy.mesh.data.rank)
        return super().loss(batch) * (1.0 + random.random())


#: Of a layout whose ranks have states of their own, bit for bit.
NOISY = {"tp": 2, "microbatch_size": 4}
EXPERT_LAYOUTS = {"ep4": {"ep": 4}, "tp2 pp2": {"tp": 2, "pp": 2}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def reports(folder: Path) -> dict[object, list[Report]]:
    """On four processes, train to the end, train and save, and continue under every layout."""
    whole: dict[object, Job] = {name: Job(GPT2, options) for name, options in LAYOUTS.items()}
    saves: dict[object, Job] = {
        (name, "saved"): Job(GPT2, options, steps=SAVED, save=str(folder / name))
        for name, options in LAYOUTS.items()
    }
    moves: dict[object, Job] = {
        (saver, reader): Job(GPT2, LAYOUTS[reader], resume=str(folder / saver))
        for saver, reader in MOVES
    }
    for name, options in EXPERT_LAYOUTS.items():
        saves[name, "saved"] = Job(MIXTURE, options, steps=SAVED, save=str(folder / name))
    whole["noisy"] = Job(Noisy, NOISY)
    saves["noisy", "saved"] = Job(Noisy, NOISY, steps=SAVED, save=str(folder / "noisy"))
    moves["noisy", "noisy"] = Job(Noisy, NOISY, resume=str(folder / "noisy"))
    for saver, reader in (("ep4", "tp2 pp2"), ("tp2 pp2", "ep4")):
        moves[saver, reader] = Job(MIXTURE, EXPERT_LAYOUTS[reader], resume=str(folder / saver))
    return run_jobs_on(4, whole | saves | moves)


@pytest.mark.parametrize(("saver", "reader"), [*MOVES, ("ep4", "tp2 pp2"), ("tp2 pp2", "ep4")])
def test_a_training_continues_under_any_layout(saver, reader, reports):
    twin = gpt_twin(MIXTURE if saver in EXPERT_LAYOUTS else GPT2)
    for report in reports[saver, reader]:
        torch.testing.assert_close(report.losses, twin.losses[SAVED:], rtol=0.0, atol=1e-10)
    for name, weight in joined(reports[saver, reader]).items():
        torch.testing.assert_close(weight, joined([twin])[name], rtol=0.0, atol=1e-10)


@pytest.mark.parametrize("name", [*LAYOUTS, "noisy"])
def test_a_training_continues_under_its_own_layout_bit_for_bit(name, reports):
    for continued, whole in zip(reports[name, name], reports[name], strict=True):
        assert continued.losses == whole.losses[SAVED:]
        for key, (piece, _) in continued.pieces.items():
            assert torch.equal(piece, whole.pieces[key][0]), key


def test_a_training_of_four_processes_continues_in_one(reports, folder):
    report = run_job(Job(GPT2, {}, resume=str(folder / "pp2 vpp2 dp2")))
    torch.testing.assert_close(report.losses, gpt_twin(GPT2).losses[SAVED:], rtol=0, atol=1e-10)


class Killed(pl.Callback):
    """Kill a rank in a step, as a machine that goes away does."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_before_zero_grad(self, trainer: pl.Trainer, *_: object) -> None:
        if trainer.global_step == self.step and trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def saving(folder: Path, killed_in: int | None = None) -> Sequence[pl.Callback]:
    """Save every step, and let a rank die in the step ``killed_in`` if there is one."""
    saver = ModelCheckpoint(folder, every_n_train_steps=1, save_last=True, save_top_k=1)
    return [saver] if killed_in is None else [saver, Killed(killed_in)]


def test_a_killed_training_continues_from_its_last_step(tmp_path: Path):
    layout = {"tp": 2, "fp8": FP8("tensorwise", emulate=True, keep=("*.down",))}
    trainer = {"enable_checkpointing": True}
    job = Job(LLAMA, layout, trainer=trainer, callbacks=partial(saving, tmp_path, SAVED))
    with pytest.raises(RuntimeError, match="exit code -9"):
        run_world(run_jobs, 2, {"killed": job})
    again = replace(job, callbacks=partial(saving, tmp_path), resume="last")
    whole = replace(job, callbacks=tuple, trainer={})
    reports = run_jobs_on(2, {"again": again, "whole": whole})
    assert 0 < len(reports["again"][0].losses) < STEPS
    for report, whole in zip(reports["again"], reports["whole"], strict=True):
        assert report.losses == whole.losses[-len(report.losses) :]
        for name, (piece, _) in report.pieces.items():
            assert torch.equal(piece, whole.pieces[name][0]), name


def test_last_is_the_checkpoint_that_was_saved_last(monkeypatch, tmp_path: Path):
    job = Job(
        GPT2, {}, trainer={"enable_checkpointing": True}, callbacks=partial(every_step, tmp_path)
    )
    monkeypatch.setattr(writer, "time", SimpleNamespace(time=lambda: 2.0e9))
    run_job(job)
    # A clock that goes back is not asked, either.
    monkeypatch.setattr(writer, "time", SimpleNamespace(time=lambda: 1.0e9))
    # This fit continues from the first step, so that step 2 is saved after step 3.
    run_job(replace(job, steps=2, resume=str(tmp_path / "step=1.ckpt")))
    continued = run_job(replace(job, resume="last"))
    assert len(continued.losses) == 1


def every_step(folder: Path) -> Sequence[pl.Callback]:
    return [ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)]


def test_damage_to_any_file_is_found_and_named(reports, folder, tmp_path: Path):
    names = [path.name for path in (folder / "tp4").iterdir()]
    assert len(names) > 6
    for name in names:
        copy = shutil.copytree(folder / "tp4", tmp_path / name)
        verify_checkpoint(copy)
        content = bytearray((copy / name).read_bytes())
        content[len(content) // 2] ^= 1
        (copy / name).write_bytes(content)
        with pytest.raises(CorruptDataError, match=re.escape(name)):
            verify_checkpoint(copy)


def test_a_disk_that_keeps_other_bytes_fails_the_save(monkeypatch, tmp_path: Path):
    create = LocalFolder.create

    @contextmanager
    def create_and_damage(self: LocalFolder, name: str) -> Iterator[IO[bytes]]:
        with create(self, name) as file:
            yield file
        if name.endswith(".distcp"):
            with open(self.path / name, "r+b") as file:
                file.seek(700)
                file.write(b"x")

    monkeypatch.setattr(LocalFolder, "create", create_and_damage)
    with pytest.raises(CheckpointSaveError, match=r"\.distcp has \d+ bytes with checksum"):
        run_job(Job(GPT2, {}, steps=1, save=str(tmp_path / "saved")))
    assert list(tmp_path.iterdir()) == []
