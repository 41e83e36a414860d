"""Validation of a tensor index: each element of each tensor is stored exactly once.

Checksums detect accidental damage. These checks also detect manipulation, after which the checksums
may be correct. They do not detect changed values, or a consistent swap of two tensors of the same
shape and dtype.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from lightning_megatron.checkpoint.header import RANK_STATE
from lightning_megatron.checkpoint.storage import FileRecord

#: Maximum number of elements of a tensor, so that its size in bytes fits into 64 bits.
_MAX_ELEMENTS = 1 << 59

#: Offsets and sizes of a piece (elements).
_Box = tuple[tuple[int, ...], tuple[int, ...]]
#: Name of a tensor and offsets of one of its pieces (elements).
PieceKey: TypeAlias = tuple[str, tuple[int, ...]]


@dataclass(frozen=True)
class SavedTensor:
    """Shape and dtype of a full tensor in a checkpoint, or of one of its pieces."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def check_index(index: Metadata, files: Mapping[str, FileRecord]) -> None:
    """Check that a tensor index is consistent and matches the files of the checkpoint."""
    if type(index.state_dict_metadata) is not dict or type(index.storage_data) is not dict:
        raise ValueError("it is not a list of tensors and their places")
    smallest: dict[tuple[str, tuple[int, ...] | None], int] = {}
    for name, entry in index.state_dict_metadata.items():
        if type(name) is not str:
            raise ValueError(f"{name!r} is not the name of a tensor")
        if type(entry) is TensorStorageMetadata:
            smallest |= {
                (name, offsets): size for offsets, size in _check_tensor(name, entry).items()
            }
        elif type(entry) is BytesStorageMetadata:
            smallest[name, None] = 1
        else:
            raise ValueError(f"{name!r} is a {type(entry).__name__}")
    places = {_key_of(key): stored for key, stored in index.storage_data.items()}
    if places.keys() != smallest.keys() or len(places) != len(index.storage_data):
        name = min(str(piece) for piece in (places.keys() ^ smallest.keys() or places.keys()))
        raise ValueError(f"pieces and places do not match: {name}")
    _check_places(places, smallest, files)


def check_ranks(index: Metadata, world_size: int) -> None:
    """Check that the index has values of all ranks of the saved job, or only weights.

    Raises:
        ValueError: If values of ranks are missing or unexpected.
    """
    entries = {
        name
        for name, entry in index.state_dict_metadata.items()
        if not isinstance(entry, TensorStorageMetadata)
    }
    if entries and (
        len(entries) != world_size
        or entries != {f"{RANK_STATE}{rank}" for rank in range(world_size)}
    ):
        raise ValueError(f"it has values of {len(entries)} ranks, but the header says {world_size}")


def _check_tensor(name: str, entry: TensorStorageMetadata) -> dict[tuple[int, ...], int]:
    """Validate the pieces of a tensor and return the size of each in bytes, by its offsets."""
    shape = _sizes(name, entry.size)
    properties = entry.properties
    if type(properties) is not TensorProperties or not isinstance(properties.dtype, torch.dtype):
        raise ValueError(f"{name!r} has no dtype")
    if torch.empty(0, dtype=properties.dtype).is_quantized:
        raise ValueError(
            f"{name!r} has the type {properties.dtype} of quantized tensors, which are never saved"
        )
    if properties.layout is not torch.strided:
        raise ValueError(f"{name!r} has the layout {properties.layout}, which is never saved")
    if type(entry.chunks) is not list or not all(
        type(chunk) is ChunkStorageMetadata for chunk in entry.chunks
    ):
        raise ValueError(f"{name!r} has no list of pieces")
    boxes = [(_sizes(name, chunk.offsets), _sizes(name, chunk.sizes)) for chunk in entry.chunks]
    for offsets, sizes in boxes:
        if not len(offsets) == len(sizes) == len(shape) or any(
            start + size > full for start, size, full in zip(offsets, sizes, shape, strict=True)
        ):
            raise ValueError(
                f"a piece of {name!r} at {offsets} of shape {sizes} is outside of {shape}"
            )
    count = sum(prod(sizes) for _, sizes in boxes)
    if count != prod(shape) or _overlap(boxes):
        raise ValueError(
            f"the pieces of {name!r} do not cover each of its {prod(shape)} elements once"
        )
    return {offsets: prod(sizes) * properties.dtype.itemsize for offsets, sizes in boxes}


