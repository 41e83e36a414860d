"""Data module of conversations, for supervised fine-tuning on the answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import override

from lightning_megatron.building_blocks import (
    IGNORED,
    Samples,
    StreamedTexts,
    TextSamples,
    WindowBatches,
    coerced_arguments,
)
from lightning_megatron.errors import UnsupportedError
from lightning_megatron.tasks.chat.conversation_datamodule import ConversationDataModule


class ChatBatches(WindowBatches):
    """Batches of conversations whose labels are the tokens of answers.

    Shapes:
        As for :class:`WindowBatches`. Labels are -100 where the next token does not belong to an
        answer. Batches with lengths also have {"position_ids": (B, S)}, the position of each token
        in its conversation, which Hugging Face models take.

    Args:
        are_separate: Whether batches have the lengths of the conversations.
    """

    def __init__(self, samples: TextSamples | StreamedTexts, are_separate: bool) -> None:
        super().__init__(samples, are_separate=are_separate)
        self._chat_samples = samples

    @override
    def __getitem__(self, numbers: list[int]) -> dict[str, torch.Tensor]:
        batch = super().__getitem__(numbers)
        for row, number in enumerate(numbers):
            if number >= 0:
                is_label = torch.from_numpy(self._chat_samples.is_answer(number)[1:])
                batch["labels"][row, : len(is_label)][~is_label] = IGNORED
        if self.are_separate:
            length = batch["tokens"].shape[1]
            rows = [_positions(sizes, length) for sizes in batch["lengths"].tolist()]
            batch["position_ids"] = torch.from_numpy(np.stack(rows))
        return batch


def _positions(sizes: Sequence[int], length: int) -> npt.NDArray[np.int64]:
    """Return the position of each token of a row in its conversation or in the padding."""
    return np.concatenate([np.arange(size) for size in (*sizes, length - sum(sizes))])


class ChatDataModule(ConversationDataModule):
    """Batches of conversations whose labels are the answers of the assistant, for fine-tuning.

    Each row of a file has ``messages`` (``role`` and ``content``), or ``prompt`` and ``completion``
    as texts or lists of messages. In the second case, the loss covers only the completion. The chat
    template of the tokenizer makes the tokens; the labels are the tokens that the assistant wrote,
    as in the assistant mask of transformers. The error for a row that is not a conversation names
    its file and line.

    Shapes:
        A batch is {"tokens": (B, S), "labels": (B, S)}. Labels are shifted by one token, and -100
        where the next token does not belong to an answer. Packed rows add {"lengths": (B, L)}, the
        number of tokens of each conversation, and {"position_ids": (B, S)}, which restart at each
        conversation.

    Args:
        train: Files of JSON lines (.jsonl, also .gz) or Parquet, folders of them, folders written
            by ``save_to_disk`` of datasets, globs, or names of data sets on the Hub, such as
            ``HuggingFaceH4/ultrachat_200k:train_sft``.
        tokenizer: Folder of a Hugging Face tokenizer, or a model's name on the Hub.
        packing: Whether a row has several whole conversations, packed by best fit, whose tokens do
            not attend to each other; otherwise a row has one conversation and padding.
        balance_attention: Whether to balance the attention work of packed rows over data ranks, as
            in ``TokenDataModule``.
        options: Arguments of ``ConversationDataModule``: ``chat_template``, ``too_long``,
            ``cache_dir``, those of ``FileDataModule``: ``val``, ``test``, ``streaming``, and those
            of ``RowDataModule``: ``seq_length``, ``batch_size``, ``global_batch_size``,
            ``ramp_up``, ``num_workers``, ``seed``, ``train_samples``, ``pin_memory``.

    Raises:
        ParallelPlanError: If a value has a wrong type or is out of range.
        UnsupportedError: If files or the template are missing, or settings conflict.
        CorruptDataError: If a row is not a conversation (in ``setup``); the message names its file
            and line.
        MissingExtraError: If transformers is not installed, or pyarrow for Parquet files, or
            datasets for folders of ``save_to_disk``.
    """

    order_settings = "files, tokenizer, template, seq_length, too_long, packing or seed"

    def __init__(
        self,
        train: str | list[str],
        tokenizer: str,
        *,
        packing: bool = True,
        balance_attention: bool = False,
        **options: Any,
    ) -> None:
        coerced_arguments(ChatDataModule.__init__, locals())
        super().__init__(train, tokenizer, **options)
        self.balance_attention = balance_attention
        if balance_attention and not packing:
            raise UnsupportedError(
                "balance_attention cannot be used with packing=False, because all rows then have "
                "equal attention work. Use packing=True, or leave balance_attention out."
            )
        #: Whether rows have several conversations, like ``documents`` of ``TokenDataModule``.
        self.documents: Literal["joined", "whole"] = "whole" if packing else "joined"

    @override
    def training_samples(self, num_samples: int | None) -> TextSamples | StreamedTexts:
        if self.streaming is None:
            return self._samples("train", self.seed, num_samples)
        max_pieces = self.streaming.max_pieces(self.seq_length)
        options = self.stream_options(num_samples)
        return StreamedTexts(is_packed=self._is_packed, max_pieces=max_pieces, **options)

    @override
    def evaluation_samples(self, set_name: str) -> TextSamples:
        # With a fixed seed, `limit_val_batches` selects the same text in every run.
        return self._samples(set_name, 0, None)

    @override
    def batches_of(self, samples: Samples) -> ChatBatches:
        return ChatBatches(cast(TextSamples, samples), self._is_packed)

    @property
    def _is_packed(self) -> bool:
        return self.documents == "whole"

    def _samples(self, set_name: str, seed: int, num_samples: int | None) -> TextSamples:
        rows = self.encoded(set_name)
        return TextSamples(rows, self.seq_length, seed, self._is_packed, num_samples)
