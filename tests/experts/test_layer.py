"""The layer of experts equals a loop over tokens, Hugging Face's own, and one process in every
expert grid.
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
    """Build a layer whose weights are the same numbers in every layout."""
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


def hidden_of(*what: object) -> Tensor:
    return draw("hidden", *what, shape=(S, B, SIZE))


def run(
    layer: MixtureOfExperts, hidden: Tensor, outer: Tensor, weight: float = 0.5
) -> tuple[Tensor, Tensor]:
    """Run forward and backward; return output and gradient of the input, and leave those of
    parameters.
    """
    hidden = hidden.clone().requires_grad_()
    layer.loss_weight.value = weight
    output = layer(hidden)
    (weight * (output * outer).sum()).backward()
    assert hidden.grad is not None
    return output.detach(), hidden.grad


def by_hand(layer: MixtureOfExperts, hidden: Tensor) -> tuple[Tensor, Tensor]:
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
                own = weights[f"{expert}.gate_up.weight"] @ token
                inner = ACTIVATIONS["swiglu"](own + weights.get(f"{expert}.gate_up.bias", 0.0))
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


@pytest.mark.parametrize("again", ["nothing", "experts", "their inputs"])
@pytest.mark.parametrize("name", SETTINGS)
def test_outputs_and_gradients_equal_those_of_a_loop_over_tokens(name: str, again: str) -> None:
    layer, twin = layer_of(**SETTINGS[name]), layer_of(**SETTINGS[name])
    layer.recomputes_experts = again == "experts"
    layer.sends_inputs_again = again == "their inputs"
    hidden, outer = hidden_of(name), draw("outer", name, shape=(S, B, SIZE))
    output, gradient = run(layer, hidden, outer)
    hidden.requires_grad_()
    expected, losses = by_hand(twin, hidden)
    (0.5 * ((expected * outer).sum() + losses)).backward()
    assert_equal(output, expected, "output")
    assert_equal(gradient, hidden.grad, "input")
    for (what, found), wanted in zip(layer.named_parameters(), twin.parameters(), strict=True):
        assert_equal(
            found.grad, torch.zeros_like(found) if wanted.grad is None else wanted.grad, what
        )


def test_what_is_routed_is_counted_once() -> None:
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


def hugging_face_layers() -> dict[str, tuple[nn.Module, dict[str, Any]]]:
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
def test_layer_equals_hugging_faces_own(name: str) -> None:
    theirs, settings = hugging_face_layers()[name]
    theirs = theirs.double()
    layer = layer_of(**settings, aux_loss=0.0, z_loss=0.0)
    with torch.no_grad():
        theirs.gate.weight.copy_(layer.router.weight)
        if layer.router.expert_bias is not None:
            layer.router.expert_bias.copy_(draw("bias", shape=(NUM_EXPERTS,)))
            theirs.gate.e_score_correction_bias = layer.router.expert_bias
        theirs.experts.gate_up_proj.copy_(torch.stack(layer.experts.weights("gate_up")))
        theirs.experts.down_proj.copy_(torch.stack(layer.experts.weights("down")))
        if layer.shared is not None:
            gate, up = layer.shared.gate_up.weight.chunk(2)
            theirs.shared_experts.gate_proj.weight.copy_(gate)
            theirs.shared_experts.up_proj.weight.copy_(up)
            theirs.shared_experts.down_proj.weight.copy_(layer.shared.down.weight)
    hidden, outer = hidden_of("hf"), draw("outer", "hf", shape=(S, B, SIZE))
    output, gradient = run(layer, hidden, outer, 1.0)
    hidden.requires_grad_()
    # They have sequences first.
    expected = theirs(hidden.transpose(0, 1).contiguous()).transpose(0, 1)
    (expected * outer).sum().backward()
    assert_equal(output, expected, "output")
    assert_equal(gradient, hidden.grad, "input")
    assert_equal(layer.router.weight.grad, theirs.gate.weight.grad, "router")
    for what, wanted in (
        ("gate_up", theirs.experts.gate_up_proj),
        ("down", theirs.experts.down_proj),
    ):
        assert_equal(
            torch.stack([weight.grad for weight in layer.experts.weights(what)]), wanted.grad, what
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


def cases(layout: ParallelLayout) -> list[tuple[str, bool, str, int, int]]:
    """Name settings, sequence parallelism, transport, length and places for clones; a length that
    tp does not divide is padded.
    """
    return [(*case, 0) for case in cases_without_clones(layout)] + cases_with_clones(layout)


def cases_with_clones(layout: ParallelLayout) -> list[tuple[str, bool, str, int, int]]:
    if layout.ep == 1:
        return []
    found = [("plain", False, way, S, 1) for way in ("all_gather", "all_to_all", "one_sided")]
    found += [("capacity", False, "one_sided", S, 2), ("shared", False, "all_to_all", S, 2)]
    if layout.tp > 1:
        found += [("plain", True, "one_sided", S, 1), ("plain", False, "one_sided", 5, 2)]
    return found


def cases_without_clones(layout: ParallelLayout) -> list[tuple[str, bool, str, int]]:
    found = [(name, False, "auto", S) for name in SETTINGS]
    found += [
        ("plain", False, transport, S) for transport in ("all_gather", "all_to_all", "one_sided")
    ]
    if layout.tp > 1:
        found += [(name, True, "auto", S) for name in SETTINGS]
        found += [("plain", True, transport, S) for transport in ("all_to_all", "one_sided")]
        found += [
            ("plain", False, "all_gather", 5),
            ("shared", False, "all_to_all", 3),
            ("capacity", False, "one_sided", 5),
        ]
    return found


def check_inputs_sent_again(
    kept: MixtureOfExperts,
    layer: MixtureOfExperts,
    given: list[Tensor],
    output: Tensor,
    gradient: Tensor,
) -> None:
    """Compare a layer that does not keep the inputs of its experts with one that does, bitwise."""
    layer.sends_inputs_again = True
    found = run(layer, *given)
    assert torch.equal(found[0], output)
    assert torch.equal(found[1], gradient)
    for one, other in zip(layer.parameters(), kept.parameters(), strict=True):
        assert one.grad is not None
        assert torch.equal(one.grad, other.grad)


def _grids(rank: int, size: int) -> dict[str, dict[str, float]]:
    errors: dict[str, dict[str, float]] = {}
    for grid, options in GRIDS.items():
        layout = ParallelLayout(size, **options)
        for sequence_parallel in (False, True)[: 1 + (layout.tp > 1)]:
            mesh = ParallelMesh.create(layout, sequence_parallel=sequence_parallel)
            for name, wants, transport, length, places in cases(layout):
                if wants == sequence_parallel:
                    what = f"{grid}, {name}, sp {wants}, {transport}, length {length}"
                    what += f", places {places}"
                    errors[what] = errors_of(mesh, name, transport, length, places)
            mesh.destroy()
    return errors


def errors_of(
    mesh: ParallelMesh, name: str, transport: str, length: int, places: int
) -> dict[str, float]:
    """Return how far outputs and gradients are from one process that has the tokens of all data
    ranks.
    """
    options = {"transport": transport, "clones": CloneSettings(places) if places else None}
    layer, twin = layer_of(mesh, options, **SETTINGS[name]), layer_of(**SETTINGS[name])
    layer.recomputes_experts = places == 1
    # Microbatches of one sequence, by data rank.
    inputs = [
        draw("hidden", name, number, shape=(length, 1, SIZE)) for number in range(mesh.dp.size)
    ]
    outers = [
        draw("outer", name, number, shape=(length, 1, SIZE)) for number in range(mesh.dp.size)
    ]
    truths = [run(twin, *both) for both in zip(inputs, outers, strict=True)]
    here = [tensor[mesh.dp.rank] for tensor in (inputs, outers)]
    expected = truths[mesh.dp.rank]
    if mesh.sequence_parallel:
        here = [one.chunk(mesh.tp.size)[mesh.tp.rank] for one in here]
        expected = tuple(one.chunk(mesh.tp.size)[mesh.tp.rank] for one in expected)
    output, gradient = run(layer, *here)
    check_inputs_sent_again(
        layer, layer_of(mesh, options, **SETTINGS[name]), here, output, gradient
    )
    found = {
        "output": float((output - expected[0]).abs().max()),
        "input": float((gradient - expected[1]).abs().max()),
    }
    wanted = dict(twin.named_parameters())
    for what, parameter in layer.named_parameters():
        assert parameter.grad is not None, what
        spec, total = shard_spec_of(parameter, mesh.tp.rank), parameter.grad.clone()
        if spec.partial:
            all_reduce_(total, mesh.tp)
        all_reduce_(total, mesh.replica_axis(spec.is_expert))
        found[what] = float((total - spec.shard(wanted[what].grad)).abs().max())
    return found


def test_every_expert_grid_equals_one_process() -> None:
    for errors in run_world(_grids, 4):
        assert len(errors) == len(
            [case for grid in GRIDS.values() for case in cases(ParallelLayout(4, **grid))]
        )
        for what, found in errors.items():
            assert max(found.values()) < 1e-10, (what, found)


def test_more_ranks_than_experts_are_refused() -> None:
    mesh = ParallelMesh.single()
    object.__setattr__(mesh, "ep", type(mesh.ep)("ep", tuple(range(8)), 0))
    with pytest.raises(ParallelPlanError, match="num_experts .4. must be a multiple of ep .8."):
        layer_of(mesh)