def _sizes(name: str, value: Any) -> tuple[int, ...]:
    sizes = tuple(value) if isinstance(value, torch.Size) else None
    if (
        sizes is None
        or any(type(size) is not int or size < 0 for size in sizes)
        or prod(sizes) > _MAX_ELEMENTS
    ):
        raise ValueError(f"{name!r} has sizes that are impossible for a tensor")
    return sizes


def _overlap(boxes: Sequence[_Box]) -> bool:
    """Return whether any two boxes have an element in common."""
    filled = [box for box in boxes if 0 not in box[1]]
    if not filled or not filled[0][0]:
        return len(filled) > 1
    # Sweep along the dimension with the most cuts, where the fewest boxes are active at a time.
    dim = max(
        range(len(filled[0][0])), key=lambda dim: len({offsets[dim] for offsets, _ in filled})
    )
    active: list[_Box] = []
    for box in sorted(filled, key=lambda box: box[0][dim]):
        active = [
            active_box
            for active_box in active
            if active_box[0][dim] + active_box[1][dim] > box[0][dim]
        ]
        if any(_intersect(box, active_box) for active_box in active):
            return True
        active.append(box)
    return False


def _intersect(first: _Box, second: _Box) -> bool:
    parts = zip(*first, *second, strict=True)
    return all(
        start < start2 + size2 and start2 < start + size for start, size, start2, size2 in parts
    )


def _key_of(key: Any) -> tuple[str, tuple[int, ...] | None]:
    if type(key) is not MetadataIndex or type(key.fqn) is not str:
        raise ValueError(f"{key!r} is not the name of a piece")
    return key.fqn, None if key.offset is None else _sizes(key.fqn, key.offset)


def _check_places(
    places: Mapping[tuple[str, tuple[int, ...] | None], Any],
    smallest: Mapping[tuple[str, tuple[int, ...] | None], int],
    files: Mapping[str, FileRecord],
) -> None:
    """Check that the pieces fill each file from start to end, in order and without gaps."""
    ends = dict.fromkeys((name for name in files if name.endswith(".distcp")), 0)
    for (name, _), stored in places.items():
        if type(stored) is not _StorageInfo or type(stored.relative_path) is not str:
            raise ValueError(f"{name!r} has no place in a file")
        if stored.relative_path not in ends:
            raise ValueError(
                f"{name!r} must be in a file that the checkpoint lists: it is in "
                f"{stored.relative_path!r}"
            )
        if getattr(stored, "transform_descriptors", None):
            raise ValueError(
                f"{name!r} was transformed while it was written, which this package never does"
            )
    for (name, offsets), stored in places.items():
        start = stored.offset
        length = stored.length
        if type(start) is not int or type(length) is not int or length < smallest[name, offsets]:
            raise ValueError(f"{name!r} cannot have {length} bytes at byte {start}")
        if start != ends[stored.relative_path]:
            raise ValueError(
                f"{name!r} is listed at byte {start} of {stored.relative_path}, but the tensor "
                f"before it ends at byte {ends[stored.relative_path]}"
            )
        ends[stored.relative_path] += length
    for name, end in ends.items():
        if end != files[name].size:
            raise ValueError(f"{name} has {files[name].size} bytes, but its tensors have {end}")


def pieces_of(index: Metadata, names: Iterable[str]) -> dict[PieceKey, SavedTensor]:
    """Return the expected shape and dtype of the stored pieces of the named tensors."""
    pieces = {}
    for name in names:
        entry = index.state_dict_metadata[name]
        assert isinstance(entry, TensorStorageMetadata), f"{name} is not a tensor"
        for chunk in entry.chunks:
            pieces[name, tuple(chunk.offsets)] = SavedTensor(
                tuple(chunk.sizes), entry.properties.dtype
            )
    return pieces
