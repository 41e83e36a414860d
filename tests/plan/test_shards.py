"""Shard ranges cover every row, number their copies, and refuse sizes that do not divide."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.plan import (
    ShardRange,
    attention_ranges,
    even_range,
    full_range,
    gated_ranges,
    padded_vocab_size,
    vocab_range,
)


@pytest.mark.parametrize(
    ("vocab_size", "multiple", "tp", "padded"),
    [
        (50257, 128, 1, 50304),
        (50257, 128, 8, 51200),
        (128256, 128, 8, 129024),
        (151936, 128, 4, 152064),
        (129280, 128, 16, 131072),
        (1, 128, 1, 128),
    ],
)
def test_padded_vocabulary_equals_megatron_core(
    vocab_size: int, multiple: int, tp: int, padded: int
) -> None:
    assert padded_vocab_size(vocab_size, tp, multiple) == padded


def test_nine_heads_over_two_ranks_are_refused() -> None:
    with pytest.raises(ParallelPlanError) as error:
        attention_ranges(9, 9, 64, tp=2, index=0)
    assert str(error.value) == (
        "num_attention_heads (9) must be a multiple of tp (2), because each rank holds whole heads. "
        "Use tp of 1, 3 or 9."
    )


def test_key_value_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(
        ParallelPlanError,
        match=r"num_kv_heads \(6\) .* divisor of tp \(4\).*Use tp of 1, 2, 3, 6 or 12\.",
    ):
        attention_ranges(12, 6, 64, tp=4, index=0)
    with pytest.raises(
        ParallelPlanError,
        match=r"multiple of num_kv_heads \(5\).*Use num_kv_heads of 1, 2, 3, 4, 6 or 12\.",
    ):
        attention_ranges(12, 5, 64, tp=1, index=0)


@given(
    kv=st.sampled_from([1, 2, 4, 6]),
    queries=st.sampled_from([1, 2, 3, 4]),
    head_dim=st.sampled_from([1, 8]),
    data=st.data(),
)
def test_each_rank_holds_its_query_heads_and_the_key_value_heads_they_read(
    kv: int, queries: int, head_dim: int, data: st.DataObject
) -> None:
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
        held = {row // head_dim - heads for row in range(key.start, key.stop)}
        assert held == read
        assert (value.start, value.stop, value.copy) == (
            key.start + kv * head_dim,
            key.stop + kv * head_dim,
            key.copy,
        )


def test_replicated_key_value_heads_are_numbered_copies() -> None:
    copies = [attention_ranges(8, 2, 4, tp=4, index=index)[1] for index in range(4)]
    assert copies == [
        ShardRange(32, 36, 0),
        ShardRange(32, 36, 1),
        ShardRange(36, 40, 0),
        ShardRange(36, 40, 1),
    ]


@given(vocab=st.integers(1, 2000), tp=st.integers(1, 8), multiple=st.sampled_from([1, 16, 128]))
def test_vocabulary_ranges_cover_the_true_vocabulary_once(
    vocab: int, tp: int, multiple: int
) -> None:
    ranges = [vocab_range(vocab, tp, index, multiple) for index in range(tp)]
    assert [row for part in ranges for row in range(part.start, part.stop)] == list(range(vocab))
    assert all(part.size <= padded_vocab_size(vocab, tp, multiple) // tp for part in ranges)


def test_a_rank_with_only_padding_holds_an_empty_range() -> None:
    assert [vocab_range(100, 2, index).size for index in range(2)] == [100, 0]


def test_gate_and_up_are_divided_the_same_way() -> None:
    assert gated_ranges(12, 3, 1) == (ShardRange(4, 8), ShardRange(16, 20))


def test_errors_of_an_even_division_name_the_divided_size() -> None:
    assert even_range(12, 4, 3) == ShardRange(9, 12)
    assert full_range(7, copy=2) == ShardRange(0, 7, 2)
    with pytest.raises(ParallelPlanError) as error:
        even_range(10, 4, 0, what="hidden_size")
    assert str(error.value) == (
        "hidden_size (10) must be a multiple of tp (4), because each rank holds an equal part. "
        "Use tp of 1, 2, 5 or 10."
    )
    with pytest.raises(
        ParallelPlanError,
        match="index must be a position on its axis: it is 4, tp is 4. Use index of 0 to 3.",
    ):
        even_range(12, 4, 4)


@pytest.mark.parametrize("arguments", [(0, 1, 128), (5, 0, 128), (5, 1, 0), (-1, 1, 128)])
def test_sizes_below_one_are_refused(arguments: tuple[int, int, int]) -> None:
    with pytest.raises(ParallelPlanError, match="at least 1"):
        padded_vocab_size(*arguments)
