"""Build the extension into a cache: once for each state of the sources and compilers, by one process at a time."""

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
from lightning_megatron.extension.library import DESCRIPTION, LIBRARY, BuiltLibrary, describe
from lightning_megatron.extension.sources import Sources, flags_of
from lightning_megatron.extension.toolchain import Toolchain
from lightning_megatron.once import one_at_a_time

#: What one file of kernels takes on one core, with nvcc 13.0 and CUTLASS 4.2; the operator takes two seconds.
SECONDS_PER_FILE, GIGABYTES_PER_JOB = 75, 6
#: Objects, and what nvcc writes on the way.
_BYTES_ON_DISK = 10**9


def build_library(
    cache: Path, sources: Sources, toolchain: Toolchain, num_jobs: int = 1, say: Callable[[str], object] = print
) -> BuiltLibrary:
    """Return the library of these sources and compilers, built first if it is not in the cache.

    Processes that ask at once wait for one of them. A library is complete when it has its name.

    Args:
        cache: Folder of libraries, created if it is not there.
        sources: What to compile.
        toolchain: What to compile it with.
        num_jobs: Files that are compiled at once.
        say: Is told how long it will take before it begins.

    Raises:
        UnsupportedError: If the folder cannot be written, has no room, or a file does not compile.
    """
    folder = cache / f"{sources.key}-{toolchain.key}"
    if (folder / LIBRARY).is_file():  # it may lie in a read-only folder, where no lock can be taken
        return describe(folder / LIBRARY)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with one_at_a_time(cache / f"{folder.name}.lock"):
            if not (folder / LIBRARY).is_file():
                _check_room(cache)
                _build(folder, sources, toolchain, num_jobs, say)
    except OSError as error:
        raise UnsupportedError(
            f"the folder of built kernels must be writable: {cache} is not ({error}). A build is kept there. "
            "Use another with --cache, or free space."
        ) from error
    return describe(folder / LIBRARY)


def compile_commands(sources: Sources, toolchain: Toolchain, objects: Path) -> list[list[str]]:
    """Return the command lines that compile each file, without the last one, which links."""
    headers = {".cu": toolchain.cutlass, ".cpp": toolchain.torch / "include"}
    commands = []
    for unit in sources.units:
        flags = (*flags_of(unit.suffix, sources.architecture), f"-I{headers[unit.suffix]}")
        commands.append([str(toolchain.nvcc), *flags, "-c", str(unit), "-o", str(objects / f"{unit.name}.o")])
    return commands


def link_command(sources: Sources, toolchain: Toolchain, objects: Path, library: Path) -> list[str]:
    """Return the command line that links; CUDA's runtime is inside, so that any build of torch can load the library."""
    # libtorch.so alone leads to what torch has for CUDA. Nothing of it is named, so many linkers would leave it out.
    torch = ["-L", str(toolchain.torch / "lib"), "-Xlinker", "--no-as-needed", "-ltorch", "-ltorch_cpu", "-lc10"]
    inputs = [str(objects / f"{unit.name}.o") for unit in sources.units]
    return [str(toolchain.nvcc), "-shared", "-cudart", "static", "-o", str(library), *inputs, *torch]


def _build(folder: Path, sources: Sources, toolchain: Toolchain, num_jobs: int, say: Callable[[str], object]) -> None:
    num_rounds = ceil(sum(unit.suffix == ".cu" for unit in sources.units) / num_jobs)
    minutes = ceil(num_rounds * SECONDS_PER_FILE / 60)
    say(
        f"compiling {len(sources.units)} files, {num_jobs} at once: about {minutes} min on as many free cores, and up "
        f"to {GIGABYTES_PER_JOB} GB of memory each"
    )
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=folder.parent) as name:
        objects, made = Path(name) / "objects", Path(name) / "made"
        objects.mkdir()
        made.mkdir()
        with ThreadPoolExecutor(num_jobs) as pool:
            list(pool.map(_run, compile_commands(sources, toolchain, objects)))  # an error cancels those that wait
        _run(link_command(sources, toolchain, objects, made / LIBRARY))
        versions = {"nvcc": toolchain.nvcc_version, "cutlass": toolchain.cutlass_version}
        description = {**versions, "seconds": round(time.monotonic() - start, 1)}
        (made / DESCRIPTION).write_text(json.dumps(description), encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)  # what is there has no library
        os.rename(made, folder)


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    if done.returncode:
        last = "\n".join(done.stdout.strip().splitlines()[-15:])
        raise UnsupportedError(
            f"the kernels must compile: {' '.join(command)} ended with {done.returncode}. It said:\n{last}\n"
            "A compile that was killed had too little memory: use fewer --jobs. For all else use another CUDA toolkit."
        )


def _check_room(cache: Path) -> None:
    free = shutil.disk_usage(cache).free
    if free < _BYTES_ON_DISK:
        raise UnsupportedError(
            f"a build needs {_BYTES_ON_DISK / 1e9:.0f} GB of disk: {cache} has {free / 1e9:.2f} GB. Objects are large. "
            "Free space, or use another folder with --cache."
        )
