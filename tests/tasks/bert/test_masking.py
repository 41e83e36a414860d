"""Documents are cut as by Megatron's build_mapping, and masks are n-grams of whole words with the
rates of Megatron-LM and BERT.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_megatron.data.tokenizer import load_tokenizer
from lightning_megatron.errors import UnsupportedError
from lightning_megatron.tasks.bert.masking import NGramMasking, WordPieces
from lightning_megatron.tasks.bert.pair_index import (
    PairRule,
    cut_documents,
    index_pairs,
    target_lengths,
)
from tests.tasks.bert.bert_corpus import VOCABULARY, write_vocabulary

CLS, SEP, MASK = 2, 3, 4
#: Pieces of a vocabulary of which the last 20 continue a word, as that of `write_vocabulary`.
PIECES = WordPieces(0, CLS, SEP, MASK, np.arange(VOCABULARY) >= 41)
TOKENS = st.lists(st.integers(5, VOCABULARY - 1), min_size=1, max_size=60)
SEEDS = st.integers(0, 2**32 - 1)


def row(first: list[int], second: list[int]) -> tuple[np.ndarray, list[tuple[int, int]]]:
    tokens = np.array([CLS, *first, SEP, *second, SEP])
    return tokens, [(1, 1 + len(first)), (2 + len(first), 2 + len(first) + len(second))]


def words_of(tokens: np.ndarray, segments: list[tuple[int, int]]) -> list[list[int]]:
    words: list[list[int]] = []
    for start, stop in segments:
        for position in range(start, stop):
            if position > start and PIECES.continues[tokens[position]]:
                words[-1].append(position)
            else:
                words.append([position])
    return words


@given(TOKENS, TOKENS, SEEDS, st.integers(1, 4))
def test_whole_words_of_two_segments_are_masked_up_to_the_budget(first, second, seed, max_ngram):
    tokens, segments = row(first, second)
    masking, size = NGramMasking(0.15, max_ngram), len(first) + len(second)
    masked, labels = masking.mask(tokens, segments, PIECES, np.random.RandomState(seed))
    chosen, budget = labels != -100, max(1, round(0.15 * size))
    assert chosen.sum() <= budget
    assert not chosen[np.isin(tokens, (CLS, SEP))].any()
    for word in words_of(tokens, segments):
        assert chosen[word].all() or not chosen[word].any()
    repeated = masking.mask(tokens, segments, PIECES, np.random.RandomState(seed))
    assert np.array_equal(repeated, (masked, labels))
    # Words of a single token always fit, and thus fill the budget.
    single = row(*([5 + token % 36 for token in segment] for segment in (first, second)))
    assert len(masking.choose(*single, PIECES, np.random.RandomState(seed))) == budget
    pieces = NGramMasking(0.3, 1, whole_words=False)
    chosen = pieces.choose(tokens, segments, PIECES, np.random.RandomState(seed))
    assert len(chosen) == max(1, round(0.3 * size)), "pieces one by one"


def slow_choice(
    tokens: np.ndarray, segments: list[tuple[int, int]], draw: np.random.RandomState
) -> set[int]:
    """Choose tokens word by word, as masked_dataset.py of Megatron-LM does."""
    words = [words_of(tokens, [segment]) for segment in segments]
    starts = [(number, at) for number, part in enumerate(words) for at in range(len(part))]
    draw.shuffle(starts)
    budget = max(1, round(0.15 * sum(stop - start for start, stop in segments)))
    chosen: set[int] = set()
    for number, at in starts:
        n = draw.choice([1, 2, 3], p=[6 / 11, 3 / 11, 2 / 11])
        while n:
            positions = {position for word in words[number][at : at + n] for position in word}
            if len(chosen) + len(positions) <= budget:
                break
            n -= 1
        if n and not positions & chosen:
            chosen |= positions
    return chosen


def test_masked_positions_and_runs_have_the_rates_of_the_word_by_word_rule():
    draw = np.random.RandomState(3)
    tokens, segments = row(draw.randint(5, 61, 25).tolist(), draw.randint(5, 61, 40).tolist())
    counts = {name: np.zeros(len(tokens)) for name in ("ours", "slow")}
    runs: dict[str, Counter[int]] = {"ours": Counter(), "slow": Counter()}
    num = 2000
    for seed in range(num):
        ours = NGramMasking().choose(tokens, segments, PIECES, np.random.RandomState(seed))
        slow = slow_choice(tokens, segments, np.random.RandomState(seed + num))
        for name, chosen in (("ours", ours), ("slow", np.array(sorted(slow)))):
            counts[name][chosen] += 1
            parts = np.split(chosen, np.flatnonzero(np.diff(chosen) > 1) + 1)
            runs[name].update(len(part) for part in parts)
    # Bounds are 5 standard deviations of a difference of two counts.
    error = 5 * np.sqrt(counts["ours"] + counts["slow"] + 1)
    assert (np.abs(counts["ours"] - counts["slow"]) < error).all()
    assert counts["ours"].sum() / num / 65 == pytest.approx(0.15, abs=0.01)
    for length in range(1, 8):
        pair = runs["ours"][length], runs["slow"][length]
        assert abs(pair[0] - pair[1]) < 5 * np.sqrt(sum(pair) + 1), length
    assert runs["ours"][3] > num / 2


def test_masked_tokens_are_replaced_at_the_rates_of_bert():
    draw, counts = np.random.RandomState(0), np.zeros(3)
    for seed in range(300):
        text = draw.randint(5, 41, 100).tolist()
        given = row(text[:50], text[50:])
        masked, labels = NGramMasking().mask(*given, PIECES, np.random.RandomState(seed))
        chosen = labels != -100
        counts += [chosen.sum(), (masked == MASK)[chosen].sum(), (masked == labels)[chosen].sum()]
    total, is_mask, is_same = counts
    assert total / 300 == pytest.approx(15, abs=1.0)
    # One in 61 random tokens is the mask, and another one the true token.
    assert is_mask / total == pytest.approx(0.8 + 0.1 / 61, abs=0.03)
    assert is_same / total == pytest.approx(0.1 + 0.1 / 61, abs=0.03)


def test_word_pieces_come_from_the_tokenizer(tmp_path):
    pieces = WordPieces.of(load_tokenizer(write_vocabulary(tmp_path / "vocab.txt")))
    assert (pieces.padding, pieces.start, pieces.separator, pieces.mask) == (0, CLS, SEP, MASK)
    assert np.array_equal(pieces.continues, PIECES.continues)
    assert pieces.vocab_size == VOCABULARY
    with pytest.raises(UnsupportedError, match=r"'bytes' lacks \[PAD\], \[CLS\], \[SEP\]"):
        WordPieces.of(load_tokenizer("bytes"))


RULE = PairRule(max_target=20, min_sentences=2, short_probability=0.3, seed=7)
DOCUMENTS = st.lists(st.lists(st.integers(1, 40), max_size=25), min_size=1, max_size=8)


def arrays(documents: list[list[int]]) -> tuple[Any, Any]:
    lengths = [length for document in documents for length in document]
    return np.cumsum([0, *lengths], dtype=np.int64), np.cumsum([0, *map(len, documents)])


def slow_cut(documents: list[list[int]], rule: PairRule, epoch: int) -> list[list[int]]:
    """Cut documents sentence by sentence, as build_mapping of Megatron-LM does (helpers.cpp)."""
    samples, sentence = [], 0
    for number, document in enumerate(documents):
        end, made = sentence + len(document), 0
        if len(document) < rule.min_sentences:
            sentence = end
            continue
        start, size, count = sentence, 0, 0
        for length in document:
            target = int(target_lengths(rule, epoch, np.array([number]), made)[0])
            size, count, sentence = size + length, count + 1, sentence + 1
            left = end - sentence
            is_full = size >= target and left > 1 and count >= rule.min_sentences
            if is_full or left == 0:
                samples.append([start, sentence, target])
                made, start, size, count = made + 1, sentence, 0, 0
    return samples


@given(DOCUMENTS, st.sampled_from([1, 2]), st.integers(0, 3))
def test_documents_are_cut_like_the_sentence_by_sentence_rule(documents, least, epoch):
    rule = replace(RULE, min_sentences=least)
    actual = cut_documents(*arrays(documents), 0, rule, epoch)
    assert actual.tolist() == slow_cut(documents, rule, epoch)


@given(DOCUMENTS, st.integers(1, 60), st.integers(0, 59))
def test_larger_counts_extend_smaller_counts_and_passes_are_complete(documents, count, more):
    starts, bounds = arrays(documents)
    smaller, larger, single = (
        index_pairs(starts, bounds, 0, RULE, number) for number in (count, count + more, None)
    )
    if not any(len(document) >= 2 for document in documents):
        assert len(larger) == len(smaller) == len(single) == 0
        return
    assert (len(smaller), len(larger)) == (count, count + more)
    assert np.array_equal(larger[:count], smaller)
    size = min(len(single), len(larger))
    assert np.array_equal(single[:size], larger[:size])
    # A pass has every sentence of the documents that are used once.
    used = [number for first, stop, _ in single.tolist() for number in range(first, stop)]
    expected = [n for a, b in pairwise(bounds) if b - a >= 2 for n in range(a, b)]
    assert sorted(used) == expected


def test_target_lengths_are_short_at_the_given_rate_and_independent():
    documents, rule = np.arange(40_000), replace(RULE, max_target=102)
    targets = target_lengths(replace(rule, short_probability=0.1), 0, documents, 0)
    short = targets[targets < 102]
    # One in 101 short lengths is the full length.
    assert len(short) / len(targets) == pytest.approx(0.1 * 100 / 101, abs=0.008)
    assert short.mean() == pytest.approx(51.5, abs=2.5)
    base = target_lengths(rule, 0, documents, 0) < 102
    for variant in (
        target_lengths(replace(rule, seed=8), 0, documents, 0),
        target_lengths(rule, 1, documents, 0),
        target_lengths(rule, 0, documents, 1),
        target_lengths(rule, 0, documents + 1, 0),
    ):
        assert (base & (variant < 102)).mean() == pytest.approx(base.mean() ** 2, abs=0.012)
