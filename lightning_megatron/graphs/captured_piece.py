"""Graphs of one static piece of a chunk in one slot: of its forward and of its backward pass."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from contextlib import nullcontext
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.graphs.backend import (
    CAPTURE_ERRORS,
    CapturedGraph,
    without_collection,
)
from lightning_megatron.graphs.capture_tools import CaptureTools, StaticPiece
from lightning_megatron.graphs.effects import Effects
from lightning_megatron.graphs.piece_backward import PieceBackward
from lightning_megatron.graphs.piece_inputs import OutputGradients, PieceInputs
from lightning_megatron.graphs.piece_memory import PieceMemory, Tenant
from lightning_megatron.graphs.values import FlatValues, flatten
from lightning_megatron.groups.generators import GeneratorPool, StreamPosition
from lightning_megatron.layers.gradient_slot import GradientSlot, SlotState, fill_empty
from lightning_megatron.layers.weight_gradient_queue import (
    Products,
    compute_products,
)


class CapturedPiece:
    """Forward and backward graph of one piece in one slot.

    The first forward pass captures the forward graph, and the first backward pass the backward
    graph. A capture runs nothing on the device, so a replay follows it at once.

    Args:
        piece: The piece.
        memory: Memory of the slot.
        tools: Tools of the captures.
        label: Description of the slot, such as ``slot 1``.
        is_first: Whether the microbatch is the first of a step that has a backward pass, which
            overwrites the gradient sums.
    """

    def __init__(
        self,
        piece: StaticPiece,
        memory: PieceMemory,
        tools: CaptureTools,
        label: str,
        is_first: bool,
    ) -> None:
        self.piece = piece
        self._is_first = is_first
        self._memory = memory
        self._tools = tools
        self._label = label
        self._inputs: PieceInputs | None = None
        self._form: Hashable = None
        self._outputs: FlatValues = flatten(())
        self._needs_gradient: list[bool] = []
        self._forward: tuple[CapturedGraph, Effects] | None = None
        self._backward: tuple[CapturedGraph, Effects] | None = None
        self._weight_half: tuple[CapturedGraph, Effects] | None = None
        # What the weight half reads, which later captures must not overwrite.
        self._factors: list[Any] = []
        self._gradients: OutputGradients | None = None
        self._input_gradients: list[Tensor | None] = []
        # Values between the segments, if their backward passes read nothing else that they write.
        self._between: list[Tensor] = []

    # ---- forward pass

    def find_mismatch(self, values: FlatValues) -> str | None:
        """Return why these inputs do not fit the graphs; None if they do, or before the capture."""
        if self._inputs is None:
            return None
        if values.form != self._form:
            return "inputs of another form than at the capture"
        return self._inputs.find_mismatch(values.tensors)

    @property
    def is_captured(self) -> bool:
        """Return whether the forward graph exists."""
        return self._forward is not None

    @property
    def is_complete(self) -> bool:
        """Return whether all graphs exist that the piece needs."""
        return self.is_captured and (self._backward is not None or not any(self._needs_gradient))

    @property
    def num_graphs(self) -> int:
        """Return the number of graphs."""
        return sum(graph is not None for graph in self._graphs)

    @property
    def _graphs(self) -> tuple[tuple[CapturedGraph, Effects] | None, ...]:
        return self._forward, self._backward, self._weight_half

    def capture_forward(self, values: FlatValues, constants: Collection[int]) -> bool:
        """Capture the forward graph, and return whether it exists now.

        Args:
            values: Inputs of the piece.
            constants: Addresses of inputs that keep their addresses in all steps.
        """
        try:
            self._capture_forward(values, constants)
        except CAPTURE_ERRORS as error:
            self._tools.note_failure(self._label_of("forward"), error)
        return self.is_captured

    def _capture_forward(self, values: FlatValues, constants: Collection[int]) -> None:
        def stays(tensor: Tensor) -> bool:
            return self._memory.has(tensor) or tensor.data_ptr() in constants

        inputs = PieceInputs(values.tensors, stays)
        inputs.fill(values.tensors)
        given = values.with_tensors(inputs.tensors)
        generators = self.piece.draws.exact()
        between: list[Tensor] = []

        def run() -> tuple[Any, ...]:
            if self._memory.is_shared:
                return self.piece.segments.run_and_record(given, between)
            return self.piece.segments(given)

        graph, effects, outputs = self._capture("forward", generators, run)
        self._between = [tensor.detach() for tensor in between]
        self._outputs = flatten(outputs)
        self._needs_gradient = [tensor.requires_grad for tensor in self._outputs.tensors]
        self._memory.add(self._outputs.tensors)
        self._inputs = inputs
        self._form = values.form
        self._forward = graph, effects

    def __call__(self, values: FlatValues) -> tuple[Any, ...]:
        """Replay the forward graph, and return the outputs of the piece.

        Their values are overwritten when the slot is used again.

        Args:
            values: Inputs that fit.
        """
        tensors: Sequence[Tensor]
        if self.piece.has_backward:
            # A piece whose inputs have no gradients still has parameters that do.
            anchor = torch.empty(0, requires_grad=True)
            tensors = _Replayed.apply(self, anchor, *values.tensors)
        else:
            self.replay_forward(values.tensors)
            tensors = self._outputs.tensors
        result: tuple[Any, ...] = self._outputs.with_tensors(tensors)
        return result

    @property
    def tenant(self) -> Tenant | None:
        """Return the microbatch whose activations lie in the slot."""
        return self._memory.tenant

    def recall(self, tenant: Tenant) -> bool:
        """Bring the activations of a microbatch back into the slot, and return whether they are
        there.
        """
        return self._memory.recall(tenant)

    def replay_forward(self, tensors: Sequence[Tensor]) -> StreamPosition:
        """Run the forward graph on inputs, and return the position of its random streams."""
        assert self._forward is not None, "the graph was captured"
        assert self._inputs is not None, "the graph was captured"
        graph, effects = self._forward
        self._inputs.fill(tensors)
        with self._tools.observers.repeat(effects) as position:
            graph.replay()
        self._memory.keep([*self._inputs.copied, *self._between])
        return position

    @property
    def outputs(self) -> list[tuple[Tensor, bool]]:
        """Return the outputs of the latest replay, and whether they need gradients."""
        tensors = map(self._memory.handed_over, self._outputs.tensors)
        return list(zip(tensors, self._needs_gradient, strict=True))

    # ---- backward pass

    def replay_backward(
        self, gradients: Sequence[Tensor | None], position: StreamPosition
    ) -> list[Tensor | None]:
        """Run the backward graph, which is captured at the first call.

        Args:
            gradients: Gradients of the outputs; None where nothing used the output.
            position: Position of the random streams in the forward pass.

        Returns:
            Gradients of the inputs; None where there are none. The next replay of the slot
            overwrites them.

        Communication: that of the piece, and of the sums of gradients that are complete now.
        """
        pairs = zip(gradients, self._needs_gradient, strict=True)
        needed = [gradient for gradient, is_needed in pairs if is_needed]
        if self._backward is None:
            compute = self._backward_pass(needed)
            if self._tools.failure is None:
                try:
                    self._capture_backward(compute)
                except CAPTURE_ERRORS as error:
                    self._tools.note_failure(self._label_of("backward"), error)
            if self._backward is None:
                return compute.by_input(compute())
        assert self._backward is not None, "the graph was captured"
        assert self._gradients is not None, "the graph was captured"
        graph, effects = self._backward
        self._gradients.fill(needed)
        self._replay(graph, effects, position)
        self._leave_weight_half()
        return [
            None if gradient is None else self._memory.handed_over(gradient)
            for gradient in self._input_gradients
        ]

    def _leave_weight_half(self) -> None:
        """Leave the weight half to the queue; without an open one, run it now."""
        if self._weight_half is None:
            return
        queue = self._tools.queue
        if queue.is_open:
            queue.put(self._start_weight_half, self._weight_half[1].gradients.additions)
        else:
            self._start_weight_half()

    def _start_weight_half(self) -> Callable[[], None]:
        assert self._weight_half is not None, "the weight half was captured"
        graph, effects = self._weight_half
        self._replay(graph, effects, None)
        return _nothing

    def _replay(
        self, graph: CapturedGraph, effects: Effects, position: StreamPosition | None
    ) -> None:
        """Replay a graph that adds gradients, whether the sums are empty or not."""
        slots = effects.gradients.slots
        before = self._sums_to_keep(slots) if effects.gradients.is_first else []
        if not effects.gradients.is_first:
            fill_empty(slots)
        with self._tools.observers.repeat(effects, position):
            graph.replay()
            for slot, earlier in before:
                slot.gradient.add_(earlier)

    def _capture_backward(self, compute: PieceBackward) -> None:
        state = compute.state
        # A backward pass recomputes layers in another order, which pairs streams otherwise.
        generators = GeneratorPool(self.piece.draws.device, 0)
        if self.piece.redraws:
            draws = self.piece.draws
            generators = GeneratorPool(draws.device, draws.num_taken, num_keys=draws.keys.num_taken)
        with self._tools.queue.apart() as products:
            graph, effects, gradients = self._capture("backward", generators, compute, state)
        self._memory.add(gradients)
        if products:
            self._capture_weight_half(products)
        self._input_gradients = compute.by_input(gradients)
        self._gradients = compute.gradients
        self._backward = graph, effects
        # Without the autograd graph, later captures can use the memory of the activations.
        self._outputs = flatten(
            self._outputs.with_tensors([tensor.detach() for tensor in self._outputs.tensors])
        )

    def _backward_pass(self, gradients: Sequence[Tensor | None]) -> PieceBackward:
        """Return the backward pass of the latest forward pass, with these gradients filled in."""
        assert self._inputs is not None, "the forward graph was captured"
        outputs = [tensor for tensor in self._outputs.tensors if tensor.requires_grad]
        # A weight half reads gradients later, when other microbatches may have had theirs copied.
        copies = {} if self._tools.queue.is_open else self._tools.gradient_copies
        statics = OutputGradients(outputs, gradients, self._memory.has, copies)
        statics.fill(gradients)
        return PieceBackward(outputs, self._inputs.tensors, statics)

    def release(self) -> None:
        """Free the graphs."""
        for captured in self._graphs:
            if captured is not None:
                captured[0].release()
        self._forward = self._backward = self._weight_half = None
        self._factors.clear()

    def give_up(self) -> None:
        """Let later captures of the slot use the memory that these graphs write."""
        assert self._inputs is not None, "the graphs were captured"
        give_up = self._memory.pool.give_up
        self._inputs.give_up(self._memory.has, give_up)
        self._between = [give_up(tensor) for tensor in self._between]
        outputs = [give_up(tensor) for tensor in self._outputs.tensors]
        self._outputs = flatten(self._outputs.with_tensors(outputs))
        self._input_gradients = [
            None if tensor is None else give_up(tensor) for tensor in self._input_gradients
        ]

    def _capture_weight_half(self, products: Products) -> None:
        self._factors = [*products, self._outputs]
        # Weight halves of earlier microbatches may not have run yet.
        state: SlotState = "empty" if self._is_first else "filled"
        graph, effects, _ = self._capture(
            "weight half",
            GeneratorPool(self.piece.draws.device, 0),
            lambda: compute_products(products),
            state,
        )
        self._weight_half = graph, effects

    @staticmethod
    def _sums_to_keep(slots: Sequence[GradientSlot]) -> list[tuple[GradientSlot, Tensor]]:
        """Take the sums out of slots that the graph would overwrite although they are filled."""
        kept = [(slot, slot.gradient.clone()) for slot in slots if not slot.is_empty]
        for slot, _ in kept:
            slot.is_empty = True
        return kept

    def _label_of(self, kind: str) -> str:
        is_first = self._is_first and kind != "forward"
        return f"{self.piece.label}, {'first ' if is_first else ''}{kind}, {self._label}"

    def _capture(
        self, kind: str, generators: GeneratorPool, function: Any, state: Any = None
    ) -> tuple[CapturedGraph, Effects, Any]:
        tools = self._tools
        label = self._label_of(kind)
        pool = self._memory.weight_pool if kind == "weight half" else self._memory.pool
        start = perf_counter()
        with (
            torch.inference_mode(False),
            torch.set_grad_enabled(self.piece.has_backward) if kind == "forward" else nullcontext(),
            tools.random.preserve_position(),
            tools.observers.recording(label, generators, state) as recorder,
            without_collection(),
        ):
            graph, results = tools.backend.capture(function, pool, generators)
        tools.notes.seconds += perf_counter() - start
        return graph, recorder.effects, results


def _nothing() -> None:
    """Do nothing: a replay has added the gradients."""


class _Replayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, piece: CapturedPiece, anchor: Tensor, *tensors: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.piece = piece
        ctx.tenant = piece.tenant
        ctx.position = piece.replay_forward(tensors)
        outputs = piece.outputs
        ctx.mark_non_differentiable(
            *[output for output, needs_gradient in outputs if not needs_gradient]
        )
        return tuple(output for output, _ in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        if ctx.tenant is None or not ctx.piece.recall(ctx.tenant):
            raise RuntimeError(
                "a backward pass by CUDA graphs must follow its forward pass, once: that of "
                f"{ctx.piece.piece.label} came a second time, or when another microbatch had "
                "overwritten the activations. Call backward once for each loss, inside the step."
            )
        ctx.tenant = None
        return (None, None, *ctx.piece.replay_backward(gradients, ctx.position))
