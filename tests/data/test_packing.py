"""Rows of whole documents predict every token once and have little padding, and runs resume."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_megatron.data.best_fit import best_fit
from lightning_megatron.data.blended_samples import blend_samples
from lightning_megatron.data.datamodule import TokenDataModule
from lightning_megatron.data.packing import index_packed
from lightning_megatron.data.samples import GPTSamples, SampleOptions
from lightning_megatron.errors import CorruptDataError, UnsupportedError
from tests.data.recorder import make_trainer, run
from tests.data.test_balance import FirstTokenRecorder
from tests.data.test_datamodule_resume import StopAfter
from tests.data.test_samples import write


@settings(max_examples=80, deadline=None)
@given(sizes=st.lists(st.integers(2, 20), max_size=40), capacity=st.integers(20, 30))
def test_no_two_rows_fit_into_one_row(sizes: list[int], capacity: int) -> None:
    rows = best_fit(np.array(sizes, np.int64), capacity)
    assert sorted(item for row in rows for item in row) == list(range(len(sizes)))
    filled = sorted(sum(sizes[item] for item in row) for row in rows)
    assert all(0 < size <= capacity for size in filled)
    assert all(size + next_size > capacity for size, next_size in pairwise(filled))


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=25),
    seq_length=st.integers(1, 12),
    seed=st.sampled_from([None, 3]),
    num_passes=st.integers(1, 3),
)
def test_every_pass_predicts_every_token_once(
    lengths: list[int], seq_length: int, seed: int | None, num_passes: int
) -> None:
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    single_pass = index_packed(np.array(lengths), seq_length, None, seed)
    expected = sorted(
        token for start, size in zip(bounds, lengths, strict=False)
        for token in range(start + 1, start + size)
    )  # fmt: skip
    if not expected:
        assert single_pass.num_windows == 0
        return
    count = single_pass.num_windows * num_passes
    index = index_packed(np.array(lengths), seq_length, count, seed)
    assert index.num_windows == count, "all passes have the same number of rows"
    for number in range(num_passes):
        predicted = []
        for row in range(number * single_pass.num_windows, (number + 1) * single_pass.num_windows):
            pieces = index.pieces(row, bounds)
            assert 0 < len(pieces) <= index.max_pieces
            assert sum(stop - start for start, stop in pieces) <= seq_length + 1
            predicted += [token for start, stop in pieces for token in range(start + 1, stop)]
        assert sorted(predicted) == expected
    longer = index_packed(np.array(lengths), seq_length, count + 1, seed)
    assert [longer.pieces(row, bounds) for row in range(count)] == [
        index.pieces(row, bounds) for row in range(count)
    ]


def test_only_documents_longer_than_a_row_are_cut(tmp_path: Path) -> None:
    corpus = write(tmp_path / "c", [9, 3, 4, 2, 5, 1])
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
        GPTSamples(write(tmp_path / "d", [1, 1, 1]), SampleOptions(4, whole=True))


def test_rows_have_the_lengths_and_labels_of_their_documents(tmp_path: Path) -> None:
    lengths = [3, 4, 2, 5, 2, 6]
    prefix = str(tmp_path / "c")
    write(tmp_path / "c", lengths)
    data = TokenDataModule(val=prefix, seq_length=7, batch_size=2, documents="whole")
    predicted = []
    for batch in data.val_dataloader():
        for tokens, labels, sizes in zip(*batch.values(), strict=True):
            ends = sizes.cumsum(0)[sizes > 0]
            has_label = labels != -100
            assert torch.equal(tokens[has_label] + 1, labels[has_label])
            # The last token of each document has no label, except in the last document of a row.
            assert not has_label[ends[:-1] - 1].any()
            assert int(has_label.sum()) == int(sizes.sum()) - max(len(ends) - 1, 0)
            predicted += labels[has_label].tolist()
    firsts = set(np.cumsum([0, *lengths[:-1]]).tolist())
    assert sorted(predicted) == sorted(set(range(sum(lengths))) - firsts)


def test_a_killed_run_continues_with_the_next_row(tmp_path: Path) -> None:
    write(tmp_path / "c", [7, 3, 2, 9, 4, 4, 2, 12, 3, 5] * 4)

    def fit(*callbacks: StopAfter, path: Path | None = None) -> list[list[int]]:
        data = TokenDataModule(
            str(tmp_path / "c"), seq_length=8, batch_size=4, documents="whole",
            balance_attention=True,
        )  # fmt: skip
        return run(
            FirstTokenRecorder(), data, make_trainer(tmp_path, *callbacks, max_steps=9), path
        )

    uninterrupted = fit()
    first = fit(StopAfter(5, tmp_path / "killed.ckpt"))
    assert first + fit(path=tmp_path / "killed.ckpt") == uninterrupted


def test_blends_of_whole_documents_have_every_token_once(tmp_path: Path) -> None:
    corpora = [
        (write(tmp_path / "a", [5, 3, 8]), None),
        (write(tmp_path / "b", [4, 9, 2, 2], first=1000), None),
    ]
    options = SampleOptions(8, whole=True, cache_dir=str(tmp_path / "cache"))
    once = blend_samples(corpora, None, options)
    tokens = [token for row in range(len(once)) for token in once[row].tolist()]
    assert sorted(tokens) == [*range(16), *range(1000, 1017)]
    weighted = blend_samples(corpora, [1.0, 1.0], options)
    assert len(weighted) == len(once)
    plain = blend_samples(corpora, None, SampleOptions(8))
    assert once.order_key != plain.order_key


def test_whole_documents_in_the_order_of_megatron_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="whose samples cross the ends"):
        TokenDataModule("c", documents="whole", order="megatron")
