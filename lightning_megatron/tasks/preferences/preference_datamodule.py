"""Data module of preference pairs: a chosen and a rejected answer to the same prompt."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from torch import Tensor
from typing_extensions import override

from lightning_megatron.building_blocks import (
    Count,
    EncodedText,
    FileRow,
    RowTokens,
    Samples,
    StreamedSamples,
    cache_key,
    coerced_arguments,
)
from lightning_megatron.errors import CorruptDataError, UnsupportedError
from lightning_megatron.tasks.chat import (
    REMEDY,
    Conversation,
    ConversationDataModule,
    ConversationEncoder,
    messages_of,
    side_of,
    tools_of,
)
from lightning_megatron.tasks.preferences.preference_samples import (
    PairBatches,
    PairRows,
    PairSamples,
    PreferenceSamples,
    shuffled,
)


@dataclass(frozen=True)
class PreferencePair:
    """Two continuations of one prompt."""

    chosen: Conversation
    rejected: Conversation


def pair_of(row: FileRow) -> PreferencePair:
    """Return the preference pair of a row."""
    return _pair(row.fields(), row.place)


def _pair(row: Mapping[str, Any], place: str) -> PreferencePair:
    if not {"chosen", "rejected"}.issubset(row):
        raise CorruptDataError(
            f"{place} must have chosen and rejected, and may have prompt: its fields are "
            f"{sorted(row)}. {REMEDY}"
        )
    tools = tools_of(row, place)
    sides = {}
    if "prompt" in row:
        prompt = side_of(row["prompt"], "user", f"{place}: prompt")
        for name in ("chosen", "rejected"):
            sides[name] = (*prompt, *side_of(row[name], "assistant", f"{place}: {name}"))
        num_prompt_messages = len(prompt)
    else:
        for name in ("chosen", "rejected"):
            if isinstance(row[name], str):
                raise CorruptDataError(
                    f"{place}: {name} must be a list of messages if the row has no prompt: it is a "
                    "text. Without prompt, chosen and rejected begin with the messages of the "
                    f"prompt. {REMEDY}"
                )
            sides[name] = messages_of(row[name], f"{place}: {name}")
        num_prompt_messages = _num_common(sides["chosen"], sides["rejected"])
        if not num_prompt_messages:
            raise CorruptDataError(
                f"{place}: chosen and rejected must begin with the same prompt: their first "
                f"messages differ. {REMEDY}"
            )
    if sides["chosen"] == sides["rejected"]:
        raise CorruptDataError(
            f"{place}: chosen and rejected must differ, because equal answers express no "
            f"preference: they are equal. {REMEDY}"
        )
    for name, messages in sides.items():
        if not any(message["role"] == "assistant" for message in messages[num_prompt_messages:]):
            raise CorruptDataError(
                f"{place}: {name} has no message of the role assistant after the prompt. {REMEDY}"
            )
    chosen, rejected = (
        Conversation(messages, num_prompt_messages, tools, place) for messages in sides.values()
    )
    return PreferencePair(chosen, rejected)


def _num_common(first: tuple[Any, ...], second: tuple[Any, ...]) -> int:
    """Return the number of messages with which both conversations begin."""
    same = [left == right for left, right in zip(first, second, strict=False)]
    return same.index(False) if False in same else len(same)


class StreamedPairs(StreamedSamples[PairRows]):
    """Preference pairs of a stream."""

    def pair(self, index: int) -> int:
        """Return the number of the pair of a sample, which is that of its row in the files."""
        pairs, number = self.in_section(index)
        return pairs.pair(number)

    def text(self, index: int, side: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Return the tokens of a conversation, and a mask of those that belong to answers."""
        pairs, number = self.in_section(index)
        return pairs.text(number, side)

    @override
    def samples_of(self, rows: RowTokens, random: np.random.RandomState | None) -> PairRows:
        return PairRows(rows, shuffled(len(rows), random))


@dataclass(frozen=True)
class PairEncoder(ConversationEncoder):
    """Encoder of the rows of files as preference pairs, the chosen conversation of each pair first.

    A pair is left out if one of its conversations is left out, or if truncation makes both equal.

    Args:
        seq_length: Tokens that a conversation predicts; it has at most one more (tokens).
        too_long: Treatment of pairs with a longer conversation: cut its end, leave the pair out, or
            raise an error.
    """

    plural = "pairs"
    num_texts = 2

    @override
    def encode_row(self, row: FileRow) -> tuple[EncodedText, ...] | None:
        pair = pair_of(row)
        chosen = self.encode(pair.chosen)
        rejected = self.encode(pair.rejected)
        if chosen is None or rejected is None:
            return None
        if not np.array_equal(chosen.tokens, rejected.tokens):
            return chosen, rejected
        if chosen.was_cut or rejected.was_cut:
            return None
        raise CorruptDataError(
            f"{row.place}: chosen and rejected must have different tokens, because equal ones "
            f"express no preference: the chat template of {self.tokenizer.folder} makes the same "
            f"{len(chosen.tokens)} tokens of both. Let the template write the content of each "
            "message, or remove the row."
        )


