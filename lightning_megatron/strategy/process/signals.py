"""Coordinated checkpoint and exit of all ranks after SIGTERM or a SLURM signal."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_megatron.groups.collectives import all_reduce_, barrier
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.strategy.private.loops import callbacks_of
from lightning_megatron.strategy.private.processes import (
    SIGTERMException,
    announce_sigterm,
    replace_signal_check,
    requeues_itself,
    slurm_save_path,
)

log = logging.getLogger(__name__)

#: Exit code that a shell reports for a process ended by SIGTERM. Because it is not 0, torchrun does
#: not consider the job finished. Because it is not that of an error, a batch script knows when to
#: submit the job again.
EXIT_CODE = 128 + signal.SIGTERM
#: Name of the checkpoint after a termination signal; a later one replaces it. ``ckpt_path="last"``
#: finds it, because its name starts like those of Lightning's last checkpoints.
CHECKPOINT_NAME = "last-preempted.ckpt"


class TerminationRequested(SIGTERMException):
    """Exit of the process after a termination signal and the checkpoint that follows."""

    def __init__(self) -> None:
        super().__init__(EXIT_CODE)


@dataclass
class SignalAgreement:
    """Handling of SIGTERM and of SLURM's time-limit signal, agreed on by all ranks.

    Lightning exchanges signals on the device before every batch, for which the host waits. It also
    saves inside the signal handler, where ranks may be at different steps. Here, a handler only
    records the signal. Every ``interval`` batches all ranks exchange their records on the CPU. If
    any rank has received a signal, all ranks save a checkpoint of the same step and leave the fit.
    Later signals have no effect.

    Args:
        interval: Number of training batches between two exchanges (batches).
        finish_saves: Function that waits for the save in progress.
    """

    trainer: Trainer
    mesh: ParallelMesh
    interval: int
    finish_saves: Callable[[], None]
    end_requested: bool = False
    requeue_requested: bool = False
    num_batches: int = 0

    def install(self, undo: ExitStack) -> None:
        """Install these handlers in place of Lightning's."""
        replace_signal_check(self.trainer, self.check, self.notify, self.notify_requeue, undo)

    def notify(self, signum: Any, *_: Any) -> None:
        """Handle SIGTERM: record it, and forward it to the launched processes."""
        if not self.end_requested:
            self.end_requested = True
            kill = getattr(self.trainer.strategy.launcher, "kill", None)
            if kill is not None:
                kill(signum)

    def notify_requeue(self, signum: Any, *_: Any) -> None:
        """Handle SLURM's time-limit signal: record it."""
        self.requeue_requested = True

    def check(self) -> None:
        """Ask all ranks at an interval of batches for received signals; after one, save and exit.

        Communication: one all-reduce of two integers over the world on the CPU, at every
        ``interval``-th call.
        """
        self.num_batches += 1
        if self.num_batches % self.interval:
            return
        received = torch.tensor([int(self.end_requested), int(self.requeue_requested)])
        end_requested, requeue_requested = all_reduce_(
            received, self.mesh.world_cpu, "max"
        ).tolist()
        if end_requested or requeue_requested:
            self.end_requested = True
            announce_sigterm(self.trainer)
            # This is the call before the first batch: there is nothing new to save.
            if self.num_batches > 1:
                self._save()
            barrier(self.mesh.world_cpu)
            if requeue_requested:
                self._requeue()
            raise TerminationRequested

    def _save(self) -> None:
        path = os.path.join(preemption_folder(self.trainer), CHECKPOINT_NAME)
        rank_zero_info(
            f"The job received a signal to end: saving step {self.trainer.global_step} to {path}."
        )
        # Without the argument, Lightning writes a message about its default.
        self.trainer.save_checkpoint(path, weights_only=False)
        self.finish_saves()
        if self.mesh.rank == 0 and requeues_itself(self.trainer):
            link_for_slurm(path, slurm_save_path(self.trainer))

    def _requeue(self) -> None:
        """Requeue the SLURM job, from one rank."""
        for logger in self.trainer.loggers:
            logger.finalize("finished")
        if self.mesh.rank != 0:
            return
        job = os.environ.get("SLURM_JOB_ID", "")
        if "SLURM_ARRAY_JOB_ID" in os.environ:
            job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
        try:
            subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            reason = getattr(error, "stderr", "").strip() or error
            rank_zero_warn(
                f"SLURM job {job!r} could not be submitted again: {reason}. Its checkpoint is "
                "saved."
            )
        else:
            rank_zero_info(f"Submitted SLURM job {job} again.")


def preemption_folder(trainer: Trainer) -> str:
    """Return the folder for checkpoints after a signal: that of the ModelCheckpoint."""
    for callback in callbacks_of(trainer, ModelCheckpoint):
        if callback.dirpath:
            return os.fspath(callback.dirpath)
    return os.fspath(trainer.default_root_dir)


def link_for_slurm(path: str, slurm_path: str) -> None:
    """Link a checkpoint to the path from which Lightning resumes a requeued SLURM job.

    Links instead of copies keep jobs that are often interrupted from filling the disk. Previous
    links in the folder are removed.

    Args:
        path: Path of the checkpoint.
        slurm_path: Path at which Lightning looks for the checkpoint.
    """
    if "://" in path or "://" in slurm_path:
        rank_zero_warn(
            f"{slurm_path} cannot point to {path}: pass ckpt_path='last' to fit, which finds "
            f"{path}."
        )
        return
    link = Path(slurm_path)
    for old in link.parent.glob("hpc_ckpt_*.ckpt"):
        if old.is_symlink() and re.fullmatch(r"hpc_ckpt_\d+\.ckpt", old.name):
            with suppress(OSError):
                old.unlink()
    link.symlink_to(os.path.relpath(os.path.abspath(path), os.path.abspath(link.parent)))
