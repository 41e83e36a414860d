"""The mixture-of-experts layer equals a loop over tokens, layers of Hugging Face, and one process in
every expert grid.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DeepseekV3Config, MixtralConfig, Qwen3MoeConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.experts.layer import MixtureOfExperts
from lightning_megatron.groups.collectives import all_reduce_
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import shard_spec_of
from lightning_megatron.plan.cloning import CloneSettings
from lightning_megatron.plan.experts import ExpertsConfig
from lightning_megatron.plan.layout import ParallelLayout
from tests.experts.dense import ACTIVATIONS, draw
from tests.experts.routed_by_hand import route_by_hand
from tests.oracles import assert_equal
from tests.sweeps import chosen
from tests.world import run_world

SIZE, INNER, NUM_EXPERTS, TOP_K, S, B = 6, 8, 4, 2, 8, 2
LOSSES = {"aux_loss": 0.3, "z_loss": 0.01, "aux_loss_scope": "sequence"}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "shared": {"shared_ffn_hidden_size": 8, "shared_gate": True},
    "sigmoid with biases": {"scoring": "sigmoid", "expert_bias": True, "shared_ffn_hidden_size": 4},
    "capacity": {"capacity_factor": 0.6},
    "one choice": {"top_k": 1},
    "experts with biases": {"linear_bias": True, "router_bias": True},
}


def layer_of(
    mesh: ParallelMesh | None = None, options: dict[str, Any] | None = None, **settings: Any
) -> Any:
    """Build a layer with the same full weights in every layout."""
    config = ExpertsConfig(
        **{
            "num_experts": NUM_EXPERTS,
            "top_k": TOP_K,
            "ffn_hidden_size": INNER,
            **LOSSES,
            **settings,
        }
    )
    layer = MixtureOfExperts(SIZE, config, mesh or ParallelMesh.single(), **options or {}).double()
    for name, parameter in layer.named_parameters():
        spec = shard_spec_of(parameter)
        parameter.data = spec.shard(draw(name, shape=spec.full_shape)).contiguous()
    return layer


def hidden_of(*names: object) -> Tensor:
    return draw("hidden", *names, shape=(S, B, SIZE))


def run(
    layer: MixtureOfExperts, hidden: Tensor, output_gradient: Tensor, weight: float = 0.5
) -> tuple[Tensor, Tensor]:
    """Run forward and backward; return output and gradient of the input, and keep gradients of
    parameters.
    """
    hidden = hidden.clone().requires_grad_()
    layer.loss_weight.value = weight
    output = layer(hidden)
    (weight * (output * output_gradient).sum()).backward()
    assert hidden.grad is not None
    return output.detach(), hidden.grad


def compute_by_hand(layer: MixtureOfExperts, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Return output and losses of a loop over tokens."""
    routed = route_by_hand(hidden, layer.router)
    weights = dict(layer.experts.named_parameters())
    outputs = []
    for token, experts, scales in zip(
        hidden.flatten(0, 1), routed.experts, routed.probabilities, strict=True
    ):
        total = torch.zeros_like(token)
        for expert, scale in zip(experts, scales, strict=True):
            if expert >= 0:
                features = weights[f"{expert}.gate_up.weight"] @ token
                inner = ACTIVATIONS["swiglu"](features + weights.get(f"{expert}.gate_up.bias", 0.0))
                update = weights[f"{expert}.down.weight"] @ inner
                total = total + scale * (update + weights.get(f"{expert}.down.bias", 0.0))
        if layer.shared is not None:
            update = layer.shared.down.weight @ ACTIVATIONS["swiglu"](
                layer.shared.gate_up.weight @ token
            )
            total = (
                total
                + (
                    1.0
                    if layer.shared.gate is None
                    else (layer.shared.gate.weight @ token).sigmoid()
                )
                * update
            )
        outputs.append(total)
    return torch.stack(outputs).view(hidden.shape), routed.balance_loss + routed.z_loss


