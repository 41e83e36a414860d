"""Tests of the command `kernels`: its builds, its output and its errors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_megatron.cli.kernels import main
from lightning_megatron.errors import MissingExtraError, UnsupportedError
from lightning_megatron.kernels.cuda import library
from lightning_megatron.kernels.cuda.load import reason_not_runnable
from tests.kernels.cuda.fake import FakeKit


@pytest.fixture
def kit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeKit:
    """A compiler and CUTLASS, and no installed wheel of kernels."""
    monkeypatch.setattr(library, "find_spec", lambda name: None)
    kit = FakeKit(tmp_path)
    kit.write_compiler()
    kit.write_cutlass()
    return kit


def test_build_prints_the_path_of_the_library_and_show_finds_it(
    kit: FakeKit, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_HOME", str(kit.home))
    options = ["--cutlass", str(kit.folder / "cutlass"), "--cache", str(kit.folder / "cache")]
    main(["build", *options, "--jobs", "2"])
    printed = capsys.readouterr().out
    (built,) = (kit.folder / "cache").glob("*/*.so")
    assert printed.splitlines()[-1].startswith(f"{built}: 0.0 MB, built in ")
    main(["show", *options])
    shown = capsys.readouterr().out
    assert f"library    {built} (nvcc 13.0.88, CUTLASS 4.2.0), from the cache" in shown
    with pytest.raises(UnsupportedError, match="the library must be loadable"):
        main(["check", "--cache", str(kit.folder / "cache")])


def test_wheel_builds_once_and_prints_the_install_command(
    kit: FakeKit, capsys: pytest.CaptureFixture[str]
) -> None:
    compilers = ["--cuda-home", str(kit.home), "--cutlass", str(kit.folder / "cutlass")]
    options = ["--cache", str(kit.folder / "cache"), "--out", str(kit.folder / "dist")]
    main(["wheel", *options, *compilers])
    (wheel,) = (kit.folder / "dist").iterdir()
    printed = capsys.readouterr().out
    assert printed.endswith(f"pip install --no-deps {wheel}\n")
    num_commands = len(kit.journal)
    main(["wheel", *options, "--cuda-home", "/nowhere"])
    assert len(kit.journal) == num_commands


def test_kernels_that_were_never_run_are_built_only_with_the_arch_option(
    kit: FakeKit, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--cuda-home", str(kit.home), "--cutlass", str(kit.folder / "cutlass")]
    options += ["--cache", str(kit.folder / "c")]
    main(["build", *options, "--arch", "sm_100a"])
    built = capsys.readouterr().out
    assert "were compiled and have never been run, so no choice takes them" in built
    main(["show", *options])
    shown = capsys.readouterr().out
    assert "sm100a" not in shown


def test_show_prints_the_kernels_chosen_for_a_shape_and_the_reasons(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(["show", "--rows", "32768", "--groups", "32", "--n", "1536", "--k", "2048"])
    shown = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert shown[0] == "32768 rows in 32 groups (1024 each), n 1536, k 2048"
    assert "forward_pingpong_128x192_1x2 along M: 1536 columns fill multiples of 384" in shown
    with pytest.raises(UnsupportedError, match="--n and --k describe one shape: some"):
        main(["show", "--rows", "5"])


def test_build_without_nvcc_and_check_without_library_are_refused(kit: FakeKit) -> None:
    with pytest.raises(MissingExtraError, match="nvcc is not in /nowhere/bin"):
        main(["build", "--cuda-home", "/nowhere"])
    with pytest.raises(UnsupportedError, match="Build one: lightning-megatron kernels build"):
        main(["check", "--cache", str(kit.folder / "cache")])


def test_an_unsupported_gpu_is_reported_with_its_compute_capability(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
