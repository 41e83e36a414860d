"""Checkpoint files of Lightning's own strategies: one file with full tensors."""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import fsspec
import torch

from lightning_megatron.checkpoint.metadata_checks import check_values
from lightning_megatron.checkpoint.values import other_objects
from lightning_megatron.errors import CorruptDataError, UnsupportedError


def read_single_file(
    path: str | os.PathLike[str], weights_only: bool | None = None
) -> dict[str, Any]:
    """Read a checkpoint file of another strategy; tensors are memory-mapped if possible."""
    text = os.fspath(path)
    with _name_damaged_file(text):
        content = _load(text, safe=weights_only is not False)
    if not isinstance(content, dict) or not isinstance(content.get("state_dict"), dict):
        raise CorruptDataError(
            f"a checkpoint file must be written by Lightning: {text} has no mapping 'state_dict'. "
            "Load it in your module instead."
        )
    check_values(content, text)
    return content


def verify_single_file(path: str | os.PathLike[str]) -> int:
    """Compare a checkpoint file on a mounted file system with the checksums that it contains.

    Returns:
        Size of the file (bytes)
    """
    text = os.fspath(path)
    with _name_damaged_file(text), zipfile.ZipFile(text) as file:
        wrong = file.testzip()
        if wrong is not None:
            raise ValueError(f"the checksum of {wrong} inside does not match its content")
    return os.path.getsize(text)


def _load(path: str, safe: bool) -> Any:
    try:
        if "://" not in path:
            return torch.load(
                path, map_location="cpu", weights_only=safe, mmap=zipfile.is_zipfile(path)
            )
        with fsspec.open(path, "rb") as file:
            return torch.load(file, map_location="cpu", weights_only=safe)
    except pickle.UnpicklingError as error:
        # Only an archive of `torch.save` counts as a checkpoint with unsupported objects. Any other
        # file is more likely not a checkpoint, unless the error names a type.
        signs = (
            ("GLOBAL", "Unsupported") if "://" in path or zipfile.is_zipfile(path) else ("GLOBAL",)
        )
        lines = [line.strip() for line in str(error).splitlines() for sign in signs if sign in line]
        if not safe or not lines:
            raise
        raise other_objects(path, f"other objects ({lines[0]})") from error


@contextmanager
def _name_damaged_file(path: str) -> Iterator[None]:
    """Convert exceptions from reading a damaged file to an error that names the file."""
    try:
        yield
    except UnsupportedError:
        raise
    except Exception as error:  # a manipulated file can raise anything
        if isinstance(error, OSError) and error.filename is not None:
            raise  # its message has the path
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CorruptDataError(
            f"a checkpoint file must be as torch.save wrote it: {path} is not ({reason}). The file "
            "is damaged, truncated or not a checkpoint. Use another one."
        ) from error
