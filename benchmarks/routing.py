"""Routing in benchmarks: by the router, or by one of eight workloads.

The name of a routing is ``natural`` (the untrained router) or that of a workload. A workload gives
every token its experts from its name, the seed, the step and the number of the token among those of
all ranks alone, and so the same ones in every layout. Tokens of a group take the experts of a pool
in turn, so that the number of rows of each expert is exact. Hot experts are a quarter of all, but
at least as many as a token has; ``W2:8`` has eight hot experts.

* ``W0``, or ``balanced``: all tokens take all experts in turn.
* ``W1``: three of four tokens take hot experts that the seed draws, the others all experts.
* ``W2``: the same with the first experts as hot ones, which the first ranks have.
* ``W3``: the same with hot experts at equal distances, so that all ranks have equally many.
* ``W4``: tokens take all experts in turn, but of each following eighth of the tokens one in eight
  more takes none, so that ranks send different numbers of rows.
* ``W5``: all tokens take experts of the second half, so that experts, and ranks, have no token.
* ``W6``: as W2, but every three steps the next experts are the hot ones.
* ``W7``: as W0, but in every fourth step half of the tokens take hot experts as in W2.

Each layer has its own seed: its number. The workloads are those of Megatron-LM's pull request 7488,
whose tokens draw experts of the pools at random.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.experts.layer import MixtureOfExperts
from lightning_megatron.experts.routing.balance import tokens_per_expert
from lightning_megatron.experts.routing.router import Router, Routing
from lightning_megatron.models.gpt import GPT

#: Names of the workloads, and what each of them isolates.
WORKLOADS = {
    "W0": "balanced",
    "W1": "hot expert set",
    "W2": "hot rank",
    "W3": "the same heat spread",
    "W4": "ragged sources",
    "W5": "experts and ranks without tokens",
    "W6": "rotating hot spot",
    "W7": "burst",
}
#: Steps between two moves of the hot experts of W6, and from one burst of W7 to the next (steps).
_MOVE, _BURST = 3, 4
#: Groups of tokens that send different numbers of rows in W4.
_SOURCES = 8


@dataclass(frozen=True)
class Workload:
    """Experts of all tokens in every step.

    Args:
        name: One of :data:`WORKLOADS`.
        num_hot: Number of hot experts; None means a quarter of all, but at least those of a token.
    """

    name: str
    num_hot: int | None = None

    def phase(self, step: int) -> int:
        """Return a number that changes whenever the experts of tokens change."""
        if self.name == "W6":
            return step // _MOVE
        return int(self.name == "W7" and step % _BURST == _BURST - 1)

    def choices(
        self, num_tokens: int, top_k: int, num_experts: int, *, seed: int, step: int, device: Any
    ) -> Tensor:
        """Return the experts of the tokens of all ranks, on a device; -1 means none.

        Shapes: ``(tokens, top_k)``, int64.
        """
        tokens = torch.arange(num_tokens, device=device)
        is_idle = torch.zeros_like(tokens, dtype=torch.bool)
        is_hot = is_idle
        if self.name in ("W1", "W2", "W3", "W6"):
            is_hot = tokens % 4 != 0
        elif self.name == "W7" and self.phase(step):
            is_hot = tokens % 2 == 0
        elif self.name == "W4":
            is_idle = tokens % _SOURCES >= _SOURCES - tokens * _SOURCES // num_tokens
        first = num_experts - max(top_k, num_experts // 2) if self.name == "W5" else 0
        every = torch.arange(first, num_experts, device=device)
        hot = self.hot_experts(top_k, num_experts, seed=seed, step=step).to(device)
        chosen = _in_turn(~is_hot & ~is_idle, every, top_k)
        chosen = torch.where(is_hot.unsqueeze(1), _in_turn(is_hot, hot, top_k), chosen)
        return chosen.masked_fill(is_idle.unsqueeze(1), -1)

    def hot_experts(self, top_k: int, num_experts: int, *, seed: int, step: int) -> Tensor:
        """Return the hot experts of a step.

        Shapes: ``(hot experts,)``, int64.
        """
        num_hot = max(top_k, num_experts // 4) if self.num_hot is None else self.num_hot
        numbers = torch.arange(num_hot)
        if self.name == "W1":
            generator = torch.Generator().manual_seed(seed)
            return torch.randperm(num_experts, generator=generator)[:num_hot].sort().values
        if self.name == "W3":
            return numbers * num_experts // num_hot
        start = self.phase(step) * num_hot if self.name == "W6" else 0
        return (start + numbers) % num_experts


def _in_turn(is_member: Tensor, pool: Tensor, top_k: int) -> Tensor:
    """Return the experts of a group of tokens that take those of a pool in turn."""
    numbers = is_member.cumsum(0) - 1
    turns = numbers.unsqueeze(1) * top_k + torch.arange(top_k, device=pool.device)
    return pool[turns % len(pool)]


def workload_of(name: str) -> Workload | None:
    """Return the workload of a routing's name; None if the router chooses the experts.

    Raises:
        ValueError: If the name is not that of a routing.
    """
    if name == "natural":
        return None
    word, _, number = name.replace("balanced", "W0").partition(":")
    if word not in WORKLOADS or not (number.isdigit() or number == ""):
        raise ValueError(
            f"routing must be natural, balanced or one of {', '.join(WORKLOADS)}, perhaps with a "
            f"number of hot experts: it is {name!r}. For example, use W2:8."
        )
    return Workload(word, int(number) if number else None)


@dataclass(frozen=True)
class ForcedRouting:
    """Experts of a model's tokens on one rank, which replace those that routers select.

    The probabilities of the routers stay the same. Tensors keep their addresses, so that CUDA
    graphs can read them.

    Args:
        layers: Layers with experts by their numbers.
        choices: Experts of this rank's tokens in each of the layers.
        rank: Number of this rank among the ranks with different tokens.
        num_ranks: Number of these ranks.
    """

    layers: Mapping[int, MixtureOfExperts]
    choices: Mapping[int, Tensor]
    rank: int
    num_ranks: int

    @classmethod
    def of(cls, model: GPT, num_tokens: int, rank: int, num_ranks: int) -> ForcedRouting:
        """Force the experts of all layers of a model: first those of W0.

        Args:
            num_tokens: Number of tokens of a rank.
        """
        choices = {}
        for number, layer in model.mixtures.items():
            shape = num_tokens, layer.config.top_k
            choices[number] = torch.zeros(shape, dtype=torch.int64, device=layer.mesh.device)
            # Replace forward instead of adding a hook, because parts with hooks are not captured.
            forward = MethodType(_Forced(choices[number]), layer.router)
            layer.router.forward = forward  # type: ignore[method-assign]
        result = cls(model.mixtures, choices, rank, num_ranks)
        result.set(Workload("W0"), 0)
        return result

    def set(self, workload: Workload, step: int) -> None:
        """Set the experts of the tokens of the next microbatches."""
        for number, choices in self.choices.items():
            config = self.layers[number].config
            everywhere = workload.choices(
                len(choices) * self.num_ranks,
                config.top_k,
                config.num_experts,
                seed=number,
                step=step,
                device=choices.device,
            )
            choices.copy_(everywhere.chunk(self.num_ranks)[self.rank])


@dataclass(frozen=True, eq=False)
class _Forced:
    """Forward pass of a router with given experts."""

    choices: Tensor

    def __call__(self, router: Router, hidden: Tensor) -> Routing:
        routing = Router.forward(router, hidden)
        num_tokens = hidden.shape[0] * hidden.shape[1]
        assert num_tokens <= len(self.choices), f"experts are chosen for {len(self.choices)} tokens"
        experts = self.choices[:num_tokens]
        load = tokens_per_expert(experts, router.config.num_experts)
        return replace(routing, experts=experts, load=load)