@pytest.mark.parametrize("recomputed", ["nothing", "experts", "their inputs"])
@pytest.mark.parametrize("name", SETTINGS)
def test_outputs_and_gradients_equal_those_of_a_loop_over_tokens(
    name: str, recomputed: str
) -> None:
    layer, reference = layer_of(**SETTINGS[name]), layer_of(**SETTINGS[name])
    layer.recomputes_experts = recomputed == "experts"
    layer.sends_inputs_again = recomputed == "their inputs"
    hidden, output_gradient = hidden_of(name), draw("outer", name, shape=(S, B, SIZE))
    output, gradient = run(layer, hidden, output_gradient)
    hidden.requires_grad_()
    expected_output, losses = compute_by_hand(reference, hidden)
    (0.5 * ((expected_output * output_gradient).sum() + losses)).backward()
    assert_equal(output, expected_output, "output")
    assert_equal(gradient, hidden.grad, "input")
    for (parameter_name, actual), expected_parameter in zip(
        layer.named_parameters(), reference.parameters(), strict=True
    ):
        assert_equal(
            actual.grad,
            torch.zeros_like(actual)
            if expected_parameter.grad is None
            else expected_parameter.grad,
            parameter_name,
        )


def test_statistics_count_each_training_microbatch_once() -> None:
    layer = layer_of(capacity_factor=0.6)
    layer.recomputes_experts = True
    run(layer, hidden_of(1), hidden_of(2))
    with torch.no_grad():
        layer.eval()(hidden_of(3))
    statistics = layer.statistics
    assert statistics.load.sum() == S * B * TOP_K
    dropped, num_microbatches = statistics.sums[0], statistics.sums[4]
    assert dropped > 0
    assert num_microbatches == 1


def make_hugging_face_layers() -> dict[str, tuple[nn.Module, dict[str, Any]]]:
    sizes = {"hidden_size": SIZE, "num_experts_per_tok": TOP_K, "experts_implementation": "eager"}
    mixtral = MixtralConfig(**sizes, intermediate_size=INNER, num_local_experts=NUM_EXPERTS)
    qwen = Qwen3MoeConfig(
        **sizes, moe_intermediate_size=INNER, num_experts=NUM_EXPERTS, norm_topk_prob=False
    )
    deepseek = DeepseekV3Config(
        **sizes, moe_intermediate_size=INNER, n_routed_experts=NUM_EXPERTS, n_shared_experts=2, n_group=2, topk_group=1,
        routed_scaling_factor=2.5, norm_topk_prob=True,
    )  # fmt: skip
    groups = {
        "num_groups": 2,
        "top_k_groups": 1,
        "score_scale": 2.5,
        "shared_ffn_hidden_size": 2 * INNER,
    }
    return {
        "mixtral": (MixtralSparseMoeBlock(mixtral), {}),
        "qwen3": (Qwen3MoeSparseMoeBlock(qwen), {"normalize_top_k": False}),
        "deepseek": (
            DeepseekV3MoE(deepseek),
            {"scoring": "sigmoid", "expert_bias": True, **groups},
        ),
    }


