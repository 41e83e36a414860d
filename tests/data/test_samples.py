"""Samples have the right tokens, reject invalid ids, and cache their index under a full key."""

from __future__ import annotations

import dataclasses
import logging

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_megatron.data import samples as samples_module
from lightning_megatron.data.blended_samples import blend_samples
from lightning_megatron.data.samples import GPTSamples, SampleOptions
from lightning_megatron.data.token_file import TokenFile, TokenFileWriter
from lightning_megatron.errors import CorruptDataError
from tests.data.recorder import write_documents
from tests.refusals import check_refusals


def windows_of(samples: GPTSamples) -> list[list[int]]:
    return [samples[number].tolist() for number in range(len(samples))]


def test_sequential_samples_overlap_in_one_token(tmp_path):
    corpus = write_documents(tmp_path / "c", [3, 0, 5, 2])
    samples = GPTSamples(corpus, SampleOptions(4, order="sequential"))
    assert windows_of(samples) == [[0, 1, 2, 3, 4], [4, 5, 6, 7, 8], [8, 9]]
    with pytest.raises(IndexError):
        samples[3]
    assert len(corpus.document_starts) == 4  # the empty document has nothing to split
    (part,) = windows_of(GPTSamples(corpus, SampleOptions(4, order="sequential"), range(1, 2)))
    assert part == [3, 4, 5, 6, 7], "a range has only its tokens"
    with TokenFileWriter(tmp_path / "d", vocab_size=100) as writer:
        writer.add_document(np.arange(10), lengths=[4, 6])
        writer.add_document(np.arange(50, 55), lengths=[2, 3])
    samples = GPTSamples(TokenFile(tmp_path / "d"), SampleOptions(9), documents=range(1))
    assert samples[0].tolist() == list(range(10)), "all sequences of a document"


@pytest.mark.parametrize("order", ["passes", "megatron"])
def test_one_epoch_has_every_window_once(tmp_path, order):
    lengths = [7, 1, 12, 4, 9]
    corpus = write_documents(tmp_path / "c", lengths)
    windows = windows_of(GPTSamples(corpus, SampleOptions(4, order=order)))
    assert len(windows) == (sum(lengths) - 1) // 4
    assert all(len(window) == 5 for window in windows)
    predicted = [token for window in windows for token in window[1:]]
    assert len(predicted) == len(set(predicted))


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(lambda sizes: sum(sizes) > 1),
    st.integers(1, 25),
)
def test_any_number_of_samples_is_possible(tmp_path_factory, lengths, number):
    corpus = write_documents(tmp_path_factory.mktemp("c") / "c", lengths)
    samples = GPTSamples(corpus, SampleOptions(3), num_samples=number)
    assert list(map(len, windows_of(samples))) == [4] * number


def test_few_tokens_wrong_ids_and_invalid_options_are_refused(tmp_path):
    with pytest.raises(CorruptDataError, match=r"has 4 tokens in documents \[0, 1\); .* needs 9"):
        GPTSamples(write_documents(tmp_path / "c", [4]), SampleOptions(8))
    options = SampleOptions(4, order="sequential", vocab_size=10)
    samples = GPTSamples(write_documents(tmp_path / "d", [20]), options)
    assert samples[1].tolist() == [4, 5, 6, 7, 8]
    with pytest.raises(CorruptDataError, match=r"of 10 tokens: sample 2 .* holds 8 to 12"):
        samples[2]
    wrong = [
        ({"seq_length": 0}, "seq_length"),
        ({"seed": -1}, "seed of data"),
        ({"order": "random"}, "order must be"),
    ]
    check_refusals(SampleOptions, [({"seq_length": 4, **each}, phrase) for each, phrase in wrong])


def test_blends_have_the_shares_of_weights_or_every_token_once(tmp_path):
    a, b = (
        write_documents(tmp_path / "a", [100]),
        write_documents(tmp_path / "b", [300], first=1000),
    )
    corpora = [(a, None), (b, None)]
    blended = blend_samples(corpora, [0.25, 0.75], SampleOptions(4), num_samples=200)
    from_b = [bool((blended[i] >= 1000).all()) for i in range(len(blended))]
    assert (len(blended), sum(from_b)) == (200, 150)
    assert all(from_b[i] or bool((blended[i] < 1000).all()) for i in range(200))
    once = blend_samples(corpora, None, SampleOptions(3, order="sequential"))
    predicted = sorted(token for i in range(len(once)) for token in once[i][1:].tolist())
    assert predicted == [*range(1, 100), *range(1001, 1300)]


def test_the_index_is_cached_under_a_key_with_every_option(tmp_path, monkeypatch, caplog):
    corpus, cache = write_documents(tmp_path / "c", [50, 50]), tmp_path / "cache"
    options = SampleOptions(8, cache_dir=str(cache))
    first = GPTSamples(corpus, options, num_samples=30)

    def num_indices() -> int:
        return sum(path.is_dir() for path in cache.iterdir())

    for change in ({"seed": 1}, {"seq_length": 9}, {"order": "megatron"}, {"tokenizer": "abc"}):
        before = num_indices()
        changed = GPTSamples(corpus, dataclasses.replace(options, **change), num_samples=30)
        assert num_indices() == before + 1, change
        assert first.order_key != changed.order_key
    before = num_indices()
    GPTSamples(corpus, options, range(1), num_samples=30)
    longer = GPTSamples(corpus, options, num_samples=31)
    other = write_documents(tmp_path / "d", [60, 40])
    assert first.order_key != GPTSamples(other, options, num_samples=30).order_key
    assert num_indices() == before + 3
    assert first.order_key == longer.order_key, "more samples continue the same order"

    def fail(*_: object) -> None:
        raise AssertionError("the index was built again")

    monkeypatch.setattr(samples_module, "index_passes", fail)
    for lock in cache.glob("*.lock"):
        lock.unlink()
    assert windows_of(GPTSamples(corpus, options, num_samples=30)) == windows_of(first)
    assert not list(cache.glob("*.lock")), "an existing cache is read without writing"
    assert caplog.text == ""


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "json"])
def test_a_damaged_cache_is_built_again_with_a_log_line(tmp_path, caplog, damage):
    corpus, cache = write_documents(tmp_path / "c", [50, 50]), tmp_path / "cache"
    options = SampleOptions(8, cache_dir=str(cache))
    expected = windows_of(GPTSamples(corpus, options, num_samples=9))
    folder = next(path for path in cache.iterdir() if path.is_dir())
    path = folder / ("index.json" if damage == "json" else "shuffle.npy")
    content = path.read_bytes()
    flipped = content[:-1] + bytes([content[-1] ^ 1])
    path.write_bytes(flipped if damage == "flip" else content[:-3])
    if damage == "remove":
        path.unlink()
    with caplog.at_level(logging.WARNING, logger="lightning_megatron"):
        samples = GPTSamples(corpus, options, num_samples=9)
        assert "is damaged" in caplog.text
        assert windows_of(samples) == expected
        caplog.clear()
        GPTSamples(corpus, options, num_samples=9)
    assert caplog.text == ""


def test_without_a_writable_cache_the_index_stays_in_memory(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    options = SampleOptions(8, cache_dir=str(tmp_path / "file" / "cache"))
    assert len(GPTSamples(write_documents(tmp_path / "c", [50]), options, num_samples=3)) == 3
    assert "is built in memory" in caplog.text
