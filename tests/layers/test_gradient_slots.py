"""Layers that add gradients to slots get the gradients of plain autograd, in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers import regions
from lightning_megatron.layers.embedding import (
    InputEmbedding,
    PositionEmbedding,
    VocabParallelEmbedding,
    VocabParallelHead,
    vocab_logits,
)
from lightning_megatron.layers.gradient_slot import GradientSlot, set_slot
from lightning_megatron.layers.init import initialize_
from lightning_megatron.layers.linear import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.layers.parameter_stack import ParameterStack
from lightning_megatron.layers.weight_gradient_queue import WeightGradientQueue
from lightning_megatron.plan.layout import ParallelLayout
from tests.oracles import assert_equal
from tests.recorded import record_starts
from tests.world import run_world

S, B, D, F_OUT, V = 8, 3, 16, 12, 150

LAYOUTS = [(1, False), (2, False), (2, True), (4, False), (4, True)]

Run = Callable[[nn.Module, Tensor], Tensor]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def run_once(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x)


def run_twice(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x) + layer(x * 0.5 if x.is_floating_point() else x.flip(0))


def run_recomputed(layer: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(layer, x, use_reentrant=False)


class TiedEmbedding(nn.Module):
    """Use one table as embedding and head, as a tied GPT on one stage does."""

    def __init__(self, mesh: ParallelMesh) -> None:
        super().__init__()
        self.word, self.mesh = VocabParallelEmbedding(V, D, mesh), mesh

    def forward(self, tokens: Tensor) -> Tensor:
        return vocab_logits(self.word(tokens).tanh(), self.word.weight, self.mesh)


def attach_slots(
    layer: nn.Module,
    dtype: torch.dtype = torch.float64,
    queue: WeightGradientQueue | None = None,
) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Give every parameter a slot over memory of NaN; return the gradients and the number of
    notices of each parameter.
    """
    gradients, calls = {}, dict.fromkeys(dict(layer.named_parameters()), 0)
    for name, parameter in layer.named_parameters():
        gradients[name] = torch.full_like(parameter, torch.nan, dtype=dtype)

        def count(name: str = name) -> None:
            calls[name] += 1

        set_slot(parameter, GradientSlot(gradients[name], count, queue=queue))
    return gradients, calls


def compare(layer: nn.Module, x: Tensor, run: Run, case_name: str) -> None:
    """Run forward and backward with and without slots and compare outputs and gradients."""
    initialize_(layer, "cpu", seed=3)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(20.0)
    plain = copy.deepcopy(layer)
    gradients, calls = attach_slots(layer)
    inputs = [x.clone().requires_grad_(x.is_floating_point()) for _ in range(2)]
    outputs = [run(module, x_copy) for module, x_copy in zip((plain, layer), inputs, strict=True)]
    assert_equal(outputs[1], outputs[0], f"{case_name}: output")
    for output in outputs:
        output.backward(draw(*output.shape, seed=7))
    if x.is_floating_point():
        assert inputs[0].grad is not None
        assert inputs[1].grad is not None
        assert_equal(inputs[1].grad, inputs[0].grad, f"{case_name}: input gradient")
    for (name, parameter), plain_parameter in zip(
        layer.named_parameters(), plain.parameters(), strict=True
    ):
        assert parameter.grad is None, f"{case_name}: autograd got a gradient of {name}"
        assert calls[name] >= 1, f"{case_name}: {name} reported no gradient"
        assert plain_parameter.grad is not None
        assert_equal(gradients[name], plain_parameter.grad, f"{case_name}: gradient of {name}")


