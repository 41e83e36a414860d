"""Operators of the parts of a model, from traces of one and of two layers of each kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from math import lcm
from typing import Literal

import torch

from lightning_megatron.forecast.operator_trace import Operator, RecordingDevice
from lightning_megatron.groups.lone_mesh import LeftOut
from lightning_megatron.memory.chunk_costs import ChunkTrace
from lightning_megatron.memory.estimate import naming_the_line
from lightning_megatron.memory.lone_stage import LoneStage
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.plan.budget import TrainingShape
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.plan.recomputation import Parts, Recomputation

#: Number of traces that are remembered.
_REMEMBERED = 512
#: Passes of a microbatch; without halves the whole backward is the input half.
PASSES = ("forward", "input_half", "weight_half")


@dataclass(frozen=True)
class LayerKind:
    """What distinguishes a layer from others of its model.

    Args:
        layer: Index of one such layer, of which all others are copies.
        in_eight_bits: Whether its linear layers compute in 8 bits.
        recomputed: What its backward pass recomputes.
    """

    layer: int
    in_eight_bits: bool
    recomputed: Parts


@dataclass(frozen=True)
class StageTrace:
    """Operators of one microbatch in a stage, and the stage's parameters.

    Args:
        first: Operators of the passes of the first microbatch of a step.
        later: Those of a later one, which may find casts of weights and fills sums.
        parameters: Elements and bytes of parameters, of "dense" ones and those of "experts".
        boundary: What a microbatch sends to the next stage (bytes).
    """

    first: tuple[tuple[Operator, ...], ...]
    later: tuple[tuple[Operator, ...], ...]
    parameters: Mapping[str, int]
    boundary: int


class PassTrace(ChunkTrace):
    """Passes of one chunk, whose operators are listed apart."""

    def warm_up(self) -> None:
        """Run a forward pass, which makes the tables of a chunk."""
        self._forward()

    def operators(self) -> tuple[tuple[Operator, ...], ...]:
        """Run a microbatch, and return the operators of its passes in the order of ``PASSES``."""
        self._taken()
        inputs, outputs = self._forward()
        # The trace itself makes what comes from other stages, and keeps the gradients for them.
        forward = self._taken()[len(self._received) :]
        halves = self._queue.open("half") if self._is_halved else nullcontext()
        with halves:
            self._backward(inputs, outputs)
        backward = self._taken()
        backward = backward[len(self._sent) : len(backward) - len(self._received)]
        if self._is_halved:
            self._queue.run("half")
        return forward, backward, self._taken()

    def _taken(self) -> tuple[Operator, ...]:
        device = self._device
        assert isinstance(device, RecordingDevice), "the stage was built on such a device"
        taken = tuple(device.operators)
        device.operators.clear()
        return taken


@lru_cache(_REMEMBERED)
def trace_stage(
    config: GPTConfig, layout: ParallelLayout, training: TrainingShape, stage: int, kind: str
) -> StageTrace:
    """Run microbatches through a stage on a pretended device, and return their operators.

    Operators of more than two samples follow from those of one and of two, with which their sizes
    grow evenly.

    Raises:
        UnsupportedError: If the model's code does not run on tensors without elements.
    """
    size = training.microbatch_size
    if size > 2 and training.loss_chunk is None:
        steps = (replace(training, microbatch_size=number) for number in (1, 2))
        one, two = (trace_stage(config, layout, step, stage, kind) for step in steps)
        grown = _grown(one, two, size)
        if grown is not None:
            return grown
    with naming_the_line("the time of this model", "Measure it in a short run."):
        return _traced(config, layout, training, stage, kind)


def _grown(one: StageTrace, two: StageTrace, size: int) -> StageTrace | None:
    """Return the operators for a number of samples, given those for one and for two.

    It is None if the operators for one are others than those for two.
    """
    passes = []
    for few, many in zip((*one.first, *one.later), (*two.first, *two.later), strict=True):
        names = [operator.name for operator in few]
        if names != [operator.name for operator in many]:
            return None
        passes.append(tuple(a.grown(b, size) for a, b in zip(few, many, strict=True)))
    number = len(PASSES)
    boundary = one.boundary + (size - 1) * (two.boundary - one.boundary)
    return StageTrace(tuple(passes[:number]), tuple(passes[number:]), one.parameters, boundary)


def _traced(
    config: GPTConfig, layout: ParallelLayout, training: TrainingShape, stage: int, kind: str
) -> StageTrace:
    lone = LoneStage.build(config, layout, training, stage, kind, RecordingDevice)
    device = lone.device
    recorder = lone.mesh.launcher.recorder
    assert isinstance(device, RecordingDevice), "the stage was built on such a device"
    assert isinstance(recorder, LeftOut), "a lone mesh leaves out its collectives"
    recorder.listener = device.collected
    shares = training.shares_casts
    # The first pass of all makes tables that stay.
    with lone.batch(shares), torch.no_grad():
        trace = PassTrace(lone, 0)
        trace.warm_up()
    with lone.batch(shares):
        first = trace.operators()
        later = trace.operators()
    counts = Counter[str]()
    for buffer in lone.main.buffers:
        kind_of = "experts" if buffer.sharding.is_expert else "dense"
        counts[kind_of] += sum(parameter.numel() for parameter in buffer.members.values())
        counts[f"{kind_of} bytes"] += buffer.parameters.nbytes
    shape, dtype = lone.models[0].boundary(lone.microbatch.data)
    boundary = shape.numel() * dtype.itemsize
    return StageTrace(first, later, counts, boundary)


def kinds_of_layers(
    config: GPTConfig, training: TrainingShape, chunks: Sequence[range]
) -> list[list[LayerKind]]:
    """Return the kinds of the layers of each chunk; layers of a kind have equal operators."""
    known: dict[object, LayerKind] = {}
    recompute = Recomputation.of(training.recompute)
    kinds = []
    for layers in chunks:
        kinds.append(
            [
                _kind(config, training, layer, recompute.parts_of(place, len(layers)), known)
                for place, layer in enumerate(layers)
            ]
        )
    return kinds


def _kind(
    config: GPTConfig,
    training: TrainingShape,
    layer: int,
    recomputed: Parts,
    known: dict[object, LayerKind],
) -> LayerKind:
    fp8 = training.fp8
    in_eight_bits = fp8 is not None and (
        fp8.first_bf16 <= layer < config.num_layers - fp8.last_bf16
    )
    same = form_of(config, layer), in_eight_bits, recomputed
    return known.setdefault(same, LayerKind(layer, in_eight_bits, recomputed))


def form_of(config: GPTConfig, layer: int) -> tuple[bool, int | None, bool]:
    """Return whether a layer has experts, its window, and whether it rotates."""
    return config.has_experts_in(layer), config.window_of(layer), config.rotates_in(layer)


def with_layers(config: GPTConfig, layers: Sequence[int]) -> GPTConfig:
    """Return the configuration of a model of some of the layers, which may repeat."""
    experts = config.experts
    if experts is not None:
        has_experts = tuple(map(experts.is_in, layers))
        experts = replace(experts, layers=has_experts) if any(has_experts) else None
    return replace(
        config,
        num_layers=len(layers),
        experts=experts,
        window_layers=_values_of(config.window_layers, layers),
        rotary_layers=_values_of(config.rotary_layers, layers),
    )


def _values_of(values: tuple[bool, ...] | None, layers: Sequence[int]) -> tuple[bool, ...] | None:
    return None if values is None else tuple(values[layer] for layer in layers)


def only_training(training: TrainingShape, kind: LayerKind, splits: bool) -> TrainingShape:
    """Return the settings under which all layers of a model are of one kind.

    Args:
        splits: Whether backward passes run in halves.
    """
    offload = Recomputation.of(training.recompute).offload and bool(kind.recomputed)
    fp8 = training.fp8
    if fp8 is not None:
        casts: Literal["batch", "microbatch"] = "batch" if training.shares_casts else "microbatch"
        whole = replace(fp8, first_bf16=0, last_bf16=0, cast_weights=casts)
        fp8 = whole if kind.in_eight_bits else None
    return replace(
        training,
        recompute=Recomputation(kind.recomputed or ("none",), offload=offload),
        fp8=fp8,
        schedule="zb-h1" if splits else "1f1b",
        microbatch_group_size=None,
        cuda_graphs=None,
        num_microbatches=1,
    )


def smallest_layout(
    layout: ParallelLayout, counts: tuple[int, ...], *, has_experts: bool = True
) -> ParallelLayout:
    """Return the layout of the fewest ranks whose layers compute as in a larger layout.

    Args:
        counts: Layers of its stages.
        has_experts: Whether the layers have experts; only these are divided over ep.
    """
    ep = layout.ep if has_experts else 1
    etp = layout.etp if has_experts else layout.tp
    return ParallelLayout(
        world_size=lcm(layout.tp * layout.cp, ep * etp) * len(counts),
        tp=layout.tp,
        pp=len(counts),
        cp=layout.cp,
        ep=ep,
        etp=etp,
        stage_layers=counts if len(counts) > 1 else None,
    )
