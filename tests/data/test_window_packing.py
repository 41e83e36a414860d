"""Whole documents lie in spans of windows no longer than their row's longest document needs."""

from __future__ import annotations

from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_megatron.data.datamodule import TokenDataModule
from lightning_megatron.data.loader import WindowBatches
from lightning_megatron.data.packing import PackedIndex, index_packed
from lightning_megatron.data.samples import NO_TOKEN, GPTSamples, SampleOptions
from lightning_megatron.errors import ParallelPlanError, UnsupportedError
from lightning_megatron.plan.context_groups import ContextGroups, crosses
from tests.data.recorder import make_trainer, run
from tests.data.test_balance import FirstTokenRecorder
from tests.data.test_datamodule_resume import StopAfter
from tests.data.test_samples import write


def piece_positions(index: PackedIndex, row: int) -> list[tuple[int, int, int]]:
    """Return the document (-1 for a gap), first position and end of each piece of a row."""
    parts = index.parts[index.firsts[row] : index.firsts[row + 1]].tolist()
    ends = [0, *accumulate(size for _, _, size in parts)]
    return [(part[0], *ends) for part, ends in zip(parts, pairwise(ends), strict=True)]


@settings(max_examples=80, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=30),
    num_windows=st.sampled_from([2, 4, 8]),
    half_window=st.integers(1, 3),
    seed=st.sampled_from([None, 3]),
    num_passes=st.integers(1, 3),
)
def test_documents_lie_in_spans_of_windows_and_every_pass_has_every_token_once(
    lengths: list[int], num_windows: int, half_window: int, seed: int | None, num_passes: int
) -> None:
    window = 2 * half_window
    seq_length = num_windows * window
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    single_pass = index_packed(np.array(lengths), seq_length, None, seed, num_windows=num_windows)
    expected = sorted(
        token for start, size in zip(bounds, lengths, strict=False)
        for token in range(start + 1, start + size)
    )  # fmt: skip
    if not expected:
        assert single_pass.num_windows == 0
        return
    count = single_pass.num_windows * num_passes
    index = index_packed(np.array(lengths), seq_length, count, seed, num_windows=num_windows)
    for number in range(num_passes):
        predicted = []
        for row in range(number * single_pass.num_windows, (number + 1) * single_pass.num_windows):
            # The last token of a row is only a label.
            positions = [
                (n, start, min(stop, seq_length)) for n, start, stop in piece_positions(index, row)
            ]
            longest = max(stop - start for document, start, stop in positions if document >= 0)
            span = next(window * 2**power for power in range(4) if longest <= window * 2**power)
            assert all(start // span == (stop - 1) // span for _, start, stop in positions)
            pieces = index.pieces(row, bounds)
            assert sum(stop - start for start, stop in pieces) in (seq_length, seq_length + 1)
            predicted += [
                token for start, stop in pieces if start >= 0 for token in range(start + 1, stop)
            ]
        assert sorted(predicted) == expected


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(2, 33), min_size=8, max_size=60), seed=st.sampled_from([None, 3])
)
def test_groups_are_as_small_as_the_longest_document_of_a_row_allows(
    lengths: list[int], seed: int | None
) -> None:
    index = index_packed(np.array(lengths), 32, None, seed, num_windows=4)
    for row in range(index.num_windows):
        positions = piece_positions(index, row)
        longest = max(stop - start for document, start, stop in positions if document >= 0)
        borders = [0, *(min(stop, 32) for _, _, stop in positions)]
        size = ContextGroups.of(borders, 32, 4).size
        assert size == next(power for power in (1, 2, 4) if longest <= 8 * power or power == 4)


