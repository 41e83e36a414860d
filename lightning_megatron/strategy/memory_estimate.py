"""Estimate of the memory of a run's stages, and the static memory that it holds."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from lightning_megatron.errors import ParallelPlanError, UnsupportedError
from lightning_megatron.groups.collectives import all_gather_objects
from lightning_megatron.memory.estimate import estimate_memory, estimate_stage
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.gpt import GPT
from lightning_megatron.models.stage import pipelined_modules
from lightning_megatron.nest import leaves
from lightning_megatron.pipeline.microbatch import count_samples, count_tokens
from lightning_megatron.plan.budget import StageMemory, TrainingShape, static_bytes
from lightning_megatron.plan.cuda_graphs import CudaGraphs
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.plan.model_shape import COUNTED_LENGTH
from lightning_megatron.strategy.optimization.precision import MegatronPrecision
from lightning_megatron.strategy.options.strategy_options import StrategyOptions
from lightning_megatron.strategy.run import Run

#: Size of a cuBLAS workspace on Hopper; the thread of the forward pass has a workspace, and so has
#: that of the backward pass (bytes).
_WORKSPACE_HOPPER = 32 * 2**20
#: The same before Hopper (bytes).
_WORKSPACE_BEFORE_HOPPER = 8 * 2**20 + 128 * 2**10
#: Logger of the table of a fit, for which alone a fit traces its memory.
_SHOWN_BY = logging.getLogger(rank_zero.__name__)

#: Tensors of a parameter's size in the states of Adam and AdamW.
_COPIES_OF_ADAM = 2
#: Parts of the memory that a training holds from step to step.
STATIC_PARTS = ("parameters", "gradients", "main_parameters", "optimizer")


def graph_settings(run: Run) -> CudaGraphs | None:
    """Return the settings of the graphs of a run; None if it runs eagerly."""
    return None if run.graphs is None or run.graphs.is_off else run.options.graphs


def held_bytes(run: Run, optimizers: Sequence[Optimizer]) -> dict[str, int]:
    """Return the static memory of this rank, by part (bytes)."""
    states = [
        value
        for optimizer in optimizers
        for state in optimizer.state.values()
        for value in state.values()
    ]
    return run.state.main.memory() | {
        "optimizer": sum(value.nbytes for value in states if isinstance(value, Tensor))
    }


@dataclass(frozen=True)
class MemoryCase:
    """What the estimate of a run's memory depends on; changed fields give that of other options.

    Args:
        model: Configuration of the run's only GPT.
        layout: Sizes of the axes, with the number of layers of each stage.
        training: Settings of the step.
        kind: Kind of the device, "cuda" or "cpu".
    """

    model: GPTConfig
    layout: ParallelLayout
    training: TrainingShape
    kind: str

    @classmethod
    def of(
        cls,
        run: Run,
        optimizers: Sequence[Optimizer],
        num_samples: int,
        seq_length: int,
        input_bytes: int = TrainingShape.input_bytes,
    ) -> MemoryCase | None:
        """Return the case of a run; None without a single GPT.

        Args:
            num_samples: Samples of a batch of this data-parallel rank (samples).
            seq_length: Tokens of a sample (tokens).
            input_bytes: Size of a batch for each token (bytes).
        """
        models = _models_of(run)
        if len(models) != 1:
            return None
        model = models[0]
        rule = run.options.microbatches(run.mesh.layout)
        # Rows may have a token more than the model reads, such as the last label.
        shards = run.mesh.layout.cp * run.mesh.layout.tp
        length = min(seq_length, model.config.max_seq_length)
        length = max(shards, length - length % shards)
        training = replace(
            training_shape(run, optimizers),
            seq_length=length,
            microbatch_size=min(rule.size_for(num_samples), num_samples),
            num_microbatches=rule.count_for(num_samples),
            recompute=model.recompute,
            loss_chunk=model.loss_chunk,
            input_bytes=input_bytes,
        )
        if _is_mostly_frozen(model):
            # Of adapters, what they keep besides is left out.
            training = replace(training, gradient_bytes=0, main_bytes=0, state_bytes=0)
        layout = replace(run.mesh.layout, stage_layers=model.partition.counts)
        return cls(model.config, layout, training, run.mesh.device.type)

    @classmethod
    def of_batch(cls, run: Run, optimizers: Sequence[Optimizer], batch: Any) -> MemoryCase | None:
        """Return the case of a run with a batch; None without tokens in it or a single GPT."""
        num_tokens = count_tokens(batch)
        if not num_tokens:
            return None
        num_samples = count_samples(batch)
        num_bytes = sum(leaf.nbytes for _, leaf in leaves(batch) if isinstance(leaf, Tensor))
        return cls.of(
            run, optimizers, num_samples, num_tokens // num_samples, num_bytes // num_tokens
        )

    def estimate(self) -> tuple[StageMemory, ...]:
        """Return the estimate of each stage."""
        return estimate_memory(self.model, self.layout, self.training, self.kind)


def estimate_of(run: Run, optimizers: Sequence[Optimizer], batch: Any) -> StageMemory:
    """Estimate the memory of this rank's stage; of modules without a GPT, only the static parts.

    Args:
        optimizers: Optimizers of the run.
        batch: A batch of this data-parallel rank; None if it is not known.
    """
    stage = run.mesh.pp.rank
    case = MemoryCase.of_batch(run, optimizers, batch)
    if case is not None:
        with suppress(ParallelPlanError, UnsupportedError):
            traced = estimate_stage(case.model, case.layout, case.training, stage, case.kind)
            return _with_static(run, optimizers, traced)
    main = run.state.main
    training = training_shape(run, optimizers)
    counts = {run.mesh.data.size: 0, run.mesh.edp.size: 0}
    for name in main.names:
        axis = run.mesh.edp if main.spec(name).is_expert else run.mesh.data
        counts[axis.size] += main.parameter(name).numel()
    stored = sum(
        weight.numel() for buffer in main.eight_bit_buffers for weight in buffer.members.values()
    )
    parts = [
        static_bytes(count, size, training, stored if size == run.mesh.data.size else 0)
        for size, count in counts.items()
    ]
    static = {part: sum(map(itemgetter(part), parts)) for part in STATIC_PARTS}
    return StageMemory(
        stage=stage, moment="", in_flight=0, num_parameters=sum(counts.values()), **static
    )


def estimate_before_batches(
    run: Run, optimizers: Sequence[Optimizer], batch_size: int | None, seq_length: int | None
) -> tuple[tuple[StageMemory, ...], str]:
    """Estimate the memory of all stages before the first batch, and say for which microbatches.

    Of a GPT only the first rank has a result, and nobody if its log is hidden. Without an estimate
    the text says why.

    Args:
        batch_size: Samples of a batch of this rank, as its loader says; None if that is unknown.
        seq_length: Tokens of a sample; None takes the longest of the model, up to 4,096 (tokens).

    Communication: one gather over the pipeline, on the CPU.
    """
    models = _models_of(run)
    if models:
        held = all_gather_objects(_static_parts(run, optimizers), run.mesh.pp_cpu)
        if run.mesh.world.rank > 0 or not _SHOWN_BY.isEnabledFor(logging.INFO):
            return (), ""
        size = run.options.microbatch_size
        samples = batch_size or (size if isinstance(size, int) else 1)
        case = MemoryCase.of(run, optimizers, samples, seq_length or COUNTED_LENGTH)
        if case is None:
            return (), "the memory of several models is not estimated"
        step = case.training
        microbatches = f"{step.microbatch_size} x {step.seq_length:,} tokens"
        try:
            stages = [replace(e, **parts) for e, parts in zip(case.estimate(), held, strict=True)]
            return tuple(stages), f"{step.num_microbatches} microbatches of {microbatches}"
        except (ParallelPlanError, UnsupportedError) as error:
            return (), str(error)
    stages = all_gather_objects(estimate_of(run, optimizers, None), run.mesh.pp_cpu)
    return tuple(stages), "activations are known for a GPT alone"


def _is_mostly_frozen(model: GPT) -> bool:
    trained = sum(one.numel() for one in model.parameters() if one.requires_grad)
    return 2 * trained < sum(one.numel() for one in model.parameters())


def _static_parts(run: Run, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """Return the static memory of this rank with the states that its optimizers will have."""
    main = run.state.main
    owned = sum(buffer.plan.shard_size for buffer in main.buffers)
    return main.memory() | {"optimizer": owned * _state_bytes(run, optimizers)}


def _with_static(run: Run, optimizers: Sequence[Optimizer], estimate: StageMemory) -> StageMemory:
    """Return an estimate for all parameters with the static memory of those that are trained."""
    main = run.state.main
    if all(main.parameter(name).requires_grad for name in main.names):
        return estimate
    return replace(estimate, **_static_parts(run, optimizers))


def _models_of(run: Run) -> list[GPT]:
    return [model for _, model in pipelined_modules(run.module) if isinstance(model, GPT)]


def training_shape(run: Run, optimizers: Sequence[Optimizer]) -> TrainingShape:
    """Return the dtypes and options of a run as a training shape, with step sizes of 1."""
    device = run.mesh.device
    shape = shape_before_run(run.options, run.precision, device.type)
    main = shape.main_bytes or shape.parameter_bytes
    # Optimizers without the fused kernel take copies of sums in bfloat16.
    takes_copies = shape.gradient_bytes != main and not all(map(_is_fused, optimizers))
    of_step = main * ((not all(map(_is_in_place, optimizers))) + takes_copies)
    return replace(
        shape,
        sequence_parallel=run.mesh.sequence_parallel,
        expert_transport=run.layers.transport,
        expert_rows=run.layers.expert_rows,
        clone_places=run.layers.clone_places,
        state_bytes=_state_bytes(run, optimizers),
        step_bytes=of_step if device.type == "cuda" else 0,
        library_bytes=_library_bytes(device),
        cuda_graphs=graph_settings(run),
    )


def shape_before_run(
    options: StrategyOptions, precision: MegatronPrecision, kind: str
) -> TrainingShape:
    """Return dtypes and options as a training shape with step sizes of 1, for a fused AdamW.

    Args:
        kind: Kind of the device, "cuda" (Hopper) or "cpu".
    """
    dtypes = precision.dtypes
    main_parameters = dtypes.main_parameters or dtypes.parameters
    gradients = (
        torch.bfloat16
        if dtypes.main_parameters and options.optimizer.gradient_dtype == "bfloat16"
        else main_parameters
    )
    moments = torch.bfloat16 if options.optimizer.moments_dtype == "bfloat16" else main_parameters
    main_bytes = main_parameters.itemsize if dtypes.main_parameters else 0
    places = 0 if options.clones is None else options.clones.places
    libraries = 2 * _WORKSPACE_HOPPER if kind == "cuda" else 0
    fp8 = options.products if options.linear.backend_of("products") == "native" else None
    return TrainingShape(
        seq_length=1,
        schedule=options.pass_order,
        microbatch_group_size=options.pipeline.microbatch_group_size,
        sequence_parallel=options.shards_sequence,
        loss_chunk=options.loss_chunk,
        expert_transport=options.experts.transport,
        expert_rows=options.experts.rows,
        clone_places=places,
        zero=options.optimizer.zero,
        parameter_bytes=dtypes.parameters.itemsize,
        gradient_bytes=gradients.itemsize,
        main_bytes=main_bytes,
        state_bytes=_COPIES_OF_ADAM * moments.itemsize,
        activation_bytes=dtypes.parameters.itemsize,
        library_bytes=libraries,
        cuda_graphs=options.graphs,
        fp8=fp8,
    )


def _state_bytes(run: Run, optimizers: Sequence[Optimizer]) -> int:
    """Return the optimizer state of a parameter's element (bytes)."""
    dtypes = run.precision.dtypes
    is_half = run.options.optimizer.moments_dtype == "bfloat16"
    moments = torch.bfloat16 if is_half else dtypes.main_parameters or dtypes.parameters
    return max(map(state_copies, optimizers), default=0) * moments.itemsize


