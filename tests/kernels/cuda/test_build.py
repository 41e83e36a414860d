"""Tests of the cache of built kernels: when kernels are compiled, and what failed builds leave."""

from __future__ import annotations

import os
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.kernels.cuda import build, build_library, find_library
from tests.kernels.cuda.fake import FakeKit

BUILT_FILES = ["forward.cu.o", "operator.cpp.o", "liblm_kernels.so"]


def test_a_library_is_compiled_once_and_found_again(kit: FakeKit, tmp_path: Path) -> None:
    messages: list[str] = []
    sources, cache = kit.write_sources(), tmp_path / "deep" / "cache"
    assert find_library(cache, sources) is None
    built = build_library(cache, sources, kit.toolchain(), say=messages.append)
    assert kit.journal == BUILT_FILES
    assert messages == [
        (
            "compiling 2 files, 1 at once: about 2 min on as many free cores, and up to 6 GB of "
            "memory each"
        )
    ]
    assert built.path.read_text() == "made\n"
    assert (built.nvcc, built.cutlass) == ("13.0.88", "4.2.0")
    assert (
        build_library(cache, sources, kit.toolchain(), say=messages.append)
        == built
        == find_library(cache, sources)
    )
    assert kit.journal == BUILT_FILES
    assert len(messages) == 1


def test_the_link_command_keeps_libtorch_without_needed_symbols(
    kit: FakeKit, tmp_path: Path
) -> None:
    command = build.link_command(
        kit.write_sources(), kit.toolchain(), tmp_path, tmp_path / "made.so"
    )
    assert command.index("--no-as-needed") < command.index("-ltorch"), (
        "only libtorch.so leads to torch's CUDA symbols"
    )


def test_changed_sources_or_compilers_build_separate_libraries(
    kit: FakeKit, tmp_path: Path
) -> None:
    first = build_library(tmp_path / "cache", kit.write_sources(), kit.toolchain(), say=str)
    second = build_library(
        tmp_path / "cache", kit.write_sources(), kit.toolchain("13.1.0"), say=str
    )
    os.utime(first.path, (1, 1))
    assert find_library(tmp_path / "cache", kit.write_sources()) == second
    changed_sources = kit.write_sources("// another kernel")
    assert find_library(tmp_path / "cache", changed_sources) is None
    third = build_library(tmp_path / "cache", changed_sources, kit.toolchain(), say=str)
    assert len({first.path, second.path, third.path}) == 3


def test_never_run_kernels_build_a_separate_library_for_their_architecture(
    kit: FakeKit, tmp_path: Path
) -> None:
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


def test_concurrent_requests_share_one_build(kit: FakeKit, tmp_path: Path) -> None:
    kit.write_compiler(delay=0.1)
    sources = kit.write_sources()
    with ThreadPoolExecutor(3) as pool:
        futures = [
            pool.submit(build_library, tmp_path / "cache", sources, kit.toolchain(), 2, str)
            for _ in range(3)
        ]
        assert len({future.result() for future in futures}) == 1
    assert sorted(kit.journal) == sorted(BUILT_FILES)


def test_a_failed_compilation_leaves_only_the_lock_file(kit: FakeKit, tmp_path: Path) -> None:
    sources, cache = kit.write_sources(), tmp_path / "cache"
    kit.write_compiler(failing="forward.cu")
    with pytest.raises(
        UnsupportedError, match=r"ended with 3. It said:\nforward.cu: error: no such thing"
    ):
        build_library(cache, sources, kit.toolchain(), say=str)
    assert [path.suffix for path in cache.iterdir()] == [".lock"]
    assert BUILT_FILES[-1] not in kit.journal
    kit.write_compiler()
    assert build_library(cache, sources, kit.toolchain(), say=str).path.is_file()


def test_a_folder_without_a_library_is_replaced(kit: FakeKit, tmp_path: Path) -> None:
    sources, toolchain = kit.write_sources(), kit.toolchain()
    broken = tmp_path / f"{sources.key}-{toolchain.key}"
    broken.mkdir()
    (broken / "build.json").write_text("half")
    assert build_library(tmp_path, sources, toolchain, say=str).path.parent == broken


def test_a_damaged_description_raises_an_error_that_names_the_folder_to_delete(
    kit: FakeKit, tmp_path: Path
) -> None:
    built = build_library(tmp_path, kit.write_sources(), kit.toolchain(), say=str)
    (built.path.parent / "build.json").write_text("{}")
    with pytest.raises(UnsupportedError, match=f"Delete {built.path.parent} and build again"):
        find_library(tmp_path, kit.write_sources())


def test_a_cache_path_that_is_a_file_is_refused(kit: FakeKit, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        UnsupportedError, match="must be writable: .*file is not .* Use another folder with --cache"
    ):
        build_library(tmp_path / "file", kit.write_sources(), kit.toolchain(), say=str)


def test_a_full_disk_is_refused_before_the_compiler_starts(
    kit: FakeKit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")(10**12, 10**12 - 5, 5 * 10**7)
    monkeypatch.setattr(build.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(UnsupportedError, match=r"needs 1 GB of disk: .* has 0\.05 GB"):
        build_library(tmp_path / "cache", kit.write_sources(), kit.toolchain(), say=str)
    assert kit.journal == []
