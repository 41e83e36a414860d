"""Outputs and gradients of grouped experts with permute and unpermute equal a loop over tokens."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import GptOssConfig, MixtralConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from lightning_megatron.errors import ParallelPlanError, UnsupportedError
from lightning_megatron.experts.compute import grouped_mlp
from lightning_megatron.experts.compute.backends import stacked
from lightning_megatron.experts.compute.grouped_mlp import GroupedMLP
from lightning_megatron.experts.transport.choose_transport import choose_transport
from lightning_megatron.experts.transport.permute import (
    map_rows,
    permute,
    permute_probabilities,
    unpermute,
)
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import shard_spec_of
from lightning_megatron.layers.init import initialize_
from lightning_megatron.layers.stacked_view import stacked_view
from lightning_megatron.plan.experts import ExpertsConfig
from lightning_megatron.plan.shards import even_range
from lightning_megatron.training import MainParameters
from tests.experts.dense import ACTIVATIONS, CASES, Routed, dense, draw, route

NUM_EXPERTS, SIZE, INNER = 4, 6, 8
CONFIG = ExpertsConfig(num_experts=NUM_EXPERTS, top_k=2, ffn_hidden_size=INNER)


@pytest.fixture(autouse=True)
def _fill_memory_with_nan() -> Iterator[None]:
    """Fill uninitialized memory with NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def build_experts(
    activation: str = "swiglu", mesh: ParallelMesh | None = None, **settings: Any
) -> GroupedMLP:
    mesh = mesh or ParallelMesh.single()
    config = replace(CONFIG, **settings)
    module = GroupedMLP(SIZE, config, mesh, activation=activation).double()  # type: ignore[arg-type]
    for name, parameter in module.named_parameters():
        parameter.data = draw(name, shape=tuple(parameter.shape))
    return module


def weights_of(module: GroupedMLP) -> list[tuple[Tensor, Tensor]]:
    return list(zip(module.weights(module.first_name), module.weights("down"), strict=True))


def biases_of(module: GroupedMLP) -> list[tuple[Tensor, Tensor]] | None:
    if not module.has_biases:
        return None
    return list(zip(module.biases(module.first_name), module.biases("down"), strict=True))


def run_mixture(routed: Routed, module: GroupedMLP) -> Tensor:
    dispatcher = choose_transport(NUM_EXPERTS, 2, ParallelMesh.single()).dispatcher
    prepared = dispatcher.prepare(routed.hidden, routed.probabilities, routed.experts)
    received = dispatcher.receive(dispatcher.send(prepared))
    outputs = module(received.rows, received.probabilities, received.ends)
    return dispatcher.combine(dispatcher.send_back(outputs, received))


