"""Base class of the data modules of fine-tuning tasks: encoded rows, batches and metrics."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy.typing as npt
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lightning_megatron.building_blocks import (
    Count,
    RowDataModule,
    Samples,
    cache_key,
    coerced_arguments,
    hub_name,
    load_or_build,
)
from lightning_megatron.errors import UnsupportedError
from lightning_megatron.tasks.finetuning.rows import ARRAYS, TaskBatches, TaskRows, TaskSamples
from lightning_megatron.tasks.finetuning.scores import TaskScores
from lightning_megatron.tasks.finetuning.tokens import PairTokenizer, check_folder


class TaskDataModule(RowDataModule):
    """Batches of a task's rows, all of the same shape; a subclass reads and encodes the files.

    Args:
        tokenizer: Folder of the tokenizer of a BERT or RoBERTa, or its name on the Hub.
        seq_length: Length of a sequence with its special tokens; shorter ones are padded (tokens).
        cache_dir: Folder that caches the encoded rows; None keeps them in memory.
        options: Arguments of ``RowDataModule``: ``batch_size``, ``global_batch_size``, ``ramp_up``,
            ``num_workers``, ``seed``, ``train_samples``, ``pin_memory``.
    """

    order_settings = "files, tokenizer, seq_length or seed"
    files: dict[str, list[Path]]
    #: Number of classes of the task, or of outputs of its head.
    num_labels: int
    #: Number of sequences per row.
    choices = 1

    def __init__(
        self,
        tokenizer: str,
        seq_length: Count = 128,
        cache_dir: str | None = None,
        **options: Any,
    ) -> None:
        arguments = coerced_arguments(TaskDataModule.__init__, locals())
        super().__init__(arguments["seq_length"], **options)
        self.tokenizer_folder: str = arguments["tokenizer"]
        self.cache_dir: str | None = arguments["cache_dir"]
        self._encoded: dict[str, TaskRows] = {}

    @abstractmethod
    def settings(self) -> dict[str, object]:
        """Return the settings on which the rows depend, except tokenizer and ``seq_length``."""

    @abstractmethod
    def encode(self, part: str) -> dict[str, npt.NDArray]:
        """Encode the rows of a part, and return their arrays by name.

        Args:
            part: ``train``, ``val`` or ``test``.
        """

    @abstractmethod
    def new_scores(self, part: str) -> TaskScores:
        """Return a new metric for the rows of a part that has files.

        Args:
            part: ``val`` or ``test``.
        """

    @cached_property
    def tokenizer(self) -> PairTokenizer:
        """Tokenizer of the folder, loaded at the first use."""
        return PairTokenizer(self.tokenizer_folder)

    @property
    def vocab_size(self) -> int:
        """Largest token id of the tokenizer plus 1."""
        return self.tokenizer.vocab_size

    @override
    def check_before_launch(self, stage: str | None) -> None:
        if hub_name(self.tokenizer_folder, "model") is None:
            check_folder(self.tokenizer_folder)

    @override
    def read(self, set_name: str) -> None:
        self.encoded(set_name)

    def encoded(self, part: str) -> TaskRows:
        """Return the encoded rows of a part; log the numbers of omitted rows and truncated texts.

        Args:
            part: ``train``, ``val`` or ``test``.
        """
        if part in self._encoded:
            return self._encoded[part]
        paths = self.files[part]
        fields = {
            "files": [_sha256(path) for path in paths],
            "tokenizer": self.tokenizer.fingerprint,
            "seq_length": self.seq_length,
            "task": [type(self).__name__, part, self.settings()],
        }
        names = (*ARRAYS, *self.further_arrays)
        encoded = (
            self.encode(part)
            if self.cache_dir is None
            else load_or_build(Path(self.cache_dir), fields, lambda: self.encode(part), names)
        )
        arrays: Any = {name: encoded[name] for name in ARRAYS}
        rows = TaskRows(**arrays, choices=self.choices, key=cache_key(fields))
        self.keep(part, {name: encoded[name] for name in self.further_arrays})
        num_left_out, num_cut = rows.counts.tolist()
        notify = rank_zero_warn if num_left_out + num_cut else rank_zero_info
        notify(
            f"Rows of {', '.join(map(str, paths))}: {len(rows)} read, {num_left_out} malformed "
            f"rows left out, {num_cut} texts truncated to {self.seq_length} tokens (seq_length)."
        )
        self._encoded[part] = rows
        return rows

    #: Names of additional arrays from ``encode`` that the metric needs.
    further_arrays: tuple[str, ...] = ()

    def keep(self, part: str, arrays: dict[str, npt.NDArray]) -> None:
        """Keep the additional arrays of a part for its metric.

        Args:
            part: ``train``, ``val`` or ``test``.
        """

    def scores(self, part: str) -> TaskScores | None:
        """Return a new metric for the rows of a part; None if the part has no files.

        Args:
            part: ``val`` or ``test``.
        """
        return self.new_scores(part) if part in self.files else None

    @override
    def training_samples(self, num_samples: int | None) -> TaskSamples:
        return TaskSamples(self.encoded("train"), self.seq_length, self.seed, num_samples)

    @override
    def batches_of(self, samples: Samples) -> TaskBatches:
        return TaskBatches(cast(TaskSamples, samples), self.tokenizer.padding)

    @override
    def evaluation_samples(self, set_name: str) -> TaskSamples:
        return TaskSamples(self.encoded(set_name), self.seq_length)

    def predict_dataloader(self) -> Any:
        """Build the loader that yields every test row once."""
        return self.evaluation_loaders("test")


def present(what: str, paths: Iterable[Path]) -> None:
    """Raise if a file is missing.

    Args:
        what: Name of the files, as the subject of the error message.
        paths: Files that must exist.
    """
    for path in paths:
        if not path.is_file():
            raise UnsupportedError(
                f"{what} must exist: {str(path)!r} does not. Nothing is downloaded. Copy the data "
                "set there, or name its folder."
            )


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
