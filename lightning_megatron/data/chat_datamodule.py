"""Data module of conversations, for training on answers (supervised fine-tuning)."""

from __future__ import annotations

from typing import Annotated, Literal, cast

from typing_extensions import override

from lightning_megatron.data.chat_samples import (
    ChatBatches,
    ChatSamples,
    ConversationSamples,
    EncodedConversations,
)
from lightning_megatron.data.chat_stream import streamed_samples
from lightning_megatron.data.conversation_datamodule import ConversationDataModule
from lightning_megatron.data.conversation_encoder import ConversationEncoder
from lightning_megatron.data.loader import TokenLoader
from lightning_megatron.data.row_datamodule import tell_of_rows
from lightning_megatron.data.sampler import TokenBatchSampler
from lightning_megatron.data.samples import Samples
from lightning_megatron.data.stream_checks import check_stream_settings
from lightning_megatron.data.stream_loader import StreamLoader
from lightning_megatron.data.streamed_samples import StreamedSamples
from lightning_megatron.data.streaming import Streaming
from lightning_megatron.data.window_packing import check_context_windows
from lightning_megatron.errors import UnsupportedError
from lightning_megatron.plan.global_batch import RampUp
from lightning_megatron.plan.settings import Count, Elements, Index, Range, coerced_arguments


