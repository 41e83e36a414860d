"""Order "megatron" takes the samples of Megatron-Core: by sequence, with its splits, blends and
shuffles.

The expected values are those of megatron-core 0.16.1: its BlendedMegatronDatasetBuilder over these
corpora (with blend_per_split, or blend and split), helpers.cpp, and parse_and_normalize_split with
convert_split_vector_to_split_matrix.
"""

from __future__ import annotations

import math
import random
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_megatron.data.blend import blend, blend_exhaustively
from lightning_megatron.data.blended_samples import blend_samples
from lightning_megatron.data.datamodule import TokenDataModule
from lightning_megatron.data.megatron_order import (
    blend_as_megatron,
    blend_exhaustively_as_megatron,
    normalize,
    split_as_megatron,
)
from lightning_megatron.data.samples import SampleOptions
from lightning_megatron.data.token_file import TokenFile, TokenFileWriter
from lightning_megatron.data.windows import split_range
from lightning_megatron.errors import UnsupportedError

# Documents as lengths of their sequences; tokens rise from 0 and from 1000.
DOCUMENTS = {
    "a": (0, [[3, 4], [5], [2, 2, 7], [9], [1, 6], [4, 4, 4]] * 3),
    "b": (1000, [[6], [1, 1, 8], [], [5, 3], [10]] * 3),
}


def write(folder: Path, name: str) -> str:
    token, documents = DOCUMENTS[name]
    with TokenFileWriter(folder / name, dtype="i4") as writer:
        for lengths in documents:
            writer.add_document(np.arange(token, token + sum(lengths)), lengths=lengths)
            token += sum(lengths)
    return str(folder / name)


def training_windows(train: Any, **options: Any) -> list[list[int]]:
    data = TokenDataModule(train, seq_length=6, seed=42, **options)
    samples = data.train_dataloader().batches.samples
    return [samples[i].tolist() for i in range(len(samples))]


# Corpora, weights, split, requested samples; number of windows, first tokens of the first 12
# windows, CRC-32 of all windows as 64-bit integers.
GOLDEN: list[tuple[str, list[float] | None, str | None, int | None, int, list[int], int]] = [
    ("a", None, None, None, 25, [149, 52, 77, 11, 50, 71, 105, 120, 20, 1, 89, 25], 88036341),
    ("a", None, None, 70, 70, [116, 73, 76, 49, 3, 30, 117, 112, 111, 105, 142, 144], 1794080181),
    ("a", None, "80,10,10", 40, 40, [36, 14, 113, 78, 94, 19, 55, 59, 79, 92, 100, 11], 282306315),
    # With a weight, a single corpus with a split has more windows, here one more epoch.
    ("a", None, "80,10,10", 58, 58, [31, 63, 77, 95, 45, 104, 29, 87, 58, 3, 23, 103], 4243324719),
    ("a", [1.0], "80,10,10", 58, 58, [106, 63, 15, 25, 33, 46, 70, 3, 41, 58, 45, 41], 3815429840),
    (
        "ab",
        [0.7, 0.3],
        None,
        60,
        60,
        [89, 1000, 113, 52, 1013, 20, 77, 1082, 149, 105, 115, 1069],
        942611696,
    ),
    (
        "ab",
        [2.0, 1.0],
        "7,2,1",
        60,
        60,
        [81, 1073, 99, 19, 1058, 37, 46, 1013, 27, 91, 1055, 6],
        1428638257,
    ),
    (
        "ab",
        None,
        None,
        None,
        41,
        [149, 1061, 52, 1045, 77, 11, 1101, 50, 1022, 71, 105, 1090],
        3739637134,
    ),
    (
        "ab",
        None,
        None,
        30,
        30,
        [149, 1061, 52, 1045, 77, 11, 1101, 50, 1022, 71, 105, 1090],
        3490849211,
    ),
    # Without weights, a blend has at most one epoch.
    (
        "ab",
        None,
        None,
        500,
        41,
        [149, 1061, 52, 1045, 77, 11, 1101, 50, 1022, 71, 105, 1090],
        3739637134,
    ),
]


