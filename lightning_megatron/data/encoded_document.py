"""Sentences of a document, its token ids as sequences of a token file, and pieces of a long one."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

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

#: Places at which tokens usually end: before a line, and before the space of a word.
_PLACES = (re.compile(r"(?<=[^\s]\n)(?=\S)"), re.compile(r"(?<=\S)(?= \S)"))
#: Number of places of a kind that are tried for one cut.
_TRIES = 8
#: Text on each side of a place, of which the tokens are compared (characters).
_CONTEXT = 1024


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


def cut_text(
    text: str, tokenizer: Tokenizer, by_sentence: bool, size: int
) -> Iterator[tuple[int, int]]:
    """Yield start and end of the pieces of a text.

    A cut is made only where the tokens of the text around it are those of both sides one after the
    other. A tokenizer that joins words, or puts a mark before its first word, has no such place,
    and the text remains whole.

    Args:
        by_sentence: Whether each sentence is encoded by itself, so that cuts are at blank lines.
        size: Size of a piece, at least (characters).
    """
    start = 0
    wanted = size
    while wanted + size <= len(text):
        stop = wanted + size
        cut = (
            _blank_line(text, wanted, stop) if by_sentence else _cut(text, tokenizer, wanted, stop)
        )
        if cut is not None:
            yield start, cut
            start = cut
        wanted = (cut or wanted) + size
    yield start, len(text)


def _blank_line(text: str, start: int, stop: int) -> int | None:
    found = _BLANK_LINE.search(text, start, stop)
    # At the end of the searched text, the match may go on.
    return found.end() if found and found.end() < stop else None


def _cut(text: str, tokenizer: Tokenizer, start: int, stop: int) -> int | None:
    for places in _PLACES:
        for number, found in enumerate(places.finditer(text, start, stop), start=1):
            cut = found.start()
            left = text[cut - _CONTEXT : cut]
            right = text[cut : cut + _CONTEXT]
            apart = [*tokenizer.encode(left), *tokenizer.encode(right)]
            if tokenizer.encode(left + right) == apart:
                return cut
            if number == _TRIES:
                break
    return None
