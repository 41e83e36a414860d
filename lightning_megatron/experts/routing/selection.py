"""Expert selection from scores, and expert capacity.

No function here has a gradient or copies data from the device to the host.
"""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from torch import Tensor

from lightning_megatron.groups.collectives import gather_from_axis
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.plan.experts import ExpertsConfig
from lightning_megatron.shapes import Bool, Float, Int


@torch.no_grad()
def select_experts(
    scores: Float[Tensor, "tokens experts"],
    bias: Float[Tensor, "experts"] | None,
    config: ExpertsConfig,
) -> Int[Tensor, "tokens top_k"]:
    """Return the top-k experts of each token, best first, by scores plus biases.

    With expert groups, only experts of the best groups are eligible. Ties go to the expert with the
    lower index, so that every device and layout selects the same experts.

    Source: DeepSeek-AI 2024, section 2.1.2.
    """
    if bias is not None:
        scores = scores + bias
    if config.top_k_groups < config.num_groups:
        by_group = scores.unflatten(-1, (config.num_groups, -1))
        group_scores = by_group.topk(config.best_of_group, -1).values.sum(-1)
        best = _highest(group_scores, config.top_k_groups)
        is_out = torch.ones_like(group_scores, dtype=torch.bool).scatter_(-1, best, False)
        scores = by_group.masked_fill(is_out[..., None], -torch.inf).flatten(-2)
    return _highest(scores, config.top_k)


def expert_capacity(num_tokens: int, config: ExpertsConfig) -> int:
    """Return an expert's even share of tokens times the capacity factor, rounded up (tokens)."""
    # Exact decimal arithmetic: in floating point 1.1 times 10 is more than 11.
    factor = Fraction(str(config.capacity_factor))
    return math.ceil(factor * num_tokens * config.top_k / config.num_experts)


@torch.no_grad()
def within_capacity(
    experts: Int[Tensor, "tokens top_k"],
    load: Int[Tensor, "experts"],
    capacity: int,
    mesh: ParallelMesh,
) -> Bool[Tensor, "tokens top_k"]:
    """Return which selections fit into the capacity of their expert (tokens).

    An expert accepts selections in the order of positions, then of sequences, then of a token's own
    selections, which must be the order of ``experts``. A token's result therefore does not depend
    on later tokens of its sequence, as it would with an order by probability. Under sequence
    parallelism the tokens of earlier tp ranks come first, so that every tp size drops the same
    tokens.

    Communication: an all-gather of the load over tp under sequence parallelism.
    """
    flat = experts.flatten()
    by_expert = flat.argsort(stable=True)
    # Index of an expert's first selection in `by_expert`, less the selections that earlier ranks
    # made.
    start = load.cumsum(0) - load
    if mesh.sequence_parallel:
        start = start - gather_from_axis(load[None], mesh.tp, 0)[: mesh.tp.rank].sum(0)
    positions = torch.arange(flat.numel(), device=flat.device) - start[flat[by_expert]]
    return (
        torch.empty_like(flat, dtype=torch.bool)
        .scatter_(0, by_expert, positions < capacity)
        .view_as(experts)
    )


def _highest(values: Tensor, count: int) -> Tensor:
    # A copy: the backward pass saves these indices, and a view would keep the whole sort in memory.
    return values.sort(dim=-1, descending=True, stable=True).indices[..., :count].contiguous()
