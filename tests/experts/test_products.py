"""Grouped products equal one product for each group, experts equal loops over tokens and experts of
Hugging Face, and both compile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from transformers import GptOssConfig, MixtralConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from lightning_megatron.experts.compute.grouped_linear import grouped_linear
from lightning_megatron.experts.compute.grouped_mlp import GroupedMLP
from lightning_megatron.experts.transport.choose_transport import choose_transport
from lightning_megatron.experts.transport.permute import (
    map_rows,
    permute,
    permute_probabilities,
    unpermute,
)
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.parameters.gradient_slot import GradientSlot, set_slot
from lightning_megatron.layers.parameters.init import initialize_
from lightning_megatron.plan.experts import ExpertsConfig
from tests.experts.dense import ACTIVATIONS, CASES, Routed, dense, draw, route

ENDS_OF_CASES = {
    "random": [3, 4, 9, 11],
    "first and last empty": [0, 5, 12, 12],
    "all to one": [0, 16, 16, 16],
    "none": [0, 0, 0, 0],
    "all rows": [1, 2, 3, 16],
}

ROWS, OUT, WIDTH = 16, 24, 16
backends = pytest.mark.parametrize(
    ("backend", "dtype", "limit"),
    [("loop", torch.float64, 1e-12), ("grouped_mm", torch.float32, 1e-4)],
)


def draw_floats(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = ((ROWS, WIDTH), (4, OUT, WIDTH), (ROWS, OUT))
    return tuple(torch.randn(size, generator=generator, dtype=dtype) for size in sizes)  # type: ignore[return-value]


@backends
@pytest.mark.parametrize("case", ENDS_OF_CASES)
def test_outputs_and_gradients_equal_those_of_one_product_for_each_group(
    case, backend, dtype, limit
):
    if backend == "grouped_mm" and not hasattr(F, "grouped_mm"):
        pytest.skip("this torch has none")
    rows, stack, output_gradient = draw_floats(dtype)
    stops = ENDS_OF_CASES[case]
    last = stops[-1]
    # A read of a row of no group would make a sum NaN.
    rows[last:] = output_gradient[last:] = torch.nan
    leaves = rows.requires_grad_(), stack.requires_grad_()
    ends = torch.tensor(stops, dtype=torch.int32)
    output = grouped_linear(rows, stack.unbind(), ends, backend)
    gradients = torch.autograd.grad(output, leaves, output_gradient)
    groups = list(zip(stack, [0, *stops], stops, strict=False))
    expected = torch.cat([F.linear(rows[start:stop], weight) for weight, start, stop in groups])
    expected_gradients = torch.autograd.grad(expected, leaves, output_gradient[:last])
    assert (output[:last] - expected).abs().sum() < limit
    assert (gradients[0][:last] - expected_gradients[0][:last]).abs().sum() < limit
    assert (gradients[1] - expected_gradients[1]).abs().max() < limit
    for gradient, (_, start, stop) in zip(gradients[1], groups, strict=True):
        assert start < stop or not gradient.any()


def test_zero_rows_give_zero_outputs_and_gradients_of_zeros():
    _, stack, _ = draw_floats(torch.float64)
    rows = torch.zeros(0, WIDTH, dtype=torch.float64, requires_grad=True)
    stack.requires_grad_()
    output = grouped_linear(rows, stack.unbind(), torch.zeros(4, dtype=torch.int32))
    output.sum().backward()
    assert output.shape == (0, OUT)
    assert not stack.grad.any()


def test_gradients_of_weights_with_slots_go_to_the_slots():
    rows, stack, output_gradient = draw_floats(torch.float64)
    weights = [nn.Parameter(weight) for weight in stack]
    weights[2].requires_grad_(False)
    sums, notices = torch.zeros_like(stack), []
    for number in (0, 2):
        slot = GradientSlot(sums[number], lambda number=number: notices.append(number))
        set_slot(weights[number], slot)
    ends = torch.tensor(ENDS_OF_CASES["random"], dtype=torch.int32)
    for _ in range(2):
        grouped_linear(rows, weights, ends).backward(output_gradient)
    assert notices == [0, 0]
    assert weights[0].grad is None
    assert weights[2].grad is None
    assert torch.allclose(sums[0], 2 * output_gradient[:3].t() @ rows[:3])
    assert torch.allclose(weights[1].grad, 2 * output_gradient[3:4].t() @ rows[3:4])


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


def assert_near(actual: Sequence[Tensor], expected: Sequence[Tensor], limit: float = 1e-10) -> None:
    for number, pair in enumerate(zip(actual, expected, strict=True)):
        assert torch.allclose(*pair, atol=limit, rtol=0), number


def gradients_of(output: Tensor, routed: Routed, *leaves: Tensor) -> list[Tensor]:
    """Return gradients of tokens, probabilities and leaves, which are 0 for experts without tokens."""
    inputs = [routed.hidden, routed.probabilities, *leaves]
    loss = (output * routed.outer).sum()
    return list(torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True))


@pytest.mark.parametrize("num_tokens", [9, 1, 0])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("has_biases", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_outputs_and_all_gradients_equal_those_of_a_loop_over_tokens(
    activation, has_biases, case, num_tokens
):
    module = build_experts(activation, linear_bias=has_biases)
    routed = route(case, num_tokens, SIZE, NUM_EXPERTS)
    expected, actual = (
        dense(routed, weights_of(module), activation, biases_of(module)),
        run_mixture(routed, module),
    )
    parameters = list(module.parameters())
    assert_near(
        (actual, *gradients_of(actual, routed, *parameters)),
        (expected, *gradients_of(expected, routed, *parameters)),
    )


def stacks(gradients: list[Tensor]) -> list[Tensor]:
    """Stack the gradients of the matrices of all experts."""
    firsts = range(0, len(gradients), NUM_EXPERTS)
    return [torch.stack(gradients[first : first + NUM_EXPERTS]) for first in firsts]


@pytest.mark.parametrize("case", ["random", "some without tokens", "every expert"])
def test_experts_equal_those_of_hugging_face(case):
    module, routed = build_experts(), route(case, 9, SIZE, NUM_EXPERTS)
    sizes = MixtralConfig(hidden_size=SIZE, intermediate_size=INNER, num_local_experts=NUM_EXPERTS)
    sizes._experts_implementation = "eager"
    reference = MixtralExperts(sizes).double()
    weights = {"gate_up_proj": module.weights("gate_up"), "down_proj": module.weights("down")}
    for name, ours in weights.items():
        getattr(reference, name).data.copy_(torch.stack(ours))
    expected = reference(routed.hidden, routed.experts, routed.probabilities)
    theirs = gradients_of(expected, routed, reference.gate_up_proj, reference.down_proj)
    output = run_mixture(routed, module)
    ours = gradients_of(output, routed, *weights["gate_up_proj"], *weights["down_proj"])
    assert_near((output, *ours[:2], *stacks(ours[2:])), (expected, *theirs))


@pytest.mark.parametrize("scale", [1.0, 8.0])
def test_experts_equal_those_of_gpt_oss_within_and_beyond_the_clamp_limits(scale):
    module = build_experts("clamped_swiglu", linear_bias=True)
    routed = route("random", 9, SIZE, NUM_EXPERTS)
    sizes = GptOssConfig(hidden_size=SIZE, intermediate_size=INNER, num_local_experts=NUM_EXPERTS)
    sizes._experts_implementation = "eager"
    reference: Any = GptOssExperts(sizes).double()

    def alternate(tensor: Tensor) -> Tensor:
        """Alternate gate and up, as GPT-OSS does."""
        return torch.stack(tensor.chunk(2, dim=1), 2).flatten(1, 2)

    with torch.no_grad():
        for weight in module.weights("gate_up"):
            weight.mul_(scale)
        for name in ("gate_up", "down"):
            stack, bias = torch.stack(module.weights(name)), torch.stack(module.biases(name))
            if name == "gate_up":
                stack, bias = alternate(stack), alternate(bias)
            # GPT-OSS stores the input dimension first.
            getattr(reference, f"{name}_proj").copy_(stack.transpose(1, 2))
            getattr(reference, f"{name}_proj_bias").copy_(bias)
    expected = reference(routed.hidden, routed.experts, routed.probabilities)
    theirs = gradients_of(
        expected,
        routed,
        reference.gate_up_proj_bias,
        reference.down_proj_bias,
        reference.down_proj,
    )
    output = run_mixture(routed, module)
    ours = gradients_of(
        output,
        routed,
        *module.biases("gate_up"),
        *module.biases("down"),
        *module.weights("down"),
    )
    first, second, down = stacks(ours[2:])
    results = (output, *ours[:2], alternate(first), second, down.transpose(1, 2))
    assert_near(results, (expected, *theirs), 1e-9)


def test_autocast_outputs_are_bfloat16_and_gradients_have_the_dtype_of_operands():
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


def test_permute_and_unpermute_read_nothing_from_the_device():
    # A fake tensor has no values: a read of a value, or of a size that depends on values, raises.
    with FakeTensorMode():
        hidden, probabilities = (torch.empty(9, n, requires_grad=True) for n in (SIZE, 2))
        row_map = map_rows(torch.zeros(9, 2, dtype=torch.int64), 0, NUM_EXPERTS)
        rows = permute(hidden, row_map) * permute_probabilities(probabilities, row_map).unsqueeze(1)
        unpermute(rows, row_map).sum().backward()
    assert hidden.grad is not None


ENDS = torch.tensor([3, 3, 9, 11], dtype=torch.int32)
DRAWN_ROWS = draw("rows", shape=(11, WIDTH))


@pytest.mark.parametrize("backend", ["loop", None])
def test_the_operators_pass_opcheck_of_torch(backend):
    torch.compiler.reset()
    rows, grad = DRAWN_ROWS.clone().requires_grad_(), draw("grad", shape=(11, OUT))
    weights = [draw(number, shape=(OUT, WIDTH)).requires_grad_() for number in range(4)]
    ops, check = torch.ops.lightning_megatron, torch.library.opcheck
    check(ops.grouped_linear.default, (rows, weights, ENDS, backend))
    weights = [weight.detach() for weight in weights]
    check(ops.grouped_linear_input_gradient.default, (grad, weights, ENDS, backend))
    check(ops.grouped_linear_weight_gradients.default, (grad, rows.detach(), ENDS, backend))


def test_experts_compile_into_one_graph():
    torch.compiler.reset()
    config = ExpertsConfig(num_experts=4, top_k=2, ffn_hidden_size=8)
    wrapped = nn.ModuleDict({"experts": GroupedMLP(WIDTH, config, ParallelMesh.single()).double()})
    initialize_(wrapped, "cpu", 0)
    module, probabilities = wrapped["experts"], draw("probabilities", shape=(11,))
    results = []
    for run in (module, torch.compile(module, fullgraph=True, backend="aot_eager")):
        output = run(DRAWN_ROWS, probabilities, ENDS)
        gradients = torch.autograd.grad(output.square().sum(), list(module.parameters()))
        results.append((output, *gradients))
    for eager, compiled in zip(*results, strict=True):
        assert torch.allclose(compiled, eager, atol=1e-12, rtol=0)
