"""Magnitudes that the kernels of norms and SwiGLU find in the pass that computes their results: they
must be those of the stored numbers, and the numbers must be those of the kernels without them.
"""

from __future__ import annotations

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


def assert_same_bits(found: Tensor, expected: Tensor, what: str) -> None:
    """Demand the same numbers; all NaN are one."""
    assert torch.equal(found.isnan(), expected.isnan()), f"{what}: NaN"
    kept = found.nan_to_num(0.0, torch.inf, -torch.inf)
    assert torch.equal(kept, expected.nan_to_num(0.0, torch.inf, -torch.inf)), f"{what}: numbers"


def assert_one_rounding(found: Tensor, expected: Tensor, what: str) -> None:
    """Demand the same numbers up to one rounding; all NaN are equal.

    On a GPU the compiler fuses other products and sums of a norm when its kernel also computes the
    magnitude.
    """
    rtol = torch.finfo(found.dtype).eps
    torch.testing.assert_close(
        found, expected, rtol=rtol, atol=1e-5, equal_nan=True, msg=lambda text: f"{what}: {text}"
    )


def assert_magnitude(parts: Tensor, numbers: Tensor, what: str) -> None:
    """Demand the magnitude that both passes over the numbers find; all NaN are one."""
    row = numbers.detach().reshape(1, -1)
    found = parts.amax().view(torch.float32)
    for casts in (torch_casts, kernels):
        expected = casts.magnitude_parts(row).amax().view(torch.float32)
        assert_same_bits(found, expected, f"{what}: {casts.__name__}")


def check_swiglu_magnitudes(draw: Draw, sizes: Sizes) -> None:
    """Contiguous projections, slices of wider ones, and none; outputs and gradients."""
    for seq_length, batch, features in (*sizes.gated, (0, 2, 48)):
        for is_slice in (False, True):
            for strange in STRANGE:
                what = f"swiglu {seq_length, batch, features}, slice={is_slice}, {strange}"
                whole = draw(seq_length, batch, 2 * features + (16 if is_slice else 0), scale=4.0)
                given = whole[..., : 2 * features]
                if strange is not None and given.numel():
                    given[-1, -1, features - 1] = strange
                grad = draw(seq_length, batch, features)
                plain = given.detach().requires_grad_()
                expected = kernels.apply_swiglu(plain)
                expected.backward(grad)
                measured = given.detach().requires_grad_()
                taken: list[tuple[Tensor, Tensor]] = []
                seen = no_magnitude(measured)
                result = kernels.apply_swiglu(
                    measured, seen, lambda *found, taken=taken: taken.append(found)
                )
                result.backward(grad)
                assert_same_bits(result.detach(), expected.detach(), what)
                assert_magnitude(seen, result, what)
                ((gradient, parts),) = taken
                assert_same_bits(measured.grad, plain.grad, f"{what}: gradient")
                assert_same_bits(gradient, plain.grad, f"{what}: gradient that was handed over")
                assert_magnitude(parts, plain.grad, f"{what}: gradient")


def check_norm_magnitudes(draw: Draw, sizes: Sizes) -> None:
    """Both norms, with and without an update; vectors of zeros without an epsilon are NaN."""
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
                own = hidden, update, weight, bias, eps, is_rms
                expected = kernels.add_norm(*own)
                seen = no_magnitude(hidden)
                found = kernels.add_norm(*own, magnitudes=seen)
                for one, other in zip(found, expected, strict=True):
                    assert_one_rounding(one, other, what)
                assert_magnitude(seen, found[1], what)


def check_growing_magnitudes(draw: Draw, sizes: Sizes) -> None:
    """Bit patterns only grow: a second, smaller tensor does not change them."""
    features = draw(3, 2, 64)
    seen = no_magnitude(features)
    first = kernels.apply_swiglu(features * 8, seen)
    before = seen.amax().clone()
    kernels.apply_swiglu(features, seen)
    assert torch.equal(seen.amax(), before), "a smaller tensor changed the magnitude"
    assert_magnitude(seen, first, "the larger tensor")
