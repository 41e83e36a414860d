"""Run a user's step on the microbatches of a batch, through the pipeline, and bring loss and logs to every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_megatron.groups.collectives import broadcast_object
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.pipeline.executor import PipelineExecutor
from lightning_megatron.pipeline.microbatch import Microbatch, split_batch
from lightning_megatron.strategy.log_replay import LogReplay, Recorder
from lightning_megatron.strategy.outputs import loss_in, merge_outputs


@dataclass
class _Losses:
    """Collect the microbatches' losses of one batch, each weighted by its samples.

    Args:
        microbatches: The parts of the batch.
        factor: What the loss is multiplied by for the backward pass alone.
        divisor: Batches whose gradients are accumulated (batches).
    """

    microbatches: list[Microbatch]
    factor: float
    divisor: int
    total: Tensor | None = None
    num_missing: int = 0
    num_samples: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_samples = sum(part.num_samples for part in self.microbatches)

    def take(self, output: Any, number: int) -> Tensor | None:
        """Return the scalar to run backward from, and add its value to the total."""
        loss = loss_in(output)
        if loss is None:
            self.num_missing += 1
            return None
        weighted = loss * (self.microbatches[number].num_samples / self.num_samples / self.divisor)
        value = weighted.detach()
        self.total = value if self.total is None else self.total + value
        return weighted * self.factor if self.factor != 1.0 else weighted


class StepRunner:
    """Run steps: split, schedule, replay.

    Args:
        mesh: The groups of this rank.
        executor: Runs the schedule.
        microbatch_size: Samples of one data-parallel rank in a microbatch (samples).
    """

    def __init__(self, mesh: ParallelMesh, executor: PipelineExecutor, microbatch_size: int) -> None:
        self._mesh, self._executor, self._microbatch_size = mesh, executor, microbatch_size
        self._replay = LogReplay(mesh)

    def train(
        self,
        module: LightningModule,
        batch: Any,
        args: tuple[Any, ...],
        *,
        step: int,
        backward: bool,
        divisor: int,
        factor: float,
        values_to_log: Mapping[str, float],
        after_backward: Callable[[], None],
    ) -> Any:
        """Run ``training_step`` and its backward pass on every microbatch.

        Args:
            module: The user's module.
            batch: The batch of this data-parallel rank.
            args: What else the step takes.
            step: Number of the batch over the whole fit, for the random streams (batches).
            backward: Whether to make gradients.
            divisor: Batches whose gradients are accumulated (batches).
            factor: Loss scale.
            values_to_log: Further values that every rank knows.
            after_backward: Called once when all gradients of this rank are there.

        Returns:
            The mean loss over the batch divided by ``divisor``, on every rank; on the last stage with whatever else the
            step returned. None if the step returned no loss.

        Communication: that of the schedule and of :meth:`LogReplay.replay`.
        """
        microbatches = split_batch(batch, self._microbatch_size)
        losses = _Losses(microbatches, factor, divisor)
        with self._replay.record(module) as recorder:
            for name, value in values_to_log.items():
                module.log(name, value, on_step=True, on_epoch=False)
            with nullcontext() if backward else torch.no_grad():
                outputs = self._run(
                    module.training_step, microbatches, args, recorder, step, losses if backward else None
                )
        if not backward:
            for number, output in enumerate(outputs):
                losses.take(output, number)
        after_backward()
        loss = self._replay_with_loss(module, recorder, losses)
        if loss is None:
            return None
        if not outputs or not isinstance(outputs[0], Mapping):
            return loss
        detached = apply_to_collection(outputs, Tensor, Tensor.detach)
        merged = merge_outputs(detached, [part.num_samples for part in microbatches])
        return {**merged, "loss": loss} if isinstance(merged, Mapping) else loss

    def evaluate(
        self, module: LightningModule, name: str, batch: Any, args: tuple[Any, ...], *, step: int, key: tuple[Any, ...]
    ) -> Any:
        """Run ``validation_step``, ``test_step`` or ``predict_step`` on every microbatch.

        Args:
            module: The user's module.
            name: Name of the step.
            batch: The batch of this data-parallel rank.
            args: What else the step takes.
            step: Number of the batch (batches).
            key: Names the hook and the dataloader, for the form of the logs.

        Returns:
            What the step returned for the batch, on the last stage; predictions on every stage.
        """
        microbatches = split_batch(batch, self._microbatch_size)
        with self._replay.record(module) as recorder:
            outputs = self._run(getattr(module, name), microbatches, args, recorder, step, None)
        merged = merge_outputs(outputs, [part.num_samples for part in microbatches])
        if name != "predict_step":
            self._replay.replay(module, recorder, key, [])
            return merged
        pp_cpu = self._mesh.pp_cpu
        return (
            broadcast_object(apply_to_collection(merged, Tensor, Tensor.cpu), pp_cpu, pp_cpu.size - 1)
            if pp_cpu.size > 1
            else merged
        )

    def _run(
        self,
        step_fn: Callable[..., Any],
        microbatches: list[Microbatch],
        args: tuple[Any, ...],
        recorder: Recorder,
        step: int,
        losses: _Losses | None,
    ) -> list[Any]:
        sizes = {id(part.data): part.num_samples for part in microbatches}

        def run_one(data: Any) -> Any:
            recorder.microbatch_size = sizes[id(data)]
            recorder.is_muted = not self._executor.runs_to_end
            return step_fn(data, *args)

        loss_of = None if losses is None else losses.take
        return self._executor.run(run_one, microbatches, backward=losses is not None, loss_of=loss_of, step=step)

    def _replay_with_loss(self, module: LightningModule, recorder: Recorder, losses: _Losses) -> Tensor | None:
        is_last = self._mesh.pp.is_last
        if is_last and losses.num_missing and self._mesh.world.size > 1:
            raise RuntimeError(
                "training_step must return a loss on every rank and for every microbatch: it returned None. The "
                "other ranks wait "
                "for its gradients. Return a loss that is zero, such as 0.0 * output.sum(), to skip a batch."
            )
        if losses.total is None and is_last and self._mesh.world.size == 1:
            self._replay.replay(module, recorder, ("training_step",), [])
            return None
        dtype = torch.float32 if losses.total is None else torch.promote_types(losses.total.dtype, torch.float32)
        extra = [losses.total if losses.total is not None else torch.zeros(())]
        (loss,) = self._replay.replay(module, recorder, ("training_step",), extra)
        return loss.to(dtype)
