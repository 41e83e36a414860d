"""A stage of a model on one rank without the others, as training prepares it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from lightning_megatron.experts.transport.row_limit import LayerRows, RowLimit
from lightning_megatron.groups.lone_mesh import lone_mesh
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.half_types import default_dtype
from lightning_megatron.layers.fp8.scaling import Scaling
from lightning_megatron.memory.module_copy import (
    batch_on_host,
    batch_without_elements,
    copy_without_elements,
    step_of,
)
from lightning_megatron.memory.pretended_device import PretendedDevice
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.fp8_layers import set_fp8, weights_in_eight_bits
from lightning_megatron.models.gpt import GPT
from lightning_megatron.models.layered import (
    LayeredModule,
    join_frozen,
    layered_modules,
    neighbours_in,
)
from lightning_megatron.models.stage import PipelinedModule, pipelined_modules
from lightning_megatron.nest import leaves
from lightning_megatron.optimizer.main_parameters import MainParameters
from lightning_megatron.optimizer.reduction import GradientReducer
from lightning_megatron.optimizer.sharding import DistributedOptimizerConfig
from lightning_megatron.pipeline.microbatch import Microbatch, count_tokens, split_batch
from lightning_megatron.plan.budget import TrainingShape
from lightning_megatron.plan.custom_schedule import OrderOfPasses, build_order
from lightning_megatron.plan.expert_clones import ExpertClones
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.plan.recomputation import Recomputation
from lightning_megatron.plan.schedule import NAMED_SCHEDULES, Schedule
from lightning_megatron.swap import parallelize
from lightning_megatron.swap.decide.automatic import (
    automatic_pipeline_plan,
    automatic_tensor_plan,
)

_DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}


@dataclass(frozen=True)
class ModulePlans:
    """How a module of a user is cut, as options of ``MegatronStrategy``; None chooses.

    Args:
        tensors: ``tensor_parallel_plan``.
        stages: ``pipeline_plan``.
        mesh: Mesh of a run that the module refers to; None without one.
    """

    tensors: Mapping[str, str] | None = None
    stages: Mapping[str, str] | None = None
    mesh: ParallelMesh | None = None


@dataclass(frozen=True, eq=False)
class LoneStage:
    """Stage of a module on a pretended device, with its parameters in flat buffers.

    Args:
        device: Device, inside whose context the stage runs.
        mesh: Mesh of the rank.
        models: Models of this package inside of the module.
        pipelined: What is cut into stages; None if nothing is.
        limit: Limit on the rows of experts; None without one.
        main: Parameters, with the buffers of their gradients and main parameters.
        reducer: Owner of the gradient slots.
        step: Function from a microbatch to its loss.
        microbatch: Microbatch, with the tokens of all ranks of cp.
        schedule: Schedule of the steps.
    """

    device: PretendedDevice
    mesh: ParallelMesh
    models: Sequence[LayeredModule]
    pipelined: PipelinedModule | None
    limit: RowLimit | None
    main: MainParameters
    reducer: GradientReducer
    step: Callable[[Any], Tensor]
    microbatch: Microbatch
    schedule: Schedule

    @classmethod
    def build(
        cls,
        config: GPTConfig,
        layout: ParallelLayout,
        training: TrainingShape,
        stage: int,
        kind: str,
        make: Callable[[str, int, int], PretendedDevice] = PretendedDevice,
    ) -> LoneStage:
        """Build a pipeline stage of its first rank on the device that ``make`` returns.

        See ``estimate_memory``.
        """
        num_tokens = -(-training.seq_length // layout.cp) * training.microbatch_size
        experts = config.experts
        # Before they are sent, tokens are divided among the ranks of tp.
        own_rows = 0 if experts is None else num_tokens * experts.top_k // layout.tp
        device = make(kind, own_rows, layout.etp)
        mesh = _mesh_of_stage(layout, training, stage, device)
        with device:
            with default_dtype(_DTYPES[training.activation_bytes]):
                model = GPT(config, mesh, seed=0)
            shape = training.microbatch_size, training.seq_length
            tokens = torch.empty(shape, dtype=torch.int64)

        def step(tokens: Tensor) -> Tensor:
            return model(tokens, labels=tokens, sums=True) / tokens.numel()

        device.leave_out(model.buffers())
        microbatch = Microbatch(tokens, training.microbatch_size)
        return cls._prepare(device, mesh, model, training, step, microbatch)

    @classmethod
    def of_module(
        cls,
        source: nn.Module,
        batch: Any,
        layout: ParallelLayout,
        training: TrainingShape,
        stage: int,
        kind: str,
        plans: ModulePlans,
    ) -> LoneStage:
        """Shard a copy of a module for the first rank of a stage; see ``estimate_module``."""
        part = split_batch(batch_on_host(batch), training.microbatch_size)[0]
        experts = [model.config.experts for model in layered_modules(source)]
        tops = [one.top_k for one in experts if one is not None]
        num_tokens = -(-count_tokens(part.data) // layout.cp)
        own_rows = num_tokens * max(tops, default=0) // layout.tp
        device = PretendedDevice(kind, own_rows, layout.etp)
        mesh = _mesh_of_stage(layout, training, stage, device)
        with device:
            of_run = plans.mesh
            replaced = {} if of_run is None else {id(of_run): mesh}
            module = copy_without_elements(source, replaced, device.device)
            tensor_plan = plans.tensors
            if tensor_plan is None:
                tensor_plan = automatic_tensor_plan(module, mesh)
            stages = plans.stages
            if stages is None:
                stages = automatic_pipeline_plan(module, layout)
            if hasattr(module, "_device_mesh"):
                # Models of this package look for their groups in the LightningModule.
                vars(module)["_device_mesh"] = mesh
            with device.with_values():
                parallelize(module, mesh, tensor_plan, stages)
            dtype = _DTYPES[training.activation_bytes]
            if dtype is not torch.float32:
                module.to(dtype=dtype)
            module.to(device=device.device)
            join_frozen(layered_modules(module))
            converts = dtype is not torch.float32 and not layered_modules(module)
            converted = dtype if converts else None
            with device.on_host():
                data = batch_without_elements(part.data, converted, mesh.host_values)
        microbatch = Microbatch(data, part.num_samples)
        return cls._prepare(device, mesh, module, training, step_of(module), microbatch)

    @classmethod
    def _prepare(
        cls,
        device: PretendedDevice,
        mesh: ParallelMesh,
        module: nn.Module,
        training: TrainingShape,
        step: Callable[[Any], Tensor],
        microbatch: Microbatch,
    ) -> LoneStage:
        """Set the options of a run, and put the parameters into flat buffers."""
        models = layered_modules(module)
        pipelined = next((model for _, model in pipelined_modules(module)), None)
        layout = mesh.layout
        with device:
            limit = _set_options(models, mesh, training, device.device.type)
            if training.fp8 is not None:
                for model in models:
                    set_fp8(model, training.fp8, training.fp8.emulate, device.device)
            main = put_into_buffers(module, mesh, training)
            reducer = GradientReducer(main)
            reducer.watch(main.buffers)
        device.leave_out(leaf for _, leaf in leaves(microbatch.data) if isinstance(leaf, Tensor))
        device.leave_out(one for one in module.parameters() if not one.requires_grad)
        for buffer in main.buffers:
            parts = buffer.parameters, buffer.gradients, buffer.main_parameters
            device.leave_out([part for part in parts if part is not None])
        order = training.schedule
        schedule = build_order(
            order,
            layout.pp,
            repeated_after(order, layout.pp, training.num_microbatches),
            layout.vpp,
            training.microbatch_group_size,
            training.is_paired,
        )
        return cls(
            device, mesh, models, pipelined, limit, main, reducer, step, microbatch, schedule
        )

    @contextmanager
    def batch(self, shares_casts: bool) -> Iterator[None]:
        """Run the microbatches of a batch inside the block, which may share 8-bit weights."""
        with self.device, ExitStack() as stack:
            if self.limit is not None:
                stack.enter_context(self.limit.limit_rows())
            for model in self.models:
                if model.weight_casts is not None and shares_casts:
                    stack.enter_context(model.weight_casts.shared())
            yield


def repeated_after(order: OrderOfPasses, num_stages: int, num_microbatches: int) -> int:
    """Return a number of first microbatches that later ones of a step repeat: all if none do."""
    named = NAMED_SCHEDULES.get(str(order))
    repeats = named is not None and not named.keeps_all
    return min(num_microbatches, 4 * num_stages) if repeats else num_microbatches


def _mesh_of_stage(
    layout: ParallelLayout, training: TrainingShape, stage: int, device: PretendedDevice
) -> ParallelMesh:
    """Return the mesh of the first rank of a stage."""
    ranks = (layout.rank_offset + number for number in range(layout.world_size))
    return lone_mesh(
        layout,
        next(rank for rank in ranks if layout.coordinates(rank)["pp"] == stage),
        device.device,
        sequence_parallel=training.sequence_parallel,
        loss_chunk=training.loss_chunk,
    )


def _set_options(
    models: Sequence[LayeredModule], mesh: ParallelMesh, training: TrainingShape, kind: str
) -> RowLimit | None:
    """Set the options of a run; return its limit on the rows of experts."""
    limit = None if training.expert_rows is None else RowLimit(training.expert_rows, mesh)
    clones = ExpertClones(training.clone_places) if training.clone_places else None
    graphs = training.cuda_graphs
    for model in models:
        model.compares_counts = False
        if not Recomputation.of(training.recompute).is_off:
            model.recompute = training.recompute
        if isinstance(model, GPT) and training.loss_chunk is not None:
            model.loss_chunk = training.loss_chunk
        for number, layer in model.mixtures.items():
            layer.transport = training.expert_transport
            layer.needs_static = graphs is not None and graphs.holds_transport
            layer.clones = None if clones is None else clones.on(kind)
            layer.row_limit = None if limit is None else LayerRows(limit, number, mesh.ep.size)
    return limit


def put_into_buffers(
    module: nn.Module, mesh: ParallelMesh, training: TrainingShape
) -> MainParameters:
    """Put the parameters into flat buffers, as an elementwise optimizer would train them."""
    division = DistributedOptimizerConfig(
        main_dtype=_DTYPES[training.main_bytes] if training.main_bytes else None,
        # Frozen parameters have no gradients, but their layers are traced like those of others.
        gradient_dtype=_DTYPES[training.gradient_bytes or training.parameter_bytes],
        zero=training.zero,
    )
    parameters = dict(module.named_parameters())
    names = {id(parameter): name for name, parameter in parameters.items()}
    in_eight_bits = weights_in_eight_bits(module)
    main = MainParameters(
        parameters,
        mesh,
        division,
        partial(_chunk_of, module),
        neighbours_in(module, names),
        in_eight_bits,
    )
    main.ties = []
    optimizer = AdamW([one for one in parameters.values() if one.requires_grad])
    granularity = "elements" if training.zero else "model"
    with patch.object(main.planner, "granularity_for", lambda _: granularity):
        main.attach(optimizer)
    for weights, linear in in_eight_bits.items():
        if isinstance(linear.scaling, Scaling):
            linear.scaling = linear.scaling.reading(main.stored_weight(weights))
    return main


def _chunk_of(module: nn.Module, name: str) -> int | None:
    """Return the chunk of a parameter; None outside of what is cut."""
    for prefix, model in pipelined_modules(module):
        start = f"{prefix}." if prefix else ""
        if name.startswith(start):
            return model.chunk_of(name.removeprefix(start))
    return None
