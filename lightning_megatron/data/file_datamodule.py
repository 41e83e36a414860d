"""Base class of data modules of files whose rows are encoded: before their use, or as a stream."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import Any, ClassVar

from typing_extensions import override

from lightning_megatron.data.corpora import SetPaths, files_of_sets
from lightning_megatron.data.input_files import ROW_SUFFIXES, find_files, sizes_of
from lightning_megatron.data.row_datamodule import RowDataModule, log_row_counts
from lightning_megatron.data.row_tokens import RowEncoder
from lightning_megatron.data.stream_sections import RowStream
from lightning_megatron.data.streaming import (
    Streaming,
    check_no_sample_number,
    check_stream_trainer,
)
from lightning_megatron.plan.settings import coerced_arguments


class FileDataModule(RowDataModule):
    """Batches of the rows of files, such as conversations or documents.

    A subclass provides the encoder of the rows, the samples of each part of the data, which is
    encoded before training or read as a stream during training, and batches of them.

    Args:
        train: Files of JSON lines (.jsonl, also .gz and .zst) or Parquet, folders of them, folders
            written by ``save_to_disk`` of datasets, globs, or data sets on the Hub by name, as in
            ``OWNER/NAME:SPLIT``.
        val: Files of the validation set; None disables validation. A mapping of names to files
            defines several validation sets, each with a loader.
        test: Files of the test set; a mapping defines several sets, as for ``val``.
        streaming: Settings to read and encode the training files during training, for files that
            are too large to encode before; None encodes them before training. Validation and test
            files are always encoded before. In a Trainer without ``max_steps``, an epoch is a pass
            over the files, whose number of batches is unknown. The ``num_workers`` processes encode
            rows instead of prefetching batches.
        options: Arguments of ``RowDataModule``.

    Raises:
        UnsupportedError: If files are missing, or settings conflict.
    """

    #: Plural noun for the rows of files, and an example of one, for errors.
    plural: ClassVar[str]
    example: ClassVar[str]
    #: Suffixes of the files, without that of their compression.
    suffixes: ClassVar[tuple[str, ...]] = ROW_SUFFIXES

    def __init__(
        self,
        train: str | list[str],
        val: SetPaths = None,
        test: SetPaths = None,
        streaming: Streaming | None = None,
        **options: Any,
    ) -> None:
        given = coerced_arguments(FileDataModule.__init__, locals())
        super().__init__(**options)
        parts = {"train": given["train"], "val": given["val"], "test": given["test"]}
        self.files: dict[str, tuple[Path, ...]] = {
            name: tuple(find_files(paths, self.plural, self.suffixes, self.example))
            for name, paths in files_of_sets(parts).items()
        }
        #: Settings of the stream of training rows; None encodes them before training.
        self.streaming: Streaming | None = given["streaming"]
        if self.streaming is not None:
            check_no_sample_number(self.train_samples)

    @property
    @abstractmethod
    def encoder(self) -> RowEncoder:
        """Encoder of the rows of files."""

    @override
    def setup(self, stage: str | None = None) -> None:
        if stage in ("fit", None) and self.streaming is not None:
            check_stream_trainer(self.trainer)
        super().setup(stage)

    def is_streamed(self, part: str) -> bool:
        """Return whether a part is read as a stream instead of being encoded before its use.

        Args:
            part: ``train``, ``val`` or ``test``, or a named set such as ``val/news``.
        """
        return part == "train" and self.streaming is not None

    def stream_options(self, num_samples: int | None) -> dict[str, Any]:
        """Return arguments of ``StreamedSamples`` for the training rows in the order of training.

        Args:
            num_samples: Samples of the run; None means that the run has a number of passes instead
                (samples).
        """
        assert self.streaming is not None, "only a stream has these options"
        files = self.files["train"]
        seed = self.seed if self.streaming.shuffle else None
        section_size = self.streaming.shuffle_buffer
        return {
            "stream": RowStream(files, self.encoder, section_size, seed, self.num_workers),
            "key": {**self.stream_key, "section_size": section_size, "seed": seed},
            "report": log_row_counts,
            "num_samples": num_samples,
        }

    @property
    def stream_key(self) -> dict[str, Any]:
        """Fields that identify the training rows of a stream, except their order."""
        # The contents are unknown until the stream has been read, so sizes identify the files.
        return {"files": [sizes_of(path) for path in self.files["train"]], **self.encoder.key}
