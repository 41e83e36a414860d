"""Layers that defer weight gradients to a queue get the gradients of plain autograd, in float64."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron.experts.compute.grouped_linear import grouped_linear
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers import regions
from lightning_megatron.layers.gradient_slot import GradientSlot, set_slot, slot_of
from lightning_megatron.layers.init import initialize_
from lightning_megatron.layers.linear import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.layers.low_rank import LowRank, LowRankUpdates
from lightning_megatron.layers.parameter_stack import ParameterStack
from lightning_megatron.layers.regions import column_linear
from lightning_megatron.layers.weight_gradient_queue import WeightGradientQueue
from lightning_megatron.plan.layout import ParallelLayout
from tests.layers.test_gradient_slots import (
    F_OUT,
    B,
    D,
    S,
    attach_slots,
    draw,
    make_cases,
    record_products,
    run_once,
    run_recomputed,
    run_twice,
)
from tests.live_memory import LiveMemory
from tests.oracles import assert_equal
from tests.recorded import record_starts
from tests.world import run_world

LAYOUTS = [(1, False), (2, False), (2, True)]
#: Parameters whose gradients the weight half adds, by the name of the layer in `make_cases`.
DEFERRED = {
    "column": {"weight"},
    "row": {"weight"},
    "gathered column": {"weight"},
    "head": {"weight"},
    "tied": {"word.weight"},
}


def compare(name: str, layer: nn.Module, x: Tensor, run: Any, case_name: str) -> None:
    """Run a backward pass in halves, and compare the gradients with those of the full pass."""
    initialize_(layer, "cpu", seed=3)
    plain = copy.deepcopy(layer)
    queue = WeightGradientQueue()
    gradients, calls = attach_slots(layer, queue=queue)
    inputs = [x.clone().requires_grad_(x.is_floating_point()) for _ in range(2)]
    outputs = [run(module, x_copy) for module, x_copy in zip((plain, layer), inputs, strict=True)]
    outputs[0].backward(draw(*outputs[0].shape, seed=7))
    with queue.open("half"):
        outputs[1].backward(draw(*outputs[1].shape, seed=7))
    assert not queue.is_open
    if x.is_floating_point():
        assert_equal(inputs[1].grad, inputs[0].grad, f"{case_name}: input gradient")
    calls_of_input_half = dict(calls)
    queue.run("half")
    for parameter in DEFERRED.get(name, ()):
        assert calls_of_input_half[parameter] < calls[parameter], (
            f"{case_name}: no deferred gradient of {parameter}"
        )
    for (parameter_name, parameter), plain_parameter in zip(
        layer.named_parameters(), plain.parameters(), strict=True
    ):
        assert parameter.grad is None, f"{case_name}: autograd got a gradient of {parameter_name}"
        assert calls_of_input_half[parameter_name] == calls[
            parameter_name
        ] or parameter_name in DEFERRED.get(name, ()), f"{case_name}: {parameter_name} came late"
        assert_equal(
            gradients[parameter_name],
            plain_parameter.grad,
            f"{case_name}: gradient of {parameter_name}",
        )
    all_calls = dict(calls)
    queue.run("half")
    assert calls == all_calls, f"{case_name}: a weight half ran twice"


def check_overlap(mesh: ParallelMesh) -> None:
    """Check that the weight half gathers each input during the previous product."""
    events: list[str] = []
    queue = WeightGradientQueue()
    layer = ColumnParallelLinear(D, F_OUT, mesh)
    initialize_(layer, "cpu", seed=0)
    attach_slots(layer, queue=queue)
    seq = S // (mesh.tp.size if mesh.sequence_parallel else 1)
    outputs = [layer(draw(seq, B, D).requires_grad_()) for _ in range(2)]
    total = "reduce_scatter" if mesh.sequence_parallel else "all_reduce"
    with pytest.MonkeyPatch.context() as patch, record_products(events):
        record_starts(patch, regions, ("all_gather", "reduce_scatter", "all_reduce"), events)
        with queue.open("half"):
            for output in outputs:
                output.backward(draw(*output.shape))
        assert events == ["input gradient", f"{total} starts", f"{total} ends"] * 2, events
        events.clear()
        queue.run("half")
    expected = ["weight gradient"] * 2
    if mesh.sequence_parallel:
        starts, ends = "all_gather starts", "all_gather ends"
        expected = [starts, starts, ends, "weight gradient", ends, "weight gradient"]
    assert events == expected, events


def check_all(rank: int, size: int) -> None:
    torch.set_default_dtype(torch.float64)
    for tp, sequence_parallel in LAYOUTS:
        mesh = ParallelMesh.create(
            ParallelLayout(world_size=size, tp=tp), sequence_parallel=sequence_parallel
        )
        for name, layer, x in make_cases(mesh):
            for run in (run_once, run_twice, run_recomputed):
                case_name = f"{name} {run.__name__} tp={tp} sp={sequence_parallel}"
                compare(name, layer, x, run, case_name)
        if tp > 1:
            check_overlap(mesh)
        mesh.destroy()


def test_the_halves_of_a_backward_pass_add_the_gradients_of_the_full_pass() -> None:
    run_world(check_all, 2)


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


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_lora_factors_of_a_frozen_base_get_the_gradients_of_the_full_pass(kind: Any) -> None:
    mesh = ParallelMesh.single()
    layer = kind(D, F_OUT, mesh, bias=False)
    layer.low_rank = LowRankUpdates({"default": LowRank(layer, range(F_OUT), 3, mesh)})
    layer.double()
    initialize_(layer, "cpu", seed=1)
    layer.weight.requires_grad_(False)
    plain, queue = copy.deepcopy(layer), WeightGradientQueue()
    gradients, _ = attach_slots(layer, queue=queue)
    x, output_gradient = draw(S, B, D), draw(S, B, F_OUT, seed=1)
    plain(x).backward(output_gradient)
    with queue.open(0):
        layer(x).backward(output_gradient)
    queue.run(0)
    assert gradients["weight"].isnan().all()
    plain_parameters = dict(plain.named_parameters())
    for name, parameter in layer.named_parameters():
        if parameter.requires_grad:
            # Autograd computes the gradients of the replicated factor.
            actual = gradients[name] if parameter.grad is None else parameter.grad
            assert_equal(actual, plain_parameters[name].grad, name)


def test_weight_gradients_without_a_slot_of_the_open_queue_are_not_deferred() -> None:
    queue, layer = WeightGradientQueue(), ColumnParallelLinear(D, F_OUT, ParallelMesh.single())
    initialize_(layer, "cpu", seed=1)
    layer.double()
    with queue.open(0):
        layer(draw(S, B, D)).backward(draw(S, B, F_OUT))
    assert layer.weight.grad is not None
    queue.run(0)
    _, calls = attach_slots(layer, queue=WeightGradientQueue())
    with queue.open(0):
        layer(draw(S, B, D)).backward(draw(S, B, F_OUT))
    assert calls == {"weight": 1, "bias": 1}


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