def make_cases(mesh: ParallelMesh) -> Iterator[tuple[str, nn.Module, Tensor]]:
    seq, part = S // (mesh.tp.size if mesh.sequence_parallel else 1), D // mesh.tp.size
    for bias in (True, False):
        yield "column", ColumnParallelLinear(D, F_OUT, mesh, bias=bias), draw(seq, B, D)
        yield "row", RowParallelLinear(D, F_OUT, mesh, bias=bias), draw(S, B, part)
    yield (
        "gathered column",
        ColumnParallelLinear(D, F_OUT, mesh, gather_output=True),
        draw(seq, B, D),
    )
    yield "head", VocabParallelHead(V, D, mesh), draw(seq, B, D)
    tokens = torch.randint(0, V, (B, S), generator=torch.Generator().manual_seed(4))
    tokens[0] = torch.tensor([5, V - 1, 5, 0, 5, 5, V - 1, 2])
    yield "embedding", VocabParallelEmbedding(V, D, mesh), tokens
    yield (
        "embedding with padding",
        VocabParallelEmbedding(V, D, mesh, padding_id=int(tokens[0, 1])),
        tokens,
    )
    yield "tied", TiedEmbedding(mesh), tokens


def check_overlap(mesh: ParallelMesh) -> None:
    """Check the order of communication and products in the backward pass."""
    events: list[str] = []

    layer = ColumnParallelLinear(D, F_OUT, mesh)
    initialize_(layer, "cpu", seed=0)
    attach_slots(layer)
    seq = S // (mesh.tp.size if mesh.sequence_parallel else 1)
    output = layer(draw(seq, B, D).requires_grad_())
    with pytest.MonkeyPatch.context() as patch, record_products(events):
        record_starts(patch, regions, ("all_gather", "reduce_scatter", "all_reduce"), events)
        output.backward(draw(*output.shape))
    total = "reduce_scatter" if mesh.sequence_parallel else "all_reduce"
    expected = ["input gradient", f"{total} starts", "weight gradient", f"{total} ends"]
    if mesh.sequence_parallel:
        expected = ["all_gather starts", *expected[:2], "all_gather ends", *expected[2:]]
    assert events == expected, events


