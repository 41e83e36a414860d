"""Rows of schedules that split backward passes: zb-h1, zb-v and dualpipe-v.

The result of the input half of a backward is sent to the previous stage, so it is on the critical
path. The weight half can run at any later time, and fills idle time.
"""

from __future__ import annotations

from lightning_megatron.plan.actions import Action, RowBuilder


def zero_bubble_row(rank: int, num_stages: int, num_microbatches: int) -> tuple[Action, ...]:
    """Order the actions of a stage with one chunk, for zb-h1.

    A stage begins with a forward for each stage after it, and defers a weight half for each stage
    before it. All stages thus keep ``num_stages`` microbatches, where a microbatch is kept until
    its weight half has run.

    Source: Qi et al. 2023 (https://arxiv.org/abs/2401.10241), section 2.
    """
    row = RowBuilder()
    warmup = min(num_stages - 1 - rank, num_microbatches)
    for _ in range(warmup):
        row.forward()
    for microbatch in range(num_microbatches):
        if warmup + microbatch < num_microbatches:
            row.forward()
        row.input_half()
        if microbatch >= rank:
            row.weight_half()
    while row.num_due:
        row.weight_half()
    return row.row


def zero_bubble_v_row(rank: int, num_stages: int, num_microbatches: int) -> tuple[Action, ...]:
    """Order the actions of a stage with two chunks in a V, for zb-v.

    A stage keeps at most ``2 x num_stages`` pairs of a chunk and a microbatch, as much as the first
    stage in 1f1b, whose chunks are twice as large.

    Source: Qi et al. 2023 (https://arxiv.org/abs/2401.10241), section 6.
    """
    # The start and the end are those of a full pipeline. With fewer than 2 x num_stages - 1
    # microbatches they contain some that do not exist, which are removed below.
    after = num_stages - rank
    row = RowBuilder()
    for _ in range(2 * after - 1):
        row.forward(0)
    for _ in range(rank):
        row.forward(1)
        row.forward(0)
    for _ in range(after):
        row.forward(1)
        row.split_backward(1)
    for number in range(num_microbatches - num_stages):
        if number < num_microbatches - num_stages - after + 1:
            row.forward(0)
        row.split_backward(0)
        row.forward(1)
        row.split_backward(1)
    for _ in range(rank):
        row.input_half(0)
        row.input_half(1)
    for _ in range(after):
        row.input_half(0)
        row.weight_half(0)
    for chunk in (1, 0):
        for _ in range(rank):
            row.weight_half(chunk)
    return tuple(action for action in row.row if action.microbatch < num_microbatches)


def dual_pipe_v_row(rank: int, num_stages: int, num_microbatches: int) -> tuple[Action, ...]:
    """Order the actions of a stage with two chunks in a V, for dualpipe-v.

    Most backwards are whole: each follows a forward of the other chunk, so that the communication
    of the one can overlap with the computation of the other. Only backwards at the start and at the
    end are split. A stage keeps at most ``2 x num_stages + 1`` pairs of a chunk and a microbatch.

    Args:
        num_microbatches: Microbatches per step, at least ``2 x num_stages``.

    Source: DeepSeek-V3 (https://arxiv.org/abs/2412.19437), section 3.2, for the order in two
        directions; https://github.com/deepseek-ai/DualPipe for its half, the V.
    """
    after = num_stages - 1 - rank
    row = RowBuilder()
    for _ in range(2 * after):
        row.forward(0)
    for _ in range(rank + 1):
        row.forward(0)
        row.forward(1)
    for _ in range(after):
        row.split_backward(1)
        row.forward(1)
    for _ in range(num_microbatches - 2 * num_stages + rank + 1):
        row.forward(0)
        row.backward(1)
        row.forward(1)
        row.backward(0)
    for _ in range(after):
        row.backward(1)
        row.forward(1)
        row.backward(0)
    # The last backwards of chunks 1 and 0 in turn; the second half of them is split.
    for number in range(2 * (rank + 1)):
        chunk = (number + 1) % 2
        if number <= rank:
            row.backward(chunk)
        else:
            row.input_half(chunk)
    for _ in range(after):
        row.weight_half()
        row.input_half(0)
    while row.num_due:
        row.weight_half()
    return row.row
