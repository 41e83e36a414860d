"""Tests of the wheel of compiled kernels: what pip installs from it, and for which sources its
library is found.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import Distribution, distributions
from pathlib import Path

import pytest

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.kernels.cuda import (
    build_library,
    build_wheel,
    find_library,
    reason_against_library,
)
from lightning_megatron.kernels.cuda.sources import Sources
from tests.kernels.cuda.fake import FakeKit


def install(wheel: Path, target: Path) -> Distribution:
    """Install a wheel with pip, without a network."""
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "install",
        "--quiet",
        "--no-index",
        "--no-deps",
    ]
    subprocess.run([*pip, "--target", str(target), str(wheel)], check=True)
    (installed,) = distributions(path=[str(target)])
    return installed


def make_wheel(kit: FakeKit, sources: Sources) -> Path:
    library = build_library(kit.folder / "builder", sources, kit.toolchain(), say=str)
    return build_wheel(kit.folder / "dist", library, sources, "0.1.0")


def test_an_installed_wheel_is_found_only_for_its_sources_and_after_the_cache(
    kit: FakeKit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_library_always_makes_the_same_wheel_and_changed_sources_another(kit: FakeKit) -> None:
    wheel = make_wheel(kit, kit.write_sources())
    content = wheel.read_bytes()
    wheel.unlink()
    assert make_wheel(kit, kit.write_sources()) == wheel
    assert wheel.read_bytes() == content
    assert make_wheel(kit, kit.write_sources("// another kernel")) != wheel


def test_a_wheel_folder_that_is_a_file_is_refused(kit: FakeKit) -> None:
    (kit.folder / "dist").write_text("a file")
    with pytest.raises(
        UnsupportedError, match="folder of the wheel must be writable: .*dist is not .*--out"
    ):
        make_wheel(kit, kit.write_sources())
