"""Slots of a chunk, and the graphs of its parts in a slot, captured while their code runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.graphs.backend import CAPTURE_ERRORS, without_collection
from lightning_megatron.graphs.graph_keys import ChunkKey
from lightning_megatron.graphs.interception import intercepted
from lightning_megatron.graphs.items import CaptureTools, Item, run_backward
from lightning_megatron.graphs.observation import GraphNeeds, Observation
from lightning_megatron.graphs.passes import BackwardPass, ForwardPass, PartRecording
from lightning_megatron.graphs.slot_memory import SlotMemory
from lightning_megatron.graphs.values import FlatValues, flatten
from lightning_megatron.groups.generators import StreamPosition
from lightning_megatron.groups.pending import Pending
from lightning_megatron.plan.actions import PipelineUnit


@dataclass(eq=False)
class Recording(PartRecording):
    """Graphs of a part in one slot.

    The first forward pass captures the graphs of the forward pass, and the first backward pass
    those of the backward pass. The plain code runs during the capture. Where a call must not be
    held by a graph, the graph ends before the call and the next one begins behind it, in both
    passes. A capture runs nothing on the device, so a replay follows it at once.
    """

    _inputs: RecordingInputs | None = None
    # Inputs of the plain code, at fixed addresses.
    _given: FlatValues = flatten(())
    _outputs: FlatValues = flatten(())
    _needs_gradient: Sequence[bool] = ()
    _forward: list[Item] | None = None
    _backward: list[Item] | None = None
    # Parts of the forward pass that the graphs of the backward pass belong to.
    _spans: Sequence[list[GraphNeeds]] = ()
    _gradients: OutputGradients | None = None
    _input_gradients: Sequence[Tensor | None] = ()
    # Inputs of layers, if their backward passes read nothing else that the layers write.
    _between: Sequence[Tensor] = ()

    # ---- forward pass

    def fits(self, values: FlatValues) -> bool:
        """Return whether the graphs can run on inputs for their key; True before the capture."""
        return self._inputs is None or self._inputs.fit(values.tensors)

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
        return sum(item.num_graphs for item in self._items)

    @property
    def _items(self) -> list[Item]:
        return [*(self._forward or ()), *(self._backward or ())]

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
        forward = ForwardPass(self, self.observation.results_of(key))
        try:
            with (
                self._capturing(),
                torch.set_grad_enabled(self.has_backward),
                intercepted(self.part.interceptions, forward.on_call),
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
        if self.has_backward:
            # A part whose inputs have no gradients still has parameters that do.
            anchor = torch.empty(0, requires_grad=True)
            tensors = _Replayed.apply(self, anchor, *values.tensors)
        else:
            self.replay_forward(values.tensors)
            tensors = self._outputs.tensors
        return self._outputs.with_tensors(tensors)

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
                outputs = flatten(self.part.run(values)).tensors
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
        self.tools.seconds += perf_counter() - start

    def release(self) -> None:
        """Free the graphs."""
        for item in self._items:
            item.release()
        self._forward = self._backward = None

    def give_up(self) -> None:
        """Let later captures of the slot use the memory that these graphs write."""
        assert self._inputs is not None, "the graphs were captured"
        give_up = self.memory.pool.give_up
        self._inputs.give_up(self.memory.has, give_up)
        self._given = flatten(self._given.with_tensors(self._inputs.tensors))
        for item in self._items:
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
        ctx.tenant = recording.memory.tenant
        ctx.position = recording.replay_forward(tensors)
        outputs = recording.outputs
        ctx.mark_non_differentiable(
            *[output for output, needs_gradient in outputs if not needs_gradient]
        )
        return tuple(output for output, _ in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        if ctx.tenant is None or not ctx.recording.memory.recall(ctx.tenant):
            raise RuntimeError(
                "a backward pass by CUDA graphs must follow its forward pass, once: that of "
                f"{ctx.recording.part.label} came a second time, or when another "
                "microbatch had overwritten the activations. Call backward once for each loss, "
                "inside the step."
            )
        ctx.tenant = None
        return (None, None, *ctx.recording.replay_backward(gradients, ctx.position))


class Slot:
    """Graphs of a chunk for one microbatch, from its forward pass to the end of its backward pass.

    The slot has a set of graphs for each key of the chunk's calls. The first backward pass of a
    step overwrites the gradient sums, and all others add to them, so that the slot that runs the
    first one has two sets for each key. All sets share memory, since one microbatch at a time
    occupies the slot.

    Args:
        label: Description of the slot, such as ``slot 1``.
        is_shared: Whether the graphs are those of layers that keep only their inputs, which all
            microbatches of the chunk use in turn.
    """

    def __init__(self, label: str, tools: CaptureTools, is_shared: bool) -> None:
        self.label = label
        self._tools = tools
        self.memory = SlotMemory(tools.backend, is_shared)
        self._sets: dict[tuple[ChunkKey, bool], dict[int, Recording]] = {}
        self._transfers: list[Pending] = []

    def occupy(self, unit: PipelineUnit) -> None:
        """Let a microbatch occupy the slot, before its forward pass."""
        for transfers in self._transfers:
            transfers.wait()
        self._transfers.clear()
        self.memory.enter(unit)

    def keep(self, transfers: Pending) -> None:
        """Wait for transfers from the slot's memory before the slot is occupied again."""
        self._transfers.append(transfers)

    def graphs(
        self, key: ChunkKey, is_first: bool, observations: Mapping[int, Observation]
    ) -> dict[int, Recording]:
        """Return the graphs of a key's parts by number.

        Args:
            key: Key of the call.
            is_first: Whether the backward pass overwrites the gradient sums.
            observations: What eager passes have shown of the parts, by number.
        """
        if (key, is_first) not in self._sets:
            for earlier in self._sets.values():
                _give_up(earlier)
            self._sets[key, is_first] = {
                number: Recording(
                    observation,
                    self.memory,
                    self._tools,
                    self.label,
                    is_first,
                    key.mode.has_backward,
                )
                for number, observation in observations.items()
            }
        return self._sets[key, is_first]

    @property
    def counts(self) -> Counter[ChunkKey]:
        """Return the numbers of captured graphs by key."""
        numbers = Counter[ChunkKey]()
        for (key, _), graphs in self._sets.items():
            numbers[key] += sum(recording.num_graphs for recording in graphs.values())
        return +numbers

    def release(self) -> None:
        """Free all graphs."""
        for graphs in self._sets.values():
            for recording in graphs.values():
                recording.release()
        self._sets.clear()
        self.memory.clear()


