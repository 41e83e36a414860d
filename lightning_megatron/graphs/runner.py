"""Runner of a model's chunks by graphs of their static pieces."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatron.graphs.capture_tools import CaptureTools, StaticPiece
from lightning_megatron.graphs.captured_piece import CapturedPiece
from lightning_megatron.graphs.chunk_key import ChunkKey, PassMode
from lightning_megatron.graphs.chunk_pieces import ChunkObserver, ChunkPieces
from lightning_megatron.graphs.model_segments import chunk_segments, chunk_values
from lightning_megatron.graphs.report import GraphCounts, beyond, runs_of
from lightning_megatron.graphs.segments import SegmentList
from lightning_megatron.graphs.shared_slot import SharedSlot
from lightning_megatron.graphs.slot import Slot
from lightning_megatron.graphs.step_kind import TRAINING, StepKind
from lightning_megatron.graphs.values import flatten
from lightning_megatron.groups.p2p import PendingTransfers
from lightning_megatron.models.layered import LayeredModule, LayerInputs
from lightning_megatron.optimizer.reduction import GradientReducer
from lightning_megatron.plan.actions import Action, PipelineUnit
from lightning_megatron.plan.graph_slots import GraphSlots
from lightning_megatron.plan.schedule import Schedule
from lightning_megatron.user_code import is_compiled


@dataclass(frozen=True)
class SegmentSettings:
    """Settings of the captured segments.

    Args:
        scopes: Scopes that graphs capture.
        cuts: Names of segments after which a graph ends, because a bucket of gradients begins.
        keeps_whole: Function that returns whether a module must be called itself.
        redraws: Whether backward passes recompute activations with random draws.
        wait_for: Function that waits until parameters are complete.
        prepare: Function of the list of a chunk that returns the list to capture, which is equal
            to it. It may mark segments as not static.
        max_shapes: Most shapes of microbatches that get graphs in each kind of step; others run
            eagerly (shapes).
    """

    scopes: Collection[str] = ("all",)
    cuts: Collection[str] = ()
    keeps_whole: Callable[[nn.Module], bool] = is_compiled
    redraws: bool = False
    wait_for: Callable[[Collection[nn.Parameter]], None] = lambda parameters: None
    prepare: Callable[[SegmentList], SegmentList] = lambda segments: segments
    max_shapes: int = 1


class GraphRunner:
    """Runner that replays graphs of the static pieces of a model's chunks, and runs the rest.

    Equal to the model without graphs, gradients included. Until :meth:`begin` it runs
    everything eagerly and observes. From then on, each slot of a chunk captures its graphs when its
    first microbatch needs them, and replays them for all later ones. Evaluation, which keeps no
    activations, uses the memory of slot 0.

    A call outside of a step's actions, or a second call of the model for one microbatch, runs
    eagerly. So does a microbatch of a further key than the settings allow, and a piece whose inputs
    differ from those of its capture.

    Args:
        tools: Tools of the captures.
        reducer: Owner of the gradient slots.
        rank: Position on the pp axis.
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
        self._chunks: dict[int, ChunkPieces] = {}
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
        #: Number of eager runs of a microbatch or a piece, by its name and the reason.
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
        keys = [(chunk, key) for (chunk, _), slot in self._slots.items() for key in slot.keys]
        keys = list(dict.fromkeys(keys))
        return GraphCounts(
            self.num_graphs,
            sum(slot.num_graphs(has_backward=False) for slot in self._slots.values()),
            self._slot_counts,
            max(Counter((chunk, key.mode) for chunk, key in keys).values(), default=0),
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
        if kind is None or not self._serves(chunk, kind, mode):
            return model.run_chunk(chunk, hidden, call, layers)
        observer = self._observer(model, chunk, mode)
        names = self._chunks[chunk].inputs
        named = chunk_values(model, hidden, call, layers)
        values = tuple([named[name] for name in names])
        if kind not in self._begun or not observer.has_observed:
            return observer.run(values)[0]
        key = ChunkKey.of(mode, names, values)
        is_off = not self._is_permitted or self.failure is not None
        if is_off or not self._admits(chunk, kind, key):
            return model.run_chunk(chunk, hidden, call, layers)
        graphs = self._graphs_of(key)
        # If there are many sequence lengths, the model moves tables, which are then copied before
        # each replay.
        constants = frozenset() if self._settings.max_shapes > 1 else observer.constants
        outputs = self._chunks[chunk].run(
            values, partial(self._run_piece, chunk, graphs, constants)
        )
        if not model.is_last_stage(chunk) and mode.has_backward:
            return outputs[0]
        # The next microbatch overwrites the outputs of graphs, but user code or another chunk may
        # keep them.
        flat = flatten(outputs)
        return flat.with_tensors([tensor.clone() for tensor in flat.tensors])[0]

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
            observer = ChunkObserver(self._chunks[chunk], self._tools.random)
            self._observers[chunk, mode] = observer
        return self._observers[chunk, mode]

    def _prepare(self, model: LayeredModule, chunk: int) -> None:
        """Divide a chunk into pieces, unless the current division is up to date."""
        settings = self._settings
        pieces = ChunkPieces(
            settings.prepare(chunk_segments(model, chunk)),
            settings.scopes,
            settings.cuts,
            settings.keeps_whole,
            settings.wait_for,
        )
        earlier = self._chunks.get(chunk)
        if earlier is not None and earlier.runs == pieces.runs:
            return
        self._chunks[chunk] = pieces
        for place in [key for key in self._observers if key[0] == chunk]:
            del self._observers[place]

    def _graphs_of(self, key: ChunkKey) -> dict[int, CapturedPiece]:
        """Let the unit occupy its slot, and return the graphs of the static pieces by number."""
        unit = self._unit
        assert unit is not None, "a microbatch runs"
        assert self._plan is not None, "a step has begun"
        is_first = self._is_step_empty and self._plan.first_units[unit.chunk] == unit
        pieces = self._chunks[unit.chunk].pieces
        numbers = [number for number, piece in enumerate(pieces) if piece.is_static]
        keeping = self._observers[unit.chunk, key.mode].keeping_inputs
        shared = keeping if key.mode.has_backward and self._plan.can_share else set[int]()
        separate = [number for number in numbers if number not in shared]
        places = {self._plan.slot_of(unit): separate, None: sorted(shared)}
        graphs = dict[int, CapturedPiece]()
        for place, chosen in places.items():
            if chosen:
                slot = self._slot(unit.chunk, place)
                slot.occupy(unit)
                make = partial(self._static_pieces, unit.chunk, key.mode, chosen)
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

    def _static_pieces(
        self, chunk: int, mode: PassMode, numbers: Collection[int]
    ) -> dict[int, StaticPiece]:
        pieces = self._chunks[chunk]
        draws = self._observers[chunk, mode].draws
        return {
            number: StaticPiece(
                ", ".join(runs_of(pieces.names, pieces.names_outside(number))),
                piece,
                draws[number],
                self._settings.redraws,
                mode.has_backward,
            )
            for number, piece in enumerate(pieces.pieces)
            if number in numbers
        }

    def _run_piece(
        self,
        chunk: int,
        graphs: dict[int, CapturedPiece],
        constants: frozenset[int],
        number: int,
        values: tuple[Any, ...],
    ) -> tuple[Any, ...]:
        segments = self._chunks[chunk].pieces[number]
        captured = graphs.get(number)
        if captured is None or self.failure is not None:
            return segments(values)
        flat = flatten(values)
        reason = captured.find_mismatch(flat)
        if reason is not None:
            self._note_eager(captured.piece.label, reason)
            return segments(values)
        if not captured.is_captured and not captured.capture_forward(flat, constants):
            return segments(values)
        return captured(flat)

    def _note_eager(self, part: str, reason: str) -> None:
        self.eager[part, reason] = self.eager.get((part, reason), 0) + 1
