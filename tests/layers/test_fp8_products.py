"""Casts to 8 bits and their products equal float64 within bounds derived from the formats."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.layers.fp8.fp8_regions import fp8_column_linear, fp8_row_linear
from lightning_megatron.layers.fp8.operand import Operand, needed, product
from lightning_megatron.layers.fp8.scaling import Scaling
from lightning_megatron.models.layered import single_mesh
from lightning_megatron.plan.fp8 import FP8

#: Relative error of a rounded number, and the largest number over the smallest subnormal number.
FORMATS = {"e4m3": (2.0**-4, 448 / 2**-9), "e5m2": (2.0**-3, 57344 / 2**-16)}
RECIPES = ("tensorwise", "rowwise", "blockwise")


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    # Magnitudes spread over several orders, as those of activations do.
    return (
        torch.randn(*shape, generator=generator) * torch.randn(*shape, generator=generator).exp()
    ).to(dtype)


def bound_of(matrix: Tensor, form: str) -> Tensor:
    """Return the largest rounding error of each number, with the scale of the full tensor."""
    relative, steps = FORMATS[form]
    half_step = matrix.abs().max() / steps / 2
    # Scales have 24 bits.
    return torch.maximum(matrix.abs() * relative, half_step) * (1 + 2.0**-20)


def make_scaling(recipe: str, form: str | None = None) -> Scaling:
    return Scaling(FP8(recipe, format=form, emulate=True), emulate=True)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("form", ["e4m3", "hybrid"])
def test_casts_change_numbers_by_at_most_the_rounding_error_of_the_format(recipe, form):
    matrix = draw(100, 256)
    operands = make_scaling(recipe, form).cast_gradient(matrix, rows=True, columns=True)
    limit = bound_of(matrix, "e5m2" if form == "hybrid" else "e4m3")
    rows = needed(operands.rows).numbers(torch.float64)
    columns = needed(operands.columns).numbers(torch.float64)
    assert bool(((rows - matrix).abs() <= limit).all())
    assert bool(((columns[:, :100].t() - matrix).abs() <= limit).all())
    assert bool((columns[:, 100:] == 0).all())
    assert columns.shape[1] == (128 if recipe == "blockwise" else 112)


@pytest.mark.parametrize("recipe", RECIPES)
def test_scales_are_the_largest_magnitudes_of_tensor_rows_or_blocks(recipe):
    matrix = draw(256, 384)
    operands = make_scaling(recipe).cast_input(matrix, rows=True, columns=True)
    rows = needed(operands.rows)
    largest = matrix.abs().float()
    expected = {
        "tensorwise": largest.amax().reshape(1),
        "rowwise": largest.amax(1, keepdim=True),
        "blockwise": largest.view(256, 3, 128).amax(2),
    }[recipe]
    assert torch.equal(rows.scale, expected / 448)
    if recipe == "blockwise":
        square = needed(make_scaling(recipe).cast_weight(matrix, rows=False, columns=True).columns)
        blocks = largest.view(2, 128, 3, 128).amax((1, 3))
        assert torch.equal(square.scale, blocks.t() / 448)


@pytest.mark.parametrize("recipe", RECIPES)
def test_products_equal_float64_within_the_sum_of_rounding_errors(recipe):
    left = draw(48, 256)
    right = draw(128, 256, seed=1)
    scaling = make_scaling(recipe)
    operands = (
        needed(scaling.cast_input(left, rows=True, columns=False).rows),
        needed(scaling.cast_weight(right, rows=True, columns=False).rows),
    )
    actual = product(*operands, torch.float64, emulate=True)
    errors = bound_of(left, "e4m3"), bound_of(right, "e4m3")
    limit = errors[0] @ right.abs().t() + left.abs() @ errors[1].t() + errors[0] @ errors[1].t()
    assert bool(((actual - left @ right.t()).abs() <= limit).all())
    # The errors are not zero.
    assert float((actual - left @ right.t()).abs().max()) > 1e-3


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("layer", [fp8_column_linear, fp8_row_linear])
def test_layers_and_gradients_are_products_of_rounded_factors(recipe, layer):
    scaling = make_scaling(recipe)
    hidden = draw(20, 2, 256).requires_grad_()
    weight = draw(128, 256, seed=1).requires_grad_()
    bias = draw(128, seed=2).requires_grad_()
    output_gradient = draw(20, 2, 128, seed=3)
    output = layer(hidden, weight, bias, single_mesh(0), scaling)
    output.backward(output_gradient)

    rows = hidden.detach().view(40, 256)
    grads = output_gradient.view(40, 128)
    inputs = scaling.cast_input(rows, rows=True, columns=True)
    matrix = scaling.cast_weight(weight.detach(), rows=True, columns=True)
    gradient = scaling.cast_gradient(grads, rows=True, columns=True)

    def times(left: Operand | None, right: Operand | None) -> Tensor:
        return needed(left).numbers(torch.float64) @ needed(right).numbers(torch.float64).t()

    expected = (times(inputs.rows, matrix.rows) + bias.detach()).view(20, 2, 128)
    torch.testing.assert_close(output.detach(), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(hidden.grad.view(40, 256), times(gradient.rows, matrix.columns))
    torch.testing.assert_close(weight.grad, times(gradient.columns, inputs.columns))
    torch.testing.assert_close(bias.grad, grads.sum(0))
    # Results are near those without rounding: e5m2 has relative errors of an eighth.
    exact = F.linear(rows, weight, bias).detach()
    assert float((output.detach().view(40, 128) - exact).norm() / exact.norm()) < 0.1
    assert float((weight.grad - grads.t() @ rows).norm() / (grads.t() @ rows).norm()) < 0.1


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_numbers_make_their_rows_of_the_product_nan(recipe, value):
    left = draw(16, 128)
    left[3, 5] = value
    scaling = make_scaling(recipe)
    rows = needed(scaling.cast_input(left, rows=True, columns=False).rows)
    right = needed(scaling.cast_weight(draw(128, 128, seed=1), rows=True, columns=False).rows)
    actual = product(rows, right, torch.float64, emulate=True)
    assert bool(actual[3].isnan().all())
    # Only numbers that share the scale become NaN.
    assert bool(actual[4].isfinite().all()) == (recipe != "tensorwise")


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("factor", [0.0, 1e-38, 1e30])
def test_casts_of_zeros_and_extreme_magnitudes_are_finite(recipe, factor):
    left = draw(16, 128, dtype=torch.float32) * factor
    scaling = make_scaling(recipe)
    operands = scaling.cast_input(left, rows=True, columns=True)
    rows = needed(operands.rows).numbers(torch.float64)
    assert bool(rows.isfinite().all())
    if factor != 1e-38:
        limit = bound_of(left.double(), "e4m3")
        assert bool(((rows - left.double()).abs() <= limit).all())


def test_gradients_beyond_the_range_of_e4m3_are_cast_to_e5m2():
    matrix = torch.tensor([[1e6, 1.0] + [0.0] * 14] * 16, dtype=torch.float64)
    rows = needed(make_scaling("tensorwise").cast_gradient(matrix, rows=True, columns=False).rows)
    assert rows.values.dtype == torch.float8_e5m2
    assert rows.numbers(torch.float64)[0, 0] == pytest.approx(1e6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("half", "fp8 must be tensorwise, delayed, rowwise, blockwise"),
        ({"recipe": "late"}, "fp8.recipe must be"),
        ({"format": "e3m4"}, "fp8.format must be"),
        ({"first_bf16": -1}, "fp8.first_bf16 must be"),
        ({"rows": 1}, "rows"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ParallelPlanError, match=message):
        FP8.of(settings)


def test_indivisible_sizes_are_refused():
    with pytest.raises(ParallelPlanError, match="multiples of 16: layers.0.mlp.down has 40 output"):
        FP8().check_sizes("layers.0.mlp.down", 40, 64)
    with pytest.raises(ParallelPlanError, match="multiples of 512.*another recipe"):
        FP8("blockwise").check_sizes("layers.0.mlp.down", 128, 512)
    FP8("blockwise", emulate=True).check_sizes("layers.0.mlp.down", 128, 512)
