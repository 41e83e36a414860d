"""Buffers contain every parameter once, and ranks own equal parts of them."""

from __future__ import annotations

from dataclasses import replace
from math import lcm

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.plan.buckets import (
    BufferPlan,
    FlatParameter,
    ParameterRange,
    Slice,
    plan_by_elements,
    plan_by_parameters,
)

PARTS = st.integers(1, 9)


@st.composite
def some_pieces(draw: st.DrawFn) -> list[FlatParameter]:
    count = draw(st.integers(0, 12))
    return [
        FlatParameter(
            f"p{i}",
            draw(st.integers(0, 700)),
            draw(st.integers(0, 2)),
            draw(st.integers(0, 4)) == 0,
        )
        for i in range(count)
    ]


def check_every_element_once(plan: BufferPlan, pieces: list[FlatParameter]) -> None:
    held: dict[str, list[tuple[int, int]]] = {piece.name: [] for piece in pieces}
    for part in range(plan.num_parts):
        shard_stop, buffer_stop = 0, 0
        for piece in plan.slices(part):
            assert 0 <= piece.start < piece.stop
            held[piece.name].append((piece.start, piece.stop))
            assert piece.buffer_start == plan.place(piece.name).start + piece.start
            assert piece.buffer_start >= buffer_stop
            assert piece.shard_start >= shard_stop
            shard_stop, buffer_stop = (
                piece.shard_start + piece.size,
                piece.buffer_start + piece.size,
            )
            low, high = plan.buckets[piece.bucket].part(part, plan.num_parts)
            assert low <= piece.buffer_start <= piece.buffer_start + piece.size <= high
            assert piece.shard_start - plan.shard_start(piece.bucket) == piece.buffer_start - low
            assert piece.name in {placed.name for placed in plan.buckets[piece.bucket].placed}
        assert shard_stop <= plan.shard_size
    for piece in pieces:
        ranges = sorted(held[piece.name])
        assert [i for low, high in ranges for i in range(low, high)] == list(range(piece.size))


def check_buckets(plan: BufferPlan, pieces: list[FlatParameter]) -> None:
    by_name, stop = {piece.name: piece for piece in pieces}, 0
    for bucket in plan.buckets:
        assert bucket.start == stop
        stop = bucket.stop
        assert bucket.placed
        assert bucket.size % lcm(plan.num_parts, 128) == 0
        assert {by_name[placed.name].group for placed in bucket.placed} == {bucket.group}
        parts = [bucket.part(index, plan.num_parts) for index in range(plan.num_parts)]
        assert parts[0][0] == bucket.start
        assert parts[-1][1] == bucket.stop
        assert len({high - low for low, high in parts}) == 1
        last = bucket.start
        for placed in bucket.placed:
            assert placed.start % 64 == 0
            assert placed.start >= last
            assert placed.stop - placed.start == by_name[placed.name].size
            last = placed.stop
        assert last <= bucket.stop
    assert plan.size == stop == plan.shard_size * plan.num_parts


@given(some_pieces(), PARTS, st.integers(1, 1500))
def test_every_element_lies_in_exactly_one_slice(
    pieces: list[FlatParameter], num_parts: int, bucket_size: int
) -> None:
    plan = plan_by_elements(pieces, num_parts, bucket_size)
    check_every_element_once(plan, pieces)
    check_buckets(plan, pieces)


@given(some_pieces(), PARTS, st.integers(1, 1500))
def test_buckets_have_reverse_order_and_close_at_the_bucket_size(
    pieces: list[FlatParameter], parts: int, bucket_size: int
) -> None:
    plan = plan_by_elements(pieces, parts, bucket_size)
    names = [placed.name for bucket in plan.buckets for placed in bucket.placed]
    assert names == [piece.name for piece in reversed(pieces)]
    firsts = {piece.group: piece for piece in reversed(pieces)}
    tables = [
        table for table in firsts.values() if table.size >= bucket_size and table.stack is None
    ]
    by_name = {piece.name: piece for piece in pieces}
    by_name |= {table.name: replace(table, own_bucket=True) for table in tables}
    for bucket in plan.buckets:
        if any(by_name[placed.name].own_bucket for placed in bucket.placed):
            assert len(bucket.placed) == 1
        assert all(placed.stop - bucket.start < bucket_size for placed in bucket.placed[:-1])
    for bucket, next_bucket in zip(plan.buckets, plan.buckets[1:], strict=False):
        last, first = by_name[bucket.placed[-1].name], by_name[next_bucket.placed[0].name]
        full = bucket.placed[-1].stop - bucket.start >= bucket_size
        assert full or last.own_bucket or first.own_bucket or last.group != first.group


