"""Schedules with split backwards are legal at all sizes, with the papers' bubbles and memory."""

from __future__ import annotations

import random
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.plan import (
    Action,
    Compute,
    LayerCosts,
    Placement,
    Program,
    Schedule,
    StageCosts,
    TransferBatch,
    build_schedule,
    lightest_partition,
    live_microbatches,
    one_by_one,
    plan_transfers,
    simulate,
)
from lightning_megatron.plan.live_microbatches import check_peak, peak_activations
from lightning_megatron.plan.simulate import consumer_of
from tests.plan.test_transfers import execute

SPLIT = {"zb-h1": 1, "zb-h2": 1, "zb-v": 2, "dualpipe-v": 2}
MANY = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None
)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Draw any named schedule over pp 1 to 16, chunks 1 to 4 and microbatches 1 to 64."""
    name = draw(st.sampled_from([*SPLIT, "1f1b", "gpipe", "interleaved"]))
    stages = draw(st.integers(1, 16))
    chunks = SPLIT.get(name, 1)
    least = 2 * stages if name == "dualpipe-v" else 1
    group = None
    if name == "interleaved":
        stages = max(stages, 2)
        chunks = draw(st.integers(2, 4))
        least = stages
    microbatches = draw(st.integers(least, 64))
    if name == "interleaved":
        sizes = range(stages, microbatches + 1)
        legal = [size for size in sizes if not 0 < microbatches % size < stages]
        group = draw(st.sampled_from(legal))
    forward_only = draw(st.sampled_from([False, False, False, True]))
    return build_schedule(name, stages, microbatches, chunks, group, forward_only)


def run_one_by_one(program: Program) -> bool:
    """Run all stages with transfers that block one by one; return whether all come to the end."""
    schedule = program.schedule
    rows: list[list[object]] = []
    for rank in range(schedule.num_stages):
        row: list[object] = []
        for step in program.instructions(rank):
            single = isinstance(step, TransferBatch)
            row += one_by_one(schedule, rank, step) if single else [step]  # type: ignore[arg-type]
        rows.append(row)
    positions = [0] * len(rows)
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while positions[rank] < len(row):
                step = row[positions[rank]]
                if not isinstance(step, Compute):
                    peer = step.transfer.peer  # type: ignore[attr-defined]
                    peer_step = (
                        rows[peer][positions[peer]] if positions[peer] < len(rows[peer]) else None
                    )
                    if not meet(step, peer_step, rank):
                        break
                    positions[peer] += 1
                positions[rank] += 1
                moved = True
    return all(number == len(row) for number, row in zip(positions, rows, strict=True))


def meet(step: object, peer_step: object, rank: int) -> bool:
    if peer_step is None or isinstance(peer_step, Compute):
        return False
    transfer, peer_transfer = step.transfer, peer_step.transfer  # type: ignore[attr-defined]
    return (
        step.sends != peer_step.sends  # type: ignore[attr-defined]
        and peer_transfer.peer == rank
        and (transfer.kind, transfer.microbatch) == (peer_transfer.kind, peer_transfer.microbatch)
    )


@seed(17)
@MANY
@given(schedules())
def test_every_schedule_is_complete_and_never_deadlocks(schedule: Schedule) -> None:
    schedule.validate()
    program = plan_transfers(schedule)
    for rank in execute(program):
        assert rank.next == len(rank.instructions), f"stage {rank.rank} is stuck"
        assert not rank.held, f"stage {rank.rank} received what it never used"
        computed = [step.action for step in rank.instructions if isinstance(step, Compute)]
        assert computed == list(schedule.actions(rank.rank))
    assert run_one_by_one(program)


@seed(17)
@MANY
@given(schedules(), st.integers(0, 2**32))
def test_every_schedule_runs_with_stages_and_transfers_of_any_speed(
    schedule: Schedule, number: int
) -> None:
    draws = random.Random(number)
    count = schedule.placement.num_virtual_stages
    times = [tuple(draws.randint(1, 9) for _ in range(count)) for _ in range(3)]
    costs = StageCosts(*times, transfer=draws.randint(0, 3))
    stops = {
        (stage, span.action): span
        for stage, row in enumerate(simulate(schedule, costs).rows)
        for span in row
    }
    for (stage, action), span in stops.items():
        target = consumer_of(schedule, stage, action)
        if target is not None:
            delay = costs.transfer if target[0] != stage else 0
            assert stops[target].start >= span.stop + delay
    assert run_one_by_one(plan_transfers(schedule, costs))


@seed(17)
@MANY
@given(schedules())
def test_each_chunk_takes_microbatches_in_order_within_its_slots(
    schedule: Schedule,
) -> None:
    for rank in range(schedule.num_stages):
        for chunk in range(schedule.num_chunks):
            for kinds in ("F", "BI", "BW"):
                taken = [
                    action.microbatch
                    for action in schedule.actions(rank)
                    if action.chunk == chunk and action.kind in kinds
                ]
                assert taken == sorted(taken)
        live = live_microbatches(schedule, rank)
        assert max(live.slots) <= live.total <= sum(live.slots)
        assert all(due <= slots for due, slots in zip(live.waiting, live.slots, strict=True))


@seed(17)
@MANY
@given(schedules())
def test_warmup_counts_the_forwards_before_the_first_backward(schedule: Schedule) -> None:
    for rank in range(schedule.num_stages):
        order = schedule.order(rank)
        warmup = schedule.warmup(rank)
        assert all(chunk > 0 for chunk in order[:warmup])
        assert all(chunk < 0 for chunk in order[warmup : warmup + 1])


@pytest.mark.parametrize("shape", ["loop", "v"])
@pytest.mark.parametrize("stages", [1, 2, 5])
@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
def test_a_placement_gives_every_virtual_stage_one_owner(
    shape: str, stages: int, chunks: int
) -> None:
    placement = Placement(shape, stages, chunks)  # type: ignore[arg-type]
    owners = [placement.owner(number) for number in range(placement.num_virtual_stages)]
    assert len(set(owners)) == stages * chunks
    assert [placement.virtual_stage(*owner) for owner in owners] == list(range(len(owners)))
    for (before, _), (after, _) in pairwise(owners):
        assert abs(before - after) <= 1 if shape == "v" else (after - before) % stages in (0, 1)


def test_chunks_of_a_v_go_to_the_last_stage_and_back() -> None:
    placement = build_schedule("zb-v", 3, 5, 2).placement
    assert [placement.owner(number) for number in range(6)] == [
        (0, 0),
        (1, 0),
        (2, 0),
        (2, 1),
        (1, 1),
        (0, 1),
    ]
    assert [build_schedule("interleaved", 3, 3, 2).placement.owner(n)[0] for n in (3, 4, 5)] == [
        0,
        1,
        2,
    ]
    with pytest.raises(
        ParallelPlanError, match=r"virtual stage must be a position on its axis: it is 6"
    ):
        placement.owner(6)
    with pytest.raises(ParallelPlanError, match=r"it is 'w'\. Use one of the two"):
        Placement("w", 2, 2)  # type: ignore[arg-type]


def test_the_turn_of_a_v_needs_no_transfer() -> None:
    program = plan_transfers(build_schedule("zb-v", 2, 4, 2))
    for rank, peer in ((0, 1), (1, 0)):
        transfers = [
            transfer
            for step in program.instructions(rank)
            if isinstance(step, TransferBatch)
            for transfer in (*step.sends, *step.receives)
        ]
        assert {transfer.peer for transfer in transfers} == {peer}
        # Two chunks, forward and backward, and four microbatches have one transfer each.
        assert len(transfers) == 2 * 2 * 4


def test_layers_of_a_v_follow_its_placement() -> None:
    placement = Placement("v", 2, 2)
    assert lightest_partition(LayerCosts.equal(8), placement).by_stage(placement) == (
        (range(0, 2), range(6, 8)),
        (range(2, 4), range(4, 6)),
    )
    # The first stage has the embedding and the loss, and fewer layers for both.
    costs = LayerCosts((1.0,) * 18, embedding=1.0, head=3.0)
    assert lightest_partition(costs, placement).counts == (4, 5, 6, 3)


TIMES = [(1, 1, 1), (10, 11, 9), (10, 12, 8), (10, 13, 7), (12, 14, 10)]


@pytest.mark.parametrize(("forward", "half", "weight"), TIMES)
@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8, 16])
def test_zero_bubble_has_the_bubbles_and_the_memory_of_its_paper(
    stages: int, forward: int, half: int, weight: int
) -> None:
    costs = {"F": forward, "I": half, "W": weight, "B": half + weight}
    for name, lead in (("zb-h1", 1), ("zb-h2", 2)):
        for microbatches in (2 * stages - 1 + (lead - 1), 4 * stages):
            schedule = build_schedule(name, stages, microbatches)
            assert max(simulate(schedule, costs).waits()) == (stages - 1) * (
                forward + half - lead * weight
            )
            peaks = [live_microbatches(schedule, rank).total for rank in range(stages)]
            assert peaks == [lead * (stages - 1) + 1] * stages
            assert [schedule.warmup(rank) for rank in range(stages)] == [
                lead * (stages - 1 - rank) + 1 for rank in range(stages)
            ]
    plain = build_schedule("1f1b", stages, 4 * stages)
    assert max(simulate(plain, costs).waits()) == (stages - 1) * (forward + half + weight)


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8, 16])
def test_zb_v_has_no_bubble_at_equal_times_and_the_memory_of_1f1b(stages: int) -> None:
    for microbatches in (2 * stages, 4 * stages + 1):
        schedule = build_schedule("zb-v", stages, microbatches, 2)
        costs = {"F": 1, "I": 1, "W": 1}
        assert simulate(schedule, costs).waits() == (0,) * stages
        peaks = [live_microbatches(schedule, rank).total for rank in range(stages)]
        assert peaks == [2 * stages] * stages
        assert schedule.warmup(0) == 2 * stages


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize(("forward", "half", "weight"), TIMES)
def test_dualpipe_v_has_at_most_the_bubble_and_the_memory_that_its_source_states(
    stages: int, forward: int, half: int, weight: int
) -> None:
    costs = {"F": forward, "I": half, "W": weight, "B": half + weight}
    for microbatches in (2 * stages, 4 * stages + 1):
        schedule = build_schedule("dualpipe-v", stages, microbatches, 2)
        # Actions run one at a time, so a forward and a backward together take the sum of both.
        together = forward + half + weight
        stated = (stages - 1) * (together + (half + weight) - 3 * weight)
        assert max(simulate(schedule, costs).waits()) <= stated
        peaks = [live_microbatches(schedule, rank).total for rank in range(stages)]
        assert peaks == [2 * stages + 1] * stages


def test_microbatches_that_wait_for_weight_halves_keep_fewer_activations() -> None:
    schedule = build_schedule("zb-h1", 4, 8)
    assert live_microbatches(schedule, 3).waiting == (4,)
    assert live_microbatches(schedule, 0).waiting == (1,)
    # The last stage has one microbatch between forward and backward, and three with deferred W.
    assert peak_activations(schedule, 3, [34.0]) == pytest.approx(34 + 3 * 32)
    assert peak_activations(schedule, 0, [34.0]) == pytest.approx(4 * 34)
    assert peak_activations(schedule, 3, [2.0], weight_half_share=1.0) == 8.0
    check_peak(schedule, 136.0, [[34.0]] * 4)
    with pytest.raises(
        ParallelPlanError, match=r"schedule 'zb-h1' keeps 136 on stage 0, the limit is 135"
    ):
        check_peak(schedule, 135.0, [[34.0]] * 4)


def test_a_weight_half_frees_the_activations_that_it_kept() -> None:
    row = [Action(kind, 0, 0) for kind in ("F", "I", "W")] + [Action("F", 0, 1), Action("F", 0, 2)]
    row += [Action("B", 0, 1), Action("B", 0, 2)]
    schedule = Schedule("mine", 1, 3, 1, (tuple(row),)).validate()
    assert peak_activations(schedule, 0, [34.0]) == pytest.approx(2 * 34)
    assert live_microbatches(schedule, 0).total == 2


def test_transfers_within_a_stage_take_no_time() -> None:
    schedule = build_schedule("zb-v", 1, 4, 2)
    assert simulate(schedule, StageCosts((1, 1), (1, 1), (1, 1), transfer=5)).length == 4 * 2 * 3
    # Down the V and up again there are two boundaries between stages, forward and backward.
    schedule_of_two = build_schedule("zb-v", 2, 1, 2)
    with_transfers = simulate(schedule_of_two, StageCosts((1,) * 4, (1,) * 4, (1,) * 4, transfer=5))
    assert with_transfers.length == simulate(schedule_of_two).length + 4 * 5


@pytest.mark.parametrize("stages", [2, 3, 4, 8, 16])
def test_zb_v_has_bounded_length_and_memory_with_few_microbatches(stages: int) -> None:
    for microbatches in range(1, 2 * stages):
        schedule = build_schedule("zb-v", stages, microbatches, 2)
        length = simulate(schedule).length
        # The first microbatch passes all virtual stages forward and back, and the other
        # microbatches follow it.
        assert length <= 4 * stages + 1 + 6 * microbatches
        peaks = [live_microbatches(schedule, rank).total for rank in range(stages)]
        assert max(peaks) <= 2 * min(stages, microbatches)


def test_peak_memory_of_interleaved_equals_the_formula_of_its_paper() -> None:
    for stages, chunks in ((4, 2), (4, 4), (8, 2)):
        schedule = build_schedule("interleaved", stages, 4 * stages, chunks)
        peak = Fraction(live_microbatches(schedule, 0).total, chunks)
        assert peak == stages * (1 + Fraction(stages - 1, stages * chunks))


def test_a_forward_only_schedule_keeps_no_microbatches() -> None:
    schedule = build_schedule("zb-v", 3, 4, 2, forward_only=True)
    assert live_microbatches(schedule, 0).total == 0
    assert schedule.warmup(0) == 8
    # The last microbatch goes to the last stage and back.
    assert simulate(schedule).length == 2 * 4 + 2 * 2


def test_the_rows_of_zb_h1_match_the_figure_of_its_paper() -> None:
    words = [
        " ".join(f"{a.kind}{a.microbatch + 1}" for a in build_schedule("zb-h1", 3, 4).actions(rank))
        for rank in range(3)
    ]
    assert words == [
        "F1 F2 F3 I1 W1 F4 I2 W2 I3 W3 I4 W4",
        "F1 F2 I1 F3 I2 W1 F4 I3 W2 I4 W3 W4",
        "F1 I1 F2 I2 F3 I3 W1 F4 I4 W2 W3 W4",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((1, 1), (1,), (1, 1)), "the lengths of the lists are {'forward': 2, 'input_half': 1, "),
        (((1, 1), (1, 0), (1, 1)), "each time of input_half must be a whole number of at least 1"),
        (((1,), (1,), (1,), -1), "transfer must not be negative: it is -1 ticks. Use 0 or more."),
    ],
)
def test_invalid_stage_costs_are_refused(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(ParallelPlanError) as error:
        StageCosts(*arguments)  # type: ignore[arg-type]
    assert message in str(error.value)


def test_costs_for_another_number_of_virtual_stages_are_refused() -> None:
    with pytest.raises(
        ParallelPlanError, match=r"they have 2, schedule 'zb-v' has pp x vpp of 2 x 2\. Use 4 times"
    ):
        simulate(build_schedule("zb-v", 2, 4, 2), StageCosts((1, 1), (1, 1), (1, 1)))


def test_a_v_with_crossed_actions_at_its_turn_is_refused() -> None:
    first = (Action("F", 0, 0), Action("F", 1, 0), Action("B", 1, 0), Action("B", 0, 0))
    crossed = (Action("F", 1, 0), Action("F", 0, 0), Action("B", 1, 0), Action("B", 0, 0))
    with pytest.raises(ParallelPlanError, match="Stage 1 waits for the input of F|Stage 0 waits"):
        simulate(Schedule("mine", 2, 1, 2, (first, crossed), shape="v").validate())