def state_copies(optimizer: Optimizer) -> int:
    """Return how many tensors of a main parameter's size an optimizer keeps for it.

    Returns:
        The known number for torch's optimizers; for others, the maximum over current states.
    """
    groups = optimizer.param_groups
    if isinstance(optimizer, (Adam, AdamW)):
        return 3 if any(group.get("amsgrad") for group in groups) else 2
    if isinstance(optimizer, SGD):
        return int(any(group.get("momentum") for group in groups))
    if isinstance(optimizer, Adagrad):
        return 1
    most = 0
    for parameter, state in optimizer.state.items():
        tensors = [value for value in state.values() if isinstance(value, Tensor)]
        copies = [tensor for tensor in tensors if tensor.shape == parameter.shape]
        most = max(most, len(copies) if parameter.ndim else 0)
    return most


def _is_in_place(optimizer: Optimizer) -> bool:
    # torch's foreach updates allocate temporaries as large as the parameters.
    return all(
        group.get("fused") or group.get("foreach") is False for group in optimizer.param_groups
    )


def _is_fused(optimizer: Optimizer) -> bool:
    return all(group.get("fused") for group in optimizer.param_groups)


def _library_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    return 2 * (
        _WORKSPACE_HOPPER
        if torch.cuda.get_device_capability(device) >= (9, 0)
        else _WORKSPACE_BEFORE_HOPPER
    )
