"""Checkpoint opened for reading, with its validated tensor index."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_megatron.checkpoint.directory import Checkpoint, find_checkpoint
from lightning_megatron.checkpoint.header import TENSOR_INDEX
from lightning_megatron.checkpoint.tensor_files import (
    TensorToRead,
    content_of,
    damaged,
    read_tensors,
)
from lightning_megatron.checkpoint.tensor_index import SavedTensor, TensorIndex
from lightning_megatron.errors import CheckpointMismatchError
from lightning_megatron.groups.shard_spec import replicated_spec


@dataclass(frozen=True)
class OpenCheckpoint:
    """Checkpoint opened for reading."""

    checkpoint: Checkpoint
    index: TensorIndex

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> OpenCheckpoint:
        """Open the checkpoint at ``path``."""
        checkpoint = find_checkpoint(path)
        header = checkpoint.header
        content = content_of(checkpoint, TENSOR_INDEX)
        try:
            index = TensorIndex.read(content, header.files, header.layout.world_size)
        except Exception as error:  # a manipulated pickle can raise anything
            raise damaged(checkpoint, TENSOR_INDEX, str(error) or type(error).__name__) from error
        return cls(checkpoint, index)

    @property
    def tensors(self) -> Mapping[str, SavedTensor]:
        """Return the shape and dtype of every full tensor, by name."""
        return self.index.tensors

    def read(self, targets: Iterable[TensorToRead]) -> None:
        """Load local tensors."""
        read_tensors(self.checkpoint, self.index.tensors, targets)

    def read_full(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Read full tensors into the memory of this process."""
        saved = self.tensors
        chosen = list(saved) if names is None else list(names)
        absent = [name for name in chosen if name not in saved]
        if absent:
            raise CheckpointMismatchError(
                f"tensors to read must be in the checkpoint: {', '.join(absent[:10])} are not in "
                f"{self.checkpoint.path!r}. It has "
                f"{', '.join(list(saved)[:10])}{', ...' if len(saved) > 10 else ''}."
            )
        full = {name: torch.empty(saved[name].shape, dtype=saved[name].dtype) for name in chosen}
        self.read(
            TensorToRead(name, tensor, replicated_spec(tensor)) for name, tensor in full.items()
        )
        return full


class FullTensors:
    """Full tensors in memory, such as those of a file of one process, to load like a checkpoint."""

    def __init__(self, full: Mapping[str, Tensor]) -> None:
        self._full = full
        self.tensors: Mapping[str, SavedTensor] = {
            name: SavedTensor(tuple(tensor.shape), tensor.dtype) for name, tensor in full.items()
        }

    def read(self, targets: Iterable[TensorToRead]) -> None:
        """Load local tensors."""
        for target in targets:
            full = self._full[target.source]
            target.placement.copy_from_full(target.tensor.detach(), full)


#: Tensors to load: the path or URL of a checkpoint, an opened checkpoint, or full tensors.
Source = str | os.PathLike[str] | OpenCheckpoint | FullTensors


def open_source(source: Source) -> OpenCheckpoint | FullTensors:
    """Open a checkpoint, or return the one that is already open.

    Code that reads several times should pass an opened checkpoint, whose index is parsed once.
    """
    return OpenCheckpoint.open(source) if isinstance(source, str | os.PathLike) else source
