"""Layers add gradients to slots, now or in a later weight half, as autograd would sum them."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_megatron.experts.compute.grouped_linear import grouped_linear
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.linear.linear import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.layers.linear.regions import column_linear
from lightning_megatron.layers.parameters.gradient_slot import (
    GradientSlot,
    fill_empty,
    preserve_states,
    set_slot,
    slot_of,
)
from lightning_megatron.layers.parameters.init import initialize_
from lightning_megatron.layers.parameters.parameter_stack import ParameterStack
from lightning_megatron.layers.parameters.weight_gradient_queue import WeightGradientQueue
from lightning_megatron.memory.live_memory import LiveMemory
from tests.layers.small_layers import F_OUT, B, D, S, V, attach_slots, draw, make_cases
from tests.oracles import assert_equal

KINDS = (ColumnParallelLinear, RowParallelLinear)


def make_layer(kind: Any = ColumnParallelLinear, dtype: torch.dtype = torch.float64) -> Any:
    layer = kind(D, F_OUT, ParallelMesh.single()).to(dtype)
    initialize_(layer, "cpu", seed=1)
    return layer


@pytest.mark.parametrize("kind", KINDS)
def test_a_frozen_weight_multiplies_all_positions_of_all_samples_in_one_product(kind):
    layer = make_layer(kind).requires_grad_(False)
    # As attention leaves it: each sample is a block of memory.
    x = draw(B, S, D).requires_grad_()
    with Products() as products:
        output = layer(x.transpose(0, 1))
        output.backward(draw(S, B, F_OUT, seed=2))
    assert products.names == {"mm", "addmm"}
    assert_equal(output, F.linear(x, layer.weight, layer.bias).transpose(0, 1), "output")


class Products(TorchDispatchMode):
    """Record of the products of matrices inside the block."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        self.names |= {name} & {"mm", "addmm", "bmm", "baddbmm"}
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", KINDS)
def test_frozen_parameters_and_inputs_get_no_gradient(kind):
    grad = draw(S, B, F_OUT, seed=2)
    for frozen in ({"weight"}, {"bias"}, {"weight", "bias"}, {"input"}, {"input", "bias"}):
        layer = make_layer(kind)
        gradients, calls = attach_slots(layer)
        for name in frozen - {"input"}:
            getattr(layer, name).requires_grad_(False)
        x = draw(S, B, D).requires_grad_("input" not in frozen)
        layer(x).backward(grad)
        for name in ("weight", "bias"):
            assert calls[name] == (name not in frozen)
            assert bool(gradients[name].isnan().any()) == (name in frozen)
            assert getattr(layer, name).grad is None
        assert (x.grad is None) == ("input" in frozen)
        if x.grad is not None:
            assert_equal(x.grad, grad @ layer.weight, f"input gradient, frozen {frozen}")


@pytest.mark.parametrize("kind", KINDS)
def test_only_tensors_that_the_backward_pass_needs_are_saved(kind):
    layer = make_layer(kind)
    attach_slots(layer)

    def shapes_saved(needs_gradient: bool) -> list[tuple[int, ...]]:
        saved: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            layer(draw(S, B, D).requires_grad_(needs_gradient))
        return [tuple(tensor.shape) for tensor in saved]

    assert shapes_saved(True) == [(S, B, D), (F_OUT, D)]
    assert shapes_saved(False) == [(S, B, D)]
    layer.weight.requires_grad_(False)
    assert shapes_saved(True) == [(F_OUT, D)]
    with torch.no_grad():
        assert shapes_saved(True) == []


class RecordAllocations(TorchDispatchMode):
    """Record the functions that allocate a tensor of the shape of one of these, or transposed."""

    def __init__(self, *allowed: Tensor) -> None:
        super().__init__()
        self.shapes = (allowed[0].shape, allowed[0].shape[::-1])
        self.allowed = {tensor.untyped_storage().data_ptr() for tensor in allowed}
        self.functions: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.shape in self.shapes:
            is_allowed = result.untyped_storage().data_ptr() in self.allowed
            self.functions += [] if is_allowed else [str(func)]
        return result


