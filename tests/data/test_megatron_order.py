"""Windows, orders, splits and blends equal those of megatron-core 0.16.1, or are exact where it rounds.

The expected values are those of its BlendedMegatronDatasetBuilder over these corpora (with
blend_per_split, or blend and split), helpers.cpp, and parse_and_normalize_split with
convert_split_vector_to_split_matrix.
"""

from __future__ import annotations

import math
import zlib
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_megatron.data.blend import blend, blend_exhaustively, integer_weights, occurrences
from lightning_megatron.data.datamodule import TokenDataModule
from lightning_megatron.data.megatron_order import (
    blend_as_megatron,
    blend_exhaustively_as_megatron,
    normalize,
    split_as_megatron,
)
from lightning_megatron.data.token_file import TokenFileWriter
from lightning_megatron.data.windows import (
    index_as_megatron,
    index_once,
    index_passes,
    num_epochs,
    num_windows,
    split_range,
)
from tests.refusals import check_refusals

# Documents as lengths of their sequences, which are shuffled; tokens rise from 0 and from 1000.
DOCUMENTS = {
    "a": (0, [[3, 4], [5], [2, 2, 7], [9], [1, 6], [4, 4, 4]] * 3),
    "b": (1000, [[6], [1, 1, 8], [], [5, 3], [10]] * 3),
}
LENGTHS = st.lists(st.integers(0, 12), min_size=1, max_size=8).filter(lambda sizes: sum(sizes) > 1)


def write(folder: Path, name: str, token: int, documents: list[list[int]]) -> str:
    """Write documents of rising tokens, given as lengths of their sequences."""
    with TokenFileWriter(folder / name, dtype="i4") as writer:
        for lengths in documents:
            writer.add_document(np.arange(token, token + sum(lengths)), lengths=lengths)
            token += sum(lengths)
    return str(folder / name)


# Corpora, weights, split, requested samples; number of windows, first tokens of the first 12
# windows, CRC-32 of all windows as 64-bit integers.
GOLDEN: list[tuple[str, list[float] | None, str | None, int | None, int, list[int], int]] = [
    ("a", None, None, None, 25, [149, 52, 77, 11, 50, 71, 105, 120, 20, 1, 89, 25], 88036341),
    ("a", None, None, 70, 70, [116, 73, 76, 49, 3, 30, 117, 112, 111, 105, 142, 144], 1794080181),
    ("a", None, "80,10,10", 40, 40, [36, 14, 113, 78, 94, 19, 55, 59, 79, 92, 100, 11], 282306315),
    # With a weight, a single corpus with a split has more windows, here one more epoch.
    ("a", None, "80,10,10", 58, 58, [31, 63, 77, 95, 45, 104, 29, 87, 58, 3, 23, 103], 4243324719),
    ("a", [1.0], "80,10,10", 58, 58, [106, 63, 15, 25, 33, 46, 70, 3, 41, 58, 45, 41], 3815429840),
    ("ab", [0.7, 0.3], None, 60, 60, [89, 1000, 113, 52, 1013, 20, 77, 1082, 149, 105, 115, 1069], 942611696),
    ("ab", [2.0, 1.0], "7,2,1", 60, 60, [81, 1073, 99, 19, 1058, 37, 46, 1013, 27, 91, 1055, 6], 1428638257),
    ("ab", None, None, None, 41, [149, 1061, 52, 1045, 77, 11, 1101, 50, 1022, 71, 105, 1090], 3739637134),
    ("ab", None, None, 30, 30, [149, 1061, 52, 1045, 77, 11, 1101, 50, 1022, 71, 105, 1090], 3490849211),
    # Without weights, a blend has at most one epoch.
    ("ab", None, None, 500, 41, [149, 1061, 52, 1045, 77, 11, 1101, 50, 1022, 71, 105, 1090], 3739637134),
]  # fmt: skip


