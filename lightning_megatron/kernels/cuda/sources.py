"""Sources of the CUDA extension: their folder, compiler flags and hash."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from lightning_megatron.errors import UnsupportedError

#: Folder of the sources: in a checkout a link to ``kernels/csrc``, in an installed package a copy.
BUNDLED = Path(__file__).parent / "csrc"
#: Default architecture of the kernels. The ``a`` selects the architecture-specific instruction set,
#: which the fast matrix instructions need.
ARCHITECTURE = "sm_90a"
#: Architecture whose kernels have been compiled but never run.
NEVER_RUN = "sm_100a"
#: Oldest supported version of torch's stable ABI, 2.10, in the form of torch's headers.
_TORCH_TARGET = "0x020a000000000000"
#: Compiler flags for kernels (``.cu``) and operators (``.cpp``).
_FLAGS = {
    ".cu": ("-O3", "-DNDEBUG", "-Xcompiler", "-fPIC", "-std=c++17", "--expt-relaxed-constexpr"),
    ".cpp": (
        "-O3",
        "-DNDEBUG",
        "-Xcompiler",
        "-fPIC",
        "-std=c++20",
        "-DUSE_CUDA",
        f"-DTORCH_TARGET_VERSION={_TORCH_TARGET}",
    ),
}
_VARIANT = re.compile(r"^ +V\((\w+),", re.MULTILINE)


@dataclass(frozen=True)
class Sources:
    """A folder of sources with a hash of file names, contents and compiler flags, 16 digits."""

    folder: Path
    key: str
    architecture: str = ARCHITECTURE

    @property
    def translation_units(self) -> tuple[Path, ...]:
        """Return the files to compile: kernels, then the operator."""
        return (*sorted(self.folder.glob("*.cu")), *sorted(self.folder.glob("*.cpp")))

    @property
    def variants(self) -> tuple[str, ...]:
        """Return the names of the kernel variants of the sources."""
        return tuple(_VARIANT.findall((self.folder / "variants.h").read_text(encoding="utf-8")))


def flags_of(suffix: str, architecture: str) -> tuple[str, ...]:
    """Return the compiler flags of files with a suffix, without include folders."""
    if suffix != ".cu":
        return _FLAGS[suffix]
    number = architecture.removeprefix("sm_")
    return (*_FLAGS[suffix], f"-gencode=arch=compute_{number},code=sm_{number}")


def read_sources(folder: Path = BUNDLED, architecture: str = ARCHITECTURE) -> Sources:
    """Read the sources and compute their hash.

    Each architecture but the default has a subfolder of its name.
    """
    if not (folder / "variants.h").is_file():
        raise UnsupportedError(
            f"the kernels' sources must be installed: {folder} has none. They are part of the "
            "package. Install the package again.",
        )
    flags = " ".join(flag for suffix in _FLAGS for flag in flags_of(suffix, architecture))
    digest = hashlib.sha256(flags.encode())
    folders = [folder] if architecture == ARCHITECTURE else [folder, folder / architecture]
    for path in (path for parent in folders for path in sorted(parent.iterdir())):
        if path.is_file():
            content = path.read_bytes()
            digest.update(f"{path.name} {len(content)}\n".encode() + content)
    return Sources(folders[-1], digest.hexdigest()[:16], architecture)