def test_the_backward_pass_allocates_no_tensor_of_the_size_of_the_weight():
    for name, layer, x in make_cases(ParallelMesh.single()):
        if name not in ("column", "row", "head", "embedding"):
            continue
        initialize_(layer.double(), "cpu", seed=1)
        gradients, _ = attach_slots(layer)
        output = layer(x.clone().requires_grad_(x.is_floating_point()))
        with RecordAllocations(gradients["weight"], layer.weight) as allocations:
            output.backward(torch.ones_like(output))
        assert allocations.functions == [], name
        assert not gradients["weight"].isnan().any()


def test_bfloat16_layers_sum_gradients_of_microbatches_in_a_float32_slot():
    layer = make_layer(dtype=torch.bfloat16)
    gradients, calls = attach_slots(layer, torch.float32)
    expected = torch.zeros(F_OUT, D)
    for seed in range(3):
        x, grad = draw(S, B, D, seed=seed).bfloat16(), draw(S, B, F_OUT, seed=seed + 9).bfloat16()
        layer(x).backward(grad)
        expected += grad.float().flatten(0, 1).t() @ x.float().flatten(0, 1)
    assert calls == {"weight": 3, "bias": 3}
    assert_equal(gradients["weight"], expected, "sum over microbatches", tolerance=2e-2)


def test_all_add_methods_of_a_slot_multiply_by_its_scale():
    left, right, index = draw(6, V), draw(6, D), torch.tensor([2, 0, 5, 7, 1, 3])
    parts, product = draw(5, V, D), left.t() @ right
    rows = torch.zeros(V, D, dtype=torch.float64).index_add(0, index, right)
    wide, narrow = torch.float64, torch.float32
    add_methods: dict[str, tuple[Callable[[GradientSlot], None], Tensor, torch.dtype]] = {
        "whole": (lambda slot: slot.add(product), product, wide),
        "product": (lambda slot: slot.add_product(left, right), product, wide),
        "rows": (lambda slot: slot.add_rows(index, right), rows, wide),
        "parts of a sum": (lambda slot: slot.add_sum(parts), parts.sum(0), wide),
        "parts in float32": (lambda slot: slot.add_sum(parts), parts.sum(0), narrow),
    }
    for name, (add, gradient, dtype) in add_methods.items():
        memory, calls, accepts = torch.full((V, D), torch.nan, dtype=dtype), [0], [True]
        count = lambda calls=calls: calls.append(1)  # noqa: E731
        slot = GradientSlot(memory, count, lambda accepts=accepts: accepts[0], scale=0.75)
        tolerance = 1e-10 if dtype == wide else 1e-6
        for number in (1, 2):
            add(slot)
            assert_equal(memory.double(), number * 0.75 * gradient, name, tolerance)
        accepts[0] = False
        add(slot)
        assert_equal(memory.double(), 1.5 * gradient, "the owner rejects it", tolerance)
        assert len(calls) == 3, name


def test_layers_leave_out_the_bias_and_slots_leave_other_parameters_to_autograd():
    x = draw(S, B, D)
    for kind in KINDS:
        layer = make_layer(kind)
        with torch.no_grad():
            layer.bias.fill_(3.0)
        gradient = torch.full_like(layer.weight, torch.nan)
        set_slot(layer.weight, GradientSlot(gradient, lambda: None))
        assert_equal(layer(x, add_bias=False), F.linear(x, layer.weight), "output without bias")
        layer(x).sum().backward()
        assert_equal(layer.bias.grad, torch.full_like(layer.bias, S * B), "bias")
        assert_equal(gradient, x.sum((0, 1)).expand(F_OUT, D), "weight")


def test_slots_of_a_stack_get_the_gradient_of_autograd_now_or_in_the_weight_half():
    queue, memory = WeightGradientQueue(), draw(5, D)
    parts = [nn.Parameter(memory[:2]), nn.Parameter(memory[2:])]
    sums = torch.full_like(memory, torch.nan)
    for part, total in zip(parts, (sums[:2], sums[2:]), strict=True):
        set_slot(part, GradientSlot(total, lambda: None, queue=queue))
    stack, x, grad = ParameterStack(parts), draw(S, B, D), draw(S, B, 5, seed=1)
    with queue.open(0):
        column_linear(x, stack.concatenate(), None, ParallelMesh.single()).backward(grad)
    assert sums.isnan().all()
    queue.run(0)
    expected = grad.flatten(0, 1).t() @ x.flatten(0, 1)
    assert_equal(sums, expected, "gradient of the stack")
    (stack.concatenate() * torch.arange(5.0)[:, None]).sum().backward()
    assert_equal(sums, expected + torch.arange(5.0)[:, None], "sum")


