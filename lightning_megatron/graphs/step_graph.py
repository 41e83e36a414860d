"""Graphs of whole steps: one for the forward and backward passes of all microbatches of a rank."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Generic, Literal, Protocol, TypeVar

import torch

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.graphs.backend import (
    CAPTURE_ERRORS,
    CaptureBackend,
    CapturedGraph,
    GraphPool,
    collection_paused,
)
from lightning_megatron.graphs.effects import EffectObservers, Effects
from lightning_megatron.graphs.graph_keys import TRAINING
from lightning_megatron.graphs.host_reads import refuse_host_draws
from lightning_megatron.graphs.report import GraphCounts, beyond
from lightning_megatron.graphs.static_inputs import BatchForm, StaticInputs, reason_against
from lightning_megatron.groups.generators import GeneratorPool, StreamPosition
from lightning_megatron.groups.random import RandomStreams
from lightning_megatron.layers.parameters.gradient_slot import fill_empty
from lightning_megatron.pipeline.microbatch import Microbatch
from lightning_megatron.plan.cuda_graphs import CudaGraphs

T = TypeVar("T")

#: Number of shapes that the log names; batches with other plain values each time would fill it.
_MOST_NAMED = 8


@dataclass(frozen=True)
class CapturableStep(Generic[T]):
    """One step of a rank, which may run eagerly, be captured or be replayed.

    Args:
        name: Name of the kind of step, such as ``training_step``. The first microbatches of each
            kind decide which form is captured.
        place: Further key of the graph, such as whether the step overwrites the gradient sums; with
            the same text on all ranks that run the same graph.
        number: Index of the step, for the random streams (batches).
        run_eagerly: Function that runs the step.
        run: Function that runs the step on other microbatches of the same form, with no effects
            but those that ``EffectObservers`` record, and writes to tensors.
        holds_sums: Whether ``run`` also reduces gradients over the ranks.
        variant: Further work of ``run`` before and after the step, such as gradient reduction. Each
            variant has its own graph, but eager steps of all variants count as warm-up; with the
            same text on all ranks.
        prepare: Function called before a capture and before each replay, such as one that waits for
            the parameters that ``run`` reads.
        around: Function that returns a context for the capture. At its end it raises
            ``UnsupportedError`` if the step did something that a replay cannot repeat, and undoes
            it.
        held: Function that returns objects which the graph keeps alive, because it reads them.
    """

    name: str
    place: Hashable
    microbatches: Sequence[Microbatch]
    number: int
    run_eagerly: Callable[[], T]
    run: Callable[[Sequence[Microbatch]], T]
    holds_sums: bool = False
    variant: Hashable = ()
    prepare: Callable[[], None] = lambda: None
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    held: Callable[[], Any] = tuple


@dataclass(frozen=True)
class RanStep(Generic[T]):
    """Result of a step.

    Args:
        result: What the step returned. If a graph ran it, its tensors are those of the graph: the
            next replay overwrites them.
        graph: Number of the graph that ran it; None if it ran eagerly.
        is_new: Whether the graph was captured for this step.
    """

    result: T
    graph: int | None = None
    is_new: bool = False

    @property
    def is_repeated(self) -> bool:
        """Return whether the step was a replay of a graph that had run before."""
        return self.graph is not None and not self.is_new


class StepAgreement(Protocol):
    """Agreement of the ranks on how a step runs; graphs may contain collectives of all of them."""

    def is_same(self, key: Hashable) -> bool:
        """Return whether all ranks that must do the same have this key in this step."""

    def failure_of_any(self, failure: str | None) -> str | None:
        """Return the failure of a rank in a capture, the same on all ranks; None if there is none.

        It may raise an error instead, on all ranks.

        Args:
            failure: What this rank could not capture, and why.
        """


class OwnAgreement:
    """Agreement of a rank that shares no collectives with others."""

    def is_same(self, key: Hashable) -> bool:
        """Return ``True``."""
        return True

    def failure_of_any(self, failure: str | None) -> str | None:
        """Return the failure of this rank."""
        return failure


@dataclass(frozen=True)
class StepGraph(Generic[T]):
    """Captured step.

    Args:
        inputs: Microbatches that it reads.
        effects: Effects in Python that its replays repeat.
        result: What the step returned, in tensors of the graph.
        held: Objects that it reads.
    """

    inputs: StaticInputs
    graph: CapturedGraph
    effects: Effects
    result: T
    held: Any

    @property
    def fits(self) -> bool:
        """Return whether the gradient sums are in the state that the captured step expects."""
        gradients = self.effects.gradients
        return all(slot.is_empty for slot in (*gradients.overwritten, *gradients.unused.values()))

    def replay(self, step: CapturableStep[T], observers: EffectObservers) -> T:
        """Run the captured step on the microbatches of another one.

        Communication: that of the step.
        """
        self.inputs.fill(step.microbatches)
        # A parameter that earlier batches did not use has an empty sum, which zeros fill.
        fill_empty(self.effects.gradients.added)
        with observers.repeat(self.effects, StreamPosition(step.number)):
            self.graph.replay()
        return self.result


class StepGraphs:
    """Graphs of the steps of one rank, one for each form of the microbatches and each place.

    The first steps of a key run eagerly. They create everything that a capture needs, such as
    workspaces and communicators. Then a step is captured, which runs nothing on a GPU, and replayed
    at once. All later steps of this key are replays. A replay is bitwise equal to the eager step.

    All graphs share the memory of one pool, because one step runs at a time.

    Args:
        observers: Objects that steps change in Python.
        device: Device of the steps.
        agreement: Agreement with other ranks.
        say: Function that logs a sentence.
    """

    def __init__(
        self,
        backend: CaptureBackend,
        observers: EffectObservers,
        random: RandomStreams,
        settings: CudaGraphs,
        device: torch.device,
        agreement: StepAgreement | None = None,
        say: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        self._backend = backend
        self._observers = observers
        self._random = random
        self._settings = settings
        self._device = device
        self._agreement = agreement or OwnAgreement()
        self._say = say
        #: Whether no step is captured or replayed any more, because a capture has failed.
        self.is_off = False
        self._pool: GraphPool | None = None
        self._graphs: dict[tuple[Hashable, ...], StepGraph[Any]] = {}
        self._seconds = 0.0
        self._numbers: dict[Hashable, int] = {}
        self._num_eager: dict[Hashable, int] = {}
        self._draws: dict[Hashable, GeneratorPool] = {}
        self._forms: dict[Hashable, BatchForm] = {}
        self._said: set[str] = set()

    @property
    def evaluates(self) -> bool:
        """Return whether evaluation steps are captured."""
        return self._settings.evaluation

    @property
    def num_graphs(self) -> int:
        """Return the number of graphs."""
        return len(self._graphs)

    @property
    def counts(self) -> GraphCounts:
        """Return what exists now, in numbers."""
        forms: dict[Hashable, set[Hashable]] = {}
        for name, place, form, *_ in self._graphs:
            forms.setdefault((name, place), set()).add(form)
        evaluating = sum(name != TRAINING.name for name, *_ in self._graphs)
        number = max(map(len, forms.values()), default=0)
        return GraphCounts(len(self._graphs), evaluating, (), number, self._seconds)

    def run(self, step: CapturableStep[T]) -> RanStep[T]:
        """Run a step: eagerly, by a new graph or by an old one.

        Raises:
            UnsupportedError: If the microbatches have a new form, which the settings forbid.
            Exception: What the step raises when it runs eagerly.

        Communication: that of the step and of the agreement.
        """
        if self.is_off:
            return RanStep(step.run_eagerly())
        form = BatchForm.of(step.microbatches)
        kind = (step.name, step.place, form)
        key = (step.name, step.place, form, step.variant)
        action = self._action(step, form, kind, key)
        if not self._agreement.is_same((action, key)):
            return RanStep(step.run_eagerly())
        if action == "warm up":
            return RanStep(self._warm_up(step, kind))
        if action == "run eagerly":
            return RanStep(step.run_eagerly())
        step.prepare()
        if action == "capture" and not self._captures(step, kind, key):
            return RanStep(step.run_eagerly())
        result = self._graphs[key].replay(step, self._observers)
        return RanStep(result, self._numbers[key], action == "capture")

    def release(self) -> None:
        """Destroy all graphs, and begin again with eager steps.

        Process groups whose collectives graphs hold must still exist.
        """
        for graph in self._graphs.values():
            graph.graph.release()
        self._graphs.clear()
        self._num_eager.clear()
        self._draws.clear()
        self._forms.clear()
        self._numbers.clear()
        self._pool = None

    def _action(
        self, step: CapturableStep[T], form: BatchForm, kind: Hashable, key: Hashable
    ) -> Literal["run eagerly", "warm up", "capture", "replay"]:
        """Return what this rank would do with a step."""
        if key in self._graphs:
            if self._graphs[key].fits:
                return "replay"
            self.say(f"{step.name} finds gradients that were not cleared: run eagerly.")
            return "run eagerly"
        reason = reason_against(step.microbatches, self._device)
        if reason is not None:
            self.say(f"{step.name} runs eagerly: {reason}.")
            return "run eagerly"
        captured = self._forms.setdefault(step.name, form)
        if form != captured and self._settings.on_new_shape != "capture":
            difference = form.difference_from(captured)
            if self._settings.on_new_shape == "error":
                raise UnsupportedError(
                    f"cuda_graphs with on_new_shape='error' needs microbatches of one form: "
                    f"{step.name} got {difference}. Use drop_last=True and one length for all "
                    "samples, or on_new_shape of eager or capture."
                )
            self.say(f"{difference}: run eagerly (said once for each shape)")
            return "run eagerly"
        if self._has_enough(step.name, form):
            most = self._settings.max_shapes
            self.say(f"a {step.name} of a further shape, {beyond(most)}: run eagerly (said once)")
            return "run eagerly"
        if self._num_eager.get(kind, 0) < self._settings.warmup_steps:
            return "warm up"
        return "capture"

    def _has_enough(self, name: str, form: BatchForm) -> bool:
        """Return whether a form is new, and as many as allowed have graphs."""
        forms = {known for kind, _, known, *_ in self._graphs if kind == name}
        return form not in forms and len(forms) >= self._settings.most_shapes

    def _warm_up(self, step: CapturableStep[T], kind: Hashable) -> T:
        """Run a step eagerly, and count the random streams of the last one before the capture."""
        number = self._num_eager.get(kind, 0) + 1
        self._num_eager[kind] = number
        if number < self._settings.warmup_steps:
            return step.run_eagerly()
        generators = GeneratorPool(self._device)
        with self._random.recording(generators):
            result = step.run_eagerly()
        self._draws[kind] = generators
        return result

    def _captures(self, step: CapturableStep[T], kind: Hashable, key: tuple[Hashable, ...]) -> bool:
        """Capture a step; return whether all ranks could do so."""
        graph = None
        failure = None
        start = perf_counter()
        try:
            graph = self._capture(step, kind)
        except CAPTURE_ERRORS as error:
            failure = f"the whole {step.name}: {type(error).__name__}: {error}"
        self._seconds += perf_counter() - start
        failure = self._agreement.failure_of_any(failure)
        if graph is not None:
            self._numbers[key] = len(self._graphs)
            self._graphs[key] = graph
        if failure is None:
            return True
        self.is_off = True
        self.release()
        self._say(failure)
        return False

    def _capture(self, step: CapturableStep[T], kind: Hashable) -> StepGraph[T]:
        if self._pool is None:
            self._pool = self._backend.make_pool()
        pool = self._pool
        inputs = StaticInputs(step.microbatches)
        microbatches = inputs.microbatches
        generators = self._draws[kind].exact()
        label = f"the whole {step.name}"
        with (
            self._random.preserve_position(),
            collection_paused(),
            step.around(),
            refuse_host_draws(self._device),
            self._observers.recording(label, generators, None, step.holds_sums) as recorder,
        ):
            graph, result = self._backend.capture(lambda: step.run(microbatches), pool, generators)
        return StepGraph(inputs, graph, recorder.effects, result, step.held())

    def say(self, sentence: str) -> None:
        """Log a sentence once; after several, no further ones."""
        if sentence not in self._said and len(self._said) < _MOST_NAMED:
            self._said.add(sentence)
            self._say(f"CUDA graphs: {sentence}")
