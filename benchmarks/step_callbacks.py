"""Callbacks that time parts of steps: the optimizer step, actions, and saves beside steps."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from benchmarks.measure import Measure, mark_on_device, strategy_of
from lightning_megatron.cli.schedule_costs import PipelineCosts
from lightning_megatron.graphs.cuda import private_pools
from lightning_megatron.groups.collectives import all_gather_objects, barrier
from lightning_megatron.pipeline.action_times import ActionTimes
from lightning_megatron.plan.live_microbatches import WEIGHT_HALF_SHARE
from lightning_megatron.plan.simulate import StageCosts

#: Minimum memory traffic of the optimizer step per element (bytes): read gradient, main parameter
#: and two moments (4 x 4), write the last three (3 x 4), write the model's parameter in bfloat16
#: (2), and read the gradient for its norm (4).
OPTIMIZER_BYTES = 4 * 4 + 3 * 4 + 2 + 4
#: Speed of a device-to-device copy on an H200, counting bytes read and bytes written (bytes/s).
COPY_RATE = 4.26e12


class OptimizerTime(Callback):
    """Callback that times clipping and the optimizer step on the device.

    The time starts with the reduced gradients and ends with the updated slices of this rank.
    Gathers of the updated parameters overlap with later work on other streams and are not included.
    """

    #: This callback does not read gradients, so the strategy need not reduce them for its hooks.
    reads_gradients = False

    def __init__(self, first: int, steps: int) -> None:
        self.first = first
        self.stop = first + steps
        self.result: dict[str, Any] = {}
        self._spans: list[list[torch.cuda.Event]] = []

    def on_before_optimizer_step(self, trainer: Trainer, *args: Any) -> None:
        """Record the time at which the compute stream has the reduced gradients."""
        if (
            trainer.strategy.root_device.type == "cuda"
            and self.first <= trainer.global_step < self.stop
        ):
            self._spans.append([mark_on_device()])

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """Record the end of the step."""
        if self._spans and len(self._spans[-1]) == 1:
            self._spans[-1].append(mark_on_device())

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compare the median with the time of the memory traffic alone."""
        if not self._spans:
            return
        torch.cuda.synchronize()
        groups = trainer.optimizers[0].param_groups
        elements = sum(p.numel() for group in groups for p in group["params"])
        optimizer_ms = statistics.median(start.elapsed_time(end) for start, end in self._spans)
        floor_ms = elements * OPTIMIZER_BYTES / COPY_RATE * 1e3
        self.result = {
            "elements": elements,
            "optimizer_ms": round(optimizer_ms, 2),
            "floor_ms": round(floor_ms, 2),
            "ratio": round(optimizer_ms / floor_ms, 2),
            "rule": f"{OPTIMIZER_BYTES} bytes an element of this rank's slice / "
            f"{COPY_RATE / 1e12} TB/s",
        }
        if trainer.is_global_zero:
            print("optimizer step:", self.result, flush=True)


class SaveStall(Callback):
    """Callback that saves twice in the background and measures the delay of later steps.

    The second save reuses the host buffers of the first.

    Args:
        folder: Folder of the checkpoints.
        measure: Callback with the times of all steps.
        first: Number of the step after which the first save starts.
        steps: Number of steps to measure after each save.
    """

    def __init__(self, folder: Path, measure: Measure, first: int, steps: int) -> None:
        self.folder = folder
        self.measure = measure
        self.first = first
        self.steps = steps
        self.result: dict[str, Any] = {}
        self._calls: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """Start a save; its call counts in the next step, because this step is already recorded."""
        if trainer.global_step == self.first + self.steps - 2:
            # The second save waits for the first one. Wait here instead, in an unmeasured step.
            strategy_of(trainer).finish_saves()
        if trainer.global_step in (self.first, self.first + self.steps):
            start = time.perf_counter()
            trainer.save_checkpoint(self.folder / f"step{trainer.global_step}")
            self._calls.append(time.perf_counter() - start)

    def on_train_end(self, trainer: Trainer, *args: Any) -> None:
        """Sum the delays of the steps after each save."""
        median = statistics.median(self.measure.counted())
        for number, call in enumerate(self._calls):
            start = self.first + number * self.steps
            step_seconds = self.measure.seconds[start : start + self.steps - 2]
            stall = sum(seconds - median for seconds in step_seconds)
            self.result[("first", "second")[number]] = {
                "call_ms": round(call * 1e3, 1),
                "next_step_ms": round(step_seconds[0] * 1e3, 1),
                "stall_ms": round(stall * 1e3, 1),
                "in_steps": round(stall / median, 2),
                "looked_at_steps": len(step_seconds),
                "first_steps_ms": [round(seconds * 1e3, 1) for seconds in step_seconds[:8]],
            }
        if trainer.is_global_zero:
            print("background save:", self.result, flush=True)


def measured_costs(figures: dict[str, Any]) -> PipelineCosts:
    """Return the times (microseconds) and sizes (bytes) that an ``auto`` case has measured."""
    costs = figures["StageTimes"]["costs"]
    forward = tuple(costs["forward"])
    times = StageCosts(
        forward,
        tuple(costs["input_half"]),
        tuple(costs["weight_half"]),
        costs.get("transfer", 0),
    )
    kept = tuple(costs.get("kept", [0.0] * len(forward)))
    return PipelineCosts(times, kept, costs.get("weight_half_share", WEIGHT_HALF_SHARE))


class StageTimes(Callback):
    """Callback that records the actions of one step on all stages."""

    def __init__(self, first: int) -> None:
        self.first = first
        self.result: dict[str, Any] = {}
        self._times: ActionTimes | None = None

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        """Synchronise all ranks, and record the actions of this step."""
        if trainer.global_step != self.first:
            return
        strategy = strategy_of(trainer)
        device = strategy.root_device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        barrier(strategy.mesh.world, device)
        self._times = ActionTimes(device)
        strategy.run.executor.times.append(self._times)

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """Stop recording."""
        strategy_of(trainer).run.executor.times.clear()

    def on_train_end(self, trainer: Trainer, *args: Any) -> None:
        """Gather the actions of all stages, and the measurements of ``schedule="auto"``."""
        assert self._times is not None, "the recorded step was trained"
        strategy = strategy_of(trainer)
        mesh = strategy.mesh
        actions = [
            (action.kind, action.chunk, action.microbatch, round(start * 1e6), round(stop * 1e6))
            for action, start, stop in self._times.spans()
        ]
        measured = strategy.run.measured_stages
        self.result = {
            "rows": all_gather_objects(actions, mesh.pp_cpu),
            "costs": None if measured is None else measured.as_dict(),
        }


class GraphFigures(Callback):
    """Callback that reads the number, capture time and memory of this rank's graphs at the end."""

    def __init__(self) -> None:
        #: Figures; sizes in bytes.
        self.result: dict[str, Any] = {}

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Read the figures while the graphs exist."""
        strategy = strategy_of(trainer)
        graphs = strategy.run.graphs
        if graphs is None:
            return
        pools = private_pools(strategy.root_device) if torch.cuda.is_available() else {}
        self.result = {
            "graphs": graphs.num_graphs,
            "capture_seconds": round(graphs._captures.counts.seconds, 3),
            "pools": len(pools),
            "pool_bytes": sum(pools.values()),
        }
