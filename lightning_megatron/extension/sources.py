"""The sources of the extension: where they are, how they are compiled, and a hash of what they say."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from lightning_megatron.errors import UnsupportedError

#: In a checkout a link to the folder `kernels/csrc` of the project, in an installed package a copy of it.
BUNDLED = Path(__file__).parent / "csrc"
#: What kernels are compiled for: those of the rule, and those that were compiled and have never been run. The fast
#: instructions are in the architecture-specific sets only, hence the `a`.
ARCHITECTURE, NEVER_RUN = "sm_90a", "sm_100a"
#: The oldest torch whose stable ABI the operators use: 2.10, in the form that torch's headers want.
_TORCH_TARGET = "0x020a000000000000"
#: Of the compiler, for kernels and for the operators.
_FLAGS = {
    ".cu": ("-O3", "-DNDEBUG", "-Xcompiler", "-fPIC", "-std=c++17", "--expt-relaxed-constexpr"),
    ".cpp": (
        *("-O3", "-DNDEBUG", "-Xcompiler", "-fPIC", "-std=c++20"),
        *("-DUSE_CUDA", f"-DTORCH_TARGET_VERSION={_TORCH_TARGET}"),
    ),
}
_VARIANT = re.compile(r"^ +V\((\w+),", re.MULTILINE)


@dataclass(frozen=True)
class Sources:
    """Hold the folder of the sources and a hash of the contents of its files.

    Args:
        folder: The folder.
        key: Hash of names, contents and flags of the compiler, 16 digits.
        architecture: What the kernels are compiled for.
    """

    folder: Path
    key: str
    architecture: str = ARCHITECTURE

    @property
    def units(self) -> tuple[Path, ...]:
        """The files to compile: kernels, then the operator."""
        return (*sorted(self.folder.glob("*.cu")), *sorted(self.folder.glob("*.cpp")))

    @property
    def variants(self) -> tuple[str, ...]:
        """The names of the variants that a library of these sources has."""
        return tuple(_VARIANT.findall((self.folder / "variants.h").read_text(encoding="utf-8")))


def flags_of(suffix: str, architecture: str) -> tuple[str, ...]:
    """Return the flags of the compiler for a kind of file, without folders of headers.

    Args:
        suffix: ``.cu`` for kernels, ``.cpp`` for the operators.
        architecture: What is compiled for.
    """
    if suffix != ".cu":
        return _FLAGS[suffix]
    number = architecture.removeprefix("sm_")
    return (*_FLAGS[suffix], f"-gencode=arch=compute_{number},code=sm_{number}")


def read_sources(folder: Path = BUNDLED, architecture: str = ARCHITECTURE) -> Sources:
    """Read the sources.

    Args:
        folder: The folder; those of the package if none is named.
        architecture: What to compile for. Other than for ARCHITECTURE they lie in a folder of that name inside.

    Raises:
        UnsupportedError: If there are none.
    """
    if not (folder / "variants.h").is_file():
        raise UnsupportedError(
            f"the kernels' sources must be installed: {folder} has none. They come with the package. Install it again."
        )
    digest = hashlib.sha256(" ".join(flag for suffix in _FLAGS for flag in flags_of(suffix, architecture)).encode())
    folders = [folder] if architecture == ARCHITECTURE else [folder, folder / architecture]
    for path in (path for each in folders for path in sorted(each.iterdir())):
        if path.is_file():
            content = path.read_bytes()
            digest.update(f"{path.name} {len(content)}\n".encode() + content)
    return Sources(folders[-1], digest.hexdigest()[:16], architecture)
