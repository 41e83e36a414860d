"""Checkpoints of Hugging Face models whose layers were not replaced by layers of this package."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.checkpoint.consolidate import MODEL, read_one_by_one
from lightning_megatron.checkpoint.open_checkpoint import OpenCheckpoint
from lightning_megatron.errors import CheckpointMismatchError, UnsupportedError
from lightning_megatron.extras import import_extra
from lightning_megatron.swap.hugging_face.own_code import OWN_CODE
from lightning_megatron.swap.tensors.low_rank import is_factor, plain_name
from lightning_megatron.swap.tensors.mapping import named
from lightning_megatron.swap.weights.export import export_as_it_is
from lightning_megatron.swap.weights.file_format import FileFormat, block


@dataclass(frozen=True)
class SavedOwnCodeModel:
    """Hugging Face model of a checkpoint, with the tensor names of its class.

    Args:
        empty: Shapes of the tensors without elements, which are not stored, by entry.
        form: Conversion between the tensors of the model and of its files; None if they are equal.
    """

    path: str | os.PathLike[str]
    architecture: str
    config: Mapping[str, Any]
    entries: Mapping[str, str]
    empty: Mapping[str, list[int]]
    form: FileFormat | None

    @classmethod
    def of(
        cls, path: str | os.PathLike[str], record: Mapping[str, Any], one_process: Mapping[str, Any]
    ) -> SavedOwnCodeModel:
        """Return a model of a checkpoint."""
        name = record["architecture"]
        config = record["config"]
        names = record[OWN_CODE]
        entries = {key: f"{MODEL}{entry}" for key, entry in names["tensors"].items()}
        adapted = [key for key in entries if is_factor(key) or plain_name(key) != key]
        if adapted:
            raise UnsupportedError(
                "a model with its own code must be written without an adapter: peft has wrapped "
                f"layers of this {name} ({named(adapted)}), and files of the class have no place "
                "for their tensors. Call save_pretrained of the PeftModel on all ranks, or let "
                "`lightning-megatron checkpoint consolidate` write a file for one process."
            )
        empty = {f"{MODEL}{key}": shape for key, shape in one_process.get("empty", {}).items()}
        missing = set(entries.values()) - OpenCheckpoint.open(path).tensors.keys() - empty.keys()
        if missing:
            raise CheckpointMismatchError(
                f"a checkpoint must have all tensors of {name}: {named(missing)} missing in "
                f"{os.fspath(path)}. Hugging Face would initialise them at random. Save a "
                "checkpoint with all weights."
            )
        form = FileFormat.of_class(name, config) if names["has_other_format"] else None
        return cls(path, name, config, entries, empty, form)

    def export(
        self, out: str | os.PathLike[str], max_file_bytes: int, dtype: torch.dtype | None = None
    ) -> None:
        """Write the model as a folder that ``from_pretrained`` reads.

        Args:
            max_file_bytes: Limit of a file's size, except for a file with one larger tensor
                (bytes).
        """
        saved = OpenCheckpoint.open(self.path).tensors
        shapes = {
            name: tuple(self.empty[entry]) if entry in self.empty else saved[entry].shape
            for name, entry in self.entries.items()
        }
        export_as_it_is(
            self.tensors(),
            shapes,
            self.form,
            self.config,
            self.architecture,
            out,
            max_file_bytes,
            dtype,
        )

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the full tensors with their names in the model, one block after the other."""
        name_of = {entry: name for name, entry in self.entries.items()}
        for entry, shape in self.empty.items():
            if entry in name_of:
                yield name_of.pop(entry), torch.empty(shape)
        entries = sorted(name_of, key=lambda entry: block(name_of[entry]))
        yield from (
            (name_of[entry], full)
            for entry, full in read_one_by_one(OpenCheckpoint.open(self.path), entries)
        )

    def gap(self, folder: str) -> float:
        """Return the largest difference between a folder's tensors and those of the checkpoint.

        Returns:
            Largest difference, relative to the largest element of the tensor; infinity if tensors
            are missing, unexpected or of another shape
        """
        library: Any = import_extra("transformers", "hf")
        kind = getattr(library, self.architecture, None)
        if kind is None:
            raise UnsupportedError(
                f"--verify needs the class of the model: {self.architecture!r} is not in "
                f"transformers {library.__version__}. Leave --verify out."
            )
        model, report = kind.from_pretrained(folder, dtype="auto", output_loading_info=True)
        state = model.state_dict()
        largest_gap = 0.0
        for name, full in self.tensors():
            loaded = state.get(name)
            if any(report.values()) or loaded is None or loaded.shape != full.shape:
                return float("inf")
            if full.numel():
                largest = full.abs().max().item() or 1.0
                largest_gap = max(
                    largest_gap, (loaded.to(full.dtype) - full).abs().max().item() / largest
                )
        return largest_gap