def test_documents_cross_window_borders_only_without_context_windows() -> None:
    lengths = np.array([5, 7, 6, 8, 3, 3, 5, 7, 6, 8, 3, 3])
    plain = index_packed(lengths, 32, None, 3)
    windows = index_packed(lengths, 32, None, 3, num_windows=4)

    def borders(index: PackedIndex, row: int) -> list[int]:
        return [0, *(min(stop, 32) for _, _, stop in piece_positions(index, row))]

    assert any(crosses(borders(plain, row), 8) for row in range(plain.num_windows))
    assert not any(crosses(borders(windows, row), 8) for row in range(windows.num_windows))


def test_gaps_have_no_tokens_no_labels_and_separate_lengths(tmp_path: Path) -> None:
    corpus = write(tmp_path / "c", [4, 4, 6, 4], first=10)
    options = SampleOptions(8, order="sequential", whole=True, context_windows=2)
    samples = GPTSamples(corpus, options)
    rows = [(samples[row].tolist(), samples.lengths(row)) for row in range(len(samples))]
    gap = NO_TOKEN
    assert rows == [
        ([18, 19, 20, 21, 22, 23, gap, gap], [6, 2]),
        ([10, 11, 12, 13, 14, 15, 16, 17], [4, 4]),
        ([24, 25, 26, 27, gap, gap, gap, gap], [4, 4]),
    ]
    batch = WindowBatches(samples, are_separate=True)[[0, 1, 2]]
    none = -100
    assert {name: rows.tolist() for name, rows in batch.items()} == {
        "tokens": [
            [18, 19, 20, 21, 22, 23, 0, 0],
            [10, 11, 12, 13, 14, 15, 16, 0],
            [24, 25, 26, 27, 0, 0, 0, 0],
        ],
        "labels": [
            [19, 20, 21, 22, 23, none, none, none],
            [11, 12, 13, none, 15, 16, 17, none],
            [25, 26, 27, *[none] * 5],
        ],
        "lengths": [[6, 1], [4, 3], [4, 3]],
    }


def test_a_killed_run_continues_with_the_next_row(tmp_path: Path) -> None:
    write(tmp_path / "c", [7, 3, 2, 9, 4, 4, 2, 12, 3, 5] * 4)

    def fit(*callbacks: StopAfter, path: Path | None = None) -> list[list[int]]:
        data = TokenDataModule(
            str(tmp_path / "c"), seq_length=16, batch_size=4, documents="whole", context_windows=4
        )
        return run(
            FirstTokenRecorder(), data, make_trainer(tmp_path, *callbacks, max_steps=7), path
        )

    uninterrupted = fit()
    first = fit(StopAfter(4, tmp_path / "killed.ckpt"))
    assert first + fit(path=tmp_path / "killed.ckpt") == uninterrupted


def test_the_number_of_context_windows_changes_the_order_key(tmp_path: Path) -> None:
    corpus = write(tmp_path / "c", [7, 3, 2, 9])
    keys = {
        GPTSamples(corpus, SampleOptions(16, whole=True, context_windows=windows)).order_key
        for windows in (1, 2, 4)
    }
    assert len(keys) == 3


def test_invalid_numbers_of_windows_raise() -> None:
    with pytest.raises(ParallelPlanError, match=r"must be a power of two.* Use 4 or 8\.$"):
        TokenDataModule("c", seq_length=24, documents="whole", context_windows=6)
    with pytest.raises(ParallelPlanError, match=r"2 \* context_windows \(8\).* Use 16 or 24\.$"):
        TokenDataModule("c", seq_length=20, documents="whole", context_windows=4)
    with pytest.raises(UnsupportedError, match="needs documents='whole'"):
        TokenDataModule("c", seq_length=16, documents="separate", context_windows=4)


def test_rows_of_a_large_corpus_are_nearly_full() -> None:
    generator = np.random.RandomState(1)
    lengths = np.clip(generator.lognormal(np.log(400), 1.0, 20_000), 2, 8192).astype(np.int64)
    index = index_packed(lengths, 8192, None, 3, num_windows=4)
    filled = int(lengths.sum()) / (index.num_windows * 8192)
    assert filled > 0.98
    assert torch.tensor(index.firsts).diff().min() > 0
