"""Estimate of the memory of every pipeline stage, from passes over tensors without elements."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from lightning_megatron.errors import ParallelPlanError, UnsupportedError
from lightning_megatron.memory.chunk_costs import ChunkTrace, StepPoint, moments
from lightning_megatron.memory.graph_pools import segment_bytes
from lightning_megatron.memory.lone_stage import LoneStage
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.plan.budget import StageMemory, TrainingShape, check_shape
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.plan.recomputation import Recomputation

#: Number of estimates that are remembered.
_REMEMBERED = 1024


def estimate_memory(
    config: GPTConfig, layout: ParallelLayout, training: TrainingShape, kind: str = "cuda"
) -> tuple[StageMemory, ...]:
    """Estimate the peak memory of every stage, including the optimizer state.

    One microbatch runs through the layers of a stage: the code that trains it, on tensors without
    elements, with the kernels of an H100 or H200. This needs no GPU, no process group and no
    memory. What the layers allocate and keep is counted, and the actions of the schedule add it up.
    Where the host reads numbers of rows, routing is assumed to be even.

    Args:
        config: Configuration of the model.
        layout: Sizes of the axes; the data ranks are dp x cp.
        training: Settings of the step.
        kind: Kind of the device, "cuda" or "cpu".

    Returns:
        One estimate for each stage, for its first rank.

    Raises:
        ParallelPlanError: For sizes that do not fit together.
        UnsupportedError: For CUDA graphs under a schedule that they do not support.
    """
    return tuple(
        estimate_stage(config, layout, training, stage, kind) for stage in range(layout.pp)
    )


def estimate_stage(
    config: GPTConfig,
    layout: ParallelLayout,
    training: TrainingShape,
    stage: int,
    kind: str = "cuda",
) -> StageMemory:
    """Estimate the memory of one stage, as :func:`estimate_memory` does."""
    check_shape(layout, training)
    # A mapping or a list cannot be remembered.
    training = replace(training, recompute=Recomputation.of(training.recompute))
    try:
        return _traced(config, layout, training, stage, kind)
    except (ParallelPlanError, UnsupportedError):
        raise
    except Exception as error:
        raise UnsupportedError(
            "the memory of this model cannot be estimated, because its code does not run on "
            f"tensors without elements: {type(error).__name__}: {error}. Measure it with "
            "MemoryReport in a short run."
        ) from error


@lru_cache(_REMEMBERED)
def _traced(
    config: GPTConfig, layout: ParallelLayout, training: TrainingShape, stage: int, kind: str
) -> StageMemory:
    lone = LoneStage.build(config, layout, training, stage, kind)
    device = lone.device
    actions = lone.schedule.actions(stage)
    with lone.batch(training.shares_casts):
        traces = [ChunkTrace(lone, chunk) for chunk in range(layout.vpp)]
        for trace in traces:
            trace.run()
        permanent = device.now
        chunks = [trace.run() for trace in traces]
        pools = 0
        if training.cuda_graphs is not None and training.cuda_graphs.mode == "segments":
            pools = segment_bytes(lone, training.cuda_graphs)
    owned = sum(buffer.plan.shard_size for buffer in lone.main.buffers)
    points = [
        *moments(actions, chunks),
        StepPoint("optimizer step", 0, 0, training.step_bytes * owned),
    ]
    worst = max(points, key=lambda point: point.kept + point.workspace)
    most_in_flight = max(point.in_flight for point in points)
    host_of_chunk = max(chunk.host for chunk in chunks)
    num_parameters = sum(parameter.numel() for parameter in lone.model.parameters())
    static = lone.main.memory()
    if training.gradient_bytes == 0:
        static["gradients"] = 0
    shape, dtype = lone.model.boundary(lone.tokens)
    # A stage receives one tensor while it sends another.
    transfers = 2 * shape.numel() * dtype.itemsize if layout.pp > 1 else 0
    if training.cuda_graphs is not None and training.cuda_graphs.mode == "full":
        # The one pool holds what an eager step needs, and all microbatches are copied.
        pools = max(point.kept + point.workspace for point in points[:-1]) + transfers
        num_tokens = training.num_microbatches * lone.tokens.numel()
        pools += num_tokens * training.input_bytes
    return StageMemory(
        stage=stage,
        moment=worst.name,
        in_flight=worst.in_flight,
        num_parameters=num_parameters,
        **static,
        optimizer=owned * training.state_bytes,
        activations=worst.kept,
        workspace=worst.workspace,
        communication=transfers if worst.name != "optimizer step" else 0,
        shared=permanent,
        libraries=training.library_bytes,
        graphs=pools,
        host=most_in_flight * host_of_chunk,
    )
