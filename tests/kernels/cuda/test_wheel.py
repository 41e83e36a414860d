"""A wheel of kernels: what pip installs from it, which library is found, and what is said of one of
other sources.
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
    """Install without a network, as pip does it on another machine."""
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


def pack(kit: FakeKit, sources: Sources) -> Path:
    library = build_library(kit.folder / "builder", sources, kit.toolchain(), say=str)
    return build_wheel(kit.folder / "dist", library, sources, "0.1.0")


def test_an_installed_wheel_is_found_after_the_cache_and_only_by_its_sources(
    kit: FakeKit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources, cache = kit.write_sources(), tmp_path / "cache"
    installed = install(pack(kit, sources), tmp_path / "site")
    assert installed.version == f"0.1.0+src{sources.key}"
    assert installed.requires == ["lightning-megatron==0.1.0"]
    assert installed.read_text("licenses/CUTLASS_LICENSE.txt") is not None
    assert find_library(cache, sources) is None
    assert "no wheel is installed" in reason_against_library(cache, sources)

    monkeypatch.syspath_prepend(tmp_path / "site")
    found = find_library(cache, sources)
    assert found is not None
    assert found.path.is_relative_to(tmp_path / "site")
    assert found.path.read_text() == "made\n"
    assert (found.nvcc, found.cutlass, found.origin) == ("13.0.88", "4.2.0", "wheel")
    assert "lightning_megatron_kernels" not in sys.modules

    built = build_library(cache, sources, kit.toolchain(), say=str)
    assert find_library(cache, sources) == built
    assert built.origin == "cache"

    other = kit.write_sources("// another kernel")
    assert find_library(cache, other) is None
    assert (
        f"the wheel in {found.path.parents[1]} was built from other sources ({sources.key})"
        in reason_against_library(cache, other)
    )


def test_the_same_library_makes_the_same_wheel_and_other_sources_another(kit: FakeKit) -> None:
    wheel = pack(kit, kit.write_sources())
    content = wheel.read_bytes()
    wheel.unlink()
    assert pack(kit, kit.write_sources()) == wheel
    assert wheel.read_bytes() == content
    assert pack(kit, kit.write_sources("// another kernel")) != wheel


def test_a_folder_that_cannot_hold_a_wheel_is_named(kit: FakeKit) -> None:
    (kit.folder / "dist").write_text("a file")
    with pytest.raises(
        UnsupportedError, match="folder of the wheel must be writable: .*dist is not .*--out"
    ):
        pack(kit, kit.write_sources())
