"""The bundled kernels are chosen before the kernel of torch, which is chosen before a loop."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.experts.compute import choose_backend as choosing
from lightning_megatron.experts.compute.choose_backend import BackendChoice, choose_backend
from lightning_megatron.kernels.cuda import BuiltLibrary

GPU, BF16 = torch.device("cuda", 0), torch.bfloat16


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Pretend that the GPU is an H100 and that a built library can be loaded."""
    library = BuiltLibrary(Path("/cache/liblm_kernels.so"), "13.0", "4.2", 1.0)
    monkeypatch.setattr(choosing, "reason_not_runnable", lambda index: None)
    monkeypatch.setattr(choosing, "find_library", lambda cache, sources: library)
    monkeypatch.setattr(choosing, "load_library", lambda path: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    clear_caches()
    yield
    clear_caches()


def clear_caches() -> None:
    choose_backend.cache_clear()
    choosing._load.cache_clear()


def choose_on_gpu(
    dtype: torch.dtype = BF16, num_groups: int = 4, n: int = 64, k: int = 64
) -> BackendChoice:
    return choose_backend(GPU, dtype, num_groups, k, n)


def test_built_kernels_are_preferred_and_the_choice_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level("INFO", logger=choosing.__name__):
        assert choose_on_gpu().backend == choose_on_gpu().backend == "bundled"
    assert [record.getMessage() for record in caplog.records] == [
        f"grouped products by bundled: {choose_on_gpu().reason}"
    ]


def test_without_a_library_the_kernel_of_torch_is_chosen_with_the_build_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(choosing, "find_library", lambda cache, sources: None)
    assert choose_on_gpu().backend == "grouped_mm"
    assert "Build one: lightning-megatron kernels build" in choose_on_gpu().reason


def test_the_reason_names_a_library_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise UnsupportedError(f"the library must be loadable: {path} is not")

    monkeypatch.setattr(choosing, "load_library", refuse)
    assert choose_on_gpu().backend == "grouped_mm"
    assert "/cache/liblm_kernels.so is not" in choose_on_gpu().reason


def test_gpus_other_than_hopper_use_the_kernel_of_torch_or_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        choosing, "reason_not_runnable", lambda index: f"GPU {index} has compute capability 10.0"
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert choose_on_gpu().backend == "grouped_mm"
    assert "GPU 0 has compute capability 10.0" in choose_on_gpu().reason
    clear_caches()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert choose_on_gpu().backend == "loop"
    assert "needs compute capability 9.0, not 8.0" in choose_on_gpu().reason


def test_sizes_and_types_without_a_kernel_use_the_loop() -> None:
    for choice, reason in (
        (choose_on_gpu(dtype=torch.float32), "made for bfloat16"),
        (choose_on_gpu(n=60), r"out_features (60) must make rows of whole 16 bytes"),
        (choose_on_gpu(k=4), r"in_features (4) must make rows of whole 16 bytes"),
        (
            choose_backend(torch.device("cpu"), BF16, 4, 64, 64),
            "cpu: the host has the group sizes already",
        ),
    ):
        assert choice.backend == "loop"
        assert reason in choice.reason
    assert choose_on_gpu(num_groups=1025).backend == "grouped_mm"
