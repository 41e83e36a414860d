"""Reference mixture of experts, which computes one token and one expert at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_megatron.groups.random import derive_seed


def _swiglu(inner: Tensor) -> Tensor:
    half = inner.shape[0] // 2
    return inner[:half] * torch.sigmoid(inner[:half]) * inner[half:]


def _clamped_swiglu(inner: Tensor) -> Tensor:
    half = inner.shape[0] // 2
    gate, up = inner[:half].clamp(max=7), inner[half:].clamp(-7, 7)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": _swiglu,
    "clamped_swiglu": _clamped_swiglu,
    "gelu": F.gelu,
    "relu": F.relu,
}


@dataclass(frozen=True)
class Routed:
    """Tokens, their chosen experts with probabilities, and the gradient of the output."""

    hidden: Tensor
    probabilities: Tensor
    experts: Tensor
    outer: Tensor


def draw(*names: object, shape: tuple[int, ...]) -> Tensor:
    """Draw the same values for the same names in every process."""
    generator = torch.Generator().manual_seed(derive_seed(*map(str, names)))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def route(case: str, num_tokens: int, size: int, num_experts: int, *names: object) -> Routed:
    """Draw tokens, and random or extreme choices of experts."""
    top_k = {"all to one": 1, "one expert": 1, "every expert": num_experts}.get(
        case, min(3, num_experts)
    )
    scores = draw("scores", case, *names, shape=(num_tokens, num_experts))
    if case == "all to one":
        scores[:, 1] += 100.0
    if case == "some without tokens":
        scores[:, [0, -1]] -= 100.0
    experts = scores.topk(top_k).indices
    if case == "dropped":
        experts[::2, 0] = -1
    probabilities = draw("probabilities", case, *names, shape=(num_tokens, top_k)).abs()
    hidden, outer = (
        draw(name, case, *names, shape=(num_tokens, size)) for name in ("hidden", "outer")
    )
    return Routed(hidden.requires_grad_(), probabilities.requires_grad_(), experts, outer)


CASES = ("random", "all to one", "every expert", "some without tokens", "dropped")


def dense(
    routed: Routed,
    weights: list[tuple[Tensor, Tensor]],
    activation: str,
    biases: list[tuple[Tensor, Tensor]] | None = None,
) -> Tensor:
    """Return the output of the mixture.

    Args:
        routed: Tokens and choices.
        weights: First and second matrix of every expert.
        activation: Activation between the two matrices.
        biases: First and second bias of every expert, or None.
    """
    outputs = []
    for token, chosen_experts, scales in zip(
        routed.hidden, routed.experts.tolist(), routed.probabilities, strict=True
    ):
        total = torch.zeros_like(token)
        for expert, scale in zip(chosen_experts, scales, strict=True):
            if expert >= 0:
                first, second = weights[expert]
                first_bias, second_bias = (0.0, 0.0) if biases is None else biases[expert]
                inner = ACTIVATIONS[activation](first @ token + first_bias)
                total = total + scale * (second @ inner + second_bias)
        outputs.append(total)
    return torch.stack(outputs) if outputs else routed.hidden * 1.0
