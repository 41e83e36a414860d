"""Base class of data modules whose files have conversations or pairs of them in each row."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from typing_extensions import override

from lightning_megatron.data.chat_template import ChatTokenizer
from lightning_megatron.data.conversations import find_conversations
from lightning_megatron.data.encoded_rows import EncodedRows
from lightning_megatron.data.loader import TokenLoader
from lightning_megatron.data.named_sets import SetPaths, all_paths, named_sets
from lightning_megatron.data.row_datamodule import RowDataModule, log_row_counts, row_arguments
from lightning_megatron.data.samples import Samples
from lightning_megatron.data.stream_checks import check_stream_trainer

Encoded = TypeVar("Encoded", bound=EncodedRows)


class ConversationDataModule(RowDataModule, Generic[Encoded]):
    """Batches of the rows of files, encoded with the chat template of a tokenizer.

    A subclass encodes each part of the data and returns its samples.

    Args:
        parts: Files, folders or globs of ``train``, ``val`` and ``test``; None for a part without
            data. ``val`` and ``test`` may map names to the files of several sets.
        settings: Checked arguments of the data module: ``tokenizer``, ``chat_template``,
            ``too_long``, ``cache_dir``, and those of ``RowDataModule``.

    Raises:
        UnsupportedError: If files are missing, or settings conflict.
    """

    #: Parts that are read and encoded during training.
    streamed_parts: tuple[str, ...] = ()

    def __init__(self, parts: Mapping[str, SetPaths], settings: Mapping[str, Any]) -> None:
        super().__init__(**row_arguments(settings))
        sets = {part: named_sets(part, parts[part]) for part in ("val", "test")}
        self.set_names = {part: tuple(named) for part, named in sets.items()}
        #: Files of each part with data, or of each named set of a part (key "val/news").
        self.files = {
            f"{part}/{name}" if name else part: find_conversations(paths)
            for part, of_part in parts.items()
            for name, paths in (sets.get(part) or {"": all_paths(of_part)}).items()
            if paths
        }
        self.tokenizer_folder: str = settings["tokenizer"]
        self.chat_template: str | None = settings["chat_template"]
        self.too_long: Literal["cut", "leave_out", "refuse"] = settings["too_long"]
        self.cache_dir = Path(
            settings["cache_dir"] or self.files["train"][0].parent / "index_cache"
        )
        self._encoded: dict[str, Encoded] = {}

    @cached_property
    def tokenizer(self) -> ChatTokenizer:
        """Tokenizer with its chat template, loaded at the first use."""
        return ChatTokenizer(self.tokenizer_folder, self.chat_template)

    @property
    def vocab_size(self) -> int:
        """Largest token id of the tokenizer plus 1."""
        return self.tokenizer.vocab_size

    def setup(self, stage: str | None = None) -> None:
        """Encode the rows of a stage, so that invalid rows raise errors before the first step."""
        self.restart()
        if stage in ("fit", None) and "train" in self.streamed_parts:
            check_stream_trainer(self.trainer)
        parts = {"fit": ("train", "val"), "validate": ("val",), "test": ("test",)}
        for part in parts.get(stage or "", ("train", "val", "test")):
            for one in self.sets_of(part):
                if part not in self.streamed_parts:
                    self.encoded(one)

    def encoded(self, part: str) -> Encoded:
        """Return the encoded rows of a part; the first call logs how many were cut and left out.

        Args:
            part: ``train``, ``val`` or ``test``, or a named set such as ``val/news``.
        """
        if part not in self._encoded:
            found = self._encode(part)
            log_row_counts(found.summary(self.seq_length), found.num_cut + found.num_left_out > 0)
            self._encoded[part] = found
        return self._encoded[part]

    @override
    @abstractmethod
    def training_samples(self, num_samples: int | None) -> Samples: ...

    @abstractmethod
    def evaluation_samples(self, part: str) -> Samples:
        """Return the samples of a part, in an order that is the same in every run.

        Args:
            part: ``train``, ``val`` or ``test``, or a named set such as ``val/news``.
        """

    def val_dataloader(self) -> TokenLoader | list:
        """Build a loader that yields every validation row once, or a list of one for each set."""
        return self._evaluation("val")

    def test_dataloader(self) -> TokenLoader | list:
        """Build a loader that yields every test row once, or a list of one for each set."""
        return self._evaluation("test")

    @abstractmethod
    def _encode(self, part: str) -> Encoded:
        """Encode the files of a part."""

    def sets_of(self, part: str) -> list[str]:
        """Return the named sets of a part, such as ``val/news``, or the part if it has no names.

        Args:
            part: ``train``, ``val`` or ``test``; without files there are no sets.
        """
        return [one for one in self.files if one == part or one.startswith(f"{part}/")]

    def _evaluation(self, part: str) -> TokenLoader | list:
        found = [self.evaluation_loader(self.evaluation_samples(one)) for one in self.sets_of(part)]
        return found if self.set_names[part] or not found else found[0]
