"""Tokenization of raw text into a token file by worker processes, in the order of the input."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from lightning_megatron.data.documents import RawChunk, TextFiles
from lightning_megatron.data.encoded_document import cut_text, encode_document
from lightning_megatron.data.input_files import Document
from lightning_megatron.data.token_file import TokenFileWriter
from lightning_megatron.data.tokenizer import Tokenizer, load_tokenizer
from lightning_megatron.data.worker_pool import map_in_order
from lightning_megatron.errors import CorruptDataError, UnsupportedError

#: Size of the pieces of long documents, which several workers encode (characters).
PIECE = 1 << 20


@dataclass(frozen=True)
class EncodingOptions:
    """Options of tokenization; each worker process builds its tokenizer from them.

    Args:
        tokenizer: bytes, gpt2, bert, speeches-wordpiece, a tokenizer.json, a vocab.txt or a
            directory.
        json_key: Key of the text in JSON lines.
        append_eod: Whether to append the end-of-document token to each document.
        eod_token: Text of the end-of-document token; None looks for one of the usual ones.
        split_sentences: Whether each English sentence is a sequence of its document, as BERT's
            data needs; otherwise a document is one sequence.
    """

    tokenizer: str = "bytes"
    json_key: str = "text"
    append_eod: bool = False
    eod_token: str | None = None
    split_sentences: bool = False


@dataclass(frozen=True)
class PreprocessReport:
    """Size of a written corpus, and the time that writing took.

    Args:
        num_bytes: Size of the text in UTF-8 (bytes).
        seconds: Time of tokenization and writing (seconds).
    """

    num_documents: int
    num_tokens: int
    num_bytes: int
    seconds: float


@dataclass(frozen=True)
class _Work:
    """Texts for a worker process: documents, or one piece of a long document."""

    texts: RawChunk | str
    is_last: bool = True


@dataclass(frozen=True)
class _Encoded:
    """Tokens of documents, or of one piece of a long document."""

    tokens: npt.NDArray[np.int64]
    lengths: list[list[int]]
    text_bytes: list[int]
    num_read: int
    is_piece: bool = False
    is_last: bool = True


def write_token_file(
    inputs: Sequence[str],
    output: str,
    options: EncodingOptions,
    document: Document = "file",
    workers: int = 1,
    progress: bool = True,
) -> PreprocessReport:
    """Write the documents of ``inputs`` to the token file ``output``.

    The token file appears only when it is complete. As in Megatron-Core, an empty text becomes an
    empty document without an end-of-document token. With a sequence for each sentence, sentences
    without tokens are left out, and the end-of-document token follows the last sentence.

    Args:
        output: Path without ``.bin`` and ``.idx``.
        workers: Number of worker processes that tokenize, a long document in pieces. It does not
            affect the result.
        progress: Whether to show a progress bar.

    Raises:
        CorruptDataError: If a file is damaged, a document has no text, or none has a token.
    """
    tokenizer = tokenizer_of(options)
    files = TextFiles(inputs)
    started = time.perf_counter()
    name = Path(output).name
    bar = tqdm(total=files.num_bytes, unit="B", unit_scale=True, disable=not progress, desc=name)
    with TokenFileWriter(output, tokenizer=tokenizer) as writer, bar:
        work = _work_of(files.chunks(document), options)
        encode = partial(_encode, options=options)
        num_workers = workers if workers > 1 else 0
        for encoded in _joined(map_in_order(encode, work, num_workers), options, bar):
            start = 0
            for lengths, text_bytes in zip(encoded.lengths, encoded.text_bytes, strict=True):
                stop = start + sum(lengths)
                writer.add_document(encoded.tokens[start:stop], text_bytes, lengths)
                start = stop
            bar.set_postfix_str(
                f"{writer.num_documents / (time.perf_counter() - started):.0f} documents/s"
            )
        if not writer.num_tokens:
            raise CorruptDataError(
                f"{', '.join(map(str, inputs))} must have text: {writer.num_documents} documents "
                "were read, and none of them has a token. Give files with text."
            )
    return PreprocessReport(
        writer.num_documents, writer.num_tokens, writer.num_bytes, time.perf_counter() - started
    )


def _work_of(chunks: Iterator[RawChunk], options: EncodingOptions) -> Iterator[_Work]:
    """Yield chunks of documents, and the pieces of each document that is long."""
    tokenizer = tokenizer_of(options)
    for chunk in chunks:
        if chunk.rows[-1].num_bytes < 2 * PIECE:
            yield _Work(chunk)
            continue
        # A chunk ends behind a long document.
        if len(chunk.rows) > 1:
            yield _Work(RawChunk(chunk.path, chunk.rows[:-1]))
        text = chunk.rows[-1].text(options.json_key)
        pieces = cut_text(text, tokenizer, options.split_sentences, PIECE)
        for start, stop in pieces:
            yield _Work(text[start:stop], stop == len(text))


def _joined(results: Iterator[_Encoded], options: EncodingOptions, bar: tqdm) -> Iterator[_Encoded]:
    """Yield the tokens of documents, those of all pieces of a long one together."""
    pieces: list[_Encoded] = []
    for encoded in results:
        bar.update(encoded.num_read)
        if not encoded.is_piece:
            yield encoded
            continue
        pieces.append(encoded)
        if encoded.is_last:
            tokens = np.concatenate([piece.tokens for piece in pieces])
            lengths = [length for piece in pieces for length in piece.lengths[0]]
            end = _end_of(options) if lengths else []
            if lengths:
                tokens = np.append(tokens, end).astype(np.int64)
                lengths = lengths if options.split_sentences else [sum(lengths)]
                lengths[-1] += len(end)
            text_bytes = sum(piece.text_bytes[0] for piece in pieces)
            yield _Encoded(tokens, [lengths], [text_bytes], 0)
            pieces = []


def _encode(work: _Work, options: EncodingOptions) -> _Encoded:
    tokenizer = tokenizer_of(options)
    chunk = work.texts
    is_piece = isinstance(chunk, str)
    if isinstance(chunk, str):
        texts = [chunk]
    else:
        texts = [row.text(options.json_key) for row in chunk.rows]
    end = [] if is_piece else _end_of(options)
    documents = [encode_document(text, tokenizer, options.split_sentences, end) for text in texts]
    tokens = np.fromiter(
        (token for document in documents for sequence in document for token in sequence), np.int64
    )
    lengths = [list(map(len, document)) for document in documents]
    sizes = [len(text.encode("utf-8")) for text in texts]
    num_read = sum(sizes) if isinstance(chunk, str) else chunk.num_bytes
    return _Encoded(tokens, lengths, sizes, num_read, is_piece, work.is_last)


def _end_of(options: EncodingOptions) -> list[int]:
    eod = tokenizer_of(options).eod
    return [eod] if options.append_eod and eod is not None else []


@lru_cache(maxsize=2)
def tokenizer_of(options: EncodingOptions) -> Tokenizer:
    """Return the tokenizer for some options; a process loads it once."""
    tokenizer = load_tokenizer(options.tokenizer, options.eod_token)
    if options.append_eod and tokenizer.eod is None:
        raise UnsupportedError(
            "append_eod needs a tokenizer with an end-of-document token: no known one is in the "
            f"vocabulary of {options.tokenizer!r}. Name one with --eod_token, or leave "
            "--append_eod out."
        )
    return tokenizer