@pytest.mark.parametrize("case", GOLDEN, ids=str)
def test_training_windows_match_megatron_core(tmp_path, case):
    names, weights, split, size, count, firsts, checksum = case
    prefixes = [write(tmp_path, name, *DOCUMENTS[name]) for name in names]
    train = prefixes if weights is None else dict(zip(prefixes, weights, strict=True))

    def windows() -> list[list[int]]:
        options = {"seq_length": 6, "seed": 42, "split": split, "train_samples": size}
        data = TokenDataModule(train, order="megatron", **options)
        samples = data.train_dataloader().batches.samples
        return [samples[i].tolist() for i in range(len(samples))]

    first = windows()
    assert len(first) == count
    assert [window[0] for window in first[:12]] == firsts
    assert zlib.crc32(np.array(first, dtype="<i8").tobytes()) == checksum
    assert windows() == first, "the second call reads the index from the cache"


def test_splits_round_like_double_precision_or_are_exact():
    for split, count, weights, bounds in (
        (split_as_megatron, 30, "90,5,5", [0, 27, 29, 30]),
        (split_as_megatron, 10, "0.1,0.2,0.7", [0, 1, 3, 10]),
        (split_as_megatron, 50, "969,30,1", [0, 48, 50, 50]),
        (split_as_megatron, 45, "0.7,.2,.1", [0, 32, 41, 45]),
        (split_as_megatron, 7, "1", [0, 7, 7, 7]),
        (split_range, 30, "90,5,5", [0, 27, 28, 30]),
        (split_range, 10, "1,0,0", [0, 10, 10, 10]),
        # In floating point, 0.1 + 0.2 > 0.3, and 2^53 + 1 is no number.
        (split_range, 10, "0.1,0.2,0.7", [0, 1, 3, 10]),
        (split_range, 2**53 + 1, "1,0,0", [0, *[2**53 + 1] * 3]),
    ):
        assert list(split(count, weights)) == [range(*pair) for pair in pairwise(bounds)]


@given(st.integers(0, 10**12), st.lists(st.integers(0, 1000), min_size=1, max_size=3).filter(any))
def test_splits_cover_all_documents(count, weights):
    parts, total = split_range(count, ",".join(map(str, weights))), sum(weights)
    assert (parts[0].start, parts[-1].stop) == (0, count)
    assert all(a.stop == b.start for a, b in pairwise(parts))
    for part, weight in zip(parts, weights, strict=False):
        assert abs(len(part) * total - count * weight) <= total


def test_blends_choose_datasets_with_the_rounding_of_doubles():
    # If both datasets lag equally, exact integers choose the first; doubles of 0.7 and 0.3
    # sometimes choose the second.
    golden = (
        "01001001000100100100010010010001001001000100100100010010010001001001000100100100010010010010001001000100"
        "10010001001001000100100100010010010001001001000100100100010010010010001001001000100100010010010001001001"
    )
    assert "".join(map(str, blend_as_megatron([0.7, 0.3], 208).tolist())) == golden
    assert blend([0.7, 0.3], 208).tolist() != blend_as_megatron([0.7, 0.3], 208).tolist()
    golden = (
        "02010002000200100200020000201000200020010020002000020100020002001002000200002010002000200100200020000201"
        "000200020010020002000"
    )
    assert "".join(map(str, blend_exhaustively_as_megatron([90, 10, 25]).tolist())) == golden
    assert blend_as_megatron([1, 3], 4).tolist() == [1, 0, 1, 1], "the second lags at the start"
    # A dataset that is used up does not come again.
    sizes = [7, 45, 10, 1]
    counts = np.bincount(blend_exhaustively_as_megatron(sizes)).tolist()
    assert counts == np.bincount(blend_exhaustively(sizes)).tolist() == sizes


@given(st.lists(st.integers(0, 50), min_size=1, max_size=5).filter(any), st.integers(1, 200))
def test_exact_blends_keep_the_shares_at_every_step(weights, size):
    choices, total = blend(weights, size).tolist(), sum(weights)
    for stop in range(1, size + 1):
        counts = [choices[:stop].count(dataset) for dataset in range(len(weights))]
        pairs = zip(weights, counts, strict=True)
        assert max(abs(w * stop - count * total) for w, count in pairs) <= len(weights) * total
    choices = blend_exhaustively(weights).tolist()
    assert [choices.count(dataset) for dataset in range(len(weights))] == weights


