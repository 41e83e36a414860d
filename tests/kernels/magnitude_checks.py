"""Checks of the magnitudes that the kernels of norms and SwiGLU find while they compute results:
magnitudes equal those of the stored numbers, and the numbers equal those of kernels without them.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_megatron.kernels import triton as kernels
from lightning_megatron.layers.fp8 import torch_casts
from lightning_megatron.layers.fp8.magnitude import no_magnitude

if TYPE_CHECKING:
    from tests.kernels.checks import Draw, Sizes

#: A number that is not finite must become the magnitude.
STRANGE = (None, float("inf"), float("nan"))


def assert_same_bits(actual: Tensor, expected: Tensor, what: str) -> None:
    """Assert equal numbers; all NaN count as equal."""
    assert torch.equal(actual.isnan(), expected.isnan()), f"{what}: NaN"
    numbers = actual.nan_to_num(0.0, torch.inf, -torch.inf)
    assert torch.equal(numbers, expected.nan_to_num(0.0, torch.inf, -torch.inf)), f"{what}: numbers"


def assert_one_rounding(actual: Tensor, expected: Tensor, what: str) -> None:
    """Assert equal numbers up to one rounding; all NaN count as equal.

    On a GPU the compiler fuses other products and sums of a norm when its kernel also computes the
    magnitude.
    """
    rtol = torch.finfo(actual.dtype).eps
    torch.testing.assert_close(
        actual, expected, rtol=rtol, atol=1e-5, equal_nan=True, msg=lambda text: f"{what}: {text}"
    )


def assert_magnitude(parts: Tensor, numbers: Tensor, what: str) -> None:
    """Assert that the magnitude equals that of torch and of the kernels; all NaN count as equal."""
    row = numbers.detach().reshape(1, -1)
    actual = parts.amax().view(torch.float32)
    for casts in (torch_casts, kernels):
        expected = casts.magnitude_parts(row).amax().view(torch.float32)
        assert_same_bits(actual, expected, f"{what}: {casts.__name__}")


def check_swiglu_magnitudes(draw: Draw, sizes: Sizes) -> None:
    """Check contiguous, sliced and empty projections; outputs and gradients."""
    for seq_length, batch, features in (*sizes.gated, (0, 2, 48)):
        for is_slice in (False, True):
            for strange in STRANGE:
                what = f"swiglu {seq_length, batch, features}, slice={is_slice}, {strange}"
                projection = draw(
                    seq_length, batch, 2 * features + (16 if is_slice else 0), scale=4.0
                )
                gate_up = projection[..., : 2 * features]
                if strange is not None and gate_up.numel():
                    gate_up[-1, -1, features - 1] = strange
                grad = draw(seq_length, batch, features)
                plain = gate_up.detach().requires_grad_()
                expected = kernels.apply_swiglu(plain)
                expected.backward(grad)
                measured = gate_up.detach().requires_grad_()
                taken: list[tuple[Tensor, Tensor]] = []
                magnitude = no_magnitude(measured)
                result = kernels.apply_swiglu(
                    measured, magnitude, lambda *values, taken=taken: taken.append(values)
                )
                result.backward(grad)
                assert_same_bits(result.detach(), expected.detach(), what)
                assert_magnitude(magnitude, result, what)
                ((gradient, parts),) = taken
                assert_same_bits(measured.grad, plain.grad, f"{what}: gradient")
                assert_same_bits(gradient, plain.grad, f"{what}: gradient that was handed over")
                assert_magnitude(parts, plain.grad, f"{what}: gradient")


def check_norm_magnitudes(draw: Draw, sizes: Sizes) -> None:
    """Check both norms, with and without an update; zero vectors become NaN without an epsilon."""
    for seq_length, batch, width in (*sizes.norms, (0, 2, 48)):
        for is_rms, has_update in ((True, True), (True, False), (False, True), (False, False)):
            for strange in (*STRANGE, 0.0):
                what = f"norm {seq_length, batch, width}, rms {is_rms}, {has_update}, {strange}"
                hidden = draw(seq_length, batch, width) + 1
                update = draw(seq_length, batch, width) if has_update else None
                if strange is not None and hidden.numel():
                    hidden[-1, -1, width - 1] = strange
                if strange == 0.0 and hidden.numel():
                    hidden[0, 0] = 0.0
                weight = draw(width)
                bias = None if is_rms else draw(width)
                eps = 0.0 if strange == 0.0 else 1e-5
                norm = partial(kernels.add_norm, hidden, update, weight, bias, eps, is_rms)
                plain_results = norm()
                magnitude = no_magnitude(hidden)
                results = norm(magnitudes=magnitude)
                for actual, expected in zip(results, plain_results, strict=True):
                    assert_one_rounding(actual, expected, what)
                assert_magnitude(magnitude, results[1], what)


def check_growing_magnitudes(draw: Draw, sizes: Sizes) -> None:
    """Check that a second, smaller tensor does not change the magnitude of a larger one."""
    features = draw(3, 2, 64)
    magnitude = no_magnitude(features)
    first = kernels.apply_swiglu(features * 8, magnitude)
    before = magnitude.amax().clone()
    kernels.apply_swiglu(features, magnitude)
    assert torch.equal(magnitude.amax(), before), "a smaller tensor changed the magnitude"
    assert_magnitude(magnitude, first, "the larger tensor")
