"""The subcommand ``kernels``: build, package, show or check the bundled CUDA extension."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from lightning_megatron.cli.arguments import at_least_one
from lightning_megatron.errors import MissingExtraError, UnsupportedError
from lightning_megatron.kernels.cuda import (
    BuiltLibrary,
    build_library,
    build_wheel,
    default_cache,
    find_library,
    find_toolchain,
    read_sources,
    reason_against_library,
)
from lightning_megatron.kernels.cuda.load import load_library, reason_not_runnable
from lightning_megatron.kernels.cuda.sources import ARCHITECTURE, NEVER_RUN, Sources
from lightning_megatron.plan.grouped_gemm import (
    VARIANTS,
    Pass,
    choose_variant,
    reason_against_fusion,
)
from lightning_megatron.version import __version__

EXAMPLE = """examples:
  lightning-megatron kernels build --jobs 4
  lightning-megatron kernels show
  lightning-megatron kernels show --rows 32768 --groups 32 --n 1536 --k 2048   what would run
  lightning-megatron kernels check
  lightning-megatron kernels wheel --out dist     for machines without a compiler"""


def main(args: Sequence[str]) -> None:
    """Run the subcommand."""
    options = kernels_parser().parse_args(args)
    options.run(options)


#: Sizes of a product, with their meanings.
_SIZES = {
    "rows": "rows of all groups",
    "groups": "groups",
    "n": "output features",
    "k": "input features",
}


def kernels_parser() -> argparse.ArgumentParser:
    """Build the parser of ``build``, ``show``, ``check`` and ``wheel``."""
    parser = argparse.ArgumentParser(
        prog="lightning-megatron kernels",
        description="Build, package, show or check the bundled CUDA extension.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="build|show|check|wheel")
    build = commands.add_parser(
        "build", help="compile the kernels, which takes minutes, and keep the library"
    )
    build.add_argument(
        "--arch",
        choices=(ARCHITECTURE, NEVER_RUN),
        default=ARCHITECTURE,
        help=(
            f"{NEVER_RUN} compiles kernels that have never been run and are never selected "
            f"(default: {ARCHITECTURE})"
        ),
    )
    build.set_defaults(run=run_build)
    wheel = commands.add_parser(
        "wheel",
        help="package the library for machines without compilers; build it first if necessary",
    )
    wheel.add_argument(
        "--out", type=Path, default=Path("dist"), help="folder of the wheel (default: dist)"
    )
    wheel.set_defaults(run=run_wheel)
    for command in (build, wheel):
        command.add_argument(
            "--jobs",
            type=at_least_one,
            default=1,
            metavar="N",
            help="files compiled at once (default: 1)",
        )
    show = commands.add_parser(
        "show", help="print compilers, library and variants, or the choice for a shape"
    )
    for name, what in _SIZES.items():
        show.add_argument(
            f"--{name}", type=at_least_one, metavar="N", help=f"shape of the product: {what}"
        )
    show.set_defaults(run=run_show)
    check = commands.add_parser(
        "check", help="load the library and say whether this GPU can run it"
    )
    check.set_defaults(run=run_check)
    for command in (build, wheel, show):
        _add_toolchain(command)
    for command in (build, wheel, show, check):
        command.add_argument(
            "--cache", type=Path, default=default_cache(), help="folder of the built libraries"
        )
    return parser


def _add_toolchain(command: argparse.ArgumentParser) -> None:
    home = os.environ.get("CUDA_HOME")
    default = Path(home) if home else None
    command.add_argument(
        "--cuda-home", type=Path, default=default, help="a CUDA toolkit (default: CUDA_HOME)"
    )
    command.add_argument(
        "--cutlass", type=Path, help="a folder of CUTLASS (default: the package nvidia-cutlass)"
    )


def run_build(options: argparse.Namespace) -> None:
    """Build the library of the current sources unless the cache has it."""
    sources = read_sources(architecture=options.arch)
    built = _build(options, sources)
    print(
        f"{built.path}: {_megabytes(built.path)}, built in {built.seconds:.0f} s with "
        f"{_versions(built)}"
    )
    if options.arch == NEVER_RUN:
        print(
            f"Its kernels for {NEVER_RUN} were compiled and have never been run, so no choice "
            "takes them. To try one, load it with torch.ops.load_library and name a variant: "
            f"{', '.join(sources.variants)}"
        )


def run_wheel(options: argparse.Namespace) -> None:
    """Package the library of the current sources as a wheel; build it first if necessary."""
    sources = read_sources()
    library = find_library(options.cache, sources) or _build(options, sources)
    path = build_wheel(options.out, library, sources, __version__)
    print(f"{path}: {_megabytes(path)}, holds {library.path} ({_versions(library)})")
    print(
        "Where lightning-megatron has the same sources, install it with: pip install --no-deps "
        + str(path)
    )


def run_show(options: argparse.Namespace) -> None:
    """Print compilers, library and variants, or the variants selected for a shape."""
    shape = (options.rows, options.groups, options.n, options.k)
    if None not in shape:
        lines = _describe_choices(options.rows, options.groups, options.n, options.k)
        print("\n".join(lines))
        return
    if any(size is not None for size in shape):
        raise UnsupportedError(
            "--rows, --groups, --n and --k describe one shape: some of them are missing. Pass all "
            "four, or none."
        )
    print("\n".join(_describe_installation(options)))


def run_check(options: argparse.Namespace) -> None:
    """Load the library and check that the GPU of this machine can run it."""
    sources = read_sources()
    library = find_library(options.cache, sources)
    if library is None:
        raise UnsupportedError(
            f"the kernels must be built first: {reason_against_library(options.cache, sources)}."
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


def _describe_choices(rows: int, groups: int, n: int, k: int) -> list[str]:
    lines = [f"{rows} rows in {groups} groups ({rows // groups} each), n {n}, k {k}"]
    width = max(map(len, VARIANTS))
    reason = reason_against_fusion(n, k)
    for product in Pass:
        if product is Pass.FORWARD_SWIGLU and reason is not None:
            lines.append(f"  {'SwiGLU apart':<{width}}  {reason}")
            continue
        choice = choose_variant(product, rows, groups, n, k)
        lines.append(
            f"  {choice.variant:<{width}}  along {'N' if choice.along_n else 'M'}: {choice.reason}"
        )
    return lines


def _describe_installation(options: argparse.Namespace) -> list[str]:
    sources = read_sources()
    lines = [f"sources    {sources.folder} ({sources.key})"]
    try:
        toolchain: Any = find_toolchain(options.cuda_home, options.cutlass)
        lines += [
            f"nvcc       {toolchain.nvcc} ({toolchain.nvcc_version})",
            f"CUTLASS    {toolchain.cutlass} ({toolchain.cutlass_version})",
        ]
    except (MissingExtraError, UnsupportedError) as error:
        lines.append(f"compilers  {error}")
    library = find_library(options.cache, sources)
    if library is None:
        lines.append(f"library    none: {reason_against_library(options.cache, sources)}")
    else:
        lines.append(f"library    {library.path} ({_versions(library)}), from the {library.origin}")
    return [*lines, "variants", *(f"  {name}" for name in sources.variants)]


def _build(options: argparse.Namespace, sources: Sources) -> BuiltLibrary:
    toolchain = find_toolchain(options.cuda_home, options.cutlass)
    return build_library(options.cache, sources, toolchain, options.jobs)


def _versions(library: BuiltLibrary) -> str:
    return f"nvcc {library.nvcc}, CUTLASS {library.cutlass}"


def _megabytes(path: Path) -> str:
    return f"{path.stat().st_size / 1e6:.1f} MB"