@pytest.mark.parametrize("num_tokens", [9, 1, 0])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("has_biases", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_outputs_and_all_gradients_equal_those_of_a_loop_over_tokens(
    activation: str, has_biases: bool, case: str, num_tokens: int
) -> None:
    module = build_experts(activation, linear_bias=has_biases)
    routed = route(case, num_tokens, SIZE, NUM_EXPERTS)
    inputs = (routed.hidden, routed.probabilities, *module.parameters())
    expected_output = dense(routed, weights_of(module), activation, biases_of(module))
    expected_gradients = torch.autograd.grad(
        (expected_output * routed.outer).sum(), inputs, allow_unused=True, materialize_grads=True
    )
    output = run_mixture(routed, module)
    assert torch.allclose(output, expected_output, atol=1e-10, rtol=0)
    gradients = torch.autograd.grad((output * routed.outer).sum(), inputs)
    for number, (actual, expected) in enumerate(zip(gradients, expected_gradients, strict=True)):
        assert torch.allclose(actual, expected, atol=1e-10, rtol=0), number


@pytest.mark.parametrize("case", CASES)
def test_unpermute_multiplies_by_probabilities(case: str) -> None:
    routed = route(case, 9, SIZE, NUM_EXPERTS)
    inputs = (routed.hidden, routed.probabilities)
    row_map = map_rows(routed.experts, 0, NUM_EXPERTS)
    doubled = unpermute(2 * permute(routed.hidden, row_map), row_map, routed.probabilities)
    scales = torch.where(routed.experts >= 0, routed.probabilities, 0.0)
    expected_output = 2 * routed.hidden * scales.sum(1, keepdim=True)
    assert torch.allclose(doubled, expected_output, atol=1e-10, rtol=0)
    gradients = torch.autograd.grad((doubled * routed.outer).sum(), inputs)
    expected_gradients = torch.autograd.grad((expected_output * routed.outer).sum(), inputs)
    assert all(
        torch.allclose(actual, expected, atol=1e-10, rtol=0)
        for actual, expected in zip(gradients, expected_gradients, strict=True)
    )


def test_row_maps_keep_the_order_of_tokens_and_have_static_sizes() -> None:
    experts = torch.tensor([[3, 1], [1, -1], [5, 2], [2, 1]])
    row_map = map_rows(experts, 1, 2)
    assert row_map.pairs.shape == (4 * 2,)
    assert row_map.pairs[:5].tolist() == [1, 2, 7, 5, 6]
    assert row_map.ends.tolist() == [3, 5]
    assert row_map.ends.dtype == torch.int32
    assert map_rows(experts, 1, 1).pairs.shape == (4,)


@pytest.mark.parametrize("case", ["random", "some without tokens", "every expert"])
def test_experts_equal_those_of_hugging_face(case: str) -> None:
    module, routed = build_experts(), route(case, 9, SIZE, NUM_EXPERTS)
    sizes = MixtralConfig(hidden_size=SIZE, intermediate_size=INNER, num_local_experts=NUM_EXPERTS)
    sizes._experts_implementation = "eager"
    reference = MixtralExperts(sizes).double()
    weights = {"gate_up_proj": module.weights("gate_up"), "down_proj": module.weights("down")}
    for name, ours in weights.items():
        getattr(reference, name).data.copy_(torch.stack(ours))
    expected_output = reference(routed.hidden, routed.experts, routed.probabilities)
    inputs = (routed.hidden, routed.probabilities)
    expected_gradients = torch.autograd.grad(
        (expected_output * routed.outer).sum(), (*inputs, *reference.parameters())
    )
    output = run_mixture(routed, module)
    assert torch.allclose(output, expected_output, atol=1e-10, rtol=0)
    names = [name for name, _ in reference.named_parameters()]
    leaves = (*inputs, *[weight for name in names for weight in weights[name]])
    gradients = torch.autograd.grad((output * routed.outer).sum(), leaves)
    stacks = [
        torch.stack(gradients[start : start + NUM_EXPERTS])
        for start in range(2, len(gradients), NUM_EXPERTS)
    ]
    for actual, expected in zip([*gradients[:2], *stacks], expected_gradients, strict=True):
        assert torch.allclose(actual, expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("scale", [1.0, 8.0])
def test_experts_equal_those_of_gpt_oss_within_and_beyond_the_clamp_limits(scale: float) -> None:
    module = build_experts("clamped_swiglu", linear_bias=True)
    routed = route("random", 9, SIZE, NUM_EXPERTS)
    sizes = GptOssConfig(hidden_size=SIZE, intermediate_size=INNER, num_local_experts=NUM_EXPERTS)
    sizes._experts_implementation = "eager"
    reference: Any = GptOssExperts(sizes).double()
    names = ("gate_up", "down")
    with torch.no_grad():
        for weight in module.weights("gate_up"):
            weight.mul_(scale)
        for name in names:
            # GPT-OSS stores the input dimension first, and alternates gate and up.
            stack, bias = torch.stack(module.weights(name)), torch.stack(module.biases(name))
            if name == "gate_up":
                stack, bias = (
                    torch.stack(tensor.chunk(2, dim=1), 2).flatten(1, 2) for tensor in (stack, bias)
                )
            getattr(reference, f"{name}_proj").copy_(stack.transpose(1, 2))
            getattr(reference, f"{name}_proj_bias").copy_(bias)
    expected_output = reference(routed.hidden, routed.experts, routed.probabilities)
    inputs = (routed.hidden, routed.probabilities)
    leaves = (*inputs, *(getattr(reference, f"{name}_proj_bias") for name in names))
    expected_gradients = torch.autograd.grad(
        (expected_output * routed.outer).sum(), (*leaves, reference.down_proj)
    )
    output = run_mixture(routed, module)
    assert torch.allclose(output, expected_output, atol=1e-10, rtol=0)
    gradients = torch.autograd.grad(
        (output * routed.outer).sum(),
        (*inputs, *module.biases("gate_up"), *module.biases("down"), *module.weights("down")),
    )
    first, second, down = (
        torch.stack(gradients[start : start + NUM_EXPERTS])
        for start in range(2, len(gradients), NUM_EXPERTS)
    )
    first = torch.stack(first.chunk(2, dim=1), 2).flatten(1)
    for actual, expected in zip(
        (*gradients[:2], first, second, down.transpose(1, 2)), expected_gradients, strict=True
    ):
        assert torch.allclose(actual, expected, atol=1e-9, rtol=0)


def test_clones_of_experts_with_biases_are_refused() -> None:
    module = build_experts(linear_bias=True)
    rows, ends = torch.zeros(3, SIZE), torch.full((NUM_EXPERTS,), 3, dtype=torch.int32)
    with pytest.raises(UnsupportedError, match="expert_clones needs experts without biases"):
        module(rows.double(), torch.ones(3), ends, clones=())


def test_training_stacks_biases_without_a_change_of_the_stride_of_weights() -> None:
    strides = []
    for has_biases in (False, True):
        experts = build_experts(linear_bias=has_biases)
        parameters = dict(experts.named_parameters())
        names = {id(parameter): name for name, parameter in parameters.items()}
        all_biases = (*experts.biases("gate_up"), *experts.biases("down")) if has_biases else ()
        stacks = [tuple(names[id(bias)] for bias in all_biases)]
        MainParameters(parameters, ParallelMesh.single(), stacks=stacks).attach(
            torch.optim.AdamW(experts.parameters())
        )
        for get_parameters in (
            (experts.weights, experts.biases) if has_biases else (experts.weights,)
        ):
            for name in ("gate_up", "down"):
                assert stacked_view(get_parameters(name)) is not None, name
        strides.append(stacked(experts.weights("gate_up")).stride(0))
    assert strides[0] == strides[1]


def test_autocast_outputs_are_bfloat16_and_gradients_have_the_dtype_of_operands() -> None:
    module, routed = build_experts().float(), route("random", 9, SIZE, NUM_EXPERTS)
    hidden, probabilities = (
        tensor.detach().float().requires_grad_() for tensor in (routed.hidden, routed.probabilities)
    )
    with torch.autocast("cpu", torch.bfloat16):
        output = run_mixture(Routed(hidden, probabilities, routed.experts, routed.outer), module)
    assert output.dtype == torch.bfloat16
    output.float().square().sum().backward()
    assert torch.allclose(
        output.double(), run_mixture(routed, build_experts()), atol=0.05, rtol=0.1
    )
    for leaf in (hidden, probabilities, *module.parameters()):
        assert leaf.grad is not None
        assert leaf.grad.dtype == torch.float32


def test_permute_and_unpermute_read_nothing_from_the_device() -> None:
    # A fake tensor has no values: a read of a value, or of a size that depends on values, raises.
    with FakeTensorMode():
        hidden, probabilities = (
            torch.empty(9, SIZE, requires_grad=True),
            torch.empty(9, 2, requires_grad=True),
        )
        row_map = map_rows(torch.zeros(9, 2, dtype=torch.int64), 0, NUM_EXPERTS)
        rows = permute(hidden, row_map) * permute_probabilities(probabilities, row_map).unsqueeze(1)
        unpermute(rows, row_map).sum().backward()
    assert hidden.grad is not None


def test_training_stores_the_weights_of_all_experts_as_one_tensor() -> None:
    module = build_experts()
    copies = stacked(module.weights("gate_up"))
    assert copies.data_ptr() != module.weights("gate_up")[0].data_ptr()
    MainParameters(dict(module.named_parameters()), ParallelMesh.single()).attach(
        torch.optim.AdamW(module.parameters())
    )
    for name in ("gate_up", "down"):
        assert stacked(module.weights(name)).data_ptr() == module.weights(name)[0].data_ptr()
    assert torch.equal(stacked(module.weights("gate_up")), copies)


def test_initial_weights_differ_between_experts() -> None:
    wrapped = nn.ModuleDict({"experts": GroupedMLP(SIZE, CONFIG, ParallelMesh.single())})
    initialize_(wrapped, "cpu", 3)
    names = {name for name, _ in wrapped.named_parameters()}
    kinds = ("gate_up", "down")
    assert names == {
        f"experts.{number}.{kind}.weight" for number in range(NUM_EXPERTS) for kind in kinds
    }
    first = wrapped.get_parameter("experts.0.gate_up.weight")
    assert not torch.equal(first, wrapped.get_parameter("experts.1.gate_up.weight"))
    assert shard_spec_of(first).is_expert


def test_indivisible_numbers_of_experts_are_refused() -> None:
    with pytest.raises(
        ParallelPlanError,
        match=r"num_experts \(4\) must be a multiple of ep \(8\).*Use ep of 1, 2 or",
    ):
        even_range(NUM_EXPERTS, 8, 0, what="num_experts", axis="ep")


def test_backends_are_chosen_once_for_each_dtype(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen_dtypes: list[torch.dtype] = []
    choose = grouped_mlp.choose_layer_backends

    def record_choice(device: torch.device, dtype: torch.dtype, *args: Any, **kwargs: Any) -> Any:
        chosen_dtypes.append(dtype)
        return choose(device, dtype, *args, **kwargs)

    monkeypatch.setattr(grouped_mlp, "choose_layer_backends", record_choice)
    module = build_experts().float()
    rows, probabilities = torch.ones(5, SIZE), torch.ones(5)
    ends = torch.tensor([1, 2, 2, 5], dtype=torch.int32)
    for _ in range(3):
        module(rows, probabilities, ends)
    assert chosen_dtypes == [torch.float32]
    with torch.autocast("cpu", torch.bfloat16):
        module(rows, probabilities, ends)
    deepcopy(module).double()(rows.double(), probabilities, ends)
    assert chosen_dtypes == [torch.float32, torch.bfloat16, torch.float64]
