"""Table of estimated and measured memory for every pipeline stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from typing_extensions import override

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.experts.compute.choose_backend import choose_backend
from lightning_megatron.graphs.cuda import private_pools
from lightning_megatron.groups.collectives import all_gather_objects
from lightning_megatron.layers.attention.choose_core import choose_core
from lightning_megatron.layers.context_parallel.attend_across import transport_of
from lightning_megatron.layers.fused.choose_kernels import fused_kernels
from lightning_megatron.models.gpt import GPT
from lightning_megatron.models.gpt_block import span_of_layer
from lightning_megatron.models.stage import pipelined_modules
from lightning_megatron.nest import leaves
from lightning_megatron.pipeline.microbatch import count_samples, count_tokens
from lightning_megatron.plan.budget import (
    GIB,
    StageMemory,
    TrainingShape,
    estimate_memory,
    static_bytes,
)
from lightning_megatron.plan.columns import align_columns
from lightning_megatron.plan.cuda_graphs import CudaGraphs
from lightning_megatron.plan.kept_activations import (
    KeptActivations,
    eager_activations,
    fused_activations,
)
from lightning_megatron.plan.settings import Count, coerced_arguments
from lightning_megatron.strategy.megatron_strategy import MegatronStrategy


def kept_activations_of(model: GPT) -> KeptActivations:
    """Return the activations that layers keep for the backward pass on the model's device.

    The result depends on the kernels that the device supports, since fused kernels keep fewer
    activations.

    Args:
        model: Model, already on its device.
    """
    parameter = next(model.parameters())
    make = fused_activations if fused_kernels(parameter) is not None else eager_activations
    config = model.config
    span = span_of_layer(config, 0)
    choice = choose_core(
        parameter.device,
        parameter.dtype,
        # The span over whole rows determines the kind of scores.
        replace(
            span,
            window=None,
            sinks=torch.zeros(config.num_heads) if config.attention_sinks else None,
        ),
        dropout=config.attention_dropout,
        head_dim=config.head_size,
        value_dim=config.value_size,
    )
    # Attention over parts of the keys keeps no scores, because its backward pass recomputes them.
    transport = transport_of(span, model.mesh, model.context)
    has_parts_of_keys = model.mesh.cp.size > 1 and transport != "all_to_all"
    return replace(
        make(config.memory_shape(), parameter.element_size()),
        expanded_copies=int(config.kv_heads < config.num_heads and choice.expand_kv),
        padded_values=choice.pads_values,
        stores_scores=choice.core == "operators" and not has_parts_of_keys,
        expert_gradients=int(_makes_expert_gradients(model)),
    )


def _makes_expert_gradients(model: GPT) -> bool:
    """Return whether the gradients of all experts exist at once before their accumulation."""
    for layer in model.mixtures.values():
        first, *rest = layer.experts.weights("down")
        kind = choose_backend(
            first.device, first.dtype, 1 + len(rest), first.shape[1], first.shape[0]
        )
        return kind.backend == "grouped_mm"
    return False


_STATIC = ("parameters", "gradients", "main_parameters", "optimizer")
_PER_STEP = ("activations", "loss", "workspace", "communication", "libraries", "casts")
#: Size of a cuBLAS workspace on Hopper; the thread of the forward pass has a workspace, and so has
#: that of the backward pass (bytes).
_WORKSPACE_HOPPER = 32 * 2**20
#: The same before Hopper (bytes).
_WORKSPACE_BEFORE_HOPPER = 8 * 2**20 + 128 * 2**10


@dataclass(frozen=True)
class StageReport:
    """Estimated and measured memory of one pipeline stage.

    Args:
        stage: Index on the pp axis.
        estimate: Estimate by part; static parts only if the module has no GPT.
        held: Maximum over ranks of measured static memory, by part: ``parameters``, ``gradients``,
            ``main_parameters`` (main parameters) and ``optimizer`` (bytes).
        peak: Maximum over ranks of the allocator's peak, pools of CUDA graphs included (bytes);
            None on CPU.
        graphs: Maximum over ranks of the pools of CUDA graphs (bytes); None without graphs or on
            CPU.
    """

    stage: int
    estimate: StageMemory
    held: dict[str, int]
    peak: int | None
    graphs: int | None = None

    @property
    def ratio(self) -> float | None:
        """Return the estimated peak over the measured one."""
        if self.peak is None or not self.estimate.activations:
            return None
        return self.estimate.peak / self.peak

    @property
    def bytes_per_parameter(self) -> float:
        """Return the static memory per parameter of the rank (bytes)."""
        return sum(self.held.values()) / self.estimate.num_parameters

    def table(self) -> str:
        """Format estimate and measurement as a table, in GiB or MiB."""
        estimate = self.estimate
        whole = self.estimate.activations > 0
        unit = "GiB" if max(estimate.peak, self.peak or 0) >= GIB else "MiB"
        scale = GIB if unit == "GiB" else 2**20

        def size(value: int | None) -> str:
            return "n/a" if value is None else f"{value / scale:.3f}"

        static = sum(self.held.values()) + (self.graphs or 0)
        running = None if self.peak is None else self.peak - static
        rows = [(f"stage {self.stage} ({unit} per rank)", "estimate", "held")]
        rows += [(name, size(getattr(estimate, name)), size(self.held[name])) for name in _STATIC]
        rows += [(name, size(getattr(estimate, name) if whole else None), "") for name in _PER_STEP]
        rows.append(
            (
                "  these together",
                size(estimate.peak - estimate.static - estimate.graphs if whole else None),
                size(running),
            )
        )
        if estimate.graphs or self.graphs:
            rows.append(
                ("CUDA graphs", size(estimate.graphs if whole else None), size(self.graphs))
            )
        rows.append(("peak", size(estimate.peak if whole else None), size(self.peak)))
        if estimate.host:
            rows.append(("pinned host memory", size(estimate.host), ""))
        rows.append(("estimate / held", f"{self.ratio:.3f}" if self.ratio else "n/a", ""))
        per_parameter = estimate.static / estimate.num_parameters
        rows.append(
            ("bytes per parameter", f"{per_parameter:.2f}", f"{self.bytes_per_parameter:.2f}")
        )
        peak = f"the peak is in {estimate.moment}, with {estimate.in_flight} microbatches in flight"
        return align_columns(rows) + (f"\n{peak}" if whole else "")


class MemoryReport(Callback):
    """Print estimated and measured memory of every stage after the first optimizer steps.

    The report measures parameters, gradients, main parameters and optimizer state. On GPUs it also
    measures the peak of torch's allocator, whose statistics it resets when training starts. The
    estimate comes from :func:`~lightning_megatron.plan.budget.estimate_memory`, and includes
    activations for modules with a :class:`GPT`.

    With CUDA graphs the report also waits for their eager steps. A row shows the memory of the
    graphs: the allocator uses their pools for nothing else, and keeps the memory of the eager
    steps. The measured peak is therefore the sum of the peak of eager training steps and the size
    of the pools.

    Args:
        after_steps: Optimizer steps before the report; the first creates optimizer state, and one
            captures graphs (steps).

    Raises:
        UnsupportedError: If the strategy is not a :class:`MegatronStrategy`.

    Communication: one gather of numbers over all ranks.
    """

    def __init__(self, after_steps: Count = 2) -> None:
        self.after_steps: int = coerced_arguments(MemoryReport.__init__, locals())["after_steps"]
        #: Printed reports by stage, on every rank.
        self.reports: tuple[StageReport, ...] = ()
        self._first_step = 0
        self._eager_peak: int | None = None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not isinstance(trainer.strategy, MegatronStrategy):
            raise UnsupportedError(
                "MemoryReport needs MegatronStrategy, whose memory it reports: the strategy is "
                f"{type(trainer.strategy).__name__}. Use strategy=MegatronStrategy(...), or leave "
                "the callback out."
            )

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._first_step = trainer.global_step
        self.reports = ()
        self._eager_peak = None
        if trainer.strategy.root_device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(trainer.strategy.root_device)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, MegatronStrategy), "setup has checked the strategy"
        settings = graph_settings(strategy)
        num_steps = self.after_steps + (0 if settings is None else settings.warmup_steps)
        if self.reports:
            return
        device = strategy.root_device
        graphs = strategy.run.graphs
        is_eager = graphs is None or not graphs.has_training_graphs
        if is_eager:
            self._eager_peak = peak_of(device)
        if trainer.global_step - self._first_step < num_steps:
            return
        pools = None
        if device.type == "cuda" and graphs is not None and graphs.num_graphs > 0:
            pools = sum(private_pools(device).values())
        held = held_bytes(strategy, trainer.optimizers)
        rank_report = StageReport(
            strategy.mesh.pp.rank,
            estimate_of(strategy, pl_module, trainer.optimizers, batch),
            held,
            None if self._eager_peak is None else self._eager_peak + (pools or 0),
            pools,
        )
        self.reports = merge_ranks(all_gather_objects(rank_report, strategy.mesh.world_cpu))
        for report in self.reports:
            pl_module.print(report.table())


def peak_of(device: torch.device) -> int | None:
    """Return the allocator's peak (bytes); None on CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def graph_settings(strategy: MegatronStrategy) -> CudaGraphs | None:
    """Return the settings of the graphs of a run; None if it runs eagerly."""
    graphs = strategy.run.graphs
    return None if graphs is None or graphs.is_off else strategy.options.graphs


