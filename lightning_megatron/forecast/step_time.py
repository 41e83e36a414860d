"""Estimate of the time of a training step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.forecast.chip_speeds import ChipSpeeds, Link
from lightning_megatron.forecast.cluster import Cluster
from lightning_megatron.forecast.pass_times import (
    LinkedChip,
    Times,
    added,
    combined,
    host_of,
    passes_of,
)
from lightning_megatron.forecast.traced_parts import (
    PASSES,
    LayerKind,
    StageTrace,
    kinds_of_layers,
    only_training,
    smallest_layout,
    trace_stage,
    with_layers,
)
from lightning_megatron.forecast.update_time import Embedding, UpdateTimes, update_times
from lightning_megatron.groups.mesh_groups import groups_of_rank
from lightning_megatron.memory.lone_stage import repeated_after
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.plan.budget import TrainingShape, check_shape
from lightning_megatron.plan.custom_schedule import build_order, order_may_split
from lightning_megatron.plan.experts import collective_over_ep
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.plan.partition import partition_of
from lightning_megatron.plan.simulate import StageCosts, simulate

#: Length of a tick of the simulated schedule (s).
_TICK = 1e-6
#: Numbers of clusters whose speeds are remembered.
_REMEMBERED = 16


@dataclass(frozen=True)
class StageTime:
    """Times of one microbatch in a stage on the device, over all its chunks (s)."""

    forward: float
    input_half: float
    weight_half: float


@dataclass(frozen=True)
class StepTime:
    """Estimated time of a training step, and its parts.

    Args:
        seconds: Time of the step (s).
        stages: Times of every stage.
        bubble: Share of the pipeline's time in which stages are idle.
        exposed: Time in which a rank only communicates, by axis (s).
        optimizer: Time of clipping and of the optimizer (s).
        tokens_per_second: Tokens of a GPU in a second.
        flops_per_second: Model FLOPs of a GPU in a second, as ``GPTConfig.flops_per_token`` counts.
        host: What the host of the busiest stage needs to launch all operators; the step takes so
            long if the GPUs need less (s).
    """

    seconds: float
    stages: tuple[StageTime, ...]
    bubble: float
    optimizer: float
    tokens_per_second: float
    flops_per_second: float
    exposed: Mapping[str, float] = field(default_factory=dict)
    host: float = 0.0


def check_cluster(layout: ParallelLayout, cluster: Cluster) -> None:
    """Refuse a layout of another number of ranks than the cluster has GPUs."""
    if layout.world_size != cluster.num_gpus:
        raise ParallelPlanError(
            f"the layout must have a rank for each GPU: world_size is {layout.world_size}, "
            f"num_gpus {cluster.num_gpus}. Use equal numbers."
        )


def estimate_time(
    config: GPTConfig,
    layout: ParallelLayout,
    training: TrainingShape,
    cluster: Cluster,
    *,
    overlaps_gathers: bool = True,
) -> StepTime:
    """Estimate the time of a training step; no GPU and no process group is needed.

    Microbatches run through one and through two layers of each kind, by the code that trains them,
    on tensors without elements. The times of their operators come from measurements of the chip.
    The schedule adds the passes of the stages up. Gradients are reduced during the last backward
    pass of each stage, and updated parameters are gathered during the next forward pass. Where the
    host reads numbers of rows, routing is assumed to be even.

    Args:
        config: Configuration of the model.
        layout: Sizes of the axes.
        training: Settings of the step.
        cluster: GPUs, and what connects them.
        overlaps_gathers: Whether updated parameters are gathered during the next forward pass, as
            ``optimizer.overlap_parameters`` of the strategy sets it, instead of before it.

    Raises:
        ParallelPlanError: For sizes that do not fit together, and chips without measurements.
        UnsupportedError: If the model's code does not run on tensors without elements.
    """
    check_shape(layout, training)
    check_cluster(layout, cluster)
    training = with_transport(config, layout, training, cluster.gpus_per_node)
    links = links_of(layout, cluster.gpus_per_node)
    chip = LinkedChip(speeds_of(cluster), links, training.cuda_graphs is None)
    parts = _virtual_stages(config, layout, training, chip)
    pipeline = _pipeline(layout, training, _costs(parts, layout, chip))
    stages = list(map(added, parts.by_stage(layout)))
    embedding = Embedding.of(config, layout, training)
    update = _slowest_update(stages, embedding, training, chip, overlaps_gathers)
    on_device = pipeline + max(map(_first_microbatch, stages)) + update.seconds
    count = training.num_microbatches
    # The host runs ahead of the device, over several steps, until it needs more time.
    host = count * max(map(host_of, stages))
    seconds = max(on_device, host)
    passes = list(map(passes_of, stages))
    work = list(map(sum, passes))
    exposed = _exposed(stages[work.index(max(work))], links, count)
    exposed["data"] = update.reduction + update.gather
    exposed = {axis: time for axis, time in exposed.items() if time > 0}
    tokens = training.seq_length * training.microbatch_size * count
    speed = tokens * layout.dp / layout.world_size / seconds
    return StepTime(
        seconds,
        tuple(StageTime(*times) for times in passes),
        1 - count * sum(work) / len(work) / pipeline if layout.pp > 1 else 0.0,
        update.optimizer,
        speed,
        speed * config.flops_per_token(training.seq_length),
        exposed,
        host,
    )


def _slowest_update(
    stages: Sequence[Times],
    embedding: Embedding,
    training: TrainingShape,
    chip: LinkedChip,
    overlaps_gathers: bool,
) -> UpdateTimes:
    updates = [
        update_times(times, training, chip, embedding if stage == 0 else None, overlaps_gathers)
        for stage, times in enumerate(stages)
    ]
    return max(updates, key=lambda one: one.seconds)


def _exposed(times: Times, links: Mapping[str, Link], count: int) -> dict[str, float]:
    """Return the time in which the passes of some microbatches only communicate, by axis (s)."""
    exposed: dict[str, float] = {}
    for axis in links:
        exposed[axis] = count * sum(times.get(f"{name} exposed {axis}", 0.0) for name in PASSES)
    return exposed


def _costs(parts: _VirtualStages, layout: ParallelLayout, chip: LinkedChip) -> StageCosts:
    """Return the times of the virtual stages in ticks."""
    neighbours = Link(2, 1 if chip.links["pp"].crosses_nodes else 2)
    transfer = 0.0
    if layout.pp > 1:
        transfer = chip.speeds.collective("transfer", parts.boundary, neighbours)
    ticks = {}
    for name in PASSES:
        ticks[name] = tuple(max(1, round(times.get(name, 0.0) / _TICK)) for times in parts.times)
    return StageCosts(**ticks, transfer=round(transfer / _TICK))


def _pipeline(layout: ParallelLayout, training: TrainingShape, costs: StageCosts) -> float:
    """Return the time of all passes of a step on the slowest stage (s).

    In the middle of a long pipeline every pp microbatches take the same time.
    """
    stages = layout.pp
    count = training.num_microbatches

    def length(microbatches: int) -> float:
        group = training.microbatch_group_size
        order = training.schedule
        schedule = _order(order, stages, microbatches, layout.vpp, group, training.is_paired)
        return simulate(schedule, costs).length * _TICK

    least = repeated_after(training.schedule, stages, count) + count % stages
    if count <= least + stages:
        return length(count)
    start = length(least)
    return start + (count - least) / stages * (length(least + stages) - start)


#: Choices of a search share few schedules, which are slow to build.
_order = lru_cache(_REMEMBERED)(build_order)


@lru_cache(_REMEMBERED)
def speeds_of(cluster: Cluster) -> ChipSpeeds:
    """Return the measured speeds of a cluster's GPUs."""
    if cluster.speeds is not None:
        return ChipSpeeds.read(cluster.speeds, cluster.network)
    return ChipSpeeds.of_package(cluster.gpu, cluster.network)


