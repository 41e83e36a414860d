"""Memory of stages of any number of layers, from traces of one layer of each kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import add, sub

from lightning_megatron.forecast.traced_parts import form_of, smallest_layout, with_layers
from lightning_megatron.memory.chunk_costs import ChunkCosts, ChunkTrace, memory_at_peak, moments
from lightning_megatron.memory.lone_stage import LoneStage, repeated_after
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.plan.actions import Action
from lightning_megatron.plan.budget import StageMemory, TrainingShape, static_bytes
from lightning_megatron.plan.custom_schedule import build_order, order_may_split
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.plan.live_microbatches import live_in_row
from lightning_megatron.plan.schedule import NAMED_SCHEDULES, ScheduleName

#: Whether a layer has experts, its window, and whether it rotates.
_Kind = tuple[bool, int | None, bool]
#: Numbers of bytes.
_Bytes = tuple[int, ...]


@dataclass(frozen=True)
class TracedChunk:
    """Memory of one microbatch in a chunk.

    Args:
        held: What adds up over layers: kept activations, what the weight half waits for, the host's
            memory, and permanent memory (bytes).
        passing: What each pass needs besides, whose largest layer counts: forward, backward or
            input half, and weight half (bytes).
    """

    held: _Bytes
    passing: _Bytes

    def __add__(self, other: TracedChunk) -> TracedChunk:
        """Return a chunk that also holds another one, whose passes run while it holds its own."""
        held = tuple(map(add, self.held, other.held))
        return TracedChunk(held, tuple(map(max, self.passing, other.passing)))

    def __sub__(self, other: TracedChunk) -> TracedChunk:
        """Return what this chunk holds more than another one."""
        return TracedChunk(tuple(map(sub, self.held, other.held)), self.passing)

    def __mul__(self, number: int) -> TracedChunk:
        """Return some equal chunks, of which one runs at a time."""
        return TracedChunk(tuple(number * size for size in self.held), self.passing)

    def without(self, freed: int) -> TracedChunk:
        """Return the chunk with passes that run while so much of what is held is free (bytes)."""
        return TracedChunk(self.held, tuple(size - freed for size in self.passing))

    @property
    def costs(self) -> ChunkCosts:
        """Return what the actions of a schedule add up."""
        kept, waiting, host, _ = self.held
        forward, backward, weight_half = self.passing
        return ChunkCosts(
            kept, kept + forward, kept + backward, waiting, waiting + weight_half, host
        )


class TracedLayers:
    """Memory of a model's stages, from traces of chunks of one or two layers.

    Layers of one kind need the same memory, so that chunks of many layers follow from short ones.
    Up to half a percent it equals :func:`~lightning_megatron.memory.estimate.estimate_memory`,
    which traces whole stages; pools of CUDA graphs are assumed to hold what eager steps need.

    Args:
        config: Configuration of the model.
        kind: Kind of the device, "cuda" or "cpu".
    """

    def __init__(self, config: GPTConfig, kind: str) -> None:
        self._config = config
        self._shape = config.memory_shape()
        self._kind = kind
        self._kinds = [form_of(config, layer) for layer in range(config.num_layers)]
        # Without a layer with experts, a model has no expert axes.
        self._base = max(range(config.num_layers), key=config.has_experts_in)
        self._traces: dict[tuple[object, ...], TracedChunk] = {}
        self._stages: dict[tuple[object, ...], tuple[tuple[range, ...], ...]] = {}
        self._rows: dict[tuple[object, ...], tuple[Action, ...]] = {}

    @property
    def num_traces(self) -> int:
        """Return the number of traces so far."""
        return len(self._traces)

    def static(self, layout: ParallelLayout, training: TrainingShape) -> tuple[int, ...]:
        """Return the memory of parameters, gradients and optimizer of each stage (bytes)."""
        return tuple(
            sum(self._static(layout, training, stage).values()) for stage in range(layout.pp)
        )

    def fullest(self, layout: ParallelLayout, training: TrainingShape) -> StageMemory:
        """Return the memory of the fullest stage.

        Of stages with equal numbers of layers the first one keeps the most microbatches.
        """
        sizes = [tuple(map(len, chunks)) for chunks in self._layers(layout, training)]
        stages = sorted({sizes.index(size) for size in sizes} | {layout.loss_stage})
        return max((self.stage(layout, training, one) for one in stages), key=lambda one: one.peak)

    def stage(self, layout: ParallelLayout, training: TrainingShape, stage: int) -> StageMemory:
        """Return the memory of a stage."""
        layers = self._layers(layout, training)[stage]
        numbers = [layout.placement.virtual_stage(stage, chunk) for chunk in range(layout.vpp)]
        traced = [
            self._chunk(layout, training, number, chunk)
            for number, chunk in zip(numbers, layers, strict=True)
        ]
        chunks = [one.costs for one in traced]
        actions = self._row(layout, training, stage)
        static = self._static(layout, training, stage)
        graphs = 0
        if training.cuda_graphs is not None:
            slots = live_in_row(actions, layout.vpp).slots
            kept = sum(number * chunk.kept for number, chunk in zip(slots, chunks, strict=True))
            graphs = kept + sum(chunk.backward - chunk.kept for chunk in chunks)
        return memory_at_peak(
            [*moments(actions, chunks, training.is_paired)],
            training.step_bytes * (static["optimizer"] // max(1, training.state_bytes)),
            self._transfers(layout, training),
            chunks,
            stage=stage,
            num_parameters=static["parameters"] // training.parameter_bytes,
            **static,
            shared=sum(one.held[-1] for one in traced),
            libraries=training.library_bytes,
            graphs=graphs,
        )

    def _layers(
        self, layout: ParallelLayout, training: TrainingShape
    ) -> tuple[tuple[range, ...], ...]:
        """Return the layers of each chunk of each stage."""
        key = layout.placement, layout.tp, layout.stage_layers, training.loss_chunk
        if key not in self._stages:
            partition = self._config.partition(layout, training.loss_chunk)
            self._stages[key] = partition.by_stage(layout.placement)
        return self._stages[key]

    def _static(
        self, layout: ParallelLayout, training: TrainingShape, stage: int
    ) -> dict[str, int]:
        inside = [layer for chunk in self._layers(layout, training)[stage] for layer in chunk]
        mixtures = sum(map(self._config.has_experts_in, inside))
        dense = self._shape.stage_parameters(layout, stage, len(inside), mixtures)
        experts = mixtures * self._shape.expert_parameters(layout)
        parts = [
            static_bytes(dense, layout.dp * layout.cp, training),
            static_bytes(experts, layout.edp, training),
        ]
        return {name: size + parts[1][name] for name, size in parts[0].items()}

    def _transfers(self, layout: ParallelLayout, training: TrainingShape) -> int:
        """Return the bytes of a tensor that a stage receives and of one that it sends."""
        shards = layout.cp * (layout.tp if training.sequence_parallel else 1)
        rows = training.microbatch_size * training.seq_length // shards
        size = rows * self._config.hidden_size * training.activation_bytes
        return 2 * size if layout.pp > 1 else 0

    def _row(
        self, layout: ParallelLayout, training: TrainingShape, stage: int
    ) -> tuple[Action, ...]:
        """Return the actions of a stage; later microbatches repeat what the first ones do."""
        order = training.schedule
        named = NAMED_SCHEDULES.get(str(order))
        count = repeated_after(order, layout.pp, training.num_microbatches)
        if named is None or training.is_paired:
            return build_order(
                order, layout.pp, count, layout.vpp, is_paired=training.is_paired
            ).actions(stage)
        group = count
        if order == "interleaved":
            group = training.microbatch_group_size or layout.pp
        key = order, layout.pp, count, layout.vpp, group, stage
        if key not in self._rows:
            self._rows[key] = named.row(stage, layout.pp, count, layout.vpp, group)
        return self._rows[key]

    def _chunk(
        self, layout: ParallelLayout, training: TrainingShape, number: int, layers: Sequence[int]
    ) -> TracedChunk:
        """Return the costs of a chunk: its layers, and the embedding or the head.

        Args:
            number: Virtual stage of the chunk.
        """
        whole = TracedChunk((0,) * 4, (0,) * 3)
        if layers:
            whole = self._of_layers(layout, training, [self._kinds[layer] for layer in layers])
        plain = replace(training, recompute="none", fp8=None)
        if number == layout.placement.num_virtual_stages - 1:
            # Logits do not exist while layers run.
            head = self._trace(layout, plain, "last", ())
            whole = whole.without(head.held[0]) + head
        if number == 0:
            whole += self._trace(layout, plain, "first", ()).without(whole.held[0])
        return whole

    def _of_layers(
        self, layout: ParallelLayout, training: TrainingShape, kinds: Sequence[_Kind]
    ) -> TracedChunk:
        """Return the costs of some layers, by their kinds."""
        base = self._kinds[self._base]
        one = self._trace(layout, training, "middle", (self._base,))
        whole = one
        for kind in dict.fromkeys([base, *kinds]):
            both = self._trace(layout, training, "middle", (self._base, self._kinds.index(kind)))
            # A chunk without a layer of the kind that all traces have gets less of it.
            whole += (both - one) * (kinds.count(kind) - (kind == base))
        return whole

    def _trace(
        self, layout: ParallelLayout, training: TrainingShape, role: str, layers: tuple[int, ...]
    ) -> TracedChunk:
        """Return the costs of a chunk that has some layers and, by its role, embedding or head.

        They grow evenly with the microbatch, unless it decides which logits are stored at once.
        """
        size = training.microbatch_size
        if size < 3 or training.loss_chunk is not None:
            return self._traced(layout, training, role, layers)
        one, two = (
            self._traced(layout, replace(training, microbatch_size=number), role, layers)
            for number in (1, 2)
        )
        return TracedChunk(_grown(one.held, two.held, size), _grown(one.passing, two.passing, size))

    def _traced(
        self, layout: ParallelLayout, training: TrainingShape, role: str, layers: tuple[int, ...]
    ) -> TracedChunk:
        splits = order_may_split(training.schedule) and layout.pp > 1
        order: ScheduleName = "zb-h1" if splits else "1f1b"
        step = replace(
            training,
            num_microbatches=2 if training.fp8 and training.num_microbatches > 1 else 1,
            schedule=order,
            microbatch_group_size=None,
            is_paired=False,
            cuda_graphs=None,
        )
        axes = layout.tp, layout.cp, layout.ep, layout.etp
        key = axes, role, tuple(self._kinds[layer] for layer in layers), str(step)
        if key not in self._traces:
            # Three stages: the traced one, and others of a layer each.
            stage = {"first": 0, "middle": 1, "last": 2}[role]
            chosen = [[self._base], [self._base], [self._base]]
            chosen[stage] = list(layers)
            small = smallest_layout(layout, tuple(map(len, chosen)))
            config = with_layers(self._config, [layer for some in chosen for layer in some])
            self._traces[key] = _traced(config, small, step, stage, self._kind)
        return self._traces[key]


def _grown(one: _Bytes, two: _Bytes, size: int) -> _Bytes:
    """Return the sizes for a number of samples, given those for one and for two."""
    return tuple(a + (size - 1) * (b - a) for a, b in zip(one, two, strict=True))


def _traced(
    config: GPTConfig, layout: ParallelLayout, training: TrainingShape, stage: int, kind: str
) -> TracedChunk:
    lone = LoneStage.build(config, layout, training, stage, kind)
    with lone.batch(training.shares_casts):
        trace = ChunkTrace(lone, 0)
        trace.run()
        permanent = lone.device.now
        costs = trace.run()
    weight_half = costs.weight_half - costs.waiting
    passing = costs.forward - costs.kept, costs.backward - costs.kept, weight_half
    return TracedChunk((costs.kept, costs.waiting, costs.host, permanent), passing)
