"""Normalised words of a text, without case and punctuation, and their n-grams."""

from __future__ import annotations

import re

_WORD = re.compile(r"[^\W_]+")


def words_of(text: str) -> list[str]:
    """Return the runs of letters and digits of a text, in lower case."""
    return _WORD.findall(text.lower())


def ngrams_of(words: list[str], length: int) -> list[str]:
    """Return the n-grams of words in order, each with one space between its words.

    Args:
        words: Words of a text.
        length: Length of an n-gram (words).
    """
    return [" ".join(words[i : i + length]) for i in range(len(words) - length + 1)]


def shingles_of(text: str, length: int) -> set[str]:
    """Return the set of n-grams by which a text is compared with others.

    For a text with fewer words, the set has one member, which consists of all its words. For a text
    without words, the member is the text without surrounding whitespace, so that "!!!" and "???"
    differ.

    Args:
        text: Text.
        length: Length of an n-gram (words).
    """
    words = words_of(text)
    return set(ngrams_of(words, length)) or {" ".join(words) or text.strip()}
