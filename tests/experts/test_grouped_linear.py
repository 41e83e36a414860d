"""Grouped products equal one product for each group, by every kernel, and leave rows of no group
alone.
"""

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


def operands(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = ((NUM_ROWS, IN), (4, OUT, IN), (NUM_ROWS, OUT))
    return tuple(torch.randn(size, generator=generator, dtype=dtype) for size in sizes)  # type: ignore[return-value]


@backends
@pytest.mark.parametrize("case", ENDS)
def test_outputs_and_gradients_equal_those_of_one_product_a_group(
    case: str, backend: BackendName, dtype: torch.dtype, limit: float
) -> None:
    if backend == "grouped_mm" and not hasattr(F, "grouped_mm"):
        pytest.skip("this torch has none")
    rows, stack, outer = operands(dtype)
    last = ENDS[case][-1]
    rows[last:] = outer[last:] = torch.nan  # whoever reads a row of no group spoils a sum
    rows.requires_grad_(), stack.requires_grad_()
    output = grouped_linear(
        rows, stack.unbind(), torch.tensor(ENDS[case], dtype=torch.int32), backend
    )
    found = torch.autograd.grad(output, (rows, stack), outer)
    expected = torch.zeros(NUM_ROWS, OUT, dtype=dtype)
    start = 0
    pieces = []
    for weight, stop in zip(stack, ENDS[case], strict=True):
        pieces.append(F.linear(rows[start:stop], weight))
        start = stop
    expected = torch.cat(pieces)
    wanted = torch.autograd.grad(expected, (rows, stack), outer[:last])
    assert (output[:last] - expected).abs().sum() < limit
    assert (found[0][:last] - wanted[0][:last]).abs().sum() < limit
    assert (found[1] - wanted[1]).abs().max() < limit
    for number, (begin, end) in enumerate(zip([0, *ENDS[case]], ENDS[case], strict=False)):
        if begin == end:
            assert not found[1][number].any()


def test_no_rows_have_no_outputs_and_gradients_of_zeros() -> None:
    _, stack, _ = operands(torch.float64)
    rows = torch.zeros(0, IN, dtype=torch.float64, requires_grad=True)
    stack.requires_grad_()
    output = grouped_linear(rows, stack.unbind(), torch.zeros(4, dtype=torch.int32))
    output.sum().backward()
    assert output.shape == (0, OUT)
    assert not stack.grad.any()


def test_weights_at_equal_distances_are_multiplied_where_they_lie() -> None:
    memory = torch.randn(200)
    weights = [memory[start : start + 12].view(3, 4) for start in (5, 55, 105)]
    view = stacked(weights)
    assert view.data_ptr() == weights[0].data_ptr()
    assert torch.equal(view, torch.stack(weights))
    for apart in (
        weights[::-1],
        [weights[0], weights[2], weights[1]],
        [w.clone() for w in weights],
    ):
        assert torch.equal(stacked(apart), torch.stack(apart))
    assert torch.equal(stacked([weights[0], weights[0]]), torch.stack([weights[0], weights[0]]))


def test_gradients_go_to_slots_where_there_are_some() -> None:
    rows, stack, outer = operands(torch.float64)
    weights = [nn.Parameter(weight) for weight in stack]
    weights[2].requires_grad_(False)
    sums, seen = torch.zeros_like(stack), []
    for number in (0, 2):
        set_slot(
            weights[number], GradientSlot(sums[number], lambda number=number: seen.append(number))
        )
    ends = torch.tensor(ENDS["random"], dtype=torch.int32)
    for _ in range(2):
        grouped_linear(rows, weights, ends).backward(outer)
    assert seen == [0, 0]
    assert weights[0].grad is None
    assert weights[2].grad is None
    assert torch.allclose(sums[0], 2 * outer[:3].t() @ rows[:3])
    assert torch.allclose(weights[1].grad, 2 * outer[3:4].t() @ rows[3:4])


def test_the_choice_says_why() -> None:
    choice = choose_backend(torch.device("cpu"), torch.float32, 4, 8, 8)
    assert choice.backend == "loop"
    assert "cpu" in choice.reason
