"""Search for the compilers and headers of the extension: nvcc, CUTLASS and torch."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

from lightning_megatron.errors import MissingExtraError, UnsupportedError
from lightning_megatron.kernels.cuda.sources import ARCHITECTURE

_OLDEST_NVCC = (12, 4)
#: Oldest supported version of CUTLASS, and the first one that is not supported.
_CUTLASS_VERSIONS = ((4, 0), (5, 0))


@dataclass(frozen=True)
class Toolchain:
    """Compilers and headers of a build.

    Args:
        cutlass: Include folder of CUTLASS.
        torch: Folder of the package torch.
    """

    nvcc: Path
    nvcc_version: str
    cutlass: Path
    cutlass_version: str
    torch: Path

    @property
    def key(self) -> str:
        """Return a hash of 8 digits of the versions of nvcc and CUTLASS.

        The version of torch is not included, because the library uses the stable ABI only.
        """
        content = f"nvcc {self.nvcc_version} cutlass {self.cutlass_version} {ARCHITECTURE}"
        return hashlib.sha256(content.encode()).hexdigest()[:8]


def find_toolchain(cuda_home: Path | None = None, cutlass: Path | None = None) -> Toolchain:
    """Find the compilers and headers of a build.

    Args:
        cuda_home: Folder of a CUDA toolkit; None searches the PATH, then NVIDIA's wheels.
        cutlass: Folder of CUTLASS, or its include folder; None uses the package nvidia-cutlass.
    """
    nvcc = find_nvcc(cuda_home)
    include = find_cutlass(cutlass)
    torch_folder = Path(torch.__file__).parent
    return Toolchain(nvcc, _nvcc_version(nvcc), include, _cutlass_version(include), torch_folder)


def find_nvcc(cuda_home: Path | None = None) -> Path:
    """Return the path of nvcc in a toolkit, on the PATH, or in the wheel nvidia-cuda-nvcc."""
    if cuda_home is not None:
        nvcc = cuda_home / "bin" / "nvcc"
        if not nvcc.is_file():
            raise MissingExtraError(
                f"nvcc is not in {cuda_home}/bin. Set CUDA_HOME or --cuda_home to the folder of a "
                "CUDA toolkit.",
            )
        return nvcc
    on_path = shutil.which("nvcc")
    if on_path is not None:
        return Path(on_path)
    spec = find_spec("nvidia")
    roots = spec.submodule_search_locations if spec is not None else None
    for root in roots or ():
        for nvcc in sorted(Path(root).glob("*/bin/nvcc")):
            return nvcc
    raise MissingExtraError(
        "nvcc is not installed: it is not on the PATH, and no CUDA_HOME was given. The kernels are "
        "compiled from source. Install a CUDA toolkit, or its wheels: pip install nvidia-cuda-nvcc "
        "nvidia-cuda-runtime nvidia-cuda-cccl."
    )


def find_cutlass(folder: Path | None = None) -> Path:
    """Return the include folder of CUTLASS, in a folder or else in the package nvidia-cutlass."""
    spec = find_spec("cutlass_library") if folder is None else None
    includes = [folder, folder / "include"] if folder is not None else []
    if spec is not None:
        roots = spec.submodule_search_locations or ()
        includes += [Path(root) / "source" / "include" for root in roots]
    for include in includes:
        if (include / "cutlass" / "version.h").is_file():
            return include
    where = "not installed" if folder is None else f"not in {folder}"
    raise MissingExtraError(
        f"the headers of CUTLASS are {where}. The kernels are compiled from its templates. Install "
        "them with pip install --no-deps nvidia-cutlass, or name a checkout with --cutlass."
    )


def _nvcc_version(nvcc: Path) -> str:
    try:
        printed = subprocess.run(
            [nvcc, "--version"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise UnsupportedError(
            f"nvcc must run: {nvcc} did not ({error}). Use another CUDA toolkit with --cuda_home.",
        ) from error
    match = re.search(r"\bV(\d+)\.(\d+)\.(\d+)", printed)
    if match is None or (int(match[1]), int(match[2])) < _OLDEST_NVCC:
        oldest = ".".join(map(str, _OLDEST_NVCC))
        raise UnsupportedError(
            f"nvcc must be {oldest} or newer: {nvcc} says "
            f"{match[0] if match else printed.strip()!r}. Older versions do not compile CUTLASS 4 "
            "for sm_90a. Use another CUDA toolkit with --cuda_home."
        )
    return ".".join(match.groups())


def _cutlass_version(include: Path) -> str:
    text = (include / "cutlass" / "version.h").read_text(encoding="utf-8")
    numbers = [int(n) for n in re.findall(r"#define CUTLASS_(?:MAJOR|MINOR|PATCH) (\d+)", text)]
    oldest, first_unknown = _CUTLASS_VERSIONS
    if len(numbers) != 3 or not oldest <= tuple(numbers[:2]) < first_unknown:
        raise UnsupportedError(
            f"CUTLASS must be version {oldest[0]}: {include} is "
            f"{'.'.join(map(str, numbers)) or 'unknown'}. The kernels replace parts of it that "
            "other versions may have changed. Install nvidia-cutlass==4.2.0.0 with pip install "
            "--no-deps."
        )
    return ".".join(map(str, numbers))
