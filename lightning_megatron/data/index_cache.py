"""Disk cache of index arrays, whose keys are hashes of everything that the arrays depend on."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lightning_megatron.errors import CorruptDataError
from lightning_megatron.once import one_at_a_time
from lightning_megatron.strict_json import read_first_bytes, read_json

# Version of the arrays' contents, part of every key.
VERSION = 1
# Version of the folder's layout; 2 added a checksum of each file.
FORMAT = 2
log = logging.getLogger(__name__)
Arrays = dict[str, npt.NDArray]
CHUNK_BYTES = 1 << 24


def cache_key(fields: Mapping[str, object]) -> str:
    """Return the hash of the fields that an index depends on."""
    content = json.dumps({"version": VERSION, **fields}, sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


def load_or_build(
    directory: Path,
    fields: Mapping[str, object],
    build: Callable[[], Arrays],
    names: Collection[str],
) -> Arrays:
    """Memory-map the arrays of an index; build and write them first if they are missing or damaged.

    If several processes call this function at once, one of them builds the arrays and the others
    wait. If the directory cannot be written, the arrays stay in memory.

    Args:
        directory: Cache directory with one folder per key.
        fields: Everything that the arrays depend on.
        build: Function that builds the integer arrays.
        names: Names of the arrays.

    Returns:
        Arrays by name.
    """
    folder = directory / cache_key({**fields, "format": FORMAT})
    # Look before taking the lock: an existing cache may be in a read-only directory, in which no
    # lock file can be created.
    arrays = _load(folder, fields, names)
    if arrays is not None:
        return arrays
    try:
        with one_at_a_time(directory / f"{folder.name}.lock"):
            arrays = _load(folder, fields, names)
            if arrays is None:
                _write(folder, build(), fields)
                arrays = _load(folder, fields, names)
    except OSError as error:
        log.warning(
            "The sample index cannot be written to %s (%s); it is built in memory.",
            directory,
            error,
        )
        return build()
    if arrays is None:
        log.warning(
            "The sample index in %s changed while it was written; it is built in memory.", folder
        )
        return build()
    return arrays


def _load(folder: Path, fields: Mapping[str, object], names: Collection[str]) -> Arrays | None:
    if not folder.is_dir():
        return None
    try:
        content = read_json(folder / "index.json", "It is built again.")
        # Compare with the fields after a round trip through JSON, which turns tuples into lists.
        if content["fields"] != json.loads(json.dumps(fields)) or set(content["arrays"]) != set(
            names
        ):
            raise CorruptDataError("it belongs to other samples")
        return {
            name: _read_array(folder / f"{name}.npy", content["arrays"][name]) for name in names
        }
    except (ValueError, OSError, EOFError, KeyError, TypeError) as error:
        log.warning("The sample index %s is damaged (%s); it is built again.", folder, error)
        return None


def _read_array(path: Path, listed: object) -> npt.NDArray:
    # `read_first_bytes` raises unless the path is a regular file: opening a pipe would block.
    read_first_bytes(path, 1)
    if crc32_of(path) != listed:
        raise CorruptDataError(f"the checksum of {path.name} does not match")
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except ValueError:
        # numpy cannot memory-map an empty array.
        array = np.load(path, allow_pickle=False)
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "iu":
        raise CorruptDataError(f"{path.name} does not contain whole numbers")
    return array


def _write(folder: Path, arrays: Arrays, fields: Mapping[str, object]) -> None:
    partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=folder.parent))
    try:
        for name, array in arrays.items():
            np.save(partial / f"{name}.npy", array)
        listed = {name: crc32_of(partial / f"{name}.npy") for name in arrays}
        (partial / "index.json").write_text(
            json.dumps({"arrays": listed, "fields": fields}, indent=2, sort_keys=True)
        )
        # mkdtemp denies access to other users, but a cache is shared like the corpus next to it.
        partial.chmod(0o755)
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def crc32_of(path: Path) -> str:
    """Return the CRC-32 of a file as 8 hexadecimal digits.

    10 GB take some seconds if the disk is fast enough.
    """
    value = 0
    chunk = memoryview(bytearray(CHUNK_BYTES))
    try:
        with open(path, "rb", buffering=0) as file:
            while count := file.readinto(chunk):
                value = zlib.crc32(chunk[:count], value)
    except OSError as error:
        raise CorruptDataError(
            f"{path} cannot be read: {error.strerror or error}. Copy it again."
        ) from error
    return f"{value:08x}"
