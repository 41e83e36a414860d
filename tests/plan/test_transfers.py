"""Transfers never deadlock, and every action has its input in time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lightning_megatron.plan import (
    Action,
    Compute,
    Program,
    Schedule,
    Transfer,
    TransferBatch,
    build_schedule,
    plan_transfers,
)
from lightning_megatron.plan.simulate import consumer_of


def all_schedules() -> Iterator[Schedule]:
    for forward_only in (False, True):
        for stages in range(1, 7):
            for microbatches in range(1, 13):
                for name in ("1f1b", "gpipe"):
                    yield build_schedule(name, stages, microbatches, forward_only=forward_only)
                for chunks in (2, 3):
                    for group in range(max(2, stages), microbatches + 1):
                        if stages > 1 and not 0 < microbatches % group < stages:
                            yield build_schedule(
                                "interleaved", stages, microbatches, chunks, group, forward_only
                            )


def is_matching_pair(
    send: Transfer, receive: Transfer, sender: int, receiver: int, schedule: Schedule
) -> bool:
    step = 1 if send.kind == "F" else -1
    produced = schedule.virtual_stage(sender, send.chunk)
    consumed = schedule.virtual_stage(receiver, receive.chunk)
    are_same_tensor = (send.kind, send.microbatch, send.peer, receive.peer) == (
        receive.kind,
        receive.microbatch,
        receiver,
        sender,
    )
    return are_same_tensor and consumed == produced + step


class Rank:
    """Stage that runs its instructions in order; an exchange blocks until its peers reach it."""

    def __init__(self, program: Program, rank: int) -> None:
        self.schedule, self.rank = program.schedule, rank
        self.instructions = program.instructions(rank)
        self.next = 0
        self.made: set[tuple[str, int, int]] = set()
        self.held: set[tuple[str, int, int]] = set()
        self.last_number = -1
        self.last_virtual = self.schedule.num_stages * self.schedule.num_chunks - 1

    @property
    def exchange(self) -> TransferBatch | None:
        current = self.instructions[self.next] if self.next < len(self.instructions) else None
        return current if isinstance(current, TransferBatch) else None

    def compute(self) -> bool:
        moved = False
        while self.next < len(self.instructions) and isinstance(
            self.instructions[self.next], Compute
        ):
            self.run(self.instructions[self.next].action)  # type: ignore[union-attr]
            self.next += 1
            moved = True
        return moved

    def run(self, action: Action) -> None:
        # An input half takes and makes the gradients that a full backward takes and makes.
        kind = "B" if action.kind == "I" else action.kind
        key = (kind, action.chunk, action.microbatch)
        virtual = self.schedule.virtual_stage(self.rank, action.chunk)
        needs_input = virtual > 0 if action.kind == "F" else virtual < self.last_virtual
        if needs_input and kind != "W":
            assert key in self.held, f"stage {self.rank} runs {key} without its input"
            self.held.remove(key)
        self.made.add(key)
        target = consumer_of(self.schedule, self.rank, action)
        if target is not None and target[0] == self.rank:
            self.held.add((kind, target[1].chunk, action.microbatch))

    def complete(self, exchange: TransferBatch) -> None:
        assert exchange.number > self.last_number
        self.last_number = exchange.number
        for send in exchange.sends:
            assert (send.kind, send.chunk, send.microbatch) in self.made
        self.held |= {
            (receive.kind, receive.chunk, receive.microbatch) for receive in exchange.receives
        }
        self.next += 1


def peers_of(exchange: TransferBatch) -> set[int]:
    return {transfer.peer for transfer in (*exchange.sends, *exchange.receives)}


def lists_match(ranks: list[Rank], rank: int, schedule: Schedule) -> bool:
    exchange = ranks[rank].exchange
    assert exchange is not None
    for peer in peers_of(exchange):
        peer_exchange = ranks[peer].exchange
        if peer_exchange is None or peer_exchange.number != exchange.number:
            return False
        sends = [send for send in exchange.sends if send.peer == peer]
        receives = [receive for receive in peer_exchange.receives if receive.peer == rank]
        assert len(sends) == len(receives)
        assert all(
            is_matching_pair(s, r, rank, peer, schedule)
            for s, r in zip(sends, receives, strict=True)
        )
    return True


def connected(ranks: list[Rank], start: int) -> set[int]:
    group, pending = set(), [start]
    while pending:
        rank = pending.pop()
        exchange = ranks[rank].exchange
        if rank not in group and exchange is not None:
            group.add(rank)
            pending += peers_of(exchange)
    return group


def execute(program: Program) -> list[Rank]:
    """Run all ranks with rendezvous semantics until done.

    An exchange completes only when every rank that is connected through it has arrived, the
    strictest reading of a group call.
    """
    schedule = program.schedule
    ranks = [Rank(program, rank) for rank in range(schedule.num_stages)]
    moved = True
    while moved:
        moved = sum(rank.compute() for rank in ranks) > 0
        for start in range(len(ranks)):
            if ranks[start].exchange is None:
                continue
            together = connected(ranks, start)
            if all(lists_match(ranks, rank, schedule) for rank in together):
                for rank in together:
                    exchange = ranks[rank].exchange
                    assert exchange is not None
                    ranks[rank].complete(exchange)
                moved = True
    return ranks


def test_no_schedule_deadlocks_and_every_action_has_its_input() -> None:
    count = 0
    for schedule in all_schedules():
        program = plan_transfers(schedule)
        for rank in execute(program):
            label = (
                schedule.name,
                schedule.num_stages,
                schedule.num_microbatches,
                schedule.num_chunks,
            )
            assert rank.next == len(rank.instructions), (
                f"{label}: stage {rank.rank} is stuck at {rank.next}"
            )
            assert not rank.held, f"{label}: stage {rank.rank} received what it never used"
            computed = [step.action for step in rank.instructions if isinstance(step, Compute)]
            assert computed == list(schedule.actions(rank.rank))
        count += 1
    assert count > 500


def test_the_executor_stops_at_a_deadlock() -> None:
    program = plan_transfers(build_schedule("1f1b", 2, 2))
    crossed = [[step for step in row if isinstance(step, TransferBatch)] for row in program.rows]
    crossed[1][0], crossed[1][1] = crossed[1][1], crossed[1][0]
    ranks = execute(Program(program.schedule, tuple(tuple(row) for row in crossed)))
    assert any(rank.next < len(rank.instructions) for rank in ranks)


@pytest.mark.parametrize("costs", [{"F": 1, "B": 1}, {"F": 3, "B": 4}, {"F": 5, "B": 1}])
def test_no_schedule_deadlocks_for_different_costs(costs: dict[str, int]) -> None:
    for schedule in (
        build_schedule("1f1b", 4, 7),
        build_schedule("interleaved", 3, 7, 2, 4),
        build_schedule("gpipe", 4, 5),
    ):
        program = plan_transfers(schedule, costs)
        assert all(rank.next == len(rank.instructions) for rank in execute(program))


def test_a_result_is_sent_before_the_next_action() -> None:
    for schedule in (build_schedule("1f1b", 4, 8), build_schedule("interleaved", 4, 8, 2)):
        program = plan_transfers(schedule)
        for rank in range(4):
            last_action = None
            for step in program.instructions(rank):
                if isinstance(step, Compute):
                    last_action = step.action
                else:
                    assert all(
                        (s.kind, s.chunk, s.microbatch)
                        == (last_action.kind, last_action.chunk, last_action.microbatch)
                        for s in step.sends
                    )


def test_no_transfer_crosses_the_ends_of_the_model() -> None:
    program = plan_transfers(build_schedule("interleaved", 3, 6, 2))
    first = [
        t
        for step in program.instructions(0)
        if isinstance(step, TransferBatch)
        for t in (*step.sends, *step.receives)
    ]
    last = [
        t
        for step in program.instructions(2)
        if isinstance(step, TransferBatch)
        for t in (*step.sends, *step.receives)
    ]
    assert not [t for t in first if t.peer == 2 and (t.kind, t.chunk) not in {("F", 1), ("B", 1)}]
    assert not [t for t in last if t.peer == 0 and (t.kind, t.chunk) not in {("F", 0), ("B", 0)}]


def test_a_single_stage_has_no_transfers() -> None:
    assert not [
        step
        for step in plan_transfers(build_schedule("1f1b", 1, 4)).instructions(0)
        if isinstance(step, TransferBatch)
    ]


def test_split_backwards_send_the_gradient_of_the_input_only() -> None:
    halves = (Action("F", 0, 0), Action("I", 0, 0), Action("W", 0, 0))
    program = plan_transfers(Schedule("split", 2, 1, 1, (halves, halves)).validate())
    kinds = [
        type(step).__name__ + (step.action.kind if isinstance(step, Compute) else "")
        for step in program.instructions(1)
    ]
    assert kinds == ["TransferBatch", "ComputeF", "ComputeI", "TransferBatch", "ComputeW"]
