"""Checks of large files that run once per version of a file and store their result."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from lightning_megatron.data.index_cache import cache_key
from lightning_megatron.errors import CorruptDataError
from lightning_megatron.once import one_at_a_time
from lightning_megatron.strict_json import read_json

# File systems have coarse clocks: a file that changed this recently may change again and keep its
# modification time.
SETTLING_NS = 2_000_000_000
log = logging.getLogger(__name__)


def check_once(
    memory: Path, files: Sequence[Path], check: Callable[[], None], in_charge: bool = True
) -> None:
    """Call ``check`` unless its result for these files is stored; raise a stored error again.

    Files count as unchanged while their sizes and times stay the same. Of several processes that
    call this at once, one checks and the others wait.

    Args:
        memory: Directory of stored results; it is created.
        files: Files that ``check`` reads.
        check: Function that raises CorruptDataError if the files are damaged.
        in_charge: Whether this process checks if ``memory`` cannot be written.

    Raises:
        CorruptDataError: If the files are damaged.
    """
    key = _key_of(files)
    if key is None:
        check()
        return
    record = memory / f"checked-{key}.json"
    if _recall(record):
        return
    try:
        with one_at_a_time(record.with_suffix(".lock")):
            if not _recall(record):
                _check_and_remember(record, check)
    except OSError as error:
        if in_charge:
            log.warning(
                (
                    "The result of the checksum comparison cannot be stored in %s (%s): every run "
                    "reads the files again."
                ),
                memory,
                error,
            )
            check()


def _key_of(files: Sequence[Path]) -> str | None:
    """Hash sizes and times of files; None if a file is missing or has just changed."""
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


def _check_and_remember(record: Path, check: Callable[[], None]) -> None:
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


def _recall(record: Path) -> bool:
    """Return whether a stored result exists; raise the stored error of damaged files.

    Raises:
        CorruptDataError: If the stored result is that the files are damaged.
    """
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