@pytest.mark.usefixtures("float32_is_float64")
@pytest.mark.parametrize("name", ["mixtral", "qwen3", "deepseek"])
def test_the_layer_equals_layers_of_hugging_face(name: str) -> None:
    reference, settings = make_hugging_face_layers()[name]
    reference = reference.double()
    layer = layer_of(**settings, aux_loss=0.0, z_loss=0.0)
    with torch.no_grad():
        reference.gate.weight.copy_(layer.router.weight)
        if layer.router.expert_bias is not None:
            layer.router.expert_bias.copy_(draw("bias", shape=(NUM_EXPERTS,)))
            reference.gate.e_score_correction_bias = layer.router.expert_bias
        reference.experts.gate_up_proj.copy_(torch.stack(layer.experts.weights("gate_up")))
        reference.experts.down_proj.copy_(torch.stack(layer.experts.weights("down")))
        if layer.shared is not None:
            gate, up = layer.shared.gate_up.weight.chunk(2)
            reference.shared_experts.gate_proj.weight.copy_(gate)
            reference.shared_experts.up_proj.weight.copy_(up)
            reference.shared_experts.down_proj.weight.copy_(layer.shared.down.weight)
    hidden, output_gradient = hidden_of("hf"), draw("outer", "hf", shape=(S, B, SIZE))
    output, gradient = run(layer, hidden, output_gradient, 1.0)
    hidden.requires_grad_()
    # Hugging Face has the batch dimension first.
    expected = reference(hidden.transpose(0, 1).contiguous()).transpose(0, 1)
    (expected * output_gradient).sum().backward()
    assert_equal(output, expected, "output")
    assert_equal(gradient, hidden.grad, "input")
    assert_equal(layer.router.weight.grad, reference.gate.weight.grad, "router")
    for matrix, expected_parameter in (
        ("gate_up", reference.experts.gate_up_proj),
        ("down", reference.experts.down_proj),
    ):
        assert_equal(
            torch.stack([weight.grad for weight in layer.experts.weights(matrix)]),
            expected_parameter.grad,
            matrix,
        )


GRIDS: dict[str, dict[str, Any]] = chosen(
    {
        "ep4": {"ep": 4},
        "ep2 edp2": {"ep": 2},
        "tp2, ep2 edp2": {"tp": 2, "ep": 2, "etp": 1},
        "tp2, etp2 ep2": {"tp": 2, "ep": 2},
        "tp4, ep4": {"tp": 4, "ep": 4, "etp": 1},
        "tp4, etp4": {"tp": 4},
        "tp4, etp2 ep2": {"tp": 4, "ep": 2, "etp": 2},
        "etp2 ep2 in dp4": {"etp": 2, "ep": 2},
    },
    "ep4",
    "tp2, ep2 edp2",
    "tp4, etp2 ep2",
)


def make_cases(layout: ParallelLayout) -> list[tuple[str, bool, str, int, int]]:
    """List settings, sequence parallelism, transport, length and places for clones; a length that is
    no multiple of tp is padded.
    """
    return [(*case, 0) for case in cases_without_clones(layout)] + cases_with_clones(layout)


def cases_with_clones(layout: ParallelLayout) -> list[tuple[str, bool, str, int, int]]:
    if layout.ep == 1:
        return []
    named_cases = [
        ("plain", False, transport, S, 1) for transport in ("all_gather", "all_to_all", "one_sided")
    ]
    named_cases += [("capacity", False, "one_sided", S, 2), ("shared", False, "all_to_all", S, 2)]
    if layout.tp > 1:
        named_cases += [("plain", True, "one_sided", S, 1), ("plain", False, "one_sided", 5, 2)]
    return named_cases


def cases_without_clones(layout: ParallelLayout) -> list[tuple[str, bool, str, int]]:
    named_cases = [(name, False, "auto", S) for name in SETTINGS]
    named_cases += [
        ("plain", False, transport, S) for transport in ("all_gather", "all_to_all", "one_sided")
    ]
    if layout.tp > 1:
        named_cases += [(name, True, "auto", S) for name in SETTINGS]
        named_cases += [("plain", True, transport, S) for transport in ("all_to_all", "one_sided")]
        named_cases += [
            ("plain", False, "all_gather", 5),
            ("shared", False, "all_to_all", 3),
            ("capacity", False, "one_sided", 5),
        ]
    return named_cases


def check_inputs_sent_again(
    layer_with_kept_inputs: MixtureOfExperts,
    layer: MixtureOfExperts,
    inputs: list[Tensor],
    output: Tensor,
    gradient: Tensor,
) -> None:
    """Compare, bitwise, a layer that sends inputs of experts again with a layer that keeps them."""
    layer.sends_inputs_again = True
    actual = run(layer, *inputs)
    assert torch.equal(actual[0], output)
    assert torch.equal(actual[1], gradient)
    for parameter, expected_parameter in zip(
        layer.parameters(), layer_with_kept_inputs.parameters(), strict=True
    ):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, expected_parameter.grad)


