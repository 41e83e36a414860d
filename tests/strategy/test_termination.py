"""A process that gets a termination signal saves its current step, and exits with the code that
schedulers expect.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, Dataset, get_worker_info

from lightning_megatron.checkpoint import load_metadata
from lightning_megatron.strategy.process.dataloaders import ignore_first_sigterm
from lightning_megatron.strategy.process.signals import CHECKPOINT_NAME, EXIT_CODE, SignalAgreement
from tests.fits import Job, Language, Tokens, trainer_of
from tests.optimizer.fused_fits import SMALL


class CallAt(Callback):
    """Call a function at the end of a training batch, or at the start of the training with -1."""

    def __init__(self, batch: int, action: Callable[[], Any]) -> None:
        self.batch, self.action = batch, action

    def on_train_start(self, *_: Any) -> None:
        if self.batch == -1:
            self.action()

    def on_train_batch_end(self, *args: Any) -> None:
        if args[-1] == self.batch:
            self.action()


class Signal(CallAt):
    """Send a signal to this process."""

    def __init__(self, batch: int, number: int = signal.SIGTERM) -> None:
        super().__init__(batch, lambda: os.kill(os.getpid(), number))


def make_trainer(folder: Path, *callbacks: Callback, saves: bool = True, **layout: Any) -> Trainer:
    """Return a trainer of two epochs of eight batches that agrees on signals after each batch."""
    options = {"max_epochs": 2, "default_root_dir": folder, "enable_checkpointing": saves}
    layout = {"job.signal_check_interval": 1, **layout}
    return trainer_of(
        Job(strategy=layout, precision="32-true", steps=-1, trainer=options), 1, *callbacks
    )


def fit(trainer: Trainer, data: Dataset | None = None, workers: int = 0, **options: Any) -> None:
    loader = DataLoader(data or Tokens(32, 32), batch_size=4, num_workers=workers)
    trainer.fit(Language(SMALL), loader, **options)


def fit_until_signal(trainer: Trainer, folder: Path, step: int | None, **options: Any) -> None:
    """Check that a signal ends the fit, and that the step is saved in the folder."""
    with pytest.raises(SystemExit) as exited:
        fit(trainer, **options)
    assert exited.value.code == EXIT_CODE == 143
    path = folder / CHECKPOINT_NAME
    assert path.exists() == (step is not None)
    assert step is None or load_metadata(path)["global_step"] == step


@pytest.mark.parametrize("async_save", [False, True])
def test_the_step_is_saved_next_to_other_checkpoints_and_found_as_last(tmp_path, async_save):
    folder, steps = tmp_path / "checkpoints", list[int]()
    saves = ModelCheckpoint(folder, every_n_train_steps=3)
    trainer = make_trainer(tmp_path, Signal(3), saves, async_save=async_save)
    fit_until_signal(trainer, folder, 4)
    assert trainer.received_sigterm
    note = CallAt(4, lambda: steps.append(resumed.global_step))
    resumed = make_trainer(tmp_path, ModelCheckpoint(folder, every_n_train_steps=3), note)
    fit(resumed, ckpt_path="last")
    # The run continues with batch 4 of the first epoch.
    assert (steps[0], resumed.global_step) == (5, 16)


def test_without_a_checkpoint_callback_the_step_is_saved_in_the_root_folder(tmp_path):
    fit_until_signal(make_trainer(tmp_path, Signal(1), saves=False), tmp_path, 2)
    steps: list[int] = []
    note = CallAt(2, lambda: steps.append(resumed.global_step))
    resumed = make_trainer(tmp_path, note, saves=False)
    fit(resumed, ckpt_path="last")
    assert steps[0] == 3


def test_ranks_agree_on_signals_at_intervals_of_batches(tmp_path):
    runner = make_trainer(
        tmp_path, Signal(2), ModelCheckpoint(tmp_path), **{"job.signal_check_interval": 6}
    )
    fit_until_signal(runner, tmp_path, 5)


def test_a_second_signal_changes_nothing_and_handlers_are_restored(tmp_path, monkeypatch):
    before = signal.getsignal(signal.SIGTERM)
    trainer = make_trainer(tmp_path, Signal(1), ModelCheckpoint(tmp_path))
    save, again = trainer.strategy.save_checkpoint, Signal(0).action

    def save_with_signals(*args, **kwargs):
        again()
        save(*args, **kwargs)
        again()

    monkeypatch.setattr(trainer.strategy, "save_checkpoint", save_with_signals)
    fit_until_signal(trainer, tmp_path, 2)
    assert signal.getsignal(signal.SIGTERM) == before
    assert "advance" not in vars(trainer.fit_loop.epoch_loop)
    passed_on: list[int] = []
    trainer.strategy.launcher.kill = passed_on.append  # type: ignore[union-attr,method-assign]
    agreement = SignalAgreement(trainer, None, 1, lambda: None)  # type: ignore[arg-type]
    for _ in range(2):
        agreement.notify(signal.SIGTERM)
    assert passed_on == [signal.SIGTERM]


def test_a_job_without_a_finished_step_saves_no_checkpoint(tmp_path):
    trainer = make_trainer(tmp_path, ModelCheckpoint(tmp_path), Signal(-1))
    fit_until_signal(trainer, tmp_path, None)


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Set up a SLURM job of one task, and return the file that gets the arguments of scontrol."""
    command, calls = tmp_path / "bin" / "scontrol", tmp_path / "calls"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\necho "$@" >> {calls}\n')
    command.chmod(0o755)
    numbers = {"NTASKS": 1, "JOB_ID": 4321, "PROCID": 0, "LOCALID": 0, "NODEID": 0, "NNODES": 1}
    for name, value in {**numbers, "JOB_NAME": "train"}.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    monkeypatch.setenv("PATH", f"{command.parent}:{os.environ['PATH']}")
    return calls


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_slurm_job_is_requeued_and_continues(tmp_path, slurm, number):
    folder = tmp_path / "checkpoints"
    for steps in (2, 4):
        trainer = make_trainer(tmp_path, Signal(steps - 1, number), ModelCheckpoint(folder))
        # There is no ckpt_path, because Lightning finds the checkpoint under its own name.
        fit_until_signal(trainer, folder, steps)
        (link,) = tmp_path.glob("hpc_ckpt_*.ckpt")
        assert link.resolve() == (folder / CHECKPOINT_NAME).resolve()
        requeued = slurm.read_text().split("\n")[:-1] if slurm.exists() else []
        # After SIGTERM, the scheduler decides whether the job runs again.
        assert requeued == (["requeue 4321"] * (steps // 2) if number == signal.SIGUSR1 else [])


def test_a_job_that_cannot_be_submitted_again_keeps_its_checkpoint(tmp_path, slurm, monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    trainer = make_trainer(tmp_path, Signal(1, signal.SIGUSR1), ModelCheckpoint(tmp_path))
    with pytest.warns(UserWarning, match="'4321' could not be submitted again"):
        fit_until_signal(trainer, tmp_path, 2)


class KillingTokens(Tokens):
    """Send SIGTERM to the worker that reads sample 8, as a scheduler does."""

    def __getitem__(self, index: int) -> Any:
        if index == 8 and get_worker_info() is not None:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().__getitem__(index)


def test_data_workers_survive_the_signal_until_the_step_is_saved(tmp_path):
    trainer = make_trainer(tmp_path, Signal(5), ModelCheckpoint(tmp_path))
    fit_until_signal(trainer, tmp_path, 6, data=KillingTokens(32, 32), workers=1)
    before = signal.getsignal(signal.SIGTERM)
    try:
        ignore_first_sigterm()
        Signal(0).action()
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, "the second signal ends a worker"
    finally:
        signal.signal(signal.SIGTERM, before)
