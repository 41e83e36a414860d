"""Documents are cut as by Megatron's build_mapping; a larger count extends the samples."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_megatron.data.pair_index import PairRule, cut_documents, index_pairs, target_lengths

RULE = PairRule(max_target=20, min_sentences=2, short_probability=0.3, seed=7)
DOCUMENTS = st.lists(st.lists(st.integers(1, 40), max_size=25), min_size=1, max_size=8)


def arrays(documents: list[list[int]]) -> tuple[Any, Any]:
    lengths = [length for document in documents for length in document]
    bounds = np.cumsum([0, *map(len, documents)])
    return np.cumsum([0, *lengths], dtype=np.int64), bounds


def slow_target(rule: PairRule, epoch: int, document: int, number: int) -> int:
    return int(target_lengths(rule, epoch, np.array([document]), number)[0])


def slow_cut(documents: list[list[int]], rule: PairRule, epoch: int) -> list[list[int]]:
    """Cut documents sentence by sentence, as build_mapping of Megatron-LM does (helpers.cpp)."""
    samples = []
    sentence = 0
    for number, document in enumerate(documents):
        end = sentence + len(document)
        if len(document) < rule.min_sentences:
            sentence = end
            continue
        num_made = 0

        start = sentence
        size = count = 0
        target = slow_target(rule, epoch, number, num_made)
        for length in document:
            size += length
            count += 1
            sentence += 1
            left = end - sentence
            is_full = size >= target and left > 1 and count >= rule.min_sentences
            if is_full or left == 0:
                samples.append([start, sentence, target])
                num_made += 1
                start = sentence
                size = count = 0
                target = slow_target(rule, epoch, number, num_made)
    return samples


@settings(deadline=None, max_examples=150)
@given(documents=DOCUMENTS, least=st.sampled_from([1, 2]), epoch=st.integers(0, 3))
def test_documents_are_cut_like_the_sentence_by_sentence_rule(
    documents: list[list[int]], least: int, epoch: int
) -> None:
    rule = replace(RULE, min_sentences=least)
    actual = cut_documents(*arrays(documents), 0, rule, epoch)
    assert actual.tolist() == slow_cut(documents, rule, epoch)


@settings(deadline=None, max_examples=50)
@given(documents=DOCUMENTS, counts=st.tuples(st.integers(1, 60), st.integers(1, 60)))
def test_larger_counts_extend_smaller_counts_and_passes_are_complete(
    documents: list[list[int]], counts: tuple[int, int]
) -> None:
    starts, bounds = arrays(documents)
    smaller, larger = (index_pairs(starts, bounds, 0, RULE, count) for count in sorted(counts))
    single_pass = index_pairs(starts, bounds, 0, RULE, None)
    if not any(len(document) >= 2 for document in documents):
        assert len(larger) == len(smaller) == len(single_pass) == 0
        return
    assert (len(smaller), len(larger)) == tuple(sorted(counts))
    assert np.array_equal(larger[: len(smaller)], smaller)
    size = min(len(single_pass), len(larger))
    assert np.array_equal(single_pass[:size], larger[:size])
    # A pass has every sentence of the documents that are used once.
    used = [number for first, stop, _ in single_pass.tolist() for number in range(first, stop)]
    pairs = zip(bounds, bounds[1:], strict=False)
    expected = [n for first, stop in pairs if stop - first >= 2 for n in range(first, stop)]
    assert sorted(used) == expected


def test_a_document_has_the_same_targets_wherever_its_range_begins() -> None:
    documents = [[5] * 9, [3] * 14, [], [8] * 6]
    starts, bounds = arrays(documents)
    all_samples = cut_documents(starts, bounds, 0, RULE, 1).tolist()
    samples_of_range = cut_documents(starts, bounds[1:], 1, RULE, 1).tolist()
    assert samples_of_range == [sample for sample in all_samples if sample[0] >= 9]
    assert samples_of_range != cut_documents(starts, bounds[1:], 0, RULE, 1).tolist()


def test_target_lengths_are_short_at_the_given_rate_and_independent() -> None:
    documents = np.arange(40_000)
    targets = target_lengths(replace(RULE, max_target=102, short_probability=0.1), 0, documents, 0)
    short = targets[targets < 102]
    # One in 101 short lengths is the full length.
    assert len(short) / len(targets) == pytest.approx(0.1 * 100 / 101, abs=0.008)
    assert (short.min(), short.max()) == (2, 101)
    assert short.mean() == pytest.approx(51.5, abs=2.5)
    variants = [
        target_lengths(replace(RULE, max_target=102, seed=8), 0, documents, 0),
        target_lengths(replace(RULE, max_target=102), 1, documents, 0),
        target_lengths(replace(RULE, max_target=102), 0, documents, 1),
        target_lengths(replace(RULE, max_target=102), 0, documents + 1, 0),
    ]
    base = target_lengths(replace(RULE, max_target=102), 0, documents, 0) < 102
    for variant in variants:
        both_short = (base & (variant < 102)).mean()
        assert both_short == pytest.approx(base.mean() ** 2, abs=0.012)
    assert (target_lengths(replace(RULE, short_probability=0.0), 0, documents, 0) == 20).all()
