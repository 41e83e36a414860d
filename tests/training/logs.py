"""A recorder of the messages that this package logs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def recorded_messages() -> Iterator[list[str]]:
    """Record the messages that the package logs inside the ``with`` block."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("lightning_megatron")
    logger.addHandler(handler)
    try:
        yield records
    finally:
        logger.removeHandler(handler)
