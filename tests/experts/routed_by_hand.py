"""Reference router that handles one token at a time, and the settings of comparisons with it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.experts.routing.router import Router, Routing
from lightning_megatron.experts.routing.selection import expert_capacity
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.plan.experts import ExpertsConfig

S, B, D, E, K = 6, 3, 5, 8, 3
LOSSES = {"aux_loss": 0.3, "z_loss": 0.01}

SETTINGS: dict[str, dict[str, Any]] = {
    "softmax over the chosen": {},
    "softmax over all": {"normalize_top_k": False, "score_scale": 2.5},
    "sigmoid": {"scoring": "sigmoid", "normalize_top_k": False},
    "sigmoid over the chosen": {"scoring": "sigmoid", "score_scale": 1.5, "aux_loss_scope": "sequence"},
    "groups": {"num_groups": 4, "top_k_groups": 2, "aux_loss_scope": "sequence"},
    "DeepSeek-V3": {"scoring": "sigmoid", "num_groups": 4, "top_k_groups": 2, "expert_bias": True},
    "DeepSeek-V2": {
        "normalize_top_k": False, "num_groups": 4, "top_k_groups": 2, "best_of_group": 1, "score_scale": 16.0,
    },
    "biases": {"expert_bias": True, "normalize_top_k": False},
    "logits with biases": {"router_bias": True},
    "one choice": {"top_k": 1},
    "all experts": {"top_k": E},
    "the last step's load": {"aux_loss_scope": "global"},
    "capacity": {"capacity_factor": 0.7},
    "more capacity than tokens": {"capacity_factor": 8.0, "top_k": 1},
    "hardly any capacity": {"capacity_factor": 0.1, "normalize_top_k": False},
}  # fmt: skip


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def config_of(**settings: Any) -> ExpertsConfig:
    return ExpertsConfig(
        **{"num_experts": E, "top_k": K, "ffn_hidden_size": 4, **LOSSES, **settings}
    )


def router_of(config: ExpertsConfig, mesh: ParallelMesh | None = None, **options: Any) -> Router:
    """Build a router whose weight, biases and shares are uneven and the same in every process."""
    router = Router(config, D, mesh or ParallelMesh.single(), **options).double()
    with torch.no_grad():
        router.weight.copy_(draw(E, D, seed=1))
        if router.bias is not None:
            router.bias.copy_(draw(E, seed=5))
    if router.expert_bias is not None:
        router.expert_bias.copy_(draw(E, seed=2) * 0.2)
    if router.step_shares is not None:
        router.step_shares.copy_(draw(E, seed=3).softmax(0))
    return router


@dataclass
class RoutingByHand:
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
    best = config.best_of_group
    if config.num_groups > 1:
        groups.sort(key=lambda group: -sum(sorted(scores[e] for e in group)[-best:]))
    eligible = [e for group in groups[: config.top_k_groups] for e in group]
    return sorted(eligible, key=lambda e: -scores[e])[: config.top_k]


def balance_by_hand(
    shares: list[Tensor], choices: list[list[int]], config: ExpertsConfig
) -> Tensor:
    loss = torch.zeros((), dtype=torch.float64)
    for expert in range(config.num_experts):
        num_chosen = sum(expert in chosen for chosen in choices)
        mean_share = sum((share[expert] for share in shares), start=torch.zeros(())) / len(shares)
        loss = loss + config.num_experts * num_chosen / (config.top_k * len(shares)) * mean_share
    return loss


def route_by_hand(hidden: Tensor, router: Router) -> RoutingByHand:
    """Route one token at a time."""
    config, bias = router.config, router.expert_bias
    has_capacity = config.capacity_factor is not None
    capacity = expert_capacity(hidden[..., 0].numel(), config) if has_capacity else math.inf
    load, num_assigned, dropped = [0] * config.num_experts, [0] * config.num_experts, 0
    probabilities, experts, unbiased, shares, squares = [], [], [], [], []
    for token in hidden.flatten(0, 1):
        logits = router.weight @ token
        powers = (logits if router.bias is None else logits + router.bias).exp()
        scores = powers / powers.sum() if config.scoring == "softmax" else powers / (1 + powers)
        shares.append(scores / scores.sum())
        squares.append(powers.sum().log() ** 2)
        unbiased.append(choose_by_hand(scores.tolist(), config))
        chosen = choose_by_hand((scores if bias is None else scores + bias).tolist(), config)
        total = scores[chosen].sum() if config.normalize_top_k else 1.0
        for choice, expert in enumerate(chosen):
            load[expert] += 1
            num_assigned[expert] += 1
            weight = scores[expert] / total * config.score_scale
            if num_assigned[expert] > capacity:
                dropped += 1
                chosen[choice], weight = -1, weight * 0.0
            probabilities.append(weight)
        experts.append(chosen)
    if config.aux_loss_scope == "sequence":
        count = hidden.shape[1]
        balances = [
            balance_by_hand(shares[b::count], unbiased[b::count], config) for b in range(count)
        ]
        balance = torch.stack(balances).mean()
    elif config.aux_loss_scope == "global":
        assert router.step_shares is not None
        balance = config.num_experts * (torch.stack(shares).mean(0) * router.step_shares).sum()
    else:
        # Dropped choices count, too.
        choices = [choose_by_hand(share.tolist(), config) for share in shares]
        balance = balance_by_hand(shares, choices, config)
    return RoutingByHand(
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
    weights = torch.arange(probabilities.numel(), dtype=probabilities.dtype)
    return (probabilities * weights.view_as(probabilities)).sum()


def gradients(loss: Tensor, *leaves: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, leaves))


def losses_of(routing: Routing) -> Tensor:
    assert routing.losses.balance is not None
    assert routing.losses.z is not None
    return routing.losses.balance + routing.losses.z
