"""The router equals a loop over tokens in float64 and routers of Hugging Face; losses and biases
balance its experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV3Config, MixtralConfig, Qwen3MoeConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter, load_balancing_loss_func
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from lightning_megatron.experts.routing.attached_loss import attach_loss
from lightning_megatron.experts.routing.balance import add_over_tokens_, update_bias_
from lightning_megatron.experts.routing.router import Router
from lightning_megatron.experts.routing.selection import expert_capacity
from lightning_megatron.experts.routing.statistics import (
    RouterStatistics,
    StepStatistics,
    step_statistics,
)
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.parameters.gradient_slot import GradientSlot, set_slot
from lightning_megatron.layers.parameters.init import initialize_
from lightning_megatron.layers.recompute import replayed
from lightning_megatron.plan.experts import ExpertsConfig
from tests.experts.routed_by_hand import (
    LOSSES,
    SETTINGS,
    B,
    D,
    E,
    K,
    S,
    config_of,
    draw,
    gradients,
    losses_of,
    main_loss,
    route_by_hand,
    router_of,
)
from tests.oracles import assert_equal, sequence_part


@pytest.mark.parametrize("name", SETTINGS)
def test_the_router_equals_a_loop_over_tokens(name):
    router = router_of(config_of(**SETTINGS[name]))
    hidden = draw(S, B, D, seed=4).requires_grad_()
    routing, reference = router(hidden), route_by_hand(hidden, router)
    assert routing.experts.tolist() == reference.experts
    assert routing.load.tolist() == reference.load
    assert (0 if routing.dropped is None else int(routing.dropped)) == reference.dropped
    assert routing.probabilities.dtype == torch.float64
    assert_equal(routing.entropy_sum, reference.entropy * S * B, "entropy_sum")
    for field, actual, expected in (
        ("probabilities", routing.probabilities, reference.probabilities),
        ("balance_loss", routing.losses.balance, reference.balance_loss),
        ("z_loss", routing.losses.z, reference.z_loss),
    ):
        assert_equal(actual, expected, field)
        weigh = main_loss if field == "probabilities" else torch.sum
        assert_same_gradients(weigh(actual), weigh(expected), hidden, *router.parameters())


def assert_same_gradients(actual: Tensor, expected: Tensor, *leaves: Tensor) -> None:
    pairs = zip(
        *(torch.autograd.grad(loss, leaves, retain_graph=True) for loss in (actual, expected)),
        strict=True,
    )
    for number, pair in enumerate(pairs):
        assert_equal(*pair, f"gradient {number}")


def make_hugging_face_routers() -> dict[str, tuple[torch.nn.Module, ExpertsConfig]]:
    counts = {"hidden_size": D, "num_experts_per_tok": K}
    deepseek = DeepseekV3Config(
        n_routed_experts=E, n_group=4, topk_group=2, routed_scaling_factor=2.5, norm_topk_prob=True, **counts
    )  # fmt: skip
    groups = {"num_groups": 4, "top_k_groups": 2, "score_scale": 2.5, "expert_bias": True}
    qwen = Qwen3MoeConfig(num_experts=E, norm_topk_prob=False, **counts)
    return {
        "Mixtral": (MixtralTopKRouter(MixtralConfig(num_local_experts=E, **counts)), config_of()),
        "Qwen3-MoE": (Qwen3MoeTopKRouter(qwen), config_of(normalize_top_k=False)),
        "DeepSeek-V3": (DeepseekV3TopkRouter(deepseek), config_of(scoring="sigmoid", **groups)),
    }


@pytest.mark.usefixtures("float32_is_float64")
@pytest.mark.parametrize("name", ["Mixtral", "Qwen3-MoE", "DeepSeek-V3"])
def test_the_router_equals_routers_of_hugging_face(name):
    reference, config = make_hugging_face_routers()[name]
    router = router_of(config)
    with torch.no_grad():
        reference.double().weight.copy_(router.weight)
        if router.expert_bias is not None:
            reference.e_score_correction_bias.copy_(router.expert_bias)
    hidden = draw(S, B, D, seed=4).requires_grad_()
    routing = router(hidden)
    logits, weights, experts = reference(hidden)
    # DeepSeek returns experts in no order.
    assert torch.equal(routing.experts.sort(-1).values, experts.sort(-1).values)
    actual = routing.probabilities.gather(-1, routing.experts.argsort(-1))
    expected = weights.gather(-1, experts.argsort(-1))
    assert expected.dtype == torch.float64
    assert_equal(actual, expected, "probabilities")
    ours = torch.autograd.grad(main_loss(actual), (hidden, router.weight))
    theirs = torch.autograd.grad(main_loss(expected), (hidden, reference.weight))
    for pair in zip(ours, theirs, strict=True):
        assert_equal(*pair, "gradient")
    if config.scoring == "softmax":
        # For equal experts, the loss of Hugging Face is top_k, and ours is 1.
        theirs = load_balancing_loss_func((reference(hidden)[0],), E, K) * config.aux_loss / K
        balance_loss = router(hidden).losses.balance
        assert_equal(balance_loss, theirs, "auxiliary loss")
        assert_same_gradients(balance_loss, theirs, hidden)


@pytest.mark.parametrize("name", SETTINGS)
def test_routing_reads_nothing_from_the_device(name):
    """A meta tensor has no values, so any read raises."""
    mesh = ParallelMesh.single("meta")
    with torch.device("meta"):
        router = Router(config_of(**SETTINGS[name]), D, mesh)
    hidden = torch.empty(S, B, D, device="meta", requires_grad=True)
    routing = router(hidden)
    attached = attach_loss(routing.probabilities, losses_of(routing), 1.0)
    assert gradients(attached.sum(), hidden)[0].shape == hidden.shape
    router.update_(add_over_tokens_(routing.load.to(torch.int64, copy=True), mesh))


def test_scores_are_computed_in_float32_under_autocast_and_in_bfloat16():
    wide = router_of(config_of()).float()
    half = router_of(config_of()).bfloat16()
    with torch.no_grad():
        wide.weight.copy_(half.weight)
    hidden = draw(S, B, D).bfloat16().requires_grad_()
    expected = wide(hidden.float())
    with torch.autocast("cpu", torch.bfloat16):
        routing = half(hidden)
    for actual in (routing, wide(hidden)):
        assert actual.probabilities.dtype == torch.float32
        assert torch.equal(actual.probabilities, expected.probabilities)
        assert torch.equal(actual.experts, expected.experts)
    main_loss(routing.probabilities).backward()
    assert hidden.grad is not None
    assert half.weight.grad is not None
    assert (hidden.grad.dtype, half.weight.grad.dtype) == (torch.bfloat16, torch.bfloat16)
    expected_gradient = gradients(main_loss(expected.probabilities), wide.weight)[0]
    slot = GradientSlot(torch.empty(E, D), lambda: None)
    set_slot(half.weight, slot)
    main_loss(half(hidden).probabilities).backward()
    assert_equal(slot.gradient, expected_gradient, "gradient in the slot", 1e-5)


def test_evaluation_has_no_losses_and_no_jitter():
    router = router_of(config_of(jitter=0.5)).eval()
    hidden = draw(S, B, D)
    routing = router(hidden)
    assert routing.losses.balance is None
    assert routing.losses.z is None
    assert torch.equal(routing.probabilities, router_of(config_of())(hidden).probabilities)
    assert router_of(config_of(aux_loss=0.0, z_loss=0.0))(hidden).losses.balance is None


def test_jitter_is_within_its_bounds_and_repeats_with_the_position():
    mesh = ParallelMesh.single(seed=7)
    router = router_of(config_of(jitter=0.25), mesh)
    hidden, default_state = torch.ones(64, B, D, dtype=torch.float64), torch.get_rng_state()
    first = router._jittered(hidden)
    assert 0.75 <= float(first.min()) < 0.8
    assert 1.2 < float(first.max()) <= 1.25
    assert torch.equal(torch.get_rng_state(), default_state)
    assert not torch.equal(router._jittered(hidden), first)
    mesh.random.seek(0)
    assert torch.equal(router._jittered(hidden), first)


def test_biases_of_a_router_built_on_meta_exist_and_stay_float32():
    config = config_of(expert_bias=True, aux_loss_scope="global")
    with torch.device("meta"):
        router = Router(config, D, ParallelMesh.single())
    assert router.weight.is_meta
    initialize_(router, "cpu", seed=0)
    router.update_(torch.arange(E))
    shares = router.step_shares.clone()
    router.to(dtype=torch.bfloat16)
    assert router.weight.dtype == torch.bfloat16
    assert (router.expert_bias.dtype, router.step_shares.dtype) == (torch.float32, torch.float32)
    assert torch.equal(router.step_shares, shares)


def test_an_attached_loss_has_its_gradient_for_any_scale():
    router = router_of(config_of())
    hidden = [draw(S, B, D, seed=seed).requires_grad_() for seed in (4, 5)]
    # Two microbatches and a loss scale of 1024.
    scale = 1024.0 / 2
    losses = [main_loss(result.probabilities) + losses_of(result) for result in map(router, hidden)]
    expected = gradients(torch.stack(losses).sum() * scale, *hidden, router.weight)
    for attached_scale in (scale, torch.tensor(scale)):
        router.zero_grad()
        for microbatch in hidden:
            microbatch.grad = None
            routing = router(microbatch)
            attached = attach_loss(routing.probabilities, losses_of(routing), attached_scale)
            assert torch.equal(attached, routing.probabilities)
            (main_loss(attached) * scale).backward()
        for leaf, expected_gradient in zip((*hidden, router.weight), expected, strict=True):
            assert_equal(leaf.grad, expected_gradient, f"gradient with a scale {attached_scale!r}")


def test_a_loss_attached_in_recomputed_code_counts_once():
    mesh = ParallelMesh.single(seed=5)
    router = router_of(config_of(jitter=0.2), mesh)

    def weigh(hidden: Tensor) -> Tensor:
        routing = router(hidden)
        return attach_loss(routing.probabilities, losses_of(routing), 1.0).square()

    def run(call: Any) -> list[Tensor]:
        hidden = draw(S, B, D, seed=4).requires_grad_()
        mesh.random.begin_microbatch(1, 2)
        mesh.random.seek(3)
        output = call(hidden)
        # Another microbatch runs before the backward pass.
        mesh.random.begin_microbatch(1, 3)
        return gradients(main_loss(output), hidden, router.weight)

    recomputed = run(lambda hidden: replayed(weigh, mesh.random, 3, hidden))
    for actual, expected in zip(recomputed, run(weigh), strict=True):
        assert_equal(actual, expected, "gradient")


def test_biases_move_towards_the_mean_load_and_shares_equal_the_load():
    router = router_of(config_of(expert_bias=True, expert_bias_rate=0.125, aux_loss_scope="global"))
    bias = router.expert_bias.clone()
    router.update_(torch.tensor([4, 0, 4, 9, 3, 5, 4, 3]))
    moved = torch.tensor([0.0, 1, 0, -1, 1, -1, 0, 1], dtype=torch.float64) * 0.125
    assert_equal(router.expert_bias - bias, moved, "change of biases")
    assert_equal(router.step_shares, torch.tensor([4, 0, 4, 9, 3, 5, 4, 3]).double() / 32, "shares")
    large = torch.tensor([2**31 - 1, 2**31 - 2], dtype=torch.int32)
    update_bias_(zeros := torch.zeros(2), large, 1.0)
    assert zeros.tolist() == [-1.0, 1.0]


def test_biases_balance_experts_without_a_loss():
    settings = {"scoring": "sigmoid", "expert_bias": True, "expert_bias_rate": 0.02}
    router = router_of(config_of(**settings, aux_loss=0.0))
    hidden = draw(40, B, D, seed=9)
    before = router(hidden).load
    for _ in range(60):
        router.update_(router(hidden).load)
    after = router(hidden).load
    assert int(before.max()) > 1.3 * 40 * B * K / E
    assert int(after.max()) <= 1.1 * 40 * B * K / E


def test_the_capacity_is_rounded_up_from_the_exact_decimal_factor():
    config = config_of(num_experts=1, top_k=1, capacity_factor=1.1)
    assert expert_capacity(10, config) == 11
    assert expert_capacity(11, config) == 13


def test_experts_of_a_token_do_not_depend_on_later_tokens():
    router = router_of(config_of(capacity_factor=0.7))
    hidden = draw(S, B, D, seed=4)
    changed = hidden.clone()
    changed[S // 2 :] = draw(S - S // 2, B, D, seed=6)
    before, after = router(hidden), router(changed)
    earlier = slice(0, S // 2 * B)
    assert torch.equal(before.experts[earlier], after.experts[earlier])
    assert not torch.equal(before.experts, after.experts)
    assert int((before.experts[earlier] == -1).sum()) > 0
    assert int(before.experts.flatten().add(1).bincount()[1:].max()) == expert_capacity(
        S * B, router.config
    )


LAYERS, MICROBATCHES = (1, 3), 4


def draw_microbatch(layer: int, number: int) -> Tensor:
    """Draw the tokens of a layer in a microbatch, which differ between layers and microbatches."""
    return draw(S, B, D, seed=10 * layer + number)


def count_step(
    settings: Mapping[str, Any], mesh: ParallelMesh
) -> tuple[dict[int, RouterStatistics], Mapping[int, StepStatistics]]:
    """Route the tokens of this rank in a step; return counts of layers and statistics of the step."""
    config = config_of(**settings)
    router = router_of(config, mesh)
    layers = {layer: RouterStatistics(config, mesh.device) for layer in LAYERS}
    for layer, statistics in layers.items():
        for number in range(mesh.dp.rank, MICROBATCHES, mesh.dp.size):
            hidden = draw_microbatch(layer, number).chunk(mesh.cp.size)[mesh.cp.rank]
            statistics.add_(router(sequence_part(hidden, mesh)))
    return layers, step_statistics(layers, mesh)


@pytest.mark.parametrize("name", SETTINGS)
def test_statistics_of_a_step_equal_a_loop_over_its_tokens(name):
    layers, statistics = count_step(SETTINGS[name], ParallelMesh.single())
    router = router_of(config_of(**SETTINGS[name]))
    assert tuple(statistics) == LAYERS
    for layer, step in statistics.items():
        by_hand = [
            route_by_hand(draw_microbatch(layer, number), router) for number in range(MICROBATCHES)
        ]

        def mean(field: str, references: Any = by_hand) -> Tensor:
            return sum(getattr(one, field) for one in references) / MICROBATCHES

        loads = zip(*(one.load for one in by_hand), strict=True)
        assert step.load.tolist() == list(map(sum, loads)) == layers[layer].load.tolist()
        assert int(step.dropped) == sum(one.dropped for one in by_hand)
        assert_equal(step.entropy, mean("entropy"), "entropy")
        assert_equal(step.balance_loss, mean("balance_loss") / LOSSES["aux_loss"], "balance_loss")
        assert_equal(step.z_loss, mean("z_loss") / LOSSES["z_loss"], "z_loss")
