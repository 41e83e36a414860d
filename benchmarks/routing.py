"""Routing in benchmarks: in turn, by the router, or by popularity.

The name of a routing is ``balanced`` (experts in turn), ``natural`` (the untrained router) or
``zipf:EXPONENT:ORDER``, where the popularity of experts falls as ``(1 + place) ** -EXPONENT``. The
places follow the order of experts (``ordered``), so that the busiest experts share a rank, or a
random order for each layer (``random``). Tokens draw their experts by popularity without
replacement; all steps and runs use the same draws.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.experts.routing.balance import tokens_per_expert
from lightning_megatron.experts.routing.router import Router, Routing
from lightning_megatron.models.gpt import GPT


@dataclass(frozen=True)
class Popularity:
    """Popularity of experts, which falls as a power of their place.

    Args:
        exponent: Exponent s of the popularity 1 / place**s; 0 makes all experts equally popular.
        is_ordered: Whether places follow the order of experts in all layers.
    """

    exponent: float
    is_ordered: bool

    def shares(self, num_experts: int, layer: int) -> Tensor:
        """Return the popularity of every expert of a layer, in float64; the sum is 1."""
        places = torch.arange(num_experts, dtype=torch.float64)
        if not self.is_ordered:
            generator = torch.Generator().manual_seed(layer)
            places = places[torch.randperm(num_experts, generator=generator)]
        weights = (1.0 + places) ** -self.exponent
        return weights / weights.sum()

    def choices(
        self, num_tokens: int, top_k: int, num_experts: int, layer: int, rank: int, device: Any
    ) -> Tensor:
        """Draw the experts of a rank's tokens, best first, on a device.

        Shapes: ``(tokens, top_k)``, int64.
        """
        generator = torch.Generator(device).manual_seed(1_000_003 * layer + rank)
        noise = torch.empty(num_tokens, num_experts, dtype=torch.float64, device=device)
        # The largest values of log popularity plus Gumbel noise are a sample without replacement.
        noise.exponential_(generator=generator).log_().neg_()
        noise += self.shares(num_experts, layer).log().to(device)
        return noise.topk(top_k).indices


def popularity_of(name: str) -> Popularity | None:
    """Return the popularity that a routing's name describes; None if it draws no experts.

    Raises:
        ValueError: If the name is not that of a routing.
    """
    if name in ("balanced", "natural"):
        return None
    parts = name.split(":")
    if len(parts) != 3 or parts[0] != "zipf" or parts[2] not in ("random", "ordered"):
        raise ValueError(
            "routing must be balanced, natural, zipf:EXPONENT:random or zipf:EXPONENT:ordered: it "
            f"is {name!r}. For example, use zipf:1.0:random."
        )
    return Popularity(float(parts[1]), parts[2] == "ordered")


def set_routing(model: GPT, name: str, num_tokens: int, rank: int) -> None:
    """Set the routing of all tokens of a model.

    Experts in turn, or drawn ones, replace the experts that routers select; the probabilities of
    the routers stay the same.
    """
    popularity = popularity_of(name)
    if name == "natural":
        return
    for number, layer in model.mixtures.items():
        sizes = num_tokens, layer.config.top_k, layer.config.num_experts
        device = layer.mesh.device
        if popularity is None:
            choices = in_turn(*sizes, device)
        else:
            choices = popularity.choices(*sizes, number, rank, device)
        # Replace forward instead of adding a hook, because parts with hooks are not captured.
        layer.router.forward = MethodType(_Drawn(choices), layer.router)  # type: ignore[method-assign]


def in_turn(num_tokens: int, top_k: int, num_experts: int, device: Any) -> Tensor:
    """Return the experts of tokens that take them in turn.

    Shapes: ``(tokens, top_k)``, int64.
    """
    numbers = torch.arange(num_tokens * top_k, device=device)
    return (numbers % num_experts).view(num_tokens, top_k)


@dataclass(frozen=True, eq=False)
class _Drawn:
    """Forward pass of a router with chosen experts."""

    choices: Tensor

    def __call__(self, router: Router, hidden: Tensor) -> Routing:
        routing = Router.forward(router, hidden)
        num_tokens = hidden.shape[0] * hidden.shape[1]
        assert num_tokens <= len(self.choices), f"experts are chosen for {len(self.choices)} tokens"
        experts = self.choices[:num_tokens]
        load = tokens_per_expert(experts, router.config.num_experts)
        return replace(routing, experts=experts, load=load)
