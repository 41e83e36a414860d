"""Weights in a local Hugging Face folder: any part of any tensor, without the rest of the file."""

from __future__ import annotations

import json
import mmap
import os
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.errors import CheckpointMismatchError, CorruptDataError, UnsupportedError
from lightning_megatron.swap.mapping import Slices, named

WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"

#: Element types of the format that hold numbers of torch.
DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
#: Bytes before the header, which hold its length.
LENGTH_BYTES = 8
_LARGEST_HEADER = 100_000_000


@dataclass(frozen=True)
class StoredTensor:
    """Say where the elements of a tensor are.

    Args:
        path: The file.
        dtype: Type of the elements.
        shape: Shape (elements).
        start: Where they begin in the file (bytes).
    """

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    def read(self, slices: Slices, descriptor: int) -> Tensor:
        """Map a part of the tensor into memory; pages are read when they are first looked at.

        The mapping ends with the last view of the result. What is written into the result does not get to the file.

        Args:
            slices: One slice for each dimension, with start and stop.
            descriptor: Of the file, opened for reading.
        """
        shape = self.shape
        if not shape:
            return self._mapped(0, 1, descriptor).view(())
        width = prod(shape[1:])
        first, last = slices[0].start, slices[0].stop
        rows = self._mapped(first * width, (last - first) * width, descriptor).view(last - first, *shape[1:])
        return rows[(slice(None), *slices[1:])]

    def _mapped(self, first: int, count: int, descriptor: int) -> Tensor:
        if not count:
            return torch.empty(0, dtype=self.dtype)
        begin = self.start + first * self.dtype.itemsize
        before = begin % mmap.ALLOCATIONGRANULARITY
        # A private mapping: torch takes no memory that cannot be written.
        length = before + count * self.dtype.itemsize
        pages = mmap.mmap(descriptor, length, access=mmap.ACCESS_COPY, offset=begin - before)
        return torch.frombuffer(pages, dtype=self.dtype, count=count, offset=before)


