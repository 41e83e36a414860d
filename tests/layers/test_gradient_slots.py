"""Layers add gradients to slots, now or in a later weight half, as autograd would sum them."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_megatron.experts.compute.grouped_linear import grouped_linear
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.gradient_slot import GradientSlot, set_slot, slot_of
from lightning_megatron.layers.init import initialize_
from lightning_megatron.layers.linear import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.layers.parameter_stack import ParameterStack
from lightning_megatron.layers.regions import column_linear
from lightning_megatron.layers.slot_states import (
    fill_empty,
    preserve_states,
    state_of,
)
from lightning_megatron.layers.weight_gradient_queue import WeightGradientQueue
from tests.layers.small_layers import F_OUT, B, D, S, V, attach_slots, draw, make_cases
from tests.live_memory import LiveMemory
from tests.oracles import assert_equal


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


def test_layers_leave_out_the_bias_and_slots_leave_other_parameters_to_autograd() -> None:
    x = draw(S, B, D)
    for kind in (ColumnParallelLinear, RowParallelLinear):
        layer: Any = kind(D, F_OUT, ParallelMesh.single()).double()
        initialize_(layer, "cpu", seed=1)
        with torch.no_grad():
            layer.bias.fill_(3.0)
        gradient = torch.full_like(layer.weight, torch.nan)
        set_slot(layer.weight, GradientSlot(gradient, lambda: None))
        assert_equal(layer(x, add_bias=False), F.linear(x, layer.weight), "output without bias")
        layer(x).sum().backward()
        assert_equal(layer.bias.grad, torch.full_like(layer.bias, S * B), "bias")
        assert_equal(gradient, x.sum((0, 1)).expand(F_OUT, D), "weight")


@pytest.mark.parametrize(("dtype", "scale"), [(torch.float64, 0.5), (torch.float32, 1.0)])
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


def test_slots_of_a_stack_get_the_gradient_of_autograd() -> None:
    stack, slots = stack_with_slots()
    for _ in range(2):
        (stack.concatenate() * torch.arange(5.0)[:, None]).sum().backward()
    expected = 2 * torch.arange(5.0)[:, None].expand(5, 3)
    assert torch.equal(torch.cat([slot.gradient for slot in slots]), expected)
    assert stack.concatenate().grad is None


def make_slots(*values: float) -> tuple[list[GradientSlot], list[int]]:
    """Return slots over memory with these values, and a list of the slots that gave notice."""
    notices: list[int] = []
    slots = [
        GradientSlot(torch.full((2,), value), lambda index=index: notices.append(index))
        for index, value in enumerate(values)
    ]
    return slots, notices


def test_fill_empty_writes_zeros_into_empty_slots_only() -> None:
    slots, notices = make_slots(float("nan"), float("nan"))
    slots[0].add(torch.full((2,), 3.0))
    fill_empty(slots)
    assert state_of(slots) == "filled"
    assert notices == [0]
    for slot in slots:
        slot.add(torch.full((2,), 4.0))
    assert [slot.gradient.tolist() for slot in slots] == [[7.0, 7.0], [4.0, 4.0]]


def test_preserve_states_restores_states_after_an_error() -> None:
    slots, _ = make_slots(1.0, 2.0)
    slots[0].add(torch.ones(2))

    def change() -> None:
        with preserve_states(slots):
            slots[0].clear()
            slots[1].add(torch.ones(2))
            raise KeyError

    with pytest.raises(KeyError):
        change()
    assert [slot.is_empty for slot in slots] == [False, True]


def test_weight_gradients_of_experts_are_deferred_to_the_weight_half() -> None:
    queue, rows, output_gradient = WeightGradientQueue(), draw(10, 6), draw(10, 4, seed=1)
    ends = torch.tensor([3, 3, 10], dtype=torch.int32)
    weights = [nn.Parameter(draw(4, 6, seed=2 + number)) for number in range(3)]
    sums = [torch.full_like(weight, torch.nan) for weight in weights]
    notices: list[int] = []
    for number, weight in enumerate(weights):
        count = lambda number=number: notices.append(number)  # noqa: E731
        set_slot(weight, GradientSlot(sums[number], count, queue=queue))
    rows.requires_grad_()
    with queue.open(0):
        grouped_linear(rows, weights, ends, "loop").backward(output_gradient)
    assert not notices
    assert rows.grad is not None
    expected = torch.cat([output_gradient[:3] @ weights[0], output_gradient[3:] @ weights[2]])
    assert_equal(rows.grad, expected, "input gradient")
    queue.run(0)
    assert notices == [0, 1, 2]
    for total, group in zip(sums, (slice(0, 3), slice(3, 3), slice(3, 10)), strict=True):
        assert_equal(total, output_gradient[group].t() @ rows[group], "weight gradient")


def test_the_gradient_of_a_fused_weight_is_deferred_to_the_weight_half() -> None:
    queue, mesh, memory = WeightGradientQueue(), ParallelMesh.single(), draw(5, D)
    parts = [nn.Parameter(memory[:2]), nn.Parameter(memory[2:])]
    sums = torch.full_like(memory, torch.nan)
    for part, total in zip(parts, (sums[:2], sums[2:]), strict=True):
        set_slot(part, GradientSlot(total, lambda: None, queue=queue))
    stack, x, grad = ParameterStack(parts), draw(S, B, D), draw(S, B, 5, seed=1)
    with queue.open(0):
        column_linear(x, stack.concatenate(), None, mesh).backward(grad)
    assert sums.isnan().all()
    queue.run(0)
    assert_equal(sums, grad.flatten(0, 1).t() @ x.flatten(0, 1), "gradient of the stack")


def test_the_queue_keeps_the_factors_of_deferred_products_until_they_have_run() -> None:
    queue, layer = WeightGradientQueue(), ColumnParallelLinear(D, F_OUT, ParallelMesh.single())
    layer.double()
    initialize_(layer, "cpu", seed=1)
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


def test_a_failed_input_half_leaves_no_deferred_products() -> None:
    queue = WeightGradientQueue()
    layer = ColumnParallelLinear(D, F_OUT, ParallelMesh.single()).double()
    initialize_(layer, "cpu", seed=1)
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


def test_mixed_input_halves_are_refused() -> None:
    queue = WeightGradientQueue()
    with queue.open(1):
        with pytest.raises(ValueError, match="its own weight half.*got 2, while.*is open"):
            queue.open(2).__enter__()
        assert queue.is_open
    with (
        pytest.raises(ValueError, match=r"is closed and has \[1\].*Call run\(\)"),
        queue.open(1),
    ):
        pass