def _give_up(graphs: Mapping[int, Recording]) -> None:
    """Let later captures use the memory of a set of graphs.

    A set whose captures have not ended keeps its memory: what is still to be captured reads it.
    """
    if all(recording.is_complete for recording in graphs.values()):
        for recording in graphs.values():
            recording.give_up()


class RecordingInputs:
    """Tensors from which a graph reads its inputs.

    An input that has the same address whenever the graph runs is read in place. Every other input
    is copied into separate memory before each replay.

    Args:
        tensors: Inputs for which the graph is captured.
        stays: Function that returns whether an input keeps its address at every replay.
    """

    def __init__(self, tensors: Sequence[Tensor], stays: Callable[[Tensor], bool]) -> None:
        self._is_copied = [not stays(tensor) for tensor in tensors]
        #: Inputs of the captured function.
        self.tensors = [
            _twin_of(tensor) if is_copied else tensor.detach()
            for tensor, is_copied in zip(tensors, self._is_copied, strict=True)
        ]
        for static, tensor in zip(self.tensors, tensors, strict=True):
            static.requires_grad_(tensor.requires_grad)
        self._addresses = [static.data_ptr() for static in self.tensors]

    @property
    def copied(self) -> list[Tensor]:
        """Return the tensors into which inputs are copied."""
        pairs = zip(self.tensors, self._is_copied, strict=True)
        return [tensor for tensor, is_copied in pairs if is_copied]

    def fit(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether inputs that are read in place have not moved."""
        places = zip(tensors, self._addresses, self._is_copied, strict=True)
        return all(is_copied or given.data_ptr() == place for given, place, is_copied in places)

    def give_up(
        self, is_written: Callable[[Tensor], bool], give_up: Callable[[Tensor], Tensor]
    ) -> None:
        """Release the references to memory that graphs of the slot write.

        Args:
            is_written: Function that returns whether a graph of the slot writes a tensor.
            give_up: Function that returns a tensor at the same address, which keeps no memory.
        """
        for number, tensor in enumerate(self.tensors):
            if not self._is_copied[number] and is_written(tensor):
                static = give_up(tensor.detach())
                self.tensors[number] = static.requires_grad_(tensor.requires_grad)

    @torch.no_grad()
    def fill(self, tensors: Sequence[Tensor]) -> None:
        """Copy inputs for the next replay.

        Args:
            tensors: Inputs that fit.
        """
        for static, given, is_copied in zip(self.tensors, tensors, self._is_copied, strict=True):
            if is_copied:
                static.data.copy_(given)


class OutputGradients:
    """Tensors from which the graph of a backward pass reads the gradients of its outputs.

    A gradient that an earlier graph of the same slot has written is read in place. All others are
    copied. Copies of equal shapes may share memory between slots, if they are read only while one
    backward pass runs.

    Args:
        outputs: Outputs with gradients.
        gradients: Gradients for which the graph is captured; None where nothing used the output.
        stays: Function that returns whether a graph of this slot has written a gradient.
        shared: Memory for copies, by position, shape and dtype.
    """

    def __init__(
        self,
        outputs: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
        stays: Callable[[Tensor], bool],
        shared: dict[tuple[int, torch.Size, torch.dtype], Tensor],
    ) -> None:
        #: Gradients of the captured backward pass.
        self.tensors: list[Tensor] = []
        for position, (output, given) in enumerate(zip(outputs, gradients, strict=True)):
            if given is not None and stays(given) and given.stride() == output.stride():
                self.tensors.append(given.detach())
                continue
            key = (position, output.shape, output.dtype)
            if key not in shared:
                shared[key] = torch.empty_like(output, requires_grad=False)
            self.tensors.append(shared[key])

    @torch.no_grad()
    def fill(self, gradients: Sequence[Tensor | None]) -> None:
        """Copy gradients for the next replay, and zeros for outputs that nothing used."""
        for static, given in zip(self.tensors, gradients, strict=True):
            if given is None:
                static.zero_()
            elif given.data_ptr() != static.data_ptr() or given.stride() != static.stride():
                static.copy_(given)


def _twin_of(tensor: Tensor) -> Tensor:
    with torch.inference_mode(False), torch.no_grad():
        return torch.empty_like(tensor)