class SafetensorsFolder:
    """Read tensors of a local Hugging Face folder.

    Equal to what ``safetensors.safe_open`` gives for each of its files. Headers are read and checked at once, tensors
    when they are asked for, by any thread.

    Args:
        path: The folder, with ``model.safetensors`` or ``model.safetensors.index.json`` and the files it names.

    Raises:
        CheckpointMismatchError: If there are no weights, a file that the index names is missing, or a file lacks a
            tensor that the index says it has.
        CorruptDataError: If a file is not what its name says.
        UnsupportedError: If the weights are in another format.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._tensors = _listed(self.path)
        self._opened: dict[Path, int] = {}
        self._opening = Lock()

    @staticmethod
    def exists_in(path: str | os.PathLike[str]) -> bool:
        """Tell whether a folder has weights of this format."""
        return any((Path(path) / name).is_file() for name in (WEIGHTS, INDEX))

    @cached_property
    def dtype(self) -> torch.dtype:
        """Return the floating-point type that most elements have; float32 where none has any."""
        count: Counter[torch.dtype] = Counter()
        for tensor in self._tensors.values():
            if tensor.dtype.is_floating_point:
                count[tensor.dtype] += prod(tensor.shape)
        return count.most_common(1)[0][0] if count else torch.float32

    @cached_property
    def config(self) -> dict[str, Any]:
        """Return the content of ``config.json``.

        Raises:
            CheckpointMismatchError: If there is none.
            CorruptDataError: If it is not JSON.
        """
        if not (self.path / CONFIG).is_file():
            raise CheckpointMismatchError(
                f"a Hugging Face folder must have a {CONFIG}: {self.path} has none. Without it the weights have no "
                "meaning. Save the model with save_pretrained."
            )
        return _json_of(self.path / CONFIG)

    def names(self) -> Iterable[str]:
        """List the tensors."""
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor (elements)."""
        return self._at(name).shape

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the element type of a tensor."""
        return self._at(name).dtype

    def read(self, name: str, slices: Slices | None = None) -> Tensor:
        """Map a part of a tensor into memory, on the CPU; by default all of it.

        Args:
            name: The tensor.
            slices: One slice for each dimension, with start and stop.

        Raises:
            CheckpointMismatchError: If there is no such tensor.
        """
        stored = self._at(name)
        slices = tuple(slice(0, size) for size in stored.shape) if slices is None else slices
        return stored.read(slices, self._descriptor(stored.path))

    def _descriptor(self, path: Path) -> int:
        # A tensor may be read in hundreds of parts, and to open a file takes long on a network.
        with self._opening:
            if path not in self._opened:
                self._opened[path] = os.open(path, os.O_RDONLY)
                weakref.finalize(self, os.close, self._opened[path])
            return self._opened[path]

    def _at(self, name: str) -> StoredTensor:
        if name not in self._tensors:
            raise CheckpointMismatchError(
                f"a tensor that is read must be there: {self.path} has no {name!r}. It has {named(self._tensors)}. "
                "Use a folder of the same family and size."
            )
        return self._tensors[name]


def _listed(folder: Path) -> dict[str, StoredTensor]:
    # Where both were left behind by different saves, Hugging Face takes the single file as well.
    if (folder / WEIGHTS).is_file():
        return read_header(folder / WEIGHTS)
    if not (folder / INDEX).is_file():
        _refuse(folder)
    places = _json_of(folder / INDEX).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        raise CorruptDataError(
            f"an index must map tensors to files in its weight_map: {folder / INDEX} does not. It is damaged or of "
            "another format. Copy the folder again."
        )
    files = sorted(set(places.values()))
    absent = [file for file in files if Path(file).name != file or not (folder / file).is_file()]
    if absent:
        raise CheckpointMismatchError(
            f"every file that {INDEX} names must be in its folder: {folder} lacks {named(absent)} of {len(files)}. "
            "The copy is incomplete. Copy the missing files."
        )
    found = {file: read_header(folder / file) for file in files}
    lacking = [name for name, file in places.items() if name not in found[file]]
    if lacking:
        raise CheckpointMismatchError(
            f"every file must have the tensors that {INDEX} says: {named(lacking)} of {folder} are not where it says. "
            "Index and files are of different saves. Copy the folder again."
        )
    return {name: found[file][name] for name, file in places.items()}


def _refuse(folder: Path) -> None:
    if not folder.is_dir():
        raise CheckpointMismatchError(
            f"weights are read from a local folder: {folder} is none. Nothing is downloaded. Download the model first, "
            "and give the path of its folder."
        )
    others = sorted(
        path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf", "*.h5") for path in folder.glob(pattern)
    )
    if others:
        raise UnsupportedError(
            f"weights must be in safetensors files: {folder} has {named(others)} alone. Pickled files are read as a "
            "whole and can run code. Save the model again with save_pretrained, which writes safetensors."
        )
    raise CheckpointMismatchError(
        f"a folder of weights must have {WEIGHTS} or {INDEX}: {folder} has neither. Files of other names are not "
        "looked at. Give the folder that save_pretrained wrote."
    )


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Return what is in a safetensors file.

    Raises:
        CorruptDataError: If it is damaged, truncated or of another format.
        UnsupportedError: If a tensor has an element type that torch has not.
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        if not 2 <= length <= min(_LARGEST_HEADER, size - LENGTH_BYTES):
            raise CorruptDataError(
                f"a safetensors file must begin with the length of its header: {path} ({size} bytes) says {length}. "
                "It is truncated or of another format. Copy it again."
            )
        content = file.read(length)
    entries = _parsed(content, path)
    entries.pop("__metadata__", None)
    begin = LENGTH_BYTES + length
    return {name: _stored(name, entry, path, begin, size) for name, entry in entries.items()}


def _stored(name: str, entry: Any, path: Path, begin: int, file_size: int) -> StoredTensor:
    try:
        kind, shape = entry["dtype"], tuple(map(int, entry["shape"]))
        start, stop = map(int, entry["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptDataError(
            f"a header must give dtype, shape and data_offsets of every tensor: {path} does not for {name!r}. "
            "It is damaged. Copy it again."
        ) from error
    if kind not in DTYPES:
        raise UnsupportedError(
            f"the elements of a tensor must be of a type that torch has: {name!r} in {path} has {kind}. "
            f"Use one of {', '.join(DTYPES)}."
        )
    dtype = DTYPES[kind]
    if min((0, *shape)) < 0 or start < 0 or stop - start != prod(shape) * dtype.itemsize or begin + stop > file_size:
        raise CorruptDataError(
            f"a tensor must be inside its file: {name!r} of shape {shape} and type {kind} is said to be at bytes "
            f"{start} to {stop} of {file_size - begin} in {path}. The file is truncated or damaged. Copy it again."
        )
    return StoredTensor(path, dtype, shape, begin + start)


def _json_of(path: Path) -> dict[str, Any]:
    return _parsed(path.read_bytes(), path)


def _parsed(content: bytes, path: Path) -> dict[str, Any]:
    try:
        found = json.loads(content)
    except ValueError as error:
        raise CorruptDataError(f"a file must hold JSON where its format says so: {path} does not ({error}).") from error
    if not isinstance(found, dict):
        raise CorruptDataError(f"the JSON of a file must be a mapping: {path} has a {type(found).__name__}.")
    return found
