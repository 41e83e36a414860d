"""The zig-zag cut holds each token once, divides causal work equally, and covers visible pairs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.plan.context import (
    AttentionBlock,
    ContextCut,
    check_context_length,
    kv_heads_of,
    split_heads_over,
)

CUTS = st.builds(
    lambda size, piece: ContextCut(size, 2 * size * piece), st.integers(1, 6), st.integers(1, 5)
)
WINDOWS = st.none() | st.integers(1, 40)


@given(CUTS)
def test_every_token_is_held_once_and_restored_in_order(cut: ContextCut) -> None:
    held = [cut.positions(rank) for rank in range(cut.size)]
    assert sorted(sum(held, [])) == list(range(cut.seq_length))
    assert {len(positions) for positions in held} == {cut.local_length}
    joined = sum(held, [])
    pieces = [joined[at * cut.piece : (at + 1) * cut.piece] for at in cut.sequence_order()]
    assert sum(pieces, []) == list(range(cut.seq_length))


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3))
def test_neighbouring_ranks_join_to_a_rank_of_a_coarser_cut(
    inner: int, outer: int, piece: int
) -> None:
    fine = ContextCut(inner * outer, 2 * inner * outer * piece)
    coarse = ContextCut(outer, fine.seq_length)
    for host in range(outer):
        ranks = range(host * inner, (host + 1) * inner)
        joined = sum((fine.positions(rank) for rank in ranks), [])
        order = fine.sequence_order(ranks)
        actual = [joined[at * piece + i] for at in order for i in range(piece)]
        assert actual == coarse.positions(host)


@given(CUTS)
def test_causal_work_is_equal_on_all_ranks(cut: ContextCut) -> None:
    work = [
        sum(
            block.num_pairs
            for source in range(cut.size)
            for block in cut.ring_blocks(rank, source, causal=True)
        )
        for rank in range(cut.size)
    ]
    assert len(set(work)) == 1
    assert sum(work) == cut.seq_length * (cut.seq_length + 1) // 2


def visible_pairs(
    block: AttentionBlock, queries: list[int], keys: list[int]
) -> set[tuple[int, int]]:
    """Return the pairs of query and key positions that a block computes."""
    return {
        (queries[block.queries[i]], keys[block.keys[j]])
        for i in range(len(block.queries))
        for j in range(len(block.keys))
        if not block.is_causal
        or (
            block.offset + i - j >= 0
            and (block.window is None or block.offset + i - j < block.window)
        )
    }


def expected_pairs(
    cut: ContextCut, rank: int, causal: bool, window: int | None
) -> set[tuple[int, int]]:
    return {
        (query, key)
        for query in cut.positions(rank)
        for key in range(cut.seq_length)
        if not causal or (key <= query and (window is None or query - key < window))
    }


@given(CUTS, st.booleans(), WINDOWS, st.data())
def test_blocks_cover_each_visible_pair_once(
    cut: ContextCut, causal: bool, window: int | None, data: st.DataObject
) -> None:
    window = window if causal else None
    rank = data.draw(st.integers(0, cut.size - 1))
    queries = cut.positions(rank)
    expected = expected_pairs(cut, rank, causal, window)
    ring = [
        (block, visible_pairs(block, queries, cut.positions(source)))
        for source in range(cut.size)
        for block in cut.ring_blocks(rank, source, causal, window)
    ]
    gathered = [
        (block, visible_pairs(block, queries, list(range(cut.seq_length))))
        for block in cut.gathered_blocks(rank, causal, window)
    ]
    for blocks in (ring, gathered):
        assert set().union(*(pairs for _, pairs in blocks)) == expected
        assert sum(len(pairs) for _, pairs in blocks) == len(expected)
        assert all(block.num_pairs == len(pairs) for block, pairs in blocks)
    if window is None:
        assert all(block.is_aligned or not block.is_causal for block, _ in ring + gathered)


@pytest.mark.parametrize(
    ("length", "shards", "legal"),
    [(30, 1, "24 or 32"), (3, 1, "8"), (36, 4, "32 or 48"), (40, 3, "24 or 48")],
)
def test_lengths_that_do_not_divide_are_refused(length: int, shards: int, legal: str) -> None:
    with pytest.raises(ParallelPlanError, match=rf"seq_length \({length}\).*Use {legal}\.$"):
        check_context_length(length, 4, shards)


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 6))
def test_query_heads_are_divided_with_their_kv_heads(group: int, kv_heads: int, ranks: int) -> None:
    heads = group * kv_heads
    parts = split_heads_over(heads, ranks)
    assert [head for part in parts for head in part] == list(range(heads))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    for part in parts:
        part_kv_heads = kv_heads_of(part, heads, kv_heads)
        assert bool(part_kv_heads) == bool(part)
        if part_kv_heads:
            repeats, remainder = divmod(len(part), len(part_kv_heads))
            assert not remainder
            assert [part_kv_heads[i // repeats] for i in range(len(part))] == [
                h // group for h in part
            ]
