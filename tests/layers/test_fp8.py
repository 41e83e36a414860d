"""Casts to 8 bits, their scales, their products, and magnitudes that norms and SwiGLU hand over."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_megatron import MegatronStrategy
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.fp8 import torch_casts
from lightning_megatron.layers.fp8.delayed import DelayedScales
from lightning_megatron.layers.fp8.magnitude import GradientMagnitude, Magnitude, no_magnitude
from lightning_megatron.layers.fp8.operand import Operand, needed, product
from lightning_megatron.layers.fp8.scaling import Scaling
from lightning_megatron.layers.linear.fp8_products import fp8_column_linear, fp8_row_linear
from lightning_megatron.layers.mlp import MLP, apply_swiglu
from lightning_megatron.layers.norm import LayerNorm, RMSNorm
from lightning_megatron.models.layered import single_mesh
from lightning_megatron.plan.fp8 import FP8
from tests.layers.noted_casts import CONFIGS, GIVEN, compare_hand_over, given, noting_casts, spread
from tests.oracles import assert_equal
from tests.refusals import check_refusals

MESH = single_mesh(0)
CPU = torch.device("cpu")
#: Relative error of a rounded number, and the largest number over the smallest subnormal number.
FORMATS = {"e4m3": (2.0**-4, 448 / 2**-9), "e5m2": (2.0**-3, 57344 / 2**-16)}
RECIPES = ("tensorwise", "rowwise", "blockwise")


def bound_of(matrix: Tensor, form: str) -> Tensor:
    """Return the largest rounding error of each number, with the scale of the full tensor."""
    relative, steps = FORMATS[form]
    half_step = matrix.abs().max() / steps / 2
    # Scales have 24 bits.
    return torch.maximum(matrix.abs() * relative, half_step) * (1 + 2.0**-20)


def make_scaling(recipe: str, form: str | None = None) -> Scaling:
    return Scaling(FP8(recipe, format=form, emulate=True), emulate=True)


@pytest.mark.parametrize("recipe", RECIPES)
def test_scales_are_the_largest_magnitudes_of_tensor_rows_or_blocks(recipe):
    matrix = spread(256, 384)
    operands = make_scaling(recipe).cast(matrix, "input", rows=True, columns=True)
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
    left = spread(48, 256)
    right = spread(128, 256, seed=1)
    scaling = make_scaling(recipe)
    actual = product(
        needed(scaling.cast(left, "input", rows=True, columns=False).rows),
        needed(scaling.cast_weight(right, rows=True, columns=False).rows),
        torch.float64,
        emulate=True,
    )
    errors = bound_of(left, "e4m3"), bound_of(right, "e4m3")
    limit = errors[0] @ right.abs().t() + left.abs() @ errors[1].t() + errors[0] @ errors[1].t()
    assert bool(((actual - left @ right.t()).abs() <= limit).all())
    # The errors are not zero.
    assert float((actual - left @ right.t()).abs().max()) > 1e-3


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("layer", [fp8_column_linear, fp8_row_linear])
def test_layers_and_gradients_are_products_of_rounded_factors(recipe, layer):
    scaling = make_scaling(recipe)
    hidden = spread(20, 2, 256).requires_grad_()
    weight = spread(128, 256, seed=1).requires_grad_()
    bias = spread(128, seed=2).requires_grad_()
    output_gradient = spread(20, 2, 128, seed=3)
    output = layer(hidden, weight, bias, MESH, scaling)
    output.backward(output_gradient)

    rows = hidden.detach().view(40, 256)
    grads = output_gradient.view(40, 128)
    inputs = scaling.cast(rows, "input", rows=True, columns=True)
    matrix = scaling.cast_weight(weight.detach(), rows=True, columns=True)
    gradient = scaling.cast(grads, "gradient", rows=True, columns=True)

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
def test_numbers_that_are_not_finite_stay_in_their_scale_and_extreme_ones_are_cast(recipe):
    scaling = make_scaling(recipe)
    right = needed(scaling.cast_weight(spread(128, 128, seed=1), rows=True, columns=False).rows)
    for value in (float("nan"), float("-inf")):
        left = spread(16, 128)
        left[3, 5] = value
        rows = needed(scaling.cast(left, "input", rows=True, columns=False).rows)
        actual = product(rows, right, torch.float64, emulate=True)
        assert bool(actual[3].isnan().all())
        # Only numbers that share the scale become NaN.
        assert bool(actual[4].isfinite().all()) == (recipe != "tensorwise")
    for factor in (0.0, 1e-38, 1e30):
        left = spread(16, 128, dtype=torch.float32) * factor
        cast = needed(scaling.cast(left, "input", rows=True, columns=True).rows)
        numbers = cast.numbers(torch.float64)
        assert bool(numbers.isfinite().all())
        limit = bound_of(left.double(), "e4m3")
        assert factor == 1e-38 or bool(((numbers - left.double()).abs() <= limit).all())


def test_bad_settings_and_indivisible_sizes_are_refused():
    settings: list[tuple[Any, str]] = [
        ("half", "fp8 must be tensorwise, delayed, rowwise, blockwise"),
        ({"recipe": "late"}, "fp8.recipe must be"),
        ({"format": "e3m4"}, "fp8.format must be"),
        ({"first_bf16": -1}, "fp8.first_bf16 must be"),
        ({"rows": 1}, "rows"),
        ({"history": 16}, "fp8.history"),
        ({"margin": 1}, "fp8.margin"),
        ({"recipe": "delayed", "history": 0}, "fp8.history"),
    ]
    check_refusals(FP8.of, [((wrong,), phrase) for wrong, phrase in settings])
    name = "layers.0.mlp.down"
    check_refusals(FP8().check_sizes, [((name, 40, 64), f"multiples of 16: {name} has 40 output")])
    check_refusals(FP8("blockwise").check_sizes, [((name, 128, 512), "multiples of 512")])
    FP8("blockwise", emulate=True).check_sizes(name, 128, 512)
    overlapped = partial(MegatronStrategy, tp=2, linear={"overlap": True})
    whole = "depend on the gathered tensor"
    check_refusals(overlapped, [({"fp8": "rowwise"}, whole), ({"fp8": "blockwise"}, whole)])
    overlapped(fp8="delayed")


# Delayed scales.

#: Largest number, bits of the fraction, and smallest exponent of normal numbers.
EXPONENTS = {"e4m3": (448.0, 3, -6), "e5m2": (57344.0, 2, -14)}


def round_to_8_bits(matrix: Tensor, magnitude: float, form: str) -> Tensor:
    """Round a matrix to 8 bits and back, with the scale that follows from a magnitude."""
    largest, fraction, least = EXPONENTS[form]
    # Scales have 24 bits.
    factor = torch.tensor(largest / float(torch.tensor(magnitude))).double()
    scale = (torch.tensor(magnitude, dtype=torch.float32) / largest).double()
    inside = (matrix * factor).clamp(-largest, largest)
    exponent = torch.frexp(inside).exponent - 1
    step = 2.0 ** (exponent.clamp(min=least) - fraction).double()
    return torch.round(inside / step) * step * scale


class SimulatedTensor:
    """Simulated scales of one tensor of a layer, with magnitudes of the last steps and of this one."""

    def __init__(self, form: str) -> None:
        self.form, self.history, self.now = form, list[float](), list[float]()

    def cast(self, matrix: Tensor, margin: int) -> Tensor:
        magnitude = float(matrix.abs().max().float())
        self.now.append(magnitude)
        if not self.history:
            return round_to_8_bits(matrix, magnitude, self.form)
        largest = max(self.history) * 2**margin
        return round_to_8_bits(matrix, largest or EXPONENTS[self.form][0], self.form)

    def end_step(self, length: int) -> None:
        self.history = [max(self.now), *self.history][:length]
        self.now = []


def microbatch(step: int, number: int) -> tuple[Tensor, Tensor]:
    """Return inputs and gradients that grow and shrink over steps, so that some are cut off."""
    seed = 10 * step + number
    factor = (1.0, 3.0, 0.2, 0.05, 0.5)[step]
    hidden = spread(12, 2, 32, seed=seed) * factor
    return hidden, spread(12, 2, 48, seed=seed + 5) / factor / 100


@pytest.mark.parametrize(
    ("layer", "form", "is_recomputed"),
    [(fp8_column_linear, "hybrid", False), (fp8_row_linear, "e4m3", True)],
)
def test_steps_of_a_layer_equal_those_of_the_simulation(layer, form, is_recomputed):
    settings = FP8("delayed", format=form, history=2, margin=1, emulate=True)
    scales = DelayedScales(settings, ["one"], CPU)
    ours = Scaling(settings, True, scales.layer(0))
    weight = spread(48, 32, seed=1).requires_grad_()
    last = "e5m2" if form == "hybrid" else "e4m3"
    simulated = [SimulatedTensor(each) for each in ("e4m3", "e4m3", last)]
    num_clamped = 0
    for step in range(5):
        expected_gradient = torch.zeros_like(weight)
        weight.grad = None
        for number in range(2):
            hidden, output_gradient = microbatch(step, number)
            hidden.requires_grad_()
            if is_recomputed:
                output = checkpoint(layer, hidden, weight, None, MESH, ours, use_reentrant=False)
            else:
                output = layer(hidden, weight, None, MESH, ours)
            output.backward(output_gradient)
            rows, grads = hidden.detach().view(24, 32), output_gradient.view(24, 48)
            inputs, matrix, gradient = (
                tensor.cast(value, 1)
                for tensor, value in zip(simulated, (rows, weight.detach(), grads), strict=True)
            )
            # Calls without gradients change no history.
            with torch.no_grad():
                torch.testing.assert_close(layer(hidden, weight, None, MESH, ours), output)
                layer(hidden * 1000, weight, None, MESH, ours)
            assert_equal(output.detach().view(24, 48), inputs @ matrix.t(), "output", 1e-13)
            assert_equal(hidden.grad.view(24, 32), gradient @ matrix, "input gradient", 1e-13)
            expected_gradient += gradient.t() @ inputs
            num_clamped += int((inputs.abs() < rows.abs() * 0.9).logical_and(rows.abs() > 1).sum())
        assert_equal(weight.grad, expected_gradient, "weight gradient", 1e-13)
        scales.end_step(MESH)
        for tensor in simulated:
            tensor.end_step(2)
        histories = torch.tensor([tensor.history for tensor in simulated]).t()
        assert torch.equal(scales.history[0, : len(histories)], histories)
        with torch.no_grad():
            weight.mul_(1.3)
    assert num_clamped > 0, "some inputs are beyond the range"


def test_old_and_non_finite_magnitudes_set_no_scale():
    settings = FP8("delayed", history=2, emulate=True)
    scales = DelayedScales(settings, ["one", "two"], CPU)
    scaling = Scaling(settings, True, scales.layer(1))
    for value in (4.0, math.inf, math.nan):
        scaling.cast(torch.full((16, 16), value), "input", rows=True, columns=False)
        scales.end_step(MESH)
    assert scales.history[1, :, 0].tolist() == [0.0, 0.0], "the step of 4.0 is too long ago"
    # Without a finite magnitude the scale is 1.
    operand = needed(
        scaling.cast(torch.full((16, 16), 3.0), "input", rows=True, columns=False).rows
    )
    assert operand.scale.tolist() == [1.0]
    assert operand.numbers(torch.float32)[0, 0] == 3.0
    assert scales.layer(0).magnitude("weight") is not None
    # A margin keeps the scale within its range.
    wide = DelayedScales(FP8("delayed", margin=32, emulate=True), ["one"], CPU)
    scaling = Scaling(wide.settings, True, wide.layer(0))
    scaling.cast(torch.full((16, 16), 1e38), "input", rows=True, columns=False)
    wide.end_step(MESH)
    operand = needed(
        scaling.cast(torch.full((16, 16), 1e38), "input", rows=True, columns=False).rows
    )
    assert operand.numbers(torch.float64)[0, 0] == pytest.approx(1e38, rel=0.1)


def test_saved_histories_of_other_lengths_are_cut_or_padded():
    scales = DelayedScales(FP8("delayed", history=3, emulate=True), ["one", "two"], CPU)
    saved = [torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[float(n)] * 3 for n in range(1, 6)])]
    scales.start_with(saved, is_complete=True)
    assert scales.history[:, :, 0].tolist() == [[1.0, 0.0, 0.0], [1.0, 2.0, 3.0]]
    for use in ("input", "weight", "gradient"):
        magnitude = scales.layer(1).magnitude(use)
        assert magnitude is not None
        assert float(magnitude.view(torch.float32)) == 3.0
    scales.start_with(saved, is_complete=False)
    assert scales.layer(1).magnitude("input") is None


# Magnitudes.


SETTINGS = FP8("tensorwise", emulate=True)


def magnitude_bits(tensor: Tensor) -> Tensor:
    """Return the bit pattern of the magnitude, computed by a separate pass."""
    return torch_casts.magnitude_parts(tensor.detach().reshape(1, -1)).amax()


@pytest.mark.parametrize(
    ("strange", "dtype"),
    [(None, torch.bfloat16), (float("inf"), torch.float64), (float("nan"), torch.bfloat16)],
)
def test_norms_and_swiglu_compute_the_magnitude_of_their_output(strange, dtype):
    hidden, other = spread(5, 2, 32, dtype=dtype), spread(5, 2, 32, dtype=dtype)
    if strange is not None:
        hidden.view(-1)[3] = strange
    for norm in (RMSNorm(32, MESH).to(dtype), LayerNorm(32, MESH).to(dtype)):
        for update in (None, other):
            magnitude = no_magnitude(hidden)
            results = norm(hidden, update, True, magnitude)
            for actual, expected in zip(results, norm(hidden, update, True), strict=True):
                assert torch.equal(actual.nan_to_num(), expected.nan_to_num())
            assert torch.equal(magnitude.amax(), magnitude_bits(results[1]))
    features, of_gradient = hidden.clone().requires_grad_(), GradientMagnitude()
    gradients: list[Tensor] = []
    swiglu_input = features * 1
    swiglu_input.register_hook(gradients.append)
    magnitude = no_magnitude(swiglu_input)
    output = apply_swiglu(swiglu_input, magnitude, of_gradient)
    assert torch.equal(magnitude.amax(), magnitude_bits(output))
    output.backward(spread(5, 2, 16, dtype=dtype))
    taken = of_gradient.take(gradients[0])
    assert taken is not None
    assert torch.equal(taken.amax(), magnitude_bits(features.grad))
    assert of_gradient.take(gradients[0]) is None


def test_a_magnitude_is_returned_only_for_its_unchanged_tensor():
    tensor = spread(4, 6)
    magnitude = Magnitude(tensor, no_magnitude(tensor))
    assert magnitude.of(tensor) is magnitude.parts
    for view in (tensor.view(2, 12), tensor.detach(), tensor[None], tensor.view_as(tensor)):
        assert magnitude.of(view) is magnitude.parts
    others = (tensor.clone(), tensor[:2], tensor.t(), tensor.view(torch.int64), tensor.float())
    assert [magnitude.of(other) for other in others] == [None] * len(others)
    tensor[2, 3] = 1e9
    assert magnitude.of(tensor) is None
    assert magnitude.of(tensor.view(-1)) is None
    assert Magnitude(tensor, magnitude.parts).of(tensor) is magnitude.parts


PARTS = ("selective", "full", "full_except_core", "norms", "activations")


@pytest.mark.parametrize(
    ("kind", "recompute"),
    [
        *((kind, "none") for kind in CONFIGS),
        *(("glm", part) for part in PARTS),
        ("latent attention", "selective"),
    ],
)
def test_models_with_hand_over_have_the_same_bits_as_models_without(kind, recompute):
    casts = compare_hand_over(CONFIGS[kind], ParallelMesh.single(seed=0), recompute=recompute)
    inputs, gradients = GIVEN[kind]
    # A recomputed block casts its inputs again; early stops leave out the last cast.
    if not recompute.startswith("full"):
        assert given(casts, "input") == 2 * 2 * [*inputs]
    assert sum(given(casts, "input")) >= 2 * 2 * sum(inputs)
    assert given(casts, "gradient") == 2 * 2 * [*reversed(gradients)]


def scaled_mlp(recomputes: bool = False) -> MLP:
    layer = MLP(32, 48, MESH, activation="swiglu", bias=True).double()
    layer.recomputes_activation = recomputes
    with torch.no_grad():
        for seed, parameter in enumerate(layer.parameters()):
            parameter.copy_(spread(*parameter.shape, seed=seed))
    for linear in (layer.gate_up, layer.down):
        linear.scaling = Scaling(SETTINGS, emulate=True)
    return layer


def double_input_in_place(module: nn.Module, args: tuple[Any, ...]) -> None:
    with torch.no_grad():
        args[0].mul_(2)


def double_gradient_in_place(module: nn.Module, args: Any, output: Tensor) -> None:
    output.register_hook(lambda grad: grad.mul_(2))


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("is_input", [False, True])
def test_magnitudes_of_tensors_changed_by_hooks_are_not_handed_over(is_input, recomputes):
    results = []
    for hands_over in (True, False):
        layer = scaled_mlp(recomputes)
        if is_input:
            layer.down.register_forward_pre_hook(double_input_in_place)
        else:
            layer.gate_up.register_forward_hook(double_gradient_in_place)
        hidden = spread(20, 2, 32).requires_grad_()
        with noting_casts(hands_over) as casts:
            output = layer(hidden)
            output.backward(spread(20, 2, 32, seed=1))
        results.append(
            ([output, hidden.grad, *(parameter.grad for parameter in layer.parameters())], casts)
        )
    assert all(map(torch.equal, results[0][0], results[1][0]))
    # The magnitude of the unchanged tensor is still handed over. Hooks of a gradient may run before
    # its magnitude is computed.
    casts = results[0][1]
    assert given(casts, "input") == [False, not is_input]
    assert given(casts, "gradient")[1] or not is_input
