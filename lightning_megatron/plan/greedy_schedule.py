"""Greedy construction of a schedule on a clock, from the times of the virtual stages."""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_megatron.plan.actions import Action, Kind
from lightning_megatron.plan.live_microbatches import is_within
from lightning_megatron.plan.placement import Placement
from lightning_megatron.plan.stage_costs import StageCosts

_NEVER = sys.maxsize
"""Start of an action that cannot run yet (ticks)."""


@dataclass(frozen=True)
class GreedyRule:
    """Choices of the greedy construction.

    Args:
        limit: Size of the activations that a stage may keep (the unit of ``kept``).
        kept: Activations that a forward keeps for its backward, for each virtual stage.
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


@dataclass(frozen=True)
class _Destination:
    """Destination of the result of an action.

    Args:
        rank: Stage of the virtual stage that needs it.
        arrivals: Ticks at which the results for this virtual stage arrive, by microbatch.
        delay: Time of the transfer (ticks).
    """

    rank: int
    arrivals: list[int]
    delay: int


class _Stage:
    """State of one stage during the construction, and the action that it can start next."""

    def __init__(self, rank: int, num_chunks: int, work: int) -> None:
        self.rank = rank
        # Each chunk takes its microbatches in order, so that kinds and chunks describe the row.
        self.row: list[tuple[Kind, int]] = []
        # The last action that is not a weight half.
        self.last: Kind = "F"
        self.free = 0
        self.work = work
        self.size = 0.0
        self.due: deque[int] = deque()
        self.forwards = [0] * num_chunks
        self.backwards = [0] * num_chunks
        self.start = _NEVER
        self.kind: Kind = "F"
        self.chunk = 0


class GreedyConstruction:
    """Rows that grow by the action that can start first, until all work is done.

    Weight halves fill gaps, and run when nothing else can, for example because forwards need their
    memory.

    Args:
        placement: Stage and chunk of every virtual stage.
        costs: Times of the virtual stages.
        rule: Choices between actions that could run.
        longest: Time above which the construction is abandoned (ticks); None means any time.

    Source: Qi et al. 2023 (https://arxiv.org/abs/2401.10241), section 3.1.
    """

    def __init__(
        self,
        placement: Placement,
        num_microbatches: int,
        costs: StageCosts,
        rule: GreedyRule,
        longest: int | None = None,
    ) -> None:
        self.placement = placement
        self.num_microbatches = num_microbatches
        self.rule = rule
        #: Whether the limit has delayed a forward, so that a higher limit may change the rows.
        self.is_limited = False
        self._longest = _NEVER if longest is None else longest
        chunks = range(placement.num_chunks)
        self._chunk_order = chunks[::-1] if rule.deep_first else chunks
        self._kept = placement.by_stage(rule.kept)
        # Size of a microbatch in a chunk and in all later chunks. A forward needs this much room,
        # because the microbatch passes the later chunks before anything is freed.
        self._room = []
        for kept in self._kept:
            self._room.append([sum(kept[chunk:]) for chunk in chunks])
        self._ticks: dict[Kind, tuple[tuple[int, ...], ...]] = {
            "F": placement.by_stage(costs.forward),
            "I": placement.by_stage(costs.input_half),
            "W": placement.by_stage(costs.weight_half),
        }
        self._connect(costs.transfer)
        self._stages = [
            _Stage(rank, placement.num_chunks, num_microbatches * self._ticks_of_all(rank))
            for rank in range(placement.num_stages)
        ]

    @property
    def length(self) -> int:
        """Return the time of the actions so far, which is that of their simulation (ticks)."""
        return max(stage.free for stage in self._stages)

    def rows(self) -> tuple[tuple[Action, ...], ...] | None:
        """Return the row of every stage.

        Returns:
            The rows; None if memory is too small for any order, or the step takes longer than
            ``longest``.
        """
        stages = self._stages
        for stage in stages:
            self._choose(stage)
        starts = [stage.start for stage in stages]
        while (start := min(starts)) != _NEVER:
            stage = stages[starts.index(start)]
            # A choice depends on its own stage, and on neighbours whose results it waits for.
            peer = stages[self._run(stage)]
            if stage.free + stage.work > self._longest:
                return None
            for changed in (stage, peer):
                self._choose(changed)
                starts[changed.rank] = changed.start
        if any(stage.work for stage in stages):
            return None
        return tuple(_with_microbatches(stage.row) for stage in stages)

    def _connect(self, transfer: int) -> None:
        """Prepare the arrival ticks of inputs and gradients, and the destinations of results."""
        placement = self.placement
        # The first virtual stage waits for no input, and the last one for no gradient.
        known = [0] * self.num_microbatches
        count = placement.num_virtual_stages
        inputs = [known, *([] for _ in range(count - 1))]
        gradients = [*([] for _ in range(count - 1)), known]
        self._inputs = placement.by_stage(inputs)
        self._gradients = placement.by_stage(gradients)

        def destination(virtual: int, step: int, arrivals: list[list[int]]) -> _Destination | None:
            after = virtual + step
            if not 0 <= after < count:
                return None
            peer, _ = placement.owner(after)
            delay = transfer if peer != placement.owner(virtual)[0] else 0
            return _Destination(peer, arrivals[after], delay)

        after = [destination(virtual, 1, inputs) for virtual in range(count)]
        before = [destination(virtual, -1, gradients) for virtual in range(count)]
        self._outlets: dict[Kind, tuple[tuple[_Destination | None, ...], ...]] = {
            "F": placement.by_stage(after),
            "I": placement.by_stage(before),
        }

    def _ticks_of_all(self, rank: int) -> int:
        """Return the time of a microbatch in all chunks of a stage."""
        return sum(sum(times[rank]) for times in self._ticks.values())

    def _choose(self, stage: _Stage) -> None:
        """Choose the next action of a stage, and its start."""
        forward, forward_chunk = self._first_forward(stage)
        half, half_chunk = self._first_input_half(stage)
        # A weight half runs in gaps before the action that can start first.
        first = min(forward, half)
        if stage.due and first > stage.free:
            chunk = stage.due[0]
            ticks = self._ticks["W"][stage.rank][chunk]
            if first == _NEVER or stage.free + ticks * (1 - self.rule.patience) <= first:
                stage.start = stage.free
                stage.kind = "W"
                stage.chunk = chunk
                return
        stage.start = first
        # Of actions that start at once, a forward goes first after an input half that it alternates
        # with.
        if forward < half or (forward == half and self.rule.alternate and stage.last == "I"):
            stage.kind = "F"
            stage.chunk = forward_chunk
        else:
            stage.kind = "I"
            stage.chunk = half_chunk

    def _first_forward(self, stage: _Stage) -> tuple[int, int]:
        """Return the start and chunk of the first possible forward; the rule breaks ties."""
        first = _NEVER
        chosen = 0
        inputs = self._inputs[stage.rank]
        for chunk in self._chunk_order:
            number = stage.forwards[chunk]
            if number >= len(inputs[chunk]):
                continue
            if not is_within(stage.size + self._room[stage.rank][chunk], self.rule.limit):
                self.is_limited = True
                continue
            ready = inputs[chunk][number]
            if ready <= stage.free:
                return stage.free, chunk
            if ready < first:
                first = ready
                chosen = chunk
        return first, chosen

    def _first_input_half(self, stage: _Stage) -> tuple[int, int]:
        """Return the start and chunk of the first possible input half; the last chunk wins ties."""
        first = _NEVER
        chosen = 0
        gradients = self._gradients[stage.rank]
        for chunk in range(len(gradients) - 1, -1, -1):
            number = stage.backwards[chunk]
            if number == stage.forwards[chunk] or number >= len(gradients[chunk]):
                continue
            ready = gradients[chunk][number]
            if ready <= stage.free:
                return stage.free, chunk
            if ready < first:
                first = ready
                chosen = chunk
        return first, chosen

    def _run(self, stage: _Stage) -> int:
        """Add the chosen action to its row; return the stage that gets its result."""
        kind = stage.kind
        chunk = stage.chunk
        ticks = self._ticks[kind][stage.rank][chunk]
        kept = self._kept[stage.rank][chunk]
        stage.row.append((kind, chunk))
        stage.free = stage.start + ticks
        stage.work -= ticks
        if kind == "W":
            stage.size -= kept * self.rule.weight_half_share
            stage.due.popleft()
            return stage.rank
        stage.last = kind
        if kind == "F":
            stage.size += kept
            stage.forwards[chunk] += 1
        else:
            stage.size -= kept * (1 - self.rule.weight_half_share)
            stage.backwards[chunk] += 1
            stage.due.append(chunk)
        destination = self._outlets[kind][stage.rank][chunk]
        if destination is None:
            return stage.rank
        destination.arrivals.append(stage.free + destination.delay)
        return destination.rank


def _with_microbatches(row: Sequence[tuple[Kind, int]]) -> tuple[Action, ...]:
    """Return the actions of a row in which every chunk takes its microbatches in order."""
    started: Counter[tuple[Kind, int]] = Counter()
    actions = []
    for kind, chunk in row:
        actions.append(Action(kind, chunk, started[kind, chunk]))
        started[kind, chunk] += 1
    return tuple(actions)
