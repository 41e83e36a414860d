"""Cuts over cp hold each token once and divide causal work equally; transports suit the hosts."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from lightning_megatron.plan.context import (
    AttentionBlock,
    ContextCut,
    check_context_length,
    kv_heads_of,
    split_heads_over,
)
from lightning_megatron.plan.context_transport import ContextLinks, choose_context_transport
from lightning_megatron.plan.layout import ParallelLayout
from tests.refusals import check_refusals

CUTS = st.builds(
    lambda size, piece: ContextCut(size, 2 * size * piece), st.integers(1, 6), st.integers(1, 5)
)
CPS = st.sampled_from([2, 4, 8])


@given(CUTS)
def test_every_token_is_held_once_and_causal_work_is_equal(cut):
    ranks = range(cut.size)
    held = [cut.positions(rank) for rank in ranks]
    joined = sum(held, [])
    assert sorted(joined) == list(range(cut.seq_length))
    assert {len(positions) for positions in held} == {cut.local_length}
    pieces = [joined[at * cut.piece : (at + 1) * cut.piece] for at in cut.sequence_order()]
    assert sum(pieces, []) == list(range(cut.seq_length))
    for rank in ranks:
        blocks = [block for source in ranks for block in cut.ring_blocks(rank, source, causal=True)]
        pairs = sum(block.num_pairs for block in blocks)
        assert pairs * cut.size == cut.seq_length * (cut.seq_length + 1) // 2


def visible_pairs(block: AttentionBlock, queries: list[int], keys: list[int]) -> set:
    """Return the pairs of query and key positions that a block computes."""

    def is_visible(i: int, j: int) -> bool:
        distance = block.offset + i - j
        seen = distance >= 0 and (block.window is None or distance < block.window)
        return seen or not block.is_causal

    return {
        (queries[query], keys[key])
        for i, query in enumerate(block.queries)
        for j, key in enumerate(block.keys)
        if is_visible(i, j)
    }


@given(CUTS, st.booleans(), st.none() | st.integers(1, 40), st.data())
def test_blocks_cover_each_visible_pair_once(cut, causal, window, data):
    window = window if causal else None
    rank = data.draw(st.integers(0, cut.size - 1))
    queries, every = cut.positions(rank), list(range(cut.seq_length))
    expected = {
        (query, key)
        for query in queries
        for key in every
        if not causal or (key <= query and (window is None or query - key < window))
    }
    ring = [
        (block, visible_pairs(block, queries, cut.positions(source)))
        for source in range(cut.size)
        for block in cut.ring_blocks(rank, source, causal, window)
    ]
    gathered = [
        (block, visible_pairs(block, queries, every))
        for block in cut.gathered_blocks(rank, causal, window)
    ]
    for blocks in (ring, gathered):
        assert set().union(*(pairs for _, pairs in blocks)) == expected
        assert sum(len(pairs) for _, pairs in blocks) == len(expected)
        assert all(block.num_pairs == len(pairs) for block, pairs in blocks)


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 6))
def test_query_heads_are_divided_with_their_kv_heads(group, kv_heads, ranks):
    heads = group * kv_heads
    parts = split_heads_over(heads, ranks)
    assert [head for part in parts for head in part] == list(range(heads))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    for part in parts:
        held = kv_heads_of(part, heads, kv_heads)
        assert bool(held) == bool(part)
        if held:
            repeats, remainder = divmod(len(part), len(held))
            assert not remainder
            read = [held[i // repeats] for i in range(len(part))]
            assert read == [head // group for head in part]


def test_sizes_and_rows_that_do_not_divide_are_refused_with_legal_ones():
    check_refusals(
        check_context_length, [((30, 4, 1), "Use 24 or 32."), ((36, 4, 4), "Use 32 or 48.")]
    )


def test_context_links_follow_the_hosts():
    cases: list[tuple[int, dict[str, Any], int, bool]] = [
        (4, {"cp": 4}, 4, True),
        (8, {"cp": 4}, 4, True),
        (4, {"cp": 4}, 2, False),
        (16, {"cp": 8, "tp": 2}, 8, False),
        # Each rank of a sequence lies on another host.
        (16, {"cp": 4, "order": "dp-cp-tp-pp"}, 4, False),
        # The hosts have three ranks, which do not divide the ranks of a sequence.
        (12, {"cp": 4}, 3, False),
    ]
    for world_size, sizes, ranks_per_host, expected in cases:
        links = ContextLinks.of("auto", ParallelLayout(world_size, **sizes), ranks_per_host)
        assert links.is_one_host == expected


def test_the_transport_follows_links_heads_and_dropout():
    for links, heads, kv_heads, dropout, transport in (
        (ContextLinks(), 8, 4, 0.0, "all_to_all"),
        (ContextLinks(), 6, 6, 0.0, "ring"),
        (ContextLinks(), 6, 1, 0.0, "all_gather"),
        (ContextLinks(), 6, 6, 0.1, "all_to_all"),
        (ContextLinks(is_one_host=False), 8, 4, 0.0, "ring"),
        (ContextLinks("ring"), 8, 4, 0.0, "ring"),
        (ContextLinks("all_to_all"), 8, 4, 0.1, "all_to_all"),
    ):
        choice = choose_context_transport(links, 4, heads, kv_heads, dropout)
        assert choice.transport == transport
    ring = (ContextLinks("ring"), 4, 8, 8, 0.1)
    check_refusals(choose_context_transport, [(ring, "cannot be used with attention dropout")])