class PreferenceDataModule(ConversationDataModule):
    """Batches of pairs of a chosen and a rejected answer to the same prompt, for ``DPO``.

    Each row of a file has ``prompt``, ``chosen`` and ``rejected`` as texts or lists of messages, or
    ``chosen`` and ``rejected`` as lists of messages that begin with the same prompt. The chat
    template of the tokenizer makes the tokens, as in ``ChatDataModule``. The error for a row that
    is not a pair names its file and line.

    Shapes:
        A batch is {"tokens": (B, 2, S), "labels": (B, 2, S), "pairs": (B,)}. The chosen
        conversation of each pair comes first. Labels are shifted by one token, and -100 where the
        next token does not belong to an answer. ``pairs`` is the number of each pair: its line or
        row in its file, counted from 0, plus 2^40 times the index of the file.

    Args:
        train: Files of JSON lines (.jsonl, also .gz) or Parquet, folders of them, or globs.
        tokenizer: Folder of a Hugging Face tokenizer, or a model's name on the Hub.
        length_multiple: The length of a batch is that of its longest conversation, rounded up to a
            multiple of this number. With None it is always ``seq_length``, which CUDA graphs and
            experts on several ranks need (tokens).
        options: Arguments of ``ConversationDataModule``: ``chat_template``, ``too_long``,
            ``cache_dir``, those of ``FileDataModule``: ``val``, ``test``, ``streaming`` (without
            ``max_conversations``; ``DPO`` first reads all files once, for the reference model), and
            those of ``RowDataModule``: ``seq_length`` (tokens that a conversation predicts),
            ``batch_size``, ``global_batch_size``, ``ramp_up``, ``num_workers``, ``seed``,
            ``train_samples``, ``pin_memory``.

    Raises:
        ParallelPlanError: If a value has a wrong type or is out of range.
        UnsupportedError: If files or the template are missing, or settings conflict.
        CorruptDataError: If a row is not a pair (in ``setup``); the message names its file and
            line.
        MissingExtraError: If transformers is not installed, or pyarrow for Parquet files.
    """

    encoder_class = PairEncoder
    order_settings = "files, tokenizer, template, seq_length, too_long, streaming or seed"

    def __init__(
        self,
        train: str | list[str],
        tokenizer: str,
        *,
        length_multiple: Count | None = 64,
        **options: Any,
    ) -> None:
        given = coerced_arguments(PreferenceDataModule.__init__, locals())
        super().__init__(train, tokenizer, **options)
        self.length_multiple: int | None = given["length_multiple"]
        if self.streaming is not None and self.streaming.max_conversations is not None:
            raise UnsupportedError(
                f"streaming.max_conversations ({self.streaming.max_conversations}) cannot be "
                "used with pairs, because each pair has its own row. Leave it out."
            )

    @override
    def training_samples(self, num_samples: int | None) -> PreferenceSamples:
        if self.streaming is None:
            return PairSamples(self.encoded("train"), self.seq_length, self.seed, num_samples)
        return StreamedPairs(**self.stream_options(num_samples))

    @override
    def evaluation_samples(self, set_name: str) -> PairSamples:
        # With a fixed seed, `limit_val_batches` selects the same pairs in every run.
        return PairSamples(self.encoded(set_name), self.seq_length, 0)

    @override
    def batches_of(self, samples: Samples) -> PairBatches:
        return PairBatches(cast(PreferenceSamples, samples), self.length_multiple)

    def each_pair_once(self, part: str) -> Iterable[dict[str, Tensor]]:
        """Build a loader of all pairs of a part in the order of the files, divided among ranks.

        Args:
            part: ``train``, ``val`` or ``test``, or a named set such as ``val/news``.
        """
        if not self.is_streamed(part):
            in_order = PairSamples(self.encoded(part), self.seq_length, None)
            return self.evaluation_loader(in_order)
        options = self.stream_options(None)
        # The training itself reports how many pairs were read, cut and left out.
        options |= {"stream": replace(options["stream"], seed=None), "report": lambda *_: None}
        return self.evaluation_loader(StreamedPairs(**options))

    def pairs_key(self, part: str) -> str:
        """Return a hash of everything that determines the pairs of a part, except their order.

        Args:
            part: ``train``, ``val`` or ``test``, or a named set such as ``val/news``.
        """
        if not self.is_streamed(part):
            return self.encoded(part).key
        return cache_key(self.stream_key)
