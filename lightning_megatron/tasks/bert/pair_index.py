"""Index of samples that consist of consecutive sentences of one document, for pre-training BERT.

A sample takes sentences of its document until it reaches its target length, and the next sample
begins after it; the last sample of a document has the remaining sentences. The target length is
that of a full row, or with a small probability a shorter one. It depends only on the seed, the
pass, the document and the number of the sample in its document, so that all documents can be cut at
once.

Source: Megatron-LM core/datasets/helpers.cpp (build_mapping), with other random numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]
_STEPS = (
    np.uint64(0x9E3779B97F4A7C15),
    np.uint64(0xBF58476D1CE4E5B9),
    np.uint64(0x94D049BB133111EB),
)


@dataclass(frozen=True)
class PairRule:
    """Rule for cutting documents into samples.

    Args:
        max_target: Largest target length (tokens).
        min_sentences: Smallest number of sentences of a sample; shorter documents are left out.
        short_probability: Probability that a target length is drawn uniformly from 2 to
            ``max_target``.
    """

    max_target: int
    min_sentences: int
    short_probability: float
    seed: int


def index_pairs(
    starts: Integers, documents: Integers, first_document: int, rule: PairRule, count: int | None
) -> npt.NDArray[np.integer]:
    """Return the samples of as many passes as needed; each pass is shuffled separately.

    The samples of a larger ``count`` begin with those of a smaller one.

    Args:
        starts: Position of each sentence's first token, and the total number of tokens (tokens).
        documents: First sentence of each document, and the total number of sentences (sentences).
        count: Number of samples; None makes one pass (samples).

    Returns:
        Array (samples, 3) of the first sentence, the sentence after the last one, and the target
        length. It is empty if no document has enough sentences.
    """
    passes: list[Integers] = []
    num_found = 0
    while not passes or (count is not None and num_found < count):
        cut = cut_documents(starts, documents, first_document, rule, len(passes))
        # RandomState, unlike newer generators, never changes its numbers.
        order = np.random.RandomState([rule.seed, len(passes), 3]).permutation(len(cut))
        passes.append(cut[order])
        num_found += len(cut)
        if not len(cut):
            break
    samples = np.concatenate(passes)[:count]
    return samples.astype(np.int32) if samples.max(initial=0) < 2**31 else samples


def cut_documents(
    starts: Integers, documents: Integers, first_document: int, rule: PairRule, epoch: int
) -> Integers:
    """Return the samples of one pass in the order of the text.

    Args:
        starts: Position of each sentence's first token, and the total number of tokens (tokens).
        documents: First sentence of each document, and the total number of sentences (sentences).
    """
    used = np.flatnonzero(np.diff(documents) >= rule.min_sentences)
    first = documents[used]
    last = documents[used + 1]
    numbers = used + first_document
    cuts: list[Integers] = [np.zeros((0, 3), np.int64)]
    while len(first):
        # Iteration k cuts the k-th sample of every document that has one.
        target = target_lengths(rule, epoch, numbers, len(cuts) - 1)
        stop = np.searchsorted(starts, starts[first] + target)
        stop = np.maximum(stop, first + rule.min_sentences)
        # A single remaining sentence joins the sample before it.
        stop = np.where(last - stop > 1, stop, last)
        cuts.append(np.stack([first, stop, target], axis=1))
        has_more = stop < last
        first = stop[has_more]
        last = last[has_more]
        numbers = numbers[has_more]
    samples = np.concatenate(cuts)
    return samples[np.argsort(samples[:, 0], kind="stable")]


def target_lengths(rule: PairRule, epoch: int, documents: Integers, number: int) -> Integers:
    """Return the target length of the n-th sample of each document (tokens)."""
    state = np.full(len(documents), rule.seed, np.uint64)
    for part in (epoch, documents.astype(np.uint64), number):
        state = _splitmix64(state + np.asarray(part, np.uint64))
    # 53 bits make a double in [0, 1).
    is_short = (state >> np.uint64(11)).astype(np.float64) * 2.0**-53 < rule.short_probability
    short = 2 + (_splitmix64(state) % np.uint64(rule.max_target - 1)).astype(np.int64)
    return np.where(is_short, short, rule.max_target)


def _splitmix64(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return the splitmix64 hashes of numbers; its arithmetic is modulo 2^64."""
    values = values + _STEPS[0]
    values = (values ^ (values >> np.uint64(30))) * _STEPS[1]
    values = (values ^ (values >> np.uint64(27))) * _STEPS[2]
    return values ^ (values >> np.uint64(31))
