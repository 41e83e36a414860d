"""Estimate of the memory of a run's stages, and the static memory that it holds."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from lightning_megatron.errors import ParallelPlanError, UnsupportedError
from lightning_megatron.groups.collectives import all_gather_objects
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.memory.estimate import estimate_module, estimate_stage
from lightning_megatron.memory.lone_stage import ModulePlans
from lightning_megatron.memory.module_copy import batch_on_host, copy_without_elements
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.gpt import GPT
from lightning_megatron.models.stage import pipelined_modules
from lightning_megatron.nest import leaves
from lightning_megatron.pipeline.microbatch import count_samples, count_tokens, split_batch
from lightning_megatron.plan.budget import StageMemory, TrainingShape
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


@dataclass(frozen=True, eq=False)
class TracedModule:
    """Module without elements as it was before it was sharded, with a microbatch on the host.

    Args:
        plans: How the run shards the module.
    """

    module: nn.Module
    microbatch: Any
    plans: ModulePlans


@dataclass(frozen=True)
class MemoryCase:
    """What the estimate of a run's memory depends on; changed fields give that of other options.

    Args:
        model: Configuration of a GPT that is all of the run's module and trained as a whole; of
            others the module, whose own step is traced.
        layout: Sizes of the axes, of a GPT with the number of layers of each stage.
        training: Settings of the step.
        kind: Kind of the device, "cuda" or "cpu".
    """

    model: GPTConfig | TracedModule
    layout: ParallelLayout
    training: TrainingShape
    kind: str

    @classmethod
    def of(
        cls,
        run: Run,
        model: GPT,
        optimizers: Sequence[Optimizer],
        num_samples: int,
        seq_length: int,
        input_bytes: int = TrainingShape.input_bytes,
    ) -> MemoryCase:
        """Return the case of a run whose module is a GPT.

        Args:
            num_samples: Samples of a batch of this data-parallel rank (samples).
            seq_length: Tokens of a sample (tokens).
            input_bytes: Size of a batch for each token (bytes).
        """
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
        layout = replace(run.mesh.layout, stage_layers=model.partition.counts)
        return cls(model.config, layout, training, run.mesh.device.type)

    @classmethod
    def of_batch(cls, run: Run, optimizers: Sequence[Optimizer], batch: Any) -> MemoryCase:
        """Return the case of a run with a batch of this data-parallel rank.

        Raises:
            UnsupportedError: If the run cannot be traced.
        """
        num_tokens = count_tokens(batch)
        num_bytes = sum(leaf.nbytes for _, leaf in leaves(batch) if isinstance(leaf, Tensor))
        model = _gpt_of(run)
        if model is not None and num_tokens:
            num_samples = count_samples(batch)
            length = num_tokens // num_samples
            return cls.of(run, model, optimizers, num_samples, length, num_bytes // num_tokens)
        twin = run.twin
        if isinstance(twin, UnsupportedError):
            raise twin
        if twin is None or not num_bytes:
            raise UnsupportedError("no batch with tensors is known")
        options = run.options
        mesh = run.mesh
        rule = options.microbatches(mesh.layout)
        first, *others = split_batch(batch, None if rule.is_whole else rule.size_for)
        training = replace(
            training_shape(run, optimizers),
            microbatch_size=first.num_samples,
            num_microbatches=1 + len(others),
            recompute=options.recompute or "none",
            input_bytes=num_bytes // num_tokens if num_tokens else 0,
        )
        plans = ModulePlans(options.tensor_parallel_plan, options.pipeline_plan, mesh)
        traced = TracedModule(twin, batch_on_host(first.data), plans)
        return cls(traced, mesh.layout, training, mesh.device.type)

    def estimate(self, *stages: int) -> tuple[StageMemory, ...]:
        """Return the estimate of some stages, or of all of them."""
        model = self.model
        if isinstance(model, GPTConfig):
            return tuple(
                estimate_stage(model, self.layout, self.training, stage, self.kind)
                for stage in stages or range(self.layout.pp)
            )
        # The step of the user may draw numbers, which the training must draw again.
        with isolate_rng():
            return estimate_module(
                model.module,
                model.microbatch,
                self.layout,
                self.training,
                self.kind,
                model.plans,
                stages,
            )


def twin_before_sharding(
    module: LightningModule, mesh: ParallelMesh
) -> nn.Module | UnsupportedError | None:
    """Return a copy of a module without elements, or the error if it cannot be copied.

    A module that is nothing but a GPT needs none: its configuration says all.
    """
    if _gpt_alone(module, module.parameters()):
        return None
    shared = {id(one): one for one in (mesh, module.trainer)}
    try:
        return copy_without_elements(module, shared)
    except UnsupportedError as error:
        return error


def estimate_of(run: Run, optimizers: Sequence[Optimizer], batch: Any) -> tuple[StageMemory, str]:
    """Estimate the memory of this rank's stage; if that is impossible, its static parts.

    Args:
        optimizers: Optimizers of the run.
        batch: A batch of this data-parallel rank; None if it is not known.

    Returns:
        Estimate; why it has static parts alone, or nothing
    """
    try:
        case = MemoryCase.of_batch(run, optimizers, batch)
        return case.estimate(run.mesh.pp.rank)[0], ""
    except (ParallelPlanError, UnsupportedError) as error:
        return _static_of(run, optimizers), str(error)


def estimate_before_batches(
    run: Run, optimizers: Sequence[Optimizer], batch_size: int | None, seq_length: int | None
) -> tuple[tuple[StageMemory, ...], str, bool]:
    """Estimate the memory of all stages before the first batch.

    Of a GPT only the first rank has a result, and nobody if its log is hidden; of other modules the
    estimate has static parts.

    Args:
        batch_size: Samples of a batch of this rank, as its loader says; None if that is unknown.
        seq_length: Tokens of a sample; None takes the longest of the model, up to 4,096 (tokens).

    Returns:
        Estimates; microbatches that they are for, or why there are none; whether this rank calls
        :func:`estimate_with_batch`

    Communication: for other modules than a GPT one gather over the pipeline, on the CPU.
    """
    is_shown = run.mesh.world.rank == 0 and _SHOWN_BY.isEnabledFor(logging.INFO)
    model = _gpt_of(run)
    if model is None:
        found = all_gather_objects((_static_of(run, optimizers), is_shown), run.mesh.pp_cpu)
        text = "a step is estimated with its first batch"
        return tuple(static for static, _ in found), text, found[0][1]
    if not is_shown:
        return (), "", False
    size = run.options.microbatch_size
    samples = batch_size or (size if isinstance(size, int) else 1)
    case = MemoryCase.of(run, model, optimizers, samples, seq_length or COUNTED_LENGTH)
    step = case.training
    microbatches = f"{step.microbatch_size} x {step.seq_length:,} tokens"
    try:
        return case.estimate(), f"{step.num_microbatches} microbatches of {microbatches}", False
    except (ParallelPlanError, UnsupportedError) as error:
        return (), str(error), False


def estimate_with_batch(
    run: Run, optimizers: Sequence[Optimizer], batch: Any
) -> tuple[tuple[StageMemory, ...], str]:
    """Estimate the memory of all stages with a batch, and say for which microbatches, or why not.

    Communication: one gather over the pipeline, on the CPU.
    """
    found = all_gather_objects(estimate_of(run, optimizers, batch), run.mesh.pp_cpu)
    for _, reason in found:
        if reason:
            return (), reason
    step = MemoryCase.of_batch(run, optimizers, batch).training
    text = f"{step.num_microbatches} microbatches of {step.microbatch_size} samples"
    return tuple(estimate for estimate, _ in found), text


def _static_of(run: Run, optimizers: Sequence[Optimizer]) -> StageMemory:
    """Return the static memory of this rank with the states that its optimizers will have."""
    main = run.state.main
    owned = sum(buffer.plan.shard_size for buffer in main.buffers)
    return StageMemory(
        stage=run.mesh.pp.rank,
        moment="",
        in_flight=0,
        num_parameters=sum(main.parameter(name).numel() for name in main.names),
        **main.memory(),
        optimizer=owned * _state_bytes(run, optimizers),
    )


def _gpt_of(run: Run) -> GPT | None:
    main = run.state.main
    return _gpt_alone(run.module, map(main.parameter, main.names))


def _gpt_alone(module: nn.Module, parameters: Iterable[nn.Parameter]) -> GPT | None:
    """Return the GPT that has all parameters of a module, which are trained; None for others."""
    models = [model for _, model in pipelined_modules(module)]
    if len(models) != 1 or not isinstance(models[0], GPT):
        return None
    own = set(map(id, models[0].parameters()))
    is_all = all(one.requires_grad and id(one) in own for one in parameters)
    return models[0] if is_all else None


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
        is_paired=options.experts.overlap,
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
