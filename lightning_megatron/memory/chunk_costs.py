"""Memory of one microbatch in one chunk of a stage, traced on a pretended device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from lightning_megatron.memory.lone_stage import LoneStage
from lightning_megatron.models.stage import StageCursor
from lightning_megatron.pipeline.executor import PipelineExecutor
from lightning_megatron.pipeline.step_plans import TensorSpec, Trial
from lightning_megatron.plan.actions import Action
from lightning_megatron.plan.budget import StageMemory


@dataclass(frozen=True)
class ChunkCosts:
    """Bytes that one microbatch needs in one chunk of a stage, besides permanent memory.

    Args:
        kept: What the chunk keeps from its forward pass to its backward pass.
        forward: Peak of the forward pass.
        backward: Peak of the backward pass, or of its input half; ``kept`` is part of it.
        waiting: What the input half keeps for the weight half.
        weight_half: Peak of the weight half; ``waiting`` is part of it.
        host: What the chunk keeps in the memory of the host.
    """

    kept: int
    forward: int
    backward: int
    waiting: int = 0
    weight_half: int = 0
    host: int = 0


@dataclass(frozen=True)
class StepPoint:
    """Moment of a step, with the memory besides permanent memory.

    Args:
        name: "forward", "backward" or "optimizer step".
        in_flight: Microbatches, over all chunks, whose activations exist.
        kept: What they keep (bytes).
        workspace: What the running pass needs besides that (bytes).
    """

    name: str
    in_flight: int
    kept: int
    workspace: int

    @property
    def size(self) -> int:
        """Return the memory besides permanent memory (bytes)."""
        return self.kept + self.workspace


def moments(
    actions: Sequence[Action], chunks: Sequence[ChunkCosts], is_paired: bool = False
) -> Iterator[StepPoint]:
    """Yield the moments of the largest memory in each action of a stage.

    Args:
        actions: Actions in execution order.
        chunks: Costs of the stage's chunks.
        is_paired: Whether the stage switches between a forward pass and a backward pass behind it.
    """
    kept = num_kept = 0
    beside = 0
    for action in actions:
        costs = chunks[action.chunk]
        if action.kind == "F":
            kept += costs.kept
            num_kept += 1
            beside = (costs.forward - costs.kept) * is_paired
            yield StepPoint("forward", num_kept, kept, costs.forward - costs.kept)
            continue
        is_weight_half = action.kind == "W"
        before = costs.waiting if is_weight_half else costs.kept
        peak = costs.weight_half if is_weight_half else costs.backward
        yield StepPoint("backward", num_kept, kept, peak - before + beside)
        beside = 0
        kept -= before
        if action.kind == "I":
            kept += costs.waiting
        else:
            num_kept -= 1


def memory_at_peak(
    passes: Sequence[StepPoint],
    update: int,
    transfers: int,
    chunks: Sequence[ChunkCosts],
    **parts: int,
) -> StageMemory:
    """Return the memory of a stage at its fullest moment.

    Args:
        passes: Moments of the passes of a step.
        update: What the optimizer step needs (bytes).
        transfers: What a stage receives while it sends (bytes).
        chunks: Costs of the stage's chunks.
        parts: All else, which is the same at all moments.
    """
    points = [*passes, StepPoint("optimizer step", 0, 0, update)]
    worst = max(points, key=lambda point: point.size)
    most_in_flight = max(point.in_flight for point in passes)
    return StageMemory(
        moment=worst.name,
        in_flight=worst.in_flight,
        activations=worst.kept,
        workspace=worst.workspace,
        communication=transfers if worst.in_flight else 0,
        host=most_in_flight * max(chunk.host for chunk in chunks),
        **parts,
    )


class ChunkTrace:
    """Forward and backward passes of one chunk of a lone stage."""

    def __init__(self, stage: LoneStage, chunk: int) -> None:
        self._stage = stage
        self._device = stage.device
        self._queue = stage.reducer.weight_gradients
        #: What the last forward pass has sent, and a backward pass gets the gradients of.
        self._sent: list[TensorSpec] = []
        self._cursor: Callable[[list[Tensor]], StageCursor | None] = lambda _: None
        self._received: Sequence[TensorSpec] = ()
        self._executor = PipelineExecutor(stage.mesh, stage.pipelined)
        self._is_last = True
        #: Size of what the chunk receives or sends for a microbatch, which is larger (bytes).
        self.crossing = 0
        rank = stage.mesh.pp.rank
        self._is_halved = any(action.kind == "W" for action in stage.schedule.actions(rank))
        model = stage.pipelined
        if model is not None and stage.mesh.pp.size > 1:
            plans = self._executor.plans
            plan = plans.of(Trial(), model, stage.step, stage.microbatch)
            self._cursor = lambda received: StageCursor(chunk, received, plan=plan)
            self._is_last = model.is_last_stage(chunk)
            if not model.is_first_stage(chunk):
                self._received = plans.tensor_specs(stage.step, stage.microbatch, plan, chunk)
                self.crossing = sum(shape.numel() * of.itemsize for shape, of in self._received)

    def run(self) -> ChunkCosts:
        """Run a microbatch through the chunk, and return its costs."""
        device = self._device
        host = device.host
        start = device.restart()
        inputs, outputs = self._forward()
        host = device.host - host
        forward = device.peak - start
        kept = device.restart() - start
        if not self._is_halved:
            self._backward(inputs, outputs)
            return ChunkCosts(kept, forward, device.peak - start, host=host)
        with self._queue.open("half"):
            self._backward(inputs, outputs)
        backward = device.peak - start
        waiting = device.restart() - start
        self._queue.run("half")
        return ChunkCosts(kept, forward, backward, waiting, device.peak - start, host)

    def _forward(self) -> tuple[list[Tensor], list[Any]]:
        """Run the forward pass; return its received tensors, and where backward passes start."""
        received = [torch.empty(shape, dtype=dtype) for shape, dtype in self._received]
        for tensor in received:
            tensor.requires_grad_(tensor.is_floating_point())
        cursor = self._cursor(received)
        loss, _ = self._executor.call(self._stage.step, self._stage.microbatch, cursor)
        if self._is_last:
            return received, [loss]
        assert cursor is not None, "a step of several stages has a cursor"
        self.crossing = max(self.crossing, sum(one.nbytes for one in cursor.sent))
        sent = [one for one in cursor.sent if one.is_floating_point() and one.requires_grad]
        self._sent = [(one.shape, one.dtype) for one in sent]
        # The outputs are freed as soon as they have been sent.
        return received, [*map(get_gradient_edge, sent)]

    def _backward(self, inputs: list[Tensor], outputs: list[Any]) -> None:
        """Run the backward pass, and free what both passes used."""
        gradients = [torch.empty(shape, dtype=dtype) for shape, dtype in self._sent]
        if outputs:
            torch.autograd.backward(outputs, gradients or [None])
        outputs.clear()
        inputs.clear()
