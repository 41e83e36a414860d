"""Tokenization of raw text into a token file by several processes, in the order of the input."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from lightning_megatron.data.documents import RawChunk, find_inputs, parse_chunk, read_chunks
from lightning_megatron.data.encoded_document import encode_document
from lightning_megatron.data.token_file import TokenFileWriter
from lightning_megatron.data.tokenizer import Tokenizer, load_tokenizer
from lightning_megatron.data.worker_pool import map_in_order
from lightning_megatron.errors import UnsupportedError

CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class EncodingOptions:
    """Options of tokenization; each worker process builds its tokenizer from them.

    Args:
        tokenizer: Name or path of the tokenizer.
        json_key: Key of the text in JSON lines.
        append_eod: Whether to end each document with the end-of-document token.
        eod: Text of the end-of-document token, if it is not one of the usual ones.
        by_sentence: Whether each sentence is a sequence of its document; otherwise a document is
            one sequence.
    """

    tokenizer: str
    json_key: str = "text"
    append_eod: bool = False
    eod: str | None = None
    by_sentence: bool = False


@dataclass(frozen=True)
class PreprocessReport:
    """Size of a written corpus and the time taken; ``num_bytes`` is the UTF-8 size of the text."""

    num_documents: int
    num_tokens: int
    num_bytes: int
    seconds: float


@dataclass(frozen=True)
class _Encoded:
    tokens: npt.NDArray[np.int64]
    lengths: list[list[int]]
    text_bytes: list[int]
    num_read: int


def preprocess(
    inputs: Sequence[str],
    output: str,
    options: EncodingOptions,
    document: Literal["file", "line", "paragraph"] = "file",
    workers: int = 1,
    progress: bool = True,
) -> PreprocessReport:
    """Write the documents of ``inputs`` as the token file ``output``.

    The token file appears only when it is complete. As in Megatron-Core, an empty text becomes an
    empty document without an end-of-document token. Of sentences, those without a token are left
    out, and the last one of a document has its end-of-document token.

    Args:
        inputs: Files, directories and globs.
        output: Path without ``.bin`` and ``.idx``.
        options: Tokenizer, JSON key and end of documents.
        document: Unit of plain text that forms one document.
        workers: Number of processes that tokenize; it does not affect the result.
        progress: Whether to show a progress bar.

    Raises:
        CorruptDataError: If a line is not valid; the message names file and line.
        UnsupportedError: If an input matches no file, or the tokenizer has no end-of-document
            token.
    """
    tokenizer = tokenizer_of(options)
    paths = find_inputs(inputs)
    started = time.perf_counter()
    chunks = (chunk for path in paths for chunk in read_chunks(path, document, CHUNK_BYTES))
    # The bar counts decompressed bytes, so compressed files leave its total unknown.
    total = None
    if not any(path.suffix == ".gz" for path in paths):
        total = sum(path.stat().st_size for path in paths)
    bar = tqdm(total=total, unit="B", unit_scale=True, disable=not progress, desc=Path(output).name)
    with TokenFileWriter(output, tokenizer=tokenizer) as writer, bar:
        for encoded in _encode_all(chunks, options, workers):
            start = 0
            for lengths, text_bytes in zip(encoded.lengths, encoded.text_bytes, strict=True):
                stop = start + sum(lengths)
                writer.add_document(encoded.tokens[start:stop], text_bytes, lengths)
                start = stop
            bar.update(encoded.num_read)
            bar.set_postfix_str(
                f"{writer.num_documents / (time.perf_counter() - started):.0f} documents/s"
            )
    return PreprocessReport(
        writer.num_documents, writer.num_tokens, writer.num_bytes, time.perf_counter() - started
    )


def _encode_all(
    chunks: Iterator[RawChunk], options: EncodingOptions, workers: int
) -> Iterator[_Encoded]:
    return map_in_order(partial(_encode, options=options), chunks, workers if workers > 1 else 0)


def _encode(chunk: RawChunk, options: EncodingOptions) -> _Encoded:
    tokenizer = tokenizer_of(options)
    end = [tokenizer.eod] if options.append_eod and tokenizer.eod is not None else []
    texts = parse_chunk(chunk, options.json_key)
    pieces = [encode_document(text, tokenizer, options.by_sentence, end) for text in texts]
    tokens = np.fromiter(
        (token for document in pieces for one in document for token in one), np.int64
    )
    lengths = [[len(one) for one in document] for document in pieces]
    return _Encoded(tokens, lengths, [len(text.encode("utf-8")) for text in texts], chunk.num_bytes)


@lru_cache(maxsize=2)
def tokenizer_of(options: EncodingOptions) -> Tokenizer:
    """Return the tokenizer of some options, which this process reads once.

    Args:
        options: Options of tokenization.

    Raises:
        UnsupportedError: If the tokenizer has no token for the end of a document, which is asked
            for.
    """
    tokenizer = load_tokenizer(options.tokenizer, options.eod)
    if options.append_eod and tokenizer.eod is None:
        raise UnsupportedError(
            f"the tokenizer {options.tokenizer!r} has no known end-of-document token. Name one "
            "with --eod-token, or leave --append-eod out."
        )
    return tokenizer
