"""Router scores: selected experts, their probabilities and the sums of the balancing losses."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from lightning_megatron.experts.routing.balance import tokens_per_expert_of_sequences
from lightning_megatron.experts.routing.selection import select_experts
from lightning_megatron.plan.experts import ExpertsConfig
from lightning_megatron.shapes import Float, Int

#: Added to sums of scores, so that a token whose scores are all zero causes no division by zero.
_EPS = 1e-20


@dataclass(frozen=True)
class RouterOutput:
    """Router outputs for the logits of tokens. Experts are int64, counts int32.

    Sums are taken over the tokens of each sequence, or over all tokens.

    Args:
        experts: Selected experts, best first.
        unbiased_load: Number of selections of each expert by scores without biases, for the
            auxiliary loss.
        share_sums: Sums of scores that are normalized for each token.
        square_sum: Sum over tokens of the squared logsumexp of their logits.
        entropy_sum: Sum of the entropies of tokens' scores, without a gradient (nats).
    """

    probabilities: Float[Tensor, "tokens top_k"]
    experts: Int[Tensor, "tokens top_k"]
    load: Int[Tensor, "sequences experts"]
    unbiased_load: Int[Tensor, "sequences experts"]
    share_sums: Float[Tensor, "sequences experts"]
    square_sum: Float[Tensor, ""]
    entropy_sum: Float[Tensor, ""]


def score_tokens(
    logits: Float[Tensor, "tokens experts"],
    bias: Float[Tensor, "experts"] | None,
    config: ExpertsConfig,
    num_sequences: int = 1,
    kernels: ModuleType | None = None,
) -> RouterOutput:
    """Score all experts for each token, and select the best.

    Args:
        logits: Logits of the router, in float32 or wider.
        bias: Values added to the scores for the selection only; None means zeros.
        num_sequences: Number of sequences with separate sums, C; token t belongs to ``t % C``.
        kernels: Fused kernels; None if they do not support the router's input.
    """
    # The auxiliary loss counts the selections by scores without biases.
    counts_unbiased = bias is not None and config.aux_loss > 0.0
    if kernels is not None and logits.dtype == torch.float32:
        settings = kernels.RouteSettings(
            num_experts=config.num_experts,
            top_k=config.top_k,
            num_groups=config.num_groups,
            top_k_groups=config.top_k_groups,
            best_of_group=config.best_of_group,
            is_softmax=config.scoring == "softmax",
            is_normalized=config.normalize_top_k,
            scale=config.score_scale,
            num_sequences=num_sequences,
            counts_unbiased=counts_unbiased,
        )
        if settings.is_served():
            return RouterOutput(*kernels.route_tokens(logits, bias, settings))
    scores = _scores(logits, config)
    selected = select_experts(scores, bias, config)
    unbiased = select_experts(scores, None, config) if counts_unbiased else selected
    return weigh_selected(logits, selected, unbiased, config, num_sequences)


def weigh_selected(
    logits: Float[Tensor, "tokens experts"],
    selected: Int[Tensor, "tokens top_k"],
    unbiased: Int[Tensor, "tokens top_k"],
    config: ExpertsConfig,
    num_sequences: int = 1,
) -> RouterOutput:
    """Return the probabilities of selected experts, and the sums of the router losses.

    ``unbiased`` are the experts that each token would choose by scores without biases.
    """
    scores = _scores(logits, config)
    shares = (
        scores if config.scoring == "softmax" else scores / (scores.sum(-1, keepdim=True) + _EPS)
    )
    load, unbiased_load = (
        tokens_per_expert_of_sequences(
            experts.unflatten(0, (-1, num_sequences)), config.num_experts
        )
        for experts in (selected, unbiased)
    )
    return RouterOutput(
        probabilities=_weights(logits, scores, selected, config),
        experts=selected,
        load=load,
        unbiased_load=unbiased_load,
        share_sums=shares.unflatten(0, (-1, num_sequences)).sum(0),
        square_sum=torch.logsumexp(logits, -1).square().sum(),
        entropy_sum=torch.special.entr(shares.detach()).sum(),
    )


def _scores(logits: Tensor, config: ExpertsConfig) -> Tensor:
    return logits.softmax(-1) if config.scoring == "softmax" else logits.sigmoid()


def _weights(logits: Tensor, scores: Tensor, selected: Tensor, config: ExpertsConfig) -> Tensor:
    """Return the factors of the selected experts' outputs."""
    if not config.normalize_top_k:
        weights = scores.gather(-1, selected)
    elif config.scoring == "softmax":
        # Equal to a division by the sum of the selected scores, but safe if that sum underflows to
        # zero.
        weights = logits.gather(-1, selected).softmax(-1)
    else:
        weights = scores.gather(-1, selected)
        weights = weights / (weights.sum(-1, keepdim=True) + _EPS)
    return weights * config.score_scale