def test_exact_blends_of_worked_examples():
    assert blend([0.3, 0.7], 10).tolist() == [1, 0, 1, 1, 0, 1, 1, 0, 1, 1]
    assert blend([0.2, 0.5, 0.3], 500)[:123].tolist() == blend([0.2, 0.5, 0.3], 123).tolist()
    assert blend_exhaustively([2, 3, 1]).tolist() == [1, 0, 2, 1, 0, 1]
    assert integer_weights([1e-3, 0.999]) == [1, 999]
    assert occurrences(blend([1, 2, 3], 6), 3).tolist() == [0, 0, 0, 1, 1, 2]


def test_invalid_weights_and_splits_are_refused():
    wrong = [[], [1.0, -1.0], [math.nan], [math.inf, 1.0]]
    check_refusals(normalize, [((w,), "finite and positive") for w in [*wrong, [1.0, 0.0]]])
    check_refusals(blend, [((w, 3), "weights of a blend") for w in [*wrong, [0, 0]]])
    splits = ("", "a", "1,2,3,4", "1,,1", "-1,2", "1e3,1", "nan", "inf", "0,0,0", "9" * 400)
    check_refusals(split_as_megatron, [((10, split), "split weights") for split in splits])


@given(st.integers(2, 10**15), st.integers(1, 10**5), st.integers(1, 10**9))
def test_counts_of_windows_and_epochs_are_exact(tokens, seq_length, samples):
    epochs = num_epochs(tokens, seq_length, samples)
    assert num_windows(epochs * tokens, seq_length) >= samples
    assert epochs == 1 or num_windows((epochs - 1) * tokens, seq_length) < samples
    # float32 would be one short, and beyond 2^53 even float64 would round.
    assert num_windows(67_111_941, 1024, drop_last=False) == 65_540
    assert num_windows(2**60 + 2, 2, drop_last=False) == 2**59 + 1


def read(lengths: list[int], index: Any, window: int) -> list[int]:
    """Return the tokens of a window, where document d has the tokens d * 100, d * 100 + 1, ..."""
    documents = index.documents
    row = [int(d) * 100 + i for d in documents for i in range(lengths[d])]
    ends = np.cumsum([lengths[d] for d in documents])
    first, last = (
        int(ends[place] - lengths[documents[place]]) + int(offset)
        for place, offset in index.starts[window : window + 2]
    )
    return row[first : last + 1]


@given(LENGTHS, st.integers(1, 9), st.integers(1, 30), st.integers(0, 30))
def test_windows_predict_every_token_once_and_larger_counts_only_extend_the_passes(
    lengths, seq_length, samples, additional
):
    sizes = np.array(lengths)
    index = index_once(sizes, seq_length)
    count = len(index.starts) - 1
    assert sorted(index_once(sizes, seq_length, seed=1).shuffle) == list(range(count))
    windows = [read(lengths, index, number) for number in range(count)]
    row = [d * 100 + i for d, size in enumerate(lengths) for i in range(size)]
    assert [token for window in windows for token in window[1:]] == row[1:]
    assert all(len(window) == seq_length + 1 for window in windows[:-1])
    smaller, larger = (
        index_passes(sizes, seq_length, number, seed=5)
        for number in (samples, samples + additional)
    )
    assert len(smaller.shuffle) == samples
    assert larger.shuffle[:samples].tolist() == smaller.shuffle.tolist()
    for window in smaller.shuffle:
        expected = read(lengths, smaller, window)
        assert read(lengths, larger, window) == expected
        assert len(expected) == seq_length + 1
    index = index_as_megatron(sizes, seq_length, samples, seed=3)
    count = len(index.starts) - 1
    assert count >= samples
    assert sorted(index.shuffle) == list(range(count))
    assert all(len(read(lengths, index, number)) == seq_length + 1 for number in range(count))
