"""Points of a schedule at which stages start to reduce gradients without slowing each other."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.plan.schedule import Schedule
from lightning_megatron.plan.simulate import simulate


@dataclass(frozen=True)
class ReductionPoint:
    """Action after which a stage starts to reduce a chunk's gradients over the data ranks.

    Args:
        after_action: Index of the action among the stage's actions.
        chunk: Chunk whose gradients are complete and are reduced.
        early: Whether the action is the stage's own last backward of the chunk. Gradients may then
            be sent as they become ready, while that backward is still running.
    """

    after_action: int
    chunk: int
    early: bool


def reduction_points(schedule: Schedule) -> tuple[tuple[ReductionPoint, ...], ...]:
    """Choose when every stage starts to reduce each chunk's gradients.

    Stages finish a chunk at different times. If a stage reduced at once, it would compete for links
    and compute with backwards of other stages on the critical path. Therefore all stages wait, in
    unit times of :func:`simulate`, until the last stage has finished its last backward of the
    chunk. Each stage starts after its first action that ends then or later, or after its last
    action. The order of the chunks is the same on all stages.

    Args:
        schedule: Order of actions, with backwards.

    Returns:
        For each stage one point per chunk, in the order of their start; ``after_action`` never
        decreases.

    Raises:
        ParallelPlanError: For a schedule without backwards, which has no gradients.
    """
    if schedule.forward_only:
        raise ParallelPlanError(
            "a schedule must have backward passes, because they compute the gradients that are "
            f"summed: schedule {schedule.name!r} is forward only. Build it with forward_only=False."
        )
    rows = simulate(schedule).rows
    last_backward = [
        {
            span.action.chunk: index
            for index, span in enumerate(row)
            if span.action.kind in ("B", "W")
        }
        for row in rows
    ]
    done = {
        chunk: max(row[last[chunk]].stop for row, last in zip(rows, last_backward, strict=True))
        for chunk in range(schedule.num_chunks)
    }
    # Backward reaches the first chunk last, so of two chunks with equal times the higher one comes
    # first.
    order = sorted(done, key=lambda chunk: (done[chunk], -chunk))
    points = []
    for row, last in zip(rows, last_backward, strict=True):
        stage_points: list[ReductionPoint] = []
        for chunk in order:
            ending = (index for index, span in enumerate(row) if span.stop >= done[chunk])
            after = next(ending, len(row) - 1)
            stage_points.append(ReductionPoint(after, chunk, early=after == last[chunk]))
        points.append(tuple(stage_points))
    return tuple(points)
