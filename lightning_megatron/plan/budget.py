"""Estimate of the memory of every pipeline stage, by category, before anything is built."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.plan.activations import ActivationCosts, activation_costs, offloaded
from lightning_megatron.plan.cuda_graphs import CudaGraphs
from lightning_megatron.plan.custom_schedule import OrderOfPasses, build_order, shape_of_order
from lightning_megatron.plan.eight_bits import EightBitLayers
from lightning_megatron.plan.experts import Transport
from lightning_megatron.plan.fp8 import FP8
from lightning_megatron.plan.graph_memory import GraphMemory, graph_memory
from lightning_megatron.plan.kept_activations import KeptActivations, eager_activations
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.plan.model_shape import LossChunk, ModelShape
from lightning_megatron.plan.network_activations import MicrobatchShape
from lightning_megatron.plan.partition import partition_of
from lightning_megatron.plan.recomputation import Parts, Recomputation, Recompute
from lightning_megatron.plan.schedule import Schedule
from lightning_megatron.plan.settings import require_positive
from lightning_megatron.plan.step_points import ChunkCosts, StepPoint, moments

GIB = 2**30
#: Size of an element of a clone's gradient (bytes).
_CLONE_GRADIENT = 4


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
        activations: Activations that layers keep for backward.
        loss: Logits, and tensors that the loss derives from them.
        workspace: Temporary buffers of the running layer or optimizer.
        communication: Transfers in flight between stages, symmetric buffers for tokens, and clones
            of experts with their gradients.
        libraries: Workspaces of libraries.
        casts: Weights in 8 bits that microbatches share, and magnitudes of earlier steps.
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
    loss: int = 0
    workspace: int = 0
    communication: int = 0
    libraries: int = 0
    casts: int = 0
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
            + self.loss
            + self.workspace
            + self.communication
            + self.libraries
            + self.casts
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


def estimate_memory(
    model: ModelShape,
    layout: ParallelLayout,
    training: TrainingShape,
    *,
    table: KeptActivations | None = None,
) -> tuple[StageMemory, ...]:
    """Estimate the peak memory of every stage, including the optimizer state.

    Layers are assigned to stages as in a training: by cost, or as the layout says.

    The first step creates the optimizer state. The estimate walks through the actions of the
    schedule: a forward adds the activations that its chunk keeps, a backward frees them. Of these,
    and of what is recomputed, an input half keeps the factors of weight gradients for its weight
    half. The peak is the maximum of these activations plus the temporary buffers of the running
    layer. For an all-to-all, balanced routing is assumed: see
    :func:`~lightning_megatron.plan.network_activations.mixture_costs`. CUDA graphs are counted as
    in :func:`~lightning_megatron.plan.graph_memory.graph_memory`.

    Args:
        layout: Sizes of the axes; the data ranks are dp x cp.
        training: Settings of the step.
        table: Activations that layers keep; by default those of plain torch operations.

    Returns:
        One estimate for each stage, for the rank of tp with the largest memory.

    Raises:
        ParallelPlanError: For sizes that do not fit together.
        UnsupportedError: For CUDA graphs under a schedule that they do not support.
    """
    _check(layout, training)
    work = model.costs(training.loss_chunk, layout.tp)
    layers = partition_of(work, layout).by_stage(layout.placement)
    schedule = build_order(
        training.schedule,
        layout.pp,
        training.num_microbatches,
        layout.vpp,
        training.microbatch_group_size,
    )
    costs = _BlockCosts(
        model, layout, training, table or eager_activations(model, training.activation_bytes)
    )
    stages = []
    for stage, chunks in enumerate(layers):
        blocks = [costs.of_chunk(chunk) for chunk in chunks]
        found = [costs.eight_bits(layer) for chunk in chunks for layer in chunk]
        eight_bits = [layers_of_block for layers_of_block in found if layers_of_block is not None]
        stages.append(
            _stage_memory(
                model, layout, training, stage, schedule, blocks, costs.of(()), eight_bits
            )
        )
    return tuple(stages)


class _BlockCosts:
    """Costs of the blocks of a model, each kind of which is computed once."""

    def __init__(
        self,
        model: ModelShape,
        layout: ParallelLayout,
        training: TrainingShape,
        table: KeptActivations,
    ) -> None:
        self._model = model
        self._training = training
        self._table = table
        self._recomputation = Recomputation.of(training.recompute)
        self._tp = layout.tp
        self._known: dict[tuple[Parts, bool, EightBitLayers | None], ActivationCosts] = {}
        self._batch = MicrobatchShape(
            num_tokens=-(-training.seq_length // layout.cp) * training.microbatch_size,
            activation_bytes=training.activation_bytes,
            tp=layout.tp,
            sequence_parallel=training.sequence_parallel and layout.tp > 1,
            ep=layout.ep,
            etp=layout.etp,
            transport=training.expert_transport,
            expert_rows=training.expert_rows if layout.ep > 1 else None,
            clone_places=training.clone_places,
        )

    def of_chunk(self, layers: Sequence[int]) -> list[ActivationCosts]:
        """Return the costs of the layers of a chunk."""
        return [
            self.of(
                self._recomputation.parts_of(place, len(layers)),
                self._model.has_experts_in(layer),
                self.eight_bits(layer),
            )
            for place, layer in enumerate(layers)
        ]

    def eight_bits(self, layer: int) -> EightBitLayers | None:
        """Return the linear layers of a block that compute in 8 bits; None without any."""
        training = self._training
        if training.fp8 is None:
            return None
        layers = EightBitLayers.of(
            training.fp8, self._model, layer, self._tp, shares_casts=training.shares_casts
        )
        return layers if layers.sizes else None

    def of(
        self,
        recompute: Parts,
        has_experts: bool = False,
        eight_bits: EightBitLayers | None = None,
    ) -> ActivationCosts:
        """Return the costs of a block that recomputes some of its parts."""
        key = recompute, has_experts, eight_bits
        if key not in self._known:
            costs = activation_costs(
                self._model,
                self._table,
                self._batch,
                seq_length=self._training.seq_length,
                recompute=recompute,
                has_experts=has_experts,
                loss_chunk=self._training.loss_chunk,
                eight_bits=eight_bits,
            )
            leaves = self._recomputation.offload and costs.is_whole
            self._known[key] = offloaded(costs) if leaves else costs
        return self._known[key]


def _stage_memory(
    model: ModelShape,
    layout: ParallelLayout,
    training: TrainingShape,
    stage: int,
    schedule: Schedule,
    chunks: Sequence[Sequence[ActivationCosts]],
    ends: ActivationCosts,
    eight_bits: Sequence[EightBitLayers],
) -> StageMemory:
    """Find the peak memory of a stage; ``ends`` has the costs of layers outside of its blocks."""
    blocks = [block for chunk in chunks for block in chunk]
    num_mixtures = sum(block.has_experts for block in blocks)
    dense = model.stage_parameters(layout, stage, len(blocks), num_mixtures)
    expert = num_mixtures * model.expert_parameters(layout)
    stored = sum(layers.num_weights for layers in eight_bits if layers.is_stored)
    parts = [
        static_bytes(dense, layout.dp * layout.cp, training, stored),
        static_bytes(expert, layout.edp, training),
    ]
    static = {name: sum(map(itemgetter(name), parts)) for name in parts[0]}
    owned = _owned(dense, layout.dp * layout.cp, training) + _owned(expert, layout.edp, training)
    head = schedule.placement.owner(schedule.placement.num_virtual_stages - 1)
    costs = [
        ChunkCosts.of(blocks, ends, has_head=(stage, number) == head)
        for number, blocks in enumerate(chunks)
    ]
    peaks = [
        *moments(schedule.actions(stage), costs),
        StepPoint("optimizer step", 0, 0, 0, training.step_bytes * owned),
    ]
    weights = sum(layers.weight_bytes for layers in eight_bits)

    def casts_at(moment: StepPoint) -> int:
        # The casts of weights are freed before the optimizer steps.
        return 0 if moment.name == "optimizer step" else weights

    worst = max(peaks, key=lambda moment: moment.size + casts_at(moment))
    # A stage receives one tensor while it sends another.
    transfers = 2 * ends.boundary if layout.pp > 1 else 0
    clones = clone_bytes(model, layout, training) if num_mixtures else 0
    slots = max((block.slots for block in blocks), default=0)
    history = sum(layers.history_bytes for layers in eight_bits)
    return StageMemory(
        stage=stage,
        moment=worst.name,
        in_flight=worst.in_flight,
        num_parameters=dense + expert,
        **static,
        activations=worst.activations,
        loss=worst.loss,
        workspace=worst.workspace,
        communication=(transfers if worst.name != "optimizer step" else 0) + slots + clones,
        libraries=training.library_bytes,
        casts=casts_at(worst) + history,
        graphs=_graph_memory(training, schedule, stage, chunks, ends, transfers).total,
        host=max(moment.in_flight for moment in peaks) * max(map(_host_bytes, chunks)),
    )


def _host_bytes(blocks: Sequence[ActivationCosts]) -> int:
    return sum(block.on_host for block in blocks)


def _graph_memory(
    training: TrainingShape,
    schedule: Schedule,
    stage: int,
    chunks: Sequence[Sequence[ActivationCosts]],
    ends: ActivationCosts,
    transfers: int,
) -> GraphMemory:
    if training.cuda_graphs is None:
        return GraphMemory()
    return graph_memory(
        training.cuda_graphs,
        schedule,
        stage,
        chunks,
        ends,
        num_tokens=training.seq_length * training.microbatch_size,
        input_bytes=training.input_bytes,
        transfers=transfers,
    )


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


def clone_bytes(model: ModelShape, layout: ParallelLayout, training: TrainingShape) -> int:
    """Return the memory of the clones of a rank and of their gradients, for all layers together.

    Gradients are transferred in float32.

    Args:
        training: The places, and the size of a weight's element.
    """
    if model.experts is None or layout.ep == 1:
        return 0
    homes = model.experts.num_experts // layout.ep
    expert_size = model.expert_parameters(layout) // homes
    return training.clone_places * expert_size * (training.activation_bytes + _CLONE_GRADIENT)


def _owned(count: int, data_ranks: int, training: TrainingShape) -> int:
    return -(-count // data_ranks) if training.zero else count


def _check(layout: ParallelLayout, training: TrainingShape) -> None:
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
