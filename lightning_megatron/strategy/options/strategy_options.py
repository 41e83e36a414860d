"""Options of the strategy, with the checks that need no world size."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from math import lcm
from typing import Any, Literal, TypeVar

from lightning_megatron.errors import ParallelPlanError, UnsupportedError
from lightning_megatron.plan.context_transport import check_transport_option
from lightning_megatron.plan.cuda_graphs import CudaGraphs, GraphMode
from lightning_megatron.plan.custom_schedule import (
    CustomOrder,
    OrderOfPasses,
    RowFunction,
    order_may_split,
    shape_of_order,
)
from lightning_megatron.plan.expert_clones import ExpertClones
from lightning_megatron.plan.fp8 import FP8, EnginePart, FP8Recipe, check_fp8_products
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.plan.microbatches import MicrobatchRule
from lightning_megatron.plan.model_shape import LossChunk
from lightning_megatron.plan.recomputation import Recomputation, Recompute
from lightning_megatron.plan.schedule import (
    SCHEDULE_NAMES,
    ScheduleName,
    ScheduleOption,
    check_chunks,
    check_pairs,
)
from lightning_megatron.plan.settings import Count, coerce_fields
from lightning_megatron.strategy.options.records import (
    ContextOptions,
    ExpertOptions,
    JobOptions,
    LinearOptions,
    OptimizerOptions,
    PipelineOptions,
)

_Strategy = TypeVar("_Strategy")


def documents_options(strategy: type[_Strategy]) -> type[_Strategy]:
    """Append the documentation of the options to the docstring of a class with these arguments.

    Args:
        strategy: Class whose arguments are the fields of :class:`StrategyOptions`.
    """
    summary = inspect.getdoc(strategy)
    options = inspect.getdoc(StrategyOptions)
    # Python removes docstrings with -OO.
    if summary is not None and options is not None:
        section = options[options.find("Args:") : options.find("Raises:")].rstrip()
        strategy.__doc__ = f"{summary}\n\n{section}\n"
    return strategy


@dataclass(frozen=True, kw_only=True)
class StrategyOptions:
    """Arguments of :class:`MegatronStrategy`.

    Args:
        tp: Ranks that divide every matrix product (tensor parallel).
        pp: Stages into which the layers are divided (pipeline parallel).
        vpp: Chunks of layers per stage (virtual pipeline stages); values above 1 shorten the
            pipeline bubble.
        cp: Ranks that divide each sequence (context parallel): each holds two of its 2 * cp equal
            pieces. It needs a model of this package or a replaced Hugging Face model.
        ep: Ranks that divide the experts of a layer equally (expert parallel). ep and etp arrange
            the ranks of tp and dp in another way, and need no additional ranks.
        etp: Ranks that divide each expert's matrix products. None means tp.
        sequence_parallel: Whether activations between tensor-parallel regions are sharded along the
            sequence, whose length must then be divisible by tp. None means True if tp is above 1.
            It applies to this package's models and to plain modules whose tensor_parallel_plan says
            "sequence"; other modules receive whole sequences.
        schedule: Order of forward and backward passes: 1f1b, interleaved, gpipe, zb-h1, zb-v or
            dualpipe-v. None means interleaved if vpp is above 1, else 1f1b. The zero-bubble
            schedules and dualpipe-v split backward passes, so that weight gradients fill idle time.
            zb-v and dualpipe-v need vpp=2: the second chunks lie on the stages in reverse order.
            "auto" measures the first steps, and then runs the fastest of them that fits into
            memory; with vpp=2 it places chunks like zb-v. A function of rank, pp, number of
            microbatches and vpp, named by its path in YAML, can return the actions of a stage, a
            list of plan.Action; its chunks lie in a loop.
        microbatch_size: Samples per microbatch of one data-parallel rank, or "batch" for one
            microbatch. None means one microbatch without pipeline stages. With stages, None means
            the fewest equal microbatches with at most a fifth of the step idle, or one per sample;
            with whole backward passes these are at least 4 (pp - 1) / vpp. The log names the
            choice.
        recompute: Activations that the backward pass recomputes: none, selective (attention core),
            norms (outputs of the norms before sublayers), activations (outputs of MLPs'
            activations), experts (outputs of experts), expert_inputs (inputs of experts, sent and
            sorted again), full_except_core (whole blocks without the attention core) or full (whole
            blocks). A mapping, or a Recomputation, names several parts, or a number of layers of
            each chunk. None keeps the models' own setting.
        loss_chunk: Tokens whose logits exist at the same time when a decoder computes losses. The
            backward pass recomputes logits, a third more work for the head. auto stores logits of
            up to 2 GiB per microbatch, and uses chunks of 512 MiB for larger ones. forward uses
            chunks of 512 MiB and computes the gradients of a summed loss in the forward pass,
            without additional work; each microbatch in flight keeps the head's gradient in float32.
            None stores all logits.
        fp8: Products of linear layers in 8 bits, next to bf16-mixed or bf16-true: tensorwise,
            delayed, rowwise or blockwise; mxfp8 with linear.backend "te". A mapping, or an FP8,
            sets more.
        cuda_graphs: Capture of training steps as CUDA graphs: segments (the static parts of every
            chunk of layers, under every schedule but gpipe) or full (all microbatches of a step
            with their communication). A mapping, or a CudaGraphs, sets more than the mode. None
            captures nothing. The page on CUDA graphs lists what is refused.
        async_save: Whether checkpoints are written in the background during training.
        tensor_parallel_plan: Name patterns of plain torch.nn modules and how tp shards them, such
            as {"*.up": "column", "*.down": "row"}. None replaces known blocks, or shards the linear
            layers of other modules that belong together, and shows the plan.
        pipeline_plan: How a model from outside this package is divided into stages:
            {"model.layers": "blocks"} names its nn.ModuleList or nn.Sequential of blocks. Modules
            defined before it belong to the first stage, and modules after it to the last, unless
            the plan says "first" or "last". None means the plan that a Hugging Face model declares,
            or the one list of equal blocks of another module.
        pipeline: Layers of the stages, and groups of microbatches: a mapping, or a PipelineOptions.
        context: How the ranks of cp exchange keys and values: a mapping, or a ContextOptions.
        experts: Transport of tokens to their experts, rows and clones: a mapping, or an
            ExpertOptions.
        linear: Library of matrix products, and their overlap with communication: a mapping, or a
            LinearOptions.
        optimizer: Division, dtypes and messages of gradients and the optimizer's state: a mapping,
            or an OptimizerOptions.
        job: Ranks and communication of the job, and checks of what it computes: a mapping, or a
            JobOptions.
        layout: "auto" lets the first fit choose tp, pp, vpp, cp, ep, etp, schedule,
            microbatch_size, recompute and cuda_graphs: the fastest that fit, by estimates, for a
            data module with a global batch size. Values of these options that are given stay. A
            mapping describes the devices: memory (GiB), network (bytes/s between nodes), and
            speeds, a file of lightning-megatron doctor --calibrate. None chooses nothing.

    Raises:
        ParallelPlanError: If a value has the wrong type or range, or no layout has these sizes.
        UnsupportedError: If this version does not support a value.
    """

    tp: Count
    pp: Count
    vpp: Count
    cp: Count
    ep: Count
    etp: Count | None
    sequence_parallel: bool | None
    schedule: ScheduleOption | RowFunction | None
    microbatch_size: Count | Literal["batch"] | None
    recompute: Recompute | Recomputation | None
    loss_chunk: LossChunk
    fp8: FP8Recipe | FP8 | None
    cuda_graphs: GraphMode | CudaGraphs | None
    async_save: bool
    tensor_parallel_plan: dict[str, str] | None
    pipeline_plan: dict[str, str] | None
    pipeline: PipelineOptions
    context: ContextOptions
    experts: ExpertOptions
    linear: LinearOptions
    optimizer: OptimizerOptions
    job: JobOptions
    layout: Literal["auto"] | dict[str, Any] | None

    def __post_init__(self) -> None:
        # ParallelLayout checks one model replica here; the world size is checked when it is known.
        object.__setattr__(self, "cuda_graphs", CudaGraphs.of(self.cuda_graphs))
        object.__setattr__(self, "fp8", FP8.of(self.fp8))
        coerce_fields(self)
        self._check_experts()
        etp = self.etp or self.tp
        ParallelLayout(self.pp * lcm(self.tp * self.cp, etp * self.ep), **self.sizes())
        self._check_schedule()
        linear = self.linear
        self._check_sequence_parallel()
        self._check_turns()
        check_fp8_products(
            self.products,
            linear.overlap,
            linear.backend_of("products"),
            self.graph_mode,
            self.optimizer.zero,
        )
        self._check_engine_parts()
        check_transport_option(self.context.transport, self.cp)

    def _check_engine_parts(self) -> None:
        """Refuse attention and experts of Transformer Engine beside what they cannot do."""
        has_core = "full_except_core" in Recomputation.of(self.recompute).parts
        cases: list[tuple[EnginePart, bool, str]] = [
            ("attention", self.cp > 1, f"cp ({self.cp}) above 1, because its exchange has process "
             "groups and pieces of sequences of its own"),
            ("attention", has_core, "recompute='full_except_core', because it does not return the "
             "log-sum-exps that are kept"),
            ("experts", self.graph_mode == "full", "cuda_graphs in mode 'full', because the host "
             "gives its products the rows of each expert"),
        ]  # fmt: skip
        for part, is_used, what in cases:
            if is_used and self.linear.backend_of(part) == "te":
                raise ParallelPlanError(
                    f"linear.parts ({part!r}) with backend 'te' cannot be used with {what}. Leave "
                    "one of them out."
                )

    def _check_schedule(self) -> None:
        group_size = self.pipeline.microbatch_group_size
        orders_all = self.custom_order is not None or self.schedule == "auto"
        if orders_all and group_size is not None:
            raise ParallelPlanError(
                f"microbatch_group_size ({group_size}) must be None with schedule "
                f"{self.custom_order or self.schedule!r}, which orders all microbatches. Use "
                "schedule='interleaved', or leave microbatch_group_size out."
            )
        if self.custom_order is None:
            check_chunks(self.schedule_name, self.pp, self.vpp, group_size)

    def _check_sequence_parallel(self) -> None:
        if self.sequence_parallel and self.tp == 1:
            raise ParallelPlanError(
                "sequence_parallel (True) needs tp above 1, because the ranks of tp divide the "
                "sequence. Use tp of 2 or more, or leave sequence_parallel out."
            )
        if self.linear.overlap and not self.shards_sequence:
            raise ParallelPlanError(
                f"linear.overlap needs tp above 1 and sequence_parallel: tp is {self.tp}, "
                f"sequence_parallel {self.shards_sequence}. It overlaps matrix products with the "
                "communication of sequence_parallel. Use tp of 2 or more with sequence_parallel, "
                "or leave linear.overlap out."
            )

    def _check_experts(self) -> None:
        rows = self.experts.rows
        clones = self.clones
        transport = self.experts.transport
        if rows is not None and self.ep == 1:
            raise ParallelPlanError(
                f"experts.rows ({rows:g}) needs ep above 1: a rank that holds all experts always "
                "gets the same number of rows. Use ep of 2 or more, or experts.rows=None."
            )
        if rows is not None and transport == "all_to_all":
            raise ParallelPlanError(
                f"experts.rows ({rows:g}) needs experts.transport of one_sided, all_gather or "
                "auto: with all_to_all the host reads the number of rows, and buffers have exactly "
                "this size. Use one of the three, or experts.rows=None."
            )
        if clones is not None and self.ep == 1:
            raise ParallelPlanError(
                f"experts.clones ({clones.places}) needs ep above 1: a clone computes rows for an "
                "expert of another rank, and here every rank has all experts. Use ep of 2 or more, "
                "or experts.clones=0."
            )
        if clones is not None:
            clones.check_transport(transport)

    def _check_turns(self) -> None:
        """Refuse what two microbatches that switch in every layer cannot share."""
        if not self.experts.overlap:
            return
        if self.ep == 1:
            raise ParallelPlanError(
                "experts.overlap needs ep above 1: a rank that holds all experts sends no tokens. "
                "Use ep of 2 or more, or experts.overlap=False."
            )
        check_pairs("auto" if self.schedule == "auto" else self.pass_order, self.pp)
        recompute = Recomputation.of(self.recompute or "none")
        excluded = {
            "cuda_graphs": (self.cuda_graphs is not None, "graphs share the memory of one pass"),
            "experts.transport of one_sided": (
                self.experts.transport == "one_sided",
                "puts of both would write into the same memory",
            ),
            "experts.clones": (self.clones is not None, "clones are put into the same memory"),
            "linear.overlap": (self.linear.overlap, "its pieces have the buffers of one pass"),
            "linear.backend of te": (self.linear.backend == "te", "its state has no microbatch"),
            "recompute with offload": (recompute.offload, "copies to the host follow one stream"),
        }
        for name, (is_set, reason) in excluded.items():
            if is_set:
                raise UnsupportedError(
                    f"experts.overlap cannot be used with {name}, because two microbatches run at "
                    f"once and {reason}. Leave one of them out."
                )

    @classmethod
    def from_locals(cls, names: Mapping[str, Any]) -> StrategyOptions:
        """Return the options among the local variables of a function that has them as arguments.

        Args:
            names: Values by name, such as ``locals()``; other names are ignored.
        """
        return cls(**{field.name: names[field.name] for field in fields(cls)})

    def sizes(self) -> dict[str, Any]:
        """Return the arguments of the layout that do not depend on the job's ranks."""
        names = ("tp", "pp", "cp", "ep", "etp", "vpp")
        return {name: getattr(self, name) for name in names} | {
            "order": self.job.order,
            "stage_layers": self.pipeline.stage_layers,
            "shape": shape_of_order(self.pass_order),
        }

    @property
    def graphs(self) -> CudaGraphs | None:
        """Return the settings of CUDA graphs; None without graphs."""
        return CudaGraphs.of(self.cuda_graphs)

    @property
    def graph_mode(self) -> GraphMode | None:
        """Return the mode of CUDA graphs; None without graphs."""
        return None if self.graphs is None else self.graphs.mode

    @property
    def products(self) -> FP8 | None:
        """Return the settings of products in 8 bits; None without any."""
        return FP8.of(self.fp8)

    @property
    def clones(self) -> ExpertClones | None:
        """Return the places for clones of experts; None without any."""
        option = self.experts.clones
        if isinstance(option, ExpertClones):
            return option
        return ExpertClones(option) if option else None

    @property
    def shards_sequence(self) -> bool:
        """Return whether activations are sharded along the sequence."""
        return self.tp > 1 if self.sequence_parallel is None else self.sequence_parallel

    @property
    def needs_tables(self) -> bool:
        """Return whether an argument needs a feature that only this package's models have."""
        is_on = self.ep > 1, self.cp > 1, self.sequence_parallel, self.linear.overlap
        options = self.recompute, self.loss_chunk, self.fp8
        return (
            any(is_on)
            or any(option is not None for option in options)
            or self.linear.backend == "te"
        )

    @property
    def schedule_name(self) -> ScheduleName:
        """Return the name of the schedule with the default filled in; for "auto" the first one.

        A user's own order has no such name; see :attr:`pass_order`.
        """
        named = next((name for name in SCHEDULE_NAMES if name == self.schedule), None)
        if named is not None:
            return named
        if self.schedule == "auto" and self.vpp == 2:
            return "zb-v"
        return "interleaved" if self.vpp > 1 else "1f1b"

    @cached_property
    def custom_order(self) -> CustomOrder | None:
        """Return the order of the user's function; None for a named schedule and "auto"."""
        if callable(self.schedule):
            return CustomOrder.of(self.schedule, self.pp, self.vpp)
        return None

    @property
    def pass_order(self) -> OrderOfPasses:
        """Return the user's own order, or the name of the schedule; for "auto" the first one."""
        return self.custom_order or self.schedule_name

    @property
    def may_split_backward(self) -> bool:
        """Return whether the schedule may run some backward passes in halves."""
        return self.schedule == "auto" or order_may_split(self.pass_order)

    def microbatches(self, layout: ParallelLayout) -> MicrobatchRule:
        """Return the rule that cuts batches into microbatches under a layout."""
        group = self.pipeline.microbatch_group_size
        return MicrobatchRule(
            self.microbatch_size,
            self.pass_order,
            layout.pp,
            layout.vpp,
            group,
            self.experts.overlap,
        )

    def as_dict(self) -> dict[str, Any]:
        """Return all arguments by name."""
        return asdict(self)

    def contents(self) -> dict[str, Any]:
        """Return all arguments by name, as ranks compare them: a function has no address."""
        return self.as_dict() | {"schedule": self.custom_order or self.schedule}


def notes_on(options: StrategyOptions, precision: str, device_type: str) -> list[str]:
    """Return log lines about options without effect, and about options that make others faster.

    Args:
        options: The options.
        precision: Precision of the run.
        device_type: Type of the device.
    """
    notes = []
    if options.linear.overlap and (device_type != "cuda" or precision == "32-true"):
        notes.append(
            f"linear.overlap has no effect with precision {precision} on "
            f"{device_type}: only products in half types on GPUs are divided; others run "
            "before or after their communication."
        )
    if options.job.nccl and device_type != "cuda":
        notes.append(
            f"job.nccl has no effect on {device_type}: its groups use gloo, which does not have "
            "these settings."
        )
    fp8 = options.products
    has_fp8_kernels = fp8 is not None and not fp8.emulate and device_type == "cuda"
    if has_fp8_kernels and options.graphs is None:
        notes.append(
            "fp8 is used without cuda_graphs: Python usually launches the short kernels of FP8 "
            "layers more slowly than the GPU runs them. cuda_graphs='segments' avoids this."
        )
    return notes
