"""Callback that measures the CUDA graphs of a training: their number, captures and memory."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterable
from operator import attrgetter
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from benchmarks.measure import Measure
from lightning_megatron.graphs.capture_tools import CaptureTools
from lightning_megatron.graphs.cuda import CudaBackend, CudaGraph, private_pools
from lightning_megatron.graphs.recording_inputs import RecordingInputs
from lightning_megatron.graphs.slot import Slot
from lightning_megatron.graphs.static_inputs import StaticInputs


class CaptureTimes:
    """Timer of the captures of ``CudaBackend`` between :meth:`install` and :meth:`remove`."""

    def __init__(self) -> None:
        self.num_captures = 0
        self.seconds = 0.0
        self._original = CudaBackend.capture

    def install(self) -> None:
        """Start timing captures."""
        original = self._original

        def capture(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                self.num_captures += 1
                self.seconds += time.perf_counter() - start

        CudaBackend.capture = capture  # type: ignore[method-assign]

    def remove(self) -> None:
        """Stop timing captures."""
        CudaBackend.capture = self._original  # type: ignore[method-assign]


class GraphFigures(Callback):
    """Callback that measures the number, captures and memory of this rank's graphs.

    Args:
        measure: Callback with the times of all steps.
    """

    def __init__(self, measure: Measure) -> None:
        #: Figures; sizes in bytes.
        self.result: dict[str, Any] = {}
        self._measure = measure
        self._times = CaptureTimes()
        self._num_before = 0
        self._capturing: list[int] = []

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start timing captures."""
        self._times.install()

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """Record whether graphs were captured in this step."""
        if self._times.num_captures > self._num_before:
            self._capturing.append(trainer.global_step)
        self._num_before = self._times.num_captures

    def teardown(self, *args: Any, **kwargs: Any) -> None:
        """Stop timing captures."""
        self._times.remove()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Read the figures while the graphs exist."""
        # gc.get_objects does not list the objects that the strategy has frozen.
        gc.unfreeze()
        objects = gc.get_objects()
        # If the host does not wait in steps, their times are known only at the end of training.
        seconds = self._measure.seconds
        median = statistics.median(self._measure.counted()) if seconds else 0.0
        extra_seconds = [
            seconds[step - 1] - median for step in self._capturing if step <= len(seconds)
        ]
        static = [*_of(objects, RecordingInputs), *_of(objects, StaticInputs)]
        tools = _of(objects, CaptureTools)
        copies = [tensor for one in tools for tensor in one.gradient_copies.values()]
        graphs = [graph for graph in _of(objects, CudaGraph) if graph._graph is not None]
        self.result = {
            "graphs": len(graphs),
            "slots": len(_of(objects, Slot)),
            "captures": self._times.num_captures,
            "capture_seconds": round(self._times.seconds, 3),
            "capturing_steps": self._capturing,
            "capturing_steps_seconds": round(sum(extra_seconds), 3),
            "static_inputs": sum(map(attrgetter("num_bytes"), static)),
            "gradient_copies": sum(map(attrgetter("nbytes"), copies)),
            **_pools(trainer),
        }


def _of(objects: Iterable[Any], kind: type) -> list[Any]:
    # On a proxy object, isinstance would run the object's own code.
    return [candidate for candidate in objects if type(candidate) is kind]


def _pools(trainer: Trainer) -> dict[str, int]:
    """Return the number and size of the graphs' private pools in torch's allocator."""
    if trainer.strategy.root_device.type != "cuda":
        return {"pools": 0, "pool_bytes": 0, "reserved_bytes": 0}
    pool_bytes = private_pools(trainer.strategy.root_device)
    return {
        "pools": len(pool_bytes),
        "pool_bytes": sum(pool_bytes.values()),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
    }
