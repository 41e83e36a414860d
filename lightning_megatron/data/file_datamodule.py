"""Base class of data modules of files whose rows are encoded: before their use, or as a stream."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from typing_extensions import override

from lightning_megatron.data.corpora import SetPaths, all_paths, named_sets
from lightning_megatron.data.encoded_rows import EncodedRows, RowEncoder
from lightning_megatron.data.loader import SampleBatches, StreamLoader, TokenLoader
from lightning_megatron.data.row_datamodule import RowDataModule, log_row_counts, row_arguments
from lightning_megatron.data.row_files import find_row_files, sizes_of
from lightning_megatron.data.sampler import TokenBatchSampler
from lightning_megatron.data.samples import Samples
from lightning_megatron.data.stream_sections import RowStream
from lightning_megatron.data.streamed_samples import StreamedSamples
from lightning_megatron.data.streaming import (
    Streaming,
    check_no_sample_number,
    check_stream_trainer,
)


class FileDataModule(RowDataModule):
    """Batches of the rows of files, such as conversations or documents.

    A subclass provides the encoder of the rows, the samples of each part of the data, which is
    encoded before training or read as a stream during training, and batches of them.

    Args:
        parts: Files, folders or globs of ``train``, ``val`` and ``test``; None for a part without
            data. ``val`` and ``test`` may map names to the files of several sets.
        settings: Checked arguments of the data module: ``streaming``, those of ``RowDataModule``,
            and ``cache_dir`` if there is one.

    Raises:
        UnsupportedError: If files are missing, or settings conflict.
    """

    #: Plural noun for the rows of files, and an example of one, for errors.
    plural: ClassVar[str]
    example: ClassVar[str]

    def __init__(self, parts: Mapping[str, SetPaths], settings: Mapping[str, Any]) -> None:
        super().__init__(**row_arguments(settings))
        sets = {part: named_sets(part, parts[part]) for part in ("val", "test")}
        self.set_names = {part: tuple(named) for part, named in sets.items()}
        #: Files of each part with data, or of each named set of a part (key "val/news").
        self.files = {
            f"{part}/{name}" if name else part: find_row_files(paths, self.plural, self.example)
            for part, part_paths in parts.items()
            for name, paths in (sets.get(part) or {"": all_paths(part_paths)}).items()
            if paths
        }
        self.cache_dir = Path(
            settings.get("cache_dir") or self.files["train"][0].parent / "index_cache"
        )
        #: Settings of the stream of training rows; None encodes them before training.
        self.streaming: Streaming | None = settings["streaming"]
        if self.streaming is not None:
            check_no_sample_number(settings.get("train_samples"))
        self._encoded: dict[str, EncodedRows] = {}

    @property
    @abstractmethod
    def encoder(self) -> RowEncoder:
        """Encoder of the rows of files."""

    def setup(self, stage: str | None = None) -> None:
        """Encode the rows of a stage, so that invalid rows raise errors before the first step."""
        self.restart()
        if stage in ("fit", None) and self.streaming is not None:
            check_stream_trainer(self.trainer)
        parts = {"fit": ("train", "val"), "validate": ("val",), "test": ("test",)}
        for part in parts.get(stage or "", ("train", "val", "test")):
            for set_name in self.sets_of(part):
                if not self.is_streamed(set_name):
                    self.read(set_name)

    def is_streamed(self, part: str) -> bool:
        """Return whether a part is read as a stream instead of being encoded before its use.

        Args:
            part: ``train``, ``val`` or ``test``, or a named set such as ``val/news``.
        """
        return part == "train" and self.streaming is not None

    def read(self, part: str) -> None:
        """Read and encode a part that is not read as a stream.

        Args:
            part: ``train``, ``val`` or ``test``, or a named set such as ``val/news``.
        """
        self.encoded(part)

    def encoded(self, part: str) -> EncodedRows:
        """Return the encoded rows of a part; the first call logs how many were cut and left out.

        Args:
            part: ``train``, ``val`` or ``test``, or a named set such as ``val/news``.
        """
        if part not in self._encoded:
            rows = EncodedRows(self.files[part], self.encoder, self.cache_dir)
            log_row_counts(rows.summary(), rows.num_cut + rows.num_left_out > 0)
            self._encoded[part] = rows
        return self._encoded[part]

    def stream_options(self, num_samples: int | None, is_packed: bool) -> dict[str, Any]:
        """Return arguments of ``StreamedSamples`` for the training rows in the order of training.

        Args:
            num_samples: Samples of the run; None means that the run has a number of passes instead
                (samples).
            is_packed: Whether samples are packed rows.
        """
        assert self.streaming is not None, "only a stream has these options"
        files = self.files["train"]
        seed = self.seed if self.streaming.shuffle else None
        section_size = self.streaming.shuffle_buffer
        return {
            "stream": RowStream(
                files, self.encoder.encode_row, section_size, seed, self.num_workers
            ),
            "messages": self.encoder.messages(is_packed),
            "seq_length": self.seq_length,
            "key": {**self.stream_key, "section_size": section_size, "seed": seed},
            "report": log_row_counts,
            "num_samples": num_samples,
        }

    @property
    def stream_key(self) -> dict[str, Any]:
        """Fields that identify the training rows of a stream, except their order."""
        # The contents are unknown until the stream has been read, so sizes identify the files.
        return {"files": [sizes_of(path) for path in self.files["train"]], **self.encoder.key}

    @override
    @abstractmethod
    def training_samples(self, num_samples: int | None) -> Samples: ...

    @abstractmethod
    def batches_of(self, samples: Samples) -> SampleBatches:
        """Return the batches of samples."""

    @override
    def loader_of(self, samples: Samples, sampler: TokenBatchSampler) -> TokenLoader:
        kind = StreamLoader if isinstance(samples, StreamedSamples) else TokenLoader
        return kind(self.batches_of(samples), sampler, self.num_workers, self.pin_memory)

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

    def sets_of(self, part: str) -> list[str]:
        """Return the named sets of a part, such as ``val/news``, or the part if it has no names.

        Args:
            part: ``train``, ``val`` or ``test``; without files there are no sets.
        """
        return [
            set_name
            for set_name in self.files
            if set_name == part or set_name.startswith(f"{part}/")
        ]

    def _evaluation(self, part: str) -> TokenLoader | list:
        loaders = [
            self.evaluation_loader(self.evaluation_samples(set_name))
            for set_name in self.sets_of(part)
        ]
        return loaders if self.set_names[part] or not loaders else loaders[0]
