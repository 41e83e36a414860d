"""Comparison of experts with clones with the same experts without clones, on exact sums."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.experts.compute.grouped_mlp import GroupedMLP
from lightning_megatron.experts.transport.choose_transport import choose_transport
from lightning_megatron.experts.transport.cloning import PlacedClones
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.parameters.gradient_slot import GradientSlot, set_slot
from lightning_megatron.layers.recompute import recomputed
from lightning_megatron.plan.expert_clones import ExpertClones, ExpertPlaces
from lightning_megatron.plan.experts import ExpertsConfig
from lightning_megatron.plan.model_shape import Activation

NUM_EXPERTS, TOP_K, TOKENS = 8, 3, 24


def integers(seed: int, *shape: int, low: int = -1, high: int = 1) -> Tensor:
    """Draw small whole numbers, whose sums and products are exact in float64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high + 1, shape, generator=generator).double()


def floats(seed: int, *shape: int, low: int = -1, high: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).double()


def popular_first(seed: int, tokens: int) -> Tensor:
    """Draw selections, most of them of experts of the first rank, and some of no expert."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(tokens, NUM_EXPERTS, generator=generator) + torch.linspace(
        1, 0, NUM_EXPERTS
    )
    experts = scores.topk(TOP_K).indices
    return experts.masked_fill(torch.rand(experts.shape, generator=generator) < 0.1, -1)


@dataclass(frozen=True)
class Case:
    """Layer and data of all ranks: transport, places for clones (0: no clones), draw of numbers, use
    of gradient slots, size of a token, inner features, and type of tokens and weights.
    """

    transport: str
    places: int
    draw: Callable[..., Tensor] = integers
    has_slots: bool = False
    seed: int = 0
    size: int = 5
    inner: int = 6
    dtype: torch.dtype = torch.float64
    activation: Activation = "relu"
    recomputes: bool = False

    @property
    def slot_dtype(self) -> torch.dtype:
        """Return the type of gradient sums: at least float32."""
        return torch.promote_types(self.dtype, torch.float32)


def run(mesh: ParallelMesh, case: Case) -> dict[str, Tensor]:
    """Return outputs and gradients of two microbatches on this rank."""
    layer = ClonedLayer(mesh, case)
    results: dict[str, Tensor] = {}
    for microbatch in range(2):
        for name, value in layer.train(*layer.drawn(microbatch)).items():
            results[f"{microbatch} {name}"] = value
    return results | layer.gradients()


class ClonedLayer:
    """Experts with or without clones, between the transfers of a dispatcher."""

    def __init__(self, mesh: ParallelMesh, case: Case) -> None:
        self.mesh = mesh
        self.case = case
        config = ExpertsConfig(num_experts=NUM_EXPERTS, top_k=TOP_K, ffn_hidden_size=case.inner)
        self.experts = GroupedMLP(case.size, config, mesh, activation=case.activation)
        self.experts.to(mesh.device, case.dtype)
        self.reported: list[str] = []
        self.slots: dict[str, GradientSlot] = {}
        weights = dict(self.experts.named_parameters())
        # Weights lie as in the flat buffers of training: adjacent, in reverse order.
        sums = torch.empty(
            sum(parameter.numel() for parameter in weights.values()), device=mesh.device
        )
        sums = sums.to(case.slot_dtype).fill_(torch.nan)
        values = torch.empty_like(sums, dtype=case.dtype)
        start = 0
        for name, weight in reversed(weights.items()):
            part = slice(start, start + weight.numel())
            start = part.stop
            number, matrix = name.split(".")[:2]
            seed = 1000 * case.seed + 2 * int(number) + (matrix == "down")
            shape = weight.shape
            weight.data = values[part].view(shape).copy_(self.draw(seed, *shape))
            if case.has_slots:
                report = lambda name=name: self.reported.append(name)  # noqa: E731
                self.slots[name] = GradientSlot(sums[part].view(shape), report, scale=2.0)
                set_slot(weight, self.slots[name])
        clones = ExpertClones(case.places) if case.places else None
        transport: Any = case.transport
        self.choice = choose_transport(
            NUM_EXPERTS, TOP_K, mesh, transport, clones=clones, matrices=self.experts.matrices
        )

    def draw(self, seed: int, *shape: int, low: int = -1, high: int = 1) -> Tensor:
        values = self.case.draw(seed, *shape, low=low, high=high)
        return values.to(self.mesh.device, self.case.dtype)

    def drawn(self, microbatch: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Draw tokens, probabilities, selections and the gradient of the output."""
        # A dispatcher that needs no equal counts gets different numbers of tokens.
        is_equal = self.choice.dispatcher.needs_equal_counts
        tokens = TOKENS if is_equal else TOKENS - 5 * self.mesh.ep.rank
        seed = 100 * self.case.seed + 10 * microbatch + self.mesh.ep.rank
        scales = self.draw(seed + 2, tokens, TOP_K, low=1, high=3)
        if self.mesh.device.type == "cuda":
            scales = scales.float()
        return (
            self.draw(seed + 1, tokens, self.case.size).requires_grad_(),
            scales.requires_grad_(),
            popular_first(seed, tokens).to(self.mesh.device),
            self.draw(seed + 3, tokens, self.case.size),
        )

    def train(
        self, hidden: Tensor, scales: Tensor, selected: Tensor, output_gradient: Tensor
    ) -> dict[str, Tensor]:
        """Run a microbatch; return its output, and the gradients of tokens and probabilities."""
        dispatcher = self.choice.dispatcher
        results: dict[str, Tensor] = {}
        arrived = dispatcher.receive(dispatcher.send(dispatcher.prepare(hidden, scales, selected)))
        memory = None
        if arrived.clones is not None:
            assert self.choice.clones is not None
            memory = self.choice.clones.memory()
            results["moved"] = arrived.clones.amounts.sum()
        experts: Callable[..., Tensor] = self.experts
        if self.case.recomputes:
            experts = partial(recomputed, self.experts)
        rows = experts(arrived.rows, arrived.probabilities, arrived.ends, memory)
        output = dispatcher.combine(dispatcher.send_back(rows, arrived))
        self.reported.clear()
        weights = [] if self.slots else list(self.experts.parameters())
        gradients_before = [weight.grad for weight in weights]
        hidden_grad, scale_grad, *grads = torch.autograd.grad(
            output, [hidden, scales, *weights], output_gradient
        )
        for weight, gradient_before, gradient in zip(weights, gradients_before, grads, strict=True):
            weight.grad = gradient if gradient_before is None else gradient_before + gradient
        assert sorted(self.reported) == sorted(self.slots), "each gradient is complete once"
        return results | {
            "output": output.detach(),
            "hidden": hidden_grad,
            "probabilities": scale_grad,
        }

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients of all experts on this rank."""
        if self.slots:
            return {name: slot.gradient for name, slot in self.slots.items()}
        return {
            name: weight.grad
            for name, weight in self.experts.named_parameters()
            if weight.grad is not None
        }


def distance(mesh: ParallelMesh, case: Case, plain: str | None = None) -> tuple[float, int]:
    """Return the largest difference of a case to the same case without clones, and the number of
    selections that move to clones.


    Args:
        mesh: The groups of this rank.
        case: Case with places for clones.
        plain: Transport of the case without clones; None means the transport of the case.
    """
    actual = run(mesh, case)
    moved = sum(int(actual.pop(f"{microbatch} moved")) for microbatch in range(2))
    # Sums are exact or compared in float64, so any transport may serve as a reference.
    expected = run(mesh, replace(case, places=0, transport=plain or case.transport))
    assert actual.keys() == expected.keys()
    largest_difference = max(
        float((value - expected[name]).abs().max() / expected[name].abs().max().clamp(min=1))
        for name, value in actual.items()
    )
    return largest_difference, moved


def any_legal_plan(counts: Tensor, places: int, min_rows: int) -> PlacedClones:
    """Draw clones of experts of other ranks, and the selections that go to the clones."""
    layout = ExpertPlaces(*counts.shape, places)
    generator = torch.Generator().manual_seed(int(counts.sum()))
    rank_of_place = torch.arange(layout.num_places) // places
    owners = torch.randint(-1, NUM_EXPERTS, (layout.num_places,), generator=generator)
    owners[owners // layout.homes == rank_of_place] = -1
    remaining = counts.clone().long()
    moved = torch.zeros(layout.num_ranks, layout.num_places, dtype=torch.int64)
    for place, owner in enumerate(owners.tolist()):
        if owner >= 0:
            fraction = torch.rand(layout.num_ranks, generator=generator, dtype=torch.float64)
            moved[:, place] = (remaining[:, owner] * fraction).round().long()
            remaining[:, owner] -= moved[:, place]
    rows = torch.zeros(layout.num_ranks, dtype=torch.int64)
    return PlacedClones(layout, owners, moved.sum(0), moved, rows)
