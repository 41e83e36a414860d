"""Tensor files with checksums, in the format of torch.distributed.checkpoint."""

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
from lightning_megatron.checkpoint.entries import BoxToWrite
from lightning_megatron.checkpoint.header import METADATA, TENSOR_INDEX
from lightning_megatron.checkpoint.storage import (
    FileRecord,
    Folder,
    HashingStream,
    open_for_writing,
    read_record,
)
from lightning_megatron.checkpoint.tensor_index import (
    SavedTensor,
    StoredPiece,
    common_part,
    write_index,
)
from lightning_megatron.errors import CorruptDataError
from lightning_megatron.groups.axis import MeshAxis
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import Placement


def write_piece(piece: BoxToWrite, file: str, stream: HashingStream) -> StoredPiece:
    """Append a piece of a tensor to a file."""
    start = stream.tell()
    view = piece.view.detach()
    torch.save(_alone(view), stream)
    length = stream.tell() - start
    box = piece.box
    return StoredPiece(
        piece.name, view.dtype, piece.full_shape, box.offsets, box.sizes, file, start, length
    )


def write_object(name: str, data: bytes, file: str, stream: HashingStream) -> StoredPiece:
    """Append a pickled object to a file."""
    start = stream.tell()
    stream.write(data)
    return StoredPiece(name, None, (), (), (), file, start, len(data))


def write_metadata(
    folder: Folder, metadata: bytes, pieces: Iterable[StoredPiece]
) -> dict[str, FileRecord]:
    """Write the values of the job and the tensor index; return the records of both files."""
    with open_for_writing(folder, METADATA) as values:
        values.write(metadata)
    with open_for_writing(folder, TENSOR_INDEX) as index:
        write_index(pieces, index)
    return {METADATA: values.record, TENSOR_INDEX: index.record}


def _alone(data: Tensor) -> Tensor:
    """Return a host tensor whose storage has no other data, since ``torch.save`` would write it."""
    host = data.cpu()
    return host if host.untyped_storage().size() == host.nbytes else host.clone()


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
    if name not in checkpoint.header.files:
        raise damaged(checkpoint, name, "the header does not list it")
    expected = checkpoint.header.files[name].size
    try:
        size = checkpoint.folder.size(name)
    except FileNotFoundError as error:
        raise damaged(checkpoint, name, "it is missing") from error
    except OSError as error:
        raise damaged(checkpoint, name, f"it cannot be read ({error})") from error
    if size != expected:
        raise damaged(checkpoint, name, f"it has {size} bytes, but {expected} were written")


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
        check_size(checkpoint, name)
    # Sort by size, so that all ranks read about the same number of bytes.
    names = sorted(files, key=lambda name: (-files[name].size, name))
    for name in names[axis.rank :: axis.size]:
        check_size(checkpoint, name)
        _check_sum(checkpoint, name, read_record(checkpoint.folder, name).checksum)


def _check_sum(checkpoint: Checkpoint, name: str, checksum: str) -> None:
    expected = checkpoint.header.files[name].checksum
    if checksum != expected:
        raise damaged(checkpoint, name, f"its checksum is {checksum}, but {expected} was written")
