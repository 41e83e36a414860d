"""Writer of safetensors files, with one tensor in memory at a time."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from lightning_megatron.disk_sync import sync_file
from lightning_megatron.swap.weights.safetensors_file import DTYPES, LENGTH_BYTES
from lightning_megatron.swap.weights.safetensors_folder import INDEX, WEIGHTS

_NAMES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}
_METADATA = {"format": "pt"}
#: Approximate size of the blocks of rows in which tensors are written (bytes).
_BLOCK = 1 << 24
#: Maximum space that is reserved for a file's header (bytes).
_MAX_HEADER_BYTES = 1 << 20
_UNFINISHED = ".unfinished"


def write_file(
    folder: Path,
    tensors: Iterable[tuple[str, Tensor]],
    shapes: Mapping[str, tuple[int, ...]],
    name: str,
) -> None:
    """Write tensors to one file."""
    no_limit = sys.maxsize
    writer = TensorWriter(folder, no_limit, shapes, no_limit)
    writer.write(tensors)
    writer.publish(name)


class TensorWriter:
    """Writer of tensors into files of limited size, which does not buffer files in memory.

    Args:
        max_header_bytes: Maximum space that is reserved for a file's header (bytes).
    """

    def __init__(
        self,
        folder: Path,
        max_file_bytes: int,
        shapes: Mapping[str, tuple[int, ...]],
        max_header_bytes: int | None = None,
    ) -> None:
        self.folder = folder
        self.max_file_bytes = max_file_bytes
        self.floating: Counter[torch.dtype] = Counter()
        self._files: list[dict[str, dict[str, Any]]] = []
        self._file: IO[bytes] | None = None
        self._size = self._header_size = 0
        entries = [_entry_size(name, shape) for name, shape in shapes.items()]
        # The header precedes the data, but is known only after them, so space is reserved for it.
        # Blanks pad the header, and the data begin at a multiple of 8 bytes.
        size = _base_size() + max(
            max(entries, default=0), min(max_header_bytes or _MAX_HEADER_BYTES, sum(entries))
        )
        self._space = -(-size // 8) * 8

    def write(
        self,
        tensors: Iterable[tuple[str, Tensor]],
        dtype: torch.dtype | None = None,
        kept: Mapping[str, torch.dtype] | None = None,
    ) -> None:
        """Write tensors one after the other; delete the files if an error occurs.

        Args:
            dtype: Dtype of the floating-point tensors; None keeps the dtype of each tensor.
        """
        kept_dtypes = kept or {}
        try:
            for name, tensor in tensors:
                saved_dtype = kept_dtypes.get(name, dtype)
                self.add(
                    name,
                    tensor.to(saved_dtype)
                    if saved_dtype is not None and tensor.is_floating_point()
                    else tensor,
                )
                # Free this tensor before the next one is gathered.
                del tensor
            self.close_file()
        except BaseException:
            self.discard()
            raise

    def add(self, name: str, tensor: Tensor) -> None:
        """Write a tensor, in a new file if it does not fit into the current one."""
        size = tensor.numel() * tensor.element_size()
        entry = _entry_size(name, tuple(tensor.shape))
        is_full = self._size + size > self.max_file_bytes or self._header_size + entry > self._space
        if self._size and is_full:
            self.close_file()
        if self._file is None:
            self._open()
        assert self._file is not None, "a file has been opened"
        self._files[-1][name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [self._size, self._size + size],
        }
        for block in _blocks(tensor):
            self._file.write(block)
        self._size = self._size + size
        self._header_size = self._header_size + entry
        if tensor.is_floating_point():
            self.floating[tensor.dtype] += tensor.numel()

    def close_file(self) -> None:
        """Write the header of the open file into the reserved space, and close the file."""
        if self._file is None:
            return
        content = json.dumps(
            {"__metadata__": _METADATA, **self._files[-1]}, separators=(",", ":")
        ).encode()
        assert len(content) <= self._space, "the room for a header has been counted"
        with self._file as file:
            file.seek(0)
            file.write(self._space.to_bytes(LENGTH_BYTES, "little") + content.ljust(self._space))
            sync_file(file)
        self._file = None
        self._size = 0

    def publish(self, single: str = WEIGHTS) -> None:
        """Give the files their final names, and write the index if there are several."""
        count = len(self._files)
        names = [f"model-{number + 1:05d}-of-{count:05d}.safetensors" for number in range(count)]
        names = [single] if count == 1 else names
        for number, name in enumerate(names):
            os.replace(self._path(number), self.folder / name)
        if count > 1:
            files = {
                tensor: name
                for name, tensors in zip(names, self._files, strict=True)
                for tensor in tensors
            }
            total = sum(
                entry["data_offsets"][1] - entry["data_offsets"][0]
                for f in self._files
                for entry in f.values()
            )
            index = {"metadata": {"total_size": total}, "weight_map": files}
            write_synced(
                self.folder / INDEX, (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()
            )

    def discard(self) -> None:
        """Delete the unfinished files."""
        if self._file is not None:
            self._file.close()
        for number in range(len(self._files)):
            self._path(number).unlink(missing_ok=True)

    def _open(self) -> None:
        self._files.append({})
        self._file = open(self._path(len(self._files) - 1), "wb")  # noqa: SIM115 - it is closed with its header
        self._file.seek(LENGTH_BYTES + self._space)
        self._size = 0
        self._header_size = _base_size()

    def _path(self, number: int) -> Path:
        return self.folder / f"model-{number + 1:05d}{_UNFINISHED}"


def _blocks(tensor: Tensor) -> Iterator[memoryview]:
    if not tensor.numel():
        return
    rows = tensor.detach().reshape(1) if not tensor.dim() else tensor.detach()
    width = rows[0].numel() * rows.element_size()
    for block in rows.split(max(1, _BLOCK // width)):
        yield memoryview(block.cpu().contiguous().view(-1).view(torch.uint8).numpy())


def _base_size() -> int:
    return len(json.dumps({"__metadata__": _METADATA}))


def _entry_size(name: str, shape: tuple[int, ...]) -> int:
    longest = max(_NAMES.values(), key=len)
    entry = {name: {"dtype": longest, "shape": list(shape), "data_offsets": [2**63, 2**63]}}
    return len(json.dumps(entry).encode())


def write_synced(path: Path, content: bytes) -> None:
    """Write a file, and wait until it is on the disk."""
    with open(path, "wb") as file:
        file.write(content)
        sync_file(file)
