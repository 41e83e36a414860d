"""Rows of schedules whose backward passes are whole, gpipe, 1f1b and interleaved, or omitted."""

from __future__ import annotations

from lightning_megatron.plan.actions import Action, RowBuilder


def whole_backward_row(
    warmup: int, num_microbatches: int, num_chunks: int, group: int
) -> tuple[Action, ...]:
    """Order the actions of a stage: some forwards, then forward and backward in turn.

    Args:
        warmup: Forwards before the first pair of a forward and a backward.
        num_microbatches: Microbatches per step.
        num_chunks: Chunks per stage, placed in a loop.
        group: Number of microbatches that pass through a chunk before the next chunk starts.
    """
    forwards = _forwards(num_microbatches, num_chunks, group)
    backwards = [Action("B", num_chunks - 1 - chunk, microbatch) for chunk, microbatch in forwards]
    row = [Action("F", *unit) for unit in forwards[:warmup]]
    for unit, backward in zip(forwards[warmup:], backwards, strict=False):
        row += [Action("F", *unit), backward]
    return tuple(row + backwards[max(len(forwards) - warmup, 0) :])


def forward_row(num_microbatches: int, num_chunks: int, group: int) -> tuple[Action, ...]:
    """Order the forwards of a stage in groups, each of which passes all chunks before the next."""
    return tuple(Action("F", *unit) for unit in _forwards(num_microbatches, num_chunks, group))


def forward_v_row(rank: int, num_stages: int, num_microbatches: int) -> tuple[Action, ...]:
    """Order the forwards of a stage with two chunks in a V.

    Chunk 1 takes every second turn from the one in which the first microbatch comes back.
    """
    row = RowBuilder()
    warmup = min(2 * (num_stages - 1 - rank) + 1, num_microbatches)
    for _ in range(warmup):
        row.forward(0)
    for number in range(num_microbatches):
        row.forward(1)
        if warmup + number < num_microbatches:
            row.forward(0)
    return row.row


def _forwards(num_microbatches: int, num_chunks: int, group: int) -> list[tuple[int, int]]:
    # Pairs (chunk, microbatch): a group of microbatches passes all chunks before the next group
    # starts.
    return [
        (chunk, microbatch)
        for first in range(0, num_microbatches, group)
        for chunk in range(num_chunks)
        for microbatch in range(first, min(first + group, num_microbatches))
    ]
