"""Rows of whole documents predict every token once, with little padding."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_megatron.data.blended_samples import blend_samples
from lightning_megatron.data.datamodule import TokenDataModule
from lightning_megatron.data.packing import best_fit, index_packed
from lightning_megatron.data.samples import GPTSamples, SampleOptions
from lightning_megatron.errors import CorruptDataError
from tests.data.recorder import write_documents
from tests.refusals import check_refusals


@given(st.lists(st.integers(2, 20), max_size=40), st.integers(20, 30))
def test_no_two_rows_fit_into_one_row(sizes, capacity):
    rows = best_fit(np.array(sizes, np.int64), capacity)
    assert sorted(item for row in rows for item in row) == list(range(len(sizes)))
    filled = sorted(sum(sizes[item] for item in row) for row in rows)
    assert all(0 < size <= capacity for size in filled)
    assert all(size + next_size > capacity for size, next_size in pairwise(filled))


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=30),
    st.integers(2, 48),
    st.sampled_from([None, 3]),
    st.integers(1, 3),
)
def test_every_pass_predicts_every_token_once(lengths, seq_length, seed, num_passes):
    sizes = np.array(lengths)
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    single = index_packed(sizes, seq_length, None, seed)
    pairs = zip(bounds, lengths, strict=False)
    expected = sorted(token for start, size in pairs for token in range(start + 1, start + size))
    if not expected:
        assert single.num_windows == 0
        return
    count = single.num_windows * num_passes
    index = index_packed(sizes, seq_length, count, seed)
    assert index.num_windows == count, "all passes have the same number of rows"
    for number in range(num_passes):
        predicted: list[int] = []
        for row in range(number * single.num_windows, (number + 1) * single.num_windows):
            pieces = index.pieces(row, bounds)
            held = sum(stop - start for start, stop in pieces)
            assert 0 < len(pieces) <= index.max_pieces
            assert held <= seq_length + 1
            for start, stop in pieces:
                predicted += range(start + 1, stop)
        assert sorted(predicted) == expected
    longer = index_packed(sizes, seq_length, count + 1, seed)
    assert all(longer.pieces(row, bounds) == index.pieces(row, bounds) for row in range(count))


def test_only_documents_longer_than_a_row_are_cut(tmp_path):
    corpus = write_documents(tmp_path / "c", [9, 3, 4, 2, 5, 1])
    samples = GPTSamples(corpus, SampleOptions(4, order="sequential", whole=True))
    rows = [(samples[row].tolist(), samples.lengths(row)) for row in range(len(samples))]
    assert rows == [
        ([0, 1, 2, 3, 4], [5]),
        ([4, 5, 6, 7, 8], [5]),
        ([18, 19, 20, 21, 22], [5]),
        ([12, 13, 14, 15], [4]),
        ([9, 10, 11, 16, 17], [3, 2]),
    ]
    with pytest.raises(CorruptDataError, match="no document of at least 2 tokens"):
        GPTSamples(write_documents(tmp_path / "d", [1, 1, 1]), SampleOptions(4, whole=True))


def test_blends_of_whole_documents_have_every_token_once(tmp_path):
    a = write_documents(tmp_path / "a", [5, 3, 8])
    corpora = [(a, None), (write_documents(tmp_path / "b", [4, 9, 2, 2], first=1000), None)]
    options = SampleOptions(8, whole=True, cache_dir=str(tmp_path / "cache"))
    once = blend_samples(corpora, None, options)
    tokens = [token for row in range(len(once)) for token in once[row].tolist()]
    assert sorted(tokens) == [*range(16), *range(1000, 1017)]
    assert len(blend_samples(corpora, [1.0, 1.0], options)) == len(once)
    assert once.order_key != blend_samples(corpora, None, SampleOptions(8)).order_key


def test_settings_that_do_not_fit_whole_documents_are_refused():
    whole = {"train": "c", "documents": "whole"}
    cases = [({**whole, "order": "megatron"}, "whose samples cross the ends")]
    check_refusals(TokenDataModule, cases)
