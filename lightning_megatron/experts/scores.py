"""What a router makes of its logits: scores, choices, their weights, and the sums that balance is measured by."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from lightning_megatron.experts.balance import num_choices_of_sequences
from lightning_megatron.experts.choice import balanced_experts, choose_experts
from lightning_megatron.plan.experts import ExpertsConfig

#: Keeps scores that are all zero from being divided by zero.
_TINY = 1e-20


@dataclass(frozen=True)
class Scored:
    """Hold what a router made of the logits of T tokens.

    Sums are over the tokens of each of C sequences, or of all (C is 1).

    Args:
        probabilities: Weights of the chosen experts. Shape ``(T, k)``.
        experts: The chosen experts, best first. Shape ``(T, k)``, int64.
        load: How often each expert is chosen. Shape ``(C, E)``, int32.
        unbiased_load: How often each would be if none had a bias, for the auxiliary loss. Shape ``(C, E)``, int32.
        share_sums: Sums of scores, each divided by the sum of its token's. Shape ``(C, E)``.
        square_sum: Sum of the squared logarithms of sums of exponentials. A number.
        entropy_sum: Sum of the entropies of tokens' scores, without a gradient (nats). A number.
    """

    probabilities: Tensor
    experts: Tensor
    load: Tensor
    unbiased_load: Tensor
    share_sums: Tensor
    square_sum: Tensor
    entropy_sum: Tensor


def score_tokens(
    logits: Tensor,
    bias: Tensor | None,
    config: ExpertsConfig,
    num_sequences: int = 1,
    first_turn: int | None = None,
    kernels: ModuleType | None = None,
) -> Scored:
    """Score all experts for every token, choose the best, and weigh them.

    Shapes: logits ``(T, E)``; bias ``(E,)``.

    Args:
        logits: Of the router, in float32 or wider.
        bias: What is added to scores where experts are chosen; None stands for nothing.
        config: How experts are scored and chosen.
        num_sequences: Sequences whose sums are kept apart, C: token t is of sequence ``t % C``.
        first_turn: If experts are dealt out in turn, whatever the scores are: the turn of the first choice.
        kernels: The fused kernels, if they serve the router's input.
    """
    # The auxiliary loss looks at what would be chosen without biases.
    counts_unbiased = bias is not None and first_turn is None and config.aux_loss > 0.0
    if kernels is not None and logits.dtype == torch.float32:
        settings = kernels.RouteSettings(
            num_experts=config.num_experts, top_k=config.top_k, num_groups=config.num_groups,
            top_k_groups=config.top_k_groups, is_softmax=config.scoring == "softmax",
            is_normalized=config.normalize_top_k, scale=config.score_scale, num_sequences=num_sequences,
            first_turn=first_turn, counts_unbiased=counts_unbiased,
        )  # fmt: skip
        if settings.is_served():
            return Scored(*kernels.route_tokens(logits, bias, settings))
    scores = _scores(logits, config)
    if first_turn is None:
        chosen = choose_experts(scores, bias, config)
    else:
        chosen = balanced_experts(scores.shape[0], first_turn, config, scores.device)
    unbiased = choose_experts(scores, None, config) if counts_unbiased else chosen
    return weigh_choices(logits, chosen, unbiased, config, num_sequences)


def weigh_choices(
    logits: Tensor, chosen: Tensor, unbiased: Tensor, config: ExpertsConfig, num_sequences: int = 1
) -> Scored:
    """Weigh chosen experts, and add up what balances them.

    Shapes: logits ``(T, E)``; choices ``(T, k)``.

    Args:
        logits: Of the router, in float32 or wider.
        chosen: The experts of every token.
        unbiased: Those without biases.
        config: How experts are scored.
        num_sequences: Sequences whose sums are kept apart.
    """
    scores = _scores(logits, config)
    shares = scores if config.scoring == "softmax" else scores / (scores.sum(-1, keepdim=True) + _TINY)
    load, unbiased_load = (
        num_choices_of_sequences(experts.unflatten(0, (-1, num_sequences)), config.num_experts)
        for experts in (chosen, unbiased)
    )
    return Scored(
        probabilities=_weights(logits, scores, chosen, config),
        experts=chosen,
        load=load,
        unbiased_load=unbiased_load,
        share_sums=shares.unflatten(0, (-1, num_sequences)).sum(0),
        square_sum=torch.logsumexp(logits, -1).square().sum(),
        entropy_sum=torch.special.entr(shares.detach()).sum(),
    )


def _scores(logits: Tensor, config: ExpertsConfig) -> Tensor:
    return logits.softmax(-1) if config.scoring == "softmax" else logits.sigmoid()


def _weights(logits: Tensor, scores: Tensor, chosen: Tensor, config: ExpertsConfig) -> Tensor:
    """Return what the outputs of chosen experts are multiplied by."""
    if not config.normalize_top_k:
        weights = scores.gather(-1, chosen)
    elif config.scoring == "softmax":
        # Equal to dividing by the sum, which biases or groups could make zero.
        weights = logits.gather(-1, chosen).softmax(-1)
    else:
        weights = scores.gather(-1, chosen)
        weights = weights / (weights.sum(-1, keepdim=True) + _TINY)
    return weights * config.score_scale
