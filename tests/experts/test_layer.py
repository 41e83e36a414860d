"""The mixture-of-experts layer equals a loop over tokens, and layers of Hugging Face."""

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
from lightning_megatron.groups.mesh import ParallelMesh
from tests.experts.dense import ACTIVATIONS, draw
from tests.experts.layers import (
    INNER,
    NUM_EXPERTS,
    SETTINGS,
    SIZE,
    TOP_K,
    B,
    S,
    hidden_of,
    layer_of,
    run,
)
from tests.experts.routed_by_hand import route_by_hand
from tests.oracles import assert_equal


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
        if (shared := layer.shared) is not None:
            update = shared.down.weight @ ACTIVATIONS["swiglu"](shared.gate_up.weight @ token)
            opened = 1.0 if shared.gate is None else (shared.gate.weight @ token).sigmoid()
            total = total + opened * update
        outputs.append(total)
    return torch.stack(outputs).view(hidden.shape), routed.balance_loss + routed.z_loss


@pytest.mark.parametrize(
    ("name", "recomputed"),
    [
        *((name, "nothing") for name in SETTINGS),
        ("shared", "experts"),
        ("capacity", "their inputs"),
    ],
)
def test_outputs_and_gradients_equal_those_of_a_loop_over_tokens(name, recomputed):
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
    for (parameter_name, actual), twin in zip(
        layer.named_parameters(), reference.parameters(), strict=True
    ):
        expected = torch.zeros_like(actual) if twin.grad is None else twin.grad
        assert_equal(actual.grad, expected, parameter_name)


def test_statistics_count_each_training_microbatch_once():
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
        "num_groups": 2, "top_k_groups": 1, "score_scale": 2.5, "shared_ffn_hidden_size": 2 * INNER,
        "scoring": "sigmoid", "expert_bias": True,
    }  # fmt: skip
    return {
        "mixtral": (MixtralSparseMoeBlock(mixtral), {}),
        "qwen3": (Qwen3MoeSparseMoeBlock(qwen), {"normalize_top_k": False}),
        "deepseek": (DeepseekV3MoE(deepseek), groups),
    }


@pytest.mark.usefixtures("float32_is_float64")
@pytest.mark.parametrize("name", ["mixtral", "qwen3", "deepseek"])
def test_the_layer_equals_layers_of_hugging_face(name):
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


def test_more_expert_parallel_ranks_than_experts_are_refused():
    mesh = ParallelMesh.single()
    object.__setattr__(mesh, "ep", type(mesh.ep)("ep", tuple(range(8)), 0))
    with pytest.raises(ParallelPlanError, match="num_experts .4. must be a multiple of ep .8."):
        layer_of(mesh)
