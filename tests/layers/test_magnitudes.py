"""Magnitudes that norms and SwiGLU hand over give the same bits as those that layers find."""

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


def parts_of(tensor: Tensor) -> Tensor:
    """Return the bit pattern of the magnitude, by a pass of its own."""
    return torch_casts.magnitude_parts(tensor.detach().reshape(1, -1)).amax()


def drawn(*shape: int, strange: float | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
    tensor = draw(*shape, dtype=dtype)
    if strange is not None:
        tensor.view(-1)[3] = strange
    return tensor


@pytest.mark.parametrize("strange", [None, float("inf"), float("nan")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_norms_and_swiglu_find_the_magnitude_of_their_output(strange, dtype):
    mesh = single_mesh(0)
    hidden = drawn(5, 2, 32, strange=strange, dtype=dtype)
    for norm in (RMSNorm(32, mesh), LayerNorm(32, mesh)):
        for update in (None, drawn(5, 2, 32, dtype=dtype)):
            seen = no_magnitude(hidden)
            stream, found = norm.to(dtype)(hidden, update, True, seen)
            expected = norm(hidden, update, True)
            assert torch.equal(found.nan_to_num(), expected[1].nan_to_num())
            assert torch.equal(stream.nan_to_num(), expected[0].nan_to_num())
            assert torch.equal(seen.amax(), parts_of(found))
    features = hidden.clone().requires_grad_()
    of_gradient = GradientMagnitude()
    gradients: list[Tensor] = []
    whole = features * 1
    whole.register_hook(gradients.append)
    seen = no_magnitude(whole)
    output = apply_swiglu(whole, seen, of_gradient)
    assert torch.equal(seen.amax(), parts_of(output))
    output.backward(drawn(5, 2, 16, dtype=dtype))
    found = of_gradient.take(gradients[0])
    assert found is not None
    assert torch.equal(found.amax(), parts_of(features.grad))
    assert of_gradient.take(gradients[0]) is None


def test_a_magnitude_grows_from_the_one_that_was_seen():
    seen = no_magnitude(torch.zeros(1))
    find_magnitude(torch.tensor([[1.0, -3.0]]), seen)
    find_magnitude(torch.tensor([[2.0]]), seen)
    assert float(seen.amax().view(torch.float32)) == 3.0


def test_a_magnitude_belongs_to_its_tensor_alone():
    tensor = draw(4, 6)
    found = Magnitude(tensor, no_magnitude(tensor))
    assert found.of(tensor) is found.parts
    for same in (tensor.view(2, 12), tensor.detach(), tensor[None], tensor.view_as(tensor)):
        assert found.of(same) is found.parts
    others: dict[str, Tensor] = {
        "a copy": tensor.clone(),
        "a part": tensor[:2],
        "a transposed view": tensor.t(),
        "bits of another type": tensor.view(torch.int64),
        "the rounded numbers": tensor.float(),
    }
    assert [name for name, other in others.items() if found.of(other) is not None] == []
    tensor[2, 3] = 1e9
    assert found.of(tensor) is None
    assert found.of(tensor.view(-1)) is None
    assert Magnitude(tensor, found.parts).of(tensor) is found.parts


@pytest.mark.parametrize(
    "recompute",
    ["none", "selective", "full", "full_except_core", "norms", "activations"],
)
@pytest.mark.parametrize("kind", list(CONFIGS))
def test_models_have_the_bits_of_models_without_hand_over(kind, recompute):
    if recompute == "norms" and kind in ("post-norm", "neox"):
        pytest.skip("these norms are not recomputed alone")
    casts = compare_hand_over(CONFIGS[kind], ParallelMesh.single(seed=0), recompute=recompute)
    inputs, gradients = GIVEN[kind]
    # A block that is computed again casts its inputs again; early stops leave out the last.
    if not recompute.startswith("full"):
        assert given(casts, "input") == 2 * 2 * [*inputs]
    assert sum(given(casts, "input")) >= 2 * 2 * sum(inputs)
    assert given(casts, "gradient") == 2 * 2 * [*reversed(gradients)]


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise", "delayed"])
def test_only_recipes_whose_casts_begin_with_a_magnitude_get_one(recipe):
    sizes = {"hidden_size": 128, "num_heads": 1, "num_kv_heads": 1, "ffn_hidden_size": 128}
    config = type(CONFIGS["llama"]).llama(vocab_size=64, max_seq_length=16, num_layers=1, **sizes)
    casts = compare_hand_over(config, ParallelMesh.single(seed=0), recipe=recipe)
    # Before the end of the first step there are no scales of earlier ones.
    assert any(given(casts, "input")) == (recipe == "delayed")


def test_later_steps_with_scales_of_earlier_ones_find_no_magnitude():
    settings = FP8("delayed", emulate=True)
    scales = DelayedScales(settings, ["one"], torch.device("cpu"))
    ours = Scaling(settings, True, scales.layer(0))
    assert ours.reads_magnitudes
    scales.end_step(single_mesh(0))
    assert not ours.reads_magnitudes
    matrix = draw(16, 32, dtype=torch.float32)
    # Magnitudes that were found for a step before do no harm.
    wrong = no_magnitude(matrix) + 5
    found = needed(ours.cast_input(matrix, rows=True, columns=False, bits=wrong).rows)
    expected = needed(ours.cast_input(matrix, rows=True, columns=False).rows)
    assert torch.equal(found.scale, expected.scale)


def scaled_mlp(recomputes: bool = False) -> MLP:
    layer = MLP(32, 48, single_mesh(0), activation="swiglu", bias=True).double()
    layer.recomputes_activation = recomputes
    with torch.no_grad():
        for seed, one in enumerate(layer.parameters()):
            one.copy_(draw(*one.shape, seed=seed))
    for part in (layer.gate_up, layer.down):
        part.scaling = Scaling(SETTINGS, emulate=True)
    return layer


def test_layers_find_magnitudes_of_inference_themselves():
    ours = Scaling(SETTINGS, emulate=True)
    assert ours.reads_magnitudes
    with torch.inference_mode():
        assert not ours.reads_magnitudes
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
def test_tensors_that_hooks_change_have_magnitudes_of_their_own(name, hook, is_input, recomputes):
    results = []
    for hands_over in (True, False):
        layer = scaled_mlp(recomputes)
        part = layer.get_submodule(name)
        if is_input:
            part.register_forward_pre_hook(hook)
        else:
            part.register_forward_hook(hook)
        hidden = draw(20, 2, 32).requires_grad_()
        with noting_casts(hands_over) as casts:
            output = layer(hidden)
            output.backward(draw(20, 2, 32, seed=1))
        results.append((output, hidden.grad, *(one.grad for one in layer.parameters()), casts))
    for one, other in zip(*(found[:-1] for found in results), strict=True):
        assert torch.equal(one, other)
    # The other magnitude is still handed over. Hooks of a gradient may run before its magnitude is
    # found.
    casts = results[0][-1]
    assert given(casts, "input") == [False, not is_input]
    assert given(casts, "gradient")[1] or not is_input


def test_an_mlp_takes_the_magnitude_of_its_input_alone():
    layer = scaled_mlp()
    hidden = draw(20, 2, 32)
    seen = no_magnitude(hidden)
    find_magnitude(hidden, seen)
    for tensor, is_known in ((hidden, True), (hidden.clone(), False)):
        with noting_casts() as casts:
            layer(tensor, Magnitude(hidden, seen))
        assert given(casts, "input") == [is_known, True]


def compare_in_world(rank: int, size: int) -> list[tuple[list[bool], list[bool]]]:
    """Compare the models of several layouts with themselves, on every rank."""
    found = []
    for layout, shares in (({"tp": 2}, False), ({"tp": 2}, True), ({"cp": 2}, False)):
        mesh = ParallelMesh.create(
            ParallelLayout(world_size=size, **layout), seed=0, sequence_parallel=shares
        )
        for kind in ("llama", "gpt2"):
            casts = compare_hand_over(CONFIGS[kind], mesh, dtype=torch.float64)
            found.append((given(casts, "input"), given(casts, "gradient")))
        ours = Scaling(SETTINGS, emulate=True)
        matrix = draw(16, 32, seed=rank)
        seen = no_magnitude(matrix)
        find_magnitude(matrix, seen)
        before = seen.clone()
        axes = {"rows": True, "columns": False, "row_axes": (mesh.cp, mesh.tp)}
        cast = needed(ours.cast_input(matrix, **axes, bits=seen).rows)
        alone = needed(ours.cast_input(matrix, **axes).rows)
        assert torch.equal(cast.scale, alone.scale)
        # Another layer that reads the matrix may have other axes.
        assert torch.equal(seen, before)
        mesh.destroy()
    return found


def test_ranks_agree_on_the_magnitudes_that_they_hand_over():
    expected = []
    for kind in ("llama", "gpt2"):
        inputs, gradients = GIVEN[kind]
        expected.append((2 * 2 * [*inputs], 2 * 2 * [*reversed(gradients)]))
    for found in run_world(compare_in_world, 2):
        assert found == 3 * expected


@pytest.mark.parametrize("has_bias", [False, True])
def test_magnitudes_are_no_inputs_that_borders_of_regions_describe(has_bias):
    layer = ColumnParallelLinear(32, 48, single_mesh(0), bias=has_bias).double()
    layer.scaling = Scaling(SETTINGS, emulate=True)
    hidden = draw(16, 1, 32).requires_grad_()
    seen = no_magnitude(hidden)
    find_magnitude(hidden, seen)
    output = layer(hidden, magnitude=Magnitude(hidden, seen))
    # The node of the view, and that of the product: input, weight and perhaps bias.
    (product, _), *_ = output.grad_fn.next_functions
    assert len(product.next_functions) == 2 + has_bias
