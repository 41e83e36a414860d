"""Settings of CUDA graphs, the parts of a model that they may capture, and the settings of a run
that they cannot be combined with.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from lightning_megatron.errors import ParallelPlanError, UnsupportedError
from lightning_megatron.plan.experts import ChosenTransport, Transport
from lightning_megatron.plan.schedule import NAMED_SCHEDULES
from lightning_megatron.plan.settings import Count, coerce_fields, coerced

SegmentScope = Literal[
    "embedding", "attention", "mlp", "router", "preprocess", "experts", "combine", "head"
]
GraphMode = Literal["segments", "full"]
"""Whether graphs hold parts of a chunk, or a whole step up to the update of the parameters."""
GraphScope = Literal[SegmentScope, "all"]
"""Part of a model that mode "segments" captures, as :class:`CudaGraphs` describes it."""
_GRAPH_COMPILE_MODES = ("reduce-overhead", "max-autotune")
"""Modes of torch.compile that capture CUDA graphs themselves."""
#: Precisions whose main parameters are float32, and whose updates need no value on the host.
_PRECISIONS = ("32-true", "bf16-mixed")
_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def expanded_scopes(names: Iterable[str]) -> frozenset[str]:
    """Return a set of scopes, in which ``all`` stands for every scope.

    Raises:
        UnsupportedError: If a name is neither a scope nor ``all``.
    """
    known = get_args(SegmentScope)
    listed = tuple(names)
    wrong = [name for name in listed if name not in (*known, "all")]
    if wrong:
        raise UnsupportedError(
            f"a scope must be one of {', '.join(known)}, all: {', '.join(map(repr, wrong))}. These "
            "are the scopes of a model's segments."
        )
    return frozenset(known if "all" in listed else listed)


@dataclass(frozen=True)
class CudaGraphs:
    """Settings of CUDA graphs.

    A CUDA graph is a recording of the kernels that a piece of code launches. A replay launches them
    all at once, on the same addresses and without Python, so that small layers no longer wait for
    the host. A replay computes the same as the captured code.

    Args:
        mode: ``segments`` captures the static parts of every chunk, forward and backward, and runs
            the rest eagerly, under any schedule. ``full`` captures a whole step of a rank, all
            microbatches and their communication included, up to the update.
        scopes: Parts that ``segments`` captures: ``embedding``; ``attention`` and ``mlp``, each
            with its norm and residual addition; of a mixture of experts the ``router``,
            ``preprocess`` (sorting the tokens by expert), the ``experts`` with the transport to
            them, and ``combine`` (the weighted sum); the ``head`` with the loss. ``all`` means all
            static parts.
        warmup_steps: Eager training steps before the capture, and eager batches of each dataloader
            of an evaluation before its capture (steps).
        evaluation: Whether validation, test and predict are captured, too, as forward passes
            without gradients.
        on_new_shape: What happens to a microbatch whose shapes were not captured: it runs eagerly,
            raises an error, or gets its own graphs. In mode ``segments`` the graphs of all shapes
            share the memory of one.
        max_shapes: Largest number of shapes that ``on_new_shape="capture"`` captures for each kind
            of step; microbatches of further shapes run eagerly. Each shape costs the time of a
            capture and as many graphs as the first one, which pays only for frequent shapes
            (shapes).
        on_failure: What happens if a rank cannot capture: all ranks run eagerly, or all raise an
            error.
        fixed_shapes: Whether all ranks always have microbatches of the captured shapes. Ranks then
            do not compare shapes before a step, and another shape raises an error.
        optimizer: Whether gradient norm, clipping and the update of the parameters are captured,
            too, in a separate graph. It needs torch's Adam or AdamW with ``fused=True``, and no
            hook that reads gradients.
        check: Whether every step checks that parameters still have the addresses that the graphs
            read.

    Raises:
        ParallelPlanError: If a value has the wrong type or is out of its range, or if values
            contradict each other.
    """

    mode: GraphMode
    scopes: tuple[GraphScope, ...] = ("all",)
    warmup_steps: Count = 3
    evaluation: bool = False
    on_new_shape: Literal["eager", "error", "capture"] = "eager"
    max_shapes: Count = 32
    on_failure: Literal["eager", "error"] = "eager"
    fixed_shapes: bool = False
    optimizer: bool = False
    check: bool = False

    def __post_init__(self) -> None:
        coerce_fields(self, "cuda_graphs.")
        self._check_scopes()
        if self.fixed_shapes and self.on_new_shape == "capture":
            raise ParallelPlanError(
                "cuda_graphs.on_new_shape must not be capture with fixed_shapes: with fixed_shapes "
                "no other shape may occur, and ranks do not compare their shapes. Use on_new_shape "
                "of error, or leave fixed_shapes out."
            )

    @classmethod
    def of(cls, value: Any) -> CudaGraphs | None:
        """Return the settings for any form in which a user can give them.

        Args:
            value: A mode, a mapping of settings, settings, or None for no graphs.

        Raises:
            ParallelPlanError: For any other value, and as for the class.
        """
        settings: GraphMode | CudaGraphs | None = coerced(
            "cuda_graphs", value, GraphMode | CudaGraphs | None
        )
        return settings if settings is None or isinstance(settings, CudaGraphs) else cls(settings)

    @property
    def most_shapes(self) -> int:
        """Return the number of shapes that are captured for each kind of step (shapes)."""
        return self.max_shapes if self.on_new_shape == "capture" else 1

    @property
    def holds_transport(self) -> bool:
        """Return whether graphs must hold the transport of experts, whose sizes are then static."""
        return self.mode == "full" or "experts" in self.scopes

    def captures(self, scope: GraphScope) -> bool:
        """Return whether a part of a model should be captured if it is static."""
        return "all" in self.scopes or scope in self.scopes

    def _check_scopes(self) -> None:
        scopes = ", ".join(self.scopes)
        if not self.scopes:
            raise ParallelPlanError(
                "cuda_graphs.scopes must name at least one part of the model: it is empty, so "
                "nothing would be captured. Use all, or leave cuda_graphs out."
            )
        if len(set(self.scopes)) < len(self.scopes):
            raise ParallelPlanError(
                f"cuda_graphs.scopes must name each part once: it is {scopes}. Name each once."
            )
        if "all" in self.scopes and len(self.scopes) > 1:
            raise ParallelPlanError(
                f"cuda_graphs.scopes must be all or parts of it: it is {scopes}, and all includes "
                "the others. Use all alone, or leave it out."
            )
        if self.mode == "full" and self.scopes != ("all",):
            raise ParallelPlanError(
                f"cuda_graphs.scopes must be all with mode full: it is {scopes}. A graph of a "
                "whole step has no eager parts. Use mode segments, or leave scopes out."
            )
        if "preprocess" in self.scopes and "router" not in self.scopes:
            raise ParallelPlanError(
                f"cuda_graphs.scopes must name router if it names preprocess: it is {scopes}. Both "
                "are captured in one graph, because preprocess sorts tokens by the router's "
                "choices. Use router and preprocess, or neither."
            )


@dataclass(frozen=True, kw_only=True)
class GraphConditions:
    """Settings of a run that decide whether it can be captured.

    Args:
        transport: Transport of tokens to their experts; ``none`` without experts on other ranks.
        offloads: Whether inputs of layers are offloaded to host memory.
        keeps_core: Whether recomputed blocks keep the results of their attention core.
        compile_modes: Modes of the modules that torch.compile compiles.
        gradient_reader: Hook between the backward pass and the update that may read gradients; None
            without one, and before the hooks are known.
    """

    device_type: str
    schedule: str
    transport: Transport | ChosenTransport
    is_automatic: bool
    offloads: bool
    keeps_core: bool
    compile_modes: tuple[str, ...]
    environment: Mapping[str, str]
    precision: str | None = None
    gradient_reader: str | None = None


def check_cuda_graphs(graphs: CudaGraphs, conditions: GraphConditions) -> None:
    """Check that a run can be captured; it needs no process group.

    Raises:
        UnsupportedError: If it cannot; the message says why, and what to use.
    """
    reason = next(_reasons(graphs, conditions), None)
    if reason is not None:
        raise UnsupportedError(reason)


def _reasons(graphs: CudaGraphs, conditions: GraphConditions) -> Iterator[str]:
    """Yield the reasons against a capture."""
    if conditions.device_type != "cuda":
        yield (
            f"cuda_graphs ({graphs.mode}) needs GPUs: the device is {conditions.device_type!r}, "
            "which has no CUDA graphs. Use accelerator='gpu', or leave cuda_graphs out."
        )
    if not conditions.is_automatic:
        yield (
            f"cuda_graphs ({graphs.mode}) needs automatic optimization: the module uses manual "
            "optimization, in which its own code runs backward passes and updates in every step. "
            "Use automatic_optimization=True, or leave cuda_graphs out."
        )
    named = NAMED_SCHEDULES.get(conditions.schedule)
    if named is not None and named.keeps_all:
        yield (
            f"cuda_graphs ({graphs.mode}) cannot be used with schedule {conditions.schedule!r}, "
            "which keeps all microbatches of a step at once, so that each needs graphs and memory "
            "of its own. Use schedule '1f1b', or 'interleaved' with vpp above 1."
        )
    if conditions.transport == "all_to_all" and graphs.holds_transport:
        what = "mode full" if graphs.mode == "full" else "scope experts"
        yield (
            f"cuda_graphs with {what} needs messages of static size: experts.transport is "
            "all_to_all, for which the host reads in every layer how many tokens each rank gets. "
            "Use experts.transport of one_sided or all_gather, or mode segments without scope "
            "experts."
        )
    if conditions.offloads:
        yield (
            f"cuda_graphs ({graphs.mode}) cannot be used with recompute.offload, whose copies to "
            "the host run on separate streams and in memory that torch allocates for each copy. "
            "Leave one of them out."
        )
    if conditions.keeps_core:
        yield (
            f"cuda_graphs ({graphs.mode}) cannot be used with recompute of full_except_core, whose "
            "results of the attention core are kept between the graphs of two passes over a block. "
            "Use recompute of full or selective, or leave cuda_graphs out."
        )
    modes = [mode for mode in conditions.compile_modes if mode in _GRAPH_COMPILE_MODES]
    if modes:
        yield (
            f"cuda_graphs ({graphs.mode}) cannot be used with torch.compile(mode={modes[0]!r}), "
            "which captures its own CUDA graphs, and a graph cannot capture another one. Use "
            "mode 'default' or 'max-autotune-no-cudagraphs', or leave cuda_graphs out."
        )
    yield from _reasons_of_memory(graphs, conditions.environment)
    if graphs.optimizer:
        yield from _reasons_of_update(conditions)


def _reasons_of_update(conditions: GraphConditions) -> Iterator[str]:
    """Yield the reasons against a capture of the update."""
    precision = conditions.precision
    if precision not in (None, *_PRECISIONS):
        why = (
            "the host reads in every step whether gradients have overflowed"
            if precision == "16-mixed"
            else "the fused kernel updates main parameters in float32 only"
        )
        yield (
            f"cuda_graphs.optimizer (True) needs precision {' or '.join(_PRECISIONS)}: it is "
            f"{precision!r}, with which {why}. Use one of them, or optimizer=False."
        )
    if conditions.gradient_reader is not None:
        yield reason_against_reader(conditions.gradient_reader)


def reason_against_reader(hook: str) -> str:
    """Return why the update cannot be captured with a hook.

    Args:
        hook: Hook between the backward pass and the update, such as ``Model.on_after_backward``.
    """
    return (
        f"cuda_graphs.optimizer (True) cannot be used with {hook}, which may read or clip "
        "gradients: one graph computes their norm, clips them and updates the parameters. Remove "
        "the hook, set reads_gradients = False in its class if it does not read gradients and is "
        "not configure_gradient_clipping, or use optimizer=False."
    )


def _reasons_of_memory(graphs: CudaGraphs, environment: Mapping[str, str]) -> Iterator[str]:
    variable = next(
        (name for name in _ALLOCATOR_VARIABLES if _expands(environment.get(name, ""))), None
    )
    register = environment.get("NCCL_GRAPH_REGISTER")
    if variable is not None and register != "0":
        yield (
            f"cuda_graphs ({graphs.mode}) with expandable_segments needs NCCL_GRAPH_REGISTER=0: "
            f"{variable} is {environment[variable]!r}, NCCL_GRAPH_REGISTER is "
            f"{'not set' if register is None else repr(register)}. By default NCCL registers the "
            "memory of captured messages, which is not safe with segments that grow. Set "
            "NCCL_GRAPH_REGISTER=0, or leave expandable_segments out."
        )


def _expands(settings: str) -> bool:
    """Return whether settings of torch's allocator have expandable segments."""
    pairs = [pair.partition(":") for pair in settings.split(",")]
    values = {name.strip(): value.strip().lower() for name, _, value in pairs}
    return values.get("expandable_segments") in ("true", "1")