def held_bytes(strategy: MegatronStrategy, optimizers: Sequence[Optimizer]) -> dict[str, int]:
    """Return the static memory of this rank, by part (bytes)."""
    states = [
        value
        for optimizer in optimizers
        for state in optimizer.state.values()
        for value in state.values()
    ]
    return strategy.run.state.main.memory() | {
        "optimizer": sum(value.nbytes for value in states if isinstance(value, Tensor))
    }


def estimate_of(
    strategy: MegatronStrategy, module: LightningModule, optimizers: Sequence[Optimizer], batch: Any
) -> StageMemory:
    """Estimate the memory of this rank's stage.

    Args:
        strategy: Strategy of the run.
        module: The user's module.
        optimizers: Optimizers of the run.
        batch: A batch of this data-parallel rank.
    """
    layout = strategy.layout
    stage = strategy.mesh.pp.rank
    training = training_shape(strategy, module, optimizers)
    models = [model for _, model in pipelined_modules(module) if isinstance(model, GPT)]
    num_tokens = count_tokens(batch)
    if len(models) == 1 and num_tokens:
        model = models[0]
        num_samples = count_samples(batch)
        rule = strategy.options.microbatches(layout)
        num_bytes = sum(leaf.nbytes for _, leaf in leaves(batch) if isinstance(leaf, Tensor))
        training = replace(
            training,
            seq_length=num_tokens // num_samples,
            microbatch_size=min(rule.size_for(num_samples), num_samples),
            num_microbatches=rule.count_for(num_samples),
            recompute=model.recompute,
            loss_chunk=model.loss_chunk,
            input_bytes=num_bytes // num_tokens,
        )
        estimates = estimate_memory(
            model.config.memory_shape(),
            replace(layout, stage_layers=model.partition.counts),
            training,
            table=kept_activations_of(model),
        )
        return estimates[stage]
    main = strategy.run.state.main
    counts = {strategy.mesh.data.size: 0, strategy.mesh.edp.size: 0}
    for name in main.names:
        axis = strategy.mesh.edp if main.spec(name).is_expert else strategy.mesh.data
        counts[axis.size] += main.parameter(name).numel()
    stored = sum(
        weight.numel() for buffer in main.eight_bit_buffers for weight in buffer.members.values()
    )
    parts = [
        static_bytes(count, size, training, stored if size == strategy.mesh.data.size else 0)
        for size, count in counts.items()
    ]
    static = {part: sum(map(itemgetter(part), parts)) for part in _STATIC}
    return StageMemory(
        stage=stage, moment="", in_flight=0, num_parameters=sum(counts.values()), **static
    )


