"""Microbatches that a stage keeps at once under a schedule: counts, slots and peak memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.plan.actions import Action, Kind
from lightning_megatron.plan.schedule import Schedule

WEIGHT_HALF_SHARE = 32 / 34
"""What a weight half needs, relative to what a backward needs, for a Transformer block.

Of 34 bytes per token and hidden feature (16 bits, dropout, attention that keeps no scores), the
input half frees what only it needs. The weight half needs the inputs of four linear layers (14
bytes) and the gradients of their outputs (18 bytes), which the input half has made.

Source: Qi et al. 2023 (https://arxiv.org/abs/2401.10241), table 1.
"""

LIVE_CHANGE: Mapping[Kind, int] = MappingProxyType({"F": 1, "B": -1, "I": 0, "W": -1})
"""Change in the number of microbatches that a chunk keeps, by the kind of an action."""


@dataclass(frozen=True)
class LiveMicrobatches:
    """Largest numbers of microbatches that a stage keeps at once.

    Args:
        slots: For each chunk, microbatches between their forward and the end of their backward,
            weight half included. That many sets of buffers serve the chunk; `GraphSlots` assigns
            one to each microbatch.
        waiting: For each chunk, how many of them wait only for their weight half.
        total: Microbatches over all chunks at one time; at most the sum of ``slots``.
    """

    slots: tuple[int, ...]
    waiting: tuple[int, ...]
    total: int


def live_microbatches(schedule: Schedule, rank: int) -> LiveMicrobatches:
    """Count the microbatches that a stage keeps at the peak of each chunk, and of all together."""
    row = () if schedule.forward_only else schedule.actions(rank)
    return live_in_row(row, schedule.num_chunks)


def live_in_row(row: Iterable[Action], num_chunks: int) -> LiveMicrobatches:
    """Count the microbatches that a stage keeps, as :func:`live_microbatches` does."""
    live = [0] * num_chunks
    due = [0] * num_chunks
    slots = [0] * num_chunks
    waiting = [0] * num_chunks
    total = 0
    for action in row:
        chunk = action.chunk
        live[chunk] += LIVE_CHANGE[action.kind]
        due[chunk] += {"F": 0, "B": 0, "I": 1, "W": -1}[action.kind]
        slots[chunk] = max(slots[chunk], live[chunk])
        waiting[chunk] = max(waiting[chunk], due[chunk])
        total = max(total, sum(live))
    return LiveMicrobatches(tuple(slots), tuple(waiting), total)


def peak_activations(
    schedule: Schedule,
    rank: int,
    kept: Sequence[float],
    weight_half_share: float = WEIGHT_HALF_SHARE,
) -> float:
    """Return the largest size of the activations that a stage keeps at once.

    Returns:
        The peak, in the unit of ``kept``.
    """
    size = 0.0
    peak = 0.0
    for action in () if schedule.forward_only else schedule.actions(rank):
        size_of_unit = kept[action.chunk]
        changes = {
            "F": size_of_unit,
            "B": -size_of_unit,
            "I": (weight_half_share - 1.0) * size_of_unit,
            "W": -weight_half_share * size_of_unit,
        }
        size += changes[action.kind]
        peak = max(peak, size)
    return peak


def stage_peaks(
    schedule: Schedule,
    kept: Sequence[Sequence[float]],
    weight_half_share: float = WEIGHT_HALF_SHARE,
) -> tuple[float, ...]:
    """Return the largest size of the activations that each stage keeps at once.

    Args:
        kept: Activations that a forward keeps for its backward, as ``kept[stage][chunk]``.
    """
    return tuple(
        peak_activations(schedule, stage, chunks, weight_half_share)
        for stage, chunks in enumerate(kept)
    )


def is_within(size: float, limit: float) -> bool:
    """Return whether a size is at most a limit, up to rounding in sums of fractions."""
    return size <= limit * (1 + 1e-9)


def check_peak(
    schedule: Schedule,
    limit: float,
    kept: Sequence[Sequence[float]],
    weight_half_share: float = WEIGHT_HALF_SHARE,
) -> None:
    """Check that the activations of every stage fit.

    Args:
        limit: Memory of a stage for activations (the unit of ``kept``).
        kept: Activations that a forward keeps for its backward, as ``kept[stage][chunk]``.

    Raises:
        ParallelPlanError: If a stage needs more; the message names the stage that needs most.
    """
    peaks = stage_peaks(schedule, kept, weight_half_share)
    worst = max(range(len(peaks)), key=peaks.__getitem__)
    if not is_within(peaks[worst], limit):
        raise ParallelPlanError(
            f"activations must fit into memory: schedule {schedule.name!r} keeps {peaks[worst]:g} "
            f"on stage {worst}, the limit is {limit:g}. Use a limit of {peaks[worst]:g} or more, "
            "or a schedule with fewer microbatches in flight."
        )
