"""Headers of safetensors files: tensors and their byte ranges."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor

from lightning_megatron.errors import CorruptDataError, UnsupportedError
from lightning_megatron.extras import import_extra
from lightning_megatron.strict_json import parse_object
from lightning_megatron.swap.tensors.mapping import Slices, named

#: Element types of the format that torch supports.
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
#: Size of the field before the header, which contains the header's length (bytes).
LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000
#: Limit of commas and colons in a header, which suffices for 100,000 tensors.
_MAX_SIGNS = 1 << 20


@dataclass(frozen=True)
class StoredTensor:
    """Location of a tensor's elements in a file.

    Args:
        dtype: Dtype of the elements.
        shape: Shape of the tensor (elements).
        start: Offset of the first element in the file (bytes).
    """

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    def read(self, slices: Slices, descriptor_of: Callable[[Path], int]) -> Tensor:
        """Map a part of the tensor into memory; pages are read on first access.

        The mapping is closed with the last view of the result. Writes to the result do not change
        the file.

        Args:
            descriptor_of: Function that opens a file for reading and returns its descriptor.
        """
        descriptor = descriptor_of(self.path)
        shape = self.shape
        if not shape:
            return self._mapped(0, 1, descriptor).view(())
        width = prod(shape[1:])
        first = slices[0].start
        last = slices[0].stop
        rows = self._mapped(first * width, (last - first) * width, descriptor).view(
            last - first, *shape[1:]
        )
        return rows[(slice(None), *slices[1:])]

    def _mapped(self, first: int, count: int, descriptor: int) -> Tensor:
        if not count:
            return torch.empty(0, dtype=self.dtype)
        begin = self.start + first * self.dtype.itemsize
        before = begin % mmap.ALLOCATIONGRANULARITY
        # Use a private mapping, because torch requires writable memory.
        length = before + count * self.dtype.itemsize
        pages = mmap.mmap(descriptor, length, access=mmap.ACCESS_COPY, offset=begin - before)
        return torch.frombuffer(pages, dtype=self.dtype, count=count, offset=before)


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors in a safetensors file, by name.

    Like ``safetensors.safe_open``, this function checks the header: tensors must follow each other
    without gaps or overlaps from the header to the end of the file, and each must have the size
    that its shape and dtype require. The check cannot detect that two tensors of the same shape and
    dtype were exchanged, or that the header declares another dtype of the same width.

    Raises:
        CorruptDataError: If the file is damaged, truncated or of another format.
        UnsupportedError: If a tensor has an element type that torch does not support.
        MissingExtraError: If the library of the format is not installed.
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        if not 2 <= length <= min(_MAX_HEADER_BYTES, size - LENGTH_BYTES):
            raise CorruptDataError(
                f"a safetensors file must begin with the length of its header: {path} ({size} "
                f"bytes) gives {length}. The file is truncated or has another format. Copy it "
                "again."
            )
        content = file.read(length)
    entries = parse_object(content, str(path), "Copy it again.", _MAX_SIGNS)
    entries.pop("__metadata__", None)
    begin = LENGTH_BYTES + length
    tensors = {name: _stored(name, entry, path, begin, size) for name, entry in entries.items()}
    _check_with_library(path, tensors)
    return tensors


def _check_with_library(path: Path, tensors: Mapping[str, StoredTensor]) -> None:
    library: Any = import_extra("safetensors", "hf")
    try:
        with library.safe_open(path, "pt") as file:
            names = set(file.keys())
    except (library.SafetensorError, OSError) as error:
        raise CorruptDataError(
            f"a safetensors file must follow its format: {path} does not ({error}). The file is "
            "damaged or has another format. Copy it again."
        ) from error
    if names != tensors.keys():
        raise CorruptDataError(
            f"a safetensors file must have the tensors that its header names: {path} has "
            f"{named(names ^ tensors.keys())} in only one of two readings. The file is damaged. "
            "Copy it again."
        )


def _stored(name: str, entry: Any, path: Path, begin: int, file_size: int) -> StoredTensor:
    fields = entry if isinstance(entry, dict) else {}
    kind = fields.get("dtype")
    sizes = fields.get("shape")
    offsets = fields.get("data_offsets")
    if (
        not isinstance(kind, str)
        or not _is_numbers(sizes)
        or not _is_numbers(offsets)
        or len(offsets) != 2
    ):
        raise CorruptDataError(
            f"a header must give dtype, shape and data_offsets of every tensor: {path} does not "
            f"for {name!r}. The file is damaged. Copy it again."
        )
    shape = tuple(sizes)
    start, stop = offsets
    if kind not in DTYPES:
        raise UnsupportedError(
            f"the elements of a tensor must have a type of torch: {name!r} in {path} has {kind}. "
            f"Use one of {', '.join(DTYPES)}."
        )
    dtype = DTYPES[kind]
    if stop - start != prod(shape) * dtype.itemsize or begin + stop > file_size:
        raise CorruptDataError(
            f"a tensor must be inside its file: {name!r} of shape {shape} and type {kind} has the "
            f"bytes {start} to {stop} of {file_size - begin} in {path}. The file is truncated or "
            "damaged. Copy it again."
        )
    return StoredTensor(path, dtype, shape, begin + start)


def _is_numbers(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(number) is int and number >= 0 for number in value)
