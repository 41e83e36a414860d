"""Windows, orders and splits equal Megatron's, and are exact where Megatron rounds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_megatron.data.windows import (
    index_as_megatron,
    index_once,
    index_one_pass,
    index_passes,
    num_epochs,
    num_windows,
    shuffle_documents,
    shuffle_windows,
    split_range,
    window_starts,
)

some_lengths = st.lists(st.integers(0, 12), min_size=1, max_size=8).filter(
    lambda sizes: sum(sizes) > 1
)


@pytest.mark.parametrize(
    ("lengths", "seq_length", "expected"),
    [
        ([3, 5, 2], 4, [[0, 0], [1, 1], [2, 0]]),
        ([3, 5, 2], 3, [[0, 0], [1, 0], [1, 3], [2, 1]]),
        ([3, 0, 5], 3, [[0, 0], [2, 0], [2, 3]]),
    ],
)
def test_window_starts_match_megatron(
    lengths: list[int], seq_length: int, expected: list[list[int]]
) -> None:
    starts = window_starts(lengths, [0, 1, 2], seq_length, num_windows(sum(lengths), seq_length))
    assert starts.tolist() == expected
    assert starts.dtype == np.int32


def test_shuffles_of_documents_and_windows_match_megatron() -> None:
    random = np.random.RandomState(1234)
    assert shuffle_documents(5, 3, random, False).tolist() == [
        3,
        1,
        0,
        2,
        4,
        2,
        0,
        2,
        1,
        4,
        3,
        4,
        0,
        1,
        3,
    ]
    assert shuffle_windows(7, 7, random).tolist() == [5, 1, 3, 4, 0, 6, 2]
    random = np.random.RandomState(1234)
    assert shuffle_documents(5, 3, random, True).tolist() == [
        2,
        2,
        4,
        1,
        0,
        3,
        4,
        0,
        1,
        3,
        0,
        4,
        3,
        2,
        1,
    ]
    assert shuffle_windows(5, 7, random).tolist() == [1, 3, 2, 0, 4, 6, 5]


def test_window_counts_are_exact_where_float32_is_one_short() -> None:
    assert num_windows(67_111_941, 1024, drop_last=False) == 65_540
    assert num_windows(67_111_941, 1024) == 65_539
    # Beyond 2^53, even float64 would round.
    assert num_windows(2**60 + 2, 2, drop_last=True) == 2**59
    assert num_windows(2**60 + 2, 2, drop_last=False) == 2**59 + 1


@given(
    tokens=st.integers(2, 10**15), seq_length=st.integers(1, 10**5), samples=st.integers(1, 10**9)
)
def test_num_epochs_is_the_smallest_that_holds_the_samples(
    tokens: int, seq_length: int, samples: int
) -> None:
    epochs = num_epochs(tokens, seq_length, samples)
    assert num_windows(epochs * tokens, seq_length) >= samples
    assert epochs == 1 or num_windows((epochs - 1) * tokens, seq_length) < samples


def read(lengths: list[int], documents: np.ndarray, starts: np.ndarray, window: int) -> list[int]:
    """Return the tokens of a window, where document d has the tokens d * 100, d * 100 + 1, ..."""
    row = [int(d) * 100 + i for d in documents for i in range(lengths[d])]
    ends = np.cumsum([lengths[d] for d in documents])
    first, last = (
        int(ends[place] - lengths[documents[place]]) + int(offset)
        for place, offset in starts[window : window + 2]
    )
    return row[first : last + 1]


@settings(max_examples=60)
@given(lengths=some_lengths, seq_length=st.integers(1, 9))
def test_windows_in_order_predict_every_token_once(lengths: list[int], seq_length: int) -> None:
    index = index_once(np.array(lengths), seq_length)
    assert sorted(index_once(np.array(lengths), seq_length, seed=1).shuffle) == list(
        range(len(index.starts) - 1)
    )
    windows = [
        read(lengths, index.documents, index.starts, k) for k in range(len(index.starts) - 1)
    ]
    row = [d * 100 + i for d, size in enumerate(lengths) for i in range(size)]
    assert [token for window in windows for token in window[1:]] == row[1:]
    assert all(len(window) == seq_length + 1 for window in windows[:-1])


@settings(max_examples=60)
@given(
    lengths=some_lengths,
    seq_length=st.integers(1, 9),
    samples=st.integers(1, 30),
    additional=st.integers(0, 30),
)
def test_larger_sample_counts_only_extend_the_passes(
    lengths: list[int], seq_length: int, samples: int, additional: int
) -> None:
    smaller = index_passes(np.array(lengths), seq_length, samples, seed=5)
    larger = index_passes(np.array(lengths), seq_length, samples + additional, seed=5)
    assert len(smaller.shuffle) == samples
    assert larger.shuffle[:samples].tolist() == smaller.shuffle.tolist()
    for window in smaller.shuffle:
        expected = read(lengths, smaller.documents, smaller.starts, window)
        assert read(lengths, larger.documents, larger.starts, window) == expected
        assert len(expected) == seq_length + 1


def test_each_pass_has_every_document_and_window_once() -> None:
    lengths = np.full(10, 8)
    index = index_passes(lengths, 8, 30, seed=1)
    for number in range(3):
        assert sorted(index.documents[10 * number : 10 * number + 10]) == list(range(10))
        assert sorted(index.shuffle[10 * number : 10 * number + 10]) == list(
            range(10 * number, 10 * number + 10)
        )
    assert index.documents[:10].tolist() != index.documents[10:20].tolist()


def test_a_single_pass_has_every_document_and_window_once() -> None:
    index = index_one_pass(np.array([5, 4]), 4, seed=0)
    assert sorted(index.shuffle) == [0, 1]
    assert sorted(index.documents) == [0, 1]


@settings(max_examples=60)
@given(lengths=some_lengths, seq_length=st.integers(1, 9), samples=st.integers(1, 40))
def test_the_order_of_megatron_has_at_least_the_requested_samples(
    lengths: list[int], seq_length: int, samples: int
) -> None:
    index = index_as_megatron(np.array(lengths), seq_length, samples, seed=3)
    count = len(index.starts) - 1
    assert count >= samples
    assert sorted(index.shuffle) == list(range(count))
    assert all(
        len(read(lengths, index.documents, index.starts, k)) == seq_length + 1 for k in range(count)
    )


def test_splits_are_exact_and_include_every_document() -> None:
    assert split_range(1000, "980,15,5") == (range(980), range(980, 995), range(995, 1000))
    assert split_range(3, "1,1,1") == (range(1), range(1, 2), range(2, 3))
    assert split_range(10, "1,0,0") == (range(10), range(10, 10), range(10, 10))
    # In floating point, 0.1 + 0.2 > 0.3.
    assert split_range(10, "0.1,0.2,0.7") == (range(1), range(1, 3), range(3, 10))
    # 2^53 + 1 is not a floating-point number.
    assert split_range(2**53 + 1, "1,0")[0] == range(2**53 + 1)


@given(
    count=st.integers(0, 10**12),
    weights=st.lists(st.integers(0, 1000), min_size=1, max_size=4).filter(any),
)
def test_splits_cover_all_documents(count: int, weights: list[int]) -> None:
    parts = split_range(count, ",".join(map(str, weights)))
    assert parts[0].start == 0
    assert parts[-1].stop == count
    assert all(a.stop == b.start for a, b in zip(parts, parts[1:], strict=False))
    total = sum(weights)
    assert all(
        abs(len(part) * total - count * weight) <= total
        for part, weight in zip(parts, weights, strict=True)
    )


@pytest.mark.parametrize("weights", ["0,0", "1,-1"])
def test_invalid_splits_raise(weights: str) -> None:
    with pytest.raises(ValueError, match="split weights"):
        split_range(10, weights)
