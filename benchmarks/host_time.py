"""Callback that measures the host time of a training step by part of the code.

Each timed step begins when the device is idle and other ranks have finished, so the host waits only
for values that the step itself reads from the device or other ranks. The callback times the
functions of the parts directly, because a profiler would cost more time than short functions take.
The time of a part excludes the time of other parts that it calls.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from operator import itemgetter
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch.utils import data

from lightning_megatron import MegatronStrategy
from lightning_megatron.graphs.agreement import KeyAgreement
from lightning_megatron.graphs.cuda import CudaGraph
from lightning_megatron.graphs.graph_keys import ChunkKey
from lightning_megatron.graphs.recording import Recording
from lightning_megatron.graphs.recording_inputs import OutputGradients, RecordingInputs
from lightning_megatron.graphs.static_inputs import BatchForm, StaticInputs
from lightning_megatron.graphs.step_graph import StepGraphs
from lightning_megatron.optimizer.step_gradients import StepGradients
from lightning_megatron.pipeline.executor import PipelineExecutor
from lightning_megatron.strategy.logs.log_replay import LogReplay
from lightning_megatron.strategy.optimization.layer_states import LayerStates
from lightning_megatron.strategy.step.step import Step

#: Name of the time outside all other parts: Lightning's loop and hooks.
LOOP = "loop"
#: Functions of each part, as class and method name.
PARTS: dict[str, tuple[tuple[type, str], ...]] = {
    "batch": (
        (data.dataloader._BaseDataLoaderIter, "__next__"),
        (MegatronStrategy, "batch_to_device"),
    ),
    "keys": (
        (KeyAgreement, "agree"),
        (ChunkKey, "of"),
        (Recording, "find_mismatch"),
        (BatchForm, "of"),
    ),
    "copies": ((RecordingInputs, "fill"), (OutputGradients, "fill"), (StaticInputs, "fill")),
    "replays": ((CudaGraph, "replay"),),
    "passes": ((PipelineExecutor, "run"), (StepGraphs, "run")),
    "step": ((Step, "train"),),
    "logs": ((LogReplay, "replay"),),
    "finish": ((StepGradients, "end_batch"), (LayerStates, "finish_step")),
    "update": ((MegatronStrategy, "optimizer_step"),),
}


class PartTimes:
    """Time of each part of the code; at any time exactly one part is running.

    Autograd may call a part on another thread, while the main thread of the step waits for it.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._parts = [LOOP]
        self._since = time.perf_counter()

    @contextmanager
    def during(self, part: str) -> Iterator[None]:
        """Add the time inside the block to a part."""
        self._count()
        self._parts.append(part)
        try:
            yield
        finally:
            self._count()
            self._parts.pop()

    def take(self) -> dict[str, float]:
        """Return the time of each part since the last call of :meth:`start` (s)."""
        self._count()
        return self.seconds

    def start(self) -> None:
        """Reset all times to zero."""
        self.seconds = dict.fromkeys((LOOP, *PARTS), 0.0)
        self._since = time.perf_counter()

    def _count(self) -> None:
        now = time.perf_counter()
        part = self._parts[-1]
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self._since
        self._since = now


@contextmanager
def timing(times: PartTimes) -> Iterator[None]:
    """Time all functions of :data:`PARTS` inside the block."""
    with ExitStack() as undo:
        for part, functions in PARTS.items():
            for owner, name in functions:
                undo.enter_context(_replaced(owner, name, part, times))
        yield


@contextmanager
def _replaced(owner: type, name: str, part: str, times: PartTimes) -> Iterator[None]:
    """Replace a method of a class by a timed one inside the block."""
    attribute: Any = owner.__dict__.get(name)
    is_of_class = isinstance(attribute, classmethod)
    original: Callable[..., Any] = attribute.__func__ if is_of_class else getattr(owner, name)

    def timed(*args: Any, **kwargs: Any) -> Any:
        with times.during(part):
            return original(*args, **kwargs)

    setattr(owner, name, classmethod(timed) if is_of_class else timed)
    try:
        yield
    finally:
        if attribute is None:
            delattr(owner, name)
        else:
            setattr(owner, name, attribute)


class HostTime(Callback):
    """Callback that times the parts of a few steps on the host.

    Args:
        first: Number of the step before the timed ones.
        steps: Number of timed steps.
    """

    def __init__(self, first: int, steps: int = 6) -> None:
        self.first = first
        self.last = first + steps
        #: Median time of each part, and of the whole step (ms).
        self.result: dict[str, float] = {}
        self._times = PartTimes()
        self._steps: list[dict[str, float]] = []
        self._undo = ExitStack()

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """Start, read or remove the timers."""
        step = trainer.global_step
        if self.first < step <= self.last:
            self._steps.append(self._times.take())
        if step == self.first:
            self._undo.enter_context(timing(self._times))
        if step == self.last:
            self._undo.close()
        if self.first <= step < self.last:
            if trainer.strategy.root_device.type == "cuda":
                torch.cuda.synchronize()
            self._times.start()

    def teardown(self, *args: Any, **kwargs: Any) -> None:
        """Remove the timers after a fit that ended early."""
        self._undo.close()

    def on_train_end(self, trainer: Trainer, *args: Any) -> None:
        """Compute the medians."""
        if self._steps:
            parts = {
                name: statistics.median(map(itemgetter(name), self._steps))
                for name in self._steps[0]
            }
            parts["all"] = statistics.median(sum(times.values()) for times in self._steps)
            self.result = {name: round(seconds * 1e3, 3) for name, seconds in parts.items()}
