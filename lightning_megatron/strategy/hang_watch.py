"""Hang detection that names the missing rank before collectives time out."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from lightning.pytorch import LightningModule

from lightning_megatron.groups.journal import Journal
from lightning_megatron.groups.notices import Notices
from lightning_megatron.strategy.positions import Position, hang_report, is_ahead, missing_ranks

#: When a waiting rank asks where the others are, and when it reports, as parts of the timeout: torch's own error, which
#: names nobody, comes at the whole of it.
_ASK_AT, _REPORT_AT = 0.8, 0.9
#: A rank says where it is so often within the timeout, but no less often than that (seconds).
_PARTS, _LONGEST = 40, 30.0
#: A rank that has been silent for so many of these periods, and at least so long (seconds), gives no sign of life.
_SILENT_PERIODS, _SILENT_SECONDS = 4.0, 1.0
_CLAIM = "hang"


class HangWatch:
    """Watcher of one rank's main thread, which reports its position to the other ranks.

    Every rank writes its position into a folder of its machine, and with several machines into the job's store as well.
    A rank that has waited in one collective for most of the timeout asks where the others are, and reports those that
    have not arrived. On a GPU the host does not wait in collectives: there a rank counts as waiting when it has started
    one that others have not, and has not got on.

    Args:
        rank: Global rank of this process.
        num_ranks: Ranks of the job.
        journal: What this rank has started.
        timeout: How long a collective may wait for a rank (seconds).
        device_timeout: The same where collectives run on a GPU; None if they do not (seconds).
        folder: A folder that the ranks of this machine share.
        notices: What all ranks can read; None if all are on this machine.
        place: Says what the Trainer does.
        fail: Ends the job, given the report and the positions of ranks that can no longer end themselves.
    """

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        journal: Journal,
        timeout: float,
        device_timeout: float | None,
        folder: Path,
        notices: Notices | None,
        place: Callable[[], str],
        fail: Callable[[str, Sequence[Position]], None],
    ) -> None:
        self._rank = rank
        self._num_ranks = num_ranks
        self._journal = journal
        self._timeout, self._device_timeout = timeout, device_timeout
        self._folder = folder
        self._notices = notices
        self._place = place
        self._fail = fail
        self._period = min(min(timeout, device_timeout or timeout) / _PARTS, _LONGEST)
        self._stop = threading.Event()
        self._number = 0

    def start(self) -> None:
        """Start watching, in threads of this process."""
        # At once: a rank that stops in its first moments can only be named, and killed, if its process is known.
        self._publish()
        threading.Thread(target=self._watch, daemon=True, name="hang-watch").start()

    def stop(self) -> None:
        """Stop watching."""
        self._stop.set()

    def _watch(self) -> None:
        since, before = time.monotonic(), None
        # Ranks begin to wait together: the lowest one is the first to ask.
        ask_at = _ASK_AT + (_REPORT_AT - _ASK_AT) / 2 * self._rank / self._num_ranks
        while not self._stop.wait(self._period):
            own = self._publish()
            # The host does not wait in a GPU's collectives, only somewhere for their results.
            timeout = self._timeout if own.waits else self._device_timeout
            if own.progress != before:
                before, since = own.progress, time.monotonic()
            elif timeout is not None and time.monotonic() - since >= ask_at * timeout:
                self._ask(own, since, timeout)

    def _publish(self) -> Position:
        self._number += 1
        own = Position.observe(self._rank, self._number, self._place(), self._journal)
        text = own.to_text()
        with suppress(OSError):  # a full or vanished temporary folder must not stop the training
            written = self._path(self._rank).with_suffix(".new")
            written.write_text(text, encoding="utf-8")
            os.replace(written, self._path(self._rank))
        if self._notices is not None:
            self._notices.post(str(self._rank), text)
        return own

    def _path(self, rank: int) -> Path:
        return self._folder / f"position_{rank}.json"

    def _ask(self, own: Position, since: float, timeout: float) -> None:
        """Read all positions twice, and report a hang if this rank made no progress in between."""
        if not self._claim():
            return
        first, first_at = self._read(), time.monotonic()
        silence = max(_SILENT_PERIODS * self._period, _SILENT_SECONDS)
        while time.monotonic() < max(since + timeout * _REPORT_AT, first_at + silence):
            if self._stop.wait(self._period):
                return
            now = self._publish()
            if now.progress != own.progress:
                self._release()
                return
        positions = {**self._read(), self._rank: now}
        if not now.waits:
            if not is_ahead(now, positions):
                self._release()
                return
            positions = _device_waits(positions)
        ages = {
            rank: max(time.monotonic() - first_at, now.time - position.time)
            for rank, position in positions.items()
            if rank in first and position.number == first[rank].number
        }
        missing = missing_ranks(positions, ages, self._num_ranks)
        self._fail(
            f"has waited for {time.monotonic() - since:.0f} s of a timeout of {timeout:.0f} s; the job is stopped.\n"
            f"{hang_report(positions, missing, ages)}\n",
            [positions[rank] for rank in ages],
        )
        self._stop.set()

    def _claim(self) -> bool:
        """Return whether this rank is the one that reads all positions."""
        try:
            (self._folder / _CLAIM).open("x").close()
        except OSError:
            return False
        return self._notices is None or self._notices.claim(_CLAIM)

    def _release(self) -> None:
        (self._folder / _CLAIM).unlink(missing_ok=True)
        if self._notices is not None:
            self._notices.give_up(_CLAIM)

    def _read(self) -> dict[int, Position]:
        """Read the positions of all ranks; those of this machine come from its folder."""
        texts: dict[int, str] = {}
        for rank in range(self._num_ranks):
            with suppress(OSError):
                texts[rank] = self._path(rank).read_text(encoding="utf-8")
        elsewhere = [str(rank) for rank in range(self._num_ranks) if rank not in texts]
        if self._notices is not None and elsewhere:
            texts |= {int(name): text for name, text in self._notices.read(elsewhere).items()}
        return {rank: Position.from_text(text) for rank, text in texts.items()}


def _device_waits(positions: Mapping[int, Position]) -> dict[int, Position]:
    """Count ranks that are ahead of others as waiting, since hosts run ahead of their devices."""
    return {
        rank: replace(position, waits=position.waits or is_ahead(position, positions))
        for rank, position in positions.items()
    }


def place_of(module: LightningModule | None) -> str:
    """Return a function that names the Trainer's current stage, for use in another thread."""
    trainer = None if module is None else module._trainer
    if trainer is None:
        return "no run"
    stage = trainer.state.stage or trainer.state.fn
    return f"{stage.value if stage else 'setup'}, global_step {trainer.global_step}"
