"""Checkpoint opened for reading: its files are checked, and its tensors are loaded."""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO

import torch
from torch import Tensor

from lightning_megatron.checkpoint.collective_steps import verify_together
from lightning_megatron.checkpoint.directory import Checkpoint, find_checkpoint
from lightning_megatron.checkpoint.header import METADATA, TENSOR_INDEX
from lightning_megatron.checkpoint.storage import read_record
from lightning_megatron.checkpoint.tensor_index import (
    SavedTensor,
    StoredPiece,
    TensorIndex,
    common_part,
)
from lightning_megatron.errors import CheckpointMismatchError, CorruptDataError
from lightning_megatron.groups.axis import MeshAxis
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import Placement, copy_from_full, replicated_spec


@dataclass(frozen=True)
class TensorToRead:
    """Local tensor and the entry from which it is loaded."""

    source: str
    tensor: Tensor
    placement: Placement


def read_tensors(
    checkpoint: Checkpoint, saved: Mapping[str, SavedTensor], targets: Iterable[TensorToRead]
) -> None:
    """Load local tensors; every stored piece is read once, and boxes may differ from the saved."""
    # Of each file: the pieces by position, each with the views into which parts of it are copied.
    by_file: dict[str, dict[int, tuple[StoredPiece, list[tuple[Tensor, tuple[slice, ...]]]]]] = {}
    for target in targets:
        for box, view in target.placement.local_views(target.tensor.detach()):
            for piece in saved[target.source].pieces:
                part = common_part(piece, box.offsets, box.sizes)
                if part is not None:
                    pieces = by_file.setdefault(piece.file, {})
                    copies = pieces.setdefault(piece.start, (piece, []))[1]
                    into = view[_within(part, box.offsets)]
                    copies.append((into, _within(part, piece.offsets)))
    for name, pieces in sorted(by_file.items()):
        with _open(checkpoint, name) as file:
            for _, (piece, copies) in sorted(pieces.items()):
                stored = _stored_tensor(checkpoint, file, piece)
                for into, where in copies:
                    try:
                        into.copy_(stored[where])
                    except NotImplementedError as error:
                        reason = f"{piece.name} has the type {stored.dtype}"
                        raise damaged(checkpoint, name, reason) from error


def _within(part: Iterable[tuple[int, int]], offsets: Iterable[int]) -> tuple[slice, ...]:
    pairs = zip(part, offsets, strict=True)
    return tuple(slice(start - offset, stop - offset) for (start, stop), offset in pairs)


def read_object(checkpoint: Checkpoint, piece: StoredPiece) -> bytes:
    """Read a pickled object."""
    with _open(checkpoint, piece.file) as file:
        file.seek(piece.start)
        return file.read(piece.length)


def check_size(checkpoint: Checkpoint, name: str) -> None:
    """Check that a file exists and has the size recorded in the header."""
    _check_listed(checkpoint, name)
    expected = checkpoint.header.files[name].size
    try:
        size = checkpoint.folder.size(name)
    except FileNotFoundError as error:
        raise damaged(checkpoint, name, "it is missing") from error
    except OSError as error:
        raise damaged(checkpoint, name, f"it cannot be read ({error})") from error
    if size != expected:
        raise damaged(checkpoint, name, f"it has {size} bytes, but {expected} were written")


def _check_listed(checkpoint: Checkpoint, name: str) -> None:
    if name not in checkpoint.header.files:
        raise damaged(checkpoint, name, "the header does not list it")


def damaged(checkpoint: Checkpoint, name: str, reason: str) -> CorruptDataError:
    """Return the error for a damaged file of a checkpoint."""
    return CorruptDataError(
        f"a file of a checkpoint must be as it was written: {checkpoint.file(name)} is not: "
        f"{reason}. Use another checkpoint."
    )


@contextmanager
def _open(checkpoint: Checkpoint, name: str) -> Iterator[IO[bytes]]:
    check_size(checkpoint, name)
    try:
        with checkpoint.folder.open(name) as file:
            yield file
    except OSError as error:
        raise damaged(checkpoint, name, f"it cannot be read ({error})") from error


def _stored_tensor(checkpoint: Checkpoint, file: IO[bytes], piece: StoredPiece) -> Tensor:
    """Read one piece and check its shape and dtype against the tensor index."""
    file.seek(piece.start)
    where = f"at byte {piece.start}"
    try:
        content = io.BytesIO(file.read(piece.length))
        tensor = torch.load(content, map_location="cpu", weights_only=True)
    except Exception as error:  # a manipulated pickle can raise anything
        raise damaged(checkpoint, piece.file, f"no tensor can be read {where}") from error
    if (
        type(tensor) is not Tensor
        or tensor.layout is not torch.strided
        or tensor.device.type != "cpu"
    ):
        reason = f"{where} there is a {type(tensor).__name__} instead of a tensor"
        raise damaged(checkpoint, piece.file, reason)
    if (tuple(tensor.shape), tensor.dtype) != (piece.sizes, piece.dtype):
        raise damaged(
            checkpoint,
            piece.file,
            f"the tensor {where} has the shape {tuple(tensor.shape)} and the type {tensor.dtype}, "
            f"but the list of tensors says {piece.sizes} and {piece.dtype}",
        )
    return tensor


def content_of(checkpoint: Checkpoint, name: str) -> bytes:
    """Return the content of a small file after comparing it with its checksum."""
    with _open(checkpoint, name) as file:
        content = file.read()
    _check_sum(checkpoint, name, f"{zlib.crc32(content):08x}")
    return content


def verify_checkpoint(path: str | os.PathLike[str], mesh: ParallelMesh | None = None) -> None:
    """Check that every file of a checkpoint is intact.

    Args:
        mesh: Mesh whose ranks divide the files among them and call this function together; None
            reads all files in this process.

    Raises:
        CorruptDataError: If a file is damaged; the message names the file. With a mesh, all ranks
            raise.

    Communication: with a mesh, one gather over the world.
    """
    axis = MeshAxis("alone") if mesh is None else mesh.world_cpu
    verify_together(lambda: _verify(find_checkpoint(path), axis), axis)


def _verify(checkpoint: Checkpoint, axis: MeshAxis) -> None:
    files = checkpoint.header.files
    for name in (METADATA, TENSOR_INDEX):
        _check_listed(checkpoint, name)
    # Sort by size, so that all ranks read about the same number of bytes.
    names = sorted(files, key=lambda name: (-files[name].size, name))
    for name in names[axis.rank :: axis.size]:
        check_size(checkpoint, name)
        _check_sum(checkpoint, name, read_record(checkpoint.folder, name).checksum)


def _check_sum(checkpoint: Checkpoint, name: str, checksum: str) -> None:
    expected = checkpoint.header.files[name].checksum
    if checksum != expected:
        raise damaged(checkpoint, name, f"its checksum is {checksum}, but {expected} was written")


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
            copy_from_full(target.placement, target.tensor.detach(), full)


#: Tensors to load: the path or URL of a checkpoint, an opened checkpoint, or full tensors.
Source = str | os.PathLike[str] | OpenCheckpoint | FullTensors


def open_source(source: Source) -> OpenCheckpoint | FullTensors:
    """Open a checkpoint, or return the one that is already open.

    Code that reads several times should pass an opened checkpoint, whose index is parsed once.
    """
    return OpenCheckpoint.open(source) if isinstance(source, str | os.PathLike) else source
