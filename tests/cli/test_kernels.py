"""Tests of the command `kernels`: its builds, its output and its errors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_megatron.kernels.cuda import library
from lightning_megatron.kernels.cuda.library import reason_not_runnable
from tests.kernels.cuda.fake import FakeKit


@pytest.fixture
def kit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeKit:
    """A compiler and CUTLASS, and no installed wheel of kernels."""
    monkeypatch.setattr(library, "find_spec", lambda name: None)
    kit = FakeKit(tmp_path)
    kit.write_compiler()
    kit.write_cutlass()
    return kit


def test_build_prints_the_path_of_the_library_and_show_finds_it(kit, monkeypatch, printed, refused):
    monkeypatch.setenv("CUDA_HOME", str(kit.home))
    cache = kit.folder / "cache"
    options = f"--cutlass {kit.folder / 'cutlass'} --cache {cache}"
    lines = printed(f"kernels build {options} --jobs 2").splitlines()
    (built,) = cache.glob("*/*.so")
    assert lines[-1].startswith(f"{built}: 0.0 MB, built in ")
    shown = printed(f"kernels show {options}")
    assert f"library    {built} (nvcc 13.0.88, CUTLASS 4.2.0), from the cache" in shown
    assert "the library must be loadable" in refused(f"kernels check --cache {cache}")


def test_wheel_builds_once_and_prints_the_install_command(kit, printed):
    options = f"--cache {kit.folder / 'cache'} --output {kit.folder / 'dist'}"
    compilers = f"--cuda-home {kit.home} --cutlass {kit.folder / 'cutlass'}"
    text = printed(f"kernels wheel {options} {compilers}")
    (wheel,) = (kit.folder / "dist").iterdir()
    assert text.endswith(f"pip install --no-deps {wheel}\n")
    num_commands = len(kit.journal)
    printed(f"kernels wheel {options} --cuda-home /nowhere")
    assert len(kit.journal) == num_commands


def test_kernels_that_were_never_run_are_built_only_with_the_arch_option(kit, printed):
    options = (
        f"--cuda-home {kit.home} --cutlass {kit.folder / 'cutlass'} --cache {kit.folder / 'c'}"
    )
    built = printed(f"kernels build {options} --arch sm_100a")
    assert "were compiled and have never been run, so no choice takes them" in built
    assert "sm100a" not in printed(f"kernels show {options}")


def test_show_prints_the_kernels_chosen_for_a_shape_and_the_reasons(printed, refused):
    text = printed("kernels show --rows 32768 --groups 32 --n 1536 --k 2048")
    shown = [" ".join(line.split()) for line in text.splitlines()]
    assert shown[0] == "32768 rows in 32 groups (1024 each), n 1536, k 2048"
    assert "forward_pingpong_128x192_1x2 along M: 1536 columns fill multiples of 384" in shown
    text = printed("kernels show --rows 32768 --groups 32 --n 1528 --k 2048")
    assert "SwiGLU apart" in text
    assert "1528 rows of a weight are not a multiple of 16" in text
    assert "--n and --k describe one shape: some" in refused("kernels show --rows 5")


def test_build_without_nvcc_and_check_without_library_are_refused(kit, refused):
    assert "nvcc is not in /nowhere/bin" in refused("kernels build --cuda-home /nowhere")
    assert "jobs: expected a number >0: 0 is given." in refused("kernels build --jobs 0")
    message = refused(f"kernels check --cache {kit.folder / 'cache'}")
    assert "Build one: lightning-megatron kernels build" in message


def test_an_unsupported_gpu_is_reported_with_its_compute_capability(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert reason_not_runnable() == "torch sees no GPU"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    for capability, reason in {
        (8, 0): "A100 has compute capability 8.0, and the kernels are compiled for 9.0",
        (10, 0): "those for 10.0 were compiled but have never been run",
        (9, 0): "None",
    }.items():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        assert reason in str(reason_not_runnable())
