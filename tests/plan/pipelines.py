"""Drawn schedules of pipelines, and two executors that stop at a deadlock."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter
from typing import Any

from hypothesis import strategies as st

from lightning_megatron.plan import (
    Action,
    Placement,
    Schedule,
    StageCosts,
    TransferBatch,
    build_schedule,
    custom_schedule,
    plan_transfers,
)
from lightning_megatron.plan.actions import PassPair
from lightning_megatron.plan.schedule import NAMED_SCHEDULES
from lightning_megatron.plan.simulate import consumer_of

CHUNKS = {name: named.chunks for name, named in NAMED_SCHEDULES.items() if named.chunks}
NUMBERS = st.integers(0, 2**32)
Node = tuple[int, Action]


def drawn_schedule(number: int, *names: str) -> Schedule:
    """Draw a schedule, of all names if none is given, over pp 1 to 16, chunks 1 to 4 and
    microbatches 1 to 64.
    """
    draw = random.Random(number)
    name = draw.choice(names or [*CHUNKS, "interleaved"])
    stages, chunks, group = draw.randint(1, 16), CHUNKS.get(name, 1), None
    least = 2 * stages if name == "dualpipe-v" else 1
    if name == "interleaved":
        stages, chunks = max(stages, 2), draw.randint(2, 4)
        least = stages
    microbatches = draw.randint(least, 64)
    if name == "interleaved":
        sizes = range(stages, microbatches + 1)
        group = draw.choice([size for size in sizes if not 0 < microbatches % size < stages])
    forward_only, may_pair = draw.random() < 0.25, draw.random() < 0.5
    has_pairs = name == "dualpipe-v" or (name, stages) == ("1f1b", 1)
    is_paired = may_pair and has_pairs and microbatches > 1 and not forward_only
    return build_schedule(name, stages, microbatches, chunks, group, forward_only, is_paired)


def drawn_costs(number: int, placement: Placement) -> StageCosts:
    """Draw times of stages and transfers."""
    draw = random.Random(number)
    count = placement.num_virtual_stages
    times = [tuple(draw.randint(1, 9) for _ in range(count)) for _ in range(3)]
    return StageCosts(*times, transfer=draw.randint(0, 3))


@dataclass
class DrawnRows:
    """Rows of a schedule, and the actions that each action needs."""

    placement: Placement
    microbatches: int
    rows: list[list[Action]]
    needs: dict[Node, set[Node]]

    def schedule(self) -> Schedule:
        """Return the schedule with these rows."""
        place = self.placement
        return custom_schedule(
            lambda rank, *_: self.rows[rank],
            place.num_stages,
            self.microbatches,
            place.num_chunks,
            shape=place.shape,
            name="mine",
        )


def drawn_rows(number: int) -> DrawnRows:
    """Draw rows from a random order of all actions in which each follows the actions it needs."""
    draw = random.Random(number)
    placement = Placement(draw.choice(["loop", "v"]), draw.randint(1, 6), draw.randint(1, 4))
    microbatches, share = draw.randint(1, 6), draw.choice([0.0, 0.5, 1.0])
    last = placement.num_virtual_stages - 1
    pairs = [(virtual, n) for virtual in range(last + 1) for n in range(microbatches)]
    split = {pair for pair in pairs if draw.random() < share}

    def node(kind: str, virtual: int, number: int) -> Node:
        rank, chunk = placement.owner(virtual)
        kind = "I" if kind == "B" and (virtual, number) in split else kind
        return rank, Action(kind, chunk, number)

    needs: dict[Node, set[Node]] = {}
    for virtual, n in pairs:
        forward, backward = node("F", virtual, n), node("B", virtual, n)
        needs[forward] = {node("F", virtual - 1, n)} if virtual else set()
        needs[backward] = {forward, *([node("B", virtual + 1, n)] if virtual < last else [])}
        if (virtual, n) in split:
            needs[node("W", virtual, n)] = {backward}
    rows: list[list[Action]] = [[] for _ in range(placement.num_stages)]
    sorter = TopologicalSorter(needs)
    sorter.prepare()
    ready: list[Node] = []
    while sorter.is_active():
        ready += sorter.get_ready()
        rank, action = ready.pop(draw.randrange(len(ready)))
        rows[rank].append(action)
        sorter.done((rank, action))
    return DrawnRows(placement, microbatches, rows, needs)


def order_of(schedule: Schedule, rank: int) -> list[int]:
    """Return the signed chunk of every action, as Megatron-Core's
    ``convert_schedule_table_to_order``: +c for a forward, -c for a backward, c from 1.
    """
    signs = {"F": 1, "B": -1, "I": -1}
    actions = (action for action in schedule.actions(rank) if action.kind in signs)
    return [signs[action.kind] * (action.chunk + 1) for action in actions]


def warmup_of(schedule: Schedule, rank: int) -> int:
    """Return the number of forwards before the first backward of a stage."""
    row = schedule.actions(rank)
    return next((n for n, action in enumerate(row) if action.kind in ("B", "I")), len(row))


class Rank:
    """Stage that runs its instructions in order; an exchange blocks until its peers reach it."""

    def __init__(self, schedule: Schedule, rank: int, row: Sequence[Any], singly: bool) -> None:
        self.schedule, self.rank, self.next = schedule, rank, 0
        self.instructions = list(steps_of(schedule, rank, row, singly))
        self.made: set[tuple[str, int, int]] = set()
        self.held: set[tuple[str, int, int]] = set()

    @property
    def exchange(self) -> TransferBatch | None:
        """The exchange that this stage has reached."""
        current = self.instructions[self.next] if self.next < len(self.instructions) else None
        return current if isinstance(current, TransferBatch) else None

    def compute(self) -> bool:
        """Run all actions up to the next exchange; return whether there were any."""
        start = self.next
        while self.next < len(self.instructions) and self.exchange is None:
            self.run(self.instructions[self.next])
            self.next += 1
        return self.next > start

    def run(self, action: Action | PassPair) -> None:
        """Run an action, which takes its input and may hand its result to this stage itself; a pair
        takes the inputs of both first.
        """
        if isinstance(action, PassPair):
            for one in reversed(action.actions):
                self.run(one)
            return
        # An input half takes and makes the gradients that a full backward takes and makes.
        kind = "B" if action.kind == "I" else action.kind
        key = (kind, action.chunk, action.microbatch)
        virtual = self.schedule.placement.virtual_stage(self.rank, action.chunk)
        end = 0 if kind == "F" else self.schedule.placement.num_virtual_stages - 1
        if virtual != end and kind != "W":
            assert key in self.held, f"stage {self.rank} runs {key} without its input"
            self.held.remove(key)
        self.made.add(key)
        target = consumer_of(self.schedule, self.rank, action)
        if target is not None and target[0] == self.rank:
            self.held.add((kind, target[1].chunk, action.microbatch))

    def complete(self, exchange: TransferBatch) -> None:
        """Send and receive what an exchange has."""
        assert {(s.kind, s.chunk, s.microbatch) for s in exchange.sends} <= self.made
        self.held |= {(r.kind, r.chunk, r.microbatch) for r in exchange.receives}
        self.next += 1


def steps_of(schedule: Schedule, rank: int, row: Sequence[Any], singly: bool) -> Iterator[Any]:
    """Yield the instructions of a stage, with transfers that block one by one if they are single.

    The transfers of a batch then follow one order on all stages.
    """
    virtual_stage = schedule.placement.virtual_stage
    for step in row:
        if not singly or not isinstance(step, TransferBatch):
            yield step
            continue
        singles = []
        for sends, transfers in ((True, step.sends), (False, step.receives)):
            for transfer in transfers:
                producer = virtual_stage(rank, transfer.chunk)
                if not sends:
                    producer -= 1 if transfer.kind == "F" else -1
                sides = ((transfer,), ()) if sends else ((), (transfer,))
                singles.append(((transfer.kind, producer, transfer.microbatch), sides))
        for _, sides in sorted(singles, key=lambda single: single[0]):
            yield TransferBatch(*sides)


def peers_of(exchange: TransferBatch) -> set[int]:
    """Return the stages with which an exchange is."""
    return {transfer.peer for transfer in (*exchange.sends, *exchange.receives)}


def sent_to(peer: int, rank: Rank) -> list[tuple[str, int, int]]:
    """Return what a stage sends to a peer in its exchange: the kind, who made it, microbatch."""
    made_by = rank.schedule.placement.virtual_stage
    sends = (send for send in rank.exchange.sends if send.peer == peer)
    return [(send.kind, made_by(rank.rank, send.chunk), send.microbatch) for send in sends]


def received_from(peer: int, rank: Rank) -> list[tuple[str, int, int]]:
    """Return what a stage receives from a peer in its exchange, in the same form."""
    used_by, back = rank.schedule.placement.virtual_stage, {"F": 1, "B": -1}
    receives = (one for one in rank.exchange.receives if one.peer == peer)
    return [
        (one.kind, used_by(rank.rank, one.chunk) - back[one.kind], one.microbatch)
        for one in receives
    ]


def is_matched(us: Rank, ranks: list[Rank]) -> bool:
    """Return whether all peers of a stage have reached its exchange with the same tensors."""
    peers = [ranks[peer] for peer in peers_of(us.exchange)]
    return all(
        them.exchange is not None
        and sent_to(them.rank, us) == received_from(us.rank, them)
        and received_from(them.rank, us) == sent_to(us.rank, them)
        for them in peers
    )


def execute(schedule: Schedule, rows: Sequence[Sequence[Any]], singly: bool = False) -> list[Rank]:
    """Run all stages until they are done or stuck. An exchange completes only when every stage that
    is connected through it has arrived, the strictest reading of a group call.
    """
    ranks = [Rank(schedule, rank, row, singly) for rank, row in enumerate(rows)]
    moved = True
    while moved:
        moved = sum(rank.compute() for rank in ranks) > 0
        for start in range(len(ranks)):
            together, pending = set(), [start]
            while pending:
                rank = pending.pop()
                if rank not in together and ranks[rank].exchange is not None:
                    together.add(rank)
                    pending += peers_of(ranks[rank].exchange)
            if together and all(is_matched(ranks[rank], ranks) for rank in together):
                for rank in together:
                    ranks[rank].complete(ranks[rank].exchange)
                moved = True
    return ranks


def check_runs(schedule: Schedule) -> None:
    """Check that all actions run in their order, with exchanges or with transfers that
    block one by one.
    """
    rows = plan_transfers(schedule)
    for rank in (*execute(schedule, rows), *execute(schedule, rows, singly=True)):
        assert rank.next == len(rank.instructions), f"stage {rank.rank} is stuck at {rank.next}"
        assert not rank.held, f"stage {rank.rank} received what it never used"
        steps = [step for step in rank.instructions if not isinstance(step, TransferBatch)]
        computed = [action for step in steps for action in step.actions]
        assert computed == list(schedule.actions(rank.rank))
