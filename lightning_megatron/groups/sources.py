"""Hash of the package's source files, which hosts compare."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]


def digest_of_sources(folder: Path) -> str:
    """Return a hash of the names and contents of all Python files below a folder, 12 hex digits."""
    digest = hashlib.sha1(usedforsecurity=False)
    for path in sorted(folder.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder).as_posix()} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()[:12]


@cache
def package_hash() -> str:
    """Return the hash of this package's files, computed once per process."""
    return digest_of_sources(_PACKAGE)
