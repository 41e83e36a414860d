"""Keep index arrays on disk under a key of everything that they depend on."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lightning_megatron.once import one_at_a_time

VERSION = 1
log = logging.getLogger(__name__)
Arrays = dict[str, npt.NDArray]


def cache_key(fields: Mapping[str, object]) -> str:
    """Hash what an index depends on."""
    content = json.dumps({"version": VERSION, **fields}, sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


def load_or_build(directory: Path, fields: Mapping[str, object], build: Callable[[], Arrays]) -> Arrays:
    """Map the arrays of an index from disk; build and write them first if they are not there or damaged.

    Processes that ask at once wait for one of them. Where the directory cannot be written the index stays in memory.

    Args:
        directory: Holds one folder per key.
        fields: Everything that the arrays depend on.
        build: Makes the arrays.
    """
    key = cache_key(fields)
    # a cache that is there may lie in a read-only directory, where no lock can be taken
    found = _load(directory / key)
    if found is not None:
        return found
    try:
        with one_at_a_time(directory / f"{key}.lock"):
            found = _load(directory / key)
            if found is None:
                _write(directory / key, build(), fields)
                found = _load(directory / key)
    except OSError as error:
        log.warning("The sample index cannot be kept in %s (%s); it is built in memory.", directory, error)
        return build()
    if found is None:
        log.warning("The sample index in %s changed as it was written; it is built in memory.", directory / key)
        return build()
    return found


def _load(folder: Path) -> Arrays | None:
    if not folder.is_dir():
        return None
    try:
        listed = json.loads((folder / "index.json").read_text(encoding="utf-8"))["arrays"]
        paths = {name: folder / f"{name}.npy" for name in listed}
        # numpy cannot map an empty array
        arrays = {name: np.load(path, mmap_mode="r" if listed[name][0] else None) for name, path in paths.items()}
        damaged = [name for name, array in arrays.items() if [array.size, _checksum(array)] != listed[name]]
    except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
        log.warning("The sample index %s is damaged (%s); it is built again.", folder, error)
        return None
    if damaged:
        log.warning("The sample index %s is damaged (%s); it is built again.", folder, ", ".join(damaged))
        return None
    return arrays


def _write(folder: Path, arrays: Arrays, fields: Mapping[str, object]) -> None:
    partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=folder.parent))
    try:
        for name, array in arrays.items():
            np.save(partial / f"{name}.npy", array)
        listed = {name: (array.size, _checksum(array)) for name, array in arrays.items()}
        (partial / "index.json").write_text(json.dumps({"arrays": listed, "fields": fields}, indent=2, sort_keys=True))
        # mkdtemp lets its owner alone in, but a cache is shared like the corpus beside it
        partial.chmod(0o755)
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _checksum(array: npt.NDArray) -> int:
    return zlib.crc32(np.ascontiguousarray(array).data) if array.size else 0
