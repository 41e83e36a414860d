"""The command ``kernels``: build, package, show or check the bundled CUDA extension."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from jsonargparse.typing import PositiveInt

from lightning_megatron.errors import MissingExtraError, UnsupportedError
from lightning_megatron.kernels.cuda import (
    BuiltLibrary,
    Toolchain,
    build_library,
    build_wheel,
    default_cache,
    find_library,
    find_toolchain,
    read_sources,
    reason_against_library,
)
from lightning_megatron.kernels.cuda.library import load_library, reason_not_runnable
from lightning_megatron.kernels.cuda.sources import NEVER_RUN
from lightning_megatron.plan.grouped_gemm import (
    VARIANTS,
    Pass,
    choose_variant,
    reason_against_fusion,
)
from lightning_megatron.version import __version__

EXAMPLES = """examples:
  lightning-megatron kernels build --jobs 4
  lightning-megatron kernels show
  lightning-megatron kernels show --rows 32768 --groups 32 --n 1536 --k 2048   what would run
  lightning-megatron kernels check
  lightning-megatron kernels wheel --output dist     for machines without a compiler"""


@dataclass(frozen=True)
class Compilers:
    """Compilers, and the folder of the built libraries.

    Args:
        cuda_home: A CUDA toolkit; by default the variable CUDA_HOME.
        cutlass: A folder of CUTLASS; by default the package nvidia-cutlass.
        cache: Folder of the built libraries; by default ~/.cache/lightning_megatron/kernels.
    """

    cuda_home: Path | None = None
    cutlass: Path | None = None
    cache: Path | None = None

    @property
    def folder(self) -> Path:
        """Folder of the built libraries."""
        return self.cache or default_cache()

    def toolchain(self) -> Toolchain:
        """Find nvcc and CUTLASS."""
        home = os.environ.get("CUDA_HOME")
        return find_toolchain(self.cuda_home or (Path(home) if home else None), self.cutlass)


def build(
    compilers: Compilers,
    arch: Literal["sm_90a", "sm_100a"] = "sm_90a",
    jobs: PositiveInt = 1,
) -> None:
    """Compile the kernels, which takes minutes, and keep the library.

    Args:
        arch: sm_100a compiles kernels that have never been run and are never selected.
        jobs: Files compiled at once.
    """
    sources = read_sources(architecture=arch)
    built = build_library(compilers.folder, sources, compilers.toolchain(), jobs)
    print(
        f"{built.path}: {_megabytes(built.path)}, built in {built.seconds:.0f} s with "
        f"{_versions(built)}"
    )
    if arch == NEVER_RUN:
        print(
            f"Its kernels for {NEVER_RUN} were compiled and have never been run, so no choice "
            "takes them. To try one, load it with torch.ops.load_library and name a variant: "
            f"{', '.join(sources.variants)}"
        )


def wheel(compilers: Compilers, output: Path = Path("dist"), jobs: PositiveInt = 1) -> None:
    """Package the library for machines without compilers; build it first if necessary.

    Args:
        output: Folder of the wheel.
        jobs: Files compiled at once.
    """
    sources = read_sources()
    library = find_library(compilers.folder, sources) or build_library(
        compilers.folder, sources, compilers.toolchain(), jobs
    )
    path = build_wheel(output, library, sources, __version__)
    print(f"{path}: {_megabytes(path)}, holds {library.path} ({_versions(library)})")
    print(
        "Where lightning-megatron has the same sources, install it with: pip install --no-deps "
        + str(path)
    )


def show(
    compilers: Compilers,
    rows: PositiveInt | None = None,
    groups: PositiveInt | None = None,
    n: PositiveInt | None = None,
    k: PositiveInt | None = None,
) -> None:
    """Print compilers, library and variants, or the choice for the shape of a product.

    Args:
        rows: Rows of all groups.
        groups: Groups.
        n: Output features.
        k: Input features.
    """
    if rows and groups and n and k:
        print("\n".join(_describe_choices(rows, groups, n, k)))
        return
    if rows or groups or n or k:
        raise UnsupportedError(
            "--rows, --groups, --n and --k describe one shape: some of them are missing. Pass all "
            "four, or none."
        )
    for name, text in describe_installation(compilers).items():
        print(f"{name:<11}{text}")
    print("\n  ".join(["variants", *read_sources().variants]))


def check(cache: Path | None = None) -> None:
    """Load the library and say whether this GPU can run it.

    Args:
        cache: Folder of the built libraries; by default ~/.cache/lightning_megatron/kernels.
    """
    sources = read_sources()
    folder = cache or default_cache()
    library = find_library(folder, sources)
    if library is None:
        raise UnsupportedError(
            f"the kernels must be built first: {reason_against_library(folder, sources)}."
        )
    load_library(library.path)
    print(f"{library.path}: loaded, {torch.ops.lm_kernels.grouped_gemm.default._schema}")
    why = reason_not_runnable()
    if why is not None:
        raise UnsupportedError(
            f"the kernels need an H100, H200 or H20: {why}. They use instructions of sm_90a. On "
            "other GPUs torch's products are used."
        )
    print(f"{torch.cuda.get_device_name(0)}: can run it")


COMMAND = {"build": build, "show": show, "check": check, "wheel": wheel}


def _describe_choices(rows: int, groups: int, n: int, k: int) -> list[str]:
    lines = [f"{rows} rows in {groups} groups ({rows // groups} each), n {n}, k {k}"]
    width = max(map(len, VARIANTS))
    reason = reason_against_fusion(n, k)
    for product in Pass:
        if product is Pass.FORWARD_SWIGLU and reason is not None:
            lines.append(f"  {'SwiGLU apart':<{width}}  {reason}")
            continue
        choice = choose_variant(product, rows, groups, n, k)
        side = "N" if choice.along_n else "M"
        lines.append(f"  {choice.variant:<{width}}  along {side}: {choice.reason}")
    return lines


def describe_installation(compilers: Compilers) -> dict[str, str]:
    """Return sources, compilers and library of the kernels, or the reasons why they are missing."""
    sources = read_sources()
    parts = {"sources": f"{sources.folder} ({sources.key})"}
    try:
        toolchain = compilers.toolchain()
        parts["nvcc"] = f"{toolchain.nvcc} ({toolchain.nvcc_version})"
        parts["CUTLASS"] = f"{toolchain.cutlass} ({toolchain.cutlass_version})"
    except (MissingExtraError, UnsupportedError) as error:
        parts["compilers"] = str(error)
    library = find_library(compilers.folder, sources)
    if library is None:
        parts["library"] = f"none: {reason_against_library(compilers.folder, sources)}"
    else:
        parts["library"] = f"{library.path} ({_versions(library)}), from the {library.origin}"
    return parts


def _versions(library: BuiltLibrary) -> str:
    return f"nvcc {library.nvcc}, CUTLASS {library.cutlass}"


def _megabytes(path: Path) -> str:
    return f"{path.stat().st_size / 1e6:.1f} MB"
