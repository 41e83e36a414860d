"""Times and sizes of the stages of a pipeline, equal or read from a file, and simulations."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import yaml

from lightning_megatron.errors import CorruptDataError, ParallelPlanError
from lightning_megatron.plan.live_microbatches import (
    WEIGHT_HALF_SHARE,
    live_microbatches,
    stage_peaks,
)
from lightning_megatron.plan.schedule import Schedule
from lightning_megatron.plan.settings import MOST, Count, Positive, Range, coerce_fields, coerced
from lightning_megatron.plan.simulate import StageCosts, Timeline, merged, simulate
from lightning_megatron.strict_json import read_regular_file

MAX_COSTS_BYTES = 1 << 17
"""Largest accepted file: times of thousands of virtual stages."""

_REMEDY = (
    "Use lists of whole numbers, forward, input_half and weight_half, with one for each virtual "
    "stage."
)


@dataclass(frozen=True)
class PipelineCosts:
    """Times and sizes of virtual stages, in the order in which a microbatch passes them.

    Args:
        times: Times of the computations and transfers.
        kept: Size of the activations that a forward pass keeps for its backward pass, for each
            virtual stage (any unit).
        weight_half_share: Fraction of these activations that the weight half still needs after the
            input half.
    """

    times: StageCosts
    kept: tuple[float, ...]
    weight_half_share: float = WEIGHT_HALF_SHARE

    def merged(self, num_virtual_stages: int) -> PipelineCosts:
        """Return the costs of fewer virtual stages, each of several consecutive ones.

        Raises:
            ParallelPlanError: If the virtual stages cannot be merged evenly.
        """
        kept = merged(self.kept, num_virtual_stages)
        return PipelineCosts(self.times.merged(num_virtual_stages), kept, self.weight_half_share)

    def kept_by_stage(self, schedule: Schedule) -> tuple[tuple[float, ...], ...]:
        """Return the size of kept activations as ``[stage][chunk]`` of a schedule."""
        return schedule.placement.by_stage(self.kept)


def equal_costs(num_stages: int, num_parts: int) -> PipelineCosts:
    """Return equal costs: each computation of a part takes one tick, and a whole stage keeps 1.

    Args:
        num_parts: Number of equal parts into which each stage is divided.
    """
    count = num_stages * num_parts
    ticks = (1,) * count
    return PipelineCosts(StageCosts(ticks, ticks, ticks), (1 / num_parts,) * count)


@dataclass(frozen=True)
class Costs:
    """Content of a file of costs; :func:`read_costs` describes it."""

    forward: tuple[Count, ...]
    input_half: tuple[Count, ...]
    weight_half: tuple[Count, ...]
    transfer: Annotated[int, Range(minimum=0, maximum=MOST)] = 0
    kept: tuple[Positive, ...] | None = None
    weight_half_share: Annotated[float, Range(minimum=0, maximum=1)] = WEIGHT_HALF_SHARE

    def __post_init__(self) -> None:
        coerce_fields(self)


def read_costs(path: Path, num_stages: int) -> PipelineCosts:
    """Read costs from a YAML or JSON file of at most ``MAX_COSTS_BYTES``.

    The file has the lists ``forward``, ``input_half`` and ``weight_half`` with the time of each
    virtual stage (whole numbers, in any unit), and may have ``transfer`` (the time of a transfer),
    ``kept`` (a list of the sizes of the activations that a forward pass keeps, in any unit; by
    default each stage keeps 1) and ``weight_half_share``.

    Raises:
        CorruptDataError: If the file cannot be read, is too large, or is not valid JSON or YAML.
        ParallelPlanError: If a name or a value is not legal; the message names both.
    """
    content = read_regular_file(path, _REMEDY, MAX_COSTS_BYTES)
    try:
        # JSON is YAML, too.
        value = yaml.safe_load(content)
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())[:300]
        raise CorruptDataError(f"{path} is not valid YAML: {reason}. {_REMEDY}") from error
    try:
        fields = coerced("costs", value, Costs)
        times = StageCosts(fields.forward, fields.input_half, fields.weight_half, fields.transfer)
        count = times.num_virtual_stages
        if count % num_stages:
            raise ParallelPlanError(
                f"costs must name the virtual stages of every stage, equally many: they name "
                f"{count}, pp is {num_stages}. Use {num_stages} times in each list, or a multiple "
                f"of {num_stages}."
            )
        kept = (num_stages / count,) * count if fields.kept is None else fields.kept
        if len(kept) != count:
            raise ParallelPlanError(
                f"kept must have a size for every virtual stage: it has {len(kept)}, forward has "
                f"{count}. Use {count} sizes."
            )
    except ParallelPlanError as error:
        raise ParallelPlanError(f"{path}: {error}") from error
    return PipelineCosts(times, kept, fields.weight_half_share)


@dataclass(frozen=True)
class ScheduleOutcome:
    """Simulation of a schedule, with the activations that its stages keep.

    Args:
        live: Maximum number of microbatches that each stage keeps, counted once for each chunk.
        peaks: Maximum size of the activations that each stage keeps (unit of the costs).
    """

    timeline: Timeline
    live: tuple[int, ...]
    peaks: tuple[float, ...]

    @classmethod
    def of(cls, schedule: Schedule, costs: PipelineCosts) -> ScheduleOutcome:
        """Simulate a schedule with costs of its virtual stages, or of equal parts of them."""
        costs = costs.merged(schedule.placement.num_virtual_stages)
        return cls(
            simulate(schedule, costs.times),
            tuple(live_microbatches(schedule, rank).total for rank in range(schedule.num_stages)),
            stage_peaks(schedule, costs.kept_by_stage(schedule), costs.weight_half_share),
        )

    @property
    def schedule(self) -> Schedule:
        """Return the schedule."""
        return self.timeline.schedule

    @property
    def chunks(self) -> str:
        """Return the number of chunks in words, with their placement, such as "2 chunks in a V"."""
        number = self.schedule.num_chunks
        if number == 1:
            return "1 chunk"
        return f"{number} chunks in a {'V' if self.schedule.shape == 'v' else 'loop'}"