def test_fill_empty_writes_zeros_into_empty_slots_only_and_states_are_restored():
    notices: list[int] = []
    slots = [
        GradientSlot(torch.full((2,), torch.nan), lambda index=index: notices.append(index))
        for index in range(2)
    ]
    slots[0].add(torch.full((2,), 3.0))
    with suppress(KeyError), preserve_states(slots):
        slots[0].clear()
        slots[1].add(torch.ones(2))
        raise KeyError
    assert [slot.is_empty for slot in slots] == [False, True]
    slots[0].gradient.fill_(3.0)
    notices.clear()
    fill_empty(slots)
    assert not any(slot.is_empty for slot in slots)
    for slot in slots:
        slot.add(torch.full((2,), 4.0))
    assert notices == [0, 1]
    assert [slot.gradient.tolist() for slot in slots] == [[7.0, 7.0], [4.0, 4.0]]


def test_weight_gradients_of_experts_are_deferred_to_the_weight_half():
    queue, rows, grad = WeightGradientQueue(), draw(10, 6).requires_grad_(), draw(10, 4, seed=1)
    ends = torch.tensor([3, 3, 10], dtype=torch.int32)
    weights = [nn.Parameter(draw(4, 6, seed=2 + number)) for number in range(3)]
    sums, notices = torch.full((3, 4, 6), torch.nan, dtype=torch.float64), list[int]()
    for number, (weight, total) in enumerate(zip(weights, sums, strict=True)):
        count = lambda number=number: notices.append(number)  # noqa: E731
        set_slot(weight, GradientSlot(total, count, queue=queue))
    with queue.open(0):
        grouped_linear(rows, weights, ends, "loop").backward(grad)
    assert not notices
    assert_equal(rows.grad, torch.cat([grad[:3] @ weights[0], grad[3:] @ weights[2]]), "input")
    queue.run(0)
    assert notices == [0, 1, 2]
    for total, group in zip(sums, (slice(0, 3), slice(3, 3), slice(3, 10)), strict=True):
        assert_equal(total, grad[group].t() @ rows[group], "weight gradient")


def test_the_queue_keeps_the_factors_of_deferred_products_until_they_have_run():
    queue, layer = WeightGradientQueue(), make_layer()
    gradients, _ = attach_slots(layer, queue=queue)
    x, memory = draw(S, B, D).requires_grad_(), LiveMemory()
    memory.leave_out([x, layer.weight, layer.bias, *gradients.values()])
    with memory:
        with queue.open(0):
            # The weight half does not need the inputs of `exp` and `sin`, which backward needs.
            layer(x.sin().exp()).sin().sum().backward()
        x.grad = None
        gc.collect()
        assert memory.now == S * B * (D + F_OUT) * x.element_size()
        queue.run(0)
        gc.collect()
        assert memory.now == 0


def test_a_failed_input_half_leaves_no_deferred_products():
    queue, layer = WeightGradientQueue(), make_layer()
    _, calls = attach_slots(layer, queue=queue)

    def fail(_: Tensor) -> None:
        raise RuntimeError("stop")

    x = draw(S, B, D).requires_grad_()
    x.register_hook(fail)
    with pytest.raises(RuntimeError, match="stop"), queue.open(0):
        layer(x).backward(draw(S, B, F_OUT))
    assert slot_of(layer.weight).open_queue is None
    queue.run(0)
    assert calls == {"weight": 0, "bias": 1}
    with queue.open(0):
        layer(draw(S, B, D)).backward(draw(S, B, F_OUT))
    queue.discard()
    queue.run(0)
    assert calls == {"weight": 0, "bias": 2}


def test_mixed_input_halves_are_refused():
    queue = WeightGradientQueue()
    with queue.open(1):
        with pytest.raises(ValueError, match="its own weight half.*got 2, while.*is open"):
            queue.open(2).__enter__()
        assert queue.is_open
    with pytest.raises(ValueError, match=r"is closed and has \[1\].*Call run\(\)"), queue.open(1):
        pass
