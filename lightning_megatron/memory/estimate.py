"""Estimate of the memory of every pipeline stage, from passes over tensors without elements."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from traceback import walk_tb
from typing import Any

from torch import nn

from lightning_megatron.errors import ParallelPlanError, UnsupportedError
from lightning_megatron.memory.chunk_costs import ChunkTrace, memory_at_peak, moments
from lightning_megatron.memory.graph_pools import segment_bytes
from lightning_megatron.memory.lone_stage import LoneStage, ModulePlans
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.pipeline.microbatch import count_tokens
from lightning_megatron.plan.budget import StageMemory, TrainingShape, check_shape
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.plan.recomputation import Recomputation
from lightning_megatron.user_code import Line, runs_package, runs_torch

#: Number of estimates that are remembered.
_REMEMBERED = 1024
_MEASURED = "Measure it with MemoryReport in a short run."


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
    with naming_the_line("the memory of this model", _MEASURED):
        return _traced(config, layout, training, stage, kind)


def estimate_module(
    module: nn.Module,
    batch: Any,
    layout: ParallelLayout,
    training: TrainingShape,
    kind: str = "cuda",
    plans: ModulePlans | None = None,
    stages: Sequence[int] = (),
) -> tuple[StageMemory, ...]:
    """Estimate the peak memory of every stage of any module, as :func:`estimate_memory` does.

    A copy of the module without elements is sharded as ``fit`` shards it, and runs its own
    ``training_step`` with the backward pass of a microbatch. A module without one is called with
    the batch, and the loss is that of its output, or else the sum of what it returns.

    Args:
        module: Module as it is before a fit, such as a LightningModule; it does not change.
        batch: Batch of a data-parallel rank, of which a microbatch is the first part. Its values
            are not read, but for integers that the host reads in training, such as the positions of
            packed documents.
        layout: Sizes of the axes.
        training: Settings of the step; ``seq_length`` has no use, the batch has the tokens.
        kind: Kind of the device, "cuda" or "cpu".
        plans: How ``fit`` shards the module; None means without plans among its options.
        stages: Stages to estimate; empty means all.

    Returns:
        One estimate for each stage, for its first rank.

    Raises:
        ParallelPlanError: For sizes that do not fit together.
        UnsupportedError: If the module cannot be copied, or its code needs values of tensors, with
            the line.
    """
    training = replace(training, seq_length=layout.cp * layout.tp)
    check_shape(layout, training)
    name = type(module).__name__
    estimates = []
    for stage in stages or range(layout.pp):
        with naming_the_line(f"the memory of {name}", _MEASURED):
            lone = LoneStage.of_module(
                module, batch, layout, training, stage, kind, plans or ModulePlans()
            )
            estimates.append(_memory_of(lone, training, stage))
    return tuple(estimates)


@contextmanager
def naming_the_line(what: str, remedy: str) -> Iterator[None]:
    """Raise an error that names the line of the user's code at which a trace has failed."""
    try:
        yield
    except (ParallelPlanError, UnsupportedError):
        raise
    except Exception as error:
        frames = [frame for frame, _ in walk_tb(error.__traceback__)]
        own = [frame for frame in frames if not (runs_torch(frame) or runs_package(frame))]
        where = f" at {Line.of(own[-1])}" if own else ""
        raise UnsupportedError(
            f"{what} cannot be estimated, because its code does not run on tensors without "
            f"elements{where}: {type(error).__name__}: {error}. {remedy}"
        ) from error


@lru_cache(_REMEMBERED)
def _traced(
    config: GPTConfig, layout: ParallelLayout, training: TrainingShape, stage: int, kind: str
) -> StageMemory:
    return _memory_of(LoneStage.build(config, layout, training, stage, kind), training, stage)


def _memory_of(lone: LoneStage, training: TrainingShape, stage: int) -> StageMemory:
    graphs = training.cuda_graphs
    with lone.batch(training.shares_casts):
        traces = [ChunkTrace(lone, chunk) for chunk in range(lone.mesh.layout.vpp)]
        for trace in traces:
            trace.run()
        permanent = lone.device.now
        chunks = [trace.run() for trace in traces]
        pools = 0
        if graphs is not None and graphs.mode == "segments":
            pools = segment_bytes(lone, graphs)
    passes = [*moments(lone.schedule.actions(stage), chunks, training.is_paired)]
    # A stage receives tensors while it sends others.
    transfers = 2 * max(trace.crossing for trace in traces)
    if graphs is not None and graphs.mode == "full":
        # The one pool holds what an eager step needs, and all microbatches are copied.
        pools = max(point.size for point in passes) + transfers
        num_tokens = training.num_microbatches * count_tokens(lone.microbatch.data)
        pools += num_tokens * training.input_bytes
    main = lone.main
    owned = sum(buffer.plan.shard_size for buffer in main.buffers)
    static = main.memory() | {"optimizer": owned * training.state_bytes}
    if training.gradient_bytes == 0:
        static["gradients"] = 0
    return memory_at_peak(
        passes,
        training.step_bytes * owned,
        transfers,
        chunks,
        stage=stage,
        num_parameters=sum(main.parameter(name).numel() for name in main.names),
        **static,
        shared=permanent,
        libraries=training.library_bytes,
        graphs=pools,
    )