def training_shape(
    strategy: MegatronStrategy, module: LightningModule, optimizers: Sequence[Optimizer]
) -> TrainingShape:
    """Return the dtypes and options of a run as a training shape, with step sizes of 1."""
    options = strategy.options
    dtypes = strategy.precision_plugin.dtypes
    main_parameters = dtypes.main_parameters or dtypes.parameters
    gradients = (
        torch.bfloat16
        if dtypes.main_parameters and options.optimizer.gradient_dtype == "bfloat16"
        else main_parameters
    )
    moments = torch.bfloat16 if options.optimizer.moments_dtype == "bfloat16" else main_parameters
    device = strategy.root_device
    main_bytes = main_parameters.itemsize if dtypes.main_parameters else 0
    fp8 = options.products if options.linear.backend == "native" else None
    return TrainingShape(
        seq_length=1,
        schedule=options.pass_order,
        microbatch_group_size=options.pipeline.microbatch_group_size,
        sequence_parallel=strategy.mesh.sequence_parallel,
        expert_transport=strategy.run.layers.transport,
        expert_rows=strategy.run.layers.expert_rows,
        clone_places=strategy.run.layers.clone_places,
        zero=options.optimizer.zero,
        parameter_bytes=dtypes.parameters.itemsize,
        gradient_bytes=gradients.itemsize,
        main_bytes=main_bytes,
        state_bytes=max((state_copies(optimizer) for optimizer in optimizers), default=0)
        * moments.itemsize,
        activation_bytes=dtypes.parameters.itemsize,
        step_bytes=0
        if device.type != "cuda" or all(map(_is_in_place, optimizers))
        else main_parameters.itemsize,
        library_bytes=_library_bytes(device),
        cuda_graphs=graph_settings(strategy),
        fp8=fp8,
    )


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


def merge_ranks(reports: Sequence[StageReport]) -> tuple[StageReport, ...]:
    """Merge the reports of all ranks by stage, with the maximum over ranks for each part."""
    stages: dict[int, StageReport] = {}
    for report in reports:
        before = stages.setdefault(report.stage, report)
        stages[report.stage] = replace(
            before,
            held={name: max(size, before.held[name]) for name, size in report.held.items()},
            peak=_largest(before.peak, report.peak),
            graphs=_largest(before.graphs, report.graphs),
        )
    return tuple(stages[stage] for stage in sorted(stages))


def _largest(*sizes: int | None) -> int | None:
    return max((size for size in sizes if size is not None), default=None)


def _is_in_place(optimizer: Optimizer) -> bool:
    # torch's foreach updates allocate temporaries as large as the parameters.
    return all(
        group.get("fused") or group.get("foreach") is False for group in optimizer.param_groups
    )


def _library_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    return 2 * (
        _WORKSPACE_HOPPER
        if torch.cuda.get_device_capability(device) >= (9, 0)
        else _WORKSPACE_BEFORE_HOPPER
    )
