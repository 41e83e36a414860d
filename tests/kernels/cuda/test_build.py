"""Builds of the CUDA kernels: sources and variants, the search for nvcc and CUTLASS, the cache of
libraries, and wheels.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import Distribution, distributions
from pathlib import Path
from types import SimpleNamespace

import pytest

from lightning_megatron.errors import MissingExtraError, UnsupportedError
from lightning_megatron.kernels.cuda import (
    build,
    build_library,
    build_wheel,
    find_library,
    find_toolchain,
    read_sources,
    reason_against_library,
    sources,
    toolchain,
)
from lightning_megatron.kernels.cuda.sources import ARCHITECTURE, NEVER_RUN, Sources
from lightning_megatron.kernels.cuda.toolchain import find_cutlass, find_nvcc
from lightning_megatron.plan.grouped_gemm import (
    BYTES_PER_GROUP,
    MAX_GROUPS,
    VARIANTS,
    WORKSPACE_ALIGNMENT,
)
from tests.kernels.cuda.fake import FakeKit


@pytest.fixture
def kit(tmp_path: Path) -> FakeKit:
    """Return a kit whose fake compiler works."""
    kit = FakeKit(tmp_path)
    kit.write_compiler()
    return kit


WALK = """
#include <vector>
#include "tile_walk.h"
int main() {
  for (int m = 1; m < 14; ++m) for (int n = 1; n < 14; ++n) for (int along = 0; along < 2; ++along)
    for (int band = 0; band < 16; ++band) {
      std::vector<int> seen(m * n);
      for (int i = 0; i < m * n; ++i) {
        auto at = lm_kernels::walk_tiles(i, m, n, along, band);
        if (at.m < 0 || at.m >= m || at.n < 0 || at.n >= n || seen[at.m * n + at.n]++) return 1;
      }
    }
}
"""


def test_names_of_variants_in_the_sources_and_in_the_plan_match_their_template_arguments():
    assert read_sources().variants == VARIANTS
    text = (read_sources().folder / "variants.h").read_text().replace("\\\n", "")
    types = re.findall(
        r"V\((\w+),\s*GroupedGemm<Kind::k(\w+), (\w+), (\d+), (\d+), (\d+), (\d+)(?:, Store::k(\w+))?>",
        text,
    )
    for name, kind, schedule, tile_m, tile_n, cluster_m, cluster_n, store in types:
        words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", kind).lower()
        words += {"ReduceAdd": "_reduce", "ReadC": "_read", "": ""}[store]
        sizes = f"{tile_m}x{tile_n}_{cluster_m}x{cluster_n}"
        assert name == f"{words}_{schedule.lower()}_{sizes}"
    assert len(types) == len(VARIANTS)


@pytest.mark.parametrize("architecture", [ARCHITECTURE, NEVER_RUN])
def test_every_list_of_variants_is_defined_in_one_source_file(architecture):
    extension = read_sources(architecture=architecture)
    header = (extension.folder / "variants.h").read_text()
    lists = re.findall(r"#define (LM_\w+_VARIANTS)\(V\) \\\n", header)
    units = [unit.read_text() for unit in extension.translation_units if unit.suffix == ".cu"]
    defined = [re.search(r"(LM_\w+)\(LM_DEFINE", unit) for unit in units]
    assert sorted(lists) == sorted(match[1] for match in defined if match)


def test_the_header_and_the_plan_have_the_same_limits():
    header = (read_sources().folder / "grouped_gemm.h").read_text()
    for name, value in {
        "kMaxGroups": MAX_GROUPS,
        "kWorkspaceAlignment": WORKSPACE_ALIGNMENT,
        "kBytesPerGroup": BYTES_PER_GROUP,
    }.items():
        assert f"{name} = {value};" in header


def test_new_source_files_and_changed_compiler_flags_change_the_key(kit, monkeypatch):
    first = kit.write_sources()
    assert kit.write_sources() == first
    (first.folder / "new.h").write_text("")
    second = kit.write_sources()
    monkeypatch.setitem(sources._FLAGS, ".cu", ("-O2",))
    assert len({first.key, second.key, kit.write_sources().key}) == 3


def test_the_tile_walk_visits_every_tile_once(tmp_path):
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    (tmp_path / "walk.cpp").write_text(WALK)
    include = f"-I{read_sources().folder}"
    command = [compiler, "-O1", include, str(tmp_path / "walk.cpp"), "-o", str(tmp_path / "walk")]
    subprocess.run(command, check=True)
    assert subprocess.run([tmp_path / "walk"]).returncode == 0


# The search for nvcc and CUTLASS.


def test_versions_of_the_toolchain_are_read_and_change_its_key(kit):
    older = find_toolchain(kit.home, kit.write_cutlass())
    assert (older.nvcc_version, older.cutlass_version) == ("13.0.88", "4.2.0")
    assert (older.torch / "include" / "torch" / "csrc" / "stable" / "library.h").is_file()
    newer = find_toolchain(kit.home, kit.write_cutlass("4.3.0"))
    assert newer.key != older.key


@pytest.fixture
def spec_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path | None], None]:
    """Return a function that makes a folder, or nothing, the package that is searched."""

    def set_spec(folder: Path | None) -> None:
        spec = folder and SimpleNamespace(submodule_search_locations=[str(folder)])
        monkeypatch.setattr(toolchain, "find_spec", lambda name: spec)

    return set_spec


def test_nvcc_is_found_on_the_path_or_in_wheels(kit, tmp_path, monkeypatch, spec_of):
    monkeypatch.setenv("PATH", str(kit.home / "bin"))
    assert find_nvcc() == kit.home / "bin" / "nvcc"
    monkeypatch.setenv("PATH", "/nowhere")
    wheel = tmp_path / "nvidia" / "cu13" / "bin" / "nvcc"
    wheel.parent.mkdir(parents=True)
    wheel.write_text("")
    spec_of(tmp_path / "nvidia")
    assert find_nvcc() == wheel
    spec_of(None)
    with pytest.raises(MissingExtraError, match="not on the PATH, and no CUDA_HOME was given"):
        find_nvcc()
    with pytest.raises(MissingExtraError, match="nvcc is not in .*elsewhere/bin"):
        find_nvcc(tmp_path / "elsewhere")


def test_cutlass_is_found_in_its_package(kit, tmp_path, spec_of):
    folder = kit.write_cutlass()
    (tmp_path / "cutlass_library").mkdir()
    folder.rename(tmp_path / "cutlass_library" / "source")
    spec_of(tmp_path / "cutlass_library")
    assert find_cutlass() == tmp_path / "cutlass_library" / "source" / "include"
    spec_of(None)
    with pytest.raises(MissingExtraError, match="pip install --no-deps nvidia-cutlass"):
        find_cutlass()
    with pytest.raises(MissingExtraError, match="are not in .*empty"):
        find_cutlass(tmp_path / "empty")


def test_old_or_broken_tools_and_missing_sources_are_refused(kit, tmp_path):
    with pytest.raises(UnsupportedError, match="sources must be installed"):
        read_sources(tmp_path)
    with pytest.raises(UnsupportedError, match=r"must be version 4: .* is 3.5.1"):
        find_toolchain(kit.home, kit.write_cutlass("3.5.1"))
    cutlass = kit.write_cutlass()
    kit.write_compiler(version="Cuda compilation tools, release 12.1, V12.1.105")
    with pytest.raises(UnsupportedError, match="must be 12.4 or newer"):
        find_toolchain(kit.home, cutlass)
    (kit.home / "bin" / "nvcc").chmod(0o644)
    with pytest.raises(UnsupportedError, match="nvcc must run: .* did not"):
        find_toolchain(kit.home, cutlass)


# Libraries in the cache.


BUILT_FILES = ["forward.cu.o", "operator.cpp.o", "liblm_kernels.so"]


def test_a_library_is_compiled_once_and_found_again(kit, tmp_path):
    messages: list[str] = []
    sources, cache = kit.write_sources(), tmp_path / "deep" / "cache"
    assert find_library(cache, sources) is None
    built = build_library(cache, sources, kit.toolchain(), say=messages.append)
    assert kit.journal == BUILT_FILES
    assert built.path.read_text() == "made\n"
    assert (built.nvcc, built.cutlass) == ("13.0.88", "4.2.0")
    assert build_library(cache, sources, kit.toolchain(), say=messages.append) == built
    assert find_library(cache, sources) == built
    assert kit.journal == BUILT_FILES
    assert len(messages) == 1
    assert messages[0].startswith("compiling 2 files, 1 at once: about 2 min")


def test_the_link_command_keeps_libtorch_without_needed_symbols(kit, tmp_path):
    made = tmp_path / "made.so"
    command = build.link_command(kit.write_sources(), kit.toolchain(), tmp_path, made)
    # Only libtorch.so leads to torch's CUDA symbols.
    assert command.index("--no-as-needed") < command.index("-ltorch")


def test_changed_sources_or_compilers_build_separate_libraries(kit, tmp_path):
    cache, sources = tmp_path / "cache", kit.write_sources()
    first = build_library(cache, sources, kit.toolchain(), say=str)
    second = build_library(cache, sources, kit.toolchain("13.1.0"), say=str)
    os.utime(first.path, (1, 1))
    assert find_library(cache, kit.write_sources()) == second
    changed_sources = kit.write_sources("// another kernel")
    assert find_library(cache, changed_sources) is None
    third = build_library(cache, changed_sources, kit.toolchain(), say=str)
    assert len({first.path, second.path, third.path}) == 3


def test_never_run_kernels_build_a_separate_library_for_their_architecture(kit, tmp_path):
    sources = kit.write_sources()
    never_run = kit.write_sources_never_run()
    assert kit.write_sources() == sources
    assert never_run.variants == ("forward_other",)
    built = build_library(tmp_path / "cache", never_run, kit.toolchain(), say=str)
    assert find_library(tmp_path / "cache", never_run) == built
    assert find_library(tmp_path / "cache", sources) is None
    (command,) = build.compile_commands(never_run, kit.toolchain(), tmp_path)
    assert "-gencode=arch=compute_100a,code=sm_100a" in command
    kit.write_sources("// other headers")
    assert kit.write_sources_never_run().key != never_run.key


def test_concurrent_requests_share_one_build(kit, tmp_path):
    kit.write_compiler(delay=0.1)
    sources = kit.write_sources()
    with ThreadPoolExecutor(3) as pool:
        futures = [
            pool.submit(build_library, tmp_path / "cache", sources, kit.toolchain(), 2, str)
            for _ in range(3)
        ]
        assert len({future.result() for future in futures}) == 1
    assert sorted(kit.journal) == sorted(BUILT_FILES)


def test_a_failed_compilation_leaves_only_the_lock_file(kit, tmp_path):
    sources, cache = kit.write_sources(), tmp_path / "cache"
    kit.write_compiler(failing="forward.cu")
    said = r"ended with 3. It said:\nforward.cu: error: no such thing"
    with pytest.raises(UnsupportedError, match=said):
        build_library(cache, sources, kit.toolchain(), say=str)
    assert [path.suffix for path in cache.iterdir()] == [".lock"]
    assert BUILT_FILES[-1] not in kit.journal
    kit.write_compiler()
    assert build_library(cache, sources, kit.toolchain(), say=str).path.is_file()


def test_a_folder_without_a_library_is_replaced_and_a_damaged_one_is_named(kit, tmp_path):
    sources, toolchain = kit.write_sources(), kit.toolchain()
    broken = tmp_path / f"{sources.key}-{toolchain.key}"
    broken.mkdir()
    (broken / "build.json").write_text("half")
    assert build_library(tmp_path, sources, toolchain, say=str).path.parent == broken
    (broken / "build.json").write_text("{}")
    with pytest.raises(UnsupportedError, match=f"Delete {broken} and build again"):
        find_library(tmp_path, kit.write_sources())


def test_files_in_the_place_of_folders_and_full_disks_are_refused(kit, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    build_in = partial(
        build_library, sources=kit.write_sources(), toolchain=kit.toolchain(), say=str
    )
    with pytest.raises(UnsupportedError, match="writable: .*file is not .* folder with --cache"):
        build_in(tmp_path / "file")
    usage = namedtuple("usage", "total used free")(10**12, 10**12 - 5, 5 * 10**7)
    with monkeypatch.context() as patch:
        patch.setattr(build.shutil, "disk_usage", lambda path: usage)
        with pytest.raises(UnsupportedError, match=r"needs 1 GB of disk: .* has 0\.05 GB"):
            build_in(tmp_path / "cache")
    assert kit.journal == []
    (kit.folder / "dist").write_text("a file")
    with pytest.raises(UnsupportedError, match="writable: .*dist is not .*--out"):
        make_wheel(kit, kit.write_sources())


# Wheels.


def install(wheel: Path, target: Path) -> Distribution:
    """Install a wheel with pip, without a network."""
    options = [
        "--disable-pip-version-check",
        "install",
        "--quiet",
        "--no-index",
        "--no-deps",
        "--target",
    ]
    subprocess.run([sys.executable, "-m", "pip", *options, str(target), str(wheel)], check=True)
    (installed,) = distributions(path=[str(target)])
    return installed


def make_wheel(kit: FakeKit, sources: Sources) -> Path:
    library = build_library(kit.folder / "builder", sources, kit.toolchain(), say=str)
    return build_wheel(kit.folder / "dist", library, sources, "0.1.0")


def test_an_installed_wheel_is_found_only_for_its_sources_and_after_the_cache(
    kit, tmp_path, monkeypatch
):
    sources, cache = kit.write_sources(), tmp_path / "cache"
    installed = install(make_wheel(kit, sources), tmp_path / "site")
    assert installed.version == f"0.1.0+src{sources.key}"
    assert installed.requires == ["lightning-megatron==0.1.0"]
    assert installed.read_text("licenses/CUTLASS_LICENSE.txt") is not None
    assert find_library(cache, sources) is None
    assert "no wheel is installed" in reason_against_library(cache, sources)

    monkeypatch.syspath_prepend(tmp_path / "site")
    library = find_library(cache, sources)
    assert library is not None
    assert library.path.is_relative_to(tmp_path / "site")
    assert library.path.read_text() == "made\n"
    assert (library.nvcc, library.cutlass, library.origin) == ("13.0.88", "4.2.0", "wheel")
    assert "lightning_megatron_kernels" not in sys.modules

    built = build_library(cache, sources, kit.toolchain(), say=str)
    assert find_library(cache, sources) == built
    assert built.origin == "cache"

    changed_sources = kit.write_sources("// another kernel")
    assert find_library(cache, changed_sources) is None
    assert (
        f"the wheel in {library.path.parents[1]} was built from other sources ({sources.key})"
        in reason_against_library(cache, changed_sources)
    )


def test_a_library_always_makes_the_same_wheel_and_changed_sources_another(kit):
    wheel = make_wheel(kit, kit.write_sources())
    content = wheel.read_bytes()
    wheel.unlink()
    assert make_wheel(kit, kit.write_sources()) == wheel
    assert wheel.read_bytes() == content
    assert make_wheel(kit, kit.write_sources("// another kernel")) != wheel
