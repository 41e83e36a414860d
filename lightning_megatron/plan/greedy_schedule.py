"""Greedy construction of a schedule on a clock, from the times of the virtual stages."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_megatron.plan.actions import Action, Kind
from lightning_megatron.plan.live_microbatches import is_within
from lightning_megatron.plan.placement import Placement
from lightning_megatron.plan.stage_costs import StageCosts


@dataclass(frozen=True)
class GreedyRule:
    """Choices of the greedy construction.

    Args:
        limit: Size of the activations that a stage may keep (the unit of ``kept``).
        kept: What a forward keeps for its backward, for each virtual stage.
        weight_half_share: Part of it that the weight half needs after the input half.
        alternate: Whether a forward follows each input half where both could run; otherwise input
            halves go first.
        deep_first: Whether forwards of later chunks go before those of earlier ones.
        patience: Share of a weight half that may delay the next input half or forward: with 0 a
            weight half fills only gaps in which it ends in time.
    """

    limit: float
    kept: Sequence[float]
    weight_half_share: float
    alternate: bool
    deep_first: bool
    patience: float


class _Stage:
    """State of one stage during the construction."""

    def __init__(self, num_chunks: int) -> None:
        self.row: list[Action] = []
        # The last action that is not a weight half.
        self.last: Kind = "F"
        self.free = 0
        self.size = 0.0
        self.due: deque[tuple[int, int]] = deque()
        self.forwards = [0] * num_chunks
        self.backwards = [0] * num_chunks


@dataclass(frozen=True)
class _Choice:
    """Action that a stage can start next, with its start."""

    start: int
    rank: int
    action: Action


class GreedyConstruction:
    """Rows that grow by the action that can start first, until all work is done.

    Weight halves fill gaps, and run where nothing else can, as when forwards need their memory.

    Args:
        placement: Stage and chunk of every virtual stage.
        num_microbatches: Microbatches per step.
        costs: Times of the virtual stages.
        rule: Choices between actions that could run.

    Source: Qi et al. 2023 (https://arxiv.org/abs/2401.10241), section 3.1.
    """

    def __init__(
        self, placement: Placement, num_microbatches: int, costs: StageCosts, rule: GreedyRule
    ) -> None:
        self.placement = placement
        self.num_microbatches = num_microbatches
        self.costs = costs
        self.rule = rule
        self._stages = [_Stage(placement.num_chunks) for _ in range(placement.num_stages)]
        # Ticks at which the output of a forward, and the gradient of its input, are available on
        # the stage that needs them, by virtual stage and microbatch.
        self._outputs: dict[tuple[int, int], int] = {}
        self._gradients: dict[tuple[int, int], int] = {}

    def rows(self) -> tuple[tuple[Action, ...], ...] | None:
        """Return the row of every stage, or None if memory is too small for any order."""
        choices = [self._choose(rank) for rank in range(self.placement.num_stages)]
        while any(choice is not None for choice in choices):
            best = min(
                (choice for choice in choices if choice is not None),
                key=lambda choice: (choice.start, choice.rank),
            )
            # A choice depends on its own stage, and on neighbours whose results it waits for.
            touched = {best.rank, self._run(best)}
            for rank in touched:
                choices[rank] = self._choose(rank)
        done = 3 * self.num_microbatches * self.placement.num_chunks
        if any(len(stage.row) != done for stage in self._stages):
            return None
        return tuple(tuple(stage.row) for stage in self._stages)

    def _choose(self, rank: int) -> _Choice | None:
        stage = self._stages[rank]
        ready = [*self._ready_backwards(rank), *self._ready_forwards(rank)]
        due = self._due(rank)
        if not ready:
            return due
        first = min(choice.start for choice in ready)
        # Whatever can start by then competes; a weight half runs in gaps before it.
        if due is not None and first > stage.free:
            ticks = self._ticks(rank, due.action)
            if stage.free + ticks * (1 - self.rule.patience) <= first:
                return due
        return min(
            (choice for choice in ready if choice.start == first),
            key=lambda choice: self._preference(stage, choice),
        )

    def _preference(self, stage: _Stage, choice: _Choice) -> tuple[bool, int]:
        forward_now = self.rule.alternate and stage.last == "I"
        action = choice.action
        chunk = -action.chunk if action.kind == "I" or self.rule.deep_first else action.chunk
        return (action.kind == "F") != forward_now, chunk

    def _ready_forwards(self, rank: int) -> list[_Choice]:
        stage = self._stages[rank]
        found = []
        for chunk, microbatch in enumerate(stage.forwards):
            if microbatch == self.num_microbatches:
                continue
            virtual = self.placement.virtual_stage(rank, chunk)
            ready = 0 if virtual == 0 else self._outputs.get((virtual - 1, microbatch))
            fits = is_within(stage.size + self._room(rank, chunk), self.rule.limit)
            if ready is None or not fits:
                continue
            found.append(_Choice(max(ready, stage.free), rank, Action("F", chunk, microbatch)))
        return found

    def _room(self, rank: int, chunk: int) -> float:
        # A microbatch in this chunk, and in each later one: earlier chunks leave room for one that
        # must pass the later chunks before anything is freed.
        return sum(
            self.rule.kept[self.placement.virtual_stage(rank, later)]
            for later in range(chunk, self.placement.num_chunks)
        )

    def _ready_backwards(self, rank: int) -> list[_Choice]:
        stage = self._stages[rank]
        found = []
        for chunk, microbatch in enumerate(stage.backwards):
            if microbatch == stage.forwards[chunk]:
                continue
            virtual = self.placement.virtual_stage(rank, chunk)
            is_last = virtual == self.placement.num_virtual_stages - 1
            ready = 0 if is_last else self._gradients.get((virtual + 1, microbatch))
            if ready is not None:
                found.append(_Choice(max(ready, stage.free), rank, Action("I", chunk, microbatch)))
        return found

    def _due(self, rank: int) -> _Choice | None:
        stage = self._stages[rank]
        if not stage.due:
            return None
        return _Choice(stage.free, rank, Action("W", *stage.due[0]))

    def _run(self, choice: _Choice) -> int:
        """Add an action to its row; return the stage that its result goes to."""
        stage = self._stages[choice.rank]
        action = choice.action
        virtual = self.placement.virtual_stage(choice.rank, action.chunk)
        stage.row.append(action)
        stage.free = choice.start + self._ticks(choice.rank, action)
        if action.kind != "W":
            stage.last = action.kind
        whole = self.rule.kept[virtual]
        after = choice.rank
        if action.kind == "F":
            stage.size += whole
            stage.forwards[action.chunk] += 1
            after = self._deliver(self._outputs, virtual, virtual + 1, choice, stage.free)
        elif action.kind == "I":
            stage.size -= whole * (1 - self.rule.weight_half_share)
            stage.backwards[action.chunk] += 1
            stage.due.append((action.chunk, action.microbatch))
            after = self._deliver(self._gradients, virtual, virtual - 1, choice, stage.free)
        else:
            stage.size -= whole * self.rule.weight_half_share
            stage.due.popleft()
        return after

    def _deliver(
        self,
        results: dict[tuple[int, int], int],
        virtual: int,
        after: int,
        choice: _Choice,
        time: int,
    ) -> int:
        if not 0 <= after < self.placement.num_virtual_stages:
            return choice.rank
        peer, _ = self.placement.owner(after)
        delay = self.costs.transfer if peer != choice.rank else 0
        results[virtual, choice.action.microbatch] = time + delay
        return peer

    def _ticks(self, rank: int, action: Action) -> int:
        return self.costs.ticks(action.kind, self.placement.virtual_stage(rank, action.chunk))
