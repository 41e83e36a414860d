"""Writer of safetensors files, with one tensor in memory at a time."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from lightning_megatron.disk_sync import sync_file
from lightning_megatron.swap.weights.safetensors_file import DTYPES, LENGTH_BYTES
from lightning_megatron.swap.weights.safetensors_folder import INDEX, WEIGHTS

_NAMES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}
_METADATA = {"format": "pt"}
#: Space for a file's header, which precedes the data, but is known only after them (bytes).
_SPACE = 1 << 20
_UNFINISHED = ".unfinished"


class TensorWriter:
    """Writer of tensors into files of limited size, which does not buffer files in memory.

    Blanks pad the header of each file.
    """

    def __init__(self, folder: Path, max_file_bytes: int) -> None:
        self.folder = folder
        self.max_file_bytes = max_file_bytes
        self.floating: Counter[torch.dtype] = Counter()
        self._files: list[dict[str, dict[str, Any]]] = []
        self._file: IO[bytes] | None = None
        self._size = self._header_size = 0

    def write(
        self,
        tensors: Iterable[tuple[str, Tensor]],
        dtype: torch.dtype | None = None,
        kept: Mapping[str, torch.dtype] | None = None,
    ) -> None:
        """Write tensors one after the other; delete the files if an error occurs.

        Args:
            dtype: Dtype of the floating-point tensors; None keeps the dtype of each tensor.
            kept: Dtypes of single tensors, by name, which precede ``dtype``.
        """
        kept_dtypes = kept or {}
        try:
            for name, tensor in tensors:
                saved_dtype = kept_dtypes.get(name, dtype)
                self._add(
                    name,
                    tensor.to(saved_dtype)
                    if saved_dtype is not None and tensor.is_floating_point()
                    else tensor,
                )
                # Free this tensor before the next one is gathered.
                del tensor
            self._close_file()
        except BaseException:
            self._discard()
            raise

    def _add(self, name: str, tensor: Tensor) -> None:
        """Write a tensor, in a new file if it does not fit into the current one."""
        size = tensor.numel() * tensor.element_size()
        entry = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [self._size, self._size + size],
        }
        entry_size = len(json.dumps({name: entry}))
        is_full = self._size + size > self.max_file_bytes or (
            self._header_size + entry_size > _SPACE
        )
        if self._size and is_full:
            self._close_file()
            entry["data_offsets"] = [0, size]
        if self._file is None:
            self._open()
        assert self._file is not None, "a file has been opened"
        self._files[-1][name] = entry
        data = tensor.detach().cpu().reshape(-1).view(torch.uint8)
        self._file.write(data.numpy().data)
        self._size += size
        self._header_size += entry_size
        if tensor.is_floating_point():
            self.floating[tensor.dtype] += tensor.numel()

    def _close_file(self) -> None:
        """Write the header of the open file into the reserved space, and close the file."""
        if self._file is None:
            return
        content = json.dumps(
            {"__metadata__": _METADATA, **self._files[-1]}, separators=(",", ":")
        ).encode()
        assert len(content) <= _SPACE, "the room for a header has been counted"
        with self._file as file:
            file.seek(0)
            file.write(_SPACE.to_bytes(LENGTH_BYTES, "little") + content.ljust(_SPACE))
            sync_file(file)
        self._file = None
        self._size = 0

    def publish(self) -> None:
        """Give the files their final names, and write the index if there are several."""
        count = len(self._files)
        names = [f"model-{number + 1:05d}-of-{count:05d}.safetensors" for number in range(count)]
        names = [WEIGHTS] if count == 1 else names
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

    def _discard(self) -> None:
        """Delete the unfinished files."""
        if self._file is not None:
            self._file.close()
        for number in range(len(self._files)):
            self._path(number).unlink(missing_ok=True)

    def _open(self) -> None:
        self._files.append({})
        self._file = open(self._path(len(self._files) - 1), "wb")  # noqa: SIM115 - it is closed with its header
        self._file.seek(LENGTH_BYTES + _SPACE)
        self._size = 0
        self._header_size = len(json.dumps({"__metadata__": _METADATA}))

    def _path(self, number: int) -> Path:
        return self.folder / f"model-{number + 1:05d}{_UNFINISHED}"


def write_synced(path: Path, content: bytes) -> None:
    """Write a file, which gets its name when all of it is on the disk."""
    unfinished = path.with_name(f"{path.name}{_UNFINISHED}")
    try:
        with open(unfinished, "wb") as file:
            file.write(content)
            sync_file(file)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
