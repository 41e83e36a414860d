"""State of one run of a pipeline schedule: tensors in flight, the passes that use them, the loss
weights of microbatches, and the observers of actions and backward passes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.experts.routing.attached_loss import LossWeight
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.pending import Pending, start_transfers
from lightning_megatron.layers.parameters.weight_gradient_queue import WeightGradientQueue
from lightning_megatron.models.stage import StageCursor, StepPlan, wrong_calls
from lightning_megatron.pipeline.action_times import ActionTimes
from lightning_megatron.pipeline.microbatch import Microbatch
from lightning_megatron.pipeline.step_plans import StepFn, StepPlans, TensorSpec, signature_of
from lightning_megatron.plan.actions import Action, Kind, PassPair, PipelineUnit
from lightning_megatron.plan.schedule import Schedule
from lightning_megatron.plan.transfers import Transfer

LossOf = Callable[[Any, int], Tensor | None]
WeightOf = Callable[[int], float | Tensor]
RunBackward = Callable[[Tensor], None]
Inspector = Callable[[Any, bool], None]
#: Key of one forward and backward pass: (chunk, microbatch).
ChunkMicrobatch = tuple[int, int]


class MicrobatchWeights:
    """Loss weights of a step's microbatches.

    Only the last stage knows the weights. It sends each of them to the earlier stages, together
    with the gradients of the microbatch.

    Args:
        loss_weight: Record from which layers read the weight; None if no layer attaches a loss, so
            that no weights are sent.
        device: Device of the weights.
        fixed: Tensor from which layers read the weight of every microbatch, such as
            :func:`new_weight` makes. While the backward pass of a microbatch runs, the tensor has
            the weight of that microbatch. A CUDA graph reads the weight at the address of the
            capture, so all steps with graphs must use the same tensor. None makes a new tensor for
            each microbatch of each step.
    """

    def __init__(
        self, loss_weight: LossWeight | None, device: torch.device, fixed: Tensor | None = None
    ) -> None:
        self._loss_weight = loss_weight
        self._device = device
        self._fixed = fixed
        self._weights: dict[int, Tensor] = {}

    def begin_forward(self, number: int) -> None:
        """Make a microbatch current. Its weight must be set before its backward pass."""
        if self._loss_weight is not None:
            self._loss_weight.value = self._weight(number) if self._fixed is None else self._fixed

    def begin_backward(self, number: int) -> None:
        """Make a microbatch current, whose weight has been set.

        A layer whose activations are recomputed attaches its losses again, and reads the weight.
        """
        self.begin_forward(number)
        # Attached losses read their weights in backward passes only, one of which runs at a time.
        if self._loss_weight is not None and self._fixed is not None:
            self._fixed.copy_(self._weight(number))

    def exchange(self, other: Any) -> Any:
        """Continue with another weight, and return the present one; None keeps it."""
        if self._loss_weight is None:
            return None
        here = self._loss_weight.value
        self._loss_weight.value = here if other is None else other
        return here

    def fill(self, number: int, value: float | Tensor) -> None:
        """Set the weight of a microbatch."""
        if self._loss_weight is not None:
            self._weight(number).fill_(value)

    def messages(self, transfers: Sequence[Transfer]) -> list[tuple[Tensor, int]]:
        """Return the weights that accompany gradients, each with the index of the peer stage."""
        if self._loss_weight is None:
            return []
        return [
            (self._weight(transfer.microbatch), transfer.peer)
            for transfer in transfers
            if transfer.kind == "B"
        ]

    def _weight(self, number: int) -> Tensor:
        if number not in self._weights:
            self._weights[number] = new_weight(self._device)
        return self._weights[number]


def new_weight(device: torch.device) -> Tensor:
    """Return a tensor for the weight of a microbatch, with the value zero."""
    # Validation may come first, and tensors of its inference mode cannot be written later.
    with torch.inference_mode(False):
        return torch.zeros((), dtype=torch.float64, device=device)


class BackwardObserver(Protocol):
    """Observer of the last backward pass of each chunk in a step."""

    def begin_last_backward(self, chunk: int) -> None:
        """Prepare for the last backward pass of ``chunk`` in this step; it is the next action."""

    def begin_last_weight_half(self, chunk: int, left: Mapping[Hashable, int]) -> None:
        """Prepare for the last weight half of ``chunk``, if its backward passes run in halves.

        Args:
            chunk: Chunk whose input halves have all run, and whose last weight half runs next.
            left: Number of gradients that this weight half will add to each gradient slot. All
                other slots are complete.
        """

    def start_reduction(self, chunk: int) -> None:
        """Start the reduction of the gradients of ``chunk``, which are now complete."""


class ActionObserver(Protocol):
    """Observer of a step's actions on this rank."""

    def begin_step(self, schedule: Schedule) -> None:
        """Prepare for the actions of a step.

        Args:
            schedule: Schedule of the step.
        """

    def during(self, action: Action) -> AbstractContextManager[None]:
        """Return the context manager in which an action runs."""

    def record_sends(self, unit: PipelineUnit, transfers: Pending) -> None:
        """Record transfers that read an output or an input gradient of a unit.

        The memory of these tensors must not be reused before the transfers complete.
        """


