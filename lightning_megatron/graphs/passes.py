"""Passes of plain code that are captured: where their graphs end and the next ones begin."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.graphs.backend import CapturedGraph, GraphPool, OpenCapture
from lightning_megatron.graphs.chunk_parts import ChunkPart
from lightning_megatron.graphs.effects import Effects
from lightning_megatron.graphs.interception import Interception
from lightning_megatron.graphs.items import (
    CallBackwardItem,
    CallItem,
    CaptureTools,
    GraphItem,
    Item,
)
from lightning_megatron.graphs.observation import GraphNeeds, Observation
from lightning_megatron.graphs.slot_memory import SlotMemory
from lightning_megatron.graphs.values import FlatValues, flatten
from lightning_megatron.groups.generators import GeneratorPool
from lightning_megatron.layers.parameters.gradient_slot import GradientSlot, mark_filled
from lightning_megatron.layers.parameters.weight_gradient_queue import Products, compute_products


@dataclass(eq=False)
class PartRecording:
    """Recording of a part in one slot, to which its passes belong.

    Args:
        observation: What an eager pass of the same mode has shown of the part.
        slot: Description of the slot, such as ``slot 1``.
        is_first: Whether the microbatch is the first of a step that has a backward pass, which
            overwrites the gradient sums.
        backward_pass: Backward pass that is being captured.
    """

    observation: Observation
    memory: SlotMemory
    tools: CaptureTools
    slot: str
    is_first: bool
    has_backward: bool
    backward_pass: BackwardPass | None = None

    @property
    def part(self) -> ChunkPart:
        """Return the part."""
        return self.observation.part

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters of all intercepted calls."""
        places = self.part.interceptions
        return list(dict.fromkeys(part for place in places for part in place.parameters))

    def label_of(self, kind: str) -> str:
        """Return the description of a graph, for errors and reports.

        Args:
            kind: ``forward``, ``backward`` or ``weight half``.
        """
        is_first = self.is_first and kind != "forward"
        return f"{self.part.label}, {'first ' if is_first else ''}{kind}, {self.slot}"


@dataclass
class _Open:
    """Graph that is being captured.

    Args:
        stack: Contexts of the capture.
        products: Weight gradients that a split backward pass leaves to its weight half.
    """

    capture: OpenCapture
    effects: Callable[[], Effects]
    stack: ExitStack
    products: Products


class _Pass:
    """Pass whose graphs are captured one after the other."""

    def __init__(self, recording: PartRecording) -> None:
        self.recording = recording
        self.items: list[Item] = []
        self._open: _Open | None = None

    def _begin(
        self,
        kind: str,
        generators: GeneratorPool,
        pool: GraphPool,
        state: Literal["empty", "filled"] | None = None,
        splits: bool = False,
    ) -> None:
        tools = self.recording.tools
        label = self.recording.label_of(kind)
        stack = ExitStack()
        effects = stack.enter_context(tools.observers.recording(label, generators, state))
        products = stack.enter_context(tools.queue.apart()) if splits else Products()
        try:
            capture = tools.backend.begin(pool, generators)
        except BaseException:
            stack.close()
            raise
        self._open = _Open(capture, effects, stack, products)

    def _end(self) -> tuple[CapturedGraph, Effects, Products]:
        opened = self._open
        assert opened is not None, "a capture has begun"
        self._open = None
        with opened.stack:
            graph = opened.capture.end()
        return graph, opened.effects(), opened.products

    def abandon(self) -> None:
        """End a capture that an error has interrupted, and free the graphs of the pass."""
        if self._open is not None:
            with self._open.stack:
                self._open.capture.abandon()
            self._open = None
        for item in self.items:
            item.release()
        self.items.clear()


