"""Memory of a pipeline stage by category, and the settings of a step that determine it."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.plan.cuda_graphs import CudaGraphs
from lightning_megatron.plan.custom_schedule import OrderOfPasses, shape_of_order
from lightning_megatron.plan.experts import Transport
from lightning_megatron.plan.fp8 import FP8
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.plan.model_shape import LossChunk
from lightning_megatron.plan.recomputation import Recomputation, Recompute
from lightning_megatron.plan.settings import require_positive

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Peak memory of one rank of a stage, by category (bytes).

    Args:
        moment: Moment of the peak: "forward", "backward" or "optimizer step".
        in_flight: Microbatches, over all chunks, whose activations exist at the peak.
        num_parameters: Elements of this rank's parameters.
        parameters: Parameters of the model.
        gradients: Buffers of the summed gradients.
        main_parameters: Main parameters of the optimizer.
        optimizer: Optimizer state.
        activations: Activations that layers and the loss keep for backward.
        workspace: Temporary buffers of the running layer, the loss or the optimizer.
        communication: Transfers in flight between stages.
        shared: What microbatches share: symmetric buffers for tokens, clones of experts with their
            gradients, weights in 8 bits, magnitudes of earlier steps, and tables.
        libraries: Workspaces of libraries.
        graphs: Memory of CUDA graphs. The allocator also keeps the memory of the eager steps before
            the captures, which the other parts describe.
        host: Pinned host memory for inputs of blocks, which the peak does not include.
    """

    stage: int
    moment: str
    in_flight: int
    num_parameters: int
    parameters: int
    gradients: int
    main_parameters: int
    optimizer: int
    activations: int = 0
    workspace: int = 0
    communication: int = 0
    shared: int = 0
    libraries: int = 0
    graphs: int = 0
    host: int = 0

    @property
    def static(self) -> int:
        """Return the bytes that are allocated during the whole training."""
        return self.parameters + self.gradients + self.main_parameters + self.optimizer

    @property
    def peak(self) -> int:
        """Return the sum of all categories."""
        return (
            self.static
            + self.activations
            + self.workspace
            + self.communication
            + self.shared
            + self.libraries
            + self.graphs
        )


@dataclass(frozen=True, kw_only=True)
class TrainingShape:
    """Settings of a training step that determine its memory.

    Args:
        seq_length: Tokens of a sample (tokens).
        microbatch_size: Samples of a microbatch (samples).
        num_microbatches: Microbatches of a step on one data-parallel rank.
        schedule: Name of the pipeline schedule, or the user's own order.
        microbatch_group_size: Group size of the "interleaved" schedule, see ``build_schedule``.
        is_paired: Whether stages switch between passes of two microbatches, see ``build_schedule``.
        recompute: Activations that backward recomputes.
        loss_chunk: Tokens whose logits exist at once; None stores those of all.
        expert_transport: Transport of tokens to the ranks that share the experts of a block.
        expert_rows: Limit on the rows of a rank's experts over an even share; None is the worst
            routing.
        clone_places: Places on every rank for clones of busy experts (places).
        zero: 1 if every data rank keeps only its part of main parameters and optimizer state, 0 if
            it keeps all.
        parameter_bytes: Size of a parameter's element (bytes).
        gradient_bytes: Size of a gradient's element (bytes).
        main_bytes: Size of a main parameter's element; 0 if the optimizer updates the parameters
            themselves (bytes).
        state_bytes: Optimizer state of a parameter's element; AdamW has two float32 (bytes).
        activation_bytes: Size of an activation's element (bytes).
        step_bytes: Temporary memory of the optimizer step for each element that it updates; 0 for
            fused optimizers (bytes).
        library_bytes: Workspaces of libraries, independent of the model (bytes).
        cuda_graphs: Settings of CUDA graphs; None without graphs.
        input_bytes: Size of a microbatch's inputs for each token, such as its id and its label
            (bytes).
        fp8: Linear layers that compute in 8 bits, with the products of this package; None without
            any.
    """

    seq_length: int
    microbatch_size: int = 1
    num_microbatches: int = 1
    schedule: OrderOfPasses = "1f1b"
    microbatch_group_size: int | None = None
    is_paired: bool = False
    sequence_parallel: bool = False
    recompute: Recompute | Recomputation = "none"
    loss_chunk: LossChunk = None
    expert_transport: Transport = "auto"
    expert_rows: float | None = None
    clone_places: int = 0
    zero: int = 1
    parameter_bytes: int = 2
    gradient_bytes: int = 4
    main_bytes: int = 4
    state_bytes: int = 8
    activation_bytes: int = 2
    step_bytes: int = 0
    library_bytes: int = 0
    cuda_graphs: CudaGraphs | None = None
    input_bytes: int = 16
    fp8: FP8 | None = None

    @property
    def shares_casts(self) -> bool:
        """Return whether microbatches share the casts of weights to 8 bits."""
        mode = None if self.cuda_graphs is None else self.cuda_graphs.mode
        return self.fp8 is not None and self.fp8.shares_casts(self.num_microbatches, mode)


def static_bytes(
    num_parameters: int, data_ranks: int, training: TrainingShape, stored: int = 0
) -> dict[str, int]:
    """Return the bytes that a rank needs for parameters, gradients and optimizer.

    With AdamW in mixed precision they are 2 + 4 + 12 / data ranks bytes for each parameter, and
    1 + 4 + 12 / data ranks for one that is kept in 8 bits.

    Args:
        num_parameters: Elements of the rank's parameters.
        data_ranks: Number of ranks that have the same parameters: dp x cp, for experts edp.
        training: Sizes of the types, and the ZeRO level.
        stored: Parameters that are kept in 8 bits, whose main parameters are separate in every
            precision (elements).
    """
    owned = _owned(num_parameters, data_ranks, training)
    separate = 0 if training.main_bytes else _owned(stored, data_ranks, training)
    return {
        "parameters": num_parameters * training.parameter_bytes
        - stored * (training.parameter_bytes - 1),
        "gradients": num_parameters * training.gradient_bytes,
        "main_parameters": owned * training.main_bytes + separate * training.parameter_bytes,
        "optimizer": owned * training.state_bytes,
    }


def _owned(count: int, data_ranks: int, training: TrainingShape) -> int:
    return -(-count // data_ranks) if training.zero else count


def check_shape(layout: ParallelLayout, training: TrainingShape) -> None:
    """Refuse sizes that do not fit together.

    Raises:
        ParallelPlanError: If a size is wrong.
    """
    for name in ("seq_length", "microbatch_size", "num_microbatches"):
        require_positive(name, getattr(training, name))
    shape = shape_of_order(training.schedule)
    if shape != layout.shape:
        raise ParallelPlanError(
            f"the layout must place chunks as the schedule does: shape is {layout.shape!r}. Use "
            f"shape={shape!r} for schedule {training.schedule!r}."
        )
    if training.zero not in (0, 1):
        raise ParallelPlanError(f"zero must be 0 or 1: it is {training.zero!r}.")
    Recomputation.of(training.recompute)
    shards = layout.cp * (layout.tp if training.sequence_parallel else 1)
    if training.seq_length % shards:
        raise ParallelPlanError(
            f"seq_length ({training.seq_length}) must be a multiple of {shards}, because {shards} "
            "ranks hold equal parts of each sequence. Use a seq_length of "
            f"{-(-training.seq_length // shards) * shards}."
        )
