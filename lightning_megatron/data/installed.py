"""Data files of optional packages, located without importing the packages."""

from __future__ import annotations

import hashlib
from importlib import metadata
from pathlib import Path

from lightning_megatron.errors import CorruptDataError, MissingExtraError


def locate_installed(distribution: str, path: str, extra: str) -> Path:
    """Return the path of a file or directory of an installed distribution.

    Args:
        distribution: Name of the distribution on the package index.
        path: Path inside site-packages.
        extra: Extra of lightning-megatron that installs the distribution.

    Raises:
        MissingExtraError: If the distribution is not installed, or does not have the path.
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
        path: File.
        expected: SHA-256 as 64 hexadecimal digits.

    Raises:
        CorruptDataError: If the contents have another hash.
    """
    content = path.read_bytes()
    actual = hashlib.sha256(content).hexdigest()
    if actual != expected:
        raise CorruptDataError(
            f"{path} must have sha256 {expected}: it has {actual}. Install its package again."
        )
    return content
