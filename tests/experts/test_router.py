"""The router against a plain loop over tokens in float64, against Hugging Face, and between layouts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV3Config, MixtralConfig, Qwen3MoeConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter, load_balancing_loss_func
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from lightning_megatron.experts.balance import attach_loss, step_load, update_bias_
from lightning_megatron.experts.choice import expert_capacity
from lightning_megatron.experts.router import Router, Routing
from lightning_megatron.groups.collectives import all_reduce_
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import shard_spec_of
from lightning_megatron.layers.gradient_slot import GradientSlot, set_slot
from lightning_megatron.plan.experts import ExpertsConfig
from lightning_megatron.plan.layout import ParallelLayout
from tests.oracles import assert_equal, gather_full, sequence_part
from tests.world import run_world

S, B, D, E, K = 6, 3, 5, 8, 3
LOSSES = {"aux_loss": 0.3, "z_loss": 0.01}

SETTINGS: dict[str, dict[str, Any]] = {
    "softmax over the chosen": {},
    "softmax over all": {"normalize_top_k": False, "score_scale": 2.5},
    "sigmoid": {"scoring": "sigmoid", "normalize_top_k": False},
    "sigmoid over the chosen": {"scoring": "sigmoid", "score_scale": 1.5, "aux_loss_scope": "sequence"},
    "groups": {"num_groups": 4, "top_k_groups": 2, "aux_loss_scope": "sequence"},
    "DeepSeek-V3": {"scoring": "sigmoid", "num_groups": 4, "top_k_groups": 2, "expert_bias": True},
    "biases": {"expert_bias": True, "normalize_top_k": False},
    "one choice": {"top_k": 1},
    "all experts": {"top_k": E},
    "the last step's load": {"aux_loss_scope": "global"},
    "capacity": {"capacity_factor": 0.7},
    "more capacity than tokens": {"capacity_factor": 8.0, "top_k": 1},
    "hardly any capacity": {"capacity_factor": 0.1, "normalize_top_k": False},
}


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def config_of(**settings: Any) -> ExpertsConfig:
    return ExpertsConfig(**{"num_experts": E, "top_k": K, "ffn_hidden_size": 4, **LOSSES, **settings})


def router_of(config: ExpertsConfig, mesh: ParallelMesh | None = None, **options: Any) -> Router:
    """Build a router whose weight, biases and shares are the same numbers everywhere, far from even ones."""
    router = Router(config, D, mesh or ParallelMesh.single(), **options).double()
    with torch.no_grad():
        router.weight.copy_(draw(E, D, seed=1))
    if router.expert_bias is not None:
        router.expert_bias.copy_(draw(E, seed=2) * 0.2)
    if router.step_shares is not None:
        router.step_shares.copy_(draw(E, seed=3).softmax(0))
    return router


@dataclass
class ByHand:
    probabilities: Tensor
    experts: list[list[int]]
    load: list[int]
    dropped: int
    entropy: Tensor
    balance_loss: Tensor
    z_loss: Tensor


def choose_by_hand(scores: list[float], config: ExpertsConfig) -> list[int]:
    size = config.num_experts // config.num_groups
    groups = [range(first, first + size) for first in range(0, config.num_experts, size)]
    if config.num_groups > 1:
        groups.sort(key=lambda group: -sum(sorted(scores[e] for e in group)[-2:]))
    eligible = [e for group in groups[: config.top_k_groups] for e in group]
    return sorted(eligible, key=lambda e: -scores[e])[: config.top_k]


def balance_by_hand(shares: list[Tensor], choices: list[list[int]], config: ExpertsConfig) -> Tensor:
    loss = torch.zeros((), dtype=torch.float64)
    for expert in range(config.num_experts):
        times = sum(expert in chosen for chosen in choices)
        mean = sum((share[expert] for share in shares), start=torch.zeros(())) / len(shares)
        loss = loss + config.num_experts * times / (config.top_k * len(shares)) * mean
    return loss


def route_by_hand(hidden: Tensor, router: Router) -> ByHand:
    """Route one token after the other."""
    config, bias = router.config, router.expert_bias
    capacity = math.inf if config.capacity_factor is None else expert_capacity(S * B, config)
    load, taken, dropped = [0] * config.num_experts, [0] * config.num_experts, 0
    probabilities, experts, unbiased, shares, squares = [], [], [], [], []
    for token in hidden.flatten(0, 1):
        powers = (router.weight @ token).exp()
        scores = powers / powers.sum() if config.scoring == "softmax" else powers / (1 + powers)
        shares.append(scores / scores.sum())
        squares.append(powers.sum().log() ** 2)
        unbiased.append(choose_by_hand(scores.tolist(), config))
        chosen = unbiased[-1] if bias is None else choose_by_hand((scores + bias).tolist(), config)
        total = sum((scores[e] for e in chosen), start=torch.zeros(())) if config.normalize_top_k else 1.0
        for choice, expert in enumerate(chosen):
            load[expert] += 1
            taken[expert] += 1
            weight = scores[expert] / total * config.score_scale
            if taken[expert] > capacity:
                dropped += 1
                chosen[choice], weight = -1, weight * 0.0
            probabilities.append(weight)
        experts.append(chosen)
    if config.aux_loss_scope == "sequence":
        parts = [balance_by_hand(shares[b::B], unbiased[b::B], config) for b in range(B)]
        balance = torch.stack(parts).mean()
    elif config.aux_loss_scope == "global":
        assert router.step_shares is not None
        balance = config.num_experts * (torch.stack(shares).mean(0) * router.step_shares).sum()
    else:
        # Whether a choice is dropped or not, it counts.
        balance = balance_by_hand(shares, [choose_by_hand(s.tolist(), config) for s in shares], config)
    return ByHand(
        torch.stack(probabilities).view(-1, config.top_k),
        experts,
        load,
        dropped,
        -torch.stack([(share * share.log()).sum() for share in shares]).mean(),
        config.aux_loss * balance,
        config.z_loss * torch.stack(squares).mean(),
    )


def main_loss(probabilities: Tensor) -> Tensor:
    """Weigh each choice of each token differently."""
    return (probabilities * torch.arange(probabilities.numel(), dtype=probabilities.dtype).view_as(probabilities)).sum()


def gradients(loss: Tensor, *leaves: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, leaves))


def losses_of(routing: Routing) -> Tensor:
    assert routing.balance_loss is not None
    assert routing.z_loss is not None
    return routing.balance_loss + routing.z_loss


@pytest.mark.parametrize("name", SETTINGS)
def test_router_equals_a_loop_over_tokens(name: str) -> None:
    router = router_of(config_of(**SETTINGS[name]))
    hidden = draw(S, B, D, seed=4).requires_grad_()
    routing, twin = router(hidden), route_by_hand(hidden, router)
    assert routing.experts.tolist() == twin.experts
    assert routing.load.tolist() == twin.load
    assert routing.counts.tolist() == [sum(chosen.count(e) for chosen in twin.experts) for e in range(E)]
    assert (0 if routing.dropped is None else int(routing.dropped)) == twin.dropped
    assert routing.probabilities.dtype == torch.float64
    for field in ("probabilities", "entropy", "balance_loss", "z_loss"):
        assert_equal(getattr(routing, field), getattr(twin, field), field)
    for what, actual, expected in (
        ("probabilities", main_loss(routing.probabilities), main_loss(twin.probabilities)),
        ("balance_loss", routing.balance_loss, twin.balance_loss),
        ("z_loss", routing.z_loss, twin.z_loss),
    ):
        pairs = zip(gradients_of(actual, hidden, router), gradients_of(expected, hidden, router), strict=True)
        for found, wanted in pairs:
            assert_equal(found, wanted, f"gradient of {what}")


def gradients_of(loss: Tensor, hidden: Tensor, router: Router) -> list[Tensor]:
    return list(torch.autograd.grad(loss, (hidden, router.weight), retain_graph=True))


def test_settings_drop_some_choices_or_none() -> None:
    dropped = {name: router_of(config_of(**SETTINGS[name]))(draw(S, B, D, seed=4)).dropped for name in SETTINGS}
    assert {name for name, number in dropped.items() if number} == {"capacity", "hardly any capacity"}
    assert int(dropped["more capacity than tokens"]) == 0


def hugging_face_routers() -> dict[str, tuple[torch.nn.Module, ExpertsConfig]]:
    counts = {"hidden_size": D, "num_experts_per_tok": K}
    groups = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "norm_topk_prob": True}
    groups_here = {"num_groups": 4, "top_k_groups": 2, "score_scale": 2.5, "expert_bias": True}
    return {
        "Mixtral": (MixtralTopKRouter(MixtralConfig(num_local_experts=E, **counts)), config_of()),
        "Qwen3-MoE": (
            Qwen3MoeTopKRouter(Qwen3MoeConfig(num_experts=E, norm_topk_prob=False, **counts)),
            config_of(normalize_top_k=False),
        ),
        "DeepSeek-V3": (
            DeepseekV3TopkRouter(DeepseekV3Config(n_routed_experts=E, **counts, **groups)),
            config_of(scoring="sigmoid", **groups_here),
        ),
    }


@pytest.mark.parametrize("name", ["Mixtral", "Qwen3-MoE", "DeepSeek-V3"])
def test_router_equals_that_of_hugging_face(name: str) -> None:
    """To float32: these routers round to it whatever they are given."""
    theirs, config = hugging_face_routers()[name]
    router = router_of(config).float()
    theirs.load_state_dict({"weight": router.weight}, strict=False)
    if router.expert_bias is not None:
        theirs.e_score_correction_bias.copy_(router.expert_bias)
    hidden = draw(S, B, D, seed=4).float().requires_grad_()
    routing = router(hidden)
    logits, weights, experts = theirs(hidden)
    # Theirs need not be sorted.
    order = weights.argsort(-1, descending=True) if config.expert_bias else slice(None)
    mine = routing.probabilities.argsort(-1, descending=True) if config.expert_bias else slice(None)
    sorted_by = (lambda x, by: x.gather(-1, by)) if config.expert_bias else (lambda x, by: x)
    assert torch.equal(sorted_by(routing.experts, mine), sorted_by(experts, order))
    actual, expected = sorted_by(routing.probabilities, mine), sorted_by(weights, order)
    assert_equal(actual, expected, "probabilities", 1e-6)
    found = gradients(main_loss(actual) / 50, hidden, router.weight)
    wanted = gradients(main_loss(expected) / 50, hidden, theirs.weight)
    for one, other in zip(found, wanted, strict=True):
        assert_equal(one, other, "gradient", 1e-5)
    if config.scoring == "softmax":
        # Theirs is top_k where experts are alike, ours is 1.
        auxiliary = load_balancing_loss_func((logits,), E, K) * config.aux_loss / K
        assert_equal(router(hidden).balance_loss, auxiliary, "auxiliary loss", 1e-6)


def test_an_attached_loss_has_its_gradient_at_any_scale() -> None:
    router = router_of(config_of())
    hidden = [draw(S, B, D, seed=seed).requires_grad_() for seed in (4, 5)]
    # Two microbatches and a loss scale of 1024.
    scale = 1024.0 / 2
    total = sum((main_loss(r.probabilities) + losses_of(r) for r in map(router, hidden)), start=torch.zeros(()))
    expected = gradients(total * scale, *hidden, router.weight)
    for form in (scale, torch.tensor(scale)):
        router.weight.grad = None
        for microbatch in hidden:
            microbatch.grad = None
            routing = router(microbatch)
            attached = attach_loss(routing.probabilities, losses_of(routing), form)
            assert torch.equal(attached, routing.probabilities)
            (main_loss(attached) * scale).backward()
        for leaf, wanted in zip((*hidden, router.weight), expected, strict=True):
            assert_equal(leaf.grad, wanted, f"gradient with a scale of type {type(form).__name__}")


def test_a_scale_on_the_device_is_read_in_the_backward_pass() -> None:
    x, loss, scale = torch.ones(2, requires_grad=True), torch.ones((), requires_grad=True), torch.tensor(1.0)
    attached = attach_loss(x, loss, scale)
    scale.fill_(3.0)
    attached.sum().backward()
    assert float(loss.grad) == 3.0


def test_scores_are_those_of_float32_under_autocast_and_in_half_precision() -> None:
    wide = router_of(config_of()).float()
    half = router_of(config_of()).bfloat16()
    with torch.no_grad():
        wide.weight.copy_(half.weight)
    hidden = draw(S, B, D).bfloat16().requires_grad_()
    expected = wide(hidden.float())
    with torch.autocast("cpu", torch.bfloat16):
        routing = half(hidden)
    for one in (routing, wide(hidden)):
        assert one.probabilities.dtype == torch.float32
        assert torch.equal(one.probabilities, expected.probabilities)
        assert torch.equal(one.experts, expected.experts)
    main_loss(routing.probabilities).backward()
    assert hidden.grad is not None
    assert half.weight.grad is not None
    assert (hidden.grad.dtype, half.weight.grad.dtype) == (torch.bfloat16, torch.bfloat16)
    exact = gradients(main_loss(expected.probabilities), wide.weight)[0]
    slot = GradientSlot(torch.empty(E, D), lambda: None)
    set_slot(half.weight, slot)
    main_loss(half(hidden).probabilities).backward()
    assert_equal(slot.gradient, exact, "gradient in the slot", 1e-5)


def test_losses_and_jitter_are_for_training_alone() -> None:
    router = router_of(config_of(jitter=0.5)).eval()
    hidden = draw(S, B, D)
    routing = router(hidden)
    assert routing.balance_loss is None
    assert routing.z_loss is None
    assert torch.equal(routing.probabilities, router_of(config_of())(hidden).probabilities)
    assert router_of(config_of(aux_loss=0.0, z_loss=0.0))(hidden).balance_loss is None


def test_jitter_multiplies_inputs_within_its_bounds_and_returns_with_the_position() -> None:
    mesh = ParallelMesh.single(seed=7)
    router = router_of(config_of(jitter=0.25), mesh)
    hidden, outside = torch.ones(64, B, D, dtype=torch.float64), torch.get_rng_state()
    first = router._jittered(hidden)
    assert 0.75 <= float(first.min()) < 0.8
    assert 1.2 < float(first.max()) <= 1.25
    assert torch.equal(torch.get_rng_state(), outside)
    assert not torch.equal(router._jittered(hidden), first)
    mesh.random.seek(0)
    assert torch.equal(router._jittered(hidden), first)


def test_forced_balance_gives_every_expert_as_many_tokens() -> None:
    router = router_of(config_of(expert_bias=True), forced_balance=True)
    hidden = draw(8, B, D).requires_grad_()
    routing = router(hidden)
    assert routing.counts.tolist() == [8 * B * K // E] * E
    assert all(len(set(chosen)) == K for chosen in routing.experts.tolist())
    assert_equal(routing.probabilities.sum(-1), torch.ones(8 * B, dtype=torch.float64), "sum of a token")
    assert_equal(routing.balance_loss, torch.tensor(0.3, dtype=torch.float64), "auxiliary loss of balanced experts")


def test_biases_move_towards_the_mean_load_and_shares_follow_it() -> None:
    router = router_of(config_of(expert_bias=True, expert_bias_rate=0.125, aux_loss_scope="global"))
    bias = router.expert_bias.clone()
    router.update_(torch.tensor([4, 0, 4, 9, 3, 5, 4, 3]))
    moved = torch.tensor([0.0, 1, 0, -1, 1, -1, 0, 1], dtype=torch.float64) * 0.125
    assert_equal(router.expert_bias - bias, moved, "change of biases")
    assert_equal(router.step_shares, torch.tensor([4, 0, 4, 9, 3, 5, 4, 3]).double() / 32, "shares")
    large = torch.tensor([2**31 - 1, 2**31 - 2], dtype=torch.int32)
    update_bias_(zeros := torch.zeros(2), large, 1.0)
    assert zeros.tolist() == [-1.0, 1.0]


def test_biases_bring_balance_without_a_loss() -> None:
    router = router_of(config_of(scoring="sigmoid", expert_bias=True, expert_bias_rate=0.02, aux_loss=0.0))
    hidden = draw(40, B, D, seed=9)
    before = router(hidden).load
    for _ in range(60):
        router.update_(router(hidden).load)
    after = router(hidden).load
    assert int(before.max()) > 1.3 * 40 * B * K / E
    assert int(after.max()) <= 1.1 * 40 * B * K / E


def test_even_shares_pull_nowhere_in_the_first_step() -> None:
    config = config_of(aux_loss_scope="global", z_loss=0.0)
    router, hidden = Router(config, D, ParallelMesh.single()).double(), draw(S, B, D)
    with torch.no_grad():
        router.weight.copy_(draw(E, D, seed=1))
    routing = router(hidden)
    assert_equal(routing.balance_loss, torch.tensor(0.3, dtype=torch.float64), "loss", 1e-7)
    assert float(gradients(routing.balance_loss, router.weight)[0].abs().max()) < 1e-8


def test_capacity_is_rounded_up_from_the_factor_as_it_is_written() -> None:
    config = config_of(num_experts=1, top_k=1, capacity_factor=1.1)
    assert expert_capacity(10, config) == 11
    assert expert_capacity(11, config) == 13


def test_state_holds_biases_and_shares_where_settings_need_them() -> None:
    assert set(router_of(config_of()).state_dict()) == {"weight"}
    biased = router_of(config_of(expert_bias=True, aux_loss_scope="global"))
    assert set(biased.state_dict()) == {"weight", "expert_bias", "step_shares"}


# One process against two ranks.

WORLD_SETTINGS: dict[str, dict[str, Any]] = {
    **{name: SETTINGS[name] for name in ("groups", "DeepSeek-V3", "the last step's load", "capacity")},
    "jitter": {"jitter": 0.3, "capacity_factor": 0.9, "aux_loss_scope": "sequence"},
}

CUTS: dict[str, Callable[[], ParallelMesh]] = {
    "tp": lambda: ParallelMesh.create(ParallelLayout(2, tp=2), seed=3),
    "tp with sequence parallelism": lambda: ParallelMesh.create(
        ParallelLayout(2, tp=2), seed=3, sequence_parallel=True
    ),
    "cp": lambda: ParallelMesh.create(ParallelLayout(2, cp=2), seed=3),
}


def compare_with_one_process(config: ExpertsConfig, mesh: ParallelMesh, what: str) -> None:
    full = draw(S, B, D, seed=4).requires_grad_()
    alone = router_of(config, ParallelMesh.single(seed=3))
    expected = alone(full)
    weights = draw(S * B, config.top_k, seed=5)
    total = (weights * expected.probabilities).sum() + losses_of(expected)
    wanted_hidden, wanted_weight = gradients(total, full, alone.weight)

    def own(x: Tensor) -> Tensor:
        x = x.unflatten(0, (S, B)) if x.shape[0] == S * B else x
        x = x.chunk(mesh.cp.size)[mesh.cp.rank]
        return sequence_part(x, mesh)

    hidden = own(full).detach().requires_grad_()
    router = router_of(config, mesh)
    routing = router(hidden)
    assert torch.equal(routing.experts, own(expected.experts).flatten(0, 1)), what
    assert_equal(routing.probabilities, own(expected.probabilities).flatten(0, 1), f"{what}: probabilities")
    # Gradients are averaged over the data group, which cp is part of.
    attached = attach_loss(routing.probabilities, losses_of(routing), 1.0)
    part = (own(weights).flatten(0, 1) * attached).sum() * mesh.cp.size
    grad_hidden, grad_weight = gradients(part, hidden, router.weight)
    spec = shard_spec_of(router.weight, mesh.tp.rank)
    assert spec.partial == mesh.sequence_parallel, what
    grad_weight = gather_full(grad_weight, spec, mesh, sum_copies=spec.partial)
    assert_equal(all_reduce_(grad_weight, mesh.data, "mean"), wanted_weight, f"{what}: gradient of the weight")
    assert_equal(grad_hidden / mesh.cp.size, own(wanted_hidden), f"{what}: gradient of hidden")
    for field in ("balance_loss", "z_loss"):
        value = getattr(routing, field).detach().clone()
        all_reduce_(value, mesh.data, "mean")
        if mesh.sequence_parallel:
            all_reduce_(value, mesh.tp)
        assert_equal(value, getattr(expected, field), f"{what}: {field}")
    assert torch.equal(step_load(routing.load, mesh), expected.load.long()), what


def check_cuts(rank: int, size: int) -> None:
    for cut, build in CUTS.items():
        mesh = build()
        for name, settings in WORLD_SETTINGS.items():
            config = config_of(**settings)
            # A capacity and random numbers are those of a cp rank.
            if mesh.cp.size == 1 or not (config.capacity_factor or config.jitter):
                compare_with_one_process(config, mesh, f"{name}, {cut}")
        mesh.destroy()
    mesh = ParallelMesh.create(ParallelLayout(2))
    load = torch.full((2, E), rank + 1, dtype=torch.int32)
    assert torch.equal(step_load(load, mesh), torch.full((2, E), 3)), "the load of all data ranks"
    mesh.destroy()


def test_every_cut_equals_one_process() -> None:
    run_world(check_cuts, 2)