def with_transport(
    config: GPTConfig, layout: ParallelLayout, training: TrainingShape, gpus_per_node: int
) -> TrainingShape:
    """Return the settings with the transport of tokens between nodes, if "auto" shall choose it.

    GPUs of other nodes have no peer access, which traces of a rank cannot know.
    """
    experts = config.experts
    chooses = training.expert_transport == "auto" and not training.clone_places
    if experts is None or not chooses or not links_of(layout, gpus_per_node)["ep"].crosses_nodes:
        return training
    graphs = training.cuda_graphs
    is_static = graphs is not None and graphs.holds_transport
    needs_static = is_static or training.expert_rows is not None
    chosen = collective_over_ep(experts.top_k, layout.ep, needs_static)
    return replace(training, expert_transport=chosen)


def links_of(layout: ParallelLayout, gpus_per_node: int) -> dict[str, Link]:
    """Return the groups of the first rank by axis; ranks are numbered node by node."""
    links = {}
    for axis, ranks in groups_of_rank(layout, layout.rank_offset).items():
        node = ranks[0] // gpus_per_node
        links[axis] = Link(len(ranks), sum(rank // gpus_per_node == node for rank in ranks))
    return links


@dataclass(frozen=True)
class _VirtualStages:
    """Times of each virtual stage, and what a microbatch sends from one to the next (bytes)."""

    times: tuple[Times, ...]
    boundary: int

    def by_stage(self, layout: ParallelLayout) -> tuple[tuple[Times, ...], ...]:
        return layout.placement.by_stage(self.times)


def _virtual_stages(
    config: GPTConfig,
    layout: ParallelLayout,
    training: TrainingShape,
    chip: LinkedChip,
) -> _VirtualStages:
    """Add up the layers of every virtual stage, of which one of each kind is traced."""
    costs = config.memory_shape().costs(training.loss_chunk, layout.tp)
    chunks = partition_of(costs, layout).ranges
    kinds = kinds_of_layers(config, training, chunks)
    splits = order_may_split(training.schedule) and layout.pp > 1

    def trace(kind: LayerKind, stage: int, *counts: int) -> StageTrace:
        has_experts = config.has_experts_in(kind.layer)
        return trace_stage(
            with_layers(config, [kind.layer] * sum(counts)),
            smallest_layout(layout, counts, has_experts=has_experts),
            only_training(training, kind, splits),
            stage,
            chip.speeds.kind,
        )

    def of(kind: LayerKind, stage: int, *counts: int) -> Times:
        return chip.times_of_stage(trace(kind, stage, *counts))

    layers: dict[LayerKind, Times] = {}
    for kind in dict.fromkeys(chain.from_iterable(kinds)):
        layers[kind] = of(kind, 1, 1, 1, 1)
    totals = []
    for chunk in kinds:
        totals.append([(1, layers[kind]) for kind in chunk])
    some = kinds[0][0] if kinds[0] else kinds[1][0]
    plain = LayerKind(some.layer, in_eight_bits=False, recomputed=())
    if layout.pp > 1:
        totals[0].append((1, of(plain, 0, 0, 1, 1)))
        totals[-1].append((1, of(plain, 2, 1, 1, 0)))
    else:
        # Embedding and head may share their weights.
        totals[0] += [(1, of(plain, 0, 1)), (-1, of(plain, 1, 1, 1, 1))]
    return _VirtualStages(tuple(map(combined, totals)), trace(some, 1, 1, 1, 1).boundary)


def _first_microbatch(times: Times) -> float:
    """Return how much longer the passes of a step's first microbatch take."""
    return sum(times.get(f"first {name}", 0.0) - times.get(name, 0.0) for name in PASSES)
