"""Runner of a model's chunks by graphs of their static pieces."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_megatron.graphs.captured_piece import CapturedPiece, CaptureTools, StaticPiece
from lightning_megatron.graphs.chunk_pieces import ChunkObserver, ChunkPieces
from lightning_megatron.graphs.report import runs_of
from lightning_megatron.graphs.slot import Slot
from lightning_megatron.graphs.values import flatten
from lightning_megatron.groups.p2p import PendingTransfers
from lightning_megatron.layers.segments import SegmentList, is_compiled
from lightning_megatron.plan.actions import Action, PipelineUnit
from lightning_megatron.plan.graph_slots import GraphSlots
from lightning_megatron.plan.schedule import Schedule
from lightning_megatron.training.gradients import GradientReducer


@dataclass(frozen=True)
class SegmentSettings:
    """Settings of the captured segments.

    Args:
        scopes: Scopes that graphs capture.
        cuts: Names of segments after which a graph ends, because a bucket of gradients begins.
        keeps_whole: Function that returns whether a module must be called itself.
        redraws: Whether backward passes recompute activations with random draws.
        wait_for: Function that waits until parameters are complete.
    """

    scopes: Collection[str] = ("all",)
    cuts: Collection[str] = ()
    keeps_whole: Callable[[nn.Module], bool] = is_compiled
    redraws: bool = False
    wait_for: Callable[[Collection[nn.Parameter]], None] = lambda parameters: None


class GraphRunner:
    """Runner that replays graphs of the static pieces of a model's chunks, and runs the rest.

    Equal to the model without graphs, gradients included. Until :meth:`begin` it runs
    everything eagerly and observes. From then on, each slot of a chunk captures its graphs when its
    first microbatch needs them, and replays them for all later ones.

    A call outside of a step's actions, without gradients, or a second call of the model for one
    microbatch runs eagerly. So does a piece whose inputs differ from those of its capture.

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
        self._chunks: dict[int, tuple[ChunkPieces, ChunkObserver]] = {}
        self._slots: dict[tuple[int, int], Slot] = {}
        # The schedules are kept, so that no other one gets the identity of one of them.
        self._plans: dict[int, tuple[Schedule, GraphSlots]] = {}
        self._plan: GraphSlots | None = None
        self._is_step_empty = True
        self._unit: PipelineUnit | None = None
        self._num_calls = 0
        self._captures = False
        self._is_permitted = True
        #: How often each reason made a piece run eagerly, by name of the piece and reason.
        self.eager: dict[tuple[str, str], int] = {}

    def begin(self) -> None:
        """Capture from the next step on what its microbatches need."""
        self._captures = True

    def permit(self, replays: bool) -> None:
        """Permit or forbid captures and replays in the next step, which else runs eagerly."""
        self._is_permitted = replays

    def release(self) -> None:
        """Free all graphs, and capture no more until the next :meth:`begin`."""
        self._captures = False
        self._tools.failures.clear()
        for slot in self._slots.values():
            slot.release()
        self._slots.clear()
        self._tools.gradient_copies.clear()

    @property
    def failure(self) -> str | None:
        """Return what could not be captured, and why; None if nothing has failed."""
        return self._tools.failures[0] if self._tools.failures else None

    @property
    def num_graphs(self) -> int:
        """Return the number of captured graphs."""
        return sum(slot.num_graphs for slot in self._slots.values())

    # ---- the actions of a step

    def begin_step(self, schedule: Schedule) -> None:
        """Prepare for the actions of a training step; see ``ActionObserver``."""
        if id(schedule) not in self._plans:
            self._plans[id(schedule)] = schedule, GraphSlots(schedule, self._rank)
        self._plan = self._plans[id(schedule)][1]
        self._is_step_empty = not self._reducer.has_unreduced
        # A step that an error ended has left microbatches behind.
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
        if action.kind in ("B", "W"):
            slot = self._slot_of(action.unit)
            if slot is not None:
                slot.free()

    def sending(self, unit: PipelineUnit, transfers: PendingTransfers) -> None:
        """Wait for transfers before the slot of a unit is used again; see ``ActionObserver``."""
        slot = self._slot_of(unit)
        if slot is not None:
            slot.keep(transfers)

    def _slot_of(self, unit: PipelineUnit) -> Slot | None:
        if self._plan is None:
            return None
        return self._slots.get((unit.chunk, self._plan.slot_of(unit)))

    # ---- the model's calls

    def run(
        self, chunk: int, segments: SegmentList, values: tuple[Any, ...], is_last: bool
    ) -> tuple[Any, ...]:
        """Run a chunk; see ``ChunkRunner``."""
        if not torch.is_grad_enabled():
            return segments(values)
        pieces, observer = self._chunk(chunk, segments)
        if not self._captures:
            return observer.run(values)
        self._num_calls += 1
        unit = self._unit
        is_usable = self._is_permitted and self.failure is None
        if not is_usable or unit is None or unit.chunk != chunk or self._num_calls > 1:
            return segments(values)
        graphs = self._graphs_of(unit)
        found = pieces.run(values, partial(self._run_piece, chunk, graphs))
        if not is_last:
            return found
        # The next microbatch overwrites what graphs have written, but user code may keep a result.
        flat = flatten(found)
        copies: tuple[Any, ...] = flat.with_tensors([one.clone() for one in flat.tensors])
        return copies

    def _chunk(self, chunk: int, segments: SegmentList) -> tuple[ChunkPieces, ChunkObserver]:
        if chunk not in self._chunks:
            settings = self._settings
            pieces = ChunkPieces(
                segments,
                settings.scopes,
                settings.cuts,
                settings.keeps_whole,
                settings.wait_for,
            )
            self._chunks[chunk] = pieces, ChunkObserver(pieces, self._tools.random)
        return self._chunks[chunk]

    def _graphs_of(self, unit: PipelineUnit) -> dict[int, CapturedPiece]:
        """Let a unit occupy its slot, and return the graphs of the static pieces by number."""
        assert self._plan is not None, "a step has begun"
        index = self._plan.slot_of(unit)
        slot = self._slots.get((unit.chunk, index))
        if slot is None:
            slot = self._make_slot(unit.chunk, index)
        slot.occupy(unit)
        is_first = self._is_step_empty and self._plan.first_units[unit.chunk] == unit
        return slot.graphs(is_first)

    def _make_slot(self, chunk: int, index: int) -> Slot:
        pieces, observer = self._chunks[chunk]
        static = {}
        for number, piece in enumerate(pieces.pieces):
            if piece.is_static:
                (label,) = runs_of([segment.name for segment in piece], ())
                static[number] = StaticPiece(
                    label, piece, observer.draws[number], self._settings.redraws
                )
        slot = Slot(f"chunk {chunk}, slot {index}", static, self._tools)
        self._slots[chunk, index] = slot
        return slot

    def _run_piece(
        self,
        chunk: int,
        graphs: dict[int, CapturedPiece],
        number: int,
        values: tuple[Any, ...],
    ) -> tuple[Any, ...]:
        pieces, observer = self._chunks[chunk]
        segments = pieces.pieces[number]
        captured = graphs.get(number)
        if captured is None or self.failure is not None:
            return segments(values)
        flat = flatten(values)
        reason = captured.why_unfit(flat)
        if reason is not None:
            key = captured.piece.label, reason
            self.eager[key] = self.eager.get(key, 0) + 1
            return segments(values)
        if not captured.is_captured and not captured.capture_forward(flat, observer.constants):
            return segments(values)
        return captured(flat)
