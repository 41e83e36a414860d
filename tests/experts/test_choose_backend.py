"""The bundled kernels come first, torch's next, a loop last, and the log says why."""

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
    """Pretend that the GPU is an H100 and that a library is built which can be loaded."""
    library = BuiltLibrary(Path("/cache/liblm_kernels.so"), "13.0", "4.2", 1.0)
    monkeypatch.setattr(choosing, "reason_not_runnable", lambda index: None)
    monkeypatch.setattr(choosing, "find_library", lambda cache, sources: library)
    monkeypatch.setattr(choosing, "load_library", lambda path: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    forget()
    yield
    forget()


def forget() -> None:
    choose_backend.cache_clear()
    choosing._load.cache_clear()


def chosen(
    dtype: torch.dtype = BF16, num_groups: int = 4, n: int = 64, k: int = 64
) -> BackendChoice:
    return choose_backend(GPU, dtype, num_groups, k, n)


def test_built_kernels_come_first_and_the_choice_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level("INFO", logger=choosing.__name__):
        assert chosen().backend == chosen().backend == "bundled"
    assert [record.getMessage() for record in caplog.records] == [
        f"grouped products by bundled: {chosen().reason}"
    ]


def test_without_a_library_torchs_kernel_is_taken_and_the_command_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(choosing, "find_library", lambda cache, sources: None)
    assert chosen().backend == "grouped_mm"
    assert "Build one: lightning-megatron kernels build" in chosen().reason


def test_a_library_that_cannot_be_loaded_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise UnsupportedError(f"the library must be loadable: {path} is not")

    monkeypatch.setattr(choosing, "load_library", refuse)
    assert chosen().backend == "grouped_mm"
    assert "/cache/liblm_kernels.so is not" in chosen().reason


def test_other_gpus_take_torchs_kernel_or_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        choosing, "reason_not_runnable", lambda index: f"GPU {index} has compute capability 10.0"
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert chosen().backend == "grouped_mm"
    assert "GPU 0 has compute capability 10.0" in chosen().reason
    forget()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert chosen().backend == "loop"
    assert "needs compute capability 9.0, not 8.0" in chosen().reason


def test_what_no_kernel_can_do_is_done_by_the_loop() -> None:
    for choice, why in (
        (chosen(dtype=torch.float32), "made for bfloat16"),
        (chosen(n=60), r"out_features (60) must make rows of whole 16 bytes"),
        (chosen(k=4), r"in_features (4) must make rows of whole 16 bytes"),
        (
            choose_backend(torch.device("cpu"), BF16, 4, 64, 64),
            "cpu: the host has the group sizes already",
        ),
    ):
        assert choice.backend == "loop"
        assert why in choice.reason
    assert chosen(num_groups=1025).backend == "grouped_mm"
