"""Runner of a model's chunks by graphs of what can be captured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_megatron.graphs.chunk_parts import ChunkCall, ChunkPart, chunk_parts, describe
from lightning_megatron.graphs.graph_keys import TRAINING, ChunkKey, PassMode
from lightning_megatron.graphs.interception import interceptions_of
from lightning_megatron.graphs.items import CaptureTools
from lightning_megatron.graphs.observation import ChunkObserver, Observation
from lightning_megatron.graphs.recording import Recording, Slot
from lightning_megatron.graphs.report import (
    GraphCounts,
    StepCaptures,
    beyond,
    report_line,
    runs_of,
)
from lightning_megatron.graphs.values import flatten
from lightning_megatron.groups.pending import Pending
from lightning_megatron.models.layered import LayeredModule, LayerInputs
from lightning_megatron.optimizer.reduction import GradientReducer
from lightning_megatron.plan.actions import Action, PipelineUnit
from lightning_megatron.plan.graph_slots import GraphSlots
from lightning_megatron.plan.schedule import Schedule


class GraphRunner(StepCaptures):
    """Runner that replays graphs of the parts of a model's chunks, and runs the rest.

    Equal to the model without graphs, gradients included. It serves the steps that :meth:`permit`
    announces. Until :meth:`begin` it runs everything eagerly and observes. From then on, each slot
    of a chunk captures its graphs when its first microbatch needs them, and replays them for all
    later ones. Evaluation, which keeps no activations, uses the memory of slot 0.

    A call outside of a step's actions, or a second call of the model for one microbatch, runs
    eagerly. So does a microbatch of a further key than the settings allow, and a part whose inputs
    differ from those of its capture.

    Args:
        model: A GPT or an encoder.
        reducer: Owner of the gradient slots.
        communicates_across_data: Whether a graph of a stage contains transports of experts.
    """

    def __init__(
        self,
        model: LayeredModule,
        tools: CaptureTools,
        reducer: GradientReducer,
        communicates_across_data: bool = False,
    ) -> None:
        super().__init__()
        self.communicates_across_data = communicates_across_data
        self._model = model
        self._tools = tools
        self._reducer = reducer
        self._rank = model.mesh.pp.rank
        self._chunks: dict[int, list[ChunkPart]] = {}
        # Chunks whose segments may have new user hooks, which a replay would not call.
        self._unchecked: set[int] = set()
        self._observers: dict[tuple[int, PassMode], ChunkObserver] = {}
        self._slots: dict[tuple[int, int | None], Slot] = {}
        #: Keys that have or will have graphs, in order, by chunk and kind of step.
        self._keys: dict[tuple[int, str], list[ChunkKey]] = {}
        # The schedules are kept alive, so that no other schedule gets the ``id`` of one of them.
        self._plans: dict[int, tuple[Schedule, GraphSlots]] = {}
        self._plan: GraphSlots | None = None
        self._is_step_empty = True
        self._unit: PipelineUnit | None = None
        self._num_calls = 0
        # Kind of the running step; None runs all calls of the model as if there were no runner.
        self._kind: str | None = None
        self._begun: set[str] = set()
        self._is_permitted = True
        model.runner = self

    @override
    def begin(self, kind: str = TRAINING) -> None:
        self._begun.add(kind)
        self._unchecked.update(self._chunks)

    @override
    def permit(self, kind: str, replays: bool) -> None:
        self._kind = kind
        self._is_permitted = replays
        # The ranks have agreed on equal shapes in this step, or the user guarantees them, so token
        # counts need no comparison.
        self._model.compares_counts = not (replays and self.communicates_across_data)

    @override
    def end_step(self) -> None:
        self._kind = None
        self._model.compares_counts = True

    @override
    def report(self) -> str:
        captured: list[str] = []
        eager: dict[str, str] = {}
        for chunk in range(self._model.num_chunks):
            places = interceptions_of(self._model, chunk, self._tools.scopes)
            reasons = {place.name: place.reason for place in places if place.reason is not None}
            captured += runs_of([place.name for place in places], reasons)
            eager |= reasons
        return report_line("segments", captured, self.counts, eager)

    @override
    def release(self) -> None:
        self._begun.clear()
        self._unchecked.update(self._chunks)
        self._keys.clear()
        self._tools.failure = None
        for slot in self._slots.values():
            slot.release()
        self._slots.clear()
        self._tools.gradient_copies.clear()

    @override
    def close(self) -> None:
        self.release()
        self._model.runner = None

    @property
    @override
    def failure(self) -> str | None:
        return self._tools.failure

    @property
    @override
    def counts(self) -> GraphCounts:
        counts = {place: slot.counts for place, slot in self._slots.items()}
        keys = {(chunk, key) for (chunk, _), numbers in counts.items() for key in numbers}
        shapes = Counter((chunk, key.mode) for chunk, key in keys)
        total = sum(counts.values(), Counter[ChunkKey]())
        evaluating = sum(number for key, number in total.items() if not key.mode.has_backward)
        return GraphCounts(
            total.total(),
            evaluating,
            sum(map(bool, counts.values())),
            max(shapes.values(), default=0),
            self._tools.seconds,
        )

    # ---- the actions of a step

    def begin_step(self, schedule: Schedule) -> None:
        """Prepare for the actions of a step; see ``ActionObserver``."""
        if id(schedule) not in self._plans:
            self._plans[id(schedule)] = schedule, GraphSlots(schedule, self._rank)
        self._plan = self._plans[id(schedule)][1]
        self._is_step_empty = not self._reducer.has_unreduced
        # If an error ended the previous step, its microbatches are still in the slots.
        for slot in self._slots.values():
            slot.memory.clear()

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
                slot.memory.leave(action.unit)

    def record_sends(self, unit: PipelineUnit, transfers: Pending) -> None:
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
        """Run a chunk; see ``LayeredModule.run_chunk``."""
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
        constants = frozenset() if self._tools.max_shapes > 1 else observer.constants
        run_part = partial(self._run_part, graphs, constants, key)
        output = chunk_call.run(observer.parts, run_part)
        if not is_last and mode.has_backward:
            return output
        # The next microbatch overwrites the outputs of graphs, but user code or another chunk may
        # keep them.
        flat = flatten(output)
        return flat.with_tensors([tensor.clone() for tensor in flat.tensors])

    def _serves(self, chunk: int, kind: str, mode: PassMode) -> bool:
        """Return whether a call belongs to a microbatch in a step of the current kind."""
        self._num_calls += 1
        unit = self._unit
        is_own = unit is not None and unit.chunk == chunk and self._num_calls == 1
        # The strategy tries the first batch of steps without backward passes.
        has_backward = kind == TRAINING
        return is_own and has_backward == self._has_backward == mode.has_backward

    def _admits(self, chunk: int, kind: str, key: ChunkKey) -> bool:
        """Return whether a key has or may get graphs."""
        keys = self._keys.setdefault((chunk, kind), [])
        most = self._tools.max_shapes
        if key in keys:
            return True
        if len(keys) < most:
            keys.append(key)
            return True
        if most == 1:
            self.eager[key.difference_from(keys[0])] += 1
        else:
            self.eager[f"a {kind} of a further shape", beyond(most)] += 1
        return False

    def _observer(self, model: LayeredModule, chunk: int, mode: PassMode) -> ChunkObserver:
        if chunk not in self._chunks or chunk in self._unchecked:
            self._unchecked.discard(chunk)
            self._prepare(model, chunk)
        if (chunk, mode) not in self._observers:
            self._observers[chunk, mode] = ChunkObserver(self._chunks[chunk], self._tools)
        return self._observers[chunk, mode]

    def _prepare(self, model: LayeredModule, chunk: int) -> None:
        """Divide a chunk into parts, unless the current division is up to date."""
        parts = chunk_parts(model, chunk, self._tools.scopes)
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
        may_share = key.mode.has_backward and self._plan.can_share
        observed: dict[int | None, dict[int, Observation]] = {}
        for number, observation in enumerate(observer.observations):
            is_shared = may_share and observation.keeps_inputs
            place = None if is_shared else self._plan.slot_of(unit)
            observed.setdefault(place, {})[number] = observation
        graphs = dict[int, Recording]()
        for place, observations in observed.items():
            slot = self._slot(unit.chunk, place)
            slot.occupy(unit)
            graphs |= slot.graphs(key, is_first, observations)
        return graphs

    def _slot(self, chunk: int, number: int | None) -> Slot:
        """Return a slot by its number, or the one that all microbatches share."""
        assert self._plan is not None, "a step has begun"
        place = chunk, number
        if place not in self._slots:
            label = "shared slot" if number is None else f"slot {number}"
            if self._plan.schedule.num_chunks > 1:
                label = f"chunk {chunk}, {label}"
            self._slots[place] = Slot(label, self._tools, is_shared=number is None)
        return self._slots[place]

    def _run_part(
        self,
        graphs: Mapping[int, Recording],
        constants: frozenset[int],
        key: ChunkKey,
        number: int,
        values: Any,
    ) -> Any:
        recording = graphs[number]
        part = recording.part
        if self.failure is not None:
            return part.run(values)
        flat = flatten(values)
        if not recording.fits(flat):
            self.eager[part.label, "whose inputs have moved since the capture"] += 1
            return part.run(values)
        if not recording.is_captured and not recording.capture_forward(flat, constants, key):
            return part.run(values)
        return recording(flat)
