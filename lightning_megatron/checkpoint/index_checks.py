"""Which lists of tensors can be: every element of every tensor once, at a place of its own in a file of the checkpoint.

Checksums show what went wrong by itself. These checks show what somebody edited, who can correct the checksums as well;
what they cannot show is a value that was edited, or a consistent exchange of two tensors of one shape and type.
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

from lightning_megatron.checkpoint.storage import FileRecord

#: Elements of a tensor, which are counted in 64 bits together with their size.
_MOST_ELEMENTS = 1 << 59

_Box = tuple[tuple[int, ...], tuple[int, ...]]
PieceKey: TypeAlias = tuple[str, tuple[int, ...]]
"""Name of a tensor, and offsets of a piece of it (elements)."""


@dataclass(frozen=True)
class Piece:
    """Describe a stored piece of a tensor.

    Args:
        shape: Its shape (elements).
        dtype: Type of its elements.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype


def check_index(index: Metadata, files: Mapping[str, FileRecord]) -> None:
    """Compare a list of tensors with itself and with the files that belong to the checkpoint.

    Args:
        index: What was read.
        files: The files that the header lists.

    Raises:
        ValueError: With what is wrong, if it contradicts itself or the files.
    """
    if type(index.state_dict_metadata) is not dict or type(index.storage_data) is not dict:
        raise ValueError("it is no list of tensors and their places")
    smallest: dict[tuple[str, tuple[int, ...] | None], int] = {}
    for name, entry in index.state_dict_metadata.items():
        if type(name) is not str:
            raise ValueError(f"{name!r} is no name of a tensor")
        if type(entry) is TensorStorageMetadata:
            smallest |= {(name, offsets): size for offsets, size in _check_tensor(name, entry).items()}
        elif type(entry) is BytesStorageMetadata:
            smallest[name, None] = 1
        else:
            raise ValueError(f"{name!r} is a {type(entry).__name__}")
    places = {_key_of(key): where for key, where in index.storage_data.items()}
    if places.keys() != smallest.keys() or len(places) != len(index.storage_data):
        name = min(str(one) for one in (places.keys() ^ smallest.keys() or places.keys()))
        raise ValueError(f"pieces and places are not those of each other: {name}")
    _check_places(places, smallest, files)


def _check_tensor(name: str, entry: TensorStorageMetadata) -> dict[tuple[int, ...], int]:
    """Return the bytes of every piece of a tensor by its offsets."""
    shape = _sizes(name, entry.size)
    properties = entry.properties
    if type(properties) is not TensorProperties or not isinstance(properties.dtype, torch.dtype):
        raise ValueError(f"{name!r} has no dtype")
    if torch.empty(0, dtype=properties.dtype).is_quantized:
        raise ValueError(f"{name!r} has the type {properties.dtype} of quantized tensors, which are never saved")
    if properties.layout is not torch.strided:
        raise ValueError(f"{name!r} has the layout {properties.layout}, which is never saved")
    if type(entry.chunks) is not list or not all(type(chunk) is ChunkStorageMetadata for chunk in entry.chunks):
        raise ValueError(f"{name!r} has no list of pieces")
    boxes = [(_sizes(name, chunk.offsets), _sizes(name, chunk.sizes)) for chunk in entry.chunks]
    for offsets, sizes in boxes:
        if not len(offsets) == len(sizes) == len(shape) or any(
            start + size > full for start, size, full in zip(offsets, sizes, shape, strict=True)
        ):
            raise ValueError(f"a piece of {name!r} at {offsets} of shape {sizes} is outside of {shape}")
    count = sum(prod(sizes) for _, sizes in boxes)
    if count != prod(shape) or _overlap(boxes):
        raise ValueError(f"the pieces of {name!r} do not have each of its {prod(shape)} elements once")
    return {offsets: prod(sizes) * properties.dtype.itemsize for offsets, sizes in boxes}


def _sizes(name: str, value: Any) -> tuple[int, ...]:
    sizes = tuple(value) if isinstance(value, torch.Size) else None
    if sizes is None or any(type(size) is not int or size < 0 for size in sizes) or prod(sizes) > _MOST_ELEMENTS:
        raise ValueError(f"{name!r} has sizes that no tensor has")
    return sizes


def _overlap(boxes: Sequence[_Box]) -> bool:
    """Return whether any two boxes have an element in common; boxes without elements have none."""
    filled = [box for box in boxes if 0 not in box[1]]
    if not filled or not filled[0][0]:
        return len(filled) > 1
    # Along the dimension that is cut most often few boxes are beside each other.
    dim = max(range(len(filled[0][0])), key=lambda dim: len({offsets[dim] for offsets, _ in filled}))
    beside: list[_Box] = []
    for box in sorted(filled, key=lambda box: box[0][dim]):
        beside = [other for other in beside if other[0][dim] + other[1][dim] > box[0][dim]]
        if any(_meet(box, other) for other in beside):
            return True
        beside.append(box)
    return False


def _meet(one: _Box, other: _Box) -> bool:
    parts = zip(*one, *other, strict=True)
    return all(start < start2 + size2 and start2 < start + size for start, size, start2, size2 in parts)


def _key_of(key: Any) -> tuple[str, tuple[int, ...] | None]:
    if type(key) is not MetadataIndex or type(key.fqn) is not str:
        raise ValueError(f"{key!r} is no name of a piece")
    return key.fqn, None if key.offset is None else _sizes(key.fqn, key.offset)


def _check_places(
    places: Mapping[tuple[str, tuple[int, ...] | None], Any],
    smallest: Mapping[tuple[str, tuple[int, ...] | None], int],
    files: Mapping[str, FileRecord],
) -> None:
    """Refuse places that are not one after the other in the order in which they were written, from end to end."""
    ends = dict.fromkeys((name for name in files if name.endswith(".distcp")), 0)
    for (name, _), where in places.items():
        if type(where) is not _StorageInfo or type(where.relative_path) is not str:
            raise ValueError(f"{name!r} has no place in a file")
        if where.relative_path not in ends:
            raise ValueError(f"{name!r} must be in a file that the checkpoint lists: it is in {where.relative_path!r}")
        if getattr(where, "transform_descriptors", None):
            raise ValueError(f"{name!r} was changed on its way to the file, which is never done here")
    for (name, offsets), where in places.items():
        start, length = where.offset, where.length
        if type(start) is not int or type(length) is not int or length < smallest[name, offsets]:
            raise ValueError(f"{name!r} cannot be {length} bytes at {start}")
        if start != ends[where.relative_path]:
            raise ValueError(
                f"{name!r} is said to be at byte {start} of {where.relative_path}, the one before it ends at "
                f"{ends[where.relative_path]}"
            )
        ends[where.relative_path] += length
    _check_ends(ends, files)


def _check_ends(ends: Mapping[str, int], files: Mapping[str, FileRecord]) -> None:
    for name, end in ends.items():
        if end != files[name].size:
            raise ValueError(f"{name} has {files[name].size} bytes, and the tensors in it {end}")


def pieces_of(index: Metadata, names: Iterable[str]) -> dict[PieceKey, Piece]:
    """Return what the stored pieces of some tensors must be, by name and offsets."""
    found = {}
    for name in names:
        entry = index.state_dict_metadata[name]
        assert isinstance(entry, TensorStorageMetadata), f"{name} is no tensor"
        for chunk in entry.chunks:
            found[name, tuple(chunk.offsets)] = Piece(tuple(chunk.sizes), entry.properties.dtype)
    return found
