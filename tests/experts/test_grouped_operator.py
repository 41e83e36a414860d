"""Grouped products are operators that pass the checks of torch and compile into one graph."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron.experts.compute.backends import Loop
from lightning_megatron.experts.compute.grouped_linear import grouped_linear
from lightning_megatron.experts.compute.grouped_mlp import GroupedMLP
from lightning_megatron.experts.compute.grouped_operator import LoopOperators
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.gradient_slot import GradientSlot
from lightning_megatron.layers.init import initialize_
from lightning_megatron.plan.experts import ExpertsConfig
from tests.experts.dense import draw

ENDS = torch.tensor([3, 3, 9, 11], dtype=torch.int32)
NUM_ROWS, OUT, IN = 11, 24, 16


@pytest.fixture(autouse=True)
def reset_compiler() -> None:
    """Clear the compiler caches and counters of other tests."""
    torch.compiler.reset()


def draw_operands(requires_grad: bool = True) -> tuple[Tensor, list[Tensor]]:
    rows, stack = draw("rows", shape=(NUM_ROWS, IN)), draw("weights", shape=(4, OUT, IN))
    weights = [weight.clone().requires_grad_(requires_grad) for weight in stack]
    return rows.clone().requires_grad_(requires_grad), weights


@pytest.mark.parametrize("backend", ["loop", None])
def test_the_operators_pass_opcheck_of_torch(backend: str | None) -> None:
    rows, weights = draw_operands()
    ops, grad = torch.ops.lightning_megatron, draw("grad", shape=(NUM_ROWS, OUT))
    torch.library.opcheck(ops.grouped_linear.default, (rows, weights, ENDS, backend))
    weights = [weight.detach() for weight in weights]
    torch.library.opcheck(ops.grouped_linear_input_gradient.default, (grad, weights, ENDS, backend))
    torch.library.opcheck(
        ops.grouped_linear_weight_gradients.default, (grad, rows.detach(), ENDS, backend)
    )


def test_one_operator_adds_weight_gradients_to_all_slots_that_accept_them() -> None:
    grad, rows = draw("grad", shape=(NUM_ROWS, OUT)), draw("rows", shape=(NUM_ROWS, IN))
    notices: list[int] = []

    def make_slots(is_empty: bool) -> list[GradientSlot]:
        slots = []
        for number in range(4):
            slot = GradientSlot(
                torch.ones(OUT, IN, dtype=torch.float64),
                on_gradient=partial(notices.append, number),
                accepts=partial(bool, number != 2),
                scale=0.5,
            )
            slot.is_empty = is_empty
            slots.append(slot)
        return slots

    for is_empty in (True, False):
        actual_slots, expected_slots = make_slots(is_empty), make_slots(is_empty)
        LoopOperators.add_weight_gradients(grad, rows, ENDS, actual_slots)
        assert notices == [0, 1, 3]
        Loop.add_weight_gradients(grad, rows, ENDS, expected_slots)
        notices.clear()
        for actual, expected in zip(actual_slots, expected_slots, strict=True):
            assert torch.equal(actual.gradient, expected.gradient)
            assert actual.is_empty == expected.is_empty
    sums = [torch.ones(OUT, IN, dtype=torch.float64) for _ in range(4)]
    flags = [True, False, True, False]
    torch.library.opcheck(
        torch.ops.lightning_megatron.grouped_linear_add_weight_gradients.default,
        (grad, rows, ENDS, sums, flags, flags, [1.0] * 4),
    )


def test_a_compiled_product_equals_the_eager_one_also_with_frozen_operands() -> None:
    compiled = torch.compile(grouped_linear, fullgraph=True, backend="aot_eager")
    for frozen in (None, "rows", 2):
        rows, weights = draw_operands()
        leaves = {"rows": rows, **dict(enumerate(weights))}
        if frozen is not None:
            leaves.pop(frozen).requires_grad_(False)
        output_gradient = draw("outer", shape=(NUM_ROWS, OUT))
        actual_output, expected_output = (
            compiled(rows, weights, ENDS),
            grouped_linear(rows, weights, ENDS),
        )
        assert torch.equal(actual_output, expected_output)
        pairs = (
            torch.autograd.grad(output, tuple(leaves.values()), output_gradient)
            for output in (actual_output, expected_output)
        )
        assert all(torch.equal(actual, expected) for actual, expected in zip(*pairs, strict=True))


def test_experts_compile_into_one_graph() -> None:
    config = ExpertsConfig(num_experts=4, top_k=2, ffn_hidden_size=8)
    wrapped = nn.ModuleDict({"experts": GroupedMLP(IN, config, ParallelMesh.single()).double()})
    initialize_(wrapped, "cpu", 0)
    module = wrapped["experts"]
    rows, probabilities = (
        draw("rows", shape=(NUM_ROWS, IN)),
        draw("probabilities", shape=(NUM_ROWS,)),
    )
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    expected_output = module(rows, probabilities, ENDS)
    expected_gradients = torch.autograd.grad(
        expected_output.square().sum(), list(module.parameters())
    )
    output = compiled(rows, probabilities, ENDS)
    gradients = torch.autograd.grad(output.square().sum(), list(module.parameters()))
    assert torch.allclose(output, expected_output, atol=1e-12, rtol=0)
    assert all(
        torch.allclose(actual, expected, atol=1e-12, rtol=0)
        for actual, expected in zip(gradients, expected_gradients, strict=True)
    )
