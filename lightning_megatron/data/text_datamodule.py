"""Data module of text files that are read and encoded during training."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import numpy as np
from typing_extensions import override

from lightning_megatron.data.encoded_document import encode_document
from lightning_megatron.data.file_datamodule import FileDataModule
from lightning_megatron.data.input_files import ROW_SUFFIXES, TEXT_SUFFIXES, Document, sizes_of
from lightning_megatron.data.loader import WindowBatches
from lightning_megatron.data.preprocess import EncodingOptions, tokenizer_of
from lightning_megatron.data.row_datamodule import log_row_counts
from lightning_megatron.data.row_files import FileRow
from lightning_megatron.data.row_tokens import EncodedText, RowEncoder, StreamCounts
from lightning_megatron.data.samples import Samples, Windows
from lightning_megatron.data.streaming import Streaming
from lightning_megatron.data.text_rows import StreamedTexts, TextSamples
from lightning_megatron.data.tokenizer import Tokenizer, find_tokenizer
from lightning_megatron.errors import CorruptDataError
from lightning_megatron.hub import hub_name
from lightning_megatron.plan.settings import coerced_arguments

#: Smallest number of tokens of a document in which one token can be predicted (tokens).
_MIN_TOKENS = 2


@dataclass(frozen=True)
class TextEncoder(RowEncoder):
    """Encoder of documents."""

    options: EncodingOptions
    seq_length: int
    document: Document = "file"

    @property
    @override
    def key(self) -> dict[str, Any]:
        return {
            "tokenizer": tokenizer_of(self.options).fingerprint,
            "json_key": self.options.json_key,
            "document": self.document,
            "append_eod": self.options.append_eod,
            "seq_length": self.seq_length,
        }

    @override
    def summary(self, counts: StreamCounts) -> str:
        return (
            f"{counts.num_read} documents read, {counts.num_left_out} left out with fewer than "
            f"{_MIN_TOKENS} tokens; {counts.num_tokens} tokens{counts.fill(self.seq_length)}"
        )

    @override
    def empty_error(self, names: str, counts: StreamCounts) -> CorruptDataError:
        return CorruptDataError(
            f"{names} must have a document of at least {_MIN_TOKENS} tokens, so that a token can "
            f"be predicted: {counts.num_read} were read, and all are shorter. Use other files."
        )

    @override
    def encode_row(self, row: FileRow) -> tuple[EncodedText, ...] | None:
        """Return the tokens of a document; None for fewer than two, which predict nothing."""
        text = row.text(self.options.json_key)
        tokenizer = tokenizer_of(self.options)
        end = [tokenizer.eod] if self.options.append_eod and tokenizer.eod is not None else []
        tokens = [
            token for piece in encode_document(text, tokenizer, False, end) for token in piece
        ]
        if len(tokens) < _MIN_TOKENS:
            return None
        return (EncodedText(np.array(tokens, np.int32), np.ones(len(tokens), np.uint8), False),)


class TextDataModule(FileDataModule):
    """Batches of whole documents of text files, which are read and encoded during training.

    Equals ``TokenDataModule(documents="whole")`` on token files that ``preprocess`` has written, if
    the text is one file whose documents fit into one section. A longer stream packs and shuffles
    each section separately. Documents that are longer than a row are cut into pieces.

    Shapes:
        A batch is {"tokens": (B, S), "labels": (B, S), "lengths": (B, L)}. Labels are shifted by
        one token, and -100 at the end of each document. ``lengths`` is the number of tokens of each
        document.

    Args:
        train: Files of JSON lines (.jsonl) or plain text (.txt, .md), also .gz and .zst, or of
            Parquet, folders of them, folders written by ``save_to_disk`` of datasets, or globs, as
            ``lightning-megatron preprocess`` reads them.
        tokenizer: Name or path of the tokenizer, as for ``lightning-megatron preprocess``.
        json_key: Key of the text in JSON lines, or its column.
        document: Unit of plain text that is a document.
        append_eod: Whether to append the end-of-document token to each document.
        balance_attention: Whether to balance the attention work of rows over data ranks, as in
            ``TokenDataModule``.
        streaming: Settings of the stream, where ``max_conversations`` counts documents; None uses
            the defaults.
        options: Arguments of ``FileDataModule``: ``val``, ``test``, and those of ``RowDataModule``:
            ``seq_length``, ``batch_size``, ``global_batch_size``, ``ramp_up``, ``num_workers``,
            ``seed``, ``pin_memory``.

    Raises:
        ParallelPlanError: If a value has a wrong type or is out of range.
        UnsupportedError: If files are missing, or settings conflict.
        CorruptDataError: If a row has no text (in ``setup`` for validation and test files, and when
            the row is read for training files); the message names its file and line.
        MissingExtraError: If tokenizers is not installed, or pyarrow for Parquet files, or datasets
            for folders of ``save_to_disk``.
    """

    plural = "documents"
    example = '{"text": "..."}'
    suffixes = (*ROW_SUFFIXES, *TEXT_SUFFIXES)
    order_settings = "files, tokenizer, json_key, document, seq_length, streaming or seed"

    def __init__(
        self,
        train: str | list[str],
        tokenizer: str,
        *,
        json_key: str = "text",
        document: Document = "file",
        append_eod: bool = True,
        balance_attention: bool = False,
        streaming: Streaming | None = None,
        **options: Any,
    ) -> None:
        given = coerced_arguments(TextDataModule.__init__, locals())
        streaming = given["streaming"] or Streaming()
        super().__init__(train, streaming=streaming, **options)
        self.balance_attention = balance_attention
        self._max_pieces = streaming.max_pieces(self.seq_length)
        encoding = EncodingOptions(given["tokenizer"], given["json_key"], append_eod)
        self._encoder = TextEncoder(encoding, self.seq_length, given["document"])
        self._evaluated: dict[str, TextSamples] = {}

    @property
    @override
    def encoder(self) -> TextEncoder:
        return self._encoder

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer, loaded at the first use."""
        return tokenizer_of(self._encoder.options)

    @property
    def vocab_size(self) -> int:
        """Vocabulary size of the tokenizer."""
        return self.tokenizer.vocab_size

    @property
    def eod(self) -> int | None:
        """Id of the end-of-document token; None if the tokenizer has none."""
        return self.tokenizer.eod

    @property
    @override
    def vocab_size_before_launch(self) -> int | None:
        is_on_hub = hub_name(self._encoder.options.tokenizer, "model") is not None
        return None if is_on_hub else self.vocab_size

    @override
    def check_before_launch(self, stage: str | None) -> None:
        tokenizer = self._encoder.options.tokenizer
        if hub_name(tokenizer, "model") is None:
            find_tokenizer(tokenizer)

    @override
    def read(self, set_name: str) -> None:
        if not self.is_streamed(set_name):
            self.evaluation_samples(set_name)

    @property
    @override
    def stream_key(self) -> dict[str, Any]:
        texts = [sizes_of(path) for path in self.files["train"]]
        return {"texts": texts, **self._encoder.key}

    @override
    def training_samples(self, num_samples: int | None) -> StreamedTexts:
        options = self.stream_options(num_samples)
        # Documents are left out because they predict nothing, which is no reason for a warning.
        options |= {"report": lambda line, _: log_row_counts(line, False)}
        return StreamedTexts(is_packed=True, max_pieces=self._max_pieces, **options)

    @override
    def evaluation_samples(self, set_name: str) -> TextSamples:
        if set_name not in self._evaluated:
            rows = self._encoder.encode_files(self.files[set_name])
            # This seed gives the fixed order of `TokenDataModule`.
            self._evaluated[set_name] = TextSamples(rows, self.seq_length, 0)
        return self._evaluated[set_name]

    @override
    def batches_of(self, samples: Samples) -> WindowBatches:
        return WindowBatches(cast(Windows, samples), are_separate=True)
