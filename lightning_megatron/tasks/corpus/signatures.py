"""Words of a text, and MinHash signatures, which estimate the Jaccard similarity of texts."""

from __future__ import annotations

import math
import re
from functools import lru_cache
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.extras import import_extra

_WORD = re.compile(r"[^\W_]+")


def words_of(text: str) -> list[str]:
    """Return the runs of letters and digits of a text, in lower case."""
    return _WORD.findall(text.lower())


def ngrams_of(words: list[str], length: int) -> list[str]:
    """Return the n-grams of words in order, each with one space between its words.

    Args:
        length: Length of an n-gram (words).
    """
    return [" ".join(words[i : i + length]) for i in range(len(words) - length + 1)]


def shingles_of(text: str, length: int) -> set[str]:
    """Return the set of n-grams by which a text is compared with others.

    For a text with fewer words, the set has one member, which consists of all its words. For a text
    without words, the member is the text without surrounding whitespace, so that "!!!" and "???"
    differ.

    Args:
        length: Length of an n-gram (words).
    """
    words = words_of(text)
    return set(ngrams_of(words, length)) or {" ".join(words) or text.strip()}


Signatures = npt.NDArray[np.uint32]
#: Number of hash values of a signature.
NUM_HASHES = 128
# Number of n-grams that datasketch hashes at a time; it stores NUM_HASHES values for each of them.
_BATCH = 4096


def signature_of(text: str, ngram: int) -> Signatures:
    """Return the MinHash signature of the word n-grams of a text.

    It equals ``datasketch.MinHash(128)`` after an update with every n-gram in UTF-8.

    Shapes: The result is (128,).

    Args:
        ngram: Length of an n-gram (words).
    """
    sketch = _empty_sketch().copy()
    encoded = (gram.encode("utf-8") for gram in shingles_of(text, ngram))
    while batch := list(islice(encoded, _BATCH)):
        sketch.update_batch(batch)
    return np.asarray(sketch.hashvalues, dtype=np.uint32)


@lru_cache(maxsize=1)
def _empty_sketch() -> Any:
    minhash = import_extra("datasketch", "clean").MinHash
    return minhash(NUM_HASHES, scheme="affine32")


def least_equal(threshold: float) -> int:
    """Return how many values of two signatures must be equal for an estimate of ``threshold``."""
    if not 0.5 < threshold <= 1:
        raise ParallelPlanError(
            f"the Jaccard similarity of duplicates must be above 0.5 and at most 1: {threshold} "
            "was given. A lower threshold would require a comparison of almost all pairs."
        )
    # The product may have a rounding error, as 0.55 * 100 does.
    return math.ceil(round(threshold * NUM_HASHES, 9))


def rows_of_bands(threshold: float) -> int:
    """Return the largest number of rows per band with which no similar pair is missed.

    Two signatures that differ in d values agree in at least one of d + 1 bands, so the pairs with
    an equal band include all similar pairs.

    Args:
        threshold: Jaccard similarity, above 0.5.
    """
    different = NUM_HASHES - least_equal(threshold)
    return NUM_HASHES // (different + 1)


def band_keys(signatures: Signatures, start: int, rows: int) -> npt.NDArray[np.uint64]:
    """Return a hash of the values of one band, which is equal for equal values.

    Shapes: signatures (N, 128) -> (N,).
    """
    keys = np.zeros(len(signatures), dtype=np.uint64)
    for column in range(start, start + rows):
        keys ^= signatures[:, column]
        # The multiplication by an odd number mixes low bits into high ones, and the shift mixes
        # high bits into low ones.
        keys *= np.uint64(0x9E3779B97F4A7C15)
        keys ^= keys >> np.uint64(29)
    return keys
