"""Graphs of whole steps: one for the forward and backward passes of all microbatches of a rank."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, Generic, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_megatron.errors import RankMismatchError, UnsupportedError
from lightning_megatron.graphs.agreement import KeyAgreement, failure_of_any
from lightning_megatron.graphs.backend import (
    CAPTURE_ERRORS,
    CaptureBackend,
    CapturedGraph,
    GraphPool,
    collection_paused,
)
from lightning_megatron.graphs.effects import EffectObservers, Effects
from lightning_megatron.graphs.graph_keys import TRAINING, BatchForm
from lightning_megatron.graphs.report import GraphCounts, StepCaptures, beyond, report_line
from lightning_megatron.groups.generators import GeneratorPool, StreamPosition
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.parameters.gradient_slot import fill_empty
from lightning_megatron.models.layered import LayeredModule
from lightning_megatron.nest import leaves
from lightning_megatron.pipeline.microbatch import Microbatch, copy_batch, copy_containers
from lightning_megatron.plan.cuda_graphs import CudaGraphs

T = TypeVar("T")


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


@dataclass(frozen=True)
class StepGraph(Generic[T]):
    """Captured step.

    Args:
        number: Number of the graph.
        inputs: Microbatches that it reads.
        effects: Effects in Python that its replays repeat.
        result: What the step returned, in tensors of the graph.
        held: Objects that it reads.
    """

    number: int
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


class StepGraphs(StepCaptures):
    """Graphs of the steps of one rank, one for each form of the microbatches and each place.

    The first steps of a key run eagerly. They create everything that a capture needs, such as
    workspaces and communicators. Then a step is captured, which runs nothing on a GPU, and replayed
    at once. All later steps of this key are replays. A replay is bitwise equal to the eager step.
    Graphs contain collectives of all ranks, which therefore agree on each step.

    All graphs share the memory of one pool, because one step runs at a time.

    Args:
        observers: Objects that steps change in Python.
        models: Models whose forward passes compare token counts, unless the ranks have agreed on
            equal shapes.
        around: Function from the name of a step to the context of its capture. At its end it raises
            ``UnsupportedError`` if the step did something that a replay cannot repeat, and undoes
            it.
        held: Function that returns objects which a graph keeps alive, because it reads them.
    """

    is_joint = True

    def __init__(
        self,
        backend: CaptureBackend,
        observers: EffectObservers,
        mesh: ParallelMesh,
        settings: CudaGraphs,
        models: Sequence[LayeredModule],
        around: Callable[[str], AbstractContextManager[None]],
        held: Callable[[], Any],
    ) -> None:
        super().__init__()
        self._backend = backend
        self._observers = observers
        self._mesh = mesh
        # Ranks that do not compare their shapes must not meet another one.
        self._settings = (
            replace(settings, on_new_shape="error") if settings.fixed_shapes else settings
        )
        self._models = models
        self._around = around
        self._held = held
        self._keys = KeyAgreement(mesh.world_cpu)
        self._permits = True
        #: Whether no step is captured or replayed any more, because a capture has failed.
        self.is_off = False
        self._pool: GraphPool | None = None
        self._graphs: dict[tuple[Hashable, ...], StepGraph[Any]] = {}
        self._seconds = 0.0
        self._num_eager: Counter[Hashable] = Counter()
        self._draws: dict[Hashable, GeneratorPool] = {}
        self._forms: dict[Hashable, BatchForm] = {}
        self._failure: str | None = None

    @property
    def evaluates(self) -> bool:
        """Return whether evaluation steps are captured."""
        return self._settings.evaluation

    @property
    @override
    def counts(self) -> GraphCounts:
        forms = {(name, place, form) for name, place, form, _ in self._graphs}
        most = Counter((name, place) for name, place, _ in forms)
        evaluating = sum(name != TRAINING for name, *_ in self._graphs)
        number = max(most.values(), default=0)
        return GraphCounts(len(self._graphs), evaluating, 0, number, self._seconds)

    @property
    @override
    def num_graphs(self) -> int:
        return len(self._graphs)

    @override
    def begin(self, kind: str) -> None:
        pass  # Each form of a step is captured after eager steps of its own.

    @property
    @override
    def failure(self) -> str | None:
        return self._failure

    @override
    def permit(self, kind: str, replays: bool) -> None:
        self._permits = replays

    @override
    def end_step(self) -> None:
        self._compare_counts(True)

    @override
    def report(self) -> str:
        return report_line("full", ("whole steps up to the optimizer",), self.counts)

    @override
    def close(self) -> None:
        self.release()
        self.is_off = True

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
        if not self._is_same((action, key)):
            return RanStep(step.run_eagerly())
        if action == "warm up":
            return RanStep(self._warm_up(step, kind))
        if action == "run eagerly":
            return RanStep(step.run_eagerly())
        step.prepare()
        if action == "capture" and not self._captures(step, kind, key):
            return RanStep(step.run_eagerly())
        graph = self._graphs[key]
        return RanStep(graph.replay(step, self._observers), graph.number, action == "capture")

    def _is_same(self, key: Hashable) -> bool:
        """Return whether all ranks have the same key in this step, and all permit graphs.

        Communication: one all-reduce on the CPU over the world, unless ``fixed_shapes`` is set.
        """
        if not self._settings.fixed_shapes:
            is_same = self._keys.agree([self._permits, key]) and self._permits
        elif self._permits or self._mesh.world.size == 1:
            is_same = self._permits
        else:
            raise RankMismatchError(
                "with fixed_shapes=True all ranks must replay every step: the set of trained "
                "parameters of this rank changed within an epoch, and the ranks do not compare "
                "their steps then. Freeze and unfreeze parameters at the start of an epoch, or use "
                "fixed_shapes=False."
            )
        self._compare_counts(not is_same)
        return is_same

    def _compare_counts(self, compares: bool) -> None:
        """Set whether forward passes compare the token counts of ranks that share experts."""
        for model in self._models:
            model.compares_counts = compares

    @override
    def release(self) -> None:
        for graph in self._graphs.values():
            graph.graph.release()
        self._graphs.clear()
        self._num_eager.clear()
        self._draws.clear()
        self._forms.clear()
        self._pool = None

    def _action(
        self, step: CapturableStep[T], form: BatchForm, kind: Hashable, key: Hashable
    ) -> Literal["run eagerly", "warm up", "capture", "replay"]:
        """Return what this rank would do with a step."""
        if key in self._graphs:
            if self._graphs[key].fits:
                return "replay"
            self.eager[step.name, "which finds gradients that were not cleared"] += 1
            return "run eagerly"
        reason = reason_against(step.microbatches, self._mesh.device)
        if reason is not None:
            self.eager[step.name, reason] += 1
            return "run eagerly"
        captured = self._forms.setdefault(step.name, form)
        if form != captured and self._settings.on_new_shape != "capture":
            difference = form.difference_from(captured)
            if self._settings.on_new_shape == "error":
                raise UnsupportedError(
                    f"cuda_graphs with on_new_shape='error' needs microbatches of one form: "
                    f"{step.name} got {', '.join(difference)}. Use drop_last=True and one length "
                    "for all samples, or on_new_shape of eager or capture."
                )
            self.eager[difference] += 1
            return "run eagerly"
        if self._has_enough(step.name, form):
            further = f"a {step.name} of a further shape"
            self.eager[further, beyond(self._settings.max_shapes)] += 1
            return "run eagerly"
        if self._num_eager[kind] < self._settings.warmup_steps:
            return "warm up"
        return "capture"

    def _has_enough(self, name: str, form: BatchForm) -> bool:
        """Return whether a form is new, and as many as allowed have graphs."""
        forms = {known for kind, _, known, *_ in self._graphs if kind == name}
        return form not in forms and len(forms) >= self._settings.most_shapes

    def _warm_up(self, step: CapturableStep[T], kind: Hashable) -> T:
        """Run a step eagerly, and count the random streams of the last one before the capture."""
        self._num_eager[kind] += 1
        if self._num_eager[kind] < self._settings.warmup_steps:
            return step.run_eagerly()
        generators = GeneratorPool(self._mesh.device)
        with self._mesh.random.recording(generators):
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
        self._failure = failure_of_any(failure, self._mesh.world_cpu, self._settings)
        if graph is not None:
            self._graphs[key] = graph
        if self._failure is not None:
            self.close()
        return self._failure is None

    def _capture(self, step: CapturableStep[T], kind: Hashable) -> StepGraph[T]:
        if self._pool is None:
            self._pool = self._backend.make_pool()
        pool = self._pool
        inputs = StaticInputs(step.microbatches)
        microbatches = inputs.microbatches
        generators = self._draws[kind].exact()
        label = f"the whole {step.name}"
        with (
            self._mesh.random.preserve_position(),
            collection_paused(),
            self._around(step.name),
            _refuse_host_draws(self._mesh.device),
            self._observers.recording(label, generators, None, step.holds_sums) as effects,
        ):
            graph, result = self._backend.capture(lambda: step.run(microbatches), pool, generators)
        return StepGraph(len(self._graphs), inputs, graph, effects(), result, self._held())


@contextmanager
def _refuse_host_draws(device: torch.device) -> Iterator[None]:
    """Refuse draws of the host's generators inside the block, and undo them.

    These are Python's ``random``, the generator of ``numpy.random`` and, on a GPU, torch's
    generator of the CPU.

    Args:
        device: Device of the captured computation, whose own generators may draw.

    Raises:
        UnsupportedError: At the end of the block, if a generator of the host has drawn.
    """
    before = random.getstate()
    of_numpy = np.random.get_state(legacy=False)
    of_torch = torch.default_generator.get_state()
    drawn = []
    try:
        yield
    finally:
        if random.getstate() != before:
            random.setstate(before)
            drawn.append("Python's random")
        if repr(np.random.get_state(legacy=False)) != repr(of_numpy):
            np.random.set_state(of_numpy)
            drawn.append("numpy.random")
        if device.type != "cpu" and not torch.equal(torch.default_generator.get_state(), of_torch):
            torch.default_generator.set_state(of_torch)
            drawn.append("torch's generator of the CPU")
    if drawn:
        raise UnsupportedError(
            f"a captured computation must not draw random numbers on the host: {drawn[0]} has "
            "drawn. A replay runs no Python, so that it would repeat the numbers of the capture. "
            "Draw on the device, as in torch.rand(..., device=self.device), or in the dataset."
        )


#: Types of values that are part of the form of a microbatch, because a graph repeats what Python
#: computed from them.
_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype)


def reason_against(microbatches: Sequence[Microbatch], device: torch.device) -> str | None:
    """Return why a graph cannot process some microbatches; None if it can.

    Args:
        microbatches: Microbatches of a step.
        device: Device of the graphs.
    """
    for part in microbatches:
        for path, leaf in leaves(part.data):
            if not isinstance(leaf, Tensor):
                if not isinstance(leaf, _PLAIN):
                    return (
                        f"microbatch{path} is a {type(leaf).__name__}, whose values a graph would "
                        "keep as they were at the capture; give tensors"
                    )
            elif type(leaf) not in (Tensor, nn.Parameter) or leaf.layout != torch.strided:
                return f"microbatch{path} is a {type(leaf).__name__} with layout {leaf.layout}"
            elif leaf.requires_grad:
                return f"microbatch{path} needs a gradient, which a graph would not return"
            elif leaf.device.type != device.type:
                return (
                    f"microbatch{path} is on {leaf.device}, and Python would read it at the "
                    f"capture only; move it to {device}"
                )
    return None


class StaticInputs:
    """Copy of a step's microbatches, whose tensors are overwritten before each replay.

    Args:
        microbatches: Microbatches of the step that is captured.
    """

    def __init__(self, microbatches: Sequence[Microbatch]) -> None:
        # Validation may be captured first, and tensors of its inference mode cannot be written
        # later.
        with torch.inference_mode(False), torch.no_grad():
            copies = copy_batch([part.data for part in microbatches])
        self._parts = [
            Microbatch(data, part.num_samples)
            for data, part in zip(copies, microbatches, strict=True)
        ]
        self._tensors = list(_distinct(self._parts))
        #: Indices of the tensors of each dtype, which one launch can copy.
        self._groups: dict[torch.dtype, list[int]] = {}
        for index, tensor in enumerate(self._tensors):
            self._groups.setdefault(tensor.dtype, []).append(index)

    @property
    def microbatches(self) -> list[Microbatch]:
        """Return the microbatches in new containers, from which a step may remove entries."""
        return [Microbatch(copy_containers(part.data), part.num_samples) for part in self._parts]

    @torch.no_grad()
    def fill(self, microbatches: Sequence[Microbatch]) -> None:
        """Copy the tensors of microbatches of the same form."""
        given = list(_distinct(microbatches))
        for group in self._groups.values():
            targets = [self._tensors[index] for index in group]
            sources = [given[index] for index in group]
            torch._foreach_copy_(targets, sources, non_blocking=True)


def _distinct(microbatches: Sequence[Microbatch]) -> Iterator[Tensor]:
    """Yield each tensor once, in the order of the leaves."""
    visited = set()
    for part in microbatches:
        for _, leaf in leaves(part.data):
            if isinstance(leaf, Tensor) and id(leaf) not in visited:
                visited.add(id(leaf))
                yield leaf
