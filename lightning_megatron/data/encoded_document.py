"""Sentences of a document, and its token ids as the sequences of a token file."""

from __future__ import annotations

import re
from collections.abc import Sequence

from lightning_megatron.data.tokenizer import Tokenizer

# Punctuation that ends a sentence, with closing quotes and brackets, before a space.
_END = re.compile(r"[.!?]+[\"'”’)\]]*(?=\s)")
_BLANK_LINE = re.compile(r"\n[^\S\n]*\n\s*")
_OPENING = "\"'“‘(["
_GAP = re.compile(r"[\s—–/]+")
_INITIALS = re.compile(r"(?:[A-Za-z]\.)+")
#: Abbreviations whose period does not end a sentence, in lower case and without the period.
ABBREVIATIONS = frozenset(
    """
    mr mrs ms messrs mme dr prof st hon rev gov sen rep pres gen lieut lt col capt
    maj cmdr adm sgt jr sr esq vs viz cf etc al approx dept univ inc ltd co corp
    bros jan feb mar apr jun jul aug sept oct nov dec mt ft ave fig vol
    """.split()
)
#: Abbreviations whose period does not end a sentence before a number, in the same form.
BEFORE_NUMBERS = frozenset({"no", "nos", "art", "sec", "secs", "p", "pp", "ch"})


def split_sentences(text: str) -> list[str]:
    """Return the sentences of an English text, in order and without surrounding spaces.

    A sentence ends at a blank line, and at a period, exclamation or question mark (with closing
    quotes and brackets) before a space and a capital letter or a digit. The period of an initial
    ("U.S.", "J. Adams"), of a known abbreviation ("Mr.", "Oct."), or of an abbreviation such as
    "No." before a number does not end a sentence. A line break inside a paragraph counts as a
    space. The sentences contain all characters of the text except the spaces between them.
    """
    return [
        sentence
        for paragraph in _BLANK_LINE.split(text)
        for sentence in _split_paragraph(paragraph)
    ]


def _split_paragraph(text: str) -> list[str]:
    sentences = []
    start = 0
    for mark in _END.finditer(text):
        if _ends_sentence(text, start, mark):
            sentences.append(text[start : mark.end()].strip())
            start = mark.end()
    sentences.append(text[start:].strip())
    return [sentence for sentence in sentences if sentence]


def _ends_sentence(text: str, start: int, mark: re.Match[str]) -> bool:
    # The limit of 100 characters keeps the total time linear in the length of the text.
    following = text[mark.end() : mark.end() + 100].lstrip().lstrip(_OPENING)
    if not following or not (following[0].isupper() or following[0].isdigit()):
        return False
    if mark.group() != ".":
        return True
    words = _GAP.split(text[max(start, mark.start() - 100) : mark.start()])
    word = words[-1].lstrip(_OPENING)
    if _INITIALS.fullmatch(word + ".") or word.lower() in ABBREVIATIONS:
        return False
    return not (following[0].isdigit() and word.lower() in BEFORE_NUMBERS)


def encode_document(
    text: str, tokenizer: Tokenizer, by_sentence: bool, end: Sequence[int] = ()
) -> list[list[int]]:
    """Return the token ids of each sequence of a document; an empty list for an empty document.

    Args:
        by_sentence: Whether each sentence is a sequence; otherwise the document is one sequence.
    """
    texts = split_sentences(text) if by_sentence else [text]
    sequences = [tokens for tokens in map(tokenizer.encode, texts) if tokens]
    if sequences:
        sequences[-1] = [*sequences[-1], *end]
    return sequences
