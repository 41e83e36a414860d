"""Adam's kernel, compiled, against torch's steps in float64 on the same GPU."""

from __future__ import annotations

import pytest
import torch

from lightning_megatron.training.group_numbers import GroupNumbers

pytest.importorskip("triton", reason="needs triton, which comes with the CUDA builds of torch")

from tests.kernels.adam import (  # noqa: E402
    CASES,
    Case,
    Slices,
    check_case,
    check_narrow_moments,
    check_narrow_steps,
    check_new_addresses,
)
from tests.training.fused_fits import FITS, check_equal  # noqa: E402

pytestmark = pytest.mark.gpu

#: Slices of one element, between the borders of vectors and of programs, and of several programs.
SIZES = (1, 15, 4096, 100_003, 1_000_000)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_steps_equal_those_of_torch(case: Case) -> None:
    check_case(case, SIZES, "cuda")


def test_moments_in_bfloat16_fall_as_they_must() -> None:
    check_narrow_moments(SIZES, "cuda")


def test_steps_with_moments_in_bfloat16_are_near_those_in_float32() -> None:
    check_narrow_steps(SIZES, "cuda")


def test_slices_that_moved_are_followed() -> None:
    check_new_addresses("cuda")


@pytest.mark.parametrize("name", FITS)
def test_fits_equal_those_on_torchs_own_steps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_equal(FITS[name], monkeypatch, "gpu", 1e-2 if FITS[name].precision != "32-true" else 1e-4)


def test_the_host_does_not_wait_from_the_second_step_on() -> None:
    slices = Slices([1000, 3000], CASES[0], "cuda")
    coefficient = torch.tensor(0.3, device="cuda")
    group = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    numbers = GroupNumbers(torch.device("cuda"))
    mode = torch.cuda.get_sync_debug_mode()
    try:
        for number, gradients in enumerate(slices.gradients(3)):
            numbers.fill([{**group, "lr": 0.01 / (1 + number)}], [True])
            slices.kernel(
                slices.parameters, gradients, slices.averages, slices.squares, slices.steps, slices.halves, coefficient,
                numbers.rows[0], has_decay=True, is_decoupled=True,
            )  # fmt: skip
            torch.cuda.set_sync_debug_mode("error")
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    assert [int(step) for step in slices.steps] == [3, 3]
