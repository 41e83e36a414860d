"""Tests of the search for nvcc and CUTLASS, and of the errors where they are missing or too old."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from lightning_megatron.errors import MissingExtraError, UnsupportedError
from lightning_megatron.kernels.cuda import find_toolchain, toolchain
from lightning_megatron.kernels.cuda.toolchain import find_cutlass, find_nvcc
from tests.kernels.cuda.fake import FakeKit


def test_versions_of_the_toolchain_are_read_and_change_its_key(kit: FakeKit) -> None:
    older = find_toolchain(kit.home, kit.write_cutlass())
    assert (older.nvcc_version, older.cutlass_version) == ("13.0.88", "4.2.0")
    assert (older.torch / "include" / "torch" / "csrc" / "stable" / "library.h").is_file()
    newer = find_toolchain(kit.home, kit.write_cutlass("4.3.0"))
    assert newer.key != older.key


def test_nvcc_is_found_on_the_path_or_in_wheels(
    kit: FakeKit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(kit.home / "bin"))
    assert find_nvcc() == kit.home / "bin" / "nvcc"
    monkeypatch.setenv("PATH", "/nowhere")
    wheel = tmp_path / "nvidia" / "cu13" / "bin" / "nvcc"
    wheel.parent.mkdir(parents=True)
    wheel.write_text("")
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path / "nvidia")])
    monkeypatch.setattr(toolchain, "find_spec", lambda name: spec)
    assert find_nvcc() == wheel
    monkeypatch.setattr(toolchain, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match="not on the PATH, and no CUDA_HOME was given"):
        find_nvcc()
    with pytest.raises(MissingExtraError, match="nvcc is not in .*elsewhere/bin"):
        find_nvcc(tmp_path / "elsewhere")


def test_cutlass_is_found_in_its_package(
    kit: FakeKit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = kit.write_cutlass()
    (tmp_path / "cutlass_library").mkdir()
    folder.rename(tmp_path / "cutlass_library" / "source")
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path / "cutlass_library")])
    monkeypatch.setattr(toolchain, "find_spec", lambda name: spec)
    assert find_cutlass() == tmp_path / "cutlass_library" / "source" / "include"
    monkeypatch.setattr(toolchain, "find_spec", lambda name: None)
    with pytest.raises(
        MissingExtraError, match="are not installed. .* pip install --no-deps nvidia-cutlass"
    ):
        find_cutlass()
    with pytest.raises(MissingExtraError, match="are not in .*empty"):
        find_cutlass(tmp_path / "empty")


def test_old_or_broken_compilers_are_refused(kit: FakeKit) -> None:
    cutlass = kit.write_cutlass()
    kit.write_compiler(version="Cuda compilation tools, release 12.1, V12.1.105")
    with pytest.raises(
        UnsupportedError, match=r"must be 12.4 or newer: .* says V12.1.105|'V12.1.105'"
    ):
        find_toolchain(kit.home, cutlass)
    (kit.home / "bin" / "nvcc").chmod(0o644)
    with pytest.raises(UnsupportedError, match="nvcc must run: .* did not"):
        find_toolchain(kit.home, cutlass)


def test_unsupported_versions_of_cutlass_are_refused(kit: FakeKit) -> None:
    with pytest.raises(UnsupportedError, match=r"must be version 4: .* is 3.5.1"):
        find_toolchain(kit.home, kit.write_cutlass("3.5.1"))
