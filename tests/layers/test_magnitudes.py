"""Magnitudes handed over by norms and SwiGLU give the same bits as magnitudes computed by layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.fp8 import torch_casts
from lightning_megatron.layers.fp8.delayed import DelayedScales
from lightning_megatron.layers.fp8.magnitude import (
    GradientMagnitude,
    Magnitude,
    find_magnitude,
    no_magnitude,
)
from lightning_megatron.layers.fp8.operand import needed
from lightning_megatron.layers.fp8.scaling import Scaling
from lightning_megatron.layers.linear import ColumnParallelLinear
from lightning_megatron.layers.mlp import MLP
from lightning_megatron.layers.norm import LayerNorm, RMSNorm
from lightning_megatron.layers.swiglu import apply_swiglu
from lightning_megatron.models.layered import single_mesh
from lightning_megatron.plan.fp8 import FP8
from lightning_megatron.plan.layout import ParallelLayout
from tests.layers.noted_casts import CONFIGS, GIVEN, compare_hand_over, given, noting_casts
from tests.layers.test_fp8_products import draw
from tests.world import run_world

SETTINGS = FP8("tensorwise", emulate=True)


def magnitude_bits(tensor: Tensor) -> Tensor:
    """Return the bit pattern of the magnitude, computed by a separate pass."""
    return torch_casts.magnitude_parts(tensor.detach().reshape(1, -1)).amax()


def draw_with_outlier(
    *shape: int, strange: float | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    tensor = draw(*shape, dtype=dtype)
    if strange is not None:
        tensor.view(-1)[3] = strange
    return tensor


@pytest.mark.parametrize("strange", [None, float("inf"), float("nan")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_norms_and_swiglu_compute_the_magnitude_of_their_output(strange, dtype):
    mesh = single_mesh(0)
    hidden = draw_with_outlier(5, 2, 32, strange=strange, dtype=dtype)
    for norm in (RMSNorm(32, mesh), LayerNorm(32, mesh)):
        for update in (None, draw_with_outlier(5, 2, 32, dtype=dtype)):
            magnitude = no_magnitude(hidden)
            stream, normalized = norm.to(dtype)(hidden, update, True, magnitude)
            expected = norm(hidden, update, True)
            assert torch.equal(normalized.nan_to_num(), expected[1].nan_to_num())
            assert torch.equal(stream.nan_to_num(), expected[0].nan_to_num())
            assert torch.equal(magnitude.amax(), magnitude_bits(normalized))
    features = hidden.clone().requires_grad_()
    gradient_magnitude = GradientMagnitude()
    gradients: list[Tensor] = []
    swiglu_input = features * 1
    swiglu_input.register_hook(gradients.append)
    magnitude = no_magnitude(swiglu_input)
    output = apply_swiglu(swiglu_input, magnitude, gradient_magnitude)
    assert torch.equal(magnitude.amax(), magnitude_bits(output))
    output.backward(draw_with_outlier(5, 2, 16, dtype=dtype))
    taken = gradient_magnitude.take(gradients[0])
    assert taken is not None
    assert torch.equal(taken.amax(), magnitude_bits(features.grad))
    assert gradient_magnitude.take(gradients[0]) is None


def test_find_magnitude_keeps_the_maximum_of_all_calls():
    magnitude = no_magnitude(torch.zeros(1))
    find_magnitude(torch.tensor([[1.0, -3.0]]), magnitude)
    find_magnitude(torch.tensor([[2.0]]), magnitude)
    assert float(magnitude.amax().view(torch.float32)) == 3.0


def test_a_magnitude_is_returned_only_for_its_unchanged_tensor():
    tensor = draw(4, 6)
    magnitude = Magnitude(tensor, no_magnitude(tensor))
    assert magnitude.of(tensor) is magnitude.parts
    for view in (tensor.view(2, 12), tensor.detach(), tensor[None], tensor.view_as(tensor)):
        assert magnitude.of(view) is magnitude.parts
    other_tensors: dict[str, Tensor] = {
        "a copy": tensor.clone(),
        "a part": tensor[:2],
        "a transposed view": tensor.t(),
        "bits of another type": tensor.view(torch.int64),
        "the rounded numbers": tensor.float(),
    }
    assert [name for name, value in other_tensors.items() if magnitude.of(value) is not None] == []
    tensor[2, 3] = 1e9
    assert magnitude.of(tensor) is None
    assert magnitude.of(tensor.view(-1)) is None
    assert Magnitude(tensor, magnitude.parts).of(tensor) is magnitude.parts


@pytest.mark.parametrize(
    "recompute",
    ["none", "selective", "full", "full_except_core", "norms", "activations"],
)
@pytest.mark.parametrize("kind", list(CONFIGS))
def test_models_with_hand_over_have_the_same_bits_as_models_without(kind, recompute):
    if recompute == "norms" and kind in ("post-norm", "neox"):
        pytest.skip("these norms are not recomputed alone")
    casts = compare_hand_over(CONFIGS[kind], ParallelMesh.single(seed=0), recompute=recompute)
    inputs, gradients = GIVEN[kind]
    # A recomputed block casts its inputs again; early stops leave out the last cast.
    if not recompute.startswith("full"):
        assert given(casts, "input") == 2 * 2 * [*inputs]
    assert sum(given(casts, "input")) >= 2 * 2 * sum(inputs)
    assert given(casts, "gradient") == 2 * 2 * [*reversed(gradients)]


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise", "delayed"])
def test_delayed_scaling_gets_magnitudes_but_rowwise_and_blockwise_do_not(recipe):
    sizes = {"hidden_size": 128, "num_heads": 1, "num_kv_heads": 1, "ffn_hidden_size": 128}
    config = type(CONFIGS["llama"]).llama(vocab_size=64, max_seq_length=16, num_layers=1, **sizes)
    casts = compare_hand_over(config, ParallelMesh.single(seed=0), recipe=recipe)
    # Before the end of the first step there are no scales of earlier steps.
    assert any(given(casts, "input")) == (recipe == "delayed")


def test_delayed_scales_ignore_magnitudes_after_the_first_step():
    settings = FP8("delayed", emulate=True)
    scales = DelayedScales(settings, ["one"], torch.device("cpu"))
    scaling = Scaling(settings, True, scales.layer(0))
    assert scaling.reads_magnitudes
    scales.end_step(single_mesh(0))
    assert not scaling.reads_magnitudes
    matrix = draw(16, 32, dtype=torch.float32)
    # A given magnitude has no effect after the first step.
    wrong_magnitude = no_magnitude(matrix) + 5
    actual = needed(scaling.cast_input(matrix, rows=True, columns=False, bits=wrong_magnitude).rows)
    expected = needed(scaling.cast_input(matrix, rows=True, columns=False).rows)
    assert torch.equal(actual.scale, expected.scale)


def scaled_mlp(recomputes: bool = False) -> MLP:
    layer = MLP(32, 48, single_mesh(0), activation="swiglu", bias=True).double()
    layer.recomputes_activation = recomputes
    with torch.no_grad():
        for seed, parameter in enumerate(layer.parameters()):
            parameter.copy_(draw(*parameter.shape, seed=seed))
    for linear in (layer.gate_up, layer.down):
        linear.scaling = Scaling(SETTINGS, emulate=True)
    return layer


def test_layers_compute_magnitudes_themselves_in_inference_mode():
    scaling = Scaling(SETTINGS, emulate=True)
    assert scaling.reads_magnitudes
    with torch.inference_mode():
        assert not scaling.reads_magnitudes
    layer = scaled_mlp()
    hidden = draw(16, 1, 32)
    expected = layer(hidden)
    with torch.inference_mode():
        assert torch.equal(layer(hidden), expected)


def double_input(module: nn.Module, args: tuple[Any, ...]) -> Any:
    return (args[0] * 2, *args[1:])


def double_input_in_place(module: nn.Module, args: tuple[Any, ...]) -> None:
    with torch.no_grad():
        args[0].mul_(2)


def double_gradient(module: nn.Module, args: Any, output: Tensor) -> None:
    output.register_hook(lambda grad: grad * 2)


def double_gradient_in_place(module: nn.Module, args: Any, output: Tensor) -> None:
    output.register_hook(lambda grad: grad.mul_(2))


def read_twice(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output + F.relu(output)


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize(
    ("name", "hook", "is_input"),
    [
        ("down", double_input, True),
        ("down", double_input_in_place, True),
        ("gate_up", double_gradient, False),
        ("gate_up", double_gradient_in_place, False),
        ("gate_up", read_twice, False),
    ],
)
def test_magnitudes_of_tensors_changed_by_hooks_are_not_handed_over(
    name, hook, is_input, recomputes
):
    results = []
    for hands_over in (True, False):
        layer = scaled_mlp(recomputes)
        linear = layer.get_submodule(name)
        if is_input:
            linear.register_forward_pre_hook(hook)
        else:
            linear.register_forward_hook(hook)
        hidden = draw(20, 2, 32).requires_grad_()
        with noting_casts(hands_over) as casts:
            output = layer(hidden)
            output.backward(draw(20, 2, 32, seed=1))
        results.append(
            (output, hidden.grad, *(parameter.grad for parameter in layer.parameters()), casts)
        )
    for handed_over, computed in zip(*(result[:-1] for result in results), strict=True):
        assert torch.equal(handed_over, computed)
    # The magnitude of the unchanged tensor is still handed over. Hooks of a gradient may run before
    # its magnitude is computed.
    casts = results[0][-1]
    assert given(casts, "input") == [False, not is_input]
    assert given(casts, "gradient")[1] or not is_input


def test_an_mlp_uses_a_magnitude_only_for_the_tensor_it_describes():
    layer = scaled_mlp()
    hidden = draw(20, 2, 32)
    magnitude = no_magnitude(hidden)
    find_magnitude(hidden, magnitude)
    for tensor, is_known in ((hidden, True), (hidden.clone(), False)):
        with noting_casts() as casts:
            layer(tensor, Magnitude(hidden, magnitude))
        assert given(casts, "input") == [is_known, True]


def compare_in_world(rank: int, size: int) -> list[tuple[list[bool], list[bool]]]:
    """Compare models with and without hand-over in several layouts, on every rank."""
    casts_with_magnitude = []
    for layout, sequence_parallel in (({"tp": 2}, False), ({"tp": 2}, True), ({"cp": 2}, False)):
        mesh = ParallelMesh.create(
            ParallelLayout(world_size=size, **layout), seed=0, sequence_parallel=sequence_parallel
        )
        for kind in ("llama", "gpt2"):
            casts = compare_hand_over(CONFIGS[kind], mesh, dtype=torch.float64)
            casts_with_magnitude.append((given(casts, "input"), given(casts, "gradient")))
        scaling = Scaling(SETTINGS, emulate=True)
        matrix = draw(16, 32, seed=rank)
        magnitude = no_magnitude(matrix)
        find_magnitude(matrix, magnitude)
        before = magnitude.clone()
        axes = {"rows": True, "columns": False, "row_axes": (mesh.cp, mesh.tp)}
        actual = needed(scaling.cast_input(matrix, **axes, bits=magnitude).rows)
        expected = needed(scaling.cast_input(matrix, **axes).rows)
        assert torch.equal(actual.scale, expected.scale)
        # Another layer that reads the matrix may have other axes.
        assert torch.equal(magnitude, before)
        mesh.destroy()
    return casts_with_magnitude


def test_parallel_ranks_hand_over_the_same_magnitudes_as_one_process():
    expected = []
    for kind in ("llama", "gpt2"):
        inputs, gradients = GIVEN[kind]
        expected.append((2 * 2 * [*inputs], 2 * 2 * [*reversed(gradients)]))
    for casts_with_magnitude in run_world(compare_in_world, 2):
        assert casts_with_magnitude == 3 * expected


@pytest.mark.parametrize("has_bias", [False, True])
def test_a_magnitude_is_no_input_of_the_autograd_node(has_bias):
    layer = ColumnParallelLinear(32, 48, single_mesh(0), bias=has_bias).double()
    layer.scaling = Scaling(SETTINGS, emulate=True)
    hidden = draw(16, 1, 32).requires_grad_()
    magnitude = no_magnitude(hidden)
    find_magnitude(hidden, magnitude)
    output = layer(hidden, magnitude=Magnitude(hidden, magnitude))
    # The product is behind the node of the view; it has an input, a weight and perhaps a bias.
    (product, _), *_ = output.grad_fn.next_functions
    assert len(product.next_functions) == 2 + has_bias
