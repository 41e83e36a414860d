"""Pickled values of a checkpoint and files of other strategies, read without running code that they
contain.
"""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import fsspec
import torch
from torch.serialization import get_unsafe_globals_in_checkpoint

from lightning_megatron.checkpoint.collective_steps import CaughtError
from lightning_megatron.checkpoint.metadata_checks import check_values
from lightning_megatron.errors import CorruptDataError, UnsupportedError

_NUM_SHOWN = 5


def to_bytes(value: Any) -> bytes:
    """Pickle a value as ``torch.save`` does."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def from_bytes(data: bytes, what: str, weights_only: bool | None = None) -> Any:
    """Unpickle a value that :func:`to_bytes` pickled.

    Args:
        weights_only: False unpickles objects of any type, which can run code from the data. True
            and None accept only tensors, plain values, and types registered with
            ``torch.serialization.add_safe_globals``.
    """
    try:
        return torch.load(
            io.BytesIO(data), map_location="cpu", weights_only=weights_only is not False
        )
    except Exception as error:  # a manipulated pickle can raise anything
        types = [] if weights_only is False else _unsafe_types(data)
        if types or (isinstance(error, pickle.UnpicklingError) and weights_only is not False):
            found = ", ".join(types[:_NUM_SHOWN]) or _first_line(error)
            raise other_objects(what, found) from error
        raise CorruptDataError(
            f"a file of a checkpoint must be as it was written: {what} cannot be read "
            f"({_first_line(error)}). The file is damaged. Use another checkpoint."
        ) from error


def other_objects(what: str, found: str) -> UnsupportedError:
    """Return the error for a file with objects that are not read unless the user asks for it."""
    return UnsupportedError(
        "a checkpoint must hold nothing but tensors and plain values to be read safely: "
        f"{what} holds {found}. Reading other objects can run any code that the file names. If you "
        "trust the types, pass them to torch.serialization.add_safe_globals([...]) before loading; "
        "if you trust the file, load it with weights_only=False."
    )


def unsafe_keys(values: Mapping[str, Any], data: bytes) -> list[str]:
    """Return the keys of values that cannot be loaded safely, with the types that prevent it."""
    if not _unsafe_types(data):
        return []
    return [f"{key} ({', '.join(types[:_NUM_SHOWN])})" for key, types in _search(values, "")]


def _search(value: Any, path: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the path and the types of the innermost values that cannot be loaded safely."""
    if isinstance(value, Mapping):
        inner = [(f"{path}[{key!r}]" if path else str(key), part) for key, part in value.items()]
        unsafe = [(name, part) for name, part in inner if _unsafe_types(to_bytes(part))]
        if unsafe:
            for name, part in unsafe:
                yield from _search(part, name)
            return
    yield path, _unsafe_types(to_bytes(value))


def _unsafe_types(data: bytes) -> list[str]:
    with CaughtError():
        return sorted(get_unsafe_globals_in_checkpoint(io.BytesIO(data)))
    return []


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines() or [type(error).__name__]
    return next(
        (line.strip() for line in lines if "GLOBAL" in line or "Unsupported" in line), lines[0]
    )


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
