"""Which experts a token goes to, given its scores; nothing here has a gradient or reads from the device."""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from torch import Tensor

from lightning_megatron.groups.collectives import gather_from_axis
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.plan.experts import BEST_OF_GROUP, ExpertsConfig


@torch.no_grad()
def choose_experts(scores: Tensor, bias: Tensor | None, config: ExpertsConfig) -> Tensor:
    """Return the experts with the highest scores, best first; of the best groups alone, where there are groups.

    Of equal scores that of the lower number comes first, so that every device and layout chooses the same.

    Shapes: scores ``(T, E)``; bias ``(E,)``; output ``(T, k)`` int64.

    Args:
        scores: Of each expert.
        bias: What is added to them, for this choice alone.
        config: How many experts and groups.

    Source: DeepSeek-AI 2024, section 2.1.2.
    """
    if bias is not None:
        scores = scores + bias
    if config.top_k_groups < config.num_groups:
        by_group = scores.unflatten(-1, (config.num_groups, -1))
        worth = by_group.topk(BEST_OF_GROUP, -1).values.sum(-1)
        best = _highest(worth, config.top_k_groups)
        is_out = torch.ones_like(worth, dtype=torch.bool).scatter_(-1, best, False)
        scores = by_group.masked_fill(is_out[..., None], -torch.inf).flatten(-2)
    return _highest(scores, config.top_k)


def balanced_experts(num_tokens: int, first_turn: int, config: ExpertsConfig, device: torch.device) -> Tensor:
    """Deal the experts out to tokens in turn, whatever the scores are.

    Shapes: output ``(T, k)`` int64.

    Args:
        num_tokens: Tokens of this rank (tokens).
        first_turn: The turn of the first choice: choices of earlier ranks.
        config: How many experts.
        device: Where the tokens are.
    """
    turns = torch.arange(first_turn, first_turn + num_tokens * config.top_k, device=device)
    return (turns % config.num_experts).view(num_tokens, config.top_k)


def expert_capacity(num_tokens: int, config: ExpertsConfig) -> int:
    """Return how many tokens an expert takes: its even share times the capacity factor, rounded up (tokens).

    Args:
        num_tokens: Tokens that share the capacity (tokens).
        config: Has a capacity factor.
    """
    # As it is written: in floating point 1.1 times 10 is more than 11.
    factor = Fraction(str(config.capacity_factor))
    return math.ceil(factor * num_tokens * config.top_k / config.num_experts)


@torch.no_grad()
def within_capacity(experts: Tensor, load: Tensor, capacity: int, mesh: ParallelMesh) -> Tensor:
    """Tell which choices come first at their expert, so that it takes them.

    The order is that of positions, then of sequences, then of a token's own choices. So what a token gets does not
    depend on later tokens of its sequence, as it would if high probabilities came first. Under sequence parallelism the
    tokens of earlier tp ranks are before those of this rank: every layout of tp drops the same ones.

    Shapes: experts ``(T, k)``; load ``(E,)``; output ``(T, k)`` of truth values.

    Args:
        experts: The choices of this rank's tokens, by position and sequence.
        load: How often each expert is among them.
        capacity: How many tokens an expert takes.
        mesh: The groups of this rank.

    Communication: an all-gather of the load over tp under sequence parallelism.
    """
    flat = experts.flatten()
    by_expert = flat.argsort(stable=True)
    # Where an expert's first choice would stand, if those of earlier ranks were before it.
    start = load.cumsum(0) - load
    if mesh.sequence_parallel:
        start = start - gather_from_axis(load[None], mesh.tp, 0)[: mesh.tp.rank].sum(0)
    places = torch.arange(flat.numel(), device=flat.device) - start[flat[by_expert]]
    return torch.empty_like(flat, dtype=torch.bool).scatter_(0, by_expert, places < capacity).view_as(experts)


def _highest(values: Tensor, count: int) -> Tensor:
    # A copy: the backward pass keeps these numbers, and with a view of them the order of all experts.
    return values.sort(dim=-1, descending=True, stable=True).indices[..., :count].contiguous()