def _errors_of_grids(rank: int, size: int) -> dict[str, dict[str, float]]:
    errors: dict[str, dict[str, float]] = {}
    for grid, options in GRIDS.items():
        layout = ParallelLayout(size, **options)
        for sequence_parallel in (False, True)[: 1 + (layout.tp > 1)]:
            mesh = ParallelMesh.create(layout, sequence_parallel=sequence_parallel)
            for name, needs_sequence_parallel, transport, length, places in make_cases(layout):
                if needs_sequence_parallel == sequence_parallel:
                    case_name = f"{grid}, {name}, sp {needs_sequence_parallel}, {transport}, length {length}"
                    case_name += f", places {places}"
                    errors[case_name] = compute_errors(mesh, name, transport, length, places)
            mesh.destroy()
    return errors


def compute_errors(
    mesh: ParallelMesh, name: str, transport: str, length: int, places: int
) -> dict[str, float]:
    """Return the largest differences of outputs and gradients to one process with the tokens of all
    data ranks.
    """
    options = {"transport": transport, "clones": CloneSettings(places) if places else None}
    layer, single_process = layer_of(mesh, options, **SETTINGS[name]), layer_of(**SETTINGS[name])
    layer.recomputes_experts = places == 1
    # Each data rank has a microbatch of one sequence.
    inputs = [
        draw("hidden", name, number, shape=(length, 1, SIZE)) for number in range(mesh.dp.size)
    ]
    output_gradients = [
        draw("outer", name, number, shape=(length, 1, SIZE)) for number in range(mesh.dp.size)
    ]
    expected_results = [
        run(single_process, *microbatch)
        for microbatch in zip(inputs, output_gradients, strict=True)
    ]
    local_inputs = [tensor[mesh.dp.rank] for tensor in (inputs, output_gradients)]
    expected = expected_results[mesh.dp.rank]
    if mesh.sequence_parallel:
        local_inputs = [tensor.chunk(mesh.tp.size)[mesh.tp.rank] for tensor in local_inputs]
        expected = tuple(tensor.chunk(mesh.tp.size)[mesh.tp.rank] for tensor in expected)
    output, gradient = run(layer, *local_inputs)
    check_inputs_sent_again(
        layer, layer_of(mesh, options, **SETTINGS[name]), local_inputs, output, gradient
    )
    errors = {
        "output": float((output - expected[0]).abs().max()),
        "input": float((gradient - expected[1]).abs().max()),
    }
    expected_parameters = dict(single_process.named_parameters())
    for parameter_name, parameter in layer.named_parameters():
        assert parameter.grad is not None, parameter_name
        spec, total = shard_spec_of(parameter, mesh.tp.rank), parameter.grad.clone()
        if spec.partial:
            all_reduce_(total, mesh.tp)
        all_reduce_(total, mesh.replica_axis(spec.is_expert))
        errors[parameter_name] = float(
            (total - spec.shard(expected_parameters[parameter_name].grad)).abs().max()
        )
    return errors


def test_every_expert_grid_equals_one_process() -> None:
    for errors_of_cases in run_world(_errors_of_grids, 4):
        assert len(errors_of_cases) == len(
            [case for grid in GRIDS.values() for case in make_cases(ParallelLayout(4, **grid))]
        )
        for case_name, errors in errors_of_cases.items():
            assert max(errors.values()) < 1e-10, (case_name, errors)


def test_more_expert_parallel_ranks_than_experts_are_refused() -> None:
    mesh = ParallelMesh.single()
    object.__setattr__(mesh, "ep", type(mesh.ep)("ep", tuple(range(8)), 0))
    with pytest.raises(ParallelPlanError, match="num_experts .4. must be a multiple of ep .8."):
        layer_of(mesh)
