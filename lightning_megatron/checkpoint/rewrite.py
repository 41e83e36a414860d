"""Copy of a checkpoint with another number of files, in another dtype, or of the weights only."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.checkpoint.consolidate import (
    MODEL,
    WrittenSize,
    read_one_by_one,
    without_training,
)
from lightning_megatron.checkpoint.directory import checkpoint_path_of
from lightning_megatron.checkpoint.entries import BoxToWrite
from lightning_megatron.checkpoint.header import METADATA, Header
from lightning_megatron.checkpoint.load import load_metadata
from lightning_megatron.checkpoint.metadata_checks import ONE_PROCESS, OPTIMIZERS, check_names
from lightning_megatron.checkpoint.open_checkpoint import OpenCheckpoint
from lightning_megatron.checkpoint.storage import open_for_writing
from lightning_megatron.checkpoint.tensor_files import (
    read_object,
    verify_checkpoint,
    write_metadata,
    write_object,
    write_piece,
)
from lightning_megatron.checkpoint.tensor_index import StoredPiece
from lightning_megatron.checkpoint.values import to_bytes
from lightning_megatron.groups.shard_spec import Box

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
    metadata = load_metadata(stored, weights_only=not unsafe)
    if ONE_PROCESS in metadata:
        shapes = {name: tensor.shape for name, tensor in stored.tensors.items()}
        check_names(
            metadata[ONE_PROCESS],
            metadata.get(OPTIMIZERS, ()),
            shapes,
            stored.checkpoint.file(METADATA),
        )
    names = [name for name in stored.tensors if not weights_only or name.startswith(MODEL)]
    objects = {} if weights_only else stored.index.objects
    tensors = (
        (name, _converted(name, full, dtype)) for name, full in read_one_by_one(stored, names)
    )
    states = {name: read_object(stored.checkpoint, piece) for name, piece in objects.items()}
    kept = metadata if not weights_only else without_training(metadata)
    header = replace(stored.checkpoint.header, folder=".", torch=torch.__version__)
    return write_checkpoint(out, num_files, tensors, states, kept, header)


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

    Each piece is appended to the smallest file.

    Args:
        header: Header of the checkpoint, without its list of files.
    """
    target = checkpoint_path_of(out)
    token = target.begin()
    pieces: list[StoredPiece] = []
    sizes: list[int] = []
    try:
        folder = target.folder(token)
        with ExitStack() as stack:
            streams = {}
            for number in range(num_files):
                name = f"__{number}_0.distcp"
                streams[name] = stack.enter_context(open_for_writing(folder, name))
            for name, full in tensors:
                sizes.append(full.nbytes)
                for piece in _pieces_of(name, full):
                    file = min(streams, key=lambda file: streams[file].tell())
                    pieces.append(write_piece(piece, file, streams[file]))
            for name, data in objects.items():
                file = min(streams, key=lambda file: streams[file].tell())
                pieces.append(write_object(name, data, file, streams[file]))
        files = {name: stream.record for name, stream in streams.items()}
        files |= write_metadata(folder, to_bytes(dict(metadata)), pieces)
        target.publish(token, replace(header, files=files))
    except BaseException:
        target.discard(token)
        raise
    return WrittenSize(len(sizes), sum(sizes))


def _pieces_of(name: str, full: Tensor) -> Iterator[BoxToWrite]:
    """Divide a full tensor into pieces of whole rows."""
    shape = tuple(full.shape)
    if not shape:
        yield BoxToWrite(name, (), Box((), (), 0, 0), full)
        return
    step = max(1, _PIECE * shape[0] // max(1, full.nbytes))
    for start in range(0, shape[0], step):
        part = full[start : start + step]
        offsets = (start, *[0] * (len(shape) - 1))
        yield BoxToWrite(name, shape, Box(offsets, tuple(part.shape), 0, 0), part)
