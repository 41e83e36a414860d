"""Checks of large files, which run once for each version of a file and store their result, and of
files of installed packages.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path

from lightning_megatron.data.index_cache import cache_key
from lightning_megatron.errors import CorruptDataError, MissingExtraError
from lightning_megatron.once import one_at_a_time
from lightning_megatron.strict_json import read_json

# The clocks of file systems are coarse: a file that changed within this time may change again
# without a new modification time.
SETTLING_NS = 2_000_000_000
log = logging.getLogger(__name__)


def check_once(
    results: Path, files: Sequence[Path], check: Callable[[], None], in_charge: bool = True
) -> None:
    """Call ``check`` unless its result for these files is stored; raise a stored error again.

    Files count as unchanged while their sizes and times are the same. If several processes call
    this function at once, one of them runs the check and the others wait.

    Args:
        results: Directory of stored results; it is created.
        files: Files that ``check`` reads.
        check: Function that raises CorruptDataError if the files are damaged.
        in_charge: Whether this process runs the check if ``results`` cannot be written.
    """
    key = _key_of(files)
    if key is None:
        check()
        return
    record = results / f"checked-{key}.json"
    if _has_passed(record):
        return
    try:
        with one_at_a_time(record.with_suffix(".lock")):
            if not _has_passed(record):
                _check_and_store(record, check)
    except OSError as error:
        if in_charge:
            log.warning(
                (
                    "The result of the checksum comparison cannot be stored in %s (%s): every run "
                    "reads the files again."
                ),
                results,
                error,
            )
            check()


def _key_of(files: Sequence[Path]) -> str | None:
    """Return a hash of the sizes and times of files; None if one is missing or has just changed."""
    try:
        states = [(path.name, path.stat()) for path in files]
    except OSError:
        return None
    newest = max(max(state.st_mtime_ns, state.st_ctime_ns) for _, state in states)
    if time.time_ns() - newest < SETTLING_NS:
        return None
    return cache_key(
        {"files": [(name, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for name, s in states]}
    )


def _check_and_store(record: Path, check: Callable[[], None]) -> None:
    fault: CorruptDataError | None = None
    try:
        check()
    except CorruptDataError as error:
        fault = error
    try:
        partial = record.with_name(f".{record.name}.{os.getpid()}.partial")
        partial.write_text(json.dumps({"fault": None if fault is None else str(fault)}))
        os.replace(partial, record)
    except OSError as error:
        log.warning(
            "%s cannot be written (%s): the next process reads the files again.", record, error
        )
    if fault is not None:
        raise fault


def _has_passed(record: Path) -> bool:
    """Return whether the stored result says that the files are intact; False without a result."""
    try:
        content = read_json(record, "It is written again.")
    except CorruptDataError:
        return False
    if (
        not isinstance(content, dict)
        or set(content) != {"fault"}
        or not isinstance(content["fault"], str | None)
    ):
        return False
    if content["fault"] is not None:
        raise CorruptDataError(content["fault"])
    return True


def locate_installed(distribution: str, path: str, extra: str) -> Path:
    """Return the path of a file or directory of an installed distribution.

    Args:
        distribution: Name of the distribution on the package index.
        path: Path inside site-packages.
        extra: Extra of lightning-megatron that installs the distribution.
    """
    try:
        installed = Path(str(metadata.distribution(distribution).locate_file(path)))
    except metadata.PackageNotFoundError:
        installed = None
    if installed is None or not installed.exists():
        raise MissingExtraError(
            f"{path} of the package {distribution} was not found. The extra `{extra}` installs it: "
            f'pip install "lightning-megatron[{extra}]".'
        )
    return installed


def check_sha256(path: Path, expected: str) -> bytes:
    """Return the contents of a file after comparing their SHA-256 with the expected one.

    Args:
        expected: SHA-256 as 64 hexadecimal digits.
    """
    content = path.read_bytes()
    actual = hashlib.sha256(content).hexdigest()
    if actual != expected:
        raise CorruptDataError(
            f"{path} must have sha256 {expected}: it has {actual}. Install its package again."
        )
    return content