@dataclass(frozen=True)
class BackwardPasses:
    """Backward passes of a run, which accumulate gradients.

    Args:
        loss_of: Function from a result of the step and the microbatch's index to the weighted
            scalar loss, or to None for a microbatch without a loss; None if no microbatch has one.
        weight_of: Function from a microbatch's index to the factor that ``loss_of`` has applied.
            Losses that layers attach are multiplied by the same factor. Called on the last stage.
        run: Function that runs the backward pass from a result of ``loss_of``; called on the last
            stage.
        observer: Observer of the last backward pass of each chunk; None if the sums over ranks do
            not start during these passes.
        inspector: Function that is called before each backward pass with its first graph node, and
            with whether that node computed the loss; None calls nothing.
        loss_weight: Factor of the main loss, for layers that attach losses; None if there are none.
        weight_gradients: Queue of the gradient slots, for schedules with input and weight halves.
            None computes all gradients in the input halves.
    """

    loss_of: LossOf | None = None
    weight_of: WeightOf = lambda number: 1.0
    run: RunBackward = Tensor.backward
    observer: BackwardObserver | None = None
    inspector: Inspector | None = None
    loss_weight: LossWeight | None = None
    weight_gradients: WeightGradientQueue | None = None


@dataclass(eq=False)
class StepRun:
    """State of one run: inputs, outputs and gradients in flight, by (chunk, microbatch).

    Args:
        num_chunks: Chunks of layers on this stage.
        plans: Plans of the steps of all runs.
        step_fn: Function of a microbatch's data.
        microbatches: Microbatches of the run.
        step: Number of this run, which selects the random streams (batches).
        backward: Backward passes; None for a run without them.
        fixed_weight: Tensor from which attached losses read the weight of every microbatch, as
            :class:`MicrobatchWeights` describes; None makes new tensors.
        actions: Observer of the actions; None without one.
        times: Recorders of the times of the actions.
    """

    mesh: ParallelMesh
    num_chunks: int
    plans: StepPlans
    step_fn: StepFn
    microbatches: Sequence[Microbatch]
    step: int
    backward: BackwardPasses | None
    fixed_weight: Tensor | None
    actions: ActionObserver | None
    times: Sequence[ActionTimes] = ()

    def __post_init__(self) -> None:
        self._axis = self.mesh.pp
        self._placement = self.mesh.layout.placement
        self.results: list[Any] = []
        self.plan = StepPlan()
        #: Tensors from the previous chunk, from their receive until the backward pass.
        self._inputs: dict[ChunkMicrobatch, list[Tensor]] = {}
        #: Losses of the last chunk, until their backward passes.
        self._losses: dict[ChunkMicrobatch, Tensor | None] = {}
        #: Tensors for the next chunk, from the forward pass until they are sent.
        self._outputs: dict[ChunkMicrobatch, list[Tensor]] = {}
        #: Graph edges of the sent outputs, from which the backward pass starts.
        self._edges: dict[ChunkMicrobatch, list[GradientEdge | None]] = {}
        #: Shapes and dtypes of the sent outputs, whose gradients will arrive.
        self._sent: dict[ChunkMicrobatch, Sequence[TensorSpec]] = {}
        #: Gradients of the sent outputs before the backward pass, of the inputs after it.
        self._gradients: dict[ChunkMicrobatch, list[Tensor]] = {}
        #: Transfers that fill received tensors, by the kind of the tensors.
        self._arrivals: dict[tuple[str, ChunkMicrobatch], Pending] = {}
        self._boundaries: dict[Any, list[TensorSpec]] = {}
        self._pending: list[Pending] = []
        #: Random streams after a forward pass, from which a backward pass in turns starts.
        self._streams: dict[ChunkMicrobatch, Any] = {}
        passes = self.backward or BackwardPasses()
        self._weights = MicrobatchWeights(passes.loss_weight, self.mesh.device, self.fixed_weight)
        self._weight_gradients = passes.weight_gradients or WeightGradientQueue()

    @contextmanager
    def whole_step(self) -> Iterator[None]:
        """Run a complete step inside the block, and wait for the last transfers at its end.

        If an error ends the step, queued weight gradients are discarded.
        """
        for times in self.times:
            times.begin_run()
        try:
            yield
            for pending in self._pending:
                pending.wait()
        finally:
            self._weight_gradients.discard()

    def announce(self, action: Action, observer: BackwardObserver) -> None:
        """Notify an observer that the next action is the last backward pass of its chunk."""
        if action.kind == "W":
            left = self._weight_gradients.count_left((action.chunk, action.microbatch))
            observer.begin_last_weight_half(action.chunk, left)
        else:
            observer.begin_last_backward(action.chunk)

    def compute(self, action: Action) -> None:
        """Run a forward pass, a backward pass, or its input or weight half."""
        key = (action.chunk, action.microbatch)
        # If one CUDA graph contains the step, the device counts the actions itself.
        self._axis.journal.begin_part(action)
        self._wait_for_tensors(action.kind, key)
        # The time of an action starts when the tensors that it reads have been received.
        with ExitStack() as stack:
            for times in self.times:
                stack.enter_context(times.measure(action))
            if self.actions is not None:
                stack.enter_context(self.actions.during(action))
            if self.mesh.turns is not None:
                stack.enter_context(self.mesh.turns.on(self._is_second(key)))
            self._run(action.kind, key)

    def compute_pair(self, pair: PassPair) -> None:
        """Run a forward pass and the backward pass of another microbatch in turns.

        The pair is measured as one action. The backward pass computes weight gradients at the end
        of a turn, after it has started the communication that other ranks wait for.
        """
        turns = self.mesh.turns
        assert turns is not None, "the schedule has pairs"
        forward, backward = ((action.chunk, action.microbatch) for action in pair.actions)
        self._wait_for_tensors("F", forward)
        self._wait_for_tensors("B", backward)

        def run_backward() -> None:
            self._run("I", backward)
            self._run("W", backward)

        with ExitStack() as stack:
            for times in self.times:
                stack.enter_context(times.measure(pair.backward))
            turns.run(
                partial(self._run, "F", forward),
                run_backward,
                (self.mesh.random, self._weights),
                (self._streams[backward], None),
                self._weight_gradients.run_open,
                self._is_second(forward),
            )

    def _is_second(self, key: ChunkMicrobatch) -> bool:
        """Return whether a microbatch in a chunk has the second stream; only one of a pair does."""
        chunk, number = key
        return bool((chunk if self.num_chunks > 1 else number) % 2)

    def _run(self, kind: Kind, key: ChunkMicrobatch) -> None:
        if self.mesh.turns is not None:
            self.mesh.turns.use([*self._inputs.get(key, ()), *self._gradients.get(key, ())])
        if kind == "F":
            self._forward(key)
        elif kind == "B":
            self._backward(key)
        elif kind == "I":
            with self._weight_gradients.open(key):
                self._backward(key)
        else:
            self._weight_gradients.run(key)

    def start_transfers(self, sends: Sequence[Transfer], receives: Sequence[Transfer]) -> None:
        """Start a batch of transfers. The pass that reads a received tensor waits for it."""
        outgoing = [
            (tensor, transfer.peer) for transfer in sends for tensor in self._outgoing(transfer)
        ]
        buffers = [self._buffers(transfer) for transfer in receives]
        incoming = [
            (buffer, transfer.peer)
            for transfer, received in zip(receives, buffers, strict=True)
            for buffer in received
        ]
        outgoing += self._weights.messages(sends)
        incoming += self._weights.messages(receives)
        pending = start_transfers(outgoing, incoming, self._axis)
        if self.actions is not None:
            for transfer in sends:
                unit = PipelineUnit(transfer.chunk, transfer.microbatch)
                self.actions.record_sends(unit, pending)
        # Keep unfinished sends, because their tensors must stay alive.
        self._pending = [earlier for earlier in self._pending if not earlier.is_done()] + [pending]
        for transfer, received in zip(receives, buffers, strict=True):
            key = (transfer.chunk, transfer.microbatch)
            (self._inputs if transfer.kind == "F" else self._gradients)[key] = received
            for times in self.times:
                times.record_message(sum(buffer.nbytes for buffer in received))
            self._arrivals[transfer.kind, key] = pending

    def _forward(self, key: ChunkMicrobatch) -> None:
        chunk, number = key
        microbatch = self.microbatches[number]
        self.seek(number)
        self._weights.begin_forward(number)
        cursor = None
        if self._axis.size > 1:
            received = self._inputs.get(key, [])
            for tensor in received if self.backward is not None else ():
                tensor.requires_grad_(tensor.is_floating_point())
            cursor = StageCursor(chunk, received, plan=self.plan)
        result, ended = self.plans.call(self.step_fn, microbatch, cursor)
        is_last = self.mesh.has_loss and chunk == self.num_chunks - 1
        if cursor is not None and (ended != is_last or cursor.calls != self.plan.num_calls):
            raise UnsupportedError(wrong_calls(self.plan.num_calls, cursor.calls))
        if is_last:
            self.results.append(result)
            if self.backward is not None:
                if self.backward.loss_of is not None:
                    self._losses[key] = self.backward.loss_of(result, number)
                self._weights.fill(number, self.backward.weight_of(number))
        elif cursor is not None:
            self._outputs[key] = cursor.sent
            following = self._placement.chunk_beside(self._axis.rank, chunk, 1)
            if following is not None:
                self._inputs[following, number] = self._released(key)
                self._sent.pop(key, None)
        if self.backward is None:
            self._inputs.pop(key, None)
        elif self.mesh.turns is not None:
            self._streams[key] = self.mesh.random.exchange(None)

    def _backward(self, key: ChunkMicrobatch) -> None:
        assert self.backward is not None, "the schedule of the run has backward passes"
        chunk, number = key
        self._weights.begin_backward(number)
        self._streams.pop(key, None)
        inspect = self.backward.inspector
        loss = self._losses.pop(key, None)
        if loss is not None:
            if inspect is not None:
                inspect(loss.grad_fn, True)
            self.backward.run(loss)
        gradients = self._gradients.pop(key, [])
        # An edge is None if its output needs no gradient, as on a stage whose parameters are all
        # frozen.
        edge_gradients = zip(self._edges.pop(key, ()), gradients, strict=True)
        pairs = [(edge, gradient) for edge, gradient in edge_gradients if edge is not None]
        edges = [edge for edge, _ in pairs]
        if inspect is not None:
            for edge in edges:
                inspect(edge.node, False)
        if edges:
            torch.autograd.backward(edges, [gradient for _, gradient in pairs])
        received = [tensor for tensor in self._inputs.pop(key, ()) if tensor.is_floating_point()]
        before = self._placement.chunk_beside(self._axis.rank, chunk, -1)
        target = chunk if before is None else before
        gradients = [
            torch.zeros_like(tensor) if tensor.grad is None else tensor.grad for tensor in received
        ]
        if before is not None and self.actions is not None:
            # An observer may run this chunk again, at the same addresses, before the other chunk
            # has read the gradients.
            gradients = [gradient.clone() for gradient in gradients]
        self._gradients[target, number] = gradients

    def _outgoing(self, transfer: Transfer) -> list[Tensor]:
        """Return the tensors of a send, and release or replace this stage's references to them."""
        key = (transfer.chunk, transfer.microbatch)
        # The previous stage gets the gradients of the tensors that it sent; `_backward` has stored
        # these gradients.
        if transfer.kind == "B":
            return [gradient.contiguous() for gradient in self._gradients.pop(key)]
        return [output.contiguous() for output in self._released(key)]

    def _released(self, key: ChunkMicrobatch) -> list[Tensor]:
        """Return a forward pass's outputs for the next chunk, and store their graph edges.

        The backward pass starts from the edges. It does not need the outputs' values, so their
        memory is released as soon as the next chunk has them.
        """
        outputs = self._outputs.pop(key)
        if self.backward is not None:
            # Gradients arrive in this order, and only for floating-point outputs: the next stage
            # sends zeros for those that it did not use.
            floating = [output for output in outputs if output.is_floating_point()]
            self._sent[key] = [(output.shape, output.dtype) for output in floating]
            self._edges[key] = [
                get_gradient_edge(output) if output.requires_grad else None for output in floating
            ]
        # Detach the outputs, because the autograd graph must not extend beyond the chunk.
        return [output.detach() for output in outputs]

    def _buffers(self, transfer: Transfer) -> list[Tensor]:
        device = self.mesh.device
        key = (transfer.chunk, transfer.microbatch)
        specs = self._sent.pop(key) if transfer.kind == "B" else self._tensor_specs(transfer)
        return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in specs]

    def _tensor_specs(self, transfer: Transfer) -> Sequence[TensorSpec]:
        microbatch = self.microbatches[transfer.microbatch]
        # The cache lasts for this run only: the next run may have another step function, or one
        # that gives the model another part of an equally shaped batch.
        key = transfer.chunk, signature_of(microbatch.data)
        if key not in self._boundaries:
            self.seek(transfer.microbatch)
            self._boundaries[key] = self.plans.tensor_specs(
                self.step_fn, microbatch, self.plan, transfer.chunk
            )
        return self._boundaries[key]

    def seek(self, number: int) -> None:
        """Move the random streams to the start of a microbatch."""
        mesh = self.mesh
        sizes = [microbatch.num_samples for microbatch in self.microbatches]
        part = range(sum(sizes[:number]), sum(sizes[: number + 1]))
        samples = mesh.random.samples_of(part, sum(sizes), mesh.dp.rank, mesh.dp.size)
        microbatch = number * mesh.dp.size + mesh.dp.rank
        mesh.random.begin_microbatch(self.step, microbatch, samples)

    def _wait_for_tensors(self, kind: Kind, key: ChunkMicrobatch) -> None:
        """Make the device wait for the tensors that an action reads."""
        if kind == "W":
            return
        received: Kind = "F" if kind == "F" else "B"
        pending = self._arrivals.pop((received, key), None)
        if pending is not None:
            pending.wait()
