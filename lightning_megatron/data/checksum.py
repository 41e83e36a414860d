"""CRC-32 checksum of large files, the fastest one in the standard library.

It detects accidental damage, but not manipulation.
"""

from __future__ import annotations

import zlib
from pathlib import Path

from lightning_megatron.errors import CorruptDataError

CHUNK_BYTES = 1 << 24


def crc32_of(path: Path) -> str:
    """Return the CRC-32 of a file as 8 hexadecimal digits.

    10 GB take some seconds if the disk is fast enough.

    Raises:
        CorruptDataError: If the file cannot be read.
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
