"""Words of a text without case and punctuation, and their n-grams."""

from __future__ import annotations

import re

_WORD = re.compile(r"[^\W_]+")


def words_of(text: str) -> list[str]:
    """Return the runs of letters and digits of a text, in lower case."""
    return _WORD.findall(text.lower())


def ngrams_of(words: list[str], length: int) -> list[str]:
    """Return the n-grams of words in their order, each with one blank between its words.

    Args:
        words: Words of a text.
        length: Words of an n-gram (words).
    """
    return [" ".join(words[i : i + length]) for i in range(len(words) - length + 1)]


def shingles_of(text: str, length: int) -> set[str]:
    """Return the set of n-grams by which a text is compared with others.

    A text of fewer words has one member, all its words; a text without any has its characters
    without surrounding blanks, so that "!!!" and "???" differ.

    Args:
        text: Text.
        length: Words of an n-gram (words).
    """
    words = words_of(text)
    return set(ngrams_of(words, length)) or {" ".join(words) or text.strip()}
