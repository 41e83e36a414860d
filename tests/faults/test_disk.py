"""A disk that cannot be written ends a training with an error that names the disk, and costs only
the steps since the last complete checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_megatron import MegatronStrategy
from lightning_megatron.checkpoint import list_checkpoints, verify_checkpoint
from lightning_megatron.checkpoint.directory import LocalCheckpointPath
from tests.checkpoint.pieces import names_in
from tests.faults.agent import (
    assert_same_end,
    attempts,
    finish,
    newest_step,
    outputs,
    repeated_in,
    started,
    wait_until,
)
from tests.faults.disk import Disk, small_disk
from tests.faults.train import Job, write_corpus
from tests.strategy.tiny import TinyLM, loader
from tests.sweeps import chosen

SAVE_EVERY = 4
MODES = [False, True]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Job:
    folder = tmp_path_factory.mktemp("undisturbed")
    write_corpus(folder)
    job = Job(folder=str(folder), steps=16, save_every=SAVE_EVERY)
    with started(job) as process:
        assert finish(process) == 0, outputs(job)
    return job


@pytest.fixture
def disk(undisturbed: Job, tmp_path: Path) -> Iterator[Disk]:
    """Mount a disk with room for one and a half checkpoints."""
    (checkpoint,) = list_checkpoints(undisturbed.checkpoints)
    page = 4096
    size = sum(
        -(-file.stat().st_size // page) * page
        for file in Path(checkpoint).rglob("*")
        if file.is_file()
    )
    with small_disk(tmp_path / "checkpoints", size * 3 // 2) as mounted:
        yield mounted


def failed_step(job: Job, disk: Disk, reason: str) -> int:
    """Return the step whose save ended the training. Check that all ranks report it and that the
    checkpoint before it is complete.

    Args:
        job: The training.
        disk: Disk of the training.
        reason: Error message of the system.
    """
    begun = attempts(job)[0].begun
    steps = set()
    for rank in range(job.devices):
        (attempt,) = attempts(job, rank)
        assert attempt.error.startswith("CheckpointSaveError: "), outputs(job)
        path = re.search(
            r"saving (\S+-step=(\d+)\.ckpt) failed on \d of \d rank\(s\): rank \d: OSError",
            attempt.error,
        )
        assert path is not None, attempt.error
        place = f"{job.checkpoints}/.{Path(path[1]).name}.unfinished"
        assert f"{reason}: '{place}" in attempt.error
        steps.add(int(path[2]))
    (step,) = steps
    assert step in begun
    assert newest_step(disk.view(job)) == step - SAVE_EVERY
    for checkpoint in list_checkpoints(disk.view(job).checkpoints):
        verify_checkpoint(checkpoint)
    return step


def train_to_end(job: Job, disk: Disk, step: int) -> None:
    """Train from a step to the end on a repaired disk, and check the files in the folder."""
    with started(job, before=disk.command) as process:
        assert finish(process) == 0, outputs(job)
    assert attempts(job)[-1].resumed == step
    # The checkpoint from which the run resumed counts among those that are kept, one here.
    names = names_in(disk.view(job).checkpoints)
    assert f"epoch=0-step={job.steps}.ckpt" in names
    assert f"epoch=0-step={step}.ckpt" not in names
    assert not any(name.startswith(".") for name in names)


@pytest.mark.slow
@pytest.mark.parametrize("async_save", chosen(MODES, True))
def test_a_full_disk_ends_the_training_and_a_larger_one_lets_it_continue(
    async_save: bool, undisturbed: Job, disk: Disk, tmp_path: Path
) -> None:
    job = repeated_in(undisturbed, tmp_path, async_save=async_save)
    with started(job, before=disk.command) as process:
        assert finish(process) != 0
    assert failed_step(job, disk, "[Errno 28] No space left on device") == 2 * SAVE_EVERY
    disk.remount("size=64m")
    train_to_end(job, disk, SAVE_EVERY)
    assert_same_end(job, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("async_save", chosen(MODES, False))
def test_a_read_only_disk_ends_the_training_and_a_writable_one_lets_it_continue(
    async_save: bool, undisturbed: Job, disk: Disk, tmp_path: Path
) -> None:
    job = repeated_in(
        undisturbed, tmp_path, async_save=async_save, devices=1, steps=1000, seconds=0.2
    )
    disk.remount("size=64m")
    with started(job, before=disk.command) as process:
        wait_until(lambda: newest_step(disk.view(job)) > 0, "the first checkpoint", process)
        disk.remount("ro")
        assert finish(process) != 0
    step = failed_step(job, disk, "[Errno 30] Read-only file system") - SAVE_EVERY
    disk.remount("rw")
    train_to_end(replace(job, steps=step + 2 * SAVE_EVERY, seconds=0.0), disk, step)


@pytest.mark.parametrize("async_save", MODES)
def test_the_older_checkpoint_is_removed_when_the_newer_one_is_complete(
    async_save: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[tuple[str, str, list[str]]] = []

    def record_calls_of(name: str) -> None:
        method = getattr(LocalCheckpointPath, name)

        def record_call(self: LocalCheckpointPath, *arguments: Any) -> None:
            complete = list_checkpoints(tmp_path)
            for path in complete:
                verify_checkpoint(path)
            events.append((name, self.path.name, [Path(path).name for path in complete]))
            method(self, *arguments)

        monkeypatch.setattr(LocalCheckpointPath, name, record_call)

    record_calls_of("publish")
    record_calls_of("remove")
    quiet: dict[str, Any] = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        strategy=MegatronStrategy(microbatch_size=2, async_save=async_save),
        max_epochs=1,
        callbacks=[
            ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=2, save_top_k=1)
        ],
        **quiet,
    )
    trainer.fit(TinyLM(), loader(32, 4))
    names = [f"step={step}.ckpt" for step in (2, 4, 6, 8)]
    expected: list[tuple[str, str, list[str]]] = [("publish", names[0], [])]
    for older, newer in zip(names, names[1:], strict=False):
        expected += [("publish", newer, [older]), ("remove", older, [older, newer])]
    assert events == expected
    assert names_in(tmp_path) == [names[-1]]
