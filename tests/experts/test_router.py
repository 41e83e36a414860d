"""The router equals a loop over tokens in float64, routers of Hugging Face, and itself in every
layout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV3Config, MixtralConfig, Qwen3MoeConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter, load_balancing_loss_func
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from lightning_megatron.experts.routing.attached_loss import attach_loss
from lightning_megatron.experts.routing.balance import add_over_tokens_
from lightning_megatron.experts.routing.router import Router
from lightning_megatron.experts.routing.selection import round_robin_experts
from lightning_megatron.groups.collectives import all_reduce_
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import shard_spec_of
from lightning_megatron.layers.gradient_slot import GradientSlot, set_slot
from lightning_megatron.layers.init import initialize_
from lightning_megatron.plan.experts import ExpertsConfig
from lightning_megatron.plan.layout import ParallelLayout
from tests.experts.routed_by_hand import (
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
from tests.oracles import assert_equal, gather_full, sequence_part
from tests.world import run_world


@pytest.mark.parametrize("name", SETTINGS)
def test_the_router_equals_a_loop_over_tokens(name: str) -> None:
    router = router_of(config_of(**SETTINGS[name]))
    hidden = draw(S, B, D, seed=4).requires_grad_()
    routing, reference = router(hidden), route_by_hand(hidden, router)
    assert routing.experts.tolist() == reference.experts
    assert routing.load.tolist() == reference.load
    assert routing.counts.tolist() == [
        sum(chosen.count(expert) for chosen in reference.experts) for expert in range(E)
    ]
    assert (0 if routing.dropped is None else int(routing.dropped)) == reference.dropped
    assert routing.probabilities.dtype == torch.float64
    for field in ("probabilities", "balance_loss", "z_loss"):
        assert_equal(getattr(routing, field), getattr(reference, field), field)
    assert_equal(routing.entropy_sum, reference.entropy * S * B, "entropy_sum")
    for loss_name, actual, expected in (
        ("probabilities", main_loss(routing.probabilities), main_loss(reference.probabilities)),
        ("balance_loss", routing.balance_loss, reference.balance_loss),
        ("z_loss", routing.z_loss, reference.z_loss),
    ):
        pairs = zip(
            gradients_of(actual, hidden, router),
            gradients_of(expected, hidden, router),
            strict=True,
        )
        for actual_gradient, expected_gradient in pairs:
            assert_equal(actual_gradient, expected_gradient, f"gradient of {loss_name}")


def gradients_of(loss: Tensor, hidden: Tensor, router: Router) -> list[Tensor]:
    leaves = (hidden, *router.parameters())
    return list(torch.autograd.grad(loss, leaves, retain_graph=True))


def test_only_small_capacities_drop_choices() -> None:
    dropped = {
        name: router_of(config_of(**SETTINGS[name]))(draw(S, B, D, seed=4)).dropped
        for name in SETTINGS
    }
    assert {name for name, number in dropped.items() if number} == {
        "capacity",
        "hardly any capacity",
    }
    assert int(dropped["more capacity than tokens"]) == 0


def make_hugging_face_routers() -> dict[str, tuple[torch.nn.Module, ExpertsConfig]]:
    counts = {"hidden_size": D, "num_experts_per_tok": K}
    their_groups = {
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
    }
    our_groups = {"num_groups": 4, "top_k_groups": 2, "score_scale": 2.5, "expert_bias": True}
    return {
        "Mixtral": (MixtralTopKRouter(MixtralConfig(num_local_experts=E, **counts)), config_of()),
        "Qwen3-MoE": (
            Qwen3MoeTopKRouter(Qwen3MoeConfig(num_experts=E, norm_topk_prob=False, **counts)),
            config_of(normalize_top_k=False),
        ),
        "DeepSeek-V3": (
            DeepseekV3TopkRouter(DeepseekV3Config(n_routed_experts=E, **counts, **their_groups)),
            config_of(scoring="sigmoid", **our_groups),
        ),
    }


@pytest.mark.usefixtures("float32_is_float64")
@pytest.mark.parametrize("name", ["Mixtral", "Qwen3-MoE", "DeepSeek-V3"])
def test_the_router_equals_routers_of_hugging_face(name: str) -> None:
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
    actual_gradients = gradients(main_loss(actual), hidden, router.weight)
    for actual_gradient, expected_gradient in zip(
        actual_gradients, gradients(main_loss(expected), hidden, reference.weight), strict=True
    ):
        assert_equal(actual_gradient, expected_gradient, "gradient")
    if config.scoring == "softmax":
        # For equal experts, the loss of Hugging Face is top_k, and ours is 1.
        expected_loss = (
            load_balancing_loss_func((reference(hidden)[0],), E, K) * config.aux_loss / K
        )
        balance_loss = router(hidden).balance_loss
        assert_equal(balance_loss, expected_loss, "auxiliary loss")
        assert_equal(
            gradients(balance_loss, hidden)[0],
            gradients(expected_loss, hidden)[0],
            "gradient of the auxiliary loss",
        )


@pytest.mark.parametrize("name", SETTINGS)
def test_routing_reads_nothing_from_the_device(name: str) -> None:
    """A meta tensor has no values, so any read raises."""
    mesh = ParallelMesh.single("meta")
    with torch.device("meta"):
        router = Router(config_of(**SETTINGS[name]), D, mesh)
    hidden = torch.empty(S, B, D, device="meta", requires_grad=True)
    routing = router(hidden)
    attached = attach_loss(routing.probabilities, losses_of(routing), 1.0)
    assert gradients(attached.sum(), hidden)[0].shape == hidden.shape
    router.update_(add_over_tokens_(routing.load.to(torch.int64, copy=True), mesh))
    round_robin_experts(S * B, 0, router.config, mesh.device)


def test_scores_are_computed_in_float32_under_autocast_and_in_bfloat16() -> None:
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


def test_evaluation_has_no_losses_and_no_jitter() -> None:
    router = router_of(config_of(jitter=0.5)).eval()
    hidden = draw(S, B, D)
    routing = router(hidden)
    assert routing.balance_loss is None
    assert routing.z_loss is None
    assert torch.equal(routing.probabilities, router_of(config_of())(hidden).probabilities)
    assert router_of(config_of(aux_loss=0.0, z_loss=0.0))(hidden).balance_loss is None


def test_jitter_is_within_its_bounds_and_repeats_with_the_position() -> None:
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


def test_forced_balance_gives_every_expert_equally_many_tokens() -> None:
    router = router_of(config_of(expert_bias=True), forced_balance=True)
    hidden = draw(8, B, D).requires_grad_()
    routing = router(hidden)
    assert routing.counts.tolist() == [8 * B * K // E] * E
    assert all(len(set(chosen)) == K for chosen in routing.experts.tolist())
    assert_equal(
        routing.probabilities.sum(-1), torch.ones(8 * B, dtype=torch.float64), "sum of a token"
    )
    assert_equal(
        routing.balance_loss,
        torch.tensor(0.3, dtype=torch.float64),
        "auxiliary loss of balanced experts",
    )


def test_the_state_has_biases_and_shares_if_settings_need_them() -> None:
    assert set(router_of(config_of()).state_dict()) == {"weight"}
    biased = router_of(config_of(expert_bias=True, aux_loss_scope="global"))
    assert set(biased.state_dict()) == {"weight", "expert_bias", "step_shares"}


def test_biases_of_a_router_built_on_meta_exist_and_stay_float32() -> None:
    with torch.device("meta"):
        router = Router(
            config_of(expert_bias=True, aux_loss_scope="global"), D, ParallelMesh.single()
        )
    assert router.weight.is_meta
    initialize_(router, "cpu", seed=0)
    router.update_(torch.arange(E))
    shares = router.step_shares.clone()
    router.to(dtype=torch.bfloat16)
    assert router.weight.dtype == torch.bfloat16
    assert (router.expert_bias.dtype, router.step_shares.dtype) == (torch.float32, torch.float32)
    assert torch.equal(router.step_shares, shares)


# One process against two ranks.

WORLD_SETTINGS: dict[str, dict[str, Any]] = {
    **{
        name: SETTINGS[name]
        for name in ("groups", "DeepSeek-V3", "the last step's load", "capacity")
    },
    "jitter": {"jitter": 0.3, "capacity_factor": 0.9, "aux_loss_scope": "sequence"},
}

LAYOUTS: dict[str, Callable[[], ParallelMesh]] = {
    "tp": lambda: ParallelMesh.create(ParallelLayout(2, tp=2), seed=3),
    "tp with sequence parallelism": lambda: ParallelMesh.create(
        ParallelLayout(2, tp=2), seed=3, sequence_parallel=True
    ),
    "cp": lambda: ParallelMesh.create(ParallelLayout(2, cp=2), seed=3),
}


def compare_with_one_process(config: ExpertsConfig, mesh: ParallelMesh, case_name: str) -> None:
    full = draw(S, B, D, seed=4).requires_grad_()
    single_process = router_of(config, ParallelMesh.single(seed=3))
    expected = single_process(full)
    weights = draw(S * B, config.top_k, seed=5)
    total = (weights * expected.probabilities).sum() + losses_of(expected)
    expected_grad_hidden, expected_grad_weight = gradients(total, full, single_process.weight)

    def local_part(x: Tensor) -> Tensor:
        x = x.unflatten(0, (S, B)) if x.shape[0] == S * B else x
        x = x.chunk(mesh.cp.size)[mesh.cp.rank]
        return sequence_part(x, mesh)

    hidden = local_part(full).detach().requires_grad_()
    router = router_of(config, mesh)
    routing = router(hidden)
    assert torch.equal(routing.experts, local_part(expected.experts).flatten(0, 1)), case_name
    assert_equal(
        routing.probabilities,
        local_part(expected.probabilities).flatten(0, 1),
        f"{case_name}: probabilities",
    )
    # Gradients are averaged over the data group, which includes cp.
    attached = attach_loss(routing.probabilities, losses_of(routing), 1.0)
    local_loss = (local_part(weights).flatten(0, 1) * attached).sum() * mesh.cp.size
    grad_hidden, grad_weight = gradients(local_loss, hidden, router.weight)
    spec = shard_spec_of(router.weight, mesh.tp.rank)
    assert spec.partial == mesh.sequence_parallel, case_name
    grad_weight = gather_full(grad_weight, spec, mesh, sum_copies=spec.partial)
    assert_equal(
        all_reduce_(grad_weight, mesh.data, "mean"),
        expected_grad_weight,
        f"{case_name}: gradient of the weight",
    )
    assert_equal(
        grad_hidden / mesh.cp.size,
        local_part(expected_grad_hidden),
        f"{case_name}: gradient of hidden",
    )
    for field in ("balance_loss", "z_loss"):
        value = getattr(routing, field).detach().clone()
        all_reduce_(value, mesh.data, "mean")
        if mesh.sequence_parallel:
            all_reduce_(value, mesh.tp)
        assert_equal(value, getattr(expected, field), f"{case_name}: {field}")
    assert torch.equal(
        add_over_tokens_(routing.load.to(torch.int64, copy=True), mesh), expected.load.long()
    ), case_name


def train(config: ExpertsConfig, mesh: ParallelMesh, num_microbatches: int) -> Router:
    """Take three steps on the microbatches of this data rank, as callers of a router do."""
    router = router_of(config, mesh)
    for step in range(3):
        load = torch.zeros(E, dtype=torch.int32)
        for number in range(num_microbatches):
            routing = router(
                draw(S, B, D, seed=10 * step + mesh.dp.rank * num_microbatches + number)
            )
            attached = attach_loss(
                routing.probabilities, losses_of(routing), 1.0 / num_microbatches
            )
            (main_loss(attached) / (S * B * num_microbatches)).backward()
            load += routing.load
        assert router.weight.grad is not None
        with torch.no_grad():
            router.weight.sub_(all_reduce_(router.weight.grad, mesh.data, "mean"))
        router.weight.grad = None
        router.update_(add_over_tokens_(load.to(torch.int64, copy=True), mesh))
    return router


def check_layouts(rank: int, size: int) -> None:
    for layout_name, build in LAYOUTS.items():
        mesh = build()
        for name, settings in WORLD_SETTINGS.items():
            config = config_of(**settings)
            # Capacity and random numbers depend on the cp rank.
            if mesh.cp.size == 1 or not (config.capacity_factor or config.jitter):
                compare_with_one_process(config, mesh, f"{name}, {layout_name}")
        mesh.destroy()
    mesh = ParallelMesh.create(ParallelLayout(2))
    config = config_of(
        scoring="sigmoid", expert_bias=True, expert_bias_rate=0.05, aux_loss_scope="global"
    )
    expected = train(config, ParallelMesh.single(), 4).state_dict()
    assert float((expected["weight"] - draw(E, D, seed=1)).abs().max()) > 0.1
    for name, value in train(config, mesh, 2).state_dict().items():
        assert_equal(value, expected[name], f"{name} after steps on two data ranks")
    mesh.destroy()


def test_every_layout_equals_one_process() -> None:
    run_world(check_layouts, 2)
