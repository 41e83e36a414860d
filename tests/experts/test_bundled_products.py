"""What is handed to the bundled kernels, shown by a stand-in that computes what they would."""

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
    """Compute a launch by a product for each group; refuse what the kernels refuse."""

    def __init__(self) -> None:
        self.launches: list[tuple[Pass, Tensor]] = []

    def __call__(
        self,
        which: Pass,
        result: Tensor,
        a: Tensor,
        b: Tensor,
        ends: Tensor,
        alpha: float = 1.0,
        first_group: int = 0,
    ) -> Tensor:
        self.launches.append((which, result))
        stack = b if which in {Pass.FORWARD, Pass.DATA_GRAD} else result
        num_groups, n, k = stack.shape
        choose_variant(which, a.shape[0], num_groups, n, k)
        assert a.is_contiguous()
        assert alpha == 1 or which in {Pass.WEIGHT_GRAD_FP32, Pass.WEIGHT_GRAD_ADD}
        assert stack.stride()[1:] == (k, 1)
        assert stack is result or stack.stride(0) % k == 0
        assert num_groups == len(ends) - first_group
        bounds = [0, *ends.tolist()][first_group:]
        for group, (start, stop) in enumerate(zip(bounds, bounds[1:], strict=False)):
            rows = slice(start, stop)
            if which is Pass.FORWARD:
                result[rows] = a[rows] @ b[group].t()
            elif which is Pass.DATA_GRAD:
                result[rows] = a[rows] @ b[group]
            elif which is Pass.WEIGHT_GRAD_ADD:
                result[group] += alpha * (a[rows].float().t() @ b[rows].float())
            else:
                result[group] = alpha * (a[rows].float().t() @ b[rows].float()).to(result.dtype)
        return result

    @property
    def passes(self) -> list[Pass]:
        return [which for which, _ in self.launches]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    found = Kernels()
    monkeypatch.setattr(backends, "launch", found)
    return found


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def weights_in(memory: Tensor, step: int) -> list[nn.Parameter]:
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
def test_outputs_and_gradients_are_those_of_the_loop(kernels: Kernels, step: int) -> None:
    memory, outer = draw(4 * step), draw(NUM_ROWS, OUT, seed=1)
    last = int(ENDS[-1])
    results = []
    for backend in ("bundled", "loop"):
        rows, weights = draw(NUM_ROWS, IN, seed=2).requires_grad_(), weights_in(memory, step)
        output = grouped_linear(rows, weights, ENDS, backend)
        grads = torch.autograd.grad(output, (rows, *weights), outer)
        results.append((output[:last], grads[0][:last], *grads[1:]))
    assert kernels.passes == [Pass.FORWARD, Pass.WEIGHT_GRAD_BF16, Pass.DATA_GRAD]
    for one, other in zip(*results, strict=True):
        assert torch.allclose(one.float(), other.float(), atol=2e-2, rtol=1e-2)


def test_one_launch_writes_all_slots_and_the_next_adds_to_them(kernels: Kernels) -> None:
    step = OUT * IN + 40
    weights, seen = weights_in(draw(4 * step), step), []
    sums = torch.full((4 * step,), torch.nan)
    for number, weight in enumerate(weights):
        view = sums[number * step : number * step + OUT * IN].view(OUT, IN)
        set_slot(weight, GradientSlot(view, lambda number=number: seen.append(number)))
    expected = torch.zeros(4, OUT, IN)
    for seed in range(3):
        rows, outer = draw(NUM_ROWS, IN, seed=seed), draw(NUM_ROWS, OUT, seed=seed + 5)
        rows[int(ENDS[-1]) :] = torch.nan
        grouped_linear(rows, weights, ENDS, "bundled").backward(outer)
        expected += product_of(outer, rows)
    written = [which for which in kernels.passes if which is not Pass.FORWARD]
    assert written == [Pass.WEIGHT_GRAD_FP32, Pass.WEIGHT_GRAD_ADD, Pass.WEIGHT_GRAD_ADD]
    assert seen == [0, 1, 2, 3] * 3
    for number, weight in enumerate(weights):
        slot = slot_of(weight)
        assert slot is not None
        assert torch.allclose(slot.gradient, expected[number], atol=1e-5)
        assert weight.grad is None
    assert sums.view(4, step)[:, OUT * IN :].isnan().all(), (
        "what lies between the slots was written"
    )


