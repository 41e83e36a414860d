"""Tensor index: the places of all pieces of tensors, in the format of torch.distributed.checkpoint.

The index is a pickle, which is read without running its code. Checksums detect accidental damage.
The checks here also detect manipulation, after which the checksums may be correct. They do not
detect changed values, or a consistent swap of two tensors of the same shape and dtype.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import IO, Any

import torch
import torch.distributed.checkpoint.filesystem as dcp_filesystem
import torch.distributed.checkpoint.metadata as dcp_metadata
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from typing_extensions import override

from lightning_megatron.checkpoint.entries import BoxToWrite
from lightning_megatron.checkpoint.header import METADATA, RANK_STATE, TENSOR_INDEX
from lightning_megatron.checkpoint.storage import (
    FileRecord,
    Folder,
    HashingStream,
    open_for_writing,
)

_METADATA_CLASSES = (
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "TensorStorageMetadata",
)

#: Values of a stored TensorProperties that every supported torch reads.
_NUM_PROPERTIES = 5


@dataclass(frozen=True)
class StoredPiece:
    """Piece of a full tensor in a file of a checkpoint, or a pickled object.

    Args:
        dtype: Dtype of the tensor; None for a pickled object, whose shape is ().
        shape: Shape of the full tensor.
        offsets: First index of the piece in each dimension of the full tensor (elements).
        sizes: Extent of the piece in each dimension (elements).
        start: First byte in the file.
        length: Number of bytes.
    """

    name: str
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


@dataclass(frozen=True)
class SavedTensor:
    """Shape and dtype of a full tensor in a checkpoint, and its pieces."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: list[StoredPiece] = field(default_factory=list, compare=False, repr=False)


@dataclass(frozen=True)
class TensorIndex:
    """Tensors and pickled objects of a checkpoint, by name."""

    tensors: dict[str, SavedTensor]
    objects: dict[str, StoredPiece]

    @classmethod
    def of(cls, pieces: Iterable[StoredPiece], files: Mapping[str, FileRecord]) -> TensorIndex:
        """Group pieces by tensor, after checks that each element of each tensor is stored once.

        Args:
            pieces: Pieces in the order in which they were written.

        Raises:
            ValueError: If a tensor has gaps or overlaps, or if the pieces do not fill the files.
        """
        tensors: dict[str, SavedTensor] = {}
        objects: dict[str, StoredPiece] = {}
        ends = dict.fromkeys((name for name in files if name.endswith(".distcp")), 0)
        for piece in pieces:
            name = piece.name
            if piece.dtype is None:
                objects[name] = piece
            else:
                tensors.setdefault(name, SavedTensor(piece.shape, piece.dtype)).pieces.append(piece)
            if piece.file not in ends:
                raise ValueError(
                    f"{name!r} must be in a file that the checkpoint lists: it is in {piece.file!r}"
                )
            smallest = 1 if piece.dtype is None else prod(piece.sizes) * piece.dtype.itemsize
            if piece.length < smallest:
                raise ValueError(f"{name!r} cannot have {piece.length} bytes")
            if piece.start != ends[piece.file]:
                raise ValueError(
                    f"{name!r} is listed at byte {piece.start} of {piece.file}, but the tensor "
                    f"before it ends at byte {ends[piece.file]}"
                )
            ends[piece.file] += piece.length
        for file, end in ends.items():
            if end != files[file].size:
                raise ValueError(f"{file} has {files[file].size} bytes, but its tensors have {end}")
        for name, tensor in tensors.items():
            _check_coverage(name, tensor)
        return cls(tensors, objects)

    @classmethod
    def read(cls, content: bytes, files: Mapping[str, FileRecord], world_size: int) -> TensorIndex:
        """Read and check the index of a checkpoint.

        Args:
            world_size: Number of ranks of the saved job. The index has values of all of them, or
                only weights.

        Raises:
            Exception: Of any kind, if the content is damaged or was manipulated.
        """
        index = cls.of(_pieces_in(read_index(io.BytesIO(content))), files)
        if index.objects and index.objects.keys() != {
            f"{RANK_STATE}{rank}" for rank in range(world_size)
        }:
            raise ValueError(
                f"it has values of {len(index.objects)} ranks, but the header says {world_size}"
            )
        return index


