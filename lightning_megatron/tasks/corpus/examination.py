"""Work of a worker process on a chunk of documents: repair, length filter and signatures."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from lightning_megatron.building_blocks import (
    RawChunk,
    Tokenizer,
    load_tokenizer,
)
from lightning_megatron.errors import CorruptDataError, ParallelPlanError
from lightning_megatron.extras import import_extra
from lightning_megatron.tasks.corpus.held_out import HeldOut
from lightning_megatron.tasks.corpus.signatures import NUM_HASHES, Signatures, signature_of

#: Name of the tokenizer that splits texts at whitespace.
WORDS = "words"


@dataclass(frozen=True)
class JsonDocument:
    """Document in a line of JSON lines.

    Args:
        line: Number of the line, counted from 1.
        content: Bytes of the line, without its line feed.
        text: Decoded text of the document.
    """

    line: int
    content: bytes
    text: str


@dataclass(frozen=True)
class CleaningOptions:
    """Settings of the cleaning steps.

    Args:
        fix_text: Whether ``ftfy.fix_text`` repairs texts.
        min_tokens: Minimum length of a document; 0 keeps all documents (tokens).
        tokenizer: Tokenizer that measures lengths: "words" splits at whitespace; otherwise the name
            or path of a tokenizer.
        jaccard: Minimum Jaccard similarity of duplicates, above 0.5; None keeps duplicates.
        ngram: Length of the n-grams whose sets are compared (words).
        tests: Files of test sets; documents that are similar to a test document are removed.
        test_jaccard: Minimum Jaccard similarity at which a document is removed because of a test
            document, above 0.5.
        skip_broken: Whether broken lines are counted and left out instead of raising.
    """

    json_key: str = "text"
    fix_text: bool = True
    min_tokens: int = 128
    tokenizer: str = WORDS
    jaccard: float | None = 0.7
    ngram: int = 5
    tests: tuple[str, ...] = ()
    test_jaccard: float = 0.7
    skip_broken: bool = False

    def __post_init__(self) -> None:
        if self.ngram < 1 or self.min_tokens < 0:
            raise ParallelPlanError(
                "ngram must be at least 1 and min_tokens at least 0: "
                f"{self.ngram} and {self.min_tokens} were given."
            )

    @property
    def compares(self) -> bool:
        """Whether documents need signatures."""
        return self.jaccard is not None or bool(self.tests)


@dataclass
class ExaminedChunk:
    """Documents of a chunk that are valid and long enough, and the numbers of the others.

    Args:
        num_bytes: Number of bytes that were read from the file (bytes).
        fixed: For each document, whether its text was repaired.
        grams: Indices of the test sets' 8-grams that occur in each document.
    """

    path: str
    num_bytes: int
    broken: list[str] = field(default_factory=list)
    short: int = 0
    fixed: list[bool] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    contents: list[bytes] = field(default_factory=list)
    grams: list[list[int]] = field(default_factory=list)
    signatures: Signatures = field(
        default_factory=lambda: np.empty((0, NUM_HASHES), dtype=np.uint32)
    )


def examine(chunk: RawChunk, options: CleaningOptions) -> ExaminedChunk:
    """Repair the documents of a chunk, drop short ones, and compute signatures of the others."""
    result = ExaminedChunk(chunk.path, chunk.num_bytes)
    held_out = held_out_of(options.tests, options.json_key)
    signatures = []
    for document in parse_objects(chunk, options.json_key):
        if isinstance(document, CorruptDataError):
            if not options.skip_broken:
                raise document
            result.broken.append(str(document))
            continue
        text = _fixed(document, options)
        if num_tokens(text, options) < options.min_tokens:
            result.short += 1
            continue
        same = text == document.text
        content = document.content
        if not same:
            content = replace_text(document.content, options.json_key, text)
        result.fixed.append(not same)
        result.lines.append(document.line)
        result.contents.append(content)
        result.grams.append(held_out.grams_in(text) if held_out.grams else [])
        if options.compares:
            signatures.append(signature_of(text, options.ngram))
    if signatures:
        result.signatures = np.array(signatures)
    return result


def num_tokens(text: str, options: CleaningOptions) -> int:
    """Return the length of a text (tokens), or 0 if there is no minimum length."""
    if not options.min_tokens:
        return 0
    if options.tokenizer == WORDS:
        return len(text.split())
    return len(_tokenizer_of(options.tokenizer).encode(text))


def check_extras(options: CleaningOptions) -> None:
    """Raise the errors that missing packages or tokenizers would cause in worker processes."""
    if options.fix_text:
        import_extra("ftfy", "clean")
    if options.compares:
        import_extra("datasketch", "clean")
    if options.min_tokens and options.tokenizer != WORDS:
        _tokenizer_of(options.tokenizer)


def _fixed(document: JsonDocument, options: CleaningOptions) -> str:
    if not options.fix_text:
        return document.text
    fixed: str = import_extra("ftfy", "clean").fix_text(document.text)
    return fixed


@lru_cache(maxsize=1)
def held_out_of(tests: tuple[str, ...], json_key: str) -> HeldOut:
    """Return the test sets; each process reads them once."""
    return HeldOut(tests, json_key)


@lru_cache(maxsize=1)
def _tokenizer_of(name: str) -> Tokenizer:
    return load_tokenizer(name)


def parse_objects(chunk: RawChunk, json_key: str) -> list[JsonDocument | CorruptDataError]:
    """Return the document of each line of a chunk, or for an invalid line its error.

    The errors are those that ``FileRow.text`` raises.

    Args:
        chunk: Undecoded JSON lines.
    """
    parsed: list[JsonDocument | CorruptDataError] = []
    for row in chunk.rows:
        try:
            text = row.text(json_key)
        except CorruptDataError as error:
            parsed.append(error)
        else:
            assert isinstance(row.content, bytes), "the inputs are JSON lines"
            parsed.append(JsonDocument(row.end.number, row.content, text))
    return parsed


def replace_text(content: bytes, json_key: str, text: str) -> bytes:
    """Return a JSON object with a new text, and all other characters unchanged.

    Args:
        content: Valid JSON object in UTF-8.
        text: New text.
    """
    source = content.decode("utf-8")
    decoder = json.JSONDecoder()
    # Encoding the whole object again would change numbers such as 1.10 and 1E400.
    position = source.index("{") + 1
    while True:
        key, position = decoder.raw_decode(source, _after_blanks(source, position))
        position = _after_blanks(source, _after_blanks(source, position) + 1)
        _, end = decoder.raw_decode(source, position)
        if key == json_key:
            value = json.dumps(text, ensure_ascii=False)
            return (source[:position] + value + source[end:]).encode("utf-8")
        position = _after_blanks(source, end) + 1


def _after_blanks(source: str, position: int) -> int:
    while source[position] in " \t\r\n":
        position += 1
    return position
