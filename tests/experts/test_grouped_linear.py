"""Grouped products by every kernel equal one product for each group, and ignore rows of no group."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_megatron.experts.compute.backends import stacked
from lightning_megatron.experts.compute.choose_backend import BackendName, choose_backend
from lightning_megatron.experts.compute.grouped_linear import grouped_linear
from lightning_megatron.layers.gradient_slot import GradientSlot, set_slot

ENDS = {
    "random": [3, 4, 9, 11],
    "first and last empty": [0, 5, 12, 12],
    "all to one": [0, 16, 16, 16],
    "none": [0, 0, 0, 0],
    "all rows": [1, 2, 3, 16],
}
NUM_ROWS, OUT, IN = 16, 24, 16
backends = pytest.mark.parametrize(
    ("backend", "dtype", "limit"),
    [("loop", torch.float64, 1e-12), ("grouped_mm", torch.float32, 1e-4)],
)


def draw_operands(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = ((NUM_ROWS, IN), (4, OUT, IN), (NUM_ROWS, OUT))
    return tuple(torch.randn(size, generator=generator, dtype=dtype) for size in sizes)  # type: ignore[return-value]


@backends
@pytest.mark.parametrize("case", ENDS)
def test_outputs_and_gradients_equal_those_of_one_product_for_each_group(
    case: str, backend: BackendName, dtype: torch.dtype, limit: float
) -> None:
    if backend == "grouped_mm" and not hasattr(F, "grouped_mm"):
        pytest.skip("this torch has none")
    rows, stack, output_gradient = draw_operands(dtype)
    last = ENDS[case][-1]
    rows[last:] = output_gradient[last:] = (
        torch.nan
    )  # a read of a row of no group would make a sum NaN
    rows.requires_grad_(), stack.requires_grad_()
    output = grouped_linear(
        rows, stack.unbind(), torch.tensor(ENDS[case], dtype=torch.int32), backend
    )
    gradients = torch.autograd.grad(output, (rows, stack), output_gradient)
    expected = torch.zeros(NUM_ROWS, OUT, dtype=dtype)
    start = 0
    pieces = []
    for weight, stop in zip(stack, ENDS[case], strict=True):
        pieces.append(F.linear(rows[start:stop], weight))
        start = stop
    expected = torch.cat(pieces)
    expected_gradients = torch.autograd.grad(expected, (rows, stack), output_gradient[:last])
    assert (output[:last] - expected).abs().sum() < limit
    assert (gradients[0][:last] - expected_gradients[0][:last]).abs().sum() < limit
    assert (gradients[1] - expected_gradients[1]).abs().max() < limit
    for number, (first_row, last_row) in enumerate(zip([0, *ENDS[case]], ENDS[case], strict=False)):
        if first_row == last_row:
            assert not gradients[1][number].any()


def test_zero_rows_give_zero_outputs_and_gradients_of_zeros() -> None:
    _, stack, _ = draw_operands(torch.float64)
    rows = torch.zeros(0, IN, dtype=torch.float64, requires_grad=True)
    stack.requires_grad_()
    output = grouped_linear(rows, stack.unbind(), torch.zeros(4, dtype=torch.int32))
    output.sum().backward()
    assert output.shape == (0, OUT)
    assert not stack.grad.any()


def test_weights_at_equal_distances_are_stacked_without_a_copy() -> None:
    memory = torch.randn(200)
    weights = [memory[start : start + 12].view(3, 4) for start in (5, 55, 105)]
    view = stacked(weights)
    assert view.data_ptr() == weights[0].data_ptr()
    assert torch.equal(view, torch.stack(weights))
    for uneven_weights in (
        weights[::-1],
        [weights[0], weights[2], weights[1]],
        [w.clone() for w in weights],
    ):
        assert torch.equal(stacked(uneven_weights), torch.stack(uneven_weights))
    assert torch.equal(stacked([weights[0], weights[0]]), torch.stack([weights[0], weights[0]]))


def test_gradients_of_weights_with_slots_go_to_the_slots() -> None:
    rows, stack, output_gradient = draw_operands(torch.float64)
    weights = [nn.Parameter(weight) for weight in stack]
    weights[2].requires_grad_(False)
    sums, notices = torch.zeros_like(stack), []
    for number in (0, 2):
        set_slot(
            weights[number],
            GradientSlot(sums[number], lambda number=number: notices.append(number)),
        )
    ends = torch.tensor(ENDS["random"], dtype=torch.int32)
    for _ in range(2):
        grouped_linear(rows, weights, ends).backward(output_gradient)
    assert notices == [0, 0]
    assert weights[0].grad is None
    assert weights[2].grad is None
    assert torch.allclose(sums[0], 2 * output_gradient[:3].t() @ rows[:3])
    assert torch.allclose(weights[1].grad, 2 * output_gradient[3:4].t() @ rows[3:4])


def test_the_choice_of_a_backend_has_its_reason() -> None:
    choice = choose_backend(torch.device("cpu"), torch.float32, 4, 8, 8)
    assert choice.backend == "loop"
    assert "cpu" in choice.reason
