"""Custom orders from files and functions build schedules, and refuse sizes that they do not fit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.plan import Action, Placement, build_schedule, format_schedule, simulate
from lightning_megatron.plan.budget import TrainingShape, estimate_memory
from lightning_megatron.plan.custom_order import (
    CustomOrder,
    order_from_file,
    order_from_function,
    order_may_split,
    shape_of_order,
)
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.plan.microbatches import MicrobatchRule
from lightning_megatron.plan.model_shape import ModelShape
from lightning_megatron.plan.schedule import forward_schedule


def last_first(rank: int, pp: int, num_microbatches: int, vpp: int) -> Iterator[Action]:
    """Yield all forwards, then all backwards from the last microbatch on, for even numbers."""
    if num_microbatches % 2:
        raise ZeroDivisionError("odd")
    yield from (Action("F", 0, number) for number in range(num_microbatches))
    yield from (Action("B", 0, number) for number in reversed(range(num_microbatches)))


def file_of(folder: Path, name: str, *sizes: int) -> Path:
    path = folder / "mine.csv"
    path.write_text(format_schedule(build_schedule(name, *sizes)))
    return path


def test_a_file_runs_only_its_number_of_microbatches(tmp_path: Path) -> None:
    path = file_of(tmp_path, "zb-v", 4, 8, 2)
    order = order_from_file(str(path), 4, 2)
    assert order.build(8).rows == build_schedule("zb-v", 4, 8, 2).rows
    assert (order.num_microbatches, shape_of_order(order), order_may_split(order)) == (8, "v", True)
    with pytest.raises(ParallelPlanError) as error:
        order.build(6)
    assert str(error.value) == (
        f"schedule {str(path)!r} orders 8 microbatches: a step has 6. A file is valid for "
        "one number of microbatches. Use batches of 8 x microbatch_size samples on each "
        "data-parallel rank, with drop_last=True if the last batch of an epoch is smaller; or a "
        "function, which can order any number of microbatches."
    )
    # Evaluation has no rows in the file, and may have any number of microbatches.
    assert order.build(5, forward_only=True).rows == (
        build_schedule("zb-v", 4, 5, 2, forward_only=True).rows
    )


def test_a_function_runs_every_number_of_microbatches_that_it_supports() -> None:
    order = order_from_function(last_first, 4, 1)
    assert order.build(6) is order.build(6), "the function is called once for each number"
    assert order.build(6).rows[3][-1] == Action("B", 0, 0)
    assert (order.num_microbatches, order.name) == (None, "last_first")
    with pytest.raises(ParallelPlanError) as error:
        order.build(5)
    assert str(error.value) == (
        "the function of schedule 'last_first' must return the rows of every number of "
        "microbatches that a step has: for pp 4, 5 microbatches and vpp 1 it raised "
        "ZeroDivisionError: odd. Use a number of microbatches that it supports, or a named "
        "schedule."
    )
    assert order.build(5, forward_only=True).num_microbatches == 5


@pytest.mark.parametrize("shape", ["loop", "v"])
@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
def test_forward_schedules_run_on_every_placement(shape: str, chunks: int) -> None:
    for stages in (1, 2, 3, 5):
        placement = Placement(shape, stages, chunks)  # type: ignore[arg-type]
        for microbatches in (1, 2, 5, 12):
            schedule = forward_schedule("mine", placement, microbatches)
            assert schedule.forward_only
            assert schedule.placement == placement
            assert simulate(schedule).length >= microbatches * chunks


def test_files_of_other_sizes_and_without_backwards_are_refused(tmp_path: Path) -> None:
    path = file_of(tmp_path, "interleaved", 4, 8, 2)
    with pytest.raises(
        ParallelPlanError,
        match=r"it has 4 rows with 2 chunks, pp is 2, vpp is 1\. Use pp=4 with vpp=2",
    ):
        order_from_file(str(path), 2, 1)
    path.write_text("0F0,0F1\n1F0,1F1\n")
    with pytest.raises(
        ParallelPlanError, match="must have backward passes: all its cells are forward"
    ):
        order_from_file(str(path), 2, 1)
    path.write_text("0F0,0B0\n1F0\n")
    with pytest.raises(ParallelPlanError, match="on stage 1, F of microbatch 0 in chunk 0 must"):
        order_from_file(str(path), 2, 1)
    missing = str(tmp_path / "other.csv")
    with pytest.raises(
        ParallelPlanError, match=r"or a CSV file with its rows: .*other\.csv cannot"
    ):
        order_from_file(missing, 2, 1)


def test_ranks_compare_the_rows_of_files_and_not_their_paths(tmp_path: Path) -> None:
    first = order_from_file(str(file_of(tmp_path, "1f1b", 2, 4)), 2, 1)
    path = tmp_path / "copy.csv"
    path.write_text(format_schedule(build_schedule("1f1b", 2, 4)))
    assert repr(order_from_file(str(path), 2, 1)) == repr(first)
    different = order_from_file(str(file_of(tmp_path, "gpipe", 2, 4)), 2, 1)
    assert repr(different) != repr(first)


def rule_of(order: CustomOrder, size: int | None = None) -> MicrobatchRule:
    return MicrobatchRule(size, order, order.placement.num_stages, order.placement.num_chunks, None)


def test_the_default_number_of_microbatches_follows_from_the_order(tmp_path: Path) -> None:
    rule = rule_of(order_from_file(str(file_of(tmp_path, "zb-h1", 4, 6)), 4, 1))
    assert (rule.size_for(12), rule.count_for(12)) == (2, 6)
    rule.check(12)
    with pytest.raises(ParallelPlanError, match="orders 6 microbatches: a step has 8"):
        rule.check(8)
    assert rule.idle_share(6) == simulate(build_schedule("zb-h1", 4, 6)).bubble
    with pytest.raises(ParallelPlanError, match="orders 6 microbatches: a step has 4"):
        rule_of(order_from_file(str(file_of(tmp_path, "zb-h1", 4, 6)), 4, 1), 2).check(8)
    rule = rule_of(order_from_function(last_first, 2, 1))
    # Four are the fewest microbatches with which stages are idle for at most a fifth of a step.
    assert (rule.count_for(12), rule.count_for(9)) == (4, 9)
    with pytest.raises(ParallelPlanError, match="it raised ZeroDivisionError"):
        rule.check(9)


def test_memory_is_estimated_for_the_rows_of_a_custom_order(tmp_path: Path) -> None:
    model = ModelShape(
        num_layers=8,
        hidden_size=64,
        ffn_hidden_size=256,
        num_heads=4,
        num_kv_heads=4,
        head_dim=16,
        vocab_size=128,
    )
    layout = ParallelLayout(4, pp=4)
    order = order_from_file(str(file_of(tmp_path, "zb-h1", 4, 8)), 4, 1)
    actual, expected = (
        estimate_memory(
            model, layout, TrainingShape(seq_length=32, num_microbatches=8, schedule=schedule)
        )
        for schedule in (order, "zb-h1")
    )
    assert actual == expected
