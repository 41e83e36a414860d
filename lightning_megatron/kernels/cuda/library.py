"""Search for built libraries in the cache and in an installed wheel, and their loading.

A folder of libraries has one subfolder for each state of sources and compilers. Its name is
``SOURCES-COMPILERS``, the keys of both. The cache is such a folder, and so is the package that a
wheel of kernels installs.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import torch

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.kernels.cuda.sources import Sources

#: File name of a library.
LIBRARY = "liblm_kernels.so"
#: File name of the description of a build, next to the library.
DESCRIPTION = "build.json"
#: Name of the package that a wheel of kernels installs, which is a folder of libraries.
WHEEL_PACKAGE = "lightning_megatron_kernels"
#: Compute capability of the kernels. Code for sm_90a runs on no other.
CAPABILITY = (9, 0)
#: Compute capability of the sm_100a kernels, which have been compiled but never run.
_UNTESTED_CAPABILITY = (10, 0)


@dataclass(frozen=True)
class BuiltLibrary:
    """A built library: versions of nvcc and CUTLASS, and duration of the build (seconds)."""

    path: Path
    nvcc: str
    cutlass: str
    seconds: float
    origin: Literal["cache", "wheel"] = "cache"


def default_cache() -> Path:
    """Return the default folder of libraries."""
    return Path.home() / ".cache" / "lightning_megatron" / "kernels"


def find_library(cache: Path, sources: Sources) -> BuiltLibrary | None:
    """Return a library of the sources, compiled with any compiler; None if there is none.

    The newest library in the cache has priority over an installed wheel. The search needs no
    compiler, so it also works on machines that share a cache with a build machine.
    """
    folder = _newest(cache, sources)
    if folder is not None:
        return describe(folder)
    installed = _installed_folder()
    folder = _newest(installed, sources) if installed is not None else None
    return replace(describe(folder), origin="wheel") if folder is not None else None


def reason_against_library(cache: Path, sources: Sources) -> str:
    """Explain why no library was found, and how to get one."""
    folder = _installed_folder()
    libraries = folder.glob(f"*/{LIBRARY}") if folder else ()
    others = sorted({path.parent.name.split("-")[0] for path in libraries})
    wheel = "no wheel is installed"
    if others:
        wheel = f"the wheel in {folder} was built from other sources ({', '.join(others)})"
    return (
        f"{cache} has no library of these sources ({sources.key}), and {wheel}. Build one: "
        "lightning-megatron kernels build. Or install a wheel that lightning-megatron kernels "
        "wheel made from these sources"
    )


def describe(path: Path) -> BuiltLibrary:
    """Read the description of a library, or raise if it is missing or damaged."""
    try:
        fields = json.loads((path.parent / DESCRIPTION).read_text(encoding="utf-8"))
        return BuiltLibrary(
            path,
            str(fields["nvcc"]),
            str(fields["cutlass"]),
            float(fields["seconds"]),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UnsupportedError(
            f"a built library must have a readable description: {path.parent / DESCRIPTION} is "
            f"damaged ({error}). Delete {path.parent} and build again."
        ) from error


def load_library(path: Path) -> None:
    """Register the operators of a library as ``torch.ops.lm_kernels``.

    Loading a library again has no effect.
    """
    try:
        torch.ops.load_library(path)
    except OSError as error:
        raise UnsupportedError(
            f"the library must be loadable: {path} is not ({error}). It was built for another "
            "system or another version of torch. Delete its folder and run: lightning-megatron "
            "kernels build."
        ) from error


def reason_not_runnable(device: int = 0) -> str | None:
    """Return the reason why a GPU cannot run the kernels; None if it can."""
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    capability = torch.cuda.get_device_capability(device)
    if capability != CAPABILITY:
        never_run = (
            "; those for 10.0 were compiled but have never been run"
            if capability == _UNTESTED_CAPABILITY
            else ""
        )
        return (
            f"{torch.cuda.get_device_name(device)} has compute capability "
            f"{capability[0]}.{capability[1]}, and the kernels are compiled for "
            f"{CAPABILITY[0]}.{CAPABILITY[1]}{never_run}"
        )
    return None


def _installed_folder() -> Path | None:
    spec = find_spec(WHEEL_PACKAGE)  # this does not import the package
    return Path(spec.origin).parent if spec is not None and spec.origin is not None else None


def _newest(folder: Path, sources: Sources) -> Path | None:
    libraries = folder.glob(f"{sources.key}-*/{LIBRARY}")
    return max(libraries, key=lambda path: path.stat().st_mtime, default=None)
