"""Estimate of the time of a training step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.forecast.cluster import Cluster
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.plan.budget import TrainingShape, check_shape
from lightning_megatron.plan.custom_schedule import build_order
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.plan.partition import partition_of
from lightning_megatron.plan.simulate import StageCosts, simulate

#: Length of a tick of the simulated schedule (s).
_TICK = 1e-6


@dataclass(frozen=True)
class StageTime:
    """Times of one microbatch in a stage, over all its chunks (s)."""

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
    """

    seconds: float
    stages: tuple[StageTime, ...]
    bubble: float
    optimizer: float
    tokens_per_second: float
    flops_per_second: float
    exposed: Mapping[str, float] = field(default_factory=dict)


def check_cluster(layout: ParallelLayout, cluster: Cluster) -> None:
    """Refuse a layout of another number of ranks than the cluster has GPUs."""
    if layout.world_size != cluster.num_gpus:
        raise ParallelPlanError(
            f"the layout must have a rank for each GPU: world_size is {layout.world_size}, "
            f"num_gpus {cluster.num_gpus}. Use equal numbers."
        )


def estimate_time(
    config: GPTConfig, layout: ParallelLayout, training: TrainingShape, cluster: Cluster
) -> StepTime:
    """Estimate the time of a training step; no GPU and no process group is needed.

    Args:
        config: Configuration of the model.
        layout: Sizes of the axes.
        training: Settings of the step.
        cluster: GPUs, and what connects them.

    Raises:
        ParallelPlanError: For sizes that do not fit together.
    """
    check_shape(layout, training)
    check_cluster(layout, cluster)
    costs = config.memory_shape().costs(training.loss_chunk, layout.tp)
    counts = partition_of(costs, layout).counts
    chip = cluster.chip
    if chip is None:
        raise ParallelPlanError(f"the speeds of the GPU {cluster.gpu!r} are not known.")
    tokens = training.seq_length * training.microbatch_size
    of_model = config.flops_per_token(training.seq_length) * tokens / layout.tp / layout.cp
    shares = costs.of_virtual_stages(counts)
    # Dense products reach two thirds of the published speed.
    thirds = [of_model * share / sum(shares) / (0.66 * chip.products) / 3 for share in shares]
    ticks = tuple(max(1, round(third / _TICK)) for third in thirds)
    schedule = build_order(
        training.schedule,
        layout.pp,
        training.num_microbatches,
        layout.vpp,
        training.microbatch_group_size,
    )
    timeline = simulate(schedule, StageCosts(ticks, ticks, ticks))
    seconds = timeline.length * _TICK
    tokens_of_gpu = tokens * training.num_microbatches / (layout.tp * layout.cp * layout.pp)
    speed = tokens_of_gpu / seconds
    return StepTime(
        seconds,
        tuple(StageTime(third, third, third) for third in thirds),
        timeline.bubble,
        0.0,
        speed,
        speed * config.flops_per_token(training.seq_length),
    )
