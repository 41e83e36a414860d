"""Samples have the right tokens, reject invalid ids, and cache their index under a full key."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_megatron.data import samples as samples_module
from lightning_megatron.data.blended_samples import blend_samples
from lightning_megatron.data.samples import GPTSamples, SampleOptions
from lightning_megatron.data.token_file import TokenFile, TokenFileWriter
from lightning_megatron.errors import CorruptDataError, UnsupportedError


def write(prefix: Path, lengths: list[int], first: int = 0) -> TokenFile:
    """Write documents of ascending tokens."""
    with TokenFileWriter(prefix, dtype="i4") as writer:
        for length in lengths:
            writer.add_document(np.arange(first, first + length))
            first += length
    return TokenFile(prefix)


def test_sequential_samples_overlap_in_one_token(tmp_path: Path) -> None:
    samples = GPTSamples(write(tmp_path / "c", [3, 0, 5, 2]), SampleOptions(4, order="sequential"))
    assert [samples[i].tolist() for i in range(len(samples))] == [
        [0, 1, 2, 3, 4],
        [4, 5, 6, 7, 8],
        [8, 9],
    ]
    with pytest.raises(IndexError):
        samples[3]


@pytest.mark.parametrize("order", ["passes", "megatron"])
def test_one_epoch_has_every_window_once(tmp_path: Path, order: str) -> None:
    lengths = [7, 1, 12, 4, 9]
    samples = GPTSamples(write(tmp_path / "c", lengths), SampleOptions(4, order=order))  # type: ignore[arg-type]
    assert len(samples) == (sum(lengths) - 1) // 4
    windows = [samples[i].tolist() for i in range(len(samples))]
    assert all(len(window) == 5 for window in windows)
    predicted = [token for window in windows for token in window[1:]]
    assert len(predicted) == len(set(predicted))


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(lambda x: sum(x) > 1),
    n=st.integers(1, 25),
)
def test_any_number_of_samples_is_possible(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], n: int
) -> None:
    corpus = write(tmp_path_factory.mktemp("c") / "c", lengths)
    samples = GPTSamples(corpus, SampleOptions(3), num_samples=n)
    assert [len(samples[i]) for i in range(len(samples))] == [4] * n


def test_documents_of_several_sequences_are_read_completely(tmp_path: Path) -> None:
    with TokenFileWriter(tmp_path / "c", vocab_size=100) as writer:
        writer.add_document(np.arange(10), lengths=[4, 6])
        writer.add_document(np.arange(50, 55), lengths=[2, 3])
    train = GPTSamples(TokenFile(tmp_path / "c"), SampleOptions(9), documents=range(1))
    assert train[0].tolist() == list(range(10))


def test_samples_of_a_document_range_have_only_its_tokens(tmp_path: Path) -> None:
    corpus = write(tmp_path / "c", [4, 0, 6, 5])
    assert len(corpus.document_starts) == 4  # the empty document has nothing to split
    assert GPTSamples(corpus, SampleOptions(5, order="sequential"), range(1, 2))[0].tolist() == [
        4,
        5,
        6,
        7,
        8,
        9,
    ]


def test_too_few_tokens_are_refused_with_the_count(tmp_path: Path) -> None:
    with pytest.raises(
        CorruptDataError, match=r"has 4 tokens in documents \[0, 1\); one window .* needs 9"
    ):
        GPTSamples(write(tmp_path / "c", [4]), SampleOptions(8))


def test_ids_beyond_the_vocabulary_are_refused_when_read(tmp_path: Path) -> None:
    samples = GPTSamples(
        write(tmp_path / "c", [20]), SampleOptions(4, order="sequential", vocab_size=10)
    )
    assert samples[1].tolist() == [4, 5, 6, 7, 8]
    with pytest.raises(
        CorruptDataError, match=r"vocabulary of 10 tokens: sample 2 .* holds 8 to 12"
    ):
        samples[2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seq_length": 0}, "seq_length"),
        ({"seed": -1}, "seed of data"),
        ({"order": "random"}, "order must be"),
    ],
)
def test_invalid_options_raise(change: dict[str, object], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        SampleOptions(**{"seq_length": 4, **change})  # type: ignore[arg-type]


def test_a_weighted_blend_draws_each_corpus_in_proportion_to_its_weight(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", [100]), write(tmp_path / "b", [300], first=1000)
    blended = blend_samples([(a, None), (b, None)], [0.25, 0.75], SampleOptions(4), num_samples=200)
    from_b = [bool((blended[i] >= 1000).all()) for i in range(len(blended))]
    assert (len(blended), sum(from_b)) == (200, 150)
    assert all(from_b[i] or bool((blended[i] < 1000).all()) for i in range(200))


def test_corpora_without_weights_are_used_once_each(tmp_path: Path) -> None:
    corpora = [
        (write(tmp_path / "a", [41]), None),
        (write(tmp_path / "b", [121], first=1000), None),
    ]
    blended = blend_samples(corpora, None, SampleOptions(4, order="sequential"))
    predicted = sorted(token for i in range(len(blended)) for token in blended[i][1:].tolist())
    assert predicted == [*range(1, 41), *range(1001, 1121)]


def test_the_index_is_read_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus, options = (
        write(tmp_path / "c", [50, 50]),
        SampleOptions(8, cache_dir=str(tmp_path / "cache")),
    )
    first = GPTSamples(corpus, options, num_samples=30)

    def fail(*_: object) -> None:
        raise AssertionError("the index was built again")

    monkeypatch.setattr(samples_module, "index_passes", fail)
    cached = GPTSamples(corpus, options, num_samples=30)
    assert [cached[i].tolist() for i in range(30)] == [first[i].tolist() for i in range(30)]


CHANGES = [{"seed": 1}, {"seq_length": 9}, {"order": "megatron"}, {"tokenizer": "abc"}]


@pytest.mark.parametrize("change", CHANGES)
def test_the_cache_key_has_every_option(tmp_path: Path, change: dict[str, object]) -> None:
    corpus, cache = write(tmp_path / "c", [50, 50]), tmp_path / "cache"
    options = SampleOptions(8, cache_dir=str(cache))
    base = GPTSamples(corpus, options, num_samples=30)
    changed = GPTSamples(corpus, dataclasses.replace(options, **change), num_samples=30)  # type: ignore[arg-type]
    assert len([path for path in cache.iterdir() if path.is_dir()]) == 2
    assert base.order_key != changed.order_key


def test_the_cache_key_has_document_range_sample_count_and_corpus(tmp_path: Path) -> None:
    corpus, cache = write(tmp_path / "c", [50, 50]), tmp_path / "cache"
    options = SampleOptions(8, cache_dir=str(cache))
    base = GPTSamples(corpus, options, num_samples=30)
    GPTSamples(corpus, options, range(1), num_samples=30)
    longer = GPTSamples(corpus, options, num_samples=31)
    changed = GPTSamples(write(tmp_path / "c", [60, 40]), options, num_samples=30)
    assert len([path for path in cache.iterdir() if path.is_dir()]) == 4
    # More samples continue the same order; another corpus has another order.
    assert base.order_key == longer.order_key != changed.order_key


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "json"])
def test_a_damaged_cache_is_built_again_with_a_log_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    corpus, cache = write(tmp_path / "c", [50, 50]), tmp_path / "cache"
    options = SampleOptions(8, cache_dir=str(cache))
    expected = [
        window.tolist()
        for window in map(GPTSamples(corpus, options, num_samples=9).__getitem__, range(9))
    ]
    folder = next(path for path in cache.iterdir() if path.is_dir())
    path = folder / ("index.json" if damage == "json" else "shuffle.npy")
    content = path.read_bytes()
    if damage == "remove":
        path.unlink()
    else:
        path.write_bytes(
            content[:-1] + bytes([content[-1] ^ 1]) if damage == "flip" else content[:-3]
        )
    with caplog.at_level(logging.WARNING, logger="lightning_megatron"):
        samples = GPTSamples(corpus, options, num_samples=9)
        assert "is damaged" in caplog.text
        assert [samples[i].tolist() for i in range(9)] == expected
        caplog.clear()
        GPTSamples(corpus, options, num_samples=9)
    assert caplog.text == ""


def test_an_existing_cache_is_read_without_writing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    corpus, cache = write(tmp_path / "c", [50]), tmp_path / "cache"
    options = SampleOptions(8, cache_dir=str(cache))
    GPTSamples(corpus, options, num_samples=3)
    for lock in cache.glob("*.lock"):
        lock.unlink()
    GPTSamples(corpus, options, num_samples=3)
    assert not list(cache.glob("*.lock"))
    assert caplog.text == ""


def test_without_a_writable_cache_the_index_stays_in_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    options = SampleOptions(8, cache_dir=str(tmp_path / "file" / "cache"))
    assert len(GPTSamples(write(tmp_path / "c", [50]), options, num_samples=3)) == 3
    assert "is built in memory" in caplog.text
