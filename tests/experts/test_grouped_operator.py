"""Grouped products are operators that torch's own checks accept, and that compile into one graph."""

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
def fresh_compiler() -> None:
    """Forget what other tests have compiled, and which functions torch no longer compiles."""
    torch.compiler.reset()


def operands(requires_grad: bool = True) -> tuple[Tensor, list[Tensor]]:
    rows, stack = draw("rows", shape=(NUM_ROWS, IN)), draw("weights", shape=(4, OUT, IN))
    weights = [weight.clone().requires_grad_(requires_grad) for weight in stack]
    return rows.clone().requires_grad_(requires_grad), weights


@pytest.mark.parametrize("backend", ["loop", None])
def test_torch_accepts_schema_fakes_and_autograd_of_the_operators(backend: str | None) -> None:
    rows, weights = operands()
    ops, grad = torch.ops.lightning_megatron, draw("grad", shape=(NUM_ROWS, OUT))
    torch.library.opcheck(ops.grouped_linear.default, (rows, weights, ENDS, backend))
    weights = [weight.detach() for weight in weights]
    torch.library.opcheck(ops.grouped_linear_input_gradient.default, (grad, weights, ENDS, backend))
    torch.library.opcheck(
        ops.grouped_linear_weight_gradients.default, (grad, rows.detach(), ENDS, backend)
    )


def test_one_operator_adds_all_weight_gradients_to_the_slots_that_accept_them() -> None:
    grad, rows = draw("grad", shape=(NUM_ROWS, OUT)), draw("rows", shape=(NUM_ROWS, IN))
    arrived: list[int] = []

    def slots(is_empty: bool) -> list[GradientSlot]:
        made = []
        for number in range(4):
            slot = GradientSlot(
                torch.ones(OUT, IN, dtype=torch.float64),
                on_gradient=partial(arrived.append, number),
                accepts=partial(bool, number != 2),
                scale=0.5,
            )
            slot.is_empty = is_empty
            made.append(slot)
        return made

    for is_empty in (True, False):
        found, expected = slots(is_empty), slots(is_empty)
        LoopOperators.add_weight_gradients(grad, rows, ENDS, found)
        assert arrived == [0, 1, 3]
        Loop.add_weight_gradients(grad, rows, ENDS, expected)
        arrived.clear()
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one.gradient, other.gradient)
            assert one.is_empty == other.is_empty
    sums = [torch.ones(OUT, IN, dtype=torch.float64) for _ in range(4)]
    flags = [True, False, True, False]
    torch.library.opcheck(
        torch.ops.lightning_megatron.grouped_linear_add_weight_gradients.default,
        (grad, rows, ENDS, sums, flags, flags, [1.0] * 4),
    )


def test_a_compiled_product_equals_the_eager_one_also_where_parts_are_frozen() -> None:
    compiled = torch.compile(grouped_linear, fullgraph=True, backend="aot_eager")
    for frozen in (None, "rows", 2):
        rows, weights = operands()
        leaves = {"rows": rows, **dict(enumerate(weights))}
        if frozen is not None:
            leaves.pop(frozen).requires_grad_(False)
        outer = draw("outer", shape=(NUM_ROWS, OUT))
        found, expected = compiled(rows, weights, ENDS), grouped_linear(rows, weights, ENDS)
        assert torch.equal(found, expected)
        pairs = (
            torch.autograd.grad(output, tuple(leaves.values()), outer)
            for output in (found, expected)
        )
        assert all(torch.equal(one, other) for one, other in zip(*pairs, strict=True))


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
    expected = module(rows, probabilities, ENDS)
    wanted = torch.autograd.grad(expected.square().sum(), list(module.parameters()))
    output = compiled(rows, probabilities, ENDS)
    found = torch.autograd.grad(output.square().sum(), list(module.parameters()))
    assert torch.allclose(output, expected, atol=1e-12, rtol=0)
    assert all(
        torch.allclose(one, other, atol=1e-12, rtol=0)
        for one, other in zip(found, wanted, strict=True)
    )
