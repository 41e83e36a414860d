"""Copy of a checkpoint with another number of files, in another dtype, or of the weights only."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from lightning_megatron.checkpoint.consolidate import (
    MODEL,
    WrittenSize,
    read_one_by_one,
    without_training,
)
from lightning_megatron.checkpoint.directory import checkpoint_path_of
from lightning_megatron.checkpoint.header import METADATA, RANK_STATE, TENSOR_INDEX, Header
from lightning_megatron.checkpoint.load import load_metadata, load_rank_states
from lightning_megatron.checkpoint.metadata_checks import ONE_PROCESS, OPTIMIZERS, check_names
from lightning_megatron.checkpoint.open_checkpoint import OpenCheckpoint
from lightning_megatron.checkpoint.storage import (
    FileRecord,
    Folder,
    HashingStream,
    open_for_writing,
)
from lightning_megatron.checkpoint.tensor_index import write_index
from lightning_megatron.checkpoint.values import to_bytes
from lightning_megatron.checkpoint.verify import verify_checkpoint

#: Approximate maximum size of a piece, so that a rank need not read the full tensor (bytes).
_PIECE = 1 << 26


def rewrite(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    num_files: int = 1,
    weights_only: bool = False,
    dtype: torch.dtype | None = None,
    unsafe: bool = False,
) -> WrittenSize:
    """Write a copy of a checkpoint, with other files or another dtype.

    Tensors are read and written one after the other, so that only a few of them are in memory at a
    time.

    Args:
        dtype: Dtype of the floating-point weights; None keeps the saved dtype.
    """
    verify_checkpoint(path)
    stored = OpenCheckpoint.open(path)
    metadata = load_metadata(path, weights_only=not unsafe)
    if ONE_PROCESS in metadata:
        shapes = {name: tensor.shape for name, tensor in stored.tensors.items()}
        check_names(
            metadata[ONE_PROCESS],
            metadata.get(OPTIMIZERS, ()),
            shapes,
            stored.checkpoint.file(METADATA),
        )
    names = [name for name in stored.tensors if not weights_only or name.startswith(MODEL)]
    ranks = {} if weights_only else load_rank_states(path, weights_only=not unsafe)
    tensors = (
        (name, _converted(name, full, dtype)) for name, full in read_one_by_one(stored, names)
    )
    objects = {f"{RANK_STATE}{rank}": to_bytes(values) for rank, values in ranks.items()}
    kept = metadata if not weights_only else without_training(metadata)
    header = replace(stored.checkpoint.header, folder=".", torch=torch.__version__)
    return write_checkpoint(out, num_files, tensors, objects, kept, header)


def _converted(entry: str, full: Tensor, dtype: torch.dtype | None) -> Tensor:
    if dtype is None or not entry.startswith(MODEL) or not full.is_floating_point():
        return full
    return full.to(dtype)


def write_checkpoint(
    out: str | os.PathLike[str],
    num_files: int,
    tensors: Iterable[tuple[str, Tensor]],
    objects: Mapping[str, bytes],
    metadata: Mapping[str, Any],
    header: Header,
) -> WrittenSize:
    """Write full tensors as a checkpoint, which becomes visible when it is complete.

    Args:
        header: Header of the checkpoint, without its list of files.
    """
    target = checkpoint_path_of(out)
    token = target.begin()
    try:
        folder = target.folder(token)
        files = _TensorFiles(folder, num_files)
        count = 0
        with files.open_all():
            for name, full in tensors:
                files.add_tensor(name, full)
                count += 1
            for name, data in objects.items():
                files.add_object(name, data)
        records = files.finish()
        with open_for_writing(folder, METADATA) as stream:
            stream.write(to_bytes(dict(metadata)))
        records[METADATA] = stream.record
        target.publish(token, replace(header, files=records))
    except BaseException:
        target.discard(token)
        raise
    return WrittenSize(count, files.num_bytes)


class _TensorFiles:
    """Writer of a checkpoint's tensor files, which appends each piece to the smallest file."""

    def __init__(self, folder: Folder, num_files: int) -> None:
        self._folder = folder
        self._num_files = num_files
        self._streams: dict[str, HashingStream] = {}
        self._index = Metadata(state_dict_metadata={}, storage_data={})
        self.num_bytes = 0

    def open_all(self) -> ExitStack:
        """Open the files; return a context manager that flushes them to disk at its end."""
        stack = ExitStack()
        for number in range(self._num_files):
            name = f"__{number}_0.distcp"
            self._streams[name] = stack.enter_context(open_for_writing(self._folder, name))
        return stack

    def add_tensor(self, name: str, full: Tensor) -> None:
        """Append a full tensor in pieces of whole rows."""
        rows = full.shape[0] if full.dim() else 1
        step = max(1, _PIECE // max(1, full.nbytes // max(rows, 1)))
        chunks = []
        for start in range(0, rows, step):
            piece = full[start : start + step].clone() if full.dim() else full
            offsets = torch.Size([start, *([0] * (full.dim() - 1))]) if full.dim() else torch.Size()
            chunks.append(ChunkStorageMetadata(offsets, piece.shape))
            buffer = io.BytesIO()
            torch.save(piece, buffer)
            self._append(MetadataIndex(name, offsets), buffer)
        properties = TensorProperties.create_from_tensor(full)
        self._index.state_dict_metadata[name] = TensorStorageMetadata(
            properties, full.shape, chunks
        )
        self.num_bytes += full.element_size() * prod(full.shape)

    def add_object(self, name: str, data: bytes) -> None:
        """Append a pickled object."""
        self._append(MetadataIndex(name), io.BytesIO(data))
        self._index.state_dict_metadata[name] = BytesStorageMetadata()

    def _append(self, index: MetadataIndex, data: io.BytesIO) -> None:
        name = min(self._streams, key=lambda file: self._streams[file].tell())
        stream = self._streams[name]
        start = stream.tell()
        stream.write(data.getbuffer())
        assert self._index.storage_data is not None, "it was made as a dictionary"
        self._index.storage_data[index] = _StorageInfo(name, start, stream.tell() - start)

    def finish(self) -> dict[str, FileRecord]:
        """Write the tensor index and return the records of all files."""
        with open_for_writing(self._folder, TENSOR_INDEX) as stream:
            write_index(self._index, stream)
        return {
            **{name: stream.record for name, stream in self._streams.items()},
            TENSOR_INDEX: stream.record,
        }