@given(some_pieces(), PARTS)
def test_undivided_parameters_are_distributed_evenly(
    pieces: list[FlatParameter], num_parts: int
) -> None:
    plan = plan_by_parameters(pieces, num_parts)
    check_every_element_once(plan, pieces)
    check_buckets(plan, pieces)
    assert len(plan.buckets) == len({piece.group for piece in pieces})
    sizes = {piece.name: piece.size for piece in pieces}
    slices = [plan.slices(part) for part in range(num_parts)]
    assert all(
        (piece.start, piece.stop) == (0, sizes[piece.name]) for part in slices for piece in part
    )
    order = {piece.name: -index for index, piece in enumerate(pieces)}
    for index, bucket in enumerate(plan.buckets):
        loads = []
        for part in slices:
            part_pieces = [piece for piece in part if piece.bucket == index]
            assert [order[piece.name] for piece in part_pieces] == sorted(
                order[piece.name] for piece in part_pieces
            )
            loads.append(sum(-(-piece.size // 64) * 64 for piece in part_pieces))
        largest = max(-(-sizes[placed.name] // 64) * 64 for placed in bucket.placed)
        assert max(loads) - min(loads) <= largest
        assert bucket.size <= num_parts * (max(loads) + 128)


def test_the_layout_matches_megatron_core() -> None:
    plan = plan_by_elements(
        [FlatParameter("a", 100), FlatParameter("b", 200), FlatParameter("c", 300)], 4
    )
    assert [(bucket.start, bucket.stop) for bucket in plan.buckets] == [(0, 768)]
    assert [plan.place(name) for name in "abc"] == [
        ParameterRange("a", 576, 676),
        ParameterRange("b", 320, 520),
        ParameterRange("c", 0, 300),
    ]
    plan = plan_by_elements(
        [FlatParameter("a", 100), FlatParameter("b", 200), FlatParameter("c", 300)],
        4,
        bucket_size=250,
    )
    assert [(bucket.start, bucket.stop) for bucket in plan.buckets] == [(0, 384), (384, 768)]
    assert [bucket.placed[-1].stop - bucket.start for bucket in plan.buckets] == [300, 356]
    pieces = [
        FlatParameter("tied", 1000, own_bucket=True),
        FlatParameter("a", 64),
        FlatParameter("b", 65),
        FlatParameter("c", 10),
    ]
    plan = plan_by_elements(pieces, 8)
    assert [(bucket.start, bucket.stop) for bucket in plan.buckets] == [(0, 256), (256, 1280)]


def test_a_part_may_begin_and_end_inside_a_parameter() -> None:
    plan = plan_by_elements(
        [FlatParameter("a", 100), FlatParameter("b", 200), FlatParameter("c", 300)], 4
    )
    assert [(s.name, s.start, s.stop, s.shard_start) for s in plan.slices(1)] == [
        ("c", 192, 300, 0),
        ("b", 0, 64, 128),
    ]
    assert plan.slices(3) == (Slice("a", 0, 100, 576, 0, 0),)


def test_an_empty_buffer_has_no_buckets() -> None:
    for plan in (plan_by_elements([], 4), plan_by_parameters([], 4)):
        assert plan.buckets == ()
        assert plan.size == plan.shard_size == 0
        assert plan.slices(3) == ()


def test_slices_of_a_large_model_fit_their_shards() -> None:
    pieces = [
        FlatParameter(f"layers.{i}.{j}", 4096 * 4096 + j) for i in range(126) for j in range(9)
    ]
    plan = plan_by_elements(pieces, 512)
    assert sum(s.size for part in (0, 511) for s in plan.slices(part)) <= 2 * plan.shard_size


def test_invalid_buffer_plans_are_refused() -> None:
    with pytest.raises(ParallelPlanError, match="'a' is listed twice"):
        plan_by_elements([FlatParameter("a", 1), FlatParameter("a", 2)], 2)
    with pytest.raises(ParallelPlanError, match="'a' has -1"):
        plan_by_parameters([FlatParameter("a", -1)], 2)
    with pytest.raises(ParallelPlanError, match="num_parts must be a whole number of at least 1"):
        plan_by_elements([], 0)
    with pytest.raises(ParallelPlanError, match="bucket_size must be"):
        plan_by_elements([], 1, bucket_size=0)
    with pytest.raises(ParallelPlanError, match="Plan the buffer again with num_parts of 3"):
        plan_by_elements([FlatParameter("a", 1)], 4).buckets[0].part(0, 3)
    with pytest.raises(ParallelPlanError, match="Use part of 0 to 3"):
        plan_by_elements([FlatParameter("a", 1)], 4).slices(4)
