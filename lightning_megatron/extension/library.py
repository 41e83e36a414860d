"""A built library: where it may lie, and which one belongs to the sources.

A folder of libraries has one folder for each state of sources and compilers, named ``SOURCES-COMPILERS`` by their keys.
The cache is such a folder, and so is the package that a wheel of kernels installs.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.extension.sources import Sources

LIBRARY, DESCRIPTION = "liblm_kernels.so", "build.json"
#: What a wheel of kernels installs: a package with this folder of libraries.
WHEEL_PACKAGE = "lightning_megatron_kernels"


@dataclass(frozen=True)
class BuiltLibrary:
    """Hold a built library.

    Args:
        path: The library.
        nvcc: Version of the compiler that made it.
        cutlass: Version of CUTLASS that it is made of.
        seconds: What the build took.
        origin: Whether it lies in the cache, or was installed from a wheel.
    """

    path: Path
    nvcc: str
    cutlass: str
    seconds: float
    origin: Literal["cache", "wheel"] = "cache"


def default_cache() -> Path:
    """Return the folder of libraries that is used when none is named."""
    return Path.home() / ".cache" / "lightning_megatron" / "kernels"


def find_library(cache: Path, sources: Sources) -> BuiltLibrary | None:
    """Return a library of these sources, whatever it was compiled with; None if there is none.

    The newest of the cache comes first, then that of an installed wheel. No compiler is needed: a machine without one
    finds what another built in a shared folder, or what was installed.

    Args:
        cache: Folder of libraries.
        sources: What the library must be made of.
    """
    found = _newest(cache, sources)
    if found is not None:
        return describe(found)
    installed = _installed_folder()
    found = _newest(installed, sources) if installed is not None else None
    return replace(describe(found), origin="wheel") if found is not None else None


def why_no_library(cache: Path, sources: Sources) -> str:
    """Return where none was found and what to do; a wheel of other sources is named.

    Args:
        cache: Folder of libraries.
        sources: What the library must be made of.
    """
    folder = _installed_folder()
    others = sorted({path.parent.name.split("-")[0] for path in folder.glob(f"*/{LIBRARY}")}) if folder else []
    wheel = f"the wheel in {folder} is of other sources ({', '.join(others)})" if others else "no wheel is installed"
    return (
        f"{cache} has no library of these sources ({sources.key}), and {wheel}. Build one: lightning-megatron kernels "
        "build. Or install a wheel that lightning-megatron kernels wheel made from these sources"
    )


def describe(path: Path) -> BuiltLibrary:
    """Return a library with what its description says.

    Args:
        path: The library.

    Raises:
        UnsupportedError: If the description is damaged.
    """
    try:
        fields = json.loads((path.parent / DESCRIPTION).read_text(encoding="utf-8"))
        return BuiltLibrary(path, str(fields["nvcc"]), str(fields["cutlass"]), float(fields["seconds"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UnsupportedError(
            f"a built library must have its description: {path.parent / DESCRIPTION} is damaged ({error}). The folder "
            f"was changed by hand. Delete {path.parent} and build again."
        ) from error


def _installed_folder() -> Path | None:
    spec = find_spec(WHEEL_PACKAGE)  # looked for, not imported
    return Path(spec.origin).parent if spec is not None and spec.origin is not None else None


def _newest(folder: Path, sources: Sources) -> Path | None:
    found = folder.glob(f"{sources.key}-*/{LIBRARY}")
    return max(found, key=lambda path: path.stat().st_mtime, default=None)
