"""Tests of the products of experts on the bundled kernels on a GPU: eager, compiled, in graphs, and
with sums in gradient slots.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron.experts.compute.backends import Bundled, stacked
from lightning_megatron.experts.compute.bundled_launch import launch
from lightning_megatron.experts.compute.choose_backend import choose_backend
from lightning_megatron.experts.compute.grouped_linear import grouped_linear
from lightning_megatron.layers.parameters.gradient_slot import GradientSlot, set_slot
from lightning_megatron.plan.experts import ExpertsConfig
from lightning_megatron.plan.grouped_gemm import Pass
from tests.gpu.grouped import (
    SIZES,
    UNTOUCHED,
    assert_close,
    captured,
    draw,
    ends_of,
    experts_of,
    poisoned,
)

pytestmark = pytest.mark.gpu

E, N, K, R = 6, 264, 320, 700
HALF, SUM = 4e-3, 5e-5


@pytest.fixture(scope="module", autouse=True)
def _library() -> None:
    """Skip where the kernels are not built or cannot run."""
    choice = choose_backend(torch.device("cuda", 0), torch.bfloat16, E, K, N)
    if choice.backend != "bundled":
        pytest.skip(choice.reason)


def reference(
    rows: Tensor, weights: Tensor, outer: Tensor, sizes: list[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute output, gradient of rows and gradients of weights in float64, for the rows of groups
    only.
    """
    bounds = [0, *torch.tensor(sizes).cumsum(0).tolist()]
    outputs, grad_rows, grad_weights = [], [], []
    for weight, (start, stop) in zip(weights.double(), pairwise(bounds), strict=True):
        x, dy = rows[start:stop].double(), outer[start:stop].double()
        outputs.append(x @ weight.t())
        grad_rows.append(dy @ weight)
        grad_weights.append(dy.t() @ x)
    return torch.cat(outputs), torch.cat(grad_rows), torch.stack(grad_weights)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("backend", ["bundled", "grouped_mm", "loop"])
def test_outputs_and_gradients_equal_float64(backend, sizes):
    weights = [draw(N, K).requires_grad_() for _ in range(E)]
    rows, outer = poisoned(draw(R, K), sizes).requires_grad_(), poisoned(draw(R, N), sizes)
    output = grouped_linear(rows, weights, ends_of(sizes), backend)
    grads = torch.autograd.grad(output, (rows, *weights), outer)
    expected = reference(rows.detach(), stacked(weights).detach(), outer, sizes)
    last = sum(sizes)
    assert_close(output[:last], expected[0], HALF, "output")
    assert_close(grads[0][:last], expected[1], HALF, "gradient of rows")
    assert_close(torch.stack(grads[1:]), expected[2], HALF, "gradients of weights")


@pytest.mark.parametrize("backend", ["bundled", "loop"])
@pytest.mark.parametrize("gap", [0, 2 * K, 64, None], ids=["dense", "whole rows", "any", "apart"])
def test_weight_gradients_of_microbatches_are_summed_in_float32_slots(gap, backend):
    step = N * K + (gap or 0)
    memory = draw(E * step)
    weights = [nn.Parameter(memory[e * step : e * step + N * K].view(N, K)) for e in range(E)]
    sums = torch.full((E, step), torch.nan, device="cuda")
    slots = [sums[e, : N * K].view(N, K) for e in range(E)]
    if gap is None:
        slots = [slot.clone() for slot in slots]
    arrived: list[int] = []
    for number, (weight, slot) in enumerate(zip(weights, slots, strict=True)):
        set_slot(weight, GradientSlot(slot, partial(arrived.append, number)))
    expected = torch.zeros(E, N, K, device="cuda", dtype=torch.float64)
    for sizes in (SIZES[1], SIZES[0], SIZES[2], SIZES[3]):
        rows, outer = poisoned(draw(R, K), sizes), poisoned(draw(R, N), sizes)
        grouped_linear(rows, weights, ends_of(sizes), backend).backward(outer)
        expected += reference(rows, stacked(weights).detach(), outer, sizes)[2]
    assert arrived == list(range(E)) * 4
    # Without a launch for all slots each product is rounded to bfloat16 before it is added.
    limit = HALF if gap is None and backend == "bundled" else SUM
    assert_close(torch.stack(slots), expected, limit, "sums")
    if gap:
        assert sums[:, N * K :].isnan().all(), "memory between the slots was written"


