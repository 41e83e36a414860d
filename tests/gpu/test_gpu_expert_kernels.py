"""Tests that the kernels of experts equal float64 on a GPU, and that mixtures of experts on them
agree with torch's operators.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron.experts.compute.grouped_mlp import GroupedMLP
from lightning_megatron.experts.routing.exact_linear import exact_linear
from lightning_megatron.experts.routing.router import Router
from lightning_megatron.experts.transport.choose_transport import choose_transport
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.fused import choose_kernels
from lightning_megatron.layers.parameters.init import initialize_
from lightning_megatron.plan.experts import ExpertsConfig

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs triton, which comes with the CUDA builds of torch", allow_module_level=True)

from tests.gpu.grouped import assert_close, captured
from tests.kernels.checks import Draw
from tests.kernels.expert_checks import CHECKS, ONLY_FLOAT32, REAL, SMALL
from tests.oracles import relative_difference

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)
SIZE, LENGTH, BATCH = 256, 64, 3


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"]
)
@pytest.mark.parametrize("sizes", [SMALL, REAL], ids=["small", "real"])
@pytest.mark.parametrize("name", list(CHECKS))
def test_kernels_of_experts_equal_float64(name, sizes, dtype):
    if name in ONLY_FLOAT32 and dtype != torch.float32:
        pytest.skip("has no half type")
    CHECKS[name](Draw(DEVICE, dtype), sizes)
    torch.cuda.empty_cache()


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.bfloat16, 2.5e-3), (torch.float16, 3e-4)])
def test_the_product_of_the_router_has_float32_precision(dtype, rounding):
    draw = Draw(DEVICE, dtype)
    inputs = draw(1000, 2, 2048).requires_grad_(), draw(128, 2048, scale=0.02).requires_grad_()
    outer = torch.randn(1000, 2, 128, device=DEVICE)
    # The sums of rows are zero, as in a gradient of softmax, so that early rounding shows.
    outer -= outer.mean(-1, keepdim=True)
    logits = exact_linear(inputs[0], inputs[1])
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    expected_logits = wide[0] @ wide[1].t()
    assert logits.dtype == torch.float32
    distance = (logits - expected_logits).abs().max() / expected_logits.abs().max()
    assert distance.item() < 1e-5
    gradients = torch.autograd.grad(logits, inputs, outer)
    expected_gradients = torch.autograd.grad(expected_logits, wide, outer.double())
    for actual, expected in zip(gradients, expected_gradients, strict=True):
        assert relative_difference(actual, expected) < rounding


def mixture(config: ExpertsConfig, hidden: Tensor, keeps_rows: bool = True) -> list[Tensor]:
    """Return the output of a router and its experts, and all gradients."""
    mesh = ParallelMesh.single(DEVICE, seed=0)
    router, experts = Router(config, SIZE, mesh), GroupedMLP(SIZE, config, mesh)
    initialize_(router, DEVICE, 1)
    initialize_(experts, DEVICE, 2)
    with torch.no_grad():
        for parameter in (*router.parameters(), *experts.parameters()):
            parameter.mul_(4.0)
    router, experts = router.to(DEVICE, torch.bfloat16), experts.to(DEVICE, torch.bfloat16)
    hidden = hidden.detach().requires_grad_()
    routing = router(hidden)
    dispatcher = choose_transport(config.num_experts, config.top_k, mesh).dispatcher
    prepared = dispatcher.prepare(hidden.flatten(0, 1), routing.probabilities, routing.experts)
    sent = dispatcher.receive(dispatcher.send(prepared))
    recipe = None if keeps_rows else dispatcher.rows_recipe(sent)
    outputs = experts(sent.rows, sent.probabilities, sent.ends, rows_recipe=recipe)
    output = dispatcher.combine(dispatcher.send_back(outputs, sent))
    losses = [loss for loss in (routing.losses.balance, routing.losses.z) if loss is not None]
    outer = torch.randn(
        output.shape, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(3)
    )
    total = (output.float() * outer).sum() + sum(losses, start=torch.zeros((), device=DEVICE))
    leaves = (hidden, *router.parameters(), *experts.parameters())
    grads = torch.autograd.grad(total, leaves)
    return [tensor.detach() for tensor in (output, routing.load.float(), *losses, *grads)]


SETTINGS: dict[str, dict[str, Any]] = {
    "softmax": {"aux_loss": 10.0, "z_loss": 1.0},
    "sequence": {"aux_loss": 10.0, "aux_loss_scope": "sequence", "normalize_top_k": False},
    "DeepSeek-V3": {
        "scoring": "sigmoid", "num_groups": 4, "top_k_groups": 2, "expert_bias": True, "aux_loss": 1.0,
    },
    "capacity": {"capacity_factor": 0.8},
}  # fmt: skip


@pytest.mark.parametrize("name", list(SETTINGS))
def test_a_mixture_of_experts_on_kernels_agrees_with_operators_of_torch(name, monkeypatch):
    config = ExpertsConfig(num_experts=16, top_k=4, ffn_hidden_size=128, **SETTINGS[name])
    hidden = Draw(DEVICE, torch.bfloat16)(LENGTH, BATCH, SIZE)
    fused, repeated = mixture(config, hidden), mixture(config, hidden)
    assert all(map(torch.equal, fused, repeated)), "a second run has other bits"
    repeated = mixture(config, hidden, keeps_rows=False)
    assert all(map(torch.equal, fused, repeated)), "rows that are sorted again have other bits"
    monkeypatch.setattr(choose_kernels, "is_served", lambda tensor: False)
    for number, (actual, expected) in enumerate(zip(fused, mixture(config, hidden), strict=True)):
        assert_close(actual, expected.double(), 2e-2, f"result {number}")


def test_a_captured_graph_follows_new_choices_of_experts():
    config = ExpertsConfig(num_experts=16, top_k=4, ffn_hidden_size=128)
    mesh = ParallelMesh.single(DEVICE, seed=0)
    dispatcher = choose_transport(config.num_experts, config.top_k, mesh).dispatcher
    draw = Draw(DEVICE, torch.bfloat16)
    hidden, probabilities = draw(300, SIZE), torch.rand(300, 4, device=DEVICE)
    experts = torch.rand(300, 16, device=DEVICE).topk(4).indices

    def step() -> Tensor:
        prepared = dispatcher.prepare(hidden, probabilities, experts)
        sent = dispatcher.receive(dispatcher.send(prepared))
        outputs = sent.rows * sent.probabilities.unsqueeze(1).to(sent.rows.dtype)
        return dispatcher.combine(dispatcher.send_back(outputs, sent))

    with torch.no_grad():
        graph, replayed = captured(step)
        for choices in (
            torch.rand(300, 16, device=DEVICE).topk(4).indices,
            torch.full_like(experts, -1),
        ):
            experts.copy_(choices)
            graph.replay()
            assert torch.equal(replayed, step())
    assert not replayed.any()