def common_part(
    first: StoredPiece, offsets: Sequence[int], sizes: Sequence[int]
) -> list[tuple[int, int]] | None:
    """Return the first and last index, in the full tensor, of what a piece and a box share.

    Returns:
        Start and stop in each dimension; None if they share nothing
    """
    part = []
    for start, size, other, extent in zip(first.offsets, first.sizes, offsets, sizes, strict=True):
        part.append((max(start, other), min(start + size, other + extent)))
        if part[-1][0] >= part[-1][1]:
            return None
    return part


def _check_coverage(name: str, tensor: SavedTensor) -> None:
    for piece in tensor.pieces:
        if not len(piece.offsets) == len(piece.sizes) == len(tensor.shape) or any(
            start + size > full
            for start, size, full in zip(piece.offsets, piece.sizes, tensor.shape, strict=True)
        ):
            raise ValueError(
                f"a piece of {name!r} at {piece.offsets} of shape {piece.sizes} is outside of "
                f"{tensor.shape}"
            )
    count = prod(tensor.shape)
    if sum(prod(piece.sizes) for piece in tensor.pieces) != count or _overlap(tensor.pieces):
        raise ValueError(f"the pieces of {name!r} do not cover each of its {count} elements once")


def _overlap(pieces: Sequence[StoredPiece]) -> bool:
    """Return whether any two pieces have an element in common."""
    filled = [piece for piece in pieces if 0 not in piece.sizes]
    if not filled or not filled[0].sizes:
        return len(filled) > 1
    # Sweep along the dimension with the most cuts, where the fewest pieces are active at a time.
    dim = max(
        range(len(filled[0].sizes)), key=lambda dim: len({piece.offsets[dim] for piece in filled})
    )
    active: list[StoredPiece] = []
    for piece in sorted(filled, key=lambda piece: piece.offsets[dim]):
        active = [
            other for other in active if other.offsets[dim] + other.sizes[dim] > piece.offsets[dim]
        ]
        if any(common_part(other, piece.offsets, piece.sizes) is not None for other in active):
            return True
        active.append(piece)
    return False


def _pieces_in(metadata: Metadata) -> Iterator[StoredPiece]:
    """Yield the pieces of an index in the order in which they were written."""
    found: dict[tuple[str, Any], tuple[Any, ...]] = {}
    for name, entry in metadata.state_dict_metadata.items():
        if type(name) is not str:
            raise ValueError(f"{name!r} is not the name of a tensor")
        if not isinstance(entry, TensorStorageMetadata):
            found[name, None] = (None, (), (), ())
            continue
        dtype = entry.properties.dtype
        if not isinstance(dtype, torch.dtype) or torch.empty(0, dtype=dtype).is_quantized:
            raise ValueError(f"{name!r} has the type {dtype}, which is never saved")
        if not entry.chunks:
            raise ValueError(f"{name!r} has no pieces")
        for chunk in entry.chunks:
            box = [_sizes(name, value) for value in (entry.size, chunk.offsets, chunk.sizes)]
            found[name, chunk.offsets] = (dtype, *box)
    for key, place in metadata.storage_data.items():
        if (key.fqn, key.offset) not in found:
            raise ValueError(f"pieces and places do not match: {key.fqn!r} at {key.offset}")
        if type(place.offset) is not int or type(place.length) is not int:
            raise ValueError(f"{key.fqn!r} has no place in a file")
        dtype, shape, offsets, sizes = found.pop((key.fqn, key.offset))
        file = place.relative_path
        yield StoredPiece(key.fqn, dtype, shape, offsets, sizes, file, place.offset, place.length)
    if found:
        raise ValueError(f"pieces and places do not match: {next(iter(found))}")


def _sizes(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, torch.Size) or any(size < 0 for size in value):
        raise ValueError(f"{name!r} has sizes that are impossible for a tensor")
    return tuple(value)


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


