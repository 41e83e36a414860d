"""Encoder and data module of files whose rows have conversations, or pairs of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lightning_megatron.building_blocks import (
    EncodedText,
    FileDataModule,
    FileRow,
    RowEncoder,
    RowTokens,
    StreamCounts,
    coerced_arguments,
    hub_name,
)
from lightning_megatron.errors import CorruptDataError
from lightning_megatron.tasks.chat.chat_template import ChatTokenizer, read_template
from lightning_megatron.tasks.chat.conversations import EXAMPLE, Conversation, conversation_of

TooLong = Literal["cut", "leave_out", "refuse"]


@dataclass(frozen=True)
class ConversationEncoder(RowEncoder):
    """Encoder of the rows of files as conversations, with a chat template and a maximum length.

    A subclass reads other rows, with several conversations in each.

    Args:
        seq_length: Tokens that a row predicts; a conversation has at most one more (tokens).
        too_long: Treatment of longer conversations: cut their end, leave them out, or raise an
            error.
    """

    tokenizer: ChatTokenizer
    seq_length: int
    too_long: TooLong

    plural: ClassVar[str] = "conversations"
    #: Number of conversations of each row.
    num_texts: ClassVar[int] = 1

    @property
    @override
    def key(self) -> dict[str, Any]:
        fields = {
            "tokenizer": self.tokenizer.fingerprint,
            "seq_length": self.seq_length,
            "too_long": self.too_long,
        }
        return fields | ({"num_texts": self.num_texts} if self.num_texts > 1 else {})

    @override
    def summary(self, counts: StreamCounts) -> str:
        line = (
            f"{counts.num_read} {self.plural} read, {counts.num_cut} cut after "
            f"{self.seq_length + 1} tokens (seq_length + 1), {counts.num_left_out} left out as too "
            f"long; {counts.num_tokens} tokens, {counts.num_answers} of them in answers"
        )
        return line if self.num_texts > 1 else line + counts.fill(self.seq_length)

    @override
    def empty_error(self, names: str, counts: StreamCounts) -> CorruptDataError:
        return CorruptDataError(
            f"{names} must have a {self.plural.removesuffix('s')} with an answer in its first "
            f"{self.seq_length + 1} tokens: {counts.num_read} were read, and "
            f"{counts.num_left_out} left out as too long. Use a larger seq_length or other files."
        )

    @override
    def encode_row(self, row: FileRow) -> tuple[EncodedText, ...] | None:
        text = self.encode(conversation_of(row))
        return None if text is None else (text,)

    def encode(self, conversation: Conversation) -> EncodedText | None:
        """Return the tokens of a conversation; None if it is left out as too long."""
        limit = self.seq_length + 1
        encoded = self.tokenizer.encode(conversation)
        ids = encoded[0].astype(np.int32)
        is_answer = encoded[1].astype(np.uint8)
        if len(ids) <= limit:
            return EncodedText(ids, is_answer, False)
        if self.too_long == "refuse":
            raise CorruptDataError(
                f"{conversation.place} has {len(ids)} tokens; at most {limit} (seq_length + 1) fit "
                "into a row. Use a larger seq_length, or too_long='cut' or 'leave_out'."
            )
        if self.too_long == "leave_out" or not is_answer[1:limit].any():
            return None
        return EncodedText(ids[:limit], is_answer[:limit], True)


class ConversationDataModule(FileDataModule):
    """Batches of the rows of files, encoded with the chat template of a tokenizer.

    Args:
        train: Files of rows; see ``FileDataModule``.
        tokenizer: Folder of a Hugging Face tokenizer, or a model's name on the Hub.
        chat_template: Jinja file whose template replaces that of the tokenizer.
        too_long: Treatment of rows with a longer conversation than ``seq_length`` + 1 tokens: "cut"
            keeps its beginning, "leave_out" drops the row, and "refuse" raises an error. A row that
            keeps no token of an answer is dropped. The log at the start of a run reports how many
            were cut and dropped.
        cache_dir: Folder of the encoded rows; None uses ``index_cache`` next to the first file.
        options: Arguments of ``FileDataModule``.
    """

    plural = "conversations"
    example = EXAMPLE
    #: Class that encodes the rows.
    encoder_class: type[ConversationEncoder] = ConversationEncoder

    def __init__(
        self,
        train: str | list[str],
        tokenizer: str,
        *,
        chat_template: str | None = None,
        too_long: TooLong = "cut",
        cache_dir: str | None = None,
        **options: Any,
    ) -> None:
        given = coerced_arguments(ConversationDataModule.__init__, locals())
        super().__init__(train, **options)
        self.tokenizer_folder: str = given["tokenizer"]
        self.chat_template: str | None = given["chat_template"]
        self.too_long: TooLong = given["too_long"]
        self.cache_dir = Path(given["cache_dir"] or self.files["train"][0].parent / "index_cache")
        self._encoded: dict[str, RowTokens] = {}

    @override
    def check_before_launch(self, stage: str | None) -> None:
        if hub_name(self.tokenizer_folder, "model") is None:
            read_template(self.tokenizer_folder, self.chat_template)

    @override
    def read(self, set_name: str) -> None:
        if not self.is_streamed(set_name):
            self.encoded(set_name)

    def encoded(self, set_name: str) -> RowTokens:
        """Return the encoded rows of a set; the first call logs how many were cut and left out.

        Args:
            set_name: ``train``, ``val`` or ``test``, or a named set such as ``val/news``.
        """
        if set_name not in self._encoded:
            files = self.files[set_name]
            rows = self.encoder.encode_once(files, self.cache_dir)
            summary = self.encoder.summary(StreamCounts().after(rows))
            names = ", ".join(map(str, files))
            log = rank_zero_warn if rows.num_cut + rows.num_left_out else rank_zero_info
            log(f"{names}: {summary}.")
            self._encoded[set_name] = rows
        return self._encoded[set_name]

    @cached_property
    def tokenizer(self) -> ChatTokenizer:
        """Tokenizer with its chat template, loaded at the first use."""
        return ChatTokenizer(self.tokenizer_folder, self.chat_template)

    def tokenizer_files(self) -> dict[str, bytes]:
        """Return the files of the tokenizer with its template, for checkpoints and exports."""
        return self.tokenizer.files()

    @cached_property
    def encoder(self) -> ConversationEncoder:
        """Encoder of the rows of files."""
        return self.encoder_class(self.tokenizer, self.seq_length, self.too_long)

    @property
    def vocab_size(self) -> int:
        """Largest token id of the tokenizer plus 1."""
        return self.tokenizer.vocab_size
