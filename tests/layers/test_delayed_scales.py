"""Delayed scales equal an independent simulation in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.layers.fp8.delayed import DelayedScales
from lightning_megatron.layers.fp8.fp8_regions import fp8_column_linear, fp8_row_linear
from lightning_megatron.layers.fp8.operand import needed
from lightning_megatron.layers.fp8.scaling import Scaling
from lightning_megatron.models.layered import single_mesh
from lightning_megatron.plan.fp8 import FP8
from tests.layers.test_fp8_products import draw

#: Largest number, bits of the fraction, and smallest exponent of normal numbers.
FORMATS = {"e4m3": (448.0, 3, -6), "e5m2": (57344.0, 2, -14)}
MESH = single_mesh(0)
CPU = torch.device("cpu")


def round_to_8_bits(matrix: Tensor, magnitude: float, form: str) -> Tensor:
    """Round a matrix to 8 bits and back, with the scale that follows from a magnitude."""
    largest, fraction, least = FORMATS[form]
    # Scales have 24 bits.
    factor = torch.tensor(largest / float(torch.tensor(magnitude))).double()
    scale = (torch.tensor(magnitude, dtype=torch.float32) / largest).double()
    inside = (matrix * factor).clamp(-largest, largest)
    exponent = torch.frexp(inside).exponent - 1
    step = 2.0 ** (exponent.clamp(min=least) - fraction).double()
    return torch.round(inside / step) * step * scale


@dataclass
class SimulatedTensor:
    """Simulated scales of one tensor of a layer.

    Args:
        form: Format of 8 bits.
        history: Magnitudes of the last steps.
        now: Magnitudes of this step.
    """

    form: str
    history: list[float] = field(default_factory=list)
    now: list[float] = field(default_factory=list)

    def cast(self, matrix: Tensor, margin: int) -> Tensor:
        magnitude = float(matrix.abs().max().float())
        self.now.append(magnitude)
        if not self.history:
            return round_to_8_bits(matrix, magnitude, self.form)
        largest = max(self.history) * 2**margin
        return round_to_8_bits(matrix, largest or FORMATS[self.form][0], self.form)

    def end_step(self, length: int) -> None:
        self.history = [max(self.now), *self.history][:length]
        self.now = []


Layer = Callable[..., Tensor]


def microbatch(step: int, number: int) -> tuple[Tensor, Tensor]:
    """Return inputs and gradients that grow and shrink over steps, so that some are cut off."""
    seed = 10 * step + number
    factor = (1.0, 3.0, 0.2, 0.05, 0.5)[step]
    hidden = draw(12, 2, 32, seed=seed) * factor
    return hidden, draw(12, 2, 48, seed=seed + 5) / factor / 100


@pytest.mark.parametrize("layer", [fp8_column_linear, fp8_row_linear])
@pytest.mark.parametrize("form", ["hybrid", "e4m3"])
@pytest.mark.parametrize("is_recomputed", [False, True])
def test_steps_of_a_layer_equal_those_of_the_simulation(
    layer: Layer, form: str, is_recomputed: bool
) -> None:
    settings = FP8("delayed", format=form, history=2, margin=1, emulate=True)
    scales = DelayedScales(settings, ["one"], CPU)
    ours = Scaling(settings, True, scales.layer(0))
    weight = draw(48, 32, seed=1).requires_grad_()
    simulated = (
        SimulatedTensor("e4m3"),
        SimulatedTensor("e4m3"),
        SimulatedTensor("e5m2" if form == "hybrid" else "e4m3"),
    )
    num_clamped = 0
    for step in range(5):
        expected_gradient = torch.zeros_like(weight)
        weight.grad = None
        for number in range(2):
            hidden, output_gradient = microbatch(step, number)
            hidden.requires_grad_()
            arguments = hidden, weight, None, MESH, ours
            output = (
                checkpoint(layer, *arguments, use_reentrant=False)
                if is_recomputed
                else layer(*arguments)
            )
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
            tolerance = {"rtol": 1e-13, "atol": 1e-13}
            torch.testing.assert_close(
                output.detach().view(24, 48), inputs @ matrix.t(), **tolerance
            )
            torch.testing.assert_close(hidden.grad.view(24, 32), gradient @ matrix, **tolerance)
            expected_gradient += gradient.t() @ inputs
            num_clamped += int((inputs.abs() < rows.abs() * 0.9).logical_and(rows.abs() > 1).sum())
        torch.testing.assert_close(weight.grad, expected_gradient, rtol=1e-13, atol=1e-13)
        scales.end_step(MESH)
        for tensor in simulated:
            tensor.end_step(2)
        histories = torch.tensor([tensor.history for tensor in simulated]).t()
        assert torch.equal(scales.history[0, : len(histories)], histories)
        with torch.no_grad():
            weight.mul_(1.3)
    assert num_clamped > 0, "some inputs are beyond the range"


def test_numbers_beyond_the_range_are_clamped_and_infinite_numbers_become_nan() -> None:
    settings = FP8("delayed", emulate=True)
    scales = DelayedScales(settings, ["one"], CPU)
    scaling = Scaling(settings, True, scales.layer(0))
    scaling.cast_gradient(torch.full((16, 16), 0.5), rows=True, columns=False)
    scales.end_step(MESH)
    matrix = torch.tensor([[7.0, -1e30, 0.25, math.inf, -math.inf, math.nan] + [0.0] * 10] * 16)
    operands = scaling.cast_gradient(matrix, rows=True, columns=True)
    expected = torch.tensor([0.5, -0.5, 0.25, math.nan, math.nan, math.nan])
    for values in (needed(operands.rows), needed(operands.columns)):
        numbers = values.numbers(torch.float32)
        row = numbers[0] if values is operands.rows else numbers[:, 0]
        assert torch.equal(row[:6].nan_to_num(9.0), expected.nan_to_num(9.0))


def test_old_and_non_finite_magnitudes_set_no_scale() -> None:
    settings = FP8("delayed", history=2, emulate=True)
    scales = DelayedScales(settings, ["one", "two"], CPU)
    scaling = Scaling(settings, True, scales.layer(1))
    for value in (4.0, math.inf, math.nan):
        scaling.cast_input(torch.full((16, 16), value), rows=True, columns=False)
        scales.end_step(MESH)
    assert scales.history[1, :, 0].tolist() == [0.0, 0.0], "the step of 4.0 is too long ago"
    # Without a finite magnitude the scale is 1.
    operand = needed(scaling.cast_input(torch.full((16, 16), 3.0), rows=True, columns=False).rows)
    assert operand.scale.tolist() == [1.0]
    assert operand.numbers(torch.float32)[0, 0] == 3.0
    assert scales.layer(0).magnitude("weight") is not None
    # A margin keeps the scale within its range.
    wide = DelayedScales(FP8("delayed", margin=32, emulate=True), ["one"], CPU)
    scaling = Scaling(wide.settings, True, wide.layer(0))
    scaling.cast_input(torch.full((16, 16), 1e38), rows=True, columns=False)
    wide.end_step(MESH)
    operand = needed(scaling.cast_input(torch.full((16, 16), 1e38), rows=True, columns=False).rows)
    assert operand.numbers(torch.float64)[0, 0] == pytest.approx(1e38, rel=0.1)


def test_saved_histories_of_other_lengths_are_cut_or_padded() -> None:
    scales = DelayedScales(FP8("delayed", history=3, emulate=True), ["one", "two"], CPU)
    saved = [torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[float(n)] * 3 for n in range(1, 6)])]
    scales.start_with(saved, is_complete=True)
    assert scales.history[:, :, 0].tolist() == [[1.0, 0.0, 0.0], [1.0, 2.0, 3.0]]
    magnitudes = [scales.layer(1).magnitude(use) for use in ("input", "weight", "gradient")]
    assert [
        float(magnitude.view(torch.float32)) for magnitude in magnitudes if magnitude is not None
    ] == [3.0] * 3
    scales.start_with(saved, is_complete=False)
    assert scales.layer(1).magnitude("input") is None


@pytest.mark.parametrize(
    "wrong",
    [{"history": 16}, {"margin": 1}, {"recipe": "delayed", "history": 0}, {"margin": 33}],
    ids=str,
)
def test_illegal_settings_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ParallelPlanError, match=r"fp8\.(history|margin)"):
        FP8(**wrong)  # type: ignore[arg-type]
