"""Tokenization of raw text into a token file by worker processes, in the order of the input."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from lightning_megatron.data.documents import Document, RawChunk, TextFiles
from lightning_megatron.data.encoded_document import encode_document
from lightning_megatron.data.token_file import TokenFileWriter
from lightning_megatron.data.tokenizer import Tokenizer, load_tokenizer
from lightning_megatron.errors import UnsupportedError


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
class _Encoded:
    tokens: npt.NDArray[np.int64]
    lengths: list[list[int]]
    text_bytes: list[int]
    num_read: int


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
        workers: Number of worker processes that tokenize. It does not affect the result.
        progress: Whether to show a progress bar.
    """
    tokenizer = tokenizer_of(options)
    files = TextFiles(inputs)
    started = time.perf_counter()
    name = Path(output).name
    bar = tqdm(total=files.num_bytes, unit="B", unit_scale=True, disable=not progress, desc=name)
    with TokenFileWriter(output, tokenizer=tokenizer) as writer, bar:
        for encoded in files.map_chunks(partial(_encode, options=options), document, workers):
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


def _encode(chunk: RawChunk, options: EncodingOptions) -> _Encoded:
    tokenizer = tokenizer_of(options)
    end = [tokenizer.eod] if options.append_eod and tokenizer.eod is not None else []
    texts = [chunk.text(number, options.json_key) for number in range(len(chunk.lines))]
    documents = [encode_document(text, tokenizer, options.split_sentences, end) for text in texts]
    tokens = np.fromiter(
        (token for document in documents for sequence in document for token in sequence), np.int64
    )
    lengths = [list(map(len, document)) for document in documents]
    return _Encoded(tokens, lengths, [len(text.encode("utf-8")) for text in texts], chunk.num_bytes)


@lru_cache(maxsize=2)
def tokenizer_of(options: EncodingOptions) -> Tokenizer:
    """Return the tokenizer for some options; a process loads it once."""
    tokenizer = load_tokenizer(options.tokenizer, options.eod_token)
    if options.append_eod and tokenizer.eod is None:
        raise UnsupportedError(
            "append_eod needs a tokenizer with an end-of-document token: no known one is in the "
            f"vocabulary of {options.tokenizer!r}. Name one with --eod-token, or leave "
            "--append-eod out."
        )
    return tokenizer
