"""What this package logs inside a block."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def recorded() -> Iterator[list[str]]:
    """List the messages of the block."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("lightning_megatron")
    logger.addHandler(handler)
    try:
        yield records
    finally:
        logger.removeHandler(handler)