@pytest.mark.parametrize("scales", [[0.5] * 4, [0.5, 0.5, 2.0, 0.5]], ids=["one", "several"])
def test_gradients_are_multiplied_by_the_scale_of_their_slots(
    kernels: Kernels, scales: list[float]
) -> None:
    weights, sums = weights_in(draw(4 * OUT * IN), OUT * IN), torch.full((4, OUT, IN), torch.nan)
    for weight, part, scale in zip(weights, sums, scales, strict=True):
        set_slot(weight, GradientSlot(part, lambda: None, scale=scale))
    rows, outer = draw(NUM_ROWS, IN, seed=2), draw(NUM_ROWS, OUT, seed=1)
    for _ in range(2):
        grouped_linear(rows, weights, ENDS, "bundled").backward(outer)
    is_one = len(set(scales)) == 1
    assert (Pass.WEIGHT_GRAD_ADD in kernels.passes) == is_one
    expected = 2 * torch.tensor(scales).view(-1, 1, 1) * product_of(outer, rows)
    assert torch.allclose(
        sums, expected, atol=1e-5 if is_one else 5e-2, rtol=1e-5 if is_one else 2e-2
    )


@pytest.mark.parametrize("why", ["apart", "half", "some hold a sum", "one refuses"])
def test_slots_that_one_launch_cannot_serve_get_a_gradient_each(kernels: Kernels, why: str) -> None:
    weights, dtype = (
        weights_in(draw(4 * OUT * IN), OUT * IN),
        torch.bfloat16 if why == "half" else torch.float32,
    )
    stack = torch.zeros(4, OUT, IN, dtype=dtype)
    for number, weight in enumerate(weights):
        view = stack[number].clone() if why == "apart" else stack[number]
        refuses = why == "one refuses" and number == 3
        set_slot(
            weight, GradientSlot(view, lambda: None, accepts=lambda refuses=refuses: not refuses)
        )
    if why == "some hold a sum":
        slot_of(weights[0]).is_empty = False
    rows, outer = draw(NUM_ROWS, IN, seed=2), draw(NUM_ROWS, OUT, seed=1)
    grouped_linear(rows, weights, ENDS, "bundled").backward(outer)
    assert kernels.passes == [Pass.FORWARD, Pass.WEIGHT_GRAD_BF16]
    for number, (weight, expected) in enumerate(zip(weights, product_of(outer, rows), strict=True)):
        wanted = torch.zeros_like(expected) if why == "one refuses" and number == 3 else expected
        assert torch.allclose(slot_of(weight).gradient.float(), wanted, atol=5e-2)


def test_experts_in_training_are_multiplied_and_summed_in_place(kernels: Kernels) -> None:
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
        which, sums = kernels.launches[-2]
        assert which is Pass.WEIGHT_GRAD_FP32
        assert sums.data_ptr() == slot_of(module.weights(name)[0]).gradient.data_ptr()
        assert stacked_view(module.weights(name)) is not None


def test_a_view_of_several_tensors_is_within_the_memory_of_the_first() -> None:
    memory = torch.arange(100.0)
    pieces = [memory[start : start + 12].view(3, 4) for start in (5, 35, 65)]
    view = stacked_view(pieces)
    assert view is not None
    assert torch.equal(view, torch.stack(pieces))
    assert view.data_ptr() == pieces[0].data_ptr()
    assert torch.equal(stacked_view(pieces[:1]), pieces[0].unsqueeze(0))
    others = {
        "backwards": pieces[::-1],
        "uneven": [pieces[0], pieces[2], pieces[1]],
        "twice the same": [pieces[0], pieces[0]],
        "other shape": [pieces[0], pieces[1].view(4, 3), pieces[2]],
        "other strides": [pieces[0], memory[35:47].view(4, 3).t(), pieces[2]],
        "other dtype": [pieces[0], pieces[1].view(torch.int32), pieces[2]],
        "other memory": [piece.clone() for piece in pieces],
    }
    for what, given in others.items():
        assert stacked_view(given) is None, what


def test_nothing_happens_where_slots_cannot_be_written_at_once() -> None:
    slots = [GradientSlot(torch.zeros(2, 2), lambda: None) for _ in range(2)]
    called: list[bool] = []
    assert not SlotRow.of(slots).add(lambda sums, overwrite: called.append(overwrite))
    assert not called
    assert all(slot.is_empty for slot in slots)


