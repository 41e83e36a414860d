"""When each pipeline stage starts to sum the gradients of a chunk, so that stages do not slow each other."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.plan.schedule import Schedule
from lightning_megatron.plan.simulate import simulate


@dataclass(frozen=True)
class ReductionPoint:
    """Say after which action a stage starts to sum a chunk's gradients over the data ranks.

    Args:
        after_action: index in the stage's actions.
        chunk: the chunk whose gradients are complete and are summed.
        early: whether the action is the stage's own last backward of the chunk, so that gradients may be sent while
            that backward still runs, as they become ready.
    """

    after_action: int
    chunk: int
    early: bool


def reduction_points(schedule: Schedule) -> tuple[tuple[ReductionPoint, ...], ...]:
    """Plan when every stage starts to sum each chunk's gradients.

    Stages finish a chunk at different times. A stage that sums at once competes, for links and for compute, with the
    backwards of those behind it on the critical path. So all wait, in unit times of :func:`simulate`, until the last
    stage has finished its last backward of the chunk, and start after the first action that ends then or later; a stage
    that has nothing left to compute starts after its last action. The chunks follow in the same order on all stages.

    Args:
        schedule: the order of work, with backwards.

    Returns:
        by stage, one point for each chunk in the order in which they start; `after_action` never decreases.

    Raises:
        ParallelPlanError: for a schedule without backwards, which has no gradients.
    """
    if schedule.forward_only:
        raise ParallelPlanError(
            f"only backwards make gradients: schedule {schedule.name!r} is forward only, so there is nothing to sum. "
            f"Build it with forward_only of False."
        )
    rows = simulate(schedule).rows
    last_backward = [
        {span.action.chunk: index for index, span in enumerate(row) if span.action.kind in ("B", "W")} for row in rows
    ]
    done = {
        chunk: max(row[last[chunk]].stop for row, last in zip(rows, last_backward, strict=True))
        for chunk in range(schedule.num_chunks)
    }
    # The first chunk of a model is complete last: of two that are complete together, the higher one goes first.
    order = sorted(done, key=lambda chunk: (done[chunk], -chunk))
    points = []
    for row, last in zip(rows, last_backward, strict=True):
        mine: list[ReductionPoint] = []
        for chunk in order:
            ending = (index for index, span in enumerate(row) if span.stop >= done[chunk])
            after = next(ending, len(row) - 1)
            mine.append(ReductionPoint(after, chunk, early=after == last[chunk]))
        points.append(tuple(mine))
    return tuple(points)