def write_index(pieces: Iterable[StoredPiece], file: HashingStream) -> None:
    """Write a tensor index that every torch that the package supports can read."""
    tensors: dict[str, Any] = {}
    places = {}
    for piece in pieces:
        offsets = None
        if piece.dtype is None:
            tensors[piece.name] = dcp_metadata.BytesStorageMetadata()
        else:
            offsets = torch.Size(piece.offsets)
            properties = dcp_metadata.TensorProperties(piece.dtype)
            entry = TensorStorageMetadata(properties, torch.Size(piece.shape), [])
            chunk = dcp_metadata.ChunkStorageMetadata(offsets, torch.Size(piece.sizes))
            tensors.setdefault(piece.name, entry).chunks.append(chunk)
        place = dcp_filesystem._StorageInfo(piece.file, piece.start, piece.length)
        places[MetadataIndex(piece.name, offsets)] = place
    _IndexPickler(file).dump(Metadata(tensors, storage_data=places))


class _IndexPickler(pickle.Pickler):
    """Pickler that leaves out what older torch could not read."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, dcp_metadata.TensorProperties):
            return NotImplemented
        reduced: Any = value.__reduce_ex__(pickle.DEFAULT_PROTOCOL)
        make, args, state = reduced[:3]
        return make, args, state[:_NUM_PROPERTIES]


def read_index(file: IO[bytes]) -> Metadata:
    """Unpickle a tensor index without running its code; its values can be anything."""
    metadata = _IndexUnpickler(file).load()
    if not isinstance(metadata, Metadata):
        raise pickle.UnpicklingError("it is not a list of tensors")
    return metadata


class _IndexUnpickler(pickle.Unpickler):
    """Unpickler that accepts only the classes of a tensor index.

    A pickle runs code by calling objects that it names. Here it can name only plain data classes,
    sizes and dtypes. A pickle can also set attributes of each object that it names: it receives
    new classes, because the process shares the real ones.
    """

    @override
    def find_class(self, module: str, name: str) -> Any:
        if module == dcp_metadata.__name__ and name in _METADATA_CLASSES:
            return _sealed(partial(object.__new__, getattr(dcp_metadata, name)))
        if (module, name) in _OTHER_CLASSES:
            return _sealed(_OTHER_CLASSES[module, name])
        dtype = getattr(torch, name, None) if module == "torch" and "." not in name else None
        if isinstance(dtype, torch.dtype):
            return dtype
        raise pickle.UnpicklingError(
            f"it names {module}.{name}, which does not belong in a list of tensors"
        )


class _StoredProperties(dcp_metadata.TensorProperties):
    """Properties whose memory format is a number: members of an enumeration are shared objects."""

    @override
    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.__class__ = dcp_metadata.TensorProperties  # type: ignore[assignment]
        # torch 2.15 added strides, which no reader uses.
        dtype, layout, requires_grad, encoding, pin_memory = state[:_NUM_PROPERTIES]
        memory_format = dcp_metadata._MEM_FORMAT_ENCODING(encoding)
        self.__setstate__((dtype, layout, requires_grad, memory_format, pin_memory))


def _sealed(make: Callable[..., Any]) -> type:
    """Return a new class whose calls return what ``make`` returns."""
    return type("Sealed", (), {"__new__": lambda cls, *args: make(*args)})


def _layout_named(name: str) -> torch.layout:
    if name != "torch.strided":
        raise pickle.UnpicklingError(f"it has a tensor of layout {name}, which is never saved")
    return torch.strided


#: Constructors in place of the other classes and functions that a tensor index names.
_OTHER_CLASSES: Mapping[tuple[str, str], Callable[..., Any]] = {
    (dcp_metadata.__name__, "TensorProperties"): partial(object.__new__, _StoredProperties),
    (dcp_metadata.__name__, "_MEM_FORMAT_ENCODING"): int,
    (dcp_filesystem.__name__, "_StorageInfo"): partial(object.__new__, dcp_filesystem._StorageInfo),
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _layout_named,
}