@pytest.mark.parametrize(
    ("names", "weights", "split", "size", "count", "firsts", "checksum"), GOLDEN
)
def test_training_windows_match_megatron_core(
    tmp_path: Path,
    names: str,
    weights: list[float] | None,
    split: str | None,
    size: int | None,
    count: int,
    firsts: list[int],
    checksum: int,
) -> None:
    prefixes = [write(tmp_path, name) for name in names]
    train = prefixes if weights is None else dict(zip(prefixes, weights, strict=True))
    windows = training_windows(train, split=split, order="megatron", train_samples=size)
    assert len(windows) == count
    assert [window[0] for window in windows[:12]] == firsts
    assert zlib.crc32(np.array(windows, dtype="<i8").tobytes()) == checksum
    # The second call reads the index from the cache.
    assert training_windows(train, split=split, order="megatron", train_samples=size) == windows


def windows_by_the_rule_of_megatron(
    sequences: list[list[int]], seq_length: int, size: int, seed: int
) -> list[list[int]]:
    """Return windows of one corpus: epochs of shuffled sequences are joined, cut and shuffled."""
    tokens = sum(map(len, sequences))
    epochs = 1
    while epochs * tokens < size * seq_length + 1:
        epochs += 1
    before = ((epochs - 1) * tokens - 1) // seq_length
    is_last_epoch_apart = epochs > 1 and size - before < int(0.8 * ((tokens - 1) // seq_length))
    numbers = np.random.RandomState(seed)
    order: list[int] = []
    for group in [epochs - 1, 1] if is_last_epoch_apart else [epochs]:
        part = np.tile(np.arange(len(sequences), dtype=np.int32), group)
        numbers.shuffle(part)
        order += part.tolist()
    row = [token for number in order for token in sequences[number]]
    count = (epochs * tokens - 1) // seq_length
    positions: list[int] = []
    for start, stop in [(0, before), (before, count)] if is_last_epoch_apart else [(0, count)]:
        part = np.arange(start, stop, dtype=np.uint32)
        numbers.shuffle(part)
        positions += part.tolist()
    return [
        row[position * seq_length : (position + 1) * seq_length + 1]
        for position in positions[:size]
    ]


def test_documents_of_several_sequences_are_shuffled_by_sequence(tmp_path: Path) -> None:
    chance = random.Random(14)
    for case in range(40):
        sequences: list[list[int]] = []
        prefix = tmp_path / str(case)
        with TokenFileWriter(prefix, dtype="i4") as writer:
            for _ in range(chance.randint(2, 20)):
                lengths = [chance.randint(1, 12) for _ in range(chance.randint(1, 4))]
                first = sum(map(len, sequences))
                writer.add_document(np.arange(first, first + sum(lengths)), lengths=lengths)
                for length in lengths:
                    sequences.append(list(range(first, first + length)))
                    first += length
        seq_length, size, seed = (
            chance.randint(2, 9),
            chance.randint(1, 120),
            chance.randrange(10**6),
        )
        options = SampleOptions(seq_length, seed=seed, order="megatron")
        samples = blend_samples([(TokenFile(prefix), None)], None, options, size)
        actual = [samples[i].tolist() for i in range(len(samples))]
        assert actual == windows_by_the_rule_of_megatron(sequences, seq_length, size, seed)


@pytest.mark.parametrize(
    ("count", "weights", "bounds"),
    [
        (30, "90,5,5", [0, 27, 29, 30]),
        (10, "0.1,0.2,0.7", [0, 1, 3, 10]),
        (1000, "980,15,5", [0, 980, 995, 1000]),
        (50, "969,30,1", [0, 48, 50, 50]),
        (40, "70, 20, 10", [0, 28, 36, 40]),
        (30, "94,3,3", [0, 28, 29, 30]),
        (45, "0.7,.2,.1", [0, 32, 41, 45]),
        (7, "1", [0, 7, 7, 7]),
    ],
)
def test_splits_round_like_double_precision(count: int, weights: str, bounds: list[int]) -> None:
    expected = [range(start, stop) for start, stop in zip(bounds, bounds[1:], strict=False)]
    assert list(split_as_megatron(count, weights)) == expected


def test_exact_splits_differ_where_doubles_round() -> None:
    assert split_range(30, "90,5,5")[1] == range(27, 28)
    assert split_as_megatron(30, "90,5,5")[1] == range(27, 29)


def choices_by_the_rule_of_megatron(
    weights: list[float], size: int, limits: list[int] | None = None
) -> list[int]:
    counts, chosen = [0] * len(weights), []
    for step in range(size):
        lags = [
            weight * max(float(step), 1.0) - float(count)
            for weight, count in zip(weights, counts, strict=True)
        ]
        if limits is not None:
            pairs = zip(lags, counts, limits, strict=True)
            lags = [-math.inf if count == limit else lag for lag, count, limit in pairs]
        chosen.append(lags.index(max(lags)))
        counts[chosen[-1]] += 1
    return chosen


def test_blends_choose_datasets_with_the_rounding_of_doubles() -> None:
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
    chance, num_different = random.Random(15), 0
    for _ in range(60):
        weights = [
            chance.choice([chance.randint(1, 9) / 10, chance.random()])
            for _ in range(chance.randint(1, 5))
        ]
        shares = (np.array(weights) / np.sum(np.array(weights))).tolist()
        assert blend_as_megatron(weights, 200).tolist() == choices_by_the_rule_of_megatron(
            shares, 200
        )
        sizes = [chance.randint(1, 60) for _ in weights]
        shares = [size / sum(sizes) for size in sizes]
        actual = blend_exhaustively_as_megatron(sizes).tolist()
        assert actual == choices_by_the_rule_of_megatron(shares, sum(sizes), sizes)
        num_different += actual != blend_exhaustively(sizes).tolist()
    assert num_different


@pytest.mark.parametrize("weights", [[], [1.0, 0.0], [1.0, -1.0], [math.nan], [math.inf, 1.0]])
def test_blend_weights_that_are_not_finite_and_positive_raise(weights: list[float]) -> None:
    with pytest.raises(UnsupportedError, match="finite and positive"):
        normalize(weights)


@pytest.mark.parametrize(
    "weights", ["", "a", "1,2,3,4", "1,,1", "-1,2", "1e3,1", "nan", "inf", "0,0,0", "9" * 400]
)
def test_invalid_splits_raise(weights: str) -> None:
    with pytest.raises(UnsupportedError, match="split weights"):
        split_as_megatron(10, weights)


def test_the_parts_of_a_split_share_no_token_in_either_order(tmp_path: Path) -> None:
    prefix = write(tmp_path, "a")
    for order in ("passes", "megatron"):
        data = TokenDataModule(prefix, split="60,20,20", seq_length=6, order=order)  # type: ignore[arg-type]
        loaders = [data.train_dataloader(), data.val_dataloader(), data.test_dataloader()]
        tokens_of_parts = [
            {int(token) for batch in loader for token in batch["tokens"].flatten()}
            for loader in loaders
        ]
        # Padded rows hold token 0.
        for first, second in ((0, 1), (0, 2), (1, 2)):
            assert not tokens_of_parts[first] & tokens_of_parts[second] - {0}


def test_the_order_key_ignores_by_sequence_if_documents_are_single_sequences(
    tmp_path: Path,
) -> None:
    with TokenFileWriter(tmp_path / "c", dtype="i4") as writer:
        for number in range(9):
            writer.add_document(np.arange(9) + number)
    corpora = [(TokenFile(tmp_path / "c"), None)]
    keys = [
        blend_samples(
            corpora, None, SampleOptions(4, order="spread", by_sequence=by_sequence)
        ).order_key
        for by_sequence in (False, True)
    ]
    assert keys[0] == keys[1]
