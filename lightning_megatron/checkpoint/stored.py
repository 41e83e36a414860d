"""A checkpoint that is open for reading: its header, and its list of tensors, which has been checked."""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.distributed.checkpoint import LoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from lightning_megatron.checkpoint.directory import Checkpoint, find_checkpoint
from lightning_megatron.checkpoint.header import TENSOR_INDEX
from lightning_megatron.checkpoint.index_checks import check_index
from lightning_megatron.checkpoint.planners import ShardLoadPlanner, TensorToRead
from lightning_megatron.checkpoint.save import RANK_STATE
from lightning_megatron.checkpoint.storage import FileRecord
from lightning_megatron.checkpoint.tensor_files import check_size, damaged, read_tensors
from lightning_megatron.checkpoint.tensor_index import read_index
from lightning_megatron.errors import CheckpointMismatchError
from lightning_megatron.groups.shard_spec import whole_spec


@dataclass(frozen=True)
class SavedTensor:
    """Describe one entry of a checkpoint.

    Args:
        shape: Shape of the full tensor (elements).
        dtype: Its dtype.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Stored:
    """Read the tensors of a checkpoint.

    Args:
        checkpoint: Where it is.
        index: Its list of tensors, of which :func:`check_index` found nothing to say.
    """

    checkpoint: Checkpoint
    index: Metadata

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Stored:
        """Return the checkpoint ``path``.

        Raises:
            CheckpointMismatchError: If there is no complete checkpoint.
            CorruptDataError: If its header or its list of tensors is damaged or contradicts itself, naming the file.
        """
        checkpoint = find_checkpoint(path)
        content = io.BytesIO(content_of(checkpoint, TENSOR_INDEX))
        try:
            index = read_index(content)
            check_index(index, checkpoint.header.files)
            _check_ranks(index, checkpoint.header.layout.world_size)
        except Exception as error:  # a pickle that was edited fails in whatever way
            raise damaged(checkpoint, TENSOR_INDEX, str(error) or type(error).__name__) from error
        return cls(checkpoint, index)

    @cached_property
    def tensors(self) -> dict[str, SavedTensor]:
        """Return what is known of the full tensors, by name."""
        return {
            name: SavedTensor(tuple(entry.size), entry.properties.dtype)
            for name, entry in self.index.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }

    def read(self, planner: LoadPlanner) -> None:
        """Read what a planner asks for.

        Raises:
            CorruptDataError: If a file that is read is damaged, naming it.
        """
        read_tensors(self.checkpoint, self.index, planner)

    def read_full(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Read full tensors into the memory of this process.

        Args:
            names: The entries to read; None means all.

        Raises:
            CheckpointMismatchError: If the checkpoint lacks one.
            CorruptDataError: If a file that is read is damaged, naming it.
        """
        saved = self.tensors
        chosen = list(saved) if names is None else list(names)
        absent = [name for name in chosen if name not in saved]
        if absent:
            raise CheckpointMismatchError(
                f"tensors to read must be in the checkpoint: {', '.join(absent[:10])} are not in "
                f"{self.checkpoint.path!r}. It has {', '.join(list(saved)[:10])}{', ...' if len(saved) > 10 else ''}."
            )
        full = {name: torch.empty(saved[name].shape, dtype=saved[name].dtype) for name in chosen}
        wanted = {name: TensorToRead(name, tensor, whole_spec(tensor)) for name, tensor in full.items()}
        self.read(ShardLoadPlanner(wanted))
        return full


def content_of(checkpoint: Checkpoint, name: str) -> bytes:
    """Read a small file whole.

    Raises:
        CorruptDataError: Naming the file, if it is not as it was written.
    """
    wanted = checkpoint.header.files.get(name)
    if wanted is None:
        raise damaged(checkpoint, name, "the header does not list it")
    check_size(checkpoint, name)
    try:
        with checkpoint.folder.open(name) as file:
            content = file.read()
    except OSError as error:
        raise damaged(checkpoint, name, f"it cannot be read ({error})") from error
    found = FileRecord(len(content), f"{zlib.crc32(content):08x}")
    if found != wanted:
        raise damaged(checkpoint, name, f"it has {found.size} bytes, checksum {found.checksum}; written were {wanted}")
    return content


def _check_ranks(index: Metadata, world_size: int) -> None:
    """Refuse values of other ranks than those that saved; a checkpoint of weights has none."""
    found = {name for name, entry in index.state_dict_metadata.items() if not isinstance(entry, TensorStorageMetadata)}
    if found and (len(found) != world_size or found != {f"{RANK_STATE}{rank}" for rank in range(world_size)}):
        raise ValueError(f"it has values of {len(found)} ranks, the header says {world_size}")
