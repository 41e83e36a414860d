"""On a GPU casts to 8 bits equal those of torch, and products and trainings those of emulation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_megatron import CudaGraphs
from lightning_megatron.layers.choose_kernels import fused_kernels
from lightning_megatron.layers.fp8 import torch_casts
from lightning_megatron.layers.fp8.delayed import DelayedScales
from lightning_megatron.layers.fp8.fp8_regions import fp8_column_linear, fp8_row_linear
from lightning_megatron.layers.fp8.operand import ScaledProduct, needed, product
from lightning_megatron.layers.fp8.scaling import Scaling
from lightning_megatron.layers.gradient_slot import GradientSlot, set_slot
from lightning_megatron.models.layered import single_mesh
from lightning_megatron.plan.fp8 import FP8
from tests.layers.test_fp8_products import RECIPES, draw
from tests.strategy.graph_fits import fit
from tests.strategy.tiny import TinyLM

pytestmark = pytest.mark.gpu

SIZES = [(256, 512), (100, 256), (129, 128), (4096, 4096), (1, 128)]


def matrix_of(sizes: tuple[int, int], seed: int = 0) -> Tensor:
    return draw(*sizes, seed=seed, dtype=torch.bfloat16).cuda()


def near(found: Tensor, expected: Tensor, step: float) -> None:
    """Compare numbers of 8 bits: divisions of scales may differ by a rounding, and then a number by a step."""
    wrong = found.float() != expected.float()
    assert float(wrong.float().mean()) < 1e-3
    torch.testing.assert_close(found.float(), expected.float(), rtol=step, atol=2.0**-9)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("form", ["e4m3", "hybrid"])
@pytest.mark.parametrize("asked", [(True, True), (True, False), (False, True)], ids=str)
def test_kernels_cast_as_torch(sizes, recipe, form, asked):
    matrix = matrix_of(sizes)
    assert fused_kernels(matrix) is not None
    ours = Scaling(FP8(recipe, format=form), emulate=False)
    rows, columns = asked
    found = ours.cast_gradient(matrix, rows=rows, columns=columns)
    # Operators of torch serve float32.
    expected = ours.cast_gradient(matrix.float(), rows=rows, columns=columns)
    for one, other, is_asked in (
        (found.rows, expected.rows, rows),
        (found.columns, expected.columns, columns),
    ):
        if not is_asked:
            assert one is None
            continue
        torch.testing.assert_close(needed(one).scale, needed(other).scale, rtol=1e-6, atol=0.0)
        if min(needed(one).scale.shape) > 1:
            assert needed(one).scale.stride() == needed(other).scale.stride()
        near(needed(one).values, needed(other).values, 0.25)


def test_square_blocks_are_those_of_torch():
    matrix = matrix_of((384, 256))
    ours = Scaling(FP8("blockwise"), emulate=False)
    found = ours.cast_weight(matrix, rows=True, columns=True)
    expected = ours.cast_weight(matrix.float(), rows=True, columns=True)
    for one, other in ((found.rows, expected.rows), (found.columns, expected.columns)):
        torch.testing.assert_close(needed(one).scale, needed(other).scale, rtol=1e-6, atol=0.0)
        near(needed(one).values, needed(other).values, 0.25)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_reach_the_product(recipe, value):
    left = matrix_of((64, 512))
    left[3, 5] = value
    ours = Scaling(FP8(recipe), emulate=False)
    rows = needed(ours.cast_input(left, rows=True, columns=False).rows)
    right = needed(ours.cast_weight(matrix_of((512, 512), 1), rows=True, columns=False).rows)
    found = product(rows, right, torch.bfloat16, emulate=False)
    assert bool(found[3].isnan().all())
    assert bool(found[4].isfinite().all()) == (recipe != "tensorwise")


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("rows", [512, 102, 8, 1])
@pytest.mark.parametrize("form", ["e4m3", "hybrid"])
def test_products_equal_float64_products_of_the_same_numbers(recipe, rows, form):
    ours = Scaling(FP8(recipe, format=form), emulate=False)
    hidden = matrix_of((rows, 1024))
    weight = matrix_of((512, 1024), 1)
    grad = matrix_of((rows, 512), 2)
    inputs = ours.cast_input(hidden, rows=True, columns=True)
    matrix = ours.cast_weight(weight, rows=True, columns=True)
    gradient = ours.cast_gradient(grad, rows=True, columns=True)
    pairs = {
        "forward": (inputs.rows, matrix.rows, True),
        "input gradient": (gradient.rows, matrix.columns, False),
        "weight gradient": (gradient.columns, inputs.columns, False),
    }
    for name, (left, right, fast) in pairs.items():
        one = needed(left)
        other = needed(right)
        dtype = torch.float32 if name == "weight gradient" else torch.bfloat16
        fast = fast and recipe != "blockwise"
        found = product(one, other, dtype, emulate=False, fast=fast)
        exact = one.numbers(torch.float64) @ other.numbers(torch.float64).t()
        size = one.numbers(torch.float64).abs() @ other.numbers(torch.float64).abs().t()
        # Tensor cores cut the 32 partial sums to about 14 bits; bfloat16 has 8.
        error = found.double() - exact
        assert bool((error.abs() <= size * 2.0**-7).all()), name
        rounding = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-10
        assert float(error.norm() / exact.norm()) < rounding, name


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_weight_gradients_are_added_in_the_memory_of_the_sum(recipe, dtype, scale):
    ours = Scaling(FP8(recipe), emulate=False)
    sums = torch.full((256, 512), 7.0, device="cuda", dtype=dtype)
    slot = GradientSlot(sums, lambda: None, scale=scale)
    expected = torch.zeros(256, 512, device="cuda", dtype=torch.float64)
    for seed in range(2):
        grad = ours.cast_gradient(matrix_of((128, 256), seed), rows=False, columns=True).columns
        inputs = ours.cast_input(matrix_of((128, 512), seed + 5), rows=False, columns=True).columns
        slot.add_computed(ScaledProduct(needed(grad), needed(inputs), False, dtype))
        expected += scale * (
            needed(grad).numbers(torch.float64) @ needed(inputs).numbers(torch.float64).t()
        )
    error = (sums.double() - expected).norm() / expected.norm()
    assert float(error) < (1e-3 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("layer", [fp8_column_linear, fp8_row_linear])
@pytest.mark.parametrize("has_slot", [False, True])
def test_layers_equal_emulated_ones(recipe, layer, has_slot):
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
        assert grad is not None
        assert hidden.grad is not None
        assert bias.grad is not None
        results.append((output.detach(), hidden.grad, grad, bias.grad))
    for found, expected in zip(*results, strict=True):
        error = (found.double() - expected.double()).norm() / expected.double().norm()
        assert float(error) < 1e-2


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("asked", [(True, True), (True, False), (False, True)], ids=str)
def test_casts_by_magnitudes_of_earlier_steps_are_those_of_torch(sizes, dtype, asked):
    matrix = matrix_of(sizes)
    matrix[0, 3], matrix[0, 5], matrix[0, 7] = float("inf"), float("nan"), -1e30
    kernels = fused_kernels(matrix)
    assert kernels is not None
    # A quarter of the numbers is beyond the range.
    limit = matrix.float().nan_to_num(posinf=0.0).abs().flatten()[:4096].quantile(0.75)
    parts = limit.reshape(1).view(torch.int32)
    rows, columns = asked
    results = []
    for casts, given in ((kernels, matrix), (torch_casts, matrix.float())):
        seen = torch.zeros((), dtype=torch.int32, device="cuda")
        options = {"rows": rows, "columns": columns, "multiple": 16}
        found = casts.cast_by_one_scale(given, parts, dtype, running_magnitude=seen, **options)
        assert bool(seen.view(torch.float32).isnan())
        finite = given.nan_to_num(0.0, 0.0, 0.0)
        seen.fill_(torch.tensor(2.0).view(torch.int32))
        casts.cast_by_one_scale(finite, parts, dtype, running_magnitude=seen, **options)
        assert float(seen.view(torch.float32)) == max(2.0, float(finite.abs().max()))
        results.append(found)
    for one, other in zip(*results, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one[1], other[1], rtol=1e-6, atol=0.0)
            values, expected = one[0].float(), other[0].float()
            assert torch.equal(values.isnan(), expected.isnan())
            assert float(values.nan_to_num(0.0).abs().max()) == torch.finfo(dtype).max
            near(values.nan_to_num(0.0), expected.nan_to_num(0.0), 0.25)


def test_steps_with_scales_of_earlier_ones_equal_emulated_steps():
    results = []
    for emulate in (False, True):
        settings = FP8("delayed", history=2, margin=1)
        scales = DelayedScales(settings, ["one"], torch.device("cuda"))
        ours = Scaling(settings, emulate, scales.layer(0))
        weight = matrix_of((512, 1024), 1).requires_grad_()
        found = []
        for step in range(4):
            hidden = (matrix_of((94, 1024), step) * (1.0 + step)).view(47, 2, 1024).requires_grad_()
            output = fp8_column_linear(hidden, weight, None, single_mesh(0), ours)
            output.backward(matrix_of((94, 512), step + 9).view(47, 2, 512))
            scales.end_step(single_mesh(0))
            assert hidden.grad is not None
            assert weight.grad is not None
            found += [output.detach(), hidden.grad, weight.grad.clone()]
        results.append((*found, scales.history))
    for one, expected in zip(*results, strict=True):
        error = (one.double() - expected.double()).norm() / expected.double().norm()
        assert float(error) < 1e-2
    assert torch.equal(results[0][-1], results[1][-1])


@pytest.mark.parametrize("mode", ["segments", "full"])
def test_graphs_of_steps_with_scales_of_earlier_ones_equal_eager_steps(mode):
    layout = {"fp8": FP8("delayed", history=3)}
    losses = []
    for graphs in (None, CudaGraphs(mode, warmup_steps=2)):
        found = fit(
            *(graphs, 1, layout),
            module=TinyLM(hidden_size=64, num_heads=4),
            **{"accelerator": "gpu", "precision": "bf16-mixed", "max_steps": 8},
            num_samples=40,
        )
        assert graphs is None or found.num_graphs[-1] > 0
        losses.append(found.losses)
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    assert losses[0][-1] < losses[0][0]


def test_torch_casts_serve_a_gpu_without_the_kernels():
    matrix = matrix_of((64, 256)).float()
    parts = torch_casts.magnitude_parts(matrix)
    found, _ = torch_casts.cast_by_one_scale(
        matrix, parts, torch.float8_e4m3fn, rows=True, columns=False, multiple=16
    )
    assert found is not None
    assert found[0].is_cuda
