"""Tests on a GPU that 8-bit casts equal those of torch, and products and trainings emulation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron import CudaGraphs
from lightning_megatron.layers.fp8 import torch_casts
from lightning_megatron.layers.fp8.delayed import DelayedScales
from lightning_megatron.layers.fp8.operand import ScaledProduct, needed, product
from lightning_megatron.layers.fp8.scaling import Scaling
from lightning_megatron.layers.fused.choose_kernels import fused_kernels
from lightning_megatron.layers.linear.fp8_products import fp8_column_linear, fp8_row_linear
from lightning_megatron.layers.parameters.gradient_slot import GradientSlot, set_slot
from lightning_megatron.models.layered import single_mesh
from lightning_megatron.plan.fp8 import FP8
from tests.fits import Job
from tests.graphs.jobs import run_graphs
from tests.layers.noted_casts import spread as draw
from tests.layers.test_fp8 import RECIPES
from tests.optimizer.fused_fits import SMALL
from tests.oracles import relative_difference

pytestmark = pytest.mark.gpu

SIZES = [(256, 512), (100, 256), (129, 128), (4096, 4096), (1, 128)]
#: Whether a cast makes rows, and whether columns.
DIRECTIONS = [(True, True), (True, False), (False, True)]


def matrix_of(sizes: tuple[int, int], seed: int = 0) -> Tensor:
    return draw(*sizes, seed=seed, dtype=torch.bfloat16).cuda()


def assert_near(actual: Tensor, expected: Tensor, step: float = 0.25) -> None:
    """Compare 8-bit numbers: scales may differ by one rounding, and then a number by one step."""
    wrong = actual.float() != expected.float()
    assert float(wrong.float().mean()) < 1e-3
    torch.testing.assert_close(actual.float(), expected.float(), rtol=step, atol=2.0**-9)


def assert_same_casts(actual: Any, expected: Any) -> None:
    for cast, twin in ((actual.rows, expected.rows), (actual.columns, expected.columns)):
        if cast is not None:
            torch.testing.assert_close(cast.scale, twin.scale, rtol=1e-6, atol=0.0)
            assert_near(cast.values, twin.values)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("form", ["e4m3", "hybrid"])
@pytest.mark.parametrize("directions", DIRECTIONS, ids=str)
def test_casts_of_kernels_equal_casts_of_torch(sizes, recipe, form, directions):
    matrix, (rows, columns) = matrix_of(sizes), directions
    assert fused_kernels(matrix) is not None
    ours = Scaling(FP8(recipe, format=form), emulate=False)
    actual = ours.cast(matrix, "gradient", rows=rows, columns=columns)
    # Tensors in float32 are cast by operators of torch.
    expected = ours.cast(matrix.float(), "gradient", rows=rows, columns=columns)
    assert (actual.rows is not None, actual.columns is not None) == directions
    assert_same_casts(actual, expected)
    for cast, twin in ((actual.rows, expected.rows), (actual.columns, expected.columns)):
        if cast is not None and min(cast.scale.shape) > 1:
            assert cast.scale.stride() == needed(twin).scale.stride()


def test_casts_of_square_blocks_equal_casts_of_torch():
    matrix, ours = matrix_of((384, 256)), Scaling(FP8("blockwise"), emulate=False)
    actual, expected = (
        ours.cast_weight(weight, rows=True, columns=True) for weight in (matrix, matrix.float())
    )
    assert_same_casts(actual, expected)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_reach_the_product_on_a_gpu(recipe, value):
    left = matrix_of((64, 512))
    left[3, 5] = value
    ours = Scaling(FP8(recipe), emulate=False)
    rows = needed(ours.cast(left, "input", rows=True, columns=False).rows)
    right = needed(ours.cast_weight(matrix_of((512, 512), 1), rows=True, columns=False).rows)
    result = product(rows, right, torch.bfloat16, emulate=False)
    assert bool(result[3].isnan().all())
    assert bool(result[4].isfinite().all()) == (recipe != "tensorwise")


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("rows", [512, 102, 8, 1])
@pytest.mark.parametrize("form", ["e4m3", "hybrid"])
def test_products_equal_float64_products_of_the_same_numbers(recipe, rows, form):
    ours = Scaling(FP8(recipe, format=form), emulate=False)
    inputs = ours.cast(matrix_of((rows, 1024)), "input", rows=True, columns=True)
    matrix = ours.cast_weight(matrix_of((512, 1024), 1), rows=True, columns=True)
    gradient = ours.cast(matrix_of((rows, 512), 2), "gradient", rows=True, columns=True)
    for name, operands, fast, dtype, rounding in (
        ("forward", (inputs.rows, matrix.rows), recipe != "blockwise", torch.bfloat16, 2.0**-8),
        ("input gradient", (gradient.rows, matrix.columns), False, torch.bfloat16, 2.0**-8),
        ("weight gradient", (gradient.columns, inputs.columns), False, torch.float32, 2.0**-10),
    ):
        left, right = (needed(operand) for operand in operands)
        actual = product(left, right, dtype, emulate=False, fast=fast)
        exact = left.numbers(torch.float64) @ right.numbers(torch.float64).t()
        size = left.numbers(torch.float64).abs() @ right.numbers(torch.float64).abs().t()
        # Tensor cores truncate the 32 partial sums to about 14 bits; bfloat16 has 8 bits.
        assert bool(((actual.double() - exact).abs() <= size * 2.0**-7).all()), name
        assert relative_difference(actual, exact) < rounding, name


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_weight_gradients_are_added_to_their_sum_in_place(recipe, dtype, scale):
    ours = Scaling(FP8(recipe), emulate=False)
    sums = torch.full((256, 512), 7.0, device="cuda", dtype=dtype)
    slot = GradientSlot(sums, lambda: None, scale=scale)
    expected = torch.zeros(256, 512, device="cuda", dtype=torch.float64)
    for seed in range(2):
        grad = ours.cast(matrix_of((128, 256), seed), "gradient", rows=False, columns=True).columns
        inputs = ours.cast(
            matrix_of((128, 512), seed + 5), "input", rows=False, columns=True
        ).columns
        slot.add_computed(ScaledProduct(needed(grad), needed(inputs), False, dtype))
        left, right = (needed(cast).numbers(torch.float64) for cast in (grad, inputs))
        expected += scale * (left @ right.t())
    assert relative_difference(sums, expected) < (1e-3 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("layer", [fp8_column_linear, fp8_row_linear])
@pytest.mark.parametrize("has_slot", [False, True])
def test_layers_in_8_bits_equal_emulated_layers(recipe, layer, has_slot):
    results = []
    for emulate in (False, True):
        hidden = matrix_of((94, 1024)).view(47, 2, 1024).requires_grad_()
        weight = matrix_of((512, 1024), 1).requires_grad_()
        bias = matrix_of((1, 512), 2)[0].requires_grad_()
        sums = torch.zeros(512, 1024, device="cuda")
        if has_slot:
            set_slot(weight, GradientSlot(sums, lambda: None))
        output = layer(hidden, weight, bias, single_mesh(0), Scaling(FP8(recipe), emulate))
        output.backward(matrix_of((94, 512), 3).view(47, 2, 512))
        grad = sums if has_slot else weight.grad
        results.append((output, hidden.grad, grad, bias.grad))
    for actual, expected in zip(*results, strict=True):
        assert relative_difference(actual, expected) < 1e-2


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("directions", DIRECTIONS, ids=str)
def test_casts_by_magnitudes_of_earlier_steps_equal_casts_of_torch(sizes, dtype, directions):
    matrix = matrix_of(sizes)
    matrix[0, 3], matrix[0, 5], matrix[0, 7] = float("inf"), float("nan"), -1e30
    kernels = fused_kernels(matrix)
    assert kernels is not None
    # A quarter of the numbers exceeds the range.
    limit = matrix.float().nan_to_num(posinf=0.0).abs().flatten()[:4096].quantile(0.75)
    parts = limit.reshape(1).view(torch.int32)
    rows, columns = directions
    results = []
    for casts, numbers in ((kernels, matrix), (torch_casts, matrix.float())):
        magnitude = torch.zeros((), dtype=torch.int32, device="cuda")
        options = {
            "rows": rows, "columns": columns, "multiple": 16, "running_magnitude": magnitude
        }  # fmt: skip
        results.append(casts.cast_by_one_scale(numbers, parts, dtype, **options))
        assert bool(magnitude.view(torch.float32).isnan())
        finite = numbers.nan_to_num(0.0, 0.0, 0.0)
        magnitude.fill_(torch.tensor(2.0).view(torch.int32))
        casts.cast_by_one_scale(finite, parts, dtype, **options)
        assert float(magnitude.view(torch.float32)) == max(2.0, float(finite.abs().max()))
    for kernel_cast, torch_cast in zip(*results, strict=True):
        assert (kernel_cast is None) == (torch_cast is None)
        if kernel_cast is not None:
            torch.testing.assert_close(kernel_cast[1], torch_cast[1], rtol=1e-6, atol=0.0)
            actual, expected = kernel_cast[0].float(), torch_cast[0].float()
            assert torch.equal(actual.isnan(), expected.isnan())
            assert float(actual.nan_to_num(0.0).abs().max()) == torch.finfo(dtype).max
            assert_near(actual.nan_to_num(0.0), expected.nan_to_num(0.0))


def test_steps_with_delayed_scales_equal_emulated_steps():
    results = []
    for emulate in (False, True):
        settings = FP8("delayed", history=2, margin=1)
        scales = DelayedScales(settings, ["one"], torch.device("cuda"))
        ours = Scaling(settings, emulate, scales.layer(0))
        weight = matrix_of((512, 1024), 1).requires_grad_()
        tensors = []
        for step in range(4):
            hidden = (matrix_of((94, 1024), step) * (1.0 + step)).view(47, 2, 1024).requires_grad_()
            output = fp8_column_linear(hidden, weight, None, single_mesh(0), ours)
            output.backward(matrix_of((94, 512), step + 9).view(47, 2, 512))
            scales.end_step(single_mesh(0))
            assert hidden.grad is not None
            assert weight.grad is not None
            tensors += [output.detach(), hidden.grad, weight.grad.clone()]
        results.append((*tensors, scales.history))
    for actual, expected in zip(*results, strict=True):
        assert relative_difference(actual, expected) < 1e-2
    assert torch.equal(results[0][-1], results[1][-1])


@pytest.mark.parametrize(
    ("fp8", "model"),
    [
        (FP8("delayed", history=3), {}),
        # The activation hands its magnitudes to the next layer.
        (FP8("tensorwise"), {"activation": "swiglu"}),
    ],
    ids=["delayed", "tensorwise"],
)
@pytest.mark.parametrize("mode", ["segments", "full"])
def test_graphs_of_steps_equal_eager_steps(mode, fp8, model):
    losses = []
    for graphs in (None, CudaGraphs(mode, warmup_steps=2)):
        config = replace(SMALL, hidden_size=64, **model)
        job = Job(config, {"fp8": fp8}, "bf16-mixed", 8, {"accelerator": "gpu"})
        record = run_graphs(job, graphs)
        assert graphs is None or record.graphs[-1] > 0
        losses.append(record.losses)
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    assert losses[0][-1] < losses[0][0]


def test_torch_casts_run_on_a_gpu_without_the_kernels():
    matrix = matrix_of((64, 256)).float()
    parts = torch_casts.magnitude_parts(matrix)
    cast, _ = torch_casts.cast_by_one_scale(
        matrix, parts, torch.float8_e4m3fn, rows=True, columns=False, multiple=16
    )
    assert cast is not None
    assert cast[0].is_cuda