def test_one_graph_serves_all_sizes_of_groups():
    weights, ends = draw(E, N, K), ends_of(SIZES[0])
    rows, outer, sums = draw(R, K), draw(R, N), torch.zeros(E, N, K, device="cuda")
    slots = [GradientSlot(part, lambda: None) for part in sums]
    replaced = torch.zeros(E, N, K, device="cuda")
    empty_slots = [GradientSlot(part, lambda: None) for part in replaced]
    # A graph may allocate results in the memory of its workspaces; these results are allocated
    # before, because rows of no group must stay unchanged.
    results = [torch.empty_like(outer), torch.empty_like(rows), torch.empty_like(weights)]

    def step() -> None:
        for slot, empty_slot in zip(slots, empty_slots, strict=True):
            slot.is_empty, empty_slot.is_empty = False, True
        launch(Pass.FORWARD, results[0], rows, weights, ends)
        launch(Pass.DATA_GRAD, results[1], outer, weights, ends)
        launch(Pass.WEIGHT_GRAD_BF16, results[2], outer, rows, ends)
        Bundled.add_weight_gradients(outer, rows, ends, slots)
        Bundled.add_weight_gradients(outer, rows, ends, empty_slots)

    graph, _ = captured(step)
    for sizes in (*SIZES, *reversed(SIZES)):
        last = sum(sizes)
        rows.copy_(poisoned(draw(R, K), sizes))
        outer.copy_(poisoned(draw(R, N), sizes))
        ends.copy_(ends_of(sizes))
        for tensor in (results[2], replaced):
            tensor.fill_(torch.nan)
        for tensor in results[:2]:
            tensor.fill_(UNTOUCHED)
        sums.fill_(1.0)
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        graph.replay()
        torch.cuda.synchronize()
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
        expected = reference(rows, weights, outer, sizes)
        assert_close(results[0][:last], expected[0], HALF, "output")
        assert_close(results[1][:last], expected[1], HALF, "gradient of rows")
        assert_close(results[2], expected[2], HALF, "gradients of weights")
        assert_close(sums, expected[2] + 1, SUM, "sums")
        assert_close(replaced, expected[2], SUM, "replaced sums")
        for result in results[:2]:
            assert (result[last:] == UNTOUCHED).all(), "rows of no group were written"


def test_products_on_two_streams_do_not_disturb_each_other():
    weights, ends = draw(E, N, K), ends_of(SIZES[0])
    pairs = [(draw(R, K), torch.cuda.Stream()) for _ in range(2)]
    alone = [Bundled.output(rows, weights.unbind(), ends)[: sum(SIZES[0])] for rows, _ in pairs]
    torch.cuda.synchronize()
    for _ in range(50):
        concurrent = []
        for rows, stream in pairs:
            with torch.cuda.stream(stream):
                concurrent.append(Bundled.output(rows, weights.unbind(), ends)[: sum(SIZES[0])])
        torch.cuda.synchronize()
        assert all(map(torch.equal, concurrent, alone))


def test_opcheck_of_torch_accepts_the_operators_on_a_gpu():
    rows, outer, ends = draw(R, K).requires_grad_(), draw(R, N), ends_of(SIZES[0])
    weights = [draw(N, K).requires_grad_() for _ in range(E)]
    ops, check = torch.ops.lightning_megatron, torch.library.opcheck
    check(ops.grouped_linear.default, (rows, weights, ends, None), atol=1e-2, rtol=1e-2)
    weights = [weight.detach() for weight in weights]
    check(ops.grouped_linear_input_gradient.default, (outer, weights, ends, "bundled"))
    gradients = (outer, rows.detach(), ends, "bundled")
    check(ops.grouped_linear_weight_gradients.default, gradients)


def test_experts_compiled_to_one_graph_equal_eager_experts():
    module = experts_of(K, ExpertsConfig(num_experts=E, top_k=2, ffn_hidden_size=128))
    rows, probabilities = draw(R, K).requires_grad_(), torch.rand(R, device="cuda")
    leaves = (rows, *module.parameters())
    results = []
    for run in (module, torch.compile(module, fullgraph=True)):
        output = run(rows, probabilities, ends_of(SIZES[0]))
        results.append((output, *torch.autograd.grad(output.float().square().sum(), leaves)))
    for eager, compiled in zip(*results, strict=True):
        assert_close(eager, compiled.double(), 2e-2, "eager against compiled")
