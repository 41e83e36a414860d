"""Options of the strategy, with the checks that need no world size."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from datetime import timedelta
from functools import cached_property
from math import lcm
from typing import Annotated, Any, Literal, TypeVar

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.groups.nccl_options import read_nccl_options
from lightning_megatron.plan.context_groups import ContextGroupsChoice, check_groups_option
from lightning_megatron.plan.context_transport import check_transport_option
from lightning_megatron.plan.cuda_graphs import CudaGraphs, GraphMode
from lightning_megatron.plan.custom_order import (
    CustomOrder,
    OrderOfPasses,
    order_from_file,
    order_from_function,
    order_may_split,
    shape_of_order,
)
from lightning_megatron.plan.custom_schedule import RowFunction
from lightning_megatron.plan.expert_clones import ExpertClones
from lightning_megatron.plan.experts import Transport
from lightning_megatron.plan.fp8 import FP8, Backend, FP8Recipe, check_fp8_products
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.plan.microbatches import MicrobatchRule
from lightning_megatron.plan.model_shape import LossChunk
from lightning_megatron.plan.placement import PlacementShape
from lightning_megatron.plan.recomputation import Recomputation, Recompute
from lightning_megatron.plan.schedule import SCHEDULE_NAMES, ScheduleName, ScheduleOption
from lightning_megatron.plan.settings import Count, Elements, Index, Range, coerce_fields
from lightning_megatron.strategy.options.expert_option import check_expert_clones, check_expert_rows
from lightning_megatron.strategy.options.schedule_option import (
    check_named_schedule,
    check_own_order,
    check_schedule_name,
)

_Strategy = TypeVar("_Strategy")
#: Durations above 31 years overflow the nanosecond clocks of communication libraries.
_TIMEOUT_RANGE = Range(above=0, maximum=1_000_000_000)


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
        stage_layers: Layers of each of the pp * vpp virtual stages, in the order in which a
            microbatch passes them: a list of numbers such as [4, 5, 5, 2], or a string in
            Megatron-Core's notation such as "Et*4|(t*5|)*2ttL" (E is the embedding, t a layer, L
            the head with the loss; | begins the next virtual stage). The first and the last virtual
            stage may have no layers. None minimizes the work of the busiest stage, including
            embedding and head. The log shows the numbers.
        cp: Ranks that divide each sequence (context parallel): each holds two of its 2 * cp equal
            pieces. It needs a model of this package or a replaced Hugging Face model.
        cp_transport: How these ranks exchange keys and values. ring passes them around while
            attention to those received before is computed. all_to_all divides the heads instead of
            the sequence during the attention, for any number of heads. all_gather gives every rank
            all keys and values. hierarchical is all_to_all among neighbouring ranks, such as those
            of a host, and ring between these groups. auto means all_to_all if cp is on one host and
            divides the heads, or if attention has dropout or a mask; hierarchical if the ranks of a
            host divide the heads; otherwise ring, or all_gather for one key/value head.
        cp_groups: Ranks of cp that divide a packed document: all, or with documents the smallest
            groups of 1, 2, 4 or more neighbouring ranks, chosen for each microbatch, such that no
            document crosses the windows of two groups; cp must then be a power of two.
        ep: Ranks that divide the experts of a layer equally (expert parallel). ep and etp arrange
            the ranks of tp and dp in another way, and need no additional ranks.
        etp: Ranks that divide each expert's matrix products. None means tp.
        sequence_parallel: Whether activations between tensor-parallel regions are sharded along the
            sequence, whose length must then be divisible by tp. None means True if tp is above 1.
            It applies to this package's models and to plain modules whose tensor_parallel_plan says
            "sequence"; other modules receive whole sequences.
        schedule: Order of forward and backward passes: 1f1b, interleaved, gpipe, zb-h1, zb-h2, zb-v
            or dualpipe-v. None means interleaved if vpp is above 1, else 1f1b. The zero-bubble
            schedules and dualpipe-v split backward passes, so that weight gradients fill idle time.
            zb-v and dualpipe-v need vpp=2: the second chunks lie on the stages in reverse order.
            "auto" measures the first steps, and then runs the fastest order that fits into memory;
            with vpp=2 it places chunks like zb-v. A path that ends in .csv names a file with
            the actions of all stages for one number of microbatches, as "lightning-megatron
            schedule --csv" writes it. In Python, a function of rank, pp, number of microbatches and
            vpp can return the actions of a stage, a list of plan.Action; its chunks lie in a loop.
        microbatch_size: Samples per microbatch of one data-parallel rank, or "batch" for one
            microbatch. None means one microbatch without pipeline stages. With stages, None means
            the fewest equal microbatches with at most a fifth of the step idle, or one per sample;
            with whole backward passes these are at least 4 (pp - 1) / vpp. The log names the
            choice.
        microbatch_group_size: Microbatches that run through one chunk before the next chunk runs
            (interleaved only). None means pp.
        check_microbatches: Whether the first batch is tried without gradients if microbatches
            divide its samples or a plan shards features. Loss and logs of the parts must equal
            those of the whole; batch norms, steps that count their calls and similar code are
            refused. The loss is tried again in each epoch and every replica_check_interval batches.
            False skips the trials.
        order: Axes from the fastest-varying to the slowest; neighbours on the first axis are
            consecutive ranks.
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
        expert_transport: Transport of tokens to the ranks of their experts. all_gather has static
            sizes and needs equal token counts on all ranks. all_to_all sends each token to its
            experts only, and the host reads sizes. one_sided sends each token to its experts only,
            with static sizes, into the memory of other GPUs of the host; with NVLink multicast it
            needs TORCH_SYMM_MEM_DISABLE_MULTICAST=1 in the environment. auto means all_to_all if a
            token has fewer experts than ep. Otherwise, auto means one_sided if GPUs support it and
            no shared expert runs concurrently, else all_gather.
        expert_rows: Rows of a rank's expert buffers, as a multiple of the even share, at least 1.
            all_to_all has no such buffers, so auto does not select it then. A step that needs more
            rows is run again without a limit. After the second time the limit grows. None means the
            rows of the worst routing.
        expert_clones: Places on every rank for clones of busy experts. In every layer and
            microbatch, ranks with fewer tokens than the mean compute some of the rows of ranks with
            more, with copies of their experts; results are the same up to the order of summation.
            It needs ep above 1 and the transport one_sided, which auto then selects; on CPUs
            collectives replace the puts. A mapping, or an ExpertClones, also sets the smallest
            clone. 0 means none.
        tensor_parallel_plan: Name patterns of plain torch.nn modules and how tp shards them, such
            as {"*.up": "column", "*.down": "row"}. None replaces known blocks.
        pipeline_plan: How a model from outside this package is divided into stages:
            {"model.layers": "blocks"} names its nn.ModuleList or nn.Sequential of blocks. Modules
            defined before it belong to the first stage, and modules after it to the last, unless
            the plan says "first" or "last". None means the plan that a Hugging Face model declares.
        timeout: Seconds that a collective may wait for a rank before the job fails. None means
            torch's default.
        process_group_backend: Communication library: nccl or gloo. None means nccl on GPUs, else
            gloo.
        nccl_options: NCCL settings by axis, such as {"pp": {"max_ctas": 4}}, or the path of a YAML
            file with such a mapping; Megatron-LM's files and names are accepted. Axes: world, tp,
            cp, dp, pp, data (dp x cp), model (tp x pp), embedding, position_embedding, etp, ep,
            edp. Settings: high_priority, and fields of NCCL's configuration such as min_ctas,
            max_ctas, cga_cluster_size and net_name.
        signal_check_interval: Training batches between checks whether any rank received a SIGTERM.
        zero: Stage of the distributed optimizer. With 1, each data-parallel rank keeps and updates
            its part of the optimizer state and main parameters, and all ranks gather the result.
            With 0, every rank has the whole state.
        optimizer_slices: Division of the optimizer state with zero=1: elements (equal shares that
            cut through parameters, for elementwise optimizers such as AdamW or SGD) or parameters
            (whole parameters, distributed by size). auto tries the optimizer on small tensors, and
            means elements if the result is unchanged.
        bucket_size: Approximate size of a collective that reduces gradients or gathers parameters
            (elements).
        gradient_dtype: Dtype in which mixed precisions accumulate and reduce gradients: float32, or
            bfloat16 for half of the memory.
        overlap_gradients: Whether gradients are reduced over the data-parallel ranks during the
            backward pass.
        overlap_parameters: Whether updated parameters are gathered during the next forward pass.
            None means True unless a callback may read parameters before it.
        overlap_tensor_parallel: Whether matrix products next to tp's communication are split into
            pieces that overlap with it, through memory shared by the ranks. It needs half
            precision, GPUs of one host with direct access to each other (NVLink), and two buffers
            of the size of a microbatch's activation.
        check_gradients: When infinite or NaN values end the run with an error that names rank,
            batch and parameter. None checks losses, gradients and weights at logging steps
            (log_every_n_steps) and at the end, in one pass (about 1.5 % of such a step); 16-mixed
            skips this check, because its loss scale skips such steps. True checks the gradients of
            every step before the optimizer uses them, and waits for the device. False means never.
        replica_check_interval: Optimizer steps between comparisons of replicated values
            (parameters, and gradients of parameters that tp does not cut). The first two steps are
            always compared. A comparison needs one message per axis and waits for the device, about
            as long as one optimizer step: less than half a percent by default. 0 means the first
            two steps only. At most as many batches lie between two comparisons of the batches that
            ranks of tp, pp and cp read, and 0 means first batches only.
        async_save: Whether checkpoints are written in the background during training.
        moments_dtype: Dtype of the moments of Adam and AdamW: float32, or bfloat16 for half of
            their memory, which needs fused=True in the optimizer and a GPU. bfloat16 keeps 8 bits
            of each moment, with unbiased stochastic rounding that depends on the step and the
            element's position only. Runs repeat exactly under one layout, but not across layouts.
        fp8: Products of linear layers in 8 bits, next to bf16-mixed or bf16-true: tensorwise,
            delayed, rowwise or blockwise; mxfp8 with backend="te". A mapping, or an FP8, sets more.
        backend: Library of the matrix products and norms of this package's models: native (torch
            and the kernels of this package) or te (NVIDIA's Transformer Engine, the extra `te`).
            Parameters, communication, checkpoints, embeddings, the head and routed experts stay the
            same.
        cuda_graphs: Capture of training steps as CUDA graphs: segments (the static parts of every
            chunk of layers, under every schedule but gpipe) or full (all microbatches of a step
            with their communication). A mapping, or a CudaGraphs, sets more than the mode. None
            captures nothing. The page on CUDA graphs lists what is refused.

    Raises:
        ParallelPlanError: If a value has the wrong type or range, or no layout has these sizes.
        UnsupportedError: If this version does not support a value.
    """

    tp: Count
    pp: Count
    vpp: Count
    stage_layers: list[int] | str | None
    cp: Count
    cp_transport: Literal["auto", "ring", "all_to_all", "all_gather", "hierarchical"]
    cp_groups: ContextGroupsChoice
    ep: Count
    etp: Count | None
    sequence_parallel: bool | None
    schedule: ScheduleOption | str | RowFunction | None
    microbatch_size: Count | Literal["batch"] | None
    microbatch_group_size: Count | None
    check_microbatches: bool
    order: str
    recompute: Recompute | Recomputation | None
    loss_chunk: LossChunk
    expert_transport: Transport
    expert_rows: Annotated[float, Range(minimum=1)] | None
    expert_clones: Index | ExpertClones
    tensor_parallel_plan: dict[str, str] | None
    pipeline_plan: dict[str, str] | None
    timeout: Annotated[float, _TIMEOUT_RANGE] | Annotated[timedelta, _TIMEOUT_RANGE] | None
    process_group_backend: Literal["nccl", "gloo"] | None
    nccl_options: dict[str, dict[str, Any]] | str | None
    signal_check_interval: Count
    zero: Literal[0, 1]
    optimizer_slices: Literal["auto", "elements", "parameters"]
    bucket_size: Elements
    gradient_dtype: Literal["float32", "bfloat16"]
    overlap_gradients: bool
    overlap_parameters: bool | None
    overlap_tensor_parallel: bool
    check_gradients: bool | None
    replica_check_interval: Index
    async_save: bool
    moments_dtype: Literal["float32", "bfloat16"]
    fp8: FP8Recipe | FP8 | None
    backend: Backend
    cuda_graphs: GraphMode | CudaGraphs | None

    def __post_init__(self) -> None:
        # ParallelLayout checks one model replica here; the world size is checked when it is known.
        object.__setattr__(self, "cuda_graphs", CudaGraphs.of(self.cuda_graphs))
        object.__setattr__(self, "fp8", FP8.of(self.fp8))
        coerce_fields(self)
        check_expert_rows(self.expert_rows, self.ep, self.expert_transport)
        check_expert_clones(self.clones, self.ep, self.expert_transport)
        etp = self.etp or self.tp
        check_schedule_name(self.schedule)
        if self.custom_order is not None:
            check_own_order(self.custom_order, self.microbatch_group_size)
        else:
            check_named_schedule(
                self.schedule, self.schedule_name, self.pp, self.vpp, self.microbatch_group_size
            )
        ParallelLayout(self.pp * lcm(self.tp * self.cp, etp * self.ep), **self.sizes())
        check_sequence_parallel(
            self.tp, self.sequence_parallel, self.shards_sequence, self.overlap_tensor_parallel
        )
        overlaps = self.overlap_tensor_parallel
        check_fp8_products(self.products, overlaps, self.backend, self.graph_mode, self.zero)
        check_transport_option(self.cp_transport, self.cp)
        check_groups_option(self.cp_groups, self.cp, self.cp_transport, self.graphs is not None)
        if self.zero == 0 and self.optimizer_slices != "auto":
            raise ParallelPlanError(
                f"optimizer_slices ({self.optimizer_slices!r}) needs zero=1, because without it "
                "every rank has the whole optimizer state. Use zero=1, or leave optimizer_slices "
                "out."
            )
        # Ranks compare the content of the file, because its path may differ.
        object.__setattr__(self, "nccl_options", read_nccl_options(self.nccl_options))
        if self.nccl_options and self.process_group_backend == "gloo":
            raise ParallelPlanError(
                "nccl_options cannot be used with process_group_backend 'gloo', which has no such "
                "settings. Use 'nccl', or leave nccl_options out."
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
        names = ("tp", "pp", "cp", "ep", "etp", "vpp", "order", "stage_layers")
        return {name: getattr(self, name) for name in names} | {"shape": self.chunk_shape}

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
        option = self.expert_clones
        if isinstance(option, ExpertClones):
            return option
        return ExpertClones(option) if option else None

    @property
    def chunk_shape(self) -> PlacementShape:
        """Return how the schedule places chunks on the stages."""
        return shape_of_order(self.pass_order)

    @property
    def shards_sequence(self) -> bool:
        """Return whether activations are sharded along the sequence."""
        return self.tp > 1 if self.sequence_parallel is None else self.sequence_parallel

    @property
    def needs_tables(self) -> bool:
        """Return whether an argument needs a feature that only this package's models have."""
        is_on = self.ep > 1, self.cp > 1, self.sequence_parallel, self.overlap_tensor_parallel
        options = self.recompute, self.loss_chunk, self.fp8
        return any(is_on) or any(option is not None for option in options) or self.backend == "te"

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
        """Return the order of the user's file or function; None for a named schedule and "auto"."""
        if callable(self.schedule):
            return order_from_function(self.schedule, self.pp, self.vpp)
        if self.schedule is None or self.schedule in (*SCHEDULE_NAMES, "auto"):
            return None
        return order_from_file(self.schedule, self.pp, self.vpp)

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
        group = self.microbatch_group_size
        return MicrobatchRule(self.microbatch_size, self.pass_order, layout.pp, layout.vpp, group)

    @property
    def timeout_delta(self) -> timedelta | None:
        """Return the timeout as a timedelta, as torch expects."""
        timeout = self.timeout
        return timedelta(seconds=timeout) if isinstance(timeout, (int, float)) else timeout

    def as_dict(self) -> dict[str, Any]:
        """Return all arguments by name."""
        return asdict(self)

    def contents(self) -> dict[str, Any]:
        """Return all arguments by name, with the rows of a schedule in place of its path.

        Ranks compare them: the path of a file may differ between machines.
        """
        return self.as_dict() | {"schedule": self.custom_order or self.schedule}


def notes_on(options: StrategyOptions, precision: str, device_type: str) -> list[str]:
    """Return log lines about options without effect, and about options that make others faster.

    Args:
        options: The options.
        precision: Precision of the run.
        device_type: Type of the device.
    """
    notes = []
    if options.overlap_tensor_parallel and (device_type != "cuda" or precision == "32-true"):
        notes.append(
            f"overlap_tensor_parallel has no effect with precision {precision} on "
            f"{device_type}: only products in half types on GPUs are divided; others run "
            "before or after their communication."
        )
    if options.nccl_options and device_type != "cuda":
        notes.append(
            f"nccl_options have no effect on {device_type}: its groups use gloo, which does "
            "not have these settings."
        )
    fp8 = options.products
    has_fp8_kernels = fp8 is not None and not fp8.emulate and device_type == "cuda"
    if has_fp8_kernels and options.graphs is None:
        notes.append(
            "fp8 is used without cuda_graphs: Python usually launches the short kernels of FP8 "
            "layers more slowly than the GPU runs them. cuda_graphs='segments' avoids this."
        )
    return notes


def check_sequence_parallel(
    tp: int, sequence_parallel: bool | None, shards_sequence: bool, overlap_tensor_parallel: bool
) -> None:
    """Refuse sequence parallelism, or its overlap with products, without ranks that share it.

    Args:
        tp: Tensor-parallel size.
        sequence_parallel: Value of the option.
        shards_sequence: Whether activations are sharded, with the default filled in.
        overlap_tensor_parallel: Value of the option.

    Raises:
        ParallelPlanError: If ``sequence_parallel`` is set and tp is 1, or if
            ``overlap_tensor_parallel`` is set and activations are not sharded.
    """
    if sequence_parallel and tp == 1:
        raise ParallelPlanError(
            "sequence_parallel (True) needs tp above 1, because the ranks of tp divide the "
            "sequence. Use tp of 2 or more, or leave sequence_parallel out."
        )
    if overlap_tensor_parallel and not shards_sequence:
        raise ParallelPlanError(
            f"overlap_tensor_parallel needs tp above 1 and sequence_parallel: tp is {tp}, "
            f"sequence_parallel {shards_sequence}. It overlaps matrix products with the "
            "communication of sequence_parallel. Use tp of 2 or more with sequence_parallel, or "
            "leave overlap_tensor_parallel out."
        )
