"""Graphs of plain code in one slot, captured while the code runs, and the calls between them."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.graphs.backend import CAPTURE_ERRORS, without_collection
from lightning_megatron.graphs.capture_tools import CapturedPart, CaptureTools
from lightning_megatron.graphs.interception import intercepted
from lightning_megatron.graphs.items import Item, run_backward
from lightning_megatron.graphs.observation import GraphNeeds
from lightning_megatron.graphs.passes import BackwardPass, ForwardPass
from lightning_megatron.graphs.recording_inputs import OutputGradients, RecordingInputs
from lightning_megatron.graphs.slot_memory import SlotMemory, Tenant
from lightning_megatron.graphs.values import FlatValues, flatten
from lightning_megatron.groups.generators import StreamPosition


class Recording:
    """Graphs of a part in one slot, and what runs between them.

    The first forward pass captures the graphs of the forward pass, and the first backward pass
    those of the backward pass. The plain code runs during the capture. Where a call must not be
    held by a graph, the graph ends before the call and the next one begins behind it, in both
    passes. A capture runs nothing on the device, so a replay follows it at once.

    Args:
        captured: The part, with what its capture needs.
        label: Description of the slot, such as ``slot 1``.
        is_first: Whether the microbatch is the first of a step that has a backward pass, which
            overwrites the gradient sums.
    """

    def __init__(
        self,
        captured: CapturedPart,
        memory: SlotMemory,
        tools: CaptureTools,
        label: str,
        is_first: bool,
    ) -> None:
        self.captured = captured
        self.memory = memory
        self.tools = tools
        self.is_first = is_first
        self._label = label
        self._inputs: RecordingInputs | None = None
        # Inputs of the plain code, at fixed addresses.
        self._given: FlatValues = flatten(())
        self._outputs: FlatValues = flatten(())
        self._needs_gradient: list[bool] = []
        self._forward: list[Item] | None = None
        self._backward: list[Item] | None = None
        # Parts of the forward pass that the graphs of the backward pass belong to.
        self._spans: list[list[GraphNeeds]] = []
        self._gradients: OutputGradients | None = None
        self._input_gradients: list[Tensor | None] = []
        # Inputs of layers, if their backward passes read nothing else that the layers write.
        self._between: list[Tensor] = []
        #: Backward pass that is being captured.
        self.backward_pass: BackwardPass | None = None

    # ---- forward pass

    def find_mismatch(self, values: FlatValues) -> str | None:
        """Return why these inputs do not fit the graphs; None if they do, or before the capture."""
        if self._inputs is None:
            return None
        if values.form != self._given.form:
            return "inputs of another form than at the capture"
        return self._inputs.find_mismatch(values.tensors)

    @property
    def is_captured(self) -> bool:
        """Return whether the forward graphs exist."""
        return self._forward is not None

    @property
    def is_complete(self) -> bool:
        """Return whether all graphs exist that the part needs."""
        return self.is_captured and (self._backward is not None or not any(self._needs_gradient))

    @property
    def num_graphs(self) -> int:
        """Return the number of graphs."""
        items = [*(self._forward or ()), *(self._backward or ())]
        return sum(item.num_graphs for item in items)

    def capture_forward(
        self, values: FlatValues, constants: Collection[int], key: Hashable
    ) -> bool:
        """Capture the forward graphs, and return whether they exist now.

        Args:
            values: Inputs of the part.
            constants: Addresses of inputs that keep their addresses in all steps.
            key: Key of the call, for the results of calls that no graph holds.
        """

        def stays(tensor: Tensor) -> bool:
            return self.memory.has(tensor) or tensor.data_ptr() in constants

        inputs = RecordingInputs(values.tensors, stays)
        inputs.fill(values.tensors)
        given = flatten(values.with_tensors(inputs.tensors))
        forward = ForwardPass(self, self.captured.observation.results_of(key))
        try:
            with (
                self._capturing(),
                torch.set_grad_enabled(self.captured.has_backward),
                intercepted(self.captured.part.interceptions, forward.on_call),
            ):
                outputs = forward.run(given.nest)
        except CAPTURE_ERRORS as error:
            forward.abandon()
            self.tools.note_failure(self.label_of("forward"), error)
            return False
        self._outputs = flatten(outputs)
        self._needs_gradient = [tensor.requires_grad for tensor in self._outputs.tensors]
        self._between = forward.between
        self.memory.add(self._outputs.tensors)
        self._inputs = inputs
        self._given = given
        self._forward = forward.items
        self._spans = forward.spans
        return True

    def __call__(self, values: FlatValues) -> Any:
        """Replay the forward graphs, and return the outputs of the part.

        Their values are overwritten when the slot is used again.

        Args:
            values: Inputs that fit.
        """
        tensors: Sequence[Tensor]
        if self.captured.has_backward:
            # A part whose inputs have no gradients still has parameters that do.
            anchor = torch.empty(0, requires_grad=True)
            tensors = _Replayed.apply(self, anchor, *values.tensors)
        else:
            self.replay_forward(values.tensors)
            tensors = self._outputs.tensors
        return self._outputs.with_tensors(tensors)

    @property
    def tenant(self) -> Tenant | None:
        """Return the microbatch whose activations lie in the slot."""
        return self.memory.tenant

    def recall(self, tenant: Tenant) -> bool:
        """Bring the activations of a microbatch back into the slot, and return whether they are
        there.
        """
        return self.memory.recall(tenant)

    def replay_forward(self, tensors: Sequence[Tensor]) -> StreamPosition:
        """Run the forward pass on inputs, and return the position of its random streams."""
        assert self._forward is not None, "the graphs were captured"
        assert self._inputs is not None, "the graphs were captured"
        self._inputs.fill(tensors)
        positions = [position for item in self._forward if (position := item.replay(None))]
        self.memory.keep([*self._inputs.copied, *self._between])
        return replace(positions[0], run=max(position.run for position in positions))

    @property
    def outputs(self) -> list[tuple[Tensor, bool]]:
        """Return the outputs of the latest replay, and whether they need gradients."""
        tensors = map(self.memory.handed_over, self._outputs.tensors)
        return list(zip(tensors, self._needs_gradient, strict=True))

    # ---- backward pass

    def replay_backward(
        self, gradients: Sequence[Tensor | None], position: StreamPosition
    ) -> list[Tensor | None]:
        """Run the backward pass, whose graphs are captured at the first call.

        Args:
            gradients: Gradients of the outputs; None where nothing used the output.
            position: Position of the random streams in the forward pass.

        Returns:
            Gradients of the inputs; None where there are none. The next replay of the slot
            overwrites them.

        Communication: that of the part, and of the sums of gradients that are complete now.
        """
        pairs = zip(gradients, self._needs_gradient, strict=True)
        needed = [gradient for gradient, is_needed in pairs if is_needed]
        if self._backward is None and self.tools.failure is None:
            self._capture_backward(needed)
        if self._backward is None:
            return self._run_backward(gradients, position)
        assert self._gradients is not None, "the graphs were captured"
        self._gradients.fill(needed)
        for item in self._backward:
            item.replay(position)
        return [
            None if gradient is None else self.memory.handed_over(gradient)
            for gradient in self._input_gradients
        ]

    def _capture_backward(self, gradients: Sequence[Tensor | None]) -> None:
        """Capture the graphs of the backward pass of the latest forward pass."""
        assert self._inputs is not None, "the forward graphs were captured"
        outputs = [tensor for tensor in self._outputs.tensors if tensor.requires_grad]
        # A weight half reads gradients later, when other microbatches may have had theirs copied.
        copies = {} if self.tools.queue.is_open else self.tools.gradient_copies
        statics = OutputGradients(outputs, gradients, self.memory.has, copies)
        inputs = [tensor for tensor in self._inputs.tensors if tensor.requires_grad]
        backward = self.backward_pass = BackwardPass(self, self._spans)
        try:
            with self._capturing(), backward.slot_states():
                found = backward.run(outputs, statics.tensors, inputs)
        except CAPTURE_ERRORS as error:
            backward.abandon()
            self.tools.note_failure(self.label_of("backward"), error)
            return
        finally:
            self.backward_pass = None
        self.memory.add(found)
        rest = iter(found)
        self._input_gradients = [
            next(rest) if tensor.requires_grad else None for tensor in self._inputs.tensors
        ]
        self._gradients = statics
        self._backward = backward.items
        # Without the autograd graph, later captures can use the memory of the activations.
        detached = [tensor.detach() for tensor in self._outputs.tensors]
        self._outputs = flatten(self._outputs.with_tensors(detached))

    def _run_backward(
        self, gradients: Sequence[Tensor | None], position: StreamPosition
    ) -> list[Tensor | None]:
        """Run the pass without graphs: recompute the forward pass, which the graphs have run."""
        assert self._inputs is not None, "the forward graphs were captured"
        random = self.tools.random
        leaves = [
            tensor.detach().requires_grad_(tensor.requires_grad) for tensor in self._inputs.tensors
        ]
        values = self._given.with_tensors(leaves)
        interrupted = random.position
        random.seek(position.layer, replace(position, is_replay=True))
        try:
            with torch.enable_grad():
                outputs = flatten(self.captured.part.run(values)).tensors
        finally:
            random.seek(interrupted.layer, interrupted)
        run_backward(outputs, gradients)
        return [leaf.grad for leaf in leaves]

    # ---- captures

    @contextmanager
    def _capturing(self) -> Iterator[None]:
        start = perf_counter()
        with (
            torch.inference_mode(False),
            self.tools.random.preserve_position(),
            without_collection(),
            self.tools.backend.session(),
        ):
            yield
        self.tools.notes.seconds += perf_counter() - start

    def label_of(self, kind: str) -> str:
        """Return the description of a graph of this recording.

        Args:
            kind: ``forward``, ``backward`` or ``weight half``.
        """
        is_first = self.is_first and kind != "forward"
        return f"{self.captured.part.label}, {'first ' if is_first else ''}{kind}, {self._label}"

    def release(self) -> None:
        """Free the graphs."""
        for item in [*(self._forward or ()), *(self._backward or ())]:
            item.release()
        self._forward = self._backward = None

    def give_up(self) -> None:
        """Let later captures of the slot use the memory that these graphs write."""
        assert self._inputs is not None, "the graphs were captured"
        give_up = self.memory.pool.give_up
        self._inputs.give_up(self.memory.has, give_up)
        self._given = flatten(self._given.with_tensors(self._inputs.tensors))
        for item in [*(self._forward or ()), *(self._backward or ())]:
            item.give_up(self.memory.pool)
        self._between = [give_up(tensor) for tensor in self._between]
        outputs = [give_up(tensor) for tensor in self._outputs.tensors]
        self._outputs = flatten(self._outputs.with_tensors(outputs))
        self._input_gradients = [
            None if tensor is None else give_up(tensor) for tensor in self._input_gradients
        ]


class _Replayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, recording: Recording, anchor: Tensor, *tensors: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.recording = recording
        ctx.tenant = recording.tenant
        ctx.position = recording.replay_forward(tensors)
        outputs = recording.outputs
        ctx.mark_non_differentiable(
            *[output for output, needs_gradient in outputs if not needs_gradient]
        )
        return tuple(output for output, _ in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        if ctx.tenant is None or not ctx.recording.recall(ctx.tenant):
            raise RuntimeError(
                "a backward pass by CUDA graphs must follow its forward pass, once: that of "
                f"{ctx.recording.captured.part.label} came a second time, or when another "
                "microbatch had overwritten the activations. Call backward once for each loss, "
                "inside the step."
            )
        ctx.tenant = None
        return (None, None, *ctx.recording.replay_backward(gradients, ctx.position))
