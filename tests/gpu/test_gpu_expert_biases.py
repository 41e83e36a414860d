"""Tests that results and gradients of experts with biases and clamped SwiGLU equal float64, by the
bundled products and kernels on a GPU.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron.experts.compute.choose_backend import choose_backend
from lightning_megatron.experts.compute.expert_biases import add_expert_biases
from lightning_megatron.experts.compute.grouped_mlp import GroupedMLP
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.fused.choose_kernels import fused_kernels
from lightning_megatron.layers.parameters.gradient_slot import GradientSlot, set_slot
from lightning_megatron.plan.experts import ExpertsConfig
from tests.gpu.grouped import SIZES, assert_close, captured, draw, ends_of, poisoned

pytestmark = pytest.mark.gpu

E, D, F, R = 6, 320, 272, 700
CONFIG = ExpertsConfig(num_experts=E, top_k=2, ffn_hidden_size=F, linear_bias=True)
#: Relative errors of outputs, which are rounded to bfloat16 several times, and of gradients:
#: rounding moves some features to the other side of a bound, where the gradient differs.
HALF, ACROSS = 8e-3, 8e-2


@pytest.fixture(scope="module", autouse=True)
def _library() -> None:
    """Skip where the kernels are not built or cannot run, or there is no Triton."""
    choice = choose_backend(torch.device("cuda", 0), torch.bfloat16, E, D, 2 * F)
    if choice.backend != "bundled":
        pytest.skip(choice.reason)
    if fused_kernels(draw(1, D)) is None:
        pytest.skip("needs triton, which comes with the CUDA builds of torch")


def experts() -> Any:
    """Return experts on the GPU, some of whose features are beyond the bounds."""
    mesh = ParallelMesh.single()
    module = GroupedMLP(D, CONFIG, mesh, activation="clamped_swiglu").bfloat16().cuda()
    for name, parameter in module.named_parameters():
        scale = 4 * D**-0.5 if name.endswith("gate_up.weight") else F**-0.5
        parameter.data.copy_(draw(*parameter.shape, scale=1.0 if "bias" in name else scale))
    return module


def in_float64(module: Any) -> Any:
    """Return the same experts in float64 on the CPU, computed by loops."""
    return deepcopy(module).double().cpu()


def inputs_of(sizes: list[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = poisoned(draw(R, D), sizes).requires_grad_()
    probabilities = poisoned(torch.rand(R, device="cuda"), sizes).requires_grad_()
    return rows, probabilities, ends_of(sizes), poisoned(draw(R, D), sizes)


@pytest.mark.parametrize("has_slots", [False, True], ids=["autograd", "slots"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_outputs_and_gradients_of_experts_with_biases_equal_float64(sizes, has_slots):
    torch.manual_seed(0)
    module, last = experts(), sum(sizes)
    twin = in_float64(module)
    sums = {}
    for name, parameter in module.named_parameters() if has_slots else ():
        # In training the biases of all experts are adjacent; here each bias has separate memory.
        sums[name] = torch.full(parameter.shape, torch.nan, device="cuda")
        set_slot(parameter, GradientSlot(sums[name], lambda: None))
    rows, probabilities, ends, outer = inputs_of(sizes)
    output = module(rows, probabilities, ends)
    output.backward(outer)
    exact_inputs = [
        tensor.detach()[:last].double().cpu().requires_grad_() for tensor in (rows, probabilities)
    ]
    expected_output = twin(*exact_inputs, ends.cpu())
    expected_output.backward(outer[:last].double().cpu())
    pairs = {"output": (output[:last], expected_output)}
    for what, tensor, twin_input in zip(
        ("rows", "probabilities"), (rows, probabilities), exact_inputs, strict=True
    ):
        assert tensor.grad is not None
        pairs[what] = (tensor.grad[:last], twin_input.grad)
    twin_parameters = dict(twin.named_parameters())
    for name, parameter in module.named_parameters():
        gradient = sums[name] if has_slots else parameter.grad
        pairs[name] = (gradient, twin_parameters[name].grad)
    for what, (actual, expected) in pairs.items():
        assert actual.isfinite().all(), what
        assert_close(actual.cpu(), expected, HALF if what == "output" else ACROSS, what)


def test_gradients_of_adjacent_biases_are_summed_in_float32():
    torch.manual_seed(0)
    total = torch.full((E, 2 * F), torch.nan, device="cuda")
    biases = [torch.nn.Parameter(draw(2 * F)) for _ in range(E)]
    for bias, part in zip(biases, total, strict=True):
        set_slot(bias, GradientSlot(part, lambda: None, scale=0.5))
    expected = torch.zeros(E, 2 * F, dtype=torch.float64, device="cuda")
    for sizes in SIZES:
        ends, outer = ends_of(sizes), poisoned(draw(R, 2 * F), sizes)
        rows = draw(R, 2 * F).requires_grad_() * 1
        add_expert_biases(rows, biases, ends).backward(outer)
        first = 0
        for number, stop in enumerate(ends.tolist()):
            expected[number] += 0.5 * outer[first:stop].double().sum(0)
            first = stop
    # Sums are in float32, without any rounding to bfloat16.
    assert_close(total, expected, 1e-6, "sums")


def test_one_graph_serves_all_sizes_of_groups():
    torch.manual_seed(0)
    module = experts()
    twin = in_float64(module)
    rows, probabilities, ends, _ = (tensor.detach() for tensor in inputs_of(SIZES[0]))
    with torch.no_grad():
        graph, output = captured(lambda: module(rows, probabilities, ends))
        for sizes in (*SIZES, *reversed(SIZES)):
            last = sum(sizes)
            rows.copy_(poisoned(draw(R, D), sizes))
            probabilities.copy_(poisoned(torch.rand(R, device="cuda"), sizes))
            ends.copy_(ends_of(sizes))
            graph.replay()
            exact_inputs = [tensor[:last].double().cpu() for tensor in (rows, probabilities)]
            assert_close(output[:last].cpu(), twin(*exact_inputs, ends.cpu()), HALF, str(sizes))
