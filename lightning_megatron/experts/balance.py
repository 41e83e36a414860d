"""What keeps the experts of a layer evenly loaded: losses of the router, and what a whole step's load changes.

The tokens of a microbatch lie on several ranks: under sequence parallelism on those of tp, and on those of cp. A loss
here is this rank's part, with a rule like that of a gradient: the parts are added over tp under sequence parallelism
(without it all tp ranks have the same tokens and the same loss), and averaged over the data group (dp x cp). Gradients
of a part are then right where the caller treats those of the weights so, and a number for a log is right, too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_megatron.groups.collectives import all_reduce_
from lightning_megatron.groups.mesh import ParallelMesh


def balance_loss(share_sums: Tensor, of_choices: Tensor, coefficient: float) -> Tensor:
    """Return this rank's part of the loss that grows as tokens are spread unevenly.

    Equal, over all tokens, to the coefficient times E times the sum over experts of (share of the choices) x (mean
    probability): 1 where all experts are alike, E where all tokens go to one. Choices are constants; gradients reach
    probabilities.

    Shapes: both ``(1, E)`` for all sequences or ``(B, E)``; output a number.

    Args:
        share_sums: Sums over this rank's tokens of the probabilities of each expert; those of a token add up to 1.
        of_choices: How often each expert is chosen, or how much of the choices it has.
        coefficient: What the sum of products is multiplied by: for shares of choices, that of the loss times E over the
            tokens of the microbatch on all tp ranks together; for counts, that over the choices of a row.

    Source: Fedus et al. 2022, equation 4; DeepSeek-AI 2024, equations 17 to 20 (of each sequence).
    """
    return (share_sums * of_choices).sum() * coefficient


def num_choices(experts: Tensor, num_experts: int) -> Tensor:
    """Count how often each expert is chosen, without a host read; -1 stands for none.

    Shapes: experts ``(..., k)``; output ``(E,)`` int32.
    """
    ones = torch.ones((), dtype=torch.int32, device=experts.device).expand(experts.numel())
    return ones.new_zeros(num_experts + 1).scatter_add_(0, experts.flatten() + 1, ones)[1:]


def num_choices_of_sequences(experts: Tensor, num_experts: int) -> Tensor:
    """Count how often each expert is chosen by each sequence, without a host read.

    Shapes: experts ``(S, B, k)``; output ``(B, E)`` int32.
    """
    num_sequences = experts.shape[1]
    first = torch.arange(num_sequences, device=experts.device)[:, None] * num_experts
    return num_choices(experts + first, num_sequences * num_experts).view(num_sequences, num_experts)


def microbatch_load(load: Tensor, mesh: ParallelMesh) -> Tensor:
    """Add this rank's counts of choices up over all ranks that have other tokens of the microbatch.

    Shapes: load ``(..., E)`` integers; output the same.
    Communication: an all-reduce over tp under sequence parallelism, and one over cp.
    """
    axes = (mesh.tp, mesh.cp) if mesh.sequence_parallel else (mesh.cp,)
    if all(axis.size == 1 for axis in axes):
        return load
    total = load.clone()
    for axis in axes:
        all_reduce_(total, axis)
    return total


def add_over_tokens_(x: Tensor, mesh: ParallelMesh) -> Tensor:
    """Add ``x`` up over all ranks that have other tokens, in place, and return it.

    Communication: an all-reduce over tp under sequence parallelism, and one over the data group.
    """
    if mesh.sequence_parallel:
        all_reduce_(x, mesh.tp)
    return all_reduce_(x, mesh.data)


@torch.no_grad()
def update_bias_(bias: Tensor, load: Tensor, rate: float) -> None:
    """Raise the biases of experts with fewer tokens than the mean, and lower those of experts with more, in place.

    Shapes: bias ``(E,)``; load ``(E,)`` integers.

    Args:
        bias: Of each expert.
        load: Choices of a whole step on all ranks that have other tokens.
        rate: What is added or taken.

    Source: Wang et al. 2024, algorithm 1.
    """
    # Integers: an expert that has exactly the mean stays where it is.
    missing = load.sum() - load.to(torch.int64) * load.numel()
    bias.add_(missing.sign(), alpha=rate)
