"""Runner of a model's chunks by graphs of what can be captured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatron.graphs.capture_tools import CapturedPart, CaptureTools
from lightning_megatron.graphs.chunk_parts import (
    ChunkCall,
    ChunkObserver,
    ChunkPart,
    chunk_parts,
    describe,
)
from lightning_megatron.graphs.graph_keys import TRAINING, ChunkKey, PassMode, StepKind
from lightning_megatron.graphs.recording import Recording
from lightning_megatron.graphs.report import GraphCounts, beyond
from lightning_megatron.graphs.slot import SharedSlot, Slot
from lightning_megatron.graphs.values import flatten
from lightning_megatron.groups.p2p import PendingTransfers
from lightning_megatron.models.layered import LayeredModule, LayerInputs
from lightning_megatron.optimizer.reduction import GradientReducer
from lightning_megatron.plan.actions import Action, PipelineUnit
from lightning_megatron.plan.graph_slots import GraphSlots
from lightning_megatron.plan.schedule import Schedule


@dataclass(frozen=True)
class SegmentSettings:
    """Settings of the captured parts of models.

    Args:
        scopes: Scopes that graphs capture.
        buckets: Parameters of each bucket that several ranks reduce or gather; a graph begins where
            the first of them is read.
        redraws: Whether backward passes recompute activations with random draws.
        max_shapes: Most shapes of microbatches that get graphs in each kind of step; others run
            eagerly (shapes).
    """

    scopes: Collection[str] = ("all",)
    buckets: Sequence[Collection[nn.Parameter]] = ()
    redraws: bool = False
    wait_for: Callable[[Collection[nn.Parameter]], None] = lambda parameters: None
    max_shapes: int = 1


class GraphRunner:
    """Runner that replays graphs of the parts of a model's chunks, and runs the rest.

    Equal to the model without graphs, gradients included. Until :meth:`begin` it runs
    everything eagerly and observes. From then on, each slot of a chunk captures its graphs when its
    first microbatch needs them, and replays them for all later ones. Evaluation, which keeps no
    activations, uses the memory of slot 0.

    A call outside of a step's actions, or a second call of the model for one microbatch, runs
    eagerly. So does a microbatch of a further key than the settings allow, and a part whose inputs
    differ from those of its capture.

    Args:
        reducer: Owner of the gradient slots.
        settings: What is captured.
    """

    def __init__(
        self,
        tools: CaptureTools,
        reducer: GradientReducer,
        rank: int,
        settings: SegmentSettings = SegmentSettings(),
    ) -> None:
        self._tools = tools
        self._reducer = reducer
        self._rank = rank
        self._settings = settings
        self._chunks: dict[int, list[ChunkPart]] = {}
        # Chunks whose segments may have new user hooks, which a replay would not call.
        self._unchecked: set[int] = set()
        self._observers: dict[tuple[int, PassMode], ChunkObserver] = {}
        self._slots: dict[tuple[int, int | None], Slot] = {}
        #: Keys that have or will have graphs, in order, by chunk and kind of step.
        self._keys: dict[tuple[int, StepKind], list[ChunkKey]] = {}
        # The schedules are kept alive, so that no other schedule gets the ``id`` of one of them.
        self._plans: dict[int, tuple[Schedule, GraphSlots]] = {}
        self._plan: GraphSlots | None = None
        self._is_step_empty = True
        self._unit: PipelineUnit | None = None
        self._num_calls = 0
        self._kind: StepKind | None = TRAINING
        self._begun: set[StepKind] = set()
        self._is_permitted = True
        #: Number of eager runs of a microbatch or a part, by its name and the reason.
        self.eager: dict[tuple[str, str], int] = {}

    def begin(self, kind: StepKind = TRAINING) -> None:
        """Capture, from the next step of a kind on, the graphs that its microbatches need."""
        self._begun.add(kind)
        self._unchecked.update(self._chunks)

    def permit(self, kind: StepKind | None, replays: bool) -> None:
        """Set the kind of the next steps.

        Args:
            kind: Kind of the steps; None runs all calls of the model as if there were no runner.
            replays: Whether captures and replays are permitted; otherwise steps run eagerly.
        """
        self._kind = kind
        self._is_permitted = replays

    def release(self) -> None:
        """Free all graphs, and capture no more until the next :meth:`begin`."""
        self._begun.clear()
        self._unchecked.update(self._chunks)
        self._keys.clear()
        self._tools.notes.failures.clear()
        for slot in self._slots.values():
            slot.release()
        self._slots.clear()
        self._tools.gradient_copies.clear()

    @property
    def failure(self) -> str | None:
        """Return what could not be captured, and why; None if nothing has failed."""
        return self._tools.failure

    @property
    def num_graphs(self) -> int:
        """Return the number of captured graphs."""
        return sum(slot.num_graphs() for slot in self._slots.values())

    @property
    def counts(self) -> GraphCounts:
        """Return what exists now, in numbers."""
        keys = {(chunk, key) for (chunk, _), slot in self._slots.items() for key in slot.keys}
        num_shapes = Counter((chunk, key.mode) for chunk, key in keys)
        return GraphCounts(
            self.num_graphs,
            sum(slot.num_graphs(has_backward=False) for slot in self._slots.values()),
            self._slot_counts,
            max(num_shapes.values(), default=0),
            self._tools.notes.seconds,
        )

    @property
    def _slot_counts(self) -> tuple[int, ...]:
        """Return the number of slots with graphs of each chunk."""
        used = [chunk for (chunk, _), slot in self._slots.items() if slot.num_graphs()]
        return tuple(number for _, number in sorted(Counter(used).items()))

    # ---- the actions of a step

    def begin_step(self, schedule: Schedule) -> None:
        """Prepare for the actions of a step; see ``ActionObserver``."""
        if id(schedule) not in self._plans:
            self._plans[id(schedule)] = schedule, GraphSlots(schedule, self._rank)
        self._plan = self._plans[id(schedule)][1]
        self._is_step_empty = not self._reducer.has_unreduced
        # If an error ended the previous step, its microbatches are still in the slots.
        for slot in self._slots.values():
            slot.free()

    @contextmanager
    def during(self, action: Action) -> Iterator[None]:
        """Let the model's calls inside the block belong to an action; see ``ActionObserver``."""
        self._unit = action.unit if action.kind == "F" else None
        self._num_calls = 0
        try:
            yield
        finally:
            self._unit = None
        if action.kind in ("B", "W") or not self._has_backward:
            for slot in self._slots_of(action.unit):
                slot.leave(action.unit)

    def record_sends(self, unit: PipelineUnit, transfers: PendingTransfers) -> None:
        """Wait for transfers before the slot of a unit is used again; see ``ActionObserver``."""
        if self._plan is not None and self._has_backward:
            # A shared slot returns copies of its results.
            slot = self._slots.get((unit.chunk, self._plan.slot_of(unit)))
            if slot is not None:
                slot.keep(transfers)

    @property
    def _has_backward(self) -> bool:
        """Return whether the step has backward passes."""
        return self._plan is not None and not self._plan.schedule.forward_only

    def _slots_of(self, unit: PipelineUnit) -> list[Slot]:
        """Return the slot that a unit occupies, and the one that all units of its chunk share."""
        if self._plan is None:
            return []
        places = (unit.chunk, self._plan.slot_of(unit)), (unit.chunk, None)
        return [self._slots[place] for place in places if place in self._slots]

    # ---- the model's calls

    def run(
        self,
        model: LayeredModule,
        chunk: int,
        hidden: Tensor | None,
        call: Any,
        layers: Mapping[int, LayerInputs],
    ) -> Any:
        """Run a chunk; see ``ChunkRunner``."""
        mode = PassMode(model.training, torch.is_grad_enabled())
        kind = self._kind
        is_last = model.is_last_stage(chunk)
        if kind is None or not self._serves(chunk, kind, mode):
            return model.run_layers(hidden, call, layers, is_last)
        chunk_call = ChunkCall(hidden, call, layers)
        key = ChunkKey.of(mode, chunk_call.by_name())
        observer = self._observer(model, chunk, mode)
        if kind not in self._begun or not observer.has_observed:
            return observer.run(chunk_call, key)
        is_off = not self._is_permitted or self.failure is not None
        if is_off or not self._admits(chunk, kind, key):
            return model.run_layers(hidden, call, layers, is_last)
        if not observer.knows(key):
            return observer.run(chunk_call, key)
        graphs = self._graphs_of(key)
        # If there are many sequence lengths, the model moves tables, which are then copied before
        # each replay.
        constants = frozenset() if self._settings.max_shapes > 1 else observer.constants
        output = chunk_call.run(
            observer.parts, partial(self._run_part, observer.parts, graphs, constants, key)
        )
        if not is_last and mode.has_backward:
            return output
        # The next microbatch overwrites the outputs of graphs, but user code or another chunk may
        # keep them.
        flat = flatten(output)
        return flat.with_tensors([tensor.clone() for tensor in flat.tensors])

    def _serves(self, chunk: int, kind: StepKind, mode: PassMode) -> bool:
        """Return whether a call belongs to a microbatch in a step of the current kind."""
        self._num_calls += 1
        unit = self._unit
        is_own = unit is not None and unit.chunk == chunk and self._num_calls == 1
        # The strategy tries the first batch of steps without backward passes.
        return is_own and kind.has_backward == self._has_backward == mode.has_backward

    def _admits(self, chunk: int, kind: StepKind, key: ChunkKey) -> bool:
        """Return whether a key has or may get graphs."""
        keys = self._keys.setdefault((chunk, kind), [])
        most = self._settings.max_shapes
        if key in keys:
            return True
        if len(keys) < most:
            keys.append(key)
            return True
        if most == 1:
            self._note_eager(*key.difference_from(keys[0]))
        else:
            self._note_eager(f"a {kind.name} of a further shape", beyond(most))
        return False

    def _observer(self, model: LayeredModule, chunk: int, mode: PassMode) -> ChunkObserver:
        if chunk not in self._chunks or chunk in self._unchecked:
            self._unchecked.discard(chunk)
            self._prepare(model, chunk)
        if (chunk, mode) not in self._observers:
            self._observers[chunk, mode] = ChunkObserver(
                self._chunks[chunk], self._tools.random, self._settings.buckets
            )
        return self._observers[chunk, mode]

    def _prepare(self, model: LayeredModule, chunk: int) -> None:
        """Divide a chunk into parts, unless the current division is up to date."""
        parts = chunk_parts(model, chunk, self._settings.scopes)
        earlier = self._chunks.get(chunk)
        if earlier is not None and describe(earlier) == describe(parts):
            return
        self._chunks[chunk] = parts
        for place in [key for key in self._observers if key[0] == chunk]:
            del self._observers[place]

    def _graphs_of(self, key: ChunkKey) -> dict[int, Recording]:
        """Let the unit occupy its slot, and return the graphs of the parts by number."""
        unit = self._unit
        assert unit is not None, "a microbatch runs"
        assert self._plan is not None, "a step has begun"
        is_first = self._is_step_empty and self._plan.first_units[unit.chunk] == unit
        observer = self._observers[unit.chunk, key.mode]
        shared = list[int]()
        if key.mode.has_backward and self._plan.can_share:
            shared = observer.keeping_inputs
        separate = [number for number in range(len(observer.parts)) if number not in shared]
        graphs = dict[int, Recording]()
        for place, chosen in ((self._plan.slot_of(unit), separate), (None, shared)):
            if chosen:
                slot = self._slot(unit.chunk, place)
                slot.occupy(unit)
                make = partial(self._captured_parts, observer, key.mode, chosen)
                graphs |= slot.graphs(key, is_first, make)
        return graphs

    def _slot(self, chunk: int, number: int | None) -> Slot:
        """Return a slot by its number, or the one that all microbatches share."""
        assert self._plan is not None, "a step has begun"
        place = chunk, number
        if place not in self._slots:
            label = "shared slot" if number is None else f"slot {number}"
            if self._plan.schedule.num_chunks > 1:
                label = f"chunk {chunk}, {label}"
            kind = SharedSlot if number is None else Slot
            self._slots[place] = kind(label, self._tools)
        return self._slots[place]

    def _captured_parts(
        self, observer: ChunkObserver, mode: PassMode, numbers: Collection[int]
    ) -> dict[int, CapturedPart]:
        settings = self._settings
        return {
            number: CapturedPart(
                part,
                observer.observations[number],
                settings.wait_for,
                settings.redraws,
                mode.has_backward,
            )
            for number, part in enumerate(observer.parts)
            if number in numbers
        }

    def _run_part(
        self,
        parts: Sequence[ChunkPart],
        graphs: Mapping[int, Recording],
        constants: frozenset[int],
        key: ChunkKey,
        number: int,
        values: Any,
    ) -> Any:
        recording = graphs[number]
        if self.failure is not None:
            return parts[number].run(values)
        flat = flatten(values)
        reason = recording.find_mismatch(flat)
        if reason is not None:
            self._note_eager(parts[number].label, reason)
            return parts[number].run(values)
        if not recording.is_captured and not recording.capture_forward(flat, constants, key):
            return parts[number].run(values)
        return recording(flat)

    def _note_eager(self, part: str, reason: str) -> None:
        self.eager[part, reason] = self.eager.get((part, reason), 0) + 1
