"""Load balancing of experts: the auxiliary loss, counts of routed tokens and bias updates.

The tokens of a microbatch are divided over the cp ranks and, under sequence parallelism, over the
tp ranks. Each function here returns this rank's part of a loss. Parts are combined as gradients
are: summed over tp under sequence parallelism, and averaged over the data group (dp x cp). Without
sequence parallelism all tp ranks have the same tokens and the same loss. If the caller reduces the
weights' gradients by this rule, the gradients of the parts are correct. The same rule gives the
value to log.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_megatron.groups.collectives import all_reduce_
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.shapes import Float, Int, Shaped


def balance_loss(
    share_sums: Float[Tensor, "sequences experts"],
    load_factors: Shaped[Tensor, "#sequences experts"] | Shaped[Tensor, "experts"],
    coefficient: float,
) -> Float[Tensor, ""]:
    """Return this rank's part of the auxiliary loss, which grows as the load becomes uneven.

    Over all tokens it equals the coefficient times the number of experts times the sum over experts
    of (share of the selections) x (mean probability). Without the coefficient it is 1 for an even
    load and the number of experts if all tokens go to one expert. Gradients flow through the
    probabilities only.

    Shapes: ``sequences`` is 1 for all sequences together.

    Args:
        share_sums: Probabilities of each expert, summed over this rank's tokens; each token's sum
            to 1.
        load_factors: Count of the selections of each expert, or its share of all selections.
        coefficient: Factor of the sum of products. For shares it is the loss coefficient times the
            number of experts, divided by the tokens of the microbatch on all tp ranks. For counts
            it is further divided by the number of selections in a row.

    Source: Fedus et al. 2022, equation 4; DeepSeek-AI 2024, equations 17 to 20 (of each sequence).
    """
    return (share_sums * load_factors).sum() * coefficient


def tokens_per_expert(
    experts: Int[Tensor, "*tokens top_k"], num_experts: int
) -> Int[Tensor, "{num_experts}"]:
    """Count (int32) without a host read how often each expert is selected; -1 is not counted."""
    ones = torch.ones((), dtype=torch.int32, device=experts.device).expand(experts.numel())
    return ones.new_zeros(num_experts + 1).scatter_add_(0, experts.flatten() + 1, ones)[1:]


def tokens_per_expert_of_sequences(
    experts: Int[Tensor, "seq batch top_k"], num_experts: int
) -> Int[Tensor, "batch {num_experts}"]:
    """Count (int32) without a host read how often each sequence selects each expert."""
    num_sequences = experts.shape[1]
    first = torch.arange(num_sequences, device=experts.device)[:, None] * num_experts
    return tokens_per_expert(experts + first, num_sequences * num_experts).view(
        num_sequences, num_experts
    )


def microbatch_load(
    load: Int[Tensor, "*sequences experts"], mesh: ParallelMesh
) -> Int[Tensor, "*sequences experts"]:
    """Sum the counts of selections over all ranks that share the tokens of a microbatch.

    Communication: an all-reduce over tp under sequence parallelism, and one over cp.
    """
    axes = (mesh.tp, mesh.cp) if mesh.sequence_parallel else (mesh.cp,)
    if all(axis.size == 1 for axis in axes):
        return load
    total = load.clone()
    for axis in axes:
        all_reduce_(total, axis)
    return total


def add_over_tokens_(x: Shaped[Tensor, "*shape"], mesh: ParallelMesh) -> Shaped[Tensor, "*shape"]:
    """Sum ``x`` in place over all ranks that have different tokens, and return it.

    Communication: an all-reduce over tp under sequence parallelism, and one over the data group.
    """
    if mesh.sequence_parallel:
        all_reduce_(x, mesh.tp)
    return all_reduce_(x, mesh.data)


@torch.no_grad()
def update_bias_(bias: Float[Tensor, "experts"], load: Int[Tensor, "experts"], rate: float) -> None:
    """Raise biases of underloaded experts by ``rate`` and lower those of overloaded ones, in place.

    ``load`` is that of a whole step, summed over all ranks.

    Source: Wang et al. 2024, algorithm 1.
    """
    # Integer arithmetic: the bias of an expert with exactly the mean load must not change.
    missing = load.sum() - load.to(torch.int64) * load.numel()
    bias.add_(missing.sign(), alpha=rate)
