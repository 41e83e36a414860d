"""Buffers contain every parameter once, ranks own equal parts of them, and boxes cover ranges."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product
from math import lcm, prod

from hypothesis import given
from hypothesis import strategies as st

from lightning_megatron.plan.buckets import (
    BufferPlan,
    FlatParameter,
    ParameterRange,
    plan_by_elements,
    plan_by_parameters,
)
from lightning_megatron.plan.shards import FlatBox, flat_range_boxes

PARTS = st.integers(1, 9)
SIZES = st.tuples(st.integers(0, 700), st.integers(0, 2), st.sampled_from([False] * 4 + [True]))
PIECES = st.lists(SIZES, max_size=12).map(
    lambda sizes: [FlatParameter(f"p{i}", *one) for i, one in enumerate(sizes)]
)
ABC = [FlatParameter("a", 100), FlatParameter("b", 200), FlatParameter("c", 300)]


def check_plan(plan: BufferPlan, pieces: list[FlatParameter]) -> None:
    held: dict[str, list[tuple[int, int]]] = {piece.name: [] for piece in pieces}
    for part in range(plan.num_parts):
        shard_stop, buffer_stop = 0, 0
        for piece in plan.slices(part):
            assert 0 <= piece.start < piece.stop
            held[piece.name].append((piece.start, piece.stop))
            assert piece.buffer_start == plan.place(piece.name).start + piece.start
            assert piece.buffer_start >= buffer_stop
            assert piece.shard_start >= shard_stop
            shard_stop = piece.shard_start + piece.size
            buffer_stop = piece.buffer_start + piece.size
            low, high = plan.buckets[piece.bucket].part(part, plan.num_parts)
            assert low <= piece.buffer_start <= piece.buffer_start + piece.size <= high
            assert piece.shard_start - plan.shard_start(piece.bucket) == piece.buffer_start - low
            assert piece.name in {placed.name for placed in plan.buckets[piece.bucket].placed}
        assert shard_stop <= plan.shard_size
    for piece in pieces:
        ranges = sorted(held[piece.name])
        assert [i for low, high in ranges for i in range(low, high)] == list(range(piece.size))
    by_name, stop = {piece.name: piece for piece in pieces}, 0
    for bucket in plan.buckets:
        assert bucket.start == stop
        stop = bucket.stop
        assert bucket.placed
        assert bucket.size % lcm(plan.num_parts, 128) == 0
        assert {by_name[placed.name].group for placed in bucket.placed} == {bucket.group}
        parts = [bucket.part(index, plan.num_parts) for index in range(plan.num_parts)]
        assert (parts[0][0], parts[-1][1]) == (bucket.start, bucket.stop)
        assert len({high - low for low, high in parts}) == 1
        last = bucket.start
        for placed in bucket.placed:
            assert placed.start % 64 == 0
            assert placed.start >= last
            assert placed.stop - placed.start == by_name[placed.name].size
            last = placed.stop
        assert last <= bucket.stop
    assert plan.size == stop == plan.shard_size * plan.num_parts


@given(PIECES, PARTS, st.integers(1, 1500))
def test_buckets_have_reverse_order_and_close_at_the_bucket_size(pieces, parts, bucket_size):
    plan = plan_by_elements(pieces, parts, bucket_size)
    check_plan(plan, pieces)
    names = [placed.name for bucket in plan.buckets for placed in bucket.placed]
    assert names == [piece.name for piece in reversed(pieces)]
    firsts = {piece.group: piece for piece in reversed(pieces)}.values()
    tables = [table for table in firsts if table.size >= bucket_size and table.stack is None]
    by_name = {piece.name: piece for piece in pieces}
    by_name |= {table.name: replace(table, own_bucket=True) for table in tables}
    for bucket in plan.buckets:
        if any(by_name[placed.name].own_bucket for placed in bucket.placed):
            assert len(bucket.placed) == 1
        assert all(placed.stop - bucket.start < bucket_size for placed in bucket.placed[:-1])
    for bucket, following in pairwise(plan.buckets):
        last, first = by_name[bucket.placed[-1].name], by_name[following.placed[0].name]
        full = bucket.placed[-1].stop - bucket.start >= bucket_size
        assert full or last.own_bucket or first.own_bucket or last.group != first.group


@given(PIECES, PARTS)
def test_undivided_parameters_are_distributed_evenly(pieces, num_parts):
    plan = plan_by_parameters(pieces, num_parts)
    check_plan(plan, pieces)
    assert len(plan.buckets) == len({piece.group for piece in pieces})
    sizes = {piece.name: piece.size for piece in pieces}
    order = {piece.name: -index for index, piece in enumerate(pieces)}
    slices = [plan.slices(part) for part in range(num_parts)]
    assert all((p.start, p.stop) == (0, sizes[p.name]) for part in slices for p in part)
    for index, bucket in enumerate(plan.buckets):
        loads = []
        for part in slices:
            own = [piece for piece in part if piece.bucket == index]
            orders = [order[piece.name] for piece in own]
            assert orders == sorted(orders)
            loads.append(sum(-(-piece.size // 64) * 64 for piece in own))
        largest = max(-(-sizes[placed.name] // 64) * 64 for placed in bucket.placed)
        assert max(loads) - min(loads) <= largest
        assert bucket.size <= num_parts * (max(loads) + 128)


def test_the_layout_matches_megatron_core():
    plan = plan_by_elements(ABC, 4)
    assert [(bucket.start, bucket.stop) for bucket in plan.buckets] == [(0, 768)]
    assert [plan.place(name) for name in "abc"] == [
        ParameterRange("a", 576, 676),
        ParameterRange("b", 320, 520),
        ParameterRange("c", 0, 300),
    ]
    # A part may begin and end inside a parameter.
    assert [(s.name, s.start, s.stop, s.shard_start) for s in plan.slices(1)] == [
        ("c", 192, 300, 0),
        ("b", 0, 64, 128),
    ]
    plan = plan_by_elements(ABC, 4, bucket_size=250)
    assert [(bucket.start, bucket.stop) for bucket in plan.buckets] == [(0, 384), (384, 768)]
    small = [FlatParameter(name, size) for name, size in (("a", 64), ("b", 65), ("c", 10))]
    plan = plan_by_elements([FlatParameter("tied", 1000, own_bucket=True), *small], 8)
    assert [(bucket.start, bucket.stop) for bucket in plan.buckets] == [(0, 256), (256, 1280)]


def flat_elements(shape: tuple[int, ...], box: FlatBox) -> list[int]:
    strides = [prod(shape[d + 1 :]) for d in range(len(shape))]
    ranges = [range(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True)]
    return [
        sum(i * stride for i, stride in zip(index, strides, strict=True))
        for index in product(*ranges)
    ]


@given(st.lists(st.integers(0, 5), max_size=4).map(tuple), st.data())
def test_boxes_cover_a_range_in_flat_order_and_none_could_be_merged(shape, data):
    start = data.draw(st.integers(0, prod(shape)))
    stop = data.draw(st.integers(start, prod(shape)))
    boxes = flat_range_boxes(shape, start, stop)
    assert [i for box in boxes for i in flat_elements(shape, box)] == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    for box in boxes:
        assert flat_elements(shape, box) == list(range(box.start, box.stop))
        limits = zip(box.offsets, box.sizes, shape, strict=True)
        assert all(o >= 0 and o + n <= extent for o, n, extent in limits)
    for left, right in pairwise(boxes):
        ours, theirs = (zip(box.offsets, box.sizes, strict=True) for box in (left, right))
        differ = [(a, b) for a, b in zip(ours, theirs, strict=True) if a != b]
        assert len(differ) > 1 or sum(differ[0][0]) != differ[0][1][0], "the two could be merged"
