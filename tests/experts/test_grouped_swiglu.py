"""Product and SwiGLU in one launch: choice of the launch, and its results by stand-ins for kernels."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.experts.compute import backends
from lightning_megatron.experts.compute import choose_backend as choosing
from lightning_megatron.experts.compute import grouped_linear as linear
from lightning_megatron.experts.compute.choose_backend import (
    BackendChoice,
    LayerBackends,
    choose_swiglu,
)
from lightning_megatron.experts.compute.grouped_linear import grouped_linear, grouped_swiglu
from lightning_megatron.experts.compute.grouped_mlp import GroupedMLP
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.init import initialize_
from lightning_megatron.plan.experts import ExpertsConfig
from tests.experts.test_bundled_products import Kernels

NUM_ROWS, FEATURES, IN = 16, 24, 16
ENDS = torch.tensor([3, 3, 9, 12], dtype=torch.int32)
GPU, BF16 = torch.device("cuda", 0), torch.bfloat16


def swiglu(gate_up: Tensor, probabilities: Tensor) -> Tensor:
    gate, up = gate_up.float().chunk(2, -1)
    return (F.silu(gate) * up * probabilities.unsqueeze(-1)).to(gate_up.dtype)


class Launches:
    """Stand-in for the launch, which records whether the product was kept."""

    def __init__(self, kernels: Kernels) -> None:
        self.kept: list[bool] = []
        self._kernels = kernels

    def __call__(
        self,
        result: Tensor,
        kept_product: Tensor | None,
        rows: Tensor,
        stack: Tensor,
        probabilities: Tensor,
        ends: Tensor,
        first_group: int = 0,
    ) -> None:
        self.kept.append(kept_product is not None)
        assert probabilities.dtype == torch.float32
        inner = (
            rows.new_zeros((rows.shape[0], stack.shape[1]))
            if kept_product is None
            else kept_product
        )
        if first_group == 0:
            inner.zero_()
        self._kernels(backends.Pass.FORWARD, inner, rows, stack, ends, first_group=first_group)
        rows_of_groups = slice([0, *ends.tolist()][first_group], None)
        result[rows_of_groups] = swiglu(inner, probabilities)[rows_of_groups]


class ComputedSwiglu(torch.autograd.Function):
    """Activation whose result the product has already computed; only its gradients are computed."""

    @staticmethod
    def forward(ctx, gate_up: Tensor, probabilities: Tensor, computed: tuple[Tensor]) -> Tensor:  # noqa: ANN001
        ctx.save_for_backward(gate_up, probabilities)
        return computed[0]

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # noqa: ANN001
        leaves = tuple(tensor.detach().requires_grad_() for tensor in ctx.saved_tensors)
        with torch.enable_grad():
            return (*torch.autograd.grad(swiglu(*leaves), leaves, grad), None)


def apply_weighted_swiglu(
    gate_up: Tensor, probabilities: Tensor, ends: Tensor, computed: Tensor | None = None
) -> Tensor:
    if computed is None:
        return swiglu(gate_up, probabilities)
    return ComputedSwiglu.apply(gate_up, probabilities, (computed,))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    kernels = Kernels()
    stand_in = Launches(kernels)
    monkeypatch.setattr(backends, "launch", kernels)
    monkeypatch.setattr(backends, "launch_swiglu", stand_in)
    module = SimpleNamespace(apply_weighted_swiglu=apply_weighted_swiglu)
    monkeypatch.setattr(linear, "fused_kernels", lambda rows: module)
    return stand_in


@pytest.fixture
def bundled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Pretend that the bundled kernels are available."""
    monkeypatch.setattr(
        choosing, "choose_backend", lambda *kind: BackendChoice("bundled", "they are there")
    )
    choose_swiglu.cache_clear()
    yield
    choose_swiglu.cache_clear()


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def test_outputs_and_gradients_equal_those_of_product_and_activation(launches: Launches) -> None:
    last, output_gradient, results = int(ENDS[-1]), draw(NUM_ROWS, FEATURES, seed=1), []
    output_gradient[last:] = 0
    for fused in (True, False):
        rows, probabilities = (
            draw(NUM_ROWS, IN, seed=2).requires_grad_(),
            torch.rand(NUM_ROWS).requires_grad_(),
        )
        torch.nn.init.constant_(probabilities, 0.7)
        weights = [draw(2 * FEATURES, IN, seed=3 + e).requires_grad_() for e in range(4)]
        if fused:
            output, _ = grouped_swiglu(rows, weights, probabilities, ENDS)
        else:
            inner = grouped_linear(rows, weights, ENDS, "loop").nan_to_num()
            output = swiglu(inner, probabilities)
        grads = torch.autograd.grad(output, (rows, probabilities, *weights), output_gradient)
        results.append((output[:last], grads[0][:last], grads[1][:last], *grads[2:]))
    for fused_result, separate_result in zip(*results, strict=True):
        assert torch.allclose(fused_result.float(), separate_result.float(), atol=3e-2, rtol=2e-2)
    assert launches.kept == [True]


