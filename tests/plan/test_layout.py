"""Rank groups equal Megatron-Core's, and shards cover every row once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lightning_megatron.plan import (
    ParallelLayout,
    ShardRange,
    attention_ranges,
    even_range,
    padded_vocab_size,
    vocab_range,
)
from tests.refusals import check_refusals


@st.composite
def layouts(draw: st.DrawFn) -> ParallelLayout:
    tp, cp, dp, pp, etp, ep = (draw(st.sampled_from([1, 2, 3])) for _ in range(6))
    # A world that both grids divide, with pp last so that they agree on the stages.
    world = tp * cp * dp * etp * ep * pp
    order = "-".join([*draw(st.permutations(["tp", "cp", "ep", "dp"])), "pp"])
    offset = draw(st.sampled_from([0, 5]))
    return ParallelLayout(
        world, tp=tp, cp=cp, pp=pp, ep=ep, etp=etp, order=order, rank_offset=offset
    )


@given(layouts())
def test_a_group_of_an_axis_has_the_ranks_whose_coordinates_differ_in_it(layout):
    ranks = list(range(layout.rank_offset, layout.rank_offset + layout.world_size))
    for groups_of, coordinates in (
        (layout.groups, layout.coordinates),
        (layout.expert_groups, layout.expert_coordinates),
    ):
        for axis in coordinates(ranks[0]):
            groups = groups_of(axis)
            assert sorted(rank for group in groups for rank in group) == ranks
            for group in groups:
                positions = [coordinates(rank) for rank in group]
                assert [position.pop(axis) for position in positions] == list(range(len(group)))
                assert all(position == positions[0] for position in positions)
        assert len({tuple(coordinates(rank).values()) for rank in ranks}) == len(ranks)
    assert layout.groups("pp") == layout.expert_groups("pp"), "both grids agree on the stages"


def test_a_first_stage_that_computes_the_loss_has_the_tied_embedding_alone():
    layout = ParallelLayout(4, tp=2, pp=2, vpp=2, shape="v")
    assert layout.embedding_groups() == [[0], [1]]


def test_invalid_layouts_are_refused_with_the_rule_and_valid_sizes():
    expert_first = {"tp": 2, "pp": 2, "ep": 2, "etp": 2, "order": "tp-cp-ep-pp-dp"}
    check_refusals(
        ParallelLayout,
        [
            ({"world_size": 0}, "world_size must be a whole number of at least 1: it is 0."),
            ({"world_size": 16, "tp": 3}, "Use tp of 1, 2, 4, 8 or 16, or a multiple of 3 ranks"),
            ({"world_size": 16, "tp": 4, "pp": 8}, "Use tp of 1 or 2, or pp of 1, 2 or 4, or a"),
            ({"world_size": 16, "tp": 3, "pp": 5}, "Use sizes whose product is 1, 2, 4, 8 or 16"),
            ({"world_size": 8, "tp": 2, "ep": 8}, "Use etp of 1, or ep of 1, 2 or 4, or a"),
            ({"world_size": 16, "order": "tp-tp-dp"}, "each at most once: it is 'tp-tp-dp'"),
            ({"world_size": 16, "order": "tp-dq"}, "it is 'tp-dq'. Use each of tp, cp"),
            ({"world_size": 16, "tp": 2, "order": "tp"}, "leaves out dp (8)"),
            ({"world_size": 16, **expert_first}, "Put pp last in the order"),
            ({"world_size": 4, "vpp": 2}, "vpp (2) needs pp above 1"),
        ],
    )
    layout = ParallelLayout(8, tp=2, ep=2)
    check_refusals(layout.groups, [(("ep",), "'ep' is no such name. Use tp, cp, dp or pp")])
    check_refusals(layout.expert_groups, [(("tp-etp",), "each once: 'tp-etp' is")])


def test_padded_vocabulary_equals_megatron_core():
    for vocab_size, tp, padded in (
        (50257, 1, 50304),
        (50257, 8, 51200),
        (129280, 16, 131072),
        (1, 1, 128),
    ):
        assert padded_vocab_size(vocab_size, tp, 128) == padded


@given(st.sampled_from([1, 2, 4, 6]), st.integers(1, 4), st.sampled_from([1, 8]), st.data())
def test_each_rank_holds_its_query_heads_and_the_key_value_heads_they_read(
    kv, queries, head_dim, data
):
    heads = kv * queries
    legal = [d for d in range(1, heads + 1) if heads % d == 0 and (kv % d == 0 or d % kv == 0)]
    tp = data.draw(st.sampled_from(legal))
    shards = [attention_ranges(heads, kv, head_dim, tp, index) for index in range(tp)]
    counted = [
        row
        for shard in shards
        for part in shard
        if part.copy == 0
        for row in range(part.start, part.stop)
    ]
    assert sorted(counted) == list(range((heads + 2 * kv) * head_dim))
    for query, key, value in shards:
        read = {row // head_dim // queries for row in range(query.start, query.stop)}
        assert {row // head_dim - heads for row in range(key.start, key.stop)} == read
        shift = kv * head_dim
        assert value == ShardRange(key.start + shift, key.stop + shift, key.copy)


@given(st.integers(1, 2000), st.integers(1, 8), st.sampled_from([1, 16, 128]))
def test_vocabulary_ranges_cover_the_true_vocabulary_once(vocab, tp, multiple):
    ranges = [vocab_range(vocab, tp, index, multiple) for index in range(tp)]
    assert [row for part in ranges for row in range(part.start, part.stop)] == list(range(vocab))
    assert all(part.size <= padded_vocab_size(vocab, tp, multiple) // tp for part in ranges)


def test_sizes_that_do_not_divide_are_refused_with_legal_ones():
    check_refusals(
        attention_ranges,
        [
            ((9, 9, 64, 2, 0), "num_attention_heads (9) must be a multiple of tp (2)"),
            ((12, 5, 64, 1, 0), "Use num_kv_heads of 1, 2, 3, 4, 6 or 12."),
        ],
    )
    check_refusals(
        even_range, [((10, 4, 0, "hidden_size"), "hidden_size (10) must be a multiple of tp (4)")]
    )
