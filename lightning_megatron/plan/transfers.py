"""Transfers between pipeline stages, in an order that cannot deadlock."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from lightning_megatron.plan.actions import Action
from lightning_megatron.plan.schedule import Schedule
from lightning_megatron.plan.settings import require_index
from lightning_megatron.plan.simulate import UNIT_COSTS, Span, consumer_of, simulate
from lightning_megatron.plan.stage_costs import StageCosts


@dataclass(frozen=True, order=True)
class Transfer:
    """Tensor that one stage sends to another.

    Args:
        kind: "F" for hidden states in forward, "B" for their gradient in backward.
        chunk: On the sending side the chunk that produced the tensor, on the receiving side the
            chunk that consumes it.
        peer: Position of the other stage on the pp axis.
    """

    kind: Literal["F", "B"]
    chunk: int
    microbatch: int
    peer: int


@dataclass(frozen=True)
class Compute:
    """Instruction to run one action of the schedule."""

    action: Action


@dataclass(frozen=True)
class TransferBatch:
    """Instruction to send and receive in one batch, matched by its number on each peer.

    For every peer, the sends of one side and the receives of the other are the same tensors in the
    same order.

    Args:
        number: Index in the global order that all stages follow.
    """

    number: int
    sends: tuple[Transfer, ...]
    receives: tuple[Transfer, ...]


Instruction = Compute | TransferBatch


@dataclass(frozen=True)
class Program:
    """Instructions of every stage, transfers included."""

    schedule: Schedule
    rows: tuple[tuple[Instruction, ...], ...]

    def instructions(self, rank: int) -> tuple[Instruction, ...]:
        """Return the instructions of a stage in order."""
        require_index("rank", rank, "pp", self.schedule.num_stages)
        return self.rows[rank]


@dataclass(frozen=True)
class _Delivery:
    """Transfer as seen by both stages, with the tick at which the tensor exists."""

    time: int
    sort_key: tuple[str, int, int]
    producer: int
    consumer: int
    send: Transfer
    receive: Transfer


def plan_transfers(
    schedule: Schedule, costs: Mapping[str, int] | StageCosts = UNIT_COSTS
) -> Program:
    """Insert the transfers between stages into the actions of a schedule without risk of deadlock.

    The schedule runs on a clock; by default a forward takes one tick, a backward two. All tensors
    that are produced at one tick form the batches of one number. Each stage runs a batch
    before its first action that starts at that tick or later. The instructions of all stages are
    thus parts of one global order, in which a tensor is produced before it is sent and received
    before it is used. Streams that run their operations strictly in order, such as NCCL's, then
    cannot block each other. A tensor whose consumer is on the same stage, as at the turn of a V, is
    not transferred.

    Args:
        costs: Ticks for each kind of action, or for every virtual stage. Any costs give a
            plan without deadlocks; true costs give the shortest waits.

    Raises:
        ParallelPlanError: If the schedule's stages wait for each other in a cycle.
    """
    timeline = simulate(schedule, costs)
    deliveries = [
        delivery
        for row in timeline.rows
        for span in row
        if (delivery := _delivery_of(schedule, span)) is not None
    ]
    deliveries.sort(key=lambda delivery: (delivery.time, delivery.sort_key))
    # The deliveries are in the order of their times.
    times = dict.fromkeys(delivery.time for delivery in deliveries)
    numbers = {time: number for number, time in enumerate(times)}
    sends: dict[tuple[int, int], list[Transfer]] = defaultdict(list)
    receives: dict[tuple[int, int], list[Transfer]] = defaultdict(list)
    for delivery in deliveries:
        sends[delivery.producer, delivery.time].append(delivery.send)
        receives[delivery.consumer, delivery.time].append(delivery.receive)
    times_of: dict[int, set[int]] = defaultdict(set)
    for stage, time in (*sends, *receives):
        times_of[stage].add(time)
    rows = []
    for stage, row in enumerate(timeline.rows):
        # The 0 sorts a batch before the action (1) that starts at the same tick.
        events: list[tuple[int, int, Instruction]] = [
            (span.start, 1, Compute(span.action)) for span in row
        ]
        for time in times_of[stage]:
            batch = TransferBatch(
                numbers[time], tuple(sends[stage, time]), tuple(receives[stage, time])
            )
            events.append((time, 0, batch))
        events.sort(key=lambda event: event[:2])
        rows.append(tuple(instruction for _, _, instruction in events))
    return Program(schedule, tuple(rows))


def _delivery_of(schedule: Schedule, span: Span) -> _Delivery | None:
    target = consumer_of(schedule, span.stage, span.action)
    if target is None or target[0] == span.stage:
        return None
    consumer, action = target
    kind: Literal["F", "B"] = "F" if action.kind == "F" else "B"
    microbatch = action.microbatch
    return _Delivery(
        time=span.stop,
        sort_key=(kind, schedule.virtual_stage(span.stage, span.action.chunk), microbatch),
        producer=span.stage,
        consumer=consumer,
        send=Transfer(kind, span.action.chunk, microbatch, consumer),
        receive=Transfer(kind, action.chunk, microbatch, span.stage),
    )
