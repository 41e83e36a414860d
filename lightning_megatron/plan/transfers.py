"""Transfers between pipeline stages, in an order that cannot deadlock."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Literal

from lightning_megatron.plan.actions import Action, PassPair
from lightning_megatron.plan.schedule import Schedule
from lightning_megatron.plan.simulate import Span, consumer_of, simulate


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
class TransferBatch:
    """Instruction to send and receive in one batch.

    For every peer, the sends of one side and the receives of the other are the same tensors in the
    same order.
    """

    sends: tuple[Transfer, ...]
    receives: tuple[Transfer, ...]


Instruction = Action | PassPair | TransferBatch
"""Action to run, two actions to switch between, or transfers."""


def plan_transfers(schedule: Schedule) -> tuple[tuple[Instruction, ...], ...]:
    """Insert the transfers between stages into the actions of a schedule without risk of deadlock.

    The schedule runs on a clock: a forward takes one tick, a backward two. All tensors that are
    produced at one tick form the batches of one time. Each stage runs a batch before its first
    action that starts at that tick or later. The instructions of all stages are thus parts of one
    global order, in which a tensor is produced before it is sent and received before it is used.
    Streams that run their operations strictly in order, such as NCCL's, then cannot block each
    other. A pair has its place where its forward begins, and has received the inputs of both then.
    A tensor whose consumer is on the same stage, as at the turn of a V, is not transferred.

    Returns:
        The instructions of every stage in order.

    Raises:
        ParallelPlanError: If the schedule's stages wait for each other in a cycle.
    """
    rows = simulate(schedule).rows

    def global_order(span: Span) -> tuple[int, str, int, int]:
        virtual = schedule.placement.virtual_stage(span.stage, span.action.chunk)
        return span.stop, _kind_of(span.action), virtual, span.action.microbatch

    # Sends and receives of each stage, by the tick at which their tensors exist.
    batches: list[dict[int, tuple[list[Transfer], list[Transfer]]]] = [
        defaultdict(lambda: ([], [])) for _ in rows
    ]
    for span in sorted((span for row in rows for span in row), key=global_order):
        target = consumer_of(schedule, span.stage, span.action)
        if target is None or target[0] == span.stage:
            continue
        consumer, action = target
        kind = _kind_of(action)
        sent = Transfer(kind, span.action.chunk, action.microbatch, consumer)
        batches[span.stage][span.stop][0].append(sent)
        received = Transfer(kind, action.chunk, action.microbatch, span.stage)
        batches[consumer][span.stop][1].append(received)
    instructions = []
    for stage, (row, of_stage) in enumerate(zip(rows, batches, strict=True)):
        pairs = [schedule.pair_at(stage, index) for index in range(len(row))]
        paired = {pair.backward for pair in pairs if pair is not None}
        # The 0 sorts a batch before the action (1) that starts at the same tick.
        events: list[tuple[int, int, Instruction]] = [
            (span.start, 1, pair or span.action)
            for span, pair in zip(row, pairs, strict=True)
            if span.action not in paired
        ]
        for time, (sends, receives) in of_stage.items():
            events.append((time, 0, TransferBatch(tuple(sends), tuple(receives))))
        events.sort(key=lambda event: event[:2])
        instructions.append(tuple(instruction for _, _, instruction in events))
    return tuple(instructions)


def _kind_of(action: Action) -> Literal["F", "B"]:
    return "F" if action.kind == "F" else "B"
