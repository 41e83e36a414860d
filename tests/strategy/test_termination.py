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
from torch.utils.data import DataLoader, get_worker_info

from lightning_megatron import MegatronStrategy
from lightning_megatron.checkpoint import load_metadata
from lightning_megatron.strategy.process.dataloaders import ignore_first_sigterm
from lightning_megatron.strategy.process.signals import CHECKPOINT_NAME, EXIT_CODE, SignalAgreement
from tests.strategy.tiny import TinyLM, Words, loader


class CallAtBatch(Callback):
    """Call a function at the end of a training batch."""

    def __init__(self, batch: int, action: Callable[[], None]) -> None:
        self.batch, self.action = batch, action

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == self.batch:
            self.action()


def trainer_of(
    folder: Path,
    *callbacks: Callback,
    interval: int = 1,
    enable_checkpointing: bool = True,
    **options: Any,
) -> Trainer:
    quiet: dict[str, Any] = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return Trainer(
        accelerator="cpu",
        devices=1,
        strategy=MegatronStrategy(microbatch_size=2, signal_check_interval=interval, **options),
        max_epochs=2,
        default_root_dir=folder,
        callbacks=list(callbacks),
        enable_checkpointing=enable_checkpointing,
        **quiet,
    )


def signal_sender(number: int = signal.SIGTERM) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def fit_until_signal(trainer: Trainer, data: DataLoader | None = None) -> None:
    with pytest.raises(SystemExit) as exited:
        trainer.fit(TinyLM(), data or loader())
    assert exited.value.code == EXIT_CODE == 143


@pytest.mark.parametrize("async_save", [False, True])
def test_the_step_is_saved_next_to_other_checkpoints_and_found_as_last(
    tmp_path: Path, async_save: bool
) -> None:
    folder = tmp_path / "checkpoints"
    trainer = trainer_of(
        tmp_path,
        CallAtBatch(3, signal_sender()),
        ModelCheckpoint(folder, every_n_train_steps=3),
        async_save=async_save,
    )
    fit_until_signal(trainer)
    assert trainer.received_sigterm
    assert load_metadata(folder / CHECKPOINT_NAME)["global_step"] == 4
    resumed = trainer_of(tmp_path, ModelCheckpoint(folder, every_n_train_steps=3))
    steps: list[int] = []
    resumed.callbacks.append(CallAtBatch(4, lambda: steps.append(resumed.global_step)))
    resumed.fit(TinyLM(), loader(), ckpt_path="last")
    # The run continues with batch 4 of the first epoch.
    assert steps[0] == 5
    assert resumed.global_step == 16


def test_without_a_checkpoint_callback_the_step_is_saved_in_the_root_folder(
    tmp_path: Path,
) -> None:
    fit_until_signal(
        trainer_of(tmp_path, CallAtBatch(1, signal_sender()), enable_checkpointing=False)
    )
    assert load_metadata(tmp_path / CHECKPOINT_NAME)["global_step"] == 2
    resumed = trainer_of(tmp_path, enable_checkpointing=False)
    steps: list[int] = []
    resumed.callbacks.append(CallAtBatch(2, lambda: steps.append(resumed.global_step)))
    resumed.fit(TinyLM(), loader(), ckpt_path="last")
    assert steps[0] == 3


def test_ranks_agree_on_signals_at_intervals_of_batches(tmp_path: Path) -> None:
    trainer = trainer_of(
        tmp_path, CallAtBatch(2, signal_sender()), ModelCheckpoint(tmp_path), interval=6
    )
    fit_until_signal(trainer)
    assert load_metadata(tmp_path / CHECKPOINT_NAME)["global_step"] == 5


def test_a_second_signal_during_the_save_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_of(tmp_path, CallAtBatch(1, signal_sender()), ModelCheckpoint(tmp_path))
    save = trainer.strategy.save_checkpoint

    def save_with_signals(*args: Any, **kwargs: Any) -> None:
        signal_sender()()
        save(*args, **kwargs)
        signal_sender()()

    monkeypatch.setattr(trainer.strategy, "save_checkpoint", save_with_signals)
    fit_until_signal(trainer)
    assert load_metadata(tmp_path / CHECKPOINT_NAME)["global_step"] == 2


