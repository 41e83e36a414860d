"""Tests of Adam's compiled kernel against torch's steps in float64 on the same GPU."""

from __future__ import annotations

import pytest
import torch

from lightning_megatron.optimizer.fused_update import GroupNumbers

pytest.importorskip("triton", reason="needs triton, which comes with the CUDA builds of torch")

from tests.kernels.adam import (  # noqa: E402
    CASES,
    Slices,
    check_case,
    check_narrow_moments,
    check_narrow_steps,
    check_new_addresses,
)
from tests.optimizer.fused_fits import FITS, check_equal  # noqa: E402

pytestmark = pytest.mark.gpu

#: Sizes of one element, between multiples of vectors and of programs, and for several programs.
SIZES = (1, 15, 4096, 100_003, 1_000_000)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_steps_of_adams_kernel_equal_torch_steps_in_float64(case):
    check_case(case, SIZES, "cuda")


def test_bfloat16_moments_decay_at_the_expected_rate():
    check_narrow_moments(SIZES, "cuda")


def test_steps_with_bfloat16_moments_are_near_steps_with_float32_moments():
    check_narrow_steps(SIZES, "cuda")


def test_the_kernel_follows_slices_at_new_addresses():
    check_new_addresses("cuda")


@pytest.mark.parametrize("name", FITS)
def test_fits_on_the_kernel_equal_fits_on_torch_steps(name):
    check_equal(FITS[name], "gpu", 1e-2 if FITS[name].precision != "32-true" else 1e-4)


def test_the_host_does_not_wait_for_the_gpu_after_the_first_step():
    slices = Slices([1000, 3000], CASES[0], "cuda")
    coefficient = torch.tensor(0.3, device="cuda")
    group = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "decoupled_weight_decay": True}
    numbers = GroupNumbers(torch.device("cuda"))
    mode = torch.cuda.get_sync_debug_mode()
    try:
        for number, gradients in enumerate(slices.gradients(3)):
            numbers.fill([{**group, "lr": 0.01 / (1 + number)}])
            slices.kernel(
                slices.parameters, gradients, slices.averages, slices.squares, slices.steps, slices.halves, coefficient,
                numbers.rows[0], has_decay=True, is_decoupled=True,
            )  # fmt: skip
            torch.cuda.set_sync_debug_mode("error")
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    assert [int(step) for step in slices.steps] == [3, 3]