def test_the_owner_of_slots_is_asked_and_notified_once_for_all(kernels: Kernels) -> None:
    weights, sums, said = weights_in(draw(4 * OUT * IN), OUT * IN), torch.zeros(4, OUT, IN), []
    accepts = [True]

    def join(slots: Sequence[GradientSlot]) -> Owner:
        return Owner(lambda: accepts[0], lambda: said.append(len(slots)))

    for number, weight in enumerate(weights):
        set_slot(
            weight, GradientSlot(sums[number], lambda: said.append(1), lambda: accepts[0], join)
        )
    rows, outer = draw(NUM_ROWS, IN, seed=2), draw(NUM_ROWS, OUT, seed=1)
    for accepts[0] in (True, False, True):
        grouped_linear(rows, weights, ENDS, "bundled").backward(outer)
    assert said == [4, 4]
    assert torch.allclose(sums, 2 * product_of(outer, rows), atol=1e-5)


def test_weights_that_have_moved_are_found_where_they_are(kernels: Kernels) -> None:
    weights, sums = weights_in(draw(4 * OUT * IN), OUT * IN), torch.zeros(4, OUT, IN)
    for weight, part in zip(weights, sums, strict=True):
        set_slot(weight, GradientSlot(part, lambda: None))
    rows = draw(NUM_ROWS, IN, seed=2)
    for moved in (
        draw(4 * OUT * IN, seed=3),
        torch.cat([draw(4 * OUT * IN, seed=4), draw(IN, seed=5)]),
    ):
        step = moved.numel() // 4
        for number, weight in enumerate(weights):
            weight.data = moved[number * step : number * step + OUT * IN].view(OUT, IN)
        found = grouped_linear(rows, weights, ENDS, "bundled")[: int(ENDS[-1])]
        expected = grouped_linear(rows, weights, ENDS, "loop")[: int(ENDS[-1])]
        assert torch.allclose(found.float(), expected.float(), atol=2e-2, rtol=1e-2)


def test_weights_that_change_before_the_backward_pass_are_refused(kernels: Kernels) -> None:
    weights, sums = weights_in(draw(4 * OUT * IN), OUT * IN), torch.zeros(4, OUT, IN)
    for weight, part in zip(weights, sums, strict=True):
        set_slot(weight, GradientSlot(part, lambda: None))
    output = grouped_linear(draw(NUM_ROWS, IN).requires_grad_(), weights, ENDS, "bundled")
    with torch.no_grad():
        weights[2].mul_(2)
    with pytest.raises(
        RuntimeError, match="weights must not change between a forward and its backward pass"
    ):
        output.sum().backward()


class Places:
    """Weights of two clones, and memory of their gradients that other ranks would read."""

    def __init__(self) -> None:
        self.weights = draw(2, OUT, IN, seed=7)
        self.memory = torch.full((2, OUT, IN), torch.nan)
        self.plan = ()

    def for_plan(self) -> Places:
        return self

    def fetch(self, weights: Sequence[Tensor]) -> Tensor:
        return self.weights

    def gradients(self, like: Tensor) -> Tensor:
        return self.memory

    def give_back(self, gradients: Tensor) -> None:
        assert gradients is self.memory


def test_clones_are_a_second_launch_over_the_same_rows(kernels: Kernels) -> None:
    results = []
    for backend in ("bundled", "loop"):
        places, seen = Places(), list[int]()
        memory, sums = draw(2 * OUT * IN), torch.full((2, OUT, IN), torch.nan)
        weights = weights_in(torch.cat([memory, memory]), OUT * IN)[:2]
        for number, weight in enumerate(weights):
            tell = partial(seen.append, number)
            set_slot(weight, GradientSlot(sums[number], tell))
        rows = draw(NUM_ROWS, IN, seed=2).requires_grad_()
        output = cloned_linear(rows, weights, ENDS, places, backend)
        for _ in range(2):
            output.backward(draw(NUM_ROWS, OUT, seed=1), retain_graph=True)
        assert not seen, "the gradients of clones are missing"
        assert rows.grad is not None
        last = int(ENDS[-1])
        results.append((output[:last], rows.grad[:last], sums, places.memory))
    both = [Pass.DATA_GRAD, Pass.DATA_GRAD]
    assert kernels.passes == [
        *(Pass.FORWARD, Pass.FORWARD),
        *(Pass.WEIGHT_GRAD_FP32, Pass.WEIGHT_GRAD_FP32, *both),
        *(Pass.WEIGHT_GRAD_ADD, Pass.WEIGHT_GRAD_FP32, *both),
    ]
    for one, other in zip(*results, strict=True):
        assert torch.allclose(one.float(), other.float(), atol=5e-2, rtol=2e-2)