class ChatDataModule(ConversationDataModule[EncodedConversations]):
    """Batches of conversations whose labels are the answers of the assistant, for fine-tuning.

    Each row of a file has ``messages`` (``role`` and ``content``), or ``prompt`` and ``completion``
    as texts or lists of messages; only the completion is trained then. The tokenizer's own chat
    template makes the tokens, and labels equal those of its mask of the assistant's tokens. A row
    that is no conversation raises with its file and line.

    Shapes:
        A batch is {"tokens": (B, S), "labels": (B, S)}: shifted labels, -100 where the next token
        is no answer's. Packed rows add {"lengths": (B, L)}, the tokens of each conversation, and
        {"position_ids": (B, S)}, which restart in each.

    Args:
        train: Files of JSON lines (.jsonl, also .gz) or Parquet, folders of them, folders written
            by ``save_to_disk`` of datasets, or globs.
        tokenizer: Local folder of a Hugging Face tokenizer.
        val: Files of the validation set; None disables validation. A mapping of names to files
            makes a set, and a loader, of each name.
        test: Files of the test set, or of named sets of them.
        chat_template: Jinja file in the place of the tokenizer's own template.
        seq_length: Tokens that a row predicts; a conversation has at most one more.
        too_long: What happens to longer conversations. "cut" keeps their beginning, "leave_out"
            drops them, "refuse" raises. Those that keep no token of an answer are left out. The
            start of a run tells how many.
        packing: Whether rows have as many whole conversations as fit best, which do not see each
            other; otherwise a row has one conversation and padding.
        batch_size: Samples per data-parallel rank and batch; 1 if no size is given.
        global_batch_size: Samples of each optimizer step over all data-parallel ranks, in place of
            ``batch_size``.
        ramp_up: Growth of ``global_batch_size`` at the start, as in ``TokenDataModule``.
        num_workers: Worker processes per rank that prefetch batches.
        seed: Seed of the order of training samples.
        train_samples: Training samples per epoch over all ranks; None means ``max_steps`` batches
            if the Trainer stops by steps alone, and one pass otherwise.
        balance_attention: Whether to balance the attention work of packed rows over data ranks, as
            in ``TokenDataModule``.
        context_windows: Windows of a packed row, which groups of context-parallel ranks share, as
            in ``TokenDataModule``.
        streaming: Whether, and how, training files are read while they are trained on, for those
            that are too large to encode before; validation and test files are read whole. Epochs
            of a Trainer without ``max_steps`` are passes, whose number of batches is unknown.
            ``num_workers`` processes then encode conversations.
        cache_dir: Folder of the encoded conversations; None uses ``index_cache`` next to the first
            file.
        pin_memory: Whether to pin batches in memory; None pins them if a GPU is available.

    Raises:
        ParallelPlanError: If a value has another type or is out of its range.
        UnsupportedError: If files or the template are missing, or settings conflict.
        CorruptDataError: If a row is no conversation (in ``setup``), with its file and line.
        MissingExtraError: If transformers, or pyarrow for Parquet, or datasets for its folders, is
            not installed.
    """

    order_settings = (
        "files, tokenizer, template, seq_length, too_long, packing, context_windows or seed"
    )

    def __init__(
        self,
        train: str | list[str],
        tokenizer: str,
        val: str | list[str] | dict[str, str | list[str]] | None = None,
        test: str | list[str] | dict[str, str | list[str]] | None = None,
        chat_template: str | None = None,
        seq_length: Count = 1024,
        too_long: Literal["cut", "leave_out", "refuse"] = "cut",
        packing: bool = True,
        batch_size: Count | None = None,
        global_batch_size: Count | None = None,
        ramp_up: RampUp | None = None,
        num_workers: Index = 0,
        seed: Annotated[int, Range(least=0, most=2**32 - 1)] = 1234,
        train_samples: Elements | None = None,
        balance_attention: bool = False,
        context_windows: Count = 1,
        streaming: Streaming | None = None,
        cache_dir: str | None = None,
        pin_memory: bool | None = None,
    ) -> None:
        given = coerced_arguments(ChatDataModule.__init__, locals())
        super().__init__({"train": train, "val": val, "test": test}, given, balance_attention)
        if balance_attention and not packing:
            raise UnsupportedError(
                "balance_attention cannot be used with packing=False, because attention over whole "
                "rows has equal work in each of them. Use packing=True, or leave it out."
            )
        if context_windows > 1 and not packing:
            raise UnsupportedError(
                f"context_windows ({context_windows}) cannot be used with packing=False, because "
                "rows of one conversation have nothing to put into windows. Use packing=True, or "
                "leave it out."
            )
        check_context_windows(given["context_windows"], given["seq_length"], is_whole=True)
        self.context_windows: int = given["context_windows"]
        self.streaming: Streaming | None = given["streaming"]
        if self.streaming is not None:
            self.streamed_parts = ("train",)
            check_stream_settings(self.streaming, given)
        #: Whether rows have several documents, by the names of ``TokenDataModule``.
        self.documents: Literal["joined", "whole"] = "whole" if packing else "joined"

    @override
    def training_samples(self, num_samples: int | None) -> ConversationSamples:
        if self.streaming is None:
            return self._samples("train", self.seed, num_samples)
        return streamed_samples(
            self.files["train"],
            ConversationEncoder(self.tokenizer, self.seq_length, self.too_long),
            self.streaming,
            self._num_windows,
            self.seed,
            self.num_workers,
            tell_of_rows,
            num_samples,
        )

    @override
    def evaluation_samples(self, part: str) -> ChatSamples:
        # Fixed seed: `limit_val_batches` then compares runs on the same text.
        return self._samples(part, 0, None)

    @override
    def loader_of(self, samples: Samples, sampler: TokenBatchSampler) -> TokenLoader:
        batches = ChatBatches(cast(ConversationSamples, samples), self._is_packed)
        kind = StreamLoader if isinstance(samples, StreamedSamples) else TokenLoader
        return kind(batches, sampler, self.num_workers, self.pin_memory)

    @property
    def _is_packed(self) -> bool:
        return self.documents == "whole"

    @property
    def _num_windows(self) -> int:
        return self.context_windows if self._is_packed else 0

    @override
    def _encode(self, part: str) -> EncodedConversations:
        return EncodedConversations(
            self.files[part], self.tokenizer, self.seq_length, self.too_long, self.cache_dir
        )

    def _samples(self, part: str, seed: int, num_samples: int | None) -> ChatSamples:
        return ChatSamples(
            self.encoded(part), self.seq_length, seed, self._num_windows, num_samples
        )
