"""README: checkpoints load under another layout, and a training that was killed continues."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_megatron import FP8
from tests.fits import (
    GPT2,
    LLAMA,
    MIXTURE,
    STEPS,
    Job,
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
    "pp2 vpp2 dp2": {"pp": 2, "vpp": 2, "zero": 0},
    "cp2 dp2": {"cp": 2, "bucket_size": 500, "async_save": True},
}
MOVES = [(saver, reader) for saver in LAYOUTS for reader in LAYOUTS]
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
    if saver == reader:
        for continued, whole in zip(reports[saver, reader], reports[reader], strict=True):
            assert continued.losses == whole.losses[SAVED:]
            for name, (piece, _) in continued.pieces.items():
                assert torch.equal(piece, whole.pieces[name][0]), f"{name}: not bit for bit"


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
