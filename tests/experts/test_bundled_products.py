"""Launches of the bundled kernels, computed by a stand-in that checks their arguments."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron.experts.compute import backends
from lightning_megatron.experts.compute.cloned_linear import cloned_linear
from lightning_megatron.experts.compute.grouped_linear import grouped_linear
from lightning_megatron.experts.compute.grouped_mlp import GroupedMLP
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.gradient_slot import GradientSlot, Owner, SlotRow, set_slot, slot_of
from lightning_megatron.layers.init import initialize_
from lightning_megatron.layers.stacked_view import stacked_view
from lightning_megatron.plan.experts import ExpertsConfig
from lightning_megatron.plan.grouped_gemm import Pass, choose_variant
from lightning_megatron.training import DistributedOptimizerConfig
from tests.training.runs import Run

NUM_ROWS, OUT, IN = 16, 24, 16
ENDS = torch.tensor([3, 3, 9, 12], dtype=torch.int32)


class Kernels:
    """Compute a launch by a product for each group, and refuse arguments that the kernels refuse."""

    def __init__(self) -> None:
        self.launches: list[tuple[Pass, Tensor]] = []

    def __call__(
        self,
        pass_: Pass,
        result: Tensor,
        a: Tensor,
        b: Tensor,
        ends: Tensor,
        alpha: float = 1.0,
        first_group: int = 0,
    ) -> Tensor:
        self.launches.append((pass_, result))
        stack = b if pass_ in {Pass.FORWARD, Pass.DATA_GRAD} else result
        num_groups, n, k = stack.shape
        choose_variant(pass_, a.shape[0], num_groups, n, k)
        assert a.is_contiguous()
        assert alpha == 1 or pass_ in {Pass.WEIGHT_GRAD_FP32, Pass.WEIGHT_GRAD_ADD}
        assert stack.stride()[1:] == (k, 1)
        assert stack is result or stack.stride(0) % k == 0
        assert num_groups == len(ends) - first_group
        bounds = [0, *ends.tolist()][first_group:]
        for group, (start, stop) in enumerate(zip(bounds, bounds[1:], strict=False)):
            rows = slice(start, stop)
            if pass_ is Pass.FORWARD:
                result[rows] = a[rows] @ b[group].t()
            elif pass_ is Pass.DATA_GRAD:
                result[rows] = a[rows] @ b[group]
            elif pass_ is Pass.WEIGHT_GRAD_ADD:
                result[group] += alpha * (a[rows].float().t() @ b[rows].float())
            else:
                result[group] = alpha * (a[rows].float().t() @ b[rows].float()).to(result.dtype)
        return result

    @property
    def passes(self) -> list[Pass]:
        return [pass_ for pass_, _ in self.launches]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    stand_in = Kernels()
    monkeypatch.setattr(backends, "launch", stand_in)
    return stand_in


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def make_weights(memory: Tensor, step: int) -> list[nn.Parameter]:
    return [nn.Parameter(memory[e * step : e * step + OUT * IN].view(OUT, IN)) for e in range(4)]


def product_of(grad: Tensor, rows: Tensor) -> Tensor:
    bounds = [0, *ENDS.tolist()]
    return torch.stack(
        [
            grad[i:j].float().t() @ rows[i:j].float()
            for i, j in zip(bounds, bounds[1:], strict=False)
        ]
    )


@pytest.mark.parametrize("step", [OUT * IN, OUT * IN + 2 * IN, OUT * IN + 8])
def test_outputs_and_gradients_equal_those_of_the_loop(kernels: Kernels, step: int) -> None:
    memory, output_gradient = draw(4 * step), draw(NUM_ROWS, OUT, seed=1)
    last = int(ENDS[-1])
    results = []
    for backend in ("bundled", "loop"):
        rows, weights = draw(NUM_ROWS, IN, seed=2).requires_grad_(), make_weights(memory, step)
        output = grouped_linear(rows, weights, ENDS, backend)
        grads = torch.autograd.grad(output, (rows, *weights), output_gradient)
        results.append((output[:last], grads[0][:last], *grads[1:]))
    assert kernels.passes == [Pass.FORWARD, Pass.WEIGHT_GRAD_BF16, Pass.DATA_GRAD]
    for bundled_result, loop_result in zip(*results, strict=True):
        assert torch.allclose(bundled_result.float(), loop_result.float(), atol=2e-2, rtol=1e-2)


def test_one_launch_writes_all_slots_and_later_launches_add_to_them(kernels: Kernels) -> None:
    step = OUT * IN + 40
    weights, notices = make_weights(draw(4 * step), step), []
    sums = torch.full((4 * step,), torch.nan)
    for number, weight in enumerate(weights):
        view = sums[number * step : number * step + OUT * IN].view(OUT, IN)
        set_slot(weight, GradientSlot(view, lambda number=number: notices.append(number)))
    expected = torch.zeros(4, OUT, IN)
    for seed in range(3):
        rows, output_gradient = draw(NUM_ROWS, IN, seed=seed), draw(NUM_ROWS, OUT, seed=seed + 5)
        rows[int(ENDS[-1]) :] = torch.nan
        grouped_linear(rows, weights, ENDS, "bundled").backward(output_gradient)
        expected += product_of(output_gradient, rows)
    gradient_passes = [pass_ for pass_ in kernels.passes if pass_ is not Pass.FORWARD]
    assert gradient_passes == [Pass.WEIGHT_GRAD_FP32, Pass.WEIGHT_GRAD_ADD, Pass.WEIGHT_GRAD_ADD]
    assert notices == [0, 1, 2, 3] * 3
    for number, weight in enumerate(weights):
        slot = slot_of(weight)
        assert slot is not None
        assert torch.allclose(slot.gradient, expected[number], atol=1e-5)
        assert weight.grad is None
    assert sums.view(4, step)[:, OUT * IN :].isnan().all(), "memory between the slots was written"


@pytest.mark.parametrize("scales", [[0.5] * 4, [0.5, 0.5, 2.0, 0.5]], ids=["one", "several"])
def test_gradients_are_multiplied_by_the_scale_of_their_slots(
    kernels: Kernels, scales: list[float]
) -> None:
    weights, sums = make_weights(draw(4 * OUT * IN), OUT * IN), torch.full((4, OUT, IN), torch.nan)
    for weight, part, scale in zip(weights, sums, scales, strict=True):
        set_slot(weight, GradientSlot(part, lambda: None, scale=scale))
    rows, output_gradient = draw(NUM_ROWS, IN, seed=2), draw(NUM_ROWS, OUT, seed=1)
    for _ in range(2):
        grouped_linear(rows, weights, ENDS, "bundled").backward(output_gradient)
    is_one_scale = len(set(scales)) == 1
    assert (Pass.WEIGHT_GRAD_ADD in kernels.passes) == is_one_scale
    expected = 2 * torch.tensor(scales).view(-1, 1, 1) * product_of(output_gradient, rows)
    assert torch.allclose(
        sums, expected, atol=1e-5 if is_one_scale else 5e-2, rtol=1e-5 if is_one_scale else 2e-2
    )


@pytest.mark.parametrize("case", ["apart", "half", "some hold a sum", "one refuses"])
def test_slots_that_one_launch_cannot_write_get_separate_gradients(
    kernels: Kernels, case: str
) -> None:
    weights, dtype = (
        make_weights(draw(4 * OUT * IN), OUT * IN),
        torch.bfloat16 if case == "half" else torch.float32,
    )
    stack = torch.zeros(4, OUT, IN, dtype=dtype)
    for number, weight in enumerate(weights):
        view = stack[number].clone() if case == "apart" else stack[number]
        refuses = case == "one refuses" and number == 3
        set_slot(
            weight, GradientSlot(view, lambda: None, accepts=lambda refuses=refuses: not refuses)
        )
    if case == "some hold a sum":
        slot_of(weights[0]).is_empty = False
    rows, output_gradient = draw(NUM_ROWS, IN, seed=2), draw(NUM_ROWS, OUT, seed=1)
    grouped_linear(rows, weights, ENDS, "bundled").backward(output_gradient)
    assert kernels.passes == [Pass.FORWARD, Pass.WEIGHT_GRAD_BF16]
    for number, (weight, expected) in enumerate(
        zip(weights, product_of(output_gradient, rows), strict=True)
    ):
        expected_gradient = (
            torch.zeros_like(expected) if case == "one refuses" and number == 3 else expected
        )
        assert torch.allclose(slot_of(weight).gradient.float(), expected_gradient, atol=5e-2)


def test_experts_in_training_use_weights_and_slots_in_place(kernels: Kernels) -> None:
    config = ExpertsConfig(num_experts=4, top_k=2, ffn_hidden_size=8)
    wrapped = nn.ModuleDict({"experts": GroupedMLP(IN, config, ParallelMesh.single()).bfloat16()})
    initialize_(wrapped, "cpu", 0)
    module = wrapped["experts"]
    Run(
        dict(module.named_parameters()),
        ParallelMesh.single(),
        DistributedOptimizerConfig(main_dtype=torch.float32),
        torch.optim.AdamW,
    )
    for name in ("gate_up", "down"):
        rows = draw(NUM_ROWS, module.weights(name)[0].shape[1], seed=2).requires_grad_()
        output = grouped_linear(rows, module.weights(name), ENDS, "bundled")
        output.backward(torch.ones_like(output))
        pass_, sums = kernels.launches[-2]
        assert pass_ is Pass.WEIGHT_GRAD_FP32
        assert sums.data_ptr() == slot_of(module.weights(name)[0]).gradient.data_ptr()
        assert stacked_view(module.weights(name)) is not None


def test_tensors_at_equal_distances_have_a_stacked_view() -> None:
    memory = torch.arange(100.0)
    pieces = [memory[start : start + 12].view(3, 4) for start in (5, 35, 65)]
    view = stacked_view(pieces)
    assert view is not None
    assert torch.equal(view, torch.stack(pieces))
    assert view.data_ptr() == pieces[0].data_ptr()
    assert torch.equal(stacked_view(pieces[:1]), pieces[0].unsqueeze(0))
    tensors_without_view = {
        "backwards": pieces[::-1],
        "uneven": [pieces[0], pieces[2], pieces[1]],
        "twice the same": [pieces[0], pieces[0]],
        "other shape": [pieces[0], pieces[1].view(4, 3), pieces[2]],
        "other strides": [pieces[0], memory[35:47].view(4, 3).t(), pieces[2]],
        "other dtype": [pieces[0], pieces[1].view(torch.int32), pieces[2]],
        "other memory": [piece.clone() for piece in pieces],
    }
    for case, tensors in tensors_without_view.items():
        assert stacked_view(tensors) is None, case


def test_adding_to_slots_in_separate_memory_does_nothing() -> None:
    slots = [GradientSlot(torch.zeros(2, 2), lambda: None) for _ in range(2)]
    calls: list[bool] = []
    assert not SlotRow.of(slots).add(lambda sums, overwrite: calls.append(overwrite))
    assert not calls
    assert all(slot.is_empty for slot in slots)


def test_the_owner_of_slots_is_asked_and_notified_once_for_all_slots(kernels: Kernels) -> None:
    weights, sums, notices = make_weights(draw(4 * OUT * IN), OUT * IN), torch.zeros(4, OUT, IN), []
    accepts = [True]

    def join(slots: Sequence[GradientSlot]) -> Owner:
        return Owner(lambda: accepts[0], lambda: notices.append(len(slots)))

    for number, weight in enumerate(weights):
        set_slot(
            weight, GradientSlot(sums[number], lambda: notices.append(1), lambda: accepts[0], join)
        )
    rows, output_gradient = draw(NUM_ROWS, IN, seed=2), draw(NUM_ROWS, OUT, seed=1)
    for accepts[0] in (True, False, True):
        grouped_linear(rows, weights, ENDS, "bundled").backward(output_gradient)
    assert notices == [4, 4]
    assert torch.allclose(sums, 2 * product_of(output_gradient, rows), atol=1e-5)


def test_products_use_weights_that_moved_to_new_memory(kernels: Kernels) -> None:
    weights, sums = make_weights(draw(4 * OUT * IN), OUT * IN), torch.zeros(4, OUT, IN)
    for weight, part in zip(weights, sums, strict=True):
        set_slot(weight, GradientSlot(part, lambda: None))
    rows = draw(NUM_ROWS, IN, seed=2)
    for new_memory in (
        draw(4 * OUT * IN, seed=3),
        torch.cat([draw(4 * OUT * IN, seed=4), draw(IN, seed=5)]),
    ):
        step = new_memory.numel() // 4
        for number, weight in enumerate(weights):
            weight.data = new_memory[number * step : number * step + OUT * IN].view(OUT, IN)
        actual = grouped_linear(rows, weights, ENDS, "bundled")[: int(ENDS[-1])]
        expected = grouped_linear(rows, weights, ENDS, "loop")[: int(ENDS[-1])]
        assert torch.allclose(actual.float(), expected.float(), atol=2e-2, rtol=1e-2)


def test_weights_that_change_before_the_backward_pass_are_refused(kernels: Kernels) -> None:
    weights, sums = make_weights(draw(4 * OUT * IN), OUT * IN), torch.zeros(4, OUT, IN)
    for weight, part in zip(weights, sums, strict=True):
        set_slot(weight, GradientSlot(part, lambda: None))
    output = grouped_linear(draw(NUM_ROWS, IN).requires_grad_(), weights, ENDS, "bundled")
    with torch.no_grad():
        weights[2].mul_(2)
    with pytest.raises(
        RuntimeError, match="weights must not change between a forward and its backward pass"
    ):
        output.sum().backward()


class CloneMemory:
    """Weights of two clones, and memory for their gradients."""

    def __init__(self) -> None:
        self.weights = draw(2, OUT, IN, seed=7)
        self.memory = torch.full((2, OUT, IN), torch.nan)
        self.plan = ()

    def for_plan(self) -> CloneMemory:
        return self

    def fetch(self, weights: Sequence[Tensor]) -> Tensor:
        return self.weights

    def gradients(self, like: Tensor) -> Tensor:
        return self.memory

    def give_back(self, gradients: Tensor) -> None:
        assert gradients is self.memory


def test_clones_are_computed_by_a_second_launch_over_the_same_rows(kernels: Kernels) -> None:
    results = []
    for backend in ("bundled", "loop"):
        clone_memory, notices = CloneMemory(), list[int]()
        memory, sums = draw(2 * OUT * IN), torch.full((2, OUT, IN), torch.nan)
        weights = make_weights(torch.cat([memory, memory]), OUT * IN)[:2]
        for number, weight in enumerate(weights):
            notify = partial(notices.append, number)
            set_slot(weight, GradientSlot(sums[number], notify))
        rows = draw(NUM_ROWS, IN, seed=2).requires_grad_()
        output = cloned_linear(rows, weights, ENDS, clone_memory, backend)
        for _ in range(2):
            output.backward(draw(NUM_ROWS, OUT, seed=1), retain_graph=True)
        assert not notices, "the gradients of clones are missing"
        assert rows.grad is not None
        last = int(ENDS[-1])
        results.append((output[:last], rows.grad[:last], sums, clone_memory.memory))
    two_data_gradients = [Pass.DATA_GRAD, Pass.DATA_GRAD]
    assert kernels.passes == [
        *(Pass.FORWARD, Pass.FORWARD),
        *(Pass.WEIGHT_GRAD_FP32, Pass.WEIGHT_GRAD_FP32, *two_data_gradients),
        *(Pass.WEIGHT_GRAD_ADD, Pass.WEIGHT_GRAD_FP32, *two_data_gradients),
    ]
    for bundled_result, loop_result in zip(*results, strict=True):
        assert torch.allclose(bundled_result.float(), loop_result.float(), atol=5e-2, rtol=2e-2)
