"""Clock of a fit: how long each part of it takes, and what the devices do in some of its steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, NamedTuple, get_args

import torch
from lightning.pytorch import Trainer

from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.pipeline.action_times import ActionTimes, DeviceClock
from lightning_megatron.pipeline.executor import PipelineExecutor
from lightning_megatron.strategy.private.data_loading import observe_fetches

#: Parts of the time of a fit.
Part = Literal["training", "data", "validation", "saves"]
#: Parts of a step.
_OF_A_STEP: tuple[Part, ...] = ("training", "data")


class StepTimes(NamedTuple):
    """Times of this rank in a measured batch (seconds).

    Args:
        step: From the request for the batch to the end of its step.
        data: Part of ``step`` in which the rank loads the batch.
        waiting: Part of ``step`` in which it waits in collectives and transfers: on a GPU, that of
            the compute stream.
        schedule: From the beginning of the schedule of passes to the end of this stage's last one;
            0 if no executor is observed, or a graph ran all of them.
        passes: Part of ``schedule`` in which a pass runs on this stage.
        num_replayed: Collectives that graphs have run, whose waits are not in ``waiting``.
    """

    step: float = 0.0
    data: float = 0.0
    waiting: float = 0.0
    schedule: float = 0.0
    passes: float = 0.0
    num_replayed: int = 0

    @property
    def share_of_waits(self) -> float:
        """Return ``waiting`` over ``step``; 0 if nothing was measured."""
        return self.waiting / self.step if self.step else 0.0


@dataclass(frozen=True)
class _Measured:
    """Marks of the device in a batch: beginnings of parts, and beginning and end of each wait."""

    num_replayed: int
    actions: ActionTimes
    parts: list[tuple[Part, Any]] = field(default_factory=list)
    waits: list[tuple[Any, Any]] = field(default_factory=list)


class StepClock:
    """Stopwatch of a fit: every moment belongs to one part, at first to ``training``.

    Some steps are measured on the device, too, for which the host does not wait: marks on a GPU
    are events of the stream that is current now.

    Args:
        mesh: The groups of this rank, for measured steps; None without any.
        executor: Executor whose passes are timed in measured steps; None times none.
    """

    def __init__(
        self, mesh: ParallelMesh | None = None, executor: PipelineExecutor | None = None
    ) -> None:
        #: Time of each part since the start (seconds).
        self.totals: dict[Part, float] = dict.fromkeys(get_args(Part), 0.0)
        self._before = dict(self.totals)
        self._part: Part = "training"
        self._since = time.perf_counter()
        self._mesh = mesh
        self._executor = executor
        self._device = torch.device("cpu") if mesh is None else mesh.device
        self._clock = DeviceClock(self._device)
        is_gpu = self._device.type == "cuda"
        self._stream = torch.cuda.current_stream(self._device) if is_gpu else None
        self._open: _Measured | None = None
        self._measured: list[tuple[_Measured, int]] = []

    def enter(self, part: Part) -> Part:
        """Let the time from now on belong to a part, and return the part before it."""
        now = time.perf_counter()
        before = self._part
        self.totals[before] += now - self._since
        self._since = now
        self._part = part
        if self._open is not None:
            self._open.parts.append((part, self._clock.mark()))
        return before

    @contextmanager
    def during(self, part: Part) -> Iterator[None]:
        """Let the time inside the block belong to a part."""
        before = self.enter(part)
        try:
            yield
        finally:
            self.enter(before)

    def lap(self) -> dict[Part, float]:
        """Return the time of each part since the last lap (seconds)."""
        self.enter(self._part)
        lap = {part: total - self._before[part] for part, total in self.totals.items()}
        self._before = dict(self.totals)
        return lap

    # ---- measured steps

    def observe(self, trainer: Trainer, is_measured: Callable[[], bool], undo: ExitStack) -> None:
        """Let the Trainer's loading of training batches be ``data``, until ``undo`` is closed.

        Args:
            is_measured: Whether the step of the batch that is loaded next is measured.
        """

        def begin() -> None:
            self._stop()
            if self._mesh is not None and is_measured():
                self._begin_step(self._mesh)
            self.enter("data")

        def end() -> None:
            self.enter("training")

        observe_fetches(trainer, begin, end, undo)
        undo.callback(self._stop)

    def _begin_step(self, mesh: ParallelMesh) -> None:
        actions = ActionTimes(self._device, measures_memory=False)
        self._open = _Measured(mesh.journal.num_replayed, actions)
        mesh.launcher.around_waits.append(self._measure_wait)
        if self._executor is not None:
            self._executor.times.append(actions)

    @contextmanager
    def _measure_wait(self) -> Iterator[None]:
        start = self._mark_wait()
        yield
        stop = self._mark_wait()
        if self._open is not None and start is not None and self._part in _OF_A_STEP:
            self._open.waits.append((start, stop))

    def _mark_wait(self) -> Any:
        """Return a mark of the compute stream; None on another stream and inside a capture."""
        if self._stream is not None and (
            torch.cuda.is_current_stream_capturing() or torch.cuda.current_stream() != self._stream
        ):
            return None
        return self._clock.mark()

    def end_step(self) -> None:
        """End the step of a batch, if it is measured."""
        measured = self._open
        if measured is not None and self._mesh is not None:
            self.enter(self._part)
            num_replayed = self._mesh.journal.num_replayed - measured.num_replayed
            self._measured.append((measured, num_replayed))
            self._stop()

    def _stop(self) -> None:
        """Mark nothing further in the step that is measured, if there is one."""
        if self._open is None or self._mesh is None:
            return
        self._mesh.launcher.around_waits.remove(self._measure_wait)
        if self._executor is not None:
            self._executor.times.remove(self._open.actions)
        self._open = None

    def take_steps(self) -> list[StepTimes]:
        """Return the times of the batches measured since the last call, after a wait for the
        device.
        """
        self._clock.finish()
        steps = [self._times_of(*one) for one in self._measured]
        self._measured.clear()
        return steps

    def _times_of(self, measured: _Measured, num_replayed: int) -> StepTimes:
        seconds = self._clock.seconds
        parts: dict[Part, float] = dict.fromkeys(get_args(Part), 0.0)
        for (part, start), (_, stop) in pairwise(measured.parts):
            parts[part] += seconds(start, stop)
        waiting = sum(seconds(*wait) for wait in measured.waits)
        step = sum(parts[part] for part in _OF_A_STEP)
        spent = measured.actions.length_and_busy()
        return StepTimes(step, parts["data"], waiting, *spent, num_replayed)
