"""Builds of the CUDA extension in a cache, one for each state of the sources and compilers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import ceil
from pathlib import Path

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.kernels.cuda.library import DESCRIPTION, LIBRARY, BuiltLibrary, describe
from lightning_megatron.kernels.cuda.sources import Sources, flags_of
from lightning_megatron.kernels.cuda.toolchain import Toolchain
from lightning_megatron.once import one_at_a_time

#: Time to compile one kernel file on one core, with nvcc 13.0 and CUTLASS 4.2 (seconds).
SECONDS_PER_FILE = 75
#: Memory of one compiler process (GB).
GIGABYTES_PER_JOB = 6
#: Disk space of the object files and of nvcc's temporary files (bytes).
_BYTES_ON_DISK = 10**9


def build_library(
    cache: Path,
    sources: Sources,
    toolchain: Toolchain,
    num_jobs: int = 1,
    say: Callable[[str], object] = print,
) -> BuiltLibrary:
    """Return the library of the sources and compilers; build it if it is not in the cache.

    If several processes call at the same time, one of them builds and the others wait. A finished
    build is renamed to its final folder, so a library in that folder is always complete. Before a
    build, ``say`` gets a message with the expected time.
    """
    folder = cache / f"{sources.key}-{toolchain.key}"
    if (folder / LIBRARY).is_file():  # without a lock, which a read-only cache does not allow
        return describe(folder / LIBRARY)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with one_at_a_time(cache / f"{folder.name}.lock"):
            if not (folder / LIBRARY).is_file():
                _check_room(cache)
                _build(folder, sources, toolchain, num_jobs, say)
    except OSError as error:
        raise UnsupportedError(
            f"the folder of built kernels must be writable: {cache} is not ({error}). Use another "
            "folder with --cache, or free space."
        ) from error
    return describe(folder / LIBRARY)


def compile_commands(sources: Sources, toolchain: Toolchain, objects: Path) -> list[list[str]]:
    """Return the command line of every file to compile."""
    headers = {".cu": toolchain.cutlass, ".cpp": toolchain.torch / "include"}
    return [
        [
            str(toolchain.nvcc),
            *flags_of(file.suffix, sources.architecture),
            f"-I{headers[file.suffix]}",
            "-c",
            str(file),
            "-o",
            str(objects / f"{file.name}.o"),
        ]
        for file in sources.translation_units
    ]


def link_command(sources: Sources, toolchain: Toolchain, objects: Path, library: Path) -> list[str]:
    """Return the command line of the linker.

    The CUDA runtime is linked statically, so that any build of torch can load the library.
    """
    inputs = [str(objects / f"{file.name}.o") for file in sources.translation_units]
    command = [str(toolchain.nvcc), "-shared", "-cudart", "static", "-o", str(library), *inputs]
    # Only libtorch.so depends on torch's CUDA libraries. The kernels use none of its symbols
    # directly, so linkers would drop it without --no-as-needed.
    command += ["-L", str(toolchain.torch / "lib"), "-Xlinker", "--no-as-needed"]
    return [*command, "-ltorch", "-ltorch_cpu", "-lc10"]


def _build(
    folder: Path,
    sources: Sources,
    toolchain: Toolchain,
    num_jobs: int,
    say: Callable[[str], object],
) -> None:
    files = sources.translation_units
    num_rounds = ceil(sum(file.suffix == ".cu" for file in files) / num_jobs)
    minutes = ceil(num_rounds * SECONDS_PER_FILE / 60)
    say(
        f"compiling {len(files)} files, {num_jobs} at once: about {minutes} min on as many free "
        f"cores, and up to {GIGABYTES_PER_JOB} GB of memory each"
    )
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=folder.parent) as name:
        objects = Path(name) / "objects"
        made = Path(name) / "made"
        objects.mkdir()
        made.mkdir()
        with ThreadPoolExecutor(num_jobs) as pool:
            list(
                pool.map(_run, compile_commands(sources, toolchain, objects)),
            )  # an error cancels pending jobs
        _run(link_command(sources, toolchain, objects, made / LIBRARY))
        versions = {"nvcc": toolchain.nvcc_version, "cutlass": toolchain.cutlass_version}
        description = {**versions, "seconds": round(time.monotonic() - start, 1)}
        (made / DESCRIPTION).write_text(json.dumps(description), encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)  # a leftover without a library
        os.rename(made, folder)


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    if done.returncode:
        last = "\n".join(done.stdout.strip().splitlines()[-15:])
        raise UnsupportedError(
            f"the kernels must compile: {' '.join(command)} ended with {done.returncode}. It "
            f"said:\n{last}\nIf the compiler was killed, memory was too small: use fewer --jobs. "
            "Otherwise use another CUDA toolkit."
        )


def _check_room(cache: Path) -> None:
    free = shutil.disk_usage(cache).free
    if free < _BYTES_ON_DISK:
        raise UnsupportedError(
            f"a build needs {_BYTES_ON_DISK / 1e9:.0f} GB of disk: {cache} has {free / 1e9:.2f} "
            "GB. Free space, or use another folder with --cache."
        )
