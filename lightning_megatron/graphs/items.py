"""Items of a recorded pass: graphs, and the calls between them that no graph holds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_megatron.graphs.backend import CaptureBackend, CapturedGraph, GraphPool
from lightning_megatron.graphs.effects import EffectObservers, Effects
from lightning_megatron.graphs.values import FlatValues, flatten, without_values
from lightning_megatron.groups.generators import StreamPosition
from lightning_megatron.groups.random import RandomStreams
from lightning_megatron.layers.parameters.gradient_slot import GradientSlot, fill_empty
from lightning_megatron.layers.parameters.weight_gradient_queue import WeightGradientQueue
from lightning_megatron.shapes import Shaped

#: Memory for copies of gradients, by position, shape and dtype; see ``OutputGradients``.
GradientCopies = dict[tuple[int, torch.Size, torch.dtype], Tensor]


@dataclass
class CaptureTools:
    """Objects and settings that all captures of one model share, and their outcome.

    Args:
        backend: Backend that captures and replays.
        observers: Recorder of the effects outside of tensors.
        queue: Queue of the weight gradients of split backward passes.
        scopes: Scopes that graphs capture.
        buckets: Parameters of each bucket that several ranks reduce or gather; a graph begins where
            the first of them is read.
        redraws: Whether backward passes recompute activations with random draws.
        wait_for: Function that waits until parameters are complete.
        max_shapes: Most shapes of microbatches that get graphs in each kind of step; others run
            eagerly (shapes).
        gradient_copies: Memory for gradients that eager code computes.
        failure: What could not be captured first, and why; None if nothing has failed. Everything
            runs eagerly afterwards.
        seconds: Time of all captures (seconds).
    """

    backend: CaptureBackend
    observers: EffectObservers
    random: RandomStreams
    queue: WeightGradientQueue
    scopes: Collection[str] = ("all",)
    buckets: Sequence[Collection[nn.Parameter]] = ()
    redraws: bool = False
    wait_for: Callable[[Collection[nn.Parameter]], None] = lambda parameters: None
    max_shapes: int = 1
    gradient_copies: GradientCopies = field(default_factory=dict)
    failure: str | None = None
    seconds: float = 0.0

    def note_failure(self, label: str, error: Exception) -> None:
        """Note that a capture has failed."""
        self.failure = self.failure or f"{label}: {type(error).__name__}: {error}"


class Item(ABC):
    """Part of a recorded pass."""

    @property
    def num_graphs(self) -> int:
        """Return the number of graphs of the item."""
        return 0

    @abstractmethod
    def replay(self, position: StreamPosition | None) -> StreamPosition | None:
        """Run the item, and return the position of the random streams of a graph.

        Args:
            position: Position in the forward pass; None in a forward pass.
        """

    @abstractmethod
    def give_up(self, pool: GraphPool) -> None:
        """Let later captures of a pool use the memory that the item writes."""

    @abstractmethod
    def release(self) -> None:
        """Free the graphs."""


@dataclass
class GraphItem(Item):
    """Graph of a part of a pass.

    Args:
        effects: Its effects outside of tensors.
        parameters: Parameters that the graph reads, in a forward pass.
        weight_half: Graph of the weight gradients of a split backward pass, and its effects; None
            without one.
        factors: What the weight half reads, which later captures must not overwrite.
    """

    graph: CapturedGraph
    effects: Effects
    tools: CaptureTools
    parameters: tuple[nn.Parameter, ...] = ()
    weight_half: tuple[CapturedGraph, Effects] | None = None
    factors: list[Any] = field(default_factory=list)

    @property
    @override
    def num_graphs(self) -> int:
        return 1 if self.weight_half is None else 2

    def replay(self, position: StreamPosition | None) -> StreamPosition:
        """Run the graph, and leave the weight half to the queue; see :class:`Item`."""
        if self.parameters:
            self.tools.wait_for(self.parameters)
        reached = self._replay(self.graph, self.effects, position)
        if self.weight_half is not None:
            queue = self.tools.queue
            if queue.is_open:
                queue.put(self._start_weight_half, self.weight_half[1].gradients.additions)
            else:
                self._start_weight_half()
        return reached

    def _start_weight_half(self) -> Callable[[], None]:
        assert self.weight_half is not None, "the weight half was captured"
        graph, effects = self.weight_half
        self._replay(graph, effects, None)
        return _nothing

    def _replay(
        self, graph: CapturedGraph, effects: Effects, position: StreamPosition | None
    ) -> StreamPosition:
        """Replay a graph that may add gradients, whether the sums are empty or not."""
        before = _sums_to_keep(effects.gradients.overwritten)
        fill_empty(effects.gradients.added)
        with self.tools.observers.repeat(effects, position) as reached:
            graph.replay()
            for slot, earlier in before:
                slot.gradient.add_(earlier)
        return reached

    def give_up(self, pool: GraphPool) -> None:
        """Let later captures of a pool use the memory that the weight half reads.

        A slot is free after the weight half, so that no other graph of it runs in between.
        """
        self.factors.clear()

    def release(self) -> None:
        """Free the graphs."""
        self.graph.release()
        if self.weight_half is not None:
            self.weight_half[0].release()
        self.factors.clear()


def _sums_to_keep(slots: Collection[GradientSlot]) -> list[tuple[GradientSlot, Tensor]]:
    """Take the sums out of slots that the graph would overwrite although they are filled."""
    kept = [(slot, slot.gradient.clone()) for slot in slots if not slot.is_empty]
    for slot, _ in kept:
        slot.is_empty = True
    return kept


def _nothing() -> None:
    """Do nothing: a replay has added the gradients."""


class CallItem(Item):
    """Call that no graph holds, on tensors at fixed addresses and into tensors at fixed addresses.

    Args:
        values: Its arguments by position and by name.
        result: Its result, as tensors on meta.
        wait: Function that waits until its parameters are complete.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        values: FlatValues,
        result: FlatValues,
        has_backward: bool,
        wait: Callable[[], None],
    ) -> None:
        self.function = function
        self._wait = wait
        self.needs_gradient = [tensor.requires_grad for tensor in values.tensors]
        self._values = without_values(values)
        self._inputs = [tensor.detach() for tensor in values.tensors]
        self._result = result
        self._has_backward = has_backward
        self._buffers: list[Tensor] = []
        # Leaves and results of the latest run, until its backward pass.
        self._run: tuple[Sequence[Tensor], Sequence[Tensor]] | None = None

    def make_buffers(self, device: torch.device) -> list[Tensor]:
        """Make the memory of the results, inside the capture that reads them."""
        with _without_filling():
            made = [
                torch.empty_strided(
                    tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device
                )
                for tensor in self._result.tensors
            ]
        self._buffers = [tensor.detach() for tensor in made]
        return made

    def replay(self, position: StreamPosition | None) -> None:
        """Call the function, and copy its results to their memory."""
        self._wait()
        leaves = [
            tensor.detach().requires_grad_(needs)
            for tensor, needs in zip(self._inputs, self.needs_gradient, strict=True)
        ]
        args, kwargs = self._values.with_tensors(leaves)
        with torch.set_grad_enabled(self._has_backward):
            result = flatten(self.function(*args, **kwargs))
        shapes = [tensor.shape for tensor in result.tensors]
        if result.form != self._result.form or shapes != [t.shape for t in self._result.tensors]:
            raise RuntimeError(
                "a call between two CUDA graphs must give results of the shapes of its first run, "
                f"which the second graph reads: {self.function} gave {list(map(tuple, shapes))}. "
                "Leave its part out of cuda_graphs.scopes."
            )
        _copy(result.tensors, self._buffers)
        if self._has_backward:
            self._run = leaves, result.tensors

    def replay_backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Run the backward pass of the latest call, and return the gradients of its inputs."""
        assert self._run is not None, "the forward pass has run"
        leaves, results = self._run
        self._run = None
        run_backward(results, gradients)
        needed = zip(leaves, self.needs_gradient, strict=True)
        return [leaf.grad for leaf, needs in needed if needs]

    @property
    def inputs_with_gradients(self) -> list[Tensor]:
        """Return the inputs that need gradients."""
        pairs = zip(self._inputs, self.needs_gradient, strict=True)
        return [tensor for tensor, needs in pairs if needs]

    def give_up(self, pool: GraphPool) -> None:
        """Let later captures of a pool use the memory of inputs and results."""
        self._inputs = [pool.give_up(tensor) for tensor in self._inputs]
        self._buffers = [pool.give_up(tensor) for tensor in self._buffers]

    def release(self) -> None:
        """Forget the latest run."""
        self._run = None


class CallBackwardItem(Item):
    """Backward pass of a call that no graph holds.

    Args:
        gradients: Gradients of its results, in the memory of the graph before; None where nothing
            used the result.
    """

    def __init__(self, call: CallItem, gradients: Sequence[Tensor | None]) -> None:
        self._call = call
        self._gradients = [None if given is None else given.detach() for given in gradients]
        self._buffers: list[Tensor] = []

    def make_buffers(self) -> list[Tensor]:
        """Make the memory of the gradients of the inputs, inside the capture that reads them."""
        with _without_filling():
            made = [torch.empty_like(tensor) for tensor in self._call.inputs_with_gradients]
        self._buffers = [tensor.detach() for tensor in made]
        return made

    def replay(self, position: StreamPosition | None) -> None:
        """Run the backward pass, and copy the gradients to their memory."""
        gradients = self._call.replay_backward(self._gradients)
        for buffer, gradient in zip(self._buffers, gradients, strict=True):
            if gradient is None:
                buffer.data.zero_()
            else:
                _copy([gradient], [buffer])

    def give_up(self, pool: GraphPool) -> None:
        """Let later captures of a pool use the memory of the gradients."""
        self._gradients = [
            None if given is None else pool.give_up(given) for given in self._gradients
        ]
        self._buffers = [pool.give_up(tensor) for tensor in self._buffers]

    def release(self) -> None:
        """Do nothing."""


def run_backward(
    results: Sequence[Shaped[Tensor, "..."]], gradients: Sequence[Shaped[Tensor, "..."] | None]
) -> None:
    """Run the backward pass from results that have gradients.

    Args:
        results: Results of a forward pass, with or without autograd history.
        gradients: Gradient of each result; None where nothing used it.
    """
    roots: list[Tensor] = []
    given: list[Tensor] = []
    for result, gradient in zip(results, gradients, strict=True):
        if gradient is not None and result.requires_grad:
            roots.append(result)
            given.append(gradient)
    torch.autograd.backward(roots, given)


@contextmanager
def _without_filling() -> Iterator[None]:
    """Make empty tensors that torch does not fill in its deterministic mode.

    The graph would fill them again at each replay, after the call has written them.
    """
    settings: Any = torch.utils.deterministic
    fills = settings.fill_uninitialized_memory
    settings.fill_uninitialized_memory = False
    try:
        yield
    finally:
        settings.fill_uninitialized_memory = fills


@torch.no_grad()
def _copy(tensors: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    for tensor, target in zip(tensors, targets, strict=True):
        target.data.copy_(tensor)
