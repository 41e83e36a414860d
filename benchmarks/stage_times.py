"""Callback that records the start and end of every action of all pipeline stages."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, Trainer

from benchmarks.step_trace import strategy_of
from lightning_megatron.cli.schedule_costs import PipelineCosts
from lightning_megatron.groups.collectives import all_gather_objects, barrier
from lightning_megatron.pipeline.action_times import ActionTimes
from lightning_megatron.plan.live_microbatches import WEIGHT_HALF_SHARE
from lightning_megatron.plan.stage_costs import StageCosts


def measured_costs(figures: dict[str, Any]) -> PipelineCosts:
    """Return the times (microseconds) and sizes (bytes) that an ``auto`` case has measured.

    Args:
        figures: Measurements of the case.
    """
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
    """Callback that records the actions of one step on all stages.

    Args:
        first: Number of the step before the recorded one.
    """

    def __init__(self, first: int) -> None:
        self.first = first
        self.result: dict[str, Any] = {}
        self._times: ActionTimes | None = None

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        """Synchronise all ranks, and record the actions of this step."""
        if trainer.global_step != self.first:
            return
        strategy = strategy_of(trainer)
        executor: Any = strategy.run.executor
        run = executor.run
        device = strategy.root_device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        barrier(strategy.mesh.world, device)
        self._times = ActionTimes(device)
        executor.run = lambda *args, **options: run(*args, **{**options, "times": self._times})

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """Stop recording."""
        strategy_of(trainer).run.executor.__dict__.pop("run", None)

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
