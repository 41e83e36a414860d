"""Encoding of documents in the rows of files, for streams and for evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from typing_extensions import override

from lightning_megatron.data.documents import parse_text, text_under
from lightning_megatron.data.encoded_document import encode_document
from lightning_megatron.data.encoded_rows import RowEncoder
from lightning_megatron.data.index_cache import cache_key
from lightning_megatron.data.packing import pack_once
from lightning_megatron.data.preprocess import EncodingOptions, tokenizer_of
from lightning_megatron.data.row_files import FileRow, sizes_of
from lightning_megatron.data.row_tokens import EncodedText, RowTokens
from lightning_megatron.data.streaming import StreamCounts
from lightning_megatron.data.text_rows import TextRows
from lightning_megatron.errors import CorruptDataError

#: Smallest number of tokens of a document in which one token can be predicted (tokens).
_MIN_TOKENS = 2


class DocumentMessages:
    """Log and error messages about a stream of documents."""

    def summary(self, counts: StreamCounts, seq_length: int) -> str:
        """Return how many documents were read and left out."""
        return (
            f"{counts.num_read} documents read, {counts.num_left_out} left out with fewer than "
            f"{_MIN_TOKENS} tokens; {counts.num_tokens} tokens, {counts.fill(seq_length)}"
        )

    def empty_error(self, names: str, counts: StreamCounts, seq_length: int) -> CorruptDataError:
        """Return the error for files whose documents are all too short."""
        return CorruptDataError(
            f"{names} must have a document of at least {_MIN_TOKENS} tokens, so that a token can "
            f"be predicted: {counts.num_read} were read, and all are shorter. Use other files."
        )


@dataclass(frozen=True)
class TextEncoder(RowEncoder):
    """Encoder of documents."""

    options: EncodingOptions
    seq_length: int

    plural: ClassVar[str] = "documents"

    @property
    @override
    def key(self) -> dict[str, Any]:
        return {
            "tokenizer": tokenizer_of(self.options).fingerprint,
            "json_key": self.options.json_key,
            "append_eod": self.options.append_eod,
            "seq_length": self.seq_length,
        }

    @override
    def messages(self, is_packed: bool = True) -> DocumentMessages:
        return DocumentMessages()

    @override
    def encode_row(self, row: FileRow) -> tuple[EncodedText, ...] | None:
        """Return the tokens of a document; None for fewer than two, which predict nothing."""
        key = self.options.json_key
        if isinstance(row.content, bytes):
            text = parse_text(row.content, row.place, key)
        else:
            text = text_under(row.content, row.place, key)
        tokenizer = tokenizer_of(self.options)
        end = [tokenizer.eod] if self.options.append_eod and tokenizer.eod is not None else []
        tokens = [
            token for piece in encode_document(text, tokenizer, False, end) for token in piece
        ]
        if len(tokens) < _MIN_TOKENS:
            return None
        return (EncodedText(np.array(tokens, np.int32), np.ones(len(tokens), np.uint8), False),)


class TextSamples(TextRows):
    """One pass over the documents of some files in a fixed shuffled order, all in memory.

    Args:
        seq_length: Tokens that a packed row predicts (tokens).
    """

    def __init__(
        self, files: Sequence[Path], encoder: TextEncoder, seq_length: int, num_windows: int
    ) -> None:
        self.seq_length = seq_length
        rows = RowTokens.of_files(files, encoder.encode_row)
        if not len(rows.numbers):
            names = ", ".join(map(str, files))
            raise DocumentMessages().empty_error(names, StreamCounts(rows.num_read), seq_length)
        # This key gives the fixed order of `TokenDataModule`.
        random = np.random.RandomState([0, 0, 4])
        lengths = np.diff(rows.bounds)
        super().__init__(rows, pack_once(lengths, seq_length, random, True, num_windows, None))
        self.order_key = cache_key({"files": [sizes_of(path) for path in files]})
