"""Layers that leave their weight gradients to a queue, against the same layers under plain autograd,
in float64.
"""

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
    cases,
    draw,
    once,
    products_to,
    recomputed,
    twice,
)
from tests.live_memory import LiveMemory
from tests.oracles import assert_equal
from tests.recorded import record_starts
from tests.world import run_world

CUTS = [(1, False), (2, False), (2, True)]
#: What the weight half adds to, by the name of the layer in `cases`.
LEFT = {
    "column": {"weight"},
    "row": {"weight"},
    "gathered column": {"weight"},
    "head": {"weight"},
    "tied": {"word.weight"},
}


def compare(name: str, layer: nn.Module, x: Tensor, run: Any, what: str) -> None:
    """Run a backward pass in halves, and compare what each half adds with the whole pass."""
    initialize_(layer, "cpu", seed=3)
    plain = copy.deepcopy(layer)
    queue = WeightGradientQueue()
    gradients, calls = attach_slots(layer, queue=queue)
    inputs = [x.clone().requires_grad_(x.is_floating_point()) for _ in range(2)]
    outputs = [run(module, given) for module, given in zip((plain, layer), inputs, strict=True)]
    outputs[0].backward(draw(*outputs[0].shape, seed=7))
    with queue.open("half"):
        outputs[1].backward(draw(*outputs[1].shape, seed=7))
    assert not queue.is_open
    if x.is_floating_point():
        assert_equal(inputs[1].grad, inputs[0].grad, f"{what}: input gradient")
    early = dict(calls)
    queue.run("half")
    for parameter in LEFT.get(name, ()):
        assert early[parameter] < calls[parameter], f"{what}: nothing was left of {parameter}"
    for (key, parameter), twin in zip(layer.named_parameters(), plain.parameters(), strict=True):
        assert parameter.grad is None, f"{what}: autograd got a gradient of {key}"
        assert early[key] == calls[key] or key in LEFT.get(name, ()), f"{what}: {key} came late"
        assert_equal(gradients[key], twin.grad, f"{what}: gradient of {key}")
    everything = dict(calls)
    queue.run("half")
    assert calls == everything, f"{what}: a weight half ran twice"


def check_overlap(mesh: ParallelMesh) -> None:
    """Check that the weight half gathers each input beside the product before it."""
    events: list[str] = []
    queue = WeightGradientQueue()
    layer = ColumnParallelLinear(D, F_OUT, mesh)
    initialize_(layer, "cpu", seed=0)
    attach_slots(layer, queue=queue)
    seq = S // (mesh.tp.size if mesh.sequence_parallel else 1)
    outputs = [layer(draw(seq, B, D).requires_grad_()) for _ in range(2)]
    total = "reduce_scatter" if mesh.sequence_parallel else "all_reduce"
    with pytest.MonkeyPatch.context() as patch, products_to(events):
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
    for tp, sequence_parallel in CUTS:
        mesh = ParallelMesh.create(
            ParallelLayout(world_size=size, tp=tp), sequence_parallel=sequence_parallel
        )
        for name, layer, x in cases(mesh):
            for run in (once, twice, recomputed):
                what = f"{name} {run.__name__} tp={tp} sp={sequence_parallel}"
                compare(name, layer, x, run, what)
        if tp > 1:
            check_overlap(mesh)
        mesh.destroy()


def test_the_halves_of_a_backward_pass_add_what_the_whole_pass_adds() -> None:
    run_world(check_all, 2)


def test_products_of_experts_are_left_to_the_weight_half() -> None:
    queue, rows, outer = WeightGradientQueue(), draw(10, 6), draw(10, 4, seed=1)
    ends = torch.tensor([3, 3, 10], dtype=torch.int32)
    weights = [nn.Parameter(draw(4, 6, seed=2 + number)) for number in range(3)]
    sums = [torch.full_like(weight, torch.nan) for weight in weights]
    seen: list[int] = []
    for number, weight in enumerate(weights):
        count = lambda number=number: seen.append(number)  # noqa: E731
        set_slot(weight, GradientSlot(sums[number], count, queue=queue))
    rows.requires_grad_()
    with queue.open(0):
        grouped_linear(rows, weights, ends, "loop").backward(outer)
    assert not seen
    assert rows.grad is not None
    expected = torch.cat([outer[:3] @ weights[0], outer[3:] @ weights[2]])
    assert_equal(rows.grad, expected, "input gradient")
    queue.run(0)
    assert seen == [0, 1, 2]
    for total, group in zip(sums, (slice(0, 3), slice(3, 3), slice(3, 10)), strict=True):
        assert_equal(total, outer[group].t() @ rows[group], "weight gradient")


def test_a_fused_weight_of_several_parameters_is_left_as_a_whole() -> None:
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
def test_a_frozen_base_leaves_nothing_and_its_low_rank_update_the_rest(kind: Any) -> None:
    mesh = ParallelMesh.single()
    layer = kind(D, F_OUT, mesh, bias=False)
    layer.low_rank = LowRankUpdates({"default": LowRank(layer, range(F_OUT), 3, mesh)})
    layer.double()
    initialize_(layer, "cpu", seed=1)
    layer.weight.requires_grad_(False)
    plain, queue = copy.deepcopy(layer), WeightGradientQueue()
    gradients, _ = attach_slots(layer, queue=queue)
    x, outer = draw(S, B, D), draw(S, B, F_OUT, seed=1)
    plain(x).backward(outer)
    with queue.open(0):
        layer(x).backward(outer)
    queue.run(0)
    assert gradients["weight"].isnan().all()
    twins = dict(plain.named_parameters())
    for name, parameter in layer.named_parameters():
        if parameter.requires_grad:
            # Autograd keeps the gradients of the factor that every rank has in full.
            found = gradients[name] if parameter.grad is None else parameter.grad
            assert_equal(found, twins[name].grad, name)


def test_weights_without_slots_and_other_queues_are_not_left() -> None:
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


def test_the_queue_keeps_the_factors_of_its_products_until_they_have_run() -> None:
    queue, layer = WeightGradientQueue(), ColumnParallelLinear(D, F_OUT, ParallelMesh.single())
    layer.double()
    initialize_(layer, "cpu", seed=1)
    gradients, _ = attach_slots(layer, queue=queue)
    x, memory = draw(S, B, D).requires_grad_(), LiveMemory()
    memory.leave_out([x, layer.weight, layer.bias, *gradients.values()])
    with memory:
        with queue.open(0):
            # The inputs of `exp` and `sin` are kept for backward, but not for the weight half.
            layer(x.sin().exp()).sin().sum().backward()
        x.grad = None
        gc.collect()
        assert memory.now == S * B * (D + F_OUT) * x.element_size()
        queue.run(0)
        gc.collect()
        assert memory.now == 0


def test_an_input_half_that_fails_leaves_nothing() -> None:
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


def test_input_halves_may_not_mix() -> None:
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
