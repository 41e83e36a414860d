"""What the stages of a pipeline send each other, when, and in an order that cannot deadlock."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from lightning_megatron.plan.legal_values import require_index
from lightning_megatron.plan.schedule import Action, Schedule
from lightning_megatron.plan.simulate import UNIT_COSTS, Span, consumer_of, simulate


@dataclass(frozen=True, order=True)
class Transfer:
    """Name one tensor that goes from one stage to another.

    Args:
        kind: "F" for a hidden state on its way forward, "B" for its gradient on the way back.
        chunk: on the sending side the chunk that made it, on the receiving side the chunk that takes it.
        microbatch: the microbatch it belongs to.
        peer: the other stage, as a position on the pp axis.
    """

    kind: Literal["F", "B"]
    chunk: int
    microbatch: int
    peer: int


@dataclass(frozen=True)
class Compute:
    """Run one action of the schedule."""

    action: Action


@dataclass(frozen=True)
class Exchange:
    """Send and receive at once; pairs only with the exchange of equal number on each peer.

    For every peer, this side's sends and that side's receives are the same tensors in the same order.

    Args:
        number: place in the order that all stages follow.
        sends: what goes out.
        receives: what comes in.
    """

    number: int
    sends: tuple[Transfer, ...]
    receives: tuple[Transfer, ...]


Instruction = Compute | Exchange


@dataclass(frozen=True)
class Program:
    """Hold what every stage does, transfers included.

    Args:
        schedule: the schedule that it carries out.
        rows: rows[stage], its instructions, in order.
    """

    schedule: Schedule
    rows: tuple[tuple[Instruction, ...], ...]

    def instructions(self, rank: int) -> tuple[Instruction, ...]:
        """Return what a stage does, in order."""
        require_index("rank", rank, "pp", self.schedule.num_stages)
        return self.rows[rank]


@dataclass(frozen=True)
class _Delivery:
    """One transfer seen from both sides, with the clock's time at which the tensor exists."""

    time: int
    sort_key: tuple[str, int, int]
    producer: int
    consumer: int
    send: Transfer
    receive: Transfer


def plan_transfers(schedule: Schedule, costs: Mapping[str, int] = UNIT_COSTS) -> Program:
    """Place the transfers between stages among the actions of a schedule so that no order of arrival can deadlock.

    The schedule runs on a clock (by default a forward takes one tick, a backward two). All tensors that come into being
    at one tick form the exchanges of one number, and each stage carries an exchange out before the first action that
    starts at that tick or later. All stages' instructions are thereby parts of one global order, in which a tensor is
    made before it is sent and received before it is used. Streams that run their operations strictly in order, as
    NCCL's do, then cannot block each other.

    Args:
        schedule: the order of work.
        costs: ticks per kind of action; the plan is deadlock-free for any, and waits least for true ones.

    Raises:
        ParallelPlanError: if the schedule's stages wait for each other for ever.
    """
    timeline = simulate(schedule, costs)
    deliveries = [
        delivery for row in timeline.rows for span in row if (delivery := _delivery_of(schedule, span)) is not None
    ]
    deliveries.sort(key=lambda delivery: (delivery.time, delivery.sort_key))
    numbers = {time: number for number, time in enumerate(sorted({delivery.time for delivery in deliveries}))}
    sends: dict[tuple[int, int], list[Transfer]] = defaultdict(list)
    receives: dict[tuple[int, int], list[Transfer]] = defaultdict(list)
    for delivery in deliveries:
        sends[delivery.producer, delivery.time].append(delivery.send)
        receives[delivery.consumer, delivery.time].append(delivery.receive)
    rows = []
    for stage, row in enumerate(timeline.rows):
        times = {time for owner, time in (*sends, *receives) if owner == stage}
        # The 0 places an exchange before the action that starts at the same tick.
        events: list[tuple[int, int, Instruction]] = [(span.start, 1, Compute(span.action)) for span in row]
        for time in times:
            exchange = Exchange(numbers[time], tuple(sends[stage, time]), tuple(receives[stage, time]))
            events.append((time, 0, exchange))
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
