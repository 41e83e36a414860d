"""A stage of a GPT on one rank without the others, as training prepares it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from unittest.mock import patch

import torch
from torch import Tensor
from torch.optim import AdamW

from lightning_megatron.experts.transport.row_limit import LayerRows, RowLimit
from lightning_megatron.groups.lone_mesh import lone_mesh
from lightning_megatron.half_types import default_dtype
from lightning_megatron.layers.fp8.scaling import Scaling
from lightning_megatron.memory.pretended_device import PretendedDevice
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.fp8_layers import set_fp8, weights_in_eight_bits
from lightning_megatron.models.gpt import GPT
from lightning_megatron.models.layered import neighbours_in
from lightning_megatron.optimizer.main_parameters import MainParameters
from lightning_megatron.optimizer.reduction import GradientReducer
from lightning_megatron.optimizer.sharding import DistributedOptimizerConfig
from lightning_megatron.plan.budget import TrainingShape
from lightning_megatron.plan.custom_schedule import build_order
from lightning_megatron.plan.expert_clones import ExpertClones
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.plan.schedule import NAMED_SCHEDULES, Schedule

_DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}


@dataclass(frozen=True, eq=False)
class LoneStage:
    """Stage of a model on a pretended device, with its parameters in flat buffers.

    Args:
        device: Device, inside whose context the stage runs.
        main: Parameters, with the buffers of their gradients and main parameters.
        reducer: Owner of the gradient slots.
        limit: Limit on the rows of experts; None without one.
        tokens: Token ids of a microbatch, with those of all ranks of cp.
        schedule: Schedule of the steps.
    """

    device: PretendedDevice
    model: GPT
    limit: RowLimit | None
    main: MainParameters
    reducer: GradientReducer
    tokens: Tensor
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
        ranks = (layout.rank_offset + number for number in range(layout.world_size))
        mesh = lone_mesh(
            layout,
            next(rank for rank in ranks if layout.coordinates(rank)["pp"] == stage),
            device.device,
            sequence_parallel=training.sequence_parallel,
            loss_chunk=training.loss_chunk,
        )
        with device:
            with default_dtype(_DTYPES[training.activation_bytes]):
                model = GPT(config, mesh, seed=0)
            limit = _set_options(model, training, kind)
            if training.fp8 is not None:
                set_fp8(model, training.fp8, training.fp8.emulate, device.device)
            main = put_into_buffers(model, training)
            reducer = GradientReducer(main)
            reducer.watch(main.buffers)
            shape = training.microbatch_size, training.seq_length
            tokens = torch.empty(shape, dtype=torch.int64)
        device.leave_out([tokens, *model.buffers()])
        for buffer in main.buffers:
            parts = buffer.parameters, buffer.gradients, buffer.main_parameters
            device.leave_out([part for part in parts if part is not None])
        # Later microbatches repeat what the first ones of a pipeline do, unless all are kept.
        named = NAMED_SCHEDULES.get(str(training.schedule))
        repeats = named is not None and not named.keeps_all
        most = 4 * layout.pp if repeats else training.num_microbatches
        schedule = build_order(
            training.schedule,
            layout.pp,
            min(training.num_microbatches, most),
            layout.vpp,
            training.microbatch_group_size,
        )
        return cls(device, model, limit, main, reducer, tokens, schedule)

    @contextmanager
    def batch(self, shares_casts: bool) -> Iterator[None]:
        """Run the microbatches of a batch inside the block, which may share 8-bit weights."""
        casts = self.model.weight_casts
        with self.device, ExitStack() as stack:
            if self.limit is not None:
                stack.enter_context(self.limit.limit_rows())
            if casts is not None and shares_casts:
                stack.enter_context(casts.shared())
            yield


def _set_options(model: GPT, training: TrainingShape, kind: str) -> RowLimit | None:
    """Set the options of a run; return its limit on the rows of experts."""
    model.compares_counts = False
    model.recompute = training.recompute
    model.loss_chunk = training.loss_chunk
    mesh = model.mesh
    limit = None if training.expert_rows is None else RowLimit(training.expert_rows, mesh)
    clones = ExpertClones(training.clone_places) if training.clone_places else None
    for number, layer in model.mixtures.items():
        layer.transport = training.expert_transport
        layer.clones = None if clones is None else clones.on(kind)
        layer.row_limit = None if limit is None else LayerRows(limit, number, mesh.ep.size)
    return limit


def put_into_buffers(model: GPT, training: TrainingShape) -> MainParameters:
    """Put the parameters into flat buffers, as an elementwise optimizer would train them."""
    division = DistributedOptimizerConfig(
        main_dtype=_DTYPES[training.main_bytes] if training.main_bytes else None,
        # Frozen parameters have no gradients, but their layers are traced like those of others.
        gradient_dtype=_DTYPES[training.gradient_bytes or training.parameter_bytes],
        zero=training.zero,
    )
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    in_eight_bits = weights_in_eight_bits(model)
    stacks = neighbours_in(model, names)
    main = MainParameters(
        dict(model.named_parameters()),
        model.mesh,
        division,
        model.chunk_of,
        stacks,
        in_eight_bits,
    )
    main.ties = []
    optimizer = AdamW(model.parameters())
    granularity = "elements" if training.zero else "model"
    with patch.object(main.planner, "granularity_for", lambda _: granularity):
        main.attach(optimizer)
    for weights, linear in in_eight_bits.items():
        if isinstance(linear.scaling, Scaling):
            linear.scaling = linear.scaling.reading(main.stored_weight(weights))
    return main
