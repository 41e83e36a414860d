"""Hang detection that names the missing rank before collectives time out."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from lightning.pytorch import LightningModule

from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.mesh_groups import DEFAULT_TIMEOUTS
from lightning_megatron.groups.notices import Notices
from lightning_megatron.strategy.private.loops import attached_trainer
from lightning_megatron.strategy.process.failure import FailureWatch
from lightning_megatron.strategy.process.rank_status import (
    RankStatus,
    hang_report,
    is_ahead,
    missing_ranks,
)

#: Fractions of the timeout after which a waiting rank reads the statuses of the others, and after
#: which it reports a hang. Both precede torch's own timeout error, which names no rank.
_READ_STATUS_AT = 0.8
_REPORT_AT = 0.9
#: Number of times a rank publishes its status within the timeout, and the longest period between
#: two publications (seconds).
_PERIODS_PER_TIMEOUT = 40
_MAX_PERIOD_SECONDS = 30.0
#: Number of periods, and minimum time (seconds), without a publication after which a rank counts as
#: silent.
_SILENT_PERIODS = 4.0
_SILENT_SECONDS = 1.0
_CLAIM_NAME = "hang"


class HangWatch:
    """Watcher of one rank's main thread, which reports its status to the other ranks.

    Every rank writes its status to a folder of its machine and, with several machines, to the
    job's store. A rank that has waited in one collective for most of the timeout reads the
    statuses of all ranks and reports those that have not arrived. The host does not wait in
    collectives on a GPU. A rank then counts as waiting if it makes no progress and has started a
    collective that other ranks have not started.

    Args:
        timeout: Timeout of collectives; None means torch's default.
        folder: Folder that the ranks of this machine share.
        notices: Messages in the job's store; None if all ranks are on this machine.
        watch: Failure watch of this rank, which ends the job.
        module: Module whose Trainer's stage and step are reported; None without one.
    """

    def __init__(
        self,
        mesh: ParallelMesh,
        timeout: timedelta | None,
        folder: Path,
        notices: Notices | None,
        watch: FailureWatch,
        module: LightningModule | None,
    ) -> None:
        self._rank = mesh.rank
        self._num_ranks = mesh.world.size
        self._journal = mesh.journal
        self._folder = folder
        self._notices = notices
        self._watch = watch
        self._module = module
        self._timeout, device_timeout = (
            (timeout or DEFAULT_TIMEOUTS[kind]).total_seconds()
            for kind in ("cpu", mesh.device.type)
        )
        #: Timeout of collectives on a GPU; None without one (seconds).
        self._device_timeout = None if mesh.device.type == "cpu" else device_timeout
        self._period = min(
            self._timeout / _PERIODS_PER_TIMEOUT,
            device_timeout / _PERIODS_PER_TIMEOUT,
            _MAX_PERIOD_SECONDS,
        )
        self._stop = threading.Event()
        self._number = 0

    def start(self) -> None:
        """Start watching, in threads of this process."""
        # A rank that stops before its first period can be named and killed only if its status,
        # which contains its process id, is known.
        self._publish()
        threading.Thread(target=self._check_progress, daemon=True, name="hang-watch").start()

    def stop(self) -> None:
        """Stop watching."""
        self._stop.set()

    def _check_progress(self) -> None:
        since = time.monotonic()
        before = None
        # Ranks often start to wait at the same time. The delay grows with the rank, so that the
        # lowest waiting rank usually reports.
        check_at = (
            _READ_STATUS_AT + (_REPORT_AT - _READ_STATUS_AT) / 2 * self._rank / self._num_ranks
        )
        while not self._stop.wait(self._period):
            status = self._publish()
            # The host waits for the results of a GPU's collectives at any line, not inside them, so
            # that ``waits`` is set only for collectives on the CPU.
            timeout = self._timeout if status.waits else self._device_timeout
            if status.progress != before:
                before = status.progress
                since = time.monotonic()
            elif timeout is not None and time.monotonic() - since >= check_at * timeout:
                self._check_for_hang(status, since, timeout)

    def _publish(self) -> RankStatus:
        self._number += 1
        status = RankStatus.observe(
            self._rank, self._number, _activity_of(self._module), self._journal
        )
        text = status.to_text()
        with suppress(OSError):  # a full or vanished temporary folder must not stop the training
            written = self._path(self._rank).with_suffix(".new")
            written.write_text(text, encoding="utf-8")
            os.replace(written, self._path(self._rank))
        if self._notices is not None:
            self._notices.post(str(self._rank), text)
        return status

    def _path(self, rank: int) -> Path:
        return self._folder / f"status_{rank}.json"

    def _check_for_hang(self, own_status: RankStatus, since: float, timeout: float) -> None:
        """Read all statuses twice, and report a hang if this rank made no progress in between.

        A rank whose status has the same number in both readings is silent: its process has
        probably stopped.

        Args:
            since: Time at which this rank last made progress, on the monotonic clock (seconds).
            timeout: Timeout of the collective for which this rank waits (seconds).
        """
        if not self._claim():
            return
        first = self._read()
        first_at = time.monotonic()
        silence = max(_SILENT_PERIODS * self._period, _SILENT_SECONDS)
        while time.monotonic() < max(since + timeout * _REPORT_AT, first_at + silence):
            if self._stop.wait(self._period):
                return
            now = self._publish()
            if now.progress != own_status.progress:
                self._release()
                return
        statuses = {**self._read(), self._rank: now}
        if not now.waits:
            if not is_ahead(now, statuses):
                self._release()
                return
            statuses = _device_waits(statuses)
        ages = {
            rank: max(time.monotonic() - first_at, now.time - status.time)
            for rank, status in statuses.items()
            if rank in first and status.number == first[rank].number
        }
        missing = missing_ranks(statuses, ages, self._num_ranks)
        self._watch.report_hang(
            f"has waited for {time.monotonic() - since:.0f} s of a timeout of {timeout:.0f} s; "
            "the job is stopped.\n"
            f"{hang_report(statuses, missing, ages)}\n",
            [statuses[rank] for rank in ages],
        )
        self._stop.set()

    def _claim(self) -> bool:
        """Return whether this rank is the only one of the job that reads all statuses."""
        try:
            (self._folder / _CLAIM_NAME).open("x").close()
        except OSError:
            return False
        return self._notices is None or self._notices.claim(_CLAIM_NAME)

    def _release(self) -> None:
        (self._folder / _CLAIM_NAME).unlink(missing_ok=True)
        if self._notices is not None:
            self._notices.give_up(_CLAIM_NAME)

    def _read(self) -> dict[int, RankStatus]:
        """Read the statuses of all ranks; those of this machine come from its folder."""
        texts: dict[int, str] = {}
        for rank in range(self._num_ranks):
            with suppress(OSError):
                texts[rank] = self._path(rank).read_text(encoding="utf-8")
        remote_ranks = [str(rank) for rank in range(self._num_ranks) if rank not in texts]
        if self._notices is not None and remote_ranks:
            texts |= {int(name): text for name, text in self._notices.read(remote_ranks).items()}
        return {rank: RankStatus.from_text(text) for rank, text in texts.items()}


def _device_waits(statuses: Mapping[int, RankStatus]) -> dict[int, RankStatus]:
    """Count ranks that are ahead of others as waiting, since hosts run ahead of their devices."""
    return {
        rank: replace(status, waits=status.waits or is_ahead(status, statuses))
        for rank, status in statuses.items()
    }


def _activity_of(module: LightningModule | None) -> str:
    """Return the Trainer's current stage and step as text; safe to call in another thread."""
    trainer = None if module is None else attached_trainer(module)
    if trainer is None:
        return "no run"
    stage = trainer.state.stage or trainer.state.fn
    return f"{stage.value if stage else 'setup'}, global_step {trainer.global_step}"