@contextmanager
def record_products(events: list[str]) -> Iterator[None]:
    class RecordProducts(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is torch.ops.aten.mm.default:
                events.append("input gradient")
            elif func is torch.ops.aten.addmm.out:
                events.append("weight gradient")
            return func(*args, **(kwargs or {}))

    with RecordProducts():
        yield


def check_all(rank: int, size: int) -> None:
    torch.set_default_dtype(torch.float64)
    for tp, sequence_parallel in LAYOUTS:
        mesh = ParallelMesh.create(
            ParallelLayout(world_size=4, tp=tp), sequence_parallel=sequence_parallel
        )
        for name, layer, x in make_cases(mesh):
            for run in (run_once, run_twice, run_recomputed):
                compare(layer, x, run, f"{name} {run.__name__} tp={tp} sp={sequence_parallel}")
        if tp > 1:
            check_overlap(mesh)
        # On CPUs a pipelined product has one piece, but the layers run its code path.
        pipelined = replace(mesh, tp=replace(mesh.tp, overlaps_matmul=True))
        for name, layer, x in make_cases(pipelined):
            compare(layer, x, run_once, f"{name} pipelined tp={tp} sp={sequence_parallel}")
        mesh.destroy()


def test_slots_hold_the_gradients_of_autograd_in_every_layout() -> None:
    run_world(check_all, 4)


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_frozen_parameters_and_inputs_get_no_gradient(kind: Any) -> None:
    mesh, x = ParallelMesh.single(), draw(S, B, D)
    for frozen in ({"weight"}, {"bias"}, {"weight", "bias"}, {"input"}, {"input", "bias"}):
        layer = kind(D, F_OUT, mesh).double()
        initialize_(layer, "cpu", seed=1)
        gradients, calls = attach_slots(layer)
        for name in frozen - {"input"}:
            getattr(layer, name).requires_grad_(False)
        layer_input = x.clone().requires_grad_("input" not in frozen)
        layer(layer_input).backward(draw(S, B, F_OUT, seed=2))
        for name in ("weight", "bias"):
            assert calls[name] == (name not in frozen)
            assert bool(gradients[name].isnan().any()) == (name in frozen)
            assert getattr(layer, name).grad is None
        if "input" in frozen:
            assert layer_input.grad is None
        else:
            assert layer_input.grad is not None
            assert_equal(
                layer_input.grad,
                draw(S, B, F_OUT, seed=2) @ layer.weight,
                f"input gradient, frozen {frozen}",
            )


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_only_tensors_that_the_backward_pass_needs_are_saved(kind: Any) -> None:
    layer = kind(D, F_OUT, ParallelMesh.single()).double()
    attach_slots(layer)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        layer(draw(S, B, D).requires_grad_())
        assert [tuple(t.shape) for t in saved] == [(S, B, D), (F_OUT, D)]
        saved.clear()
        layer(draw(S, B, D))
        assert [tuple(t.shape) for t in saved] == [(S, B, D)]
        saved.clear()
        layer.weight.requires_grad_(False)
        layer(draw(S, B, D).requires_grad_())
        assert [tuple(t.shape) for t in saved] == [(F_OUT, D)]
        saved.clear()
        with torch.no_grad():
            layer(draw(S, B, D).requires_grad_())
        assert not saved


@pytest.mark.parametrize("kind", ["column", "row", "head", "embedding"])
def test_the_backward_pass_allocates_no_tensor_of_the_size_of_the_weight(kind: str) -> None:
    case_of_kind = {name: (layer, x) for name, layer, x in make_cases(ParallelMesh.single())}
    layer, x = case_of_kind[kind]
    layer.double()
    initialize_(layer, "cpu", seed=1)
    gradients, _ = attach_slots(layer)
    output = layer(x.requires_grad_(x.is_floating_point()))
    allocating_functions: list[str] = []

    class RecordAllocations(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            shape, slot_memory = layer.weight.shape, gradients["weight"]
            if isinstance(result, Tensor) and result.shape in (shape, shape[::-1]):
                allowed_tensors = (slot_memory, layer.weight)
                if all(
                    result.untyped_storage().data_ptr() != allowed.untyped_storage().data_ptr()
                    for allowed in allowed_tensors
                ):
                    allocating_functions.append(str(func))
            return result

    with RecordAllocations():
        output.backward(torch.ones_like(output))
    assert not allocating_functions
    assert not gradients["weight"].isnan().any()


def test_bfloat16_layers_sum_gradients_of_microbatches_in_a_float32_slot() -> None:
    mesh = ParallelMesh.single()
    layer = ColumnParallelLinear(D, F_OUT, mesh).bfloat16()
    initialize_(layer, "cpu", seed=1)
    gradients, calls = attach_slots(layer, torch.float32)
    expected = torch.zeros(F_OUT, D)
    for seed in range(3):
        x, grad = draw(S, B, D, seed=seed).bfloat16(), draw(S, B, F_OUT, seed=seed + 9).bfloat16()
        layer(x).backward(grad)
        expected += grad.float().flatten(0, 1).t() @ x.float().flatten(0, 1)
    assert calls == {"weight": 3, "bias": 3}
    assert_equal(gradients["weight"], expected, "sum over microbatches", tolerance=2e-2)


def test_all_add_methods_of_a_slot_multiply_by_its_scale() -> None:
    left, right, index = draw(6, V), draw(6, D), torch.tensor([2, 0, 5, 7, 1, 3])
    rows = torch.zeros(V, D, dtype=torch.float64).index_add(0, index, right)
    add_methods: dict[str, tuple[Callable[[GradientSlot], None], Tensor]] = {
        "whole": (lambda slot: slot.add(left.t() @ right), left.t() @ right),
        "product": (lambda slot: slot.add_product(left, right), left.t() @ right),
        "rows": (lambda slot: slot.add_rows(index, right), rows),
    }
    for method_name, (add, gradient) in add_methods.items():
        slot = GradientSlot(
            torch.full((V, D), torch.nan, dtype=torch.float64), lambda: None, scale=0.75
        )
        for num_additions in (1, 2):
            add(slot)
            assert_equal(
                slot.gradient,
                num_additions * 0.75 * gradient,
                f"{method_name}, {num_additions} times",
            )


def test_layers_leave_out_the_bias_with_add_bias_false() -> None:
    x = draw(S, B, D)
    for kind in (ColumnParallelLinear, RowParallelLinear):
        layer = kind(D, F_OUT, ParallelMesh.single()).double()
        initialize_(layer, "cpu", seed=1)
        with torch.no_grad():
            layer.bias.fill_(3.0)
        assert_equal(layer(x, add_bias=False), F.linear(x, layer.weight), "output without bias")
        assert_equal(layer(x, add_bias=False) + layer.bias, layer(x), "output with bias")


def test_parameters_without_slots_keep_the_gradient_of_autograd() -> None:
    mesh = ParallelMesh.single()
    layer = InputEmbedding(
        VocabParallelEmbedding(V, D, mesh), PositionEmbedding(S, D, mesh), mesh=mesh
    ).double()
    initialize_(layer, "cpu", seed=1)
    gradient = torch.full_like(layer.word.weight, torch.nan)
    set_slot(layer.word.weight, GradientSlot(gradient, lambda: None))
    layer(torch.arange(B * S).view(B, S)).sum().backward()
    assert_equal(
        gradient.sum(1),
        torch.cat([torch.full((B * S,), float(D)), torch.zeros(256 - B * S)]),
        "words",
    )
    assert layer.position is not None
    assert layer.position.weight.grad is not None
    assert_equal(layer.position.weight.grad, torch.full((S, D), float(B)), "positions")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_add_sum_adds_the_sum_of_partial_gradients(dtype: torch.dtype, scale: float) -> None:
    memory, calls, accepts = torch.full((2, D), torch.nan, dtype=dtype), [0], [True]

    def count() -> None:
        calls[0] += 1

    slot = GradientSlot(memory, count, lambda: accepts[0], scale=scale)
    parts = draw(5, 2, D)
    slot.add_sum(parts)
    expected = (parts.sum(0) * scale).to(dtype)
    tolerance = 1e-10 if dtype == torch.float64 else 1e-6
    assert_equal(memory, expected, "the first gradient of a step", tolerance)
    slot.add_sum(2 * parts)
    assert_equal(memory, 3 * expected, "the second gradient", tolerance)
    accepts[0] = False
    slot.add_sum(parts)
    assert_equal(memory, 3 * expected, "a gradient that the owner rejects", tolerance)
    assert calls == [2]


def stack_with_slots() -> tuple[ParameterStack, list[GradientSlot]]:
    memory = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    parts = [nn.Parameter(memory[:2]), nn.Parameter(memory[2:])]
    slots = [GradientSlot(torch.zeros_like(part), lambda: None) for part in parts]
    for part, slot in zip(parts, slots, strict=True):
        set_slot(part, slot)
    return ParameterStack(parts), slots


def test_a_stack_with_slots_is_one_leaf_until_a_parameter_is_frozen_or_moved() -> None:
    stack, _ = stack_with_slots()
    leaf = stack.concatenate()
    assert leaf.grad_fn is None
    assert leaf.requires_grad
    assert stack.concatenate() is leaf
    assert leaf.data_ptr() == stack.parts[0].data_ptr()
    stack.parts[1].requires_grad_(False)
    assert stack.concatenate().grad_fn is not None, (
        "the graph passes on the gradient of the part that is not frozen"
    )
    stack.parts[1].requires_grad_(True)
    assert stack.concatenate().grad_fn is None
    stack.parts[1].data = torch.ones(3, 3)
    assert (stack.concatenate()[2:] == 1).all(), "the part lies elsewhere now"


def test_slots_of_a_stack_get_the_gradient_of_autograd() -> None:
    stack, slots = stack_with_slots()
    for _ in range(2):
        (stack.concatenate() * torch.arange(5.0)[:, None]).sum().backward()
    expected = 2 * torch.arange(5.0)[:, None].expand(5, 3)
    assert torch.equal(torch.cat([slot.gradient for slot in slots]), expected)
    assert stack.concatenate().grad is None