class ForwardPass(_Pass):
    """Forward pass of a part.

    Args:
        results: Results of the calls that no graph holds, in order.
    """

    def __init__(self, recording: PartRecording, results: Sequence[FlatValues]) -> None:
        super().__init__(recording)
        #: Inputs of intercepted calls, in memory that several microbatches use in turn.
        self.between: list[Tensor] = []
        #: Parts of the forward pass that the graphs of the backward pass belong to, in order.
        self.spans: list[list[GraphNeeds]] = [[]]
        self._begins = recording.observation.begins()
        self._graph_needs = recording.observation.graph_needs()
        self._results = list(results)
        self._num_calls = 0
        self._num_graphs = 0

    def run(self, values: Any) -> Any:
        """Run the plain code on inputs at fixed addresses, and return its outputs."""
        # A hook of a block waits for all parameters of the block, those of later graphs too, and a
        # capture cannot wait for what has begun outside of it.
        self.recording.tools.wait_for(self.recording.parameters)
        self._begin_graph()
        outputs = self.recording.part.run(values)
        self._end_graph()
        return outputs

    def on_call(self, place: Interception, original: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Run an intercepted call; see ``intercepted``."""
        number = self._num_calls
        self._num_calls += 1
        if place.reason is not None:
            return self._call(place, original, flatten((args, kwargs)))
        if self.recording.memory.is_shared and number > 0:
            self.between += [tensor.detach() for tensor in args if isinstance(tensor, Tensor)]
        if number in self._begins:
            args, kwargs = self._cut(flatten((args, kwargs)))
        return original(*args, **kwargs)

    def _call(self, place: Interception, original: Callable[..., Any], values: FlatValues) -> Any:
        """Let no graph hold a call: end one before it, and begin the next behind it."""
        self._end_graph()
        result = self._results.pop(0)
        has_backward = self.recording.has_backward
        # The hook that waits for its parameters may be that of its block, which no replay calls.
        wait = partial(self.recording.tools.wait_for, place.parameters)
        item = CallItem(original, values, result, has_backward, wait)
        self.items.append(item)
        has_node = has_backward and any(tensor.requires_grad for tensor in result.tensors)
        self._begin_graph(has_node)
        buffers = item.make_buffers(self.recording.tools.random.device)
        if not has_node:
            return result.with_tensors(buffers)
        needs_gradient = [tensor.requires_grad for tensor in result.tensors]
        inputs = [tensor for tensor in values.tensors if tensor.requires_grad]
        # A call whose inputs have no gradients still has parameters that do.
        anchor = torch.empty(0, requires_grad=True)
        outputs = _Call.apply(self.recording, item, (buffers, needs_gradient), anchor, *inputs)
        return result.with_tensors(outputs)

    def _cut(self, values: FlatValues) -> Any:
        """End a graph, and begin the next one, in both passes."""
        self._end_graph()
        inputs = [tensor for tensor in values.tensors if tensor.requires_grad]
        self._begin_graph(bool(inputs))
        if not inputs:
            return values.with_tensors(values.tensors)
        outputs = iter(_Cut.apply(self.recording, *inputs))
        return values.with_tensors(
            [next(outputs) if tensor.requires_grad else tensor for tensor in values.tensors]
        )

    def _begin_graph(self, has_node: bool = False) -> None:
        needs = self._graph_needs[self._num_graphs]
        self._num_graphs += 1
        if has_node:
            self.spans.append([])
        self.spans[-1].append(needs)
        generators = self.recording.observation.generators(needs)
        self._begin("forward", generators, self.recording.memory.pool)

    def _end_graph(self) -> None:
        graph, effects, _ = self._end()
        parameters = self._graph_needs[self._num_graphs - 1].parameters
        self.items.append(GraphItem(graph, effects, self.recording.tools, parameters))


class BackwardPass(_Pass):
    """Backward pass of a part.

    Args:
        spans: Parts of the forward pass that each graph belongs to, in the order of the forward
            pass.
    """

    def __init__(self, recording: PartRecording, spans: Sequence[Sequence[GraphNeeds]]) -> None:
        super().__init__(recording)
        self._spans = list(spans)
        self._states: dict[GradientSlot, tuple[bool, Any]] = {}

    def run(
        self, outputs: Sequence[Tensor], gradients: Sequence[Tensor], inputs: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """Run the pass, and return the gradients of inputs; those of parameters go to their slots.

        Args:
            outputs: Outputs with gradients.
            gradients: Their gradients, at fixed addresses.
            inputs: Inputs that need gradients.
        """
        parameters = [
            parameter for parameter in self.recording.parameters if parameter.grad is None
        ]
        self._begin_graph()
        torch.autograd.backward(list(outputs), list(gradients))
        # A gradient that passes unchanged, or as a view of a part, lies in memory that other passes
        # fill.
        filled = {_memory_of(tensor) for tensor in gradients}
        found = [tensor.grad for tensor in inputs]
        for tensor in inputs:
            tensor.grad = None
        found = [
            gradient.clone()
            if gradient is not None and _memory_of(gradient) in filled
            else gradient
            for gradient in found
        ]
        self._end_graph()
        self._check_slots(parameters)
        return found

    def cut(self) -> None:
        """End a graph, and begin the next one."""
        self._end_graph()
        self._begin_graph()

    def call(self, call: CallItem, gradients: Sequence[Tensor | None]) -> list[Tensor]:
        """End a graph before the backward pass of a call, and begin the next one behind it.

        Returns:
            Gradients of the inputs of the call.
        """
        self._end_graph()
        item = CallBackwardItem(call, gradients)
        self.items.append(item)
        self._begin_graph()
        return item.make_buffers()

    @contextmanager
    def slot_states(self) -> Iterator[None]:
        """Restore the states of gradient slots when the block ends: a capture adds nothing."""
        try:
            yield
        finally:
            for slot, (is_empty, rows) in self._states.items():
                slot.is_empty = is_empty
                slot.rows = rows

    def _begin_graph(self) -> None:
        recording = self.recording
        device = recording.tools.random.device
        generators = GeneratorPool(device, 0)
        span = self._spans.pop() if self._spans else []
        if recording.tools.redraws:
            # A backward pass recomputes layers in another order, which pairs streams otherwise.
            draws = sum(needs.num_draws for needs in span)
            keys = sum(needs.num_keys for needs in span)
            generators = GeneratorPool(device, draws, num_keys=keys)
        self._begin("backward", generators, recording.memory.pool, splits=True)

    def _end_graph(self) -> None:
        graph, effects, products = self._end()
        item = GraphItem(graph, effects, self.recording.tools)
        self.items.append(item)
        # Later graphs of the pass add to what this one has filled.
        for slot in effects.gradients.slots:
            self._states.setdefault(slot, (slot.is_empty, slot.rows))
        mark_filled(effects.gradients.slots, {})
        if products:
            self._capture_weight_half(item, products)

    def _capture_weight_half(self, item: GraphItem, products: Products) -> None:
        recording = self.recording
        item.factors = list(products)
        # Weight halves of earlier microbatches may not have run yet.
        state: Literal["empty", "filled"] = "empty" if recording.is_first else "filled"
        generators = GeneratorPool(recording.tools.random.device, 0)
        self._begin("weight half", generators, recording.memory.weight_pool, state)
        compute_products(products)
        graph, effects, _ = self._end()
        item.weight_half = graph, effects

    @staticmethod
    def _check_slots(parameters: Sequence[nn.Parameter]) -> None:
        """Check that all gradients of parameters went to slots."""
        left = [parameter for parameter in parameters if parameter.grad is not None]
        for parameter in left:
            parameter.grad = None
        if left:
            raise UnsupportedError(
                "a captured backward pass adds gradients to gradient slots: a parameter of shape "
                f"{tuple(left[0].shape)} has none, because it belongs to no optimizer or has "
                "hooks. Freeze it, give it to the optimizer, or remove its hooks."
            )


def _memory_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class _Cut(torch.autograd.Function):
    """Identity at which one graph ends and the next one begins, in the backward pass, too."""

    @staticmethod
    def forward(ctx: Any, recording: PartRecording, *tensors: Tensor) -> Any:
        ctx.recording = recording
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        assert ctx.recording.backward_pass is not None, "the pass is captured"
        ctx.recording.backward_pass.cut()
        return (None, *gradients)


class _Call(torch.autograd.Function):
    """Call that no graph holds, whose backward pass no graph holds either."""

    @staticmethod
    def forward(
        ctx: Any,
        recording: PartRecording,
        item: CallItem,
        results: tuple[Sequence[Tensor], Sequence[bool]],
        anchor: Tensor,
        *inputs: Tensor,
    ) -> Any:
        ctx.set_materialize_grads(False)
        buffers, needs_gradient = results
        ctx.recording = recording
        ctx.item = item
        ctx.mark_non_differentiable(
            *[tensor for tensor, needs in zip(buffers, needs_gradient, strict=True) if not needs]
        )
        return tuple(buffers)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        assert ctx.recording.backward_pass is not None, "the pass is captured"
        found = ctx.recording.backward_pass.call(ctx.item, gradients)
        return (None, None, None, None, *found)
