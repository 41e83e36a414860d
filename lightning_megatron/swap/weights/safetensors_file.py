"""Tensors in a safetensors file, of which parts are mapped into memory."""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.errors import CorruptDataError, UnsupportedError
from lightning_megatron.extras import import_extra
from lightning_megatron.swap.tensors.mapping import Slices

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


class _OpenFile:
    """File that stays open while a tensor refers to it.

    A tensor may be read in hundreds of parts, and opening a file on a network takes long.
    """

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self.descriptor)


@dataclass(frozen=True)
class StoredTensor:
    """Location of a tensor's elements in a file.

    Args:
        start: Offset of the first element in the file (bytes).
    """

    file: _OpenFile
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    def read(self, slices: Slices) -> Tensor:
        """Map a part of the tensor into memory; pages are read on first access.

        Each call makes a mapping, which is closed with the last view of the result. One mapping
        for the whole file, as ``safetensors.safe_open`` has, would keep every page that was ever
        read resident. Writes to the result do not change the file.
        """
        if not self.shape:
            return self._mapped(0, 1).view(())
        width = prod(self.shape[1:])
        first = slices[0].start
        last = slices[0].stop
        rows = self._mapped(first * width, (last - first) * width)
        return rows.view(last - first, *self.shape[1:])[(slice(None), *slices[1:])]

    def _mapped(self, first: int, count: int) -> Tensor:
        if not count:
            return torch.empty(0, dtype=self.dtype)
        begin = self.start + first * self.dtype.itemsize
        before = begin % mmap.ALLOCATIONGRANULARITY
        # Use a private mapping, because torch requires writable memory.
        pages = mmap.mmap(
            self.file.descriptor,
            before + count * self.dtype.itemsize,
            access=mmap.ACCESS_COPY,
            offset=begin - before,
        )
        return torch.frombuffer(pages, dtype=self.dtype, count=count, offset=before)


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors in a safetensors file, by name.

    The library checks that tensors follow each other without gaps or overlaps from the header to
    the end of the file, and that each has the size that its shape and dtype require. No check can
    detect that two tensors of the same shape and dtype were exchanged, or that the header declares
    another dtype of the same width.
    """
    library: Any = import_extra("safetensors", "hf")
    try:
        # Opening a pipe would block until a writer appears.
        if not path.is_file():
            raise OSError("it is not a regular file")
        with library.safe_open(path, "pt") as header:
            entries = [(name, header.get_slice(name)) for name in header.offset_keys()]
            kinds = [(name, entry.get_dtype(), tuple(entry.get_shape())) for name, entry in entries]
        file = _OpenFile(path)
        length = int.from_bytes(os.pread(file.descriptor, LENGTH_BYTES, 0), "little")
    except (library.SafetensorError, OSError) as error:
        raise CorruptDataError(
            f"a safetensors file must follow its format: {path} does not ({error}). The file is "
            "damaged, truncated or has another format. Copy it again."
        ) from error
    tensors = {}
    start = LENGTH_BYTES + length
    for name, kind, shape in kinds:
        if kind not in DTYPES:
            raise UnsupportedError(
                f"the elements of a tensor must have a type of torch: {name!r} in {path} has "
                f"{kind}. Use one of {', '.join(DTYPES)}."
            )
        tensors[name] = StoredTensor(file, DTYPES[kind], shape, start)
        start += prod(shape) * DTYPES[kind].itemsize
    return tensors