def test_the_product_is_not_kept_without_gradients(launches: Launches) -> None:
    rows, weights = (
        draw(NUM_ROWS, IN),
        [draw(2 * FEATURES, IN, seed=e).requires_grad_() for e in range(4)],
    )
    output_with_gradients, recipe = grouped_swiglu(rows, weights, torch.ones(NUM_ROWS), ENDS)
    with torch.no_grad():
        output_without_gradients, no_recipe = grouped_swiglu(
            rows, weights, torch.ones(NUM_ROWS), ENDS
        )
    assert launches.kept == [True, False]
    assert torch.equal(output_with_gradients, output_without_gradients)
    assert no_recipe is None
    assert recipe is not None
    # The recipe computes the same result from kept tensors.
    last = int(ENDS[-1])
    assert torch.equal(recipe.make(*recipe.tensors)[:last], output_with_gradients[:last])
    assert output_with_gradients.requires_grad
    assert not output_without_gradients.requires_grad


def build_experts(activation: str) -> GroupedMLP:
    config = ExpertsConfig(num_experts=4, top_k=2, ffn_hidden_size=FEATURES)
    module = GroupedMLP(IN, config, ParallelMesh.single(), activation=activation)  # type: ignore[arg-type]
    wrapped = nn.ModuleDict({"experts": module})
    initialize_(wrapped, "cpu", 0)
    return wrapped["experts"].bfloat16()


@pytest.mark.parametrize("activation", ["swiglu", "geglu"])
def test_experts_use_one_launch_for_swiglu_if_it_is_chosen(
    activation: str, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, rows = build_experts(activation), draw(NUM_ROWS, IN)
    expected = module(rows, torch.ones(NUM_ROWS), ENDS)
    assert launches.kept == []
    is_swiglu = activation == "swiglu"
    monkeypatch.setattr(
        GroupedMLP, "_backends", lambda *_: LayerBackends("loop", "loop", fuses_swiglu=is_swiglu)
    )
    actual = module(rows, torch.ones(NUM_ROWS), ENDS)
    assert launches.kept == ([True] if activation == "swiglu" else [])
    last = int(ENDS[-1])
    assert torch.allclose(actual[:last].float(), expected[:last].float(), atol=1e-2, rtol=1e-2)


def test_without_the_kernels_a_fused_swiglu_is_not_chosen_and_is_refused() -> None:
    rows, weights = draw(NUM_ROWS, IN), [draw(2 * FEATURES, IN)]
    backends_of_layer = build_experts("swiglu")._backends(
        rows, weights, [draw(IN, FEATURES)], False
    )
    assert backends_of_layer == LayerBackends("loop", "loop", fuses_swiglu=False)
    with pytest.raises(UnsupportedError, match="half type on a GPU with Triton.*bfloat16 on cpu"):
        grouped_swiglu(rows, weights, torch.ones(NUM_ROWS), ENDS[:1])


@pytest.mark.usefixtures("bundled")
def test_the_choice_of_a_fused_swiglu_is_logged_once_with_its_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level("INFO", logger=choosing.__name__):
        assert choose_swiglu(GPU, BF16, 32, 2048, 1536).is_fused
        assert choose_swiglu(GPU, BF16, 32, 2048, 1536).is_fused
        assert not choose_swiglu(GPU, BF16, 32, 4096, 1024).is_fused
    first, second = (record.getMessage() for record in caplog.records)
    assert (
        first
        == "SwiGLU of experts in the product's kernel: it saves a pass over the product's result"
    )
    assert second.startswith(
        "SwiGLU of experts apart: the reduction over 4096 is at least 4096, and 1024 columns do not"
    )


def test_products_by_the_loop_do_not_fuse_swiglu() -> None:
    choose_swiglu.cache_clear()
    choice = choose_swiglu(torch.device("cpu"), torch.float32, 32, 2048, 1536)
    assert not choice.is_fused
    assert choice.reason == "the product is by loop"
