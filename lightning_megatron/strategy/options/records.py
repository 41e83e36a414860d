"""Records of the options that few people change; each is one argument of the strategy."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Any, Literal

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.groups.nccl_options import read_nccl_options
from lightning_megatron.plan.expert_clones import ExpertClones
from lightning_megatron.plan.experts import Transport
from lightning_megatron.plan.fp8 import Backend, EnginePart
from lightning_megatron.plan.settings import Count, Elements, Index, Range, coerce_fields

#: Durations above 31 years overflow the nanosecond clocks of communication libraries.
_TIMEOUT_RANGE = Range(above=0, maximum=1_000_000_000)


@dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """Layers of the stages, and groups of microbatches.

    Args:
        stage_layers: Layers of each of the pp * vpp virtual stages, in the order in which a
            microbatch passes them: a list of numbers such as [4, 5, 5, 2], or a string in
            Megatron-Core's notation such as "Et*4|(t*5|)*2ttL" (E is the embedding, t a layer, L
            the head with the loss; | begins the next virtual stage). The first and the last virtual
            stage may have no layers. None minimizes the work of the busiest stage, including
            embedding and head. The log shows the numbers.
        microbatch_group_size: Microbatches that run through one chunk before the next chunk runs
            (interleaved only). None means pp.
    """

    stage_layers: list[int] | str | None = None
    microbatch_group_size: Count | None = None

    def __post_init__(self) -> None:
        coerce_fields(self, "pipeline.")


@dataclass(frozen=True, kw_only=True)
class ContextOptions:
    """How the ranks of cp exchange keys and values.

    Args:
        transport: ring passes keys and values around while attention to those received before is
            computed. all_to_all divides the heads instead of the sequence during the attention, for
            any number of heads. all_gather gives every rank all keys and values. auto means
            all_to_all if cp is on one host and divides the heads, or if attention has dropout or a
            mask; otherwise ring, or all_gather for one key/value head.
    """

    transport: Literal["auto", "ring", "all_to_all", "all_gather"] = "auto"

    def __post_init__(self) -> None:
        coerce_fields(self, "context.")


@dataclass(frozen=True, kw_only=True)
class ExpertOptions:
    """Transport of tokens to their experts, and the buffers and clones that it serves.

    Args:
        transport: all_gather has static sizes and needs equal token counts on all ranks. all_to_all
            sends each token to its experts only, and the host reads sizes. one_sided sends each
            token to its experts only, with static sizes, into the memory of other GPUs of the host;
            with NVLink multicast it needs TORCH_SYMM_MEM_DISABLE_MULTICAST=1 in the environment.
            auto means all_to_all if a token has fewer experts than ep, unless CUDA graphs hold the
            experts or rows limits their buffers. Otherwise it means one_sided if GPUs support it
            and no shared expert runs concurrently, else all_gather.
        rows: Rows of a rank's expert buffers, as a multiple of the even share, at least 1.
            all_to_all has no such buffers, so auto does not select it then. A step that needs more
            rows is run again without a limit. After the second time the limit grows. None means the
            rows of the worst routing.
        clones: Places on every rank for clones of busy experts. In every layer and microbatch,
            ranks with fewer tokens than the mean compute some of the rows of ranks with more, with
            copies of their experts; results are the same up to the order of summation. It needs ep
            above 1 and the transport one_sided, which auto then selects; on CPUs collectives
            replace the puts. A mapping, or an ExpertClones, also sets the smallest clone. 0 means
            none.
        overlap: Whether the tokens of one microbatch travel while another one computes: the forward
            pass of each microbatch and the backward pass of the one before it switch in every layer
            with experts. It needs ep above 1, at least two microbatches, which are kept at the same
            time, and schedule 1f1b with pp=1, or dualpipe-v. Results are bitwise the same.
    """

    transport: Transport = "auto"
    rows: Annotated[float, Range(minimum=1)] | None = None
    clones: Index | ExpertClones = 0
    overlap: bool = False

    def __post_init__(self) -> None:
        coerce_fields(self, "experts.")


@dataclass(frozen=True, kw_only=True)
class LinearOptions:
    """Matrix products of linear layers.

    Args:
        backend: Library of the matrix products and norms of this package's models: native (torch
            and the kernels of this package) or te (NVIDIA's Transformer Engine, the extra `te`).
            Parameters, communication, checkpoints, embeddings and the head stay the same.
        parts: What te computes: products and norms, attention (its DotProductAttention), experts
            (its grouped products). The rest is native.
        overlap: Whether matrix products next to tp's communication are split into pieces that
            overlap with it, through memory shared by the ranks. It needs half precision, GPUs of
            one host with direct access to each other (NVLink), and two buffers of the size of a
            microbatch's activation.
    """

    backend: Backend = "native"
    parts: tuple[EnginePart, ...] = ("products", "norms")
    overlap: bool = False

    def __post_init__(self) -> None:
        coerce_fields(self, "linear.")
        if self.backend == "native" and self.parts != type(self).parts:
            raise ParallelPlanError(
                f"linear.parts ({', '.join(self.parts)}) needs linear.backend 'te': the backend is "
                "'native', which computes all parts. Set the backend, or leave linear.parts out."
            )

    def backend_of(self, part: EnginePart) -> Backend:
        """Return the library that computes a part."""
        return self.backend if part in self.parts else "native"


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions:
    """Division, dtypes and messages of gradients, main parameters and the optimizer's state.

    Args:
        zero: Stage of the distributed optimizer. With 1, each data-parallel rank keeps and updates
            its part of the optimizer state and main parameters, and all ranks gather the result.
            The parts cut through parameters if a trial of the optimizer on small tensors shows that
            this changes nothing, as with AdamW; otherwise they are whole parameters. With 0, every
            rank has the whole state.
        gradient_dtype: Dtype in which mixed precisions accumulate and reduce gradients: float32, or
            bfloat16 for half of the memory.
        moments_dtype: Dtype of the moments of Adam and AdamW: float32, or bfloat16 for half of
            their memory, which needs fused=True in the optimizer and a GPU. bfloat16 keeps 8 bits
            of each moment, with unbiased stochastic rounding that depends on the step and the
            element's position only. Runs repeat exactly under one layout, but not across layouts.
        bucket_size: Approximate size of a collective that reduces gradients or gathers parameters
            (elements).
        overlap_gradients: Whether gradients are reduced over the data-parallel ranks during the
            backward pass.
        overlap_parameters: Whether updated parameters are gathered during the next forward pass.
            None means True unless a callback may read parameters before it.
    """

    zero: Literal[0, 1] = 1
    gradient_dtype: Literal["float32", "bfloat16"] = "float32"
    moments_dtype: Literal["float32", "bfloat16"] = "float32"
    bucket_size: Elements = 40_000_000
    overlap_gradients: bool = True
    overlap_parameters: bool | None = None

    def __post_init__(self) -> None:
        coerce_fields(self, "optimizer.")


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """Ranks and communication of the job, and checks of what it computes.

    Args:
        order: Axes from the fastest-varying to the slowest; neighbours on the first axis are
            consecutive ranks.
        timeout: Seconds that a collective may wait for a rank before the job fails. None means
            torch's default.
        backend: Communication library: nccl or gloo. None means nccl on GPUs, else gloo.
        nccl: NCCL settings by axis, such as {"pp": {"max_ctas": 4}}, or the path of a YAML file
            with such a mapping; Megatron-LM's files and names are accepted. Axes: world, tp, cp,
            dp, pp, data (dp x cp), model (tp x pp), embedding, position_embedding, etp, ep, edp.
            Settings: high_priority, and fields of NCCL's configuration such as min_ctas, max_ctas,
            cga_cluster_size and net_name.
        signal_check_interval: Training batches between checks whether any rank received a SIGTERM.
        check_microbatches: Whether the first batch is tried without gradients if microbatches
            divide its samples or a plan shards features. Loss and logs of the parts must equal
            those of the whole; batch norms, steps that count their calls and similar code are
            refused. The loss is tried again in each epoch and every replica_check_interval batches.
            False skips the trials.
        check_gradients: When infinite or NaN values end the run with an error that names rank,
            batch and parameter. None checks losses, gradients and weights at logging steps
            (log_every_n_steps) and at the end, in one pass (about 1.5 % of such a step); 16-mixed
            skips this check, because its loss scale skips such steps. True checks every step
            before the optimizer uses the gradients, and waits for the device. False means never.
        replica_check_interval: Optimizer steps between comparisons of replicated values
            (parameters, and gradients of parameters that tp does not cut). The first two steps are
            always compared. A comparison needs one message per axis and waits for the device, about
            as long as one optimizer step: less than half a percent by default. 0 means the first
            two steps only. At most as many batches lie between two comparisons of the batches that
            ranks of tp, pp and cp read, and 0 means first batches only.

    Raises:
        ParallelPlanError: If a value has the wrong type or range, or if NCCL settings are given for
            gloo.
    """

    order: str = "tp-cp-ep-dp-pp"
    timeout: Annotated[float, _TIMEOUT_RANGE] | Annotated[timedelta, _TIMEOUT_RANGE] | None = None
    backend: Literal["nccl", "gloo"] | None = None
    nccl: dict[str, dict[str, Any]] | str | None = None
    signal_check_interval: Count = 10
    check_microbatches: bool = True
    check_gradients: bool | None = None
    replica_check_interval: Index = 200

    def __post_init__(self) -> None:
        coerce_fields(self, "job.")
        # Ranks compare the content of the file, because its path may differ.
        object.__setattr__(self, "nccl", read_nccl_options(self.nccl))
        if self.nccl and self.backend == "gloo":
            raise ParallelPlanError(
                "job.nccl cannot be used with job.backend 'gloo', which has no such settings. Use "
                "'nccl', or leave job.nccl out."
            )

    @property
    def timeout_delta(self) -> timedelta | None:
        """Return the timeout as a timedelta, as torch expects."""
        timeout = self.timeout
        return timedelta(seconds=timeout) if isinstance(timeout, (int, float)) else timeout