def test_a_job_without_a_finished_step_saves_no_checkpoint(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, ModelCheckpoint(tmp_path))
    trainer.callbacks.append(CallAtStart(signal_sender()))
    fit_until_signal(trainer)
    assert not (tmp_path / CHECKPOINT_NAME).exists()


class CallAtStart(Callback):
    def __init__(self, action: Callable[[], None]) -> None:
        self.action = action

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.action()


def test_the_signal_handlers_of_lightning_are_restored_after_the_run(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, CallAtBatch(1, signal_sender()), ModelCheckpoint(tmp_path))
    before = signal.getsignal(signal.SIGTERM)
    fit_until_signal(trainer)
    assert signal.getsignal(signal.SIGTERM) == before
    assert "advance" not in vars(trainer.fit_loop.epoch_loop)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set up a SLURM job of one task, and return the file that gets the arguments of scontrol."""
    command, calls = tmp_path / "bin" / "scontrol", tmp_path / "calls"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\necho "$@" >> {calls}\n')
    command.chmod(0o755)
    variables = {
        "NTASKS": 1,
        "JOB_ID": 4321,
        "JOB_NAME": "train",
        "PROCID": 0,
        "LOCALID": 0,
        "NODEID": 0,
        "NNODES": 1,
    }
    for name, value in variables.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    monkeypatch.setenv("PATH", f"{command.parent}:{os.environ['PATH']}")
    return calls


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_slurm_job_is_requeued_and_continues(tmp_path: Path, slurm: Path, number: int) -> None:
    folder = tmp_path / "checkpoints"
    for steps in (2, 4):
        trainer = trainer_of(
            tmp_path, CallAtBatch(steps - 1, signal_sender(number)), ModelCheckpoint(folder)
        )
        # There is no ckpt_path, because Lightning finds the checkpoint under its own name.
        fit_until_signal(trainer)
        assert load_metadata(folder / CHECKPOINT_NAME)["global_step"] == steps
        (link,) = tmp_path.glob("hpc_ckpt_*.ckpt")
        assert link.resolve() == (folder / CHECKPOINT_NAME).resolve()
        requeued = slurm.read_text().split("\n")[:-1] if slurm.exists() else []
        # After SIGTERM, the scheduler decides whether the job runs again.
        assert requeued == (["requeue 4321"] * (steps // 2) if number == signal.SIGUSR1 else [])


def test_a_job_that_cannot_be_submitted_again_keeps_its_checkpoint(
    tmp_path: Path, slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    trainer = trainer_of(
        tmp_path, CallAtBatch(1, signal_sender(signal.SIGUSR1)), ModelCheckpoint(tmp_path)
    )
    with pytest.warns(UserWarning, match="'4321' could not be submitted again"):
        fit_until_signal(trainer)
    assert load_metadata(tmp_path / CHECKPOINT_NAME)["global_step"] == 2


class KillingWords(Words):
    """Send SIGTERM to the worker that reads sample 8, as a scheduler does."""

    def __getitem__(self, index: int) -> Any:
        if index == 8 and get_worker_info() is not None:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().__getitem__(index)


def test_data_workers_survive_the_signal_until_the_step_is_saved(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, CallAtBatch(5, signal_sender()), ModelCheckpoint(tmp_path))
    fit_until_signal(trainer, DataLoader(KillingWords(), batch_size=4, num_workers=1))
    assert load_metadata(tmp_path / CHECKPOINT_NAME)["global_step"] == 6


def test_a_data_worker_ends_at_the_second_signal() -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        ignore_first_sigterm()
        signal_sender()()
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_repeated_signal_is_passed_on_once(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    passed_on: list[int] = []
    trainer.strategy.launcher.kill = passed_on.append  # type: ignore[union-attr,method-assign]
    agreement = SignalAgreement(trainer, None, interval=1)  # type: ignore[arg-type]
    agreement.notify(signal.SIGTERM)
    agreement.notify(signal.SIGTERM)
    assert passed_on == [signal.SIGTERM]
