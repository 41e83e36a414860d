"""Masks are n-grams of whole words, with the rates of Megatron-LM and transformers."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_megatron.data.masking import NGramMasking
from lightning_megatron.data.tokenizer import load_tokenizer
from lightning_megatron.data.word_pieces import WordPieces
from lightning_megatron.errors import UnsupportedError
from tests.bert_corpus import VOCABULARY, write_vocabulary

CLS, SEP, MASK = 2, 3, 4
#: Pieces of a vocabulary of which the last 20 continue a word, as that of `write_vocabulary`.
PIECES = WordPieces(0, CLS, SEP, MASK, np.arange(VOCABULARY) >= 41)


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


TOKENS = st.lists(st.integers(5, VOCABULARY - 1), min_size=1, max_size=60)


@settings(deadline=None, max_examples=200)
@given(first=TOKENS, second=TOKENS, seed=st.integers(0, 2**32 - 1), max_ngram=st.integers(1, 4))
def test_whole_words_are_masked_up_to_the_budget(
    first: list[int], second: list[int], seed: int, max_ngram: int
) -> None:
    tokens, segments = row(first, second)
    masking = NGramMasking(0.15, max_ngram)
    masked, labels = masking.mask(tokens, segments, PIECES, np.random.RandomState(seed))
    chosen = labels != -100
    budget = max(1, round(0.15 * (len(first) + len(second))))
    assert chosen.sum() <= budget
    assert np.array_equal(labels[chosen], tokens[chosen])
    assert np.array_equal(masked[~chosen], tokens[~chosen])
    assert not chosen[np.isin(tokens, (CLS, SEP))].any()
    words = words_of(tokens, segments)
    for word in words:
        assert chosen[word].all() or not chosen[word].any()
    # Words of a single token always fit, and thus fill the budget.
    if all(len(word) == 1 for word in words):
        assert chosen.sum() == budget
    repeated = masking.mask(tokens, segments, PIECES, np.random.RandomState(seed))
    assert np.array_equal(repeated[0], masked)
    assert np.array_equal(repeated[1], labels)


@settings(deadline=None, max_examples=50)
@given(tokens=TOKENS, seed=st.integers(0, 2**32 - 1))
def test_word_pieces_are_masked_one_by_one_without_whole_words(
    tokens: list[int], seed: int
) -> None:
    text, segments = row(tokens, [5])
    masking = NGramMasking(0.3, 1, whole_words=False)
    chosen = masking.choose(text, segments, PIECES, np.random.RandomState(seed))
    assert len(chosen) == max(1, round(0.3 * (len(tokens) + 1)))


def slow_choice(
    tokens: np.ndarray, segments: list[tuple[int, int]], random: np.random.RandomState
) -> set[int]:
    """Choose tokens word by word, as masked_dataset.py of Megatron-LM does."""
    words = [words_of(tokens, [segment]) for segment in segments]
    starts = [
        (segment_number, at) for segment_number, part in enumerate(words) for at in range(len(part))
    ]
    random.shuffle(starts)
    budget = max(1, round(0.15 * sum(stop - start for start, stop in segments)))
    chosen: set[int] = set()
    for segment_number, at in starts:
        n = random.choice([1, 2, 3], p=[6 / 11, 3 / 11, 2 / 11])
        while n:
            positions = {
                position for word in words[segment_number][at : at + n] for position in word
            }
            if len(chosen) + len(positions) <= budget:
                break
            n -= 1
        if n and not positions & chosen:
            chosen |= positions
    return chosen


def test_masked_positions_and_runs_have_the_rates_of_the_word_by_word_rule() -> None:
    draw = np.random.RandomState(3)
    tokens, segments = row(draw.randint(5, 61, 25).tolist(), draw.randint(5, 61, 40).tolist())
    counts = {name: np.zeros(len(tokens)) for name in ("ours", "slow")}
    runs: dict[str, Counter[int]] = {"ours": Counter(), "slow": Counter()}
    num = 4000
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


def test_masked_tokens_are_replaced_at_the_rates_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.BertTokenizerFast(write_vocabulary(tmp_path / "vocab.txt"))
    collator = transformers.DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15)
    draw = np.random.RandomState(0)
    rates: dict[str, list[np.ndarray]] = {"ours": [], "theirs": []}
    torch.manual_seed(0)
    for seed in range(300):
        text = draw.randint(5, 41, 100)
        tokens, segments = row(text[:50].tolist(), text[50:].tolist())
        theirs = collator([{"input_ids": tokens.tolist()}])
        ours = NGramMasking().mask(tokens, segments, PIECES, np.random.RandomState(seed))
        results = {
            "ours": ours,
            "theirs": (theirs["input_ids"][0].numpy(), theirs["labels"][0].numpy()),
        }
        for name, (masked, labels) in results.items():
            chosen = labels != -100
            is_mask = (masked == MASK) & chosen
            is_same = (masked == labels) & chosen
            assert np.array_equal(masked[~chosen], tokens[~chosen])
            rates[name].append(np.array([chosen.sum(), is_mask.sum(), is_same.sum()]))
    for name, values in rates.items():
        total, is_mask, is_same = np.sum(values, axis=0)
        assert total / 300 == pytest.approx(15, abs=1.0), name
        # One in 61 random tokens is the mask, and another one the true token.
        assert is_mask / total == pytest.approx(0.8 + 0.1 / 61, abs=0.03), name
        assert is_same / total == pytest.approx(0.1 + 0.1 / 61, abs=0.03), name


def test_word_pieces_come_from_the_tokenizer(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_vocabulary(tmp_path / "vocab.txt"))
    pieces = WordPieces.of(tokenizer)
    assert (pieces.padding, pieces.start, pieces.separator, pieces.mask) == (0, CLS, SEP, MASK)
    assert np.array_equal(pieces.continues, PIECES.continues)
    assert pieces.vocab_size == VOCABULARY
    with pytest.raises(UnsupportedError, match=r"'bytes' lacks \[PAD\], \[CLS\], \[SEP\]"):
        WordPieces.of(load_tokenizer("bytes"))
