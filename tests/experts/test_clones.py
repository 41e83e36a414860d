"""Experts with clones equal those without, to the last bit where sums are exact."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron.errors import ParallelPlanError, UnsupportedError
from lightning_megatron.experts.compute.grouped_mlp import GroupedMLP
from lightning_megatron.experts.transport import choose_transport as choosing
from lightning_megatron.experts.transport import cloning_dispatcher
from lightning_megatron.experts.transport.choose_transport import choose_transport
from lightning_megatron.experts.transport.clone_transfer import CloneCollectives
from lightning_megatron.experts.transport.cloning import PlacedClones
from lightning_megatron.groups.axis import MeshAxis
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.gradient_slot import GradientSlot, set_slot
from lightning_megatron.plan.cloning import CloneSettings, ExpertPlaces
from lightning_megatron.plan.experts import ExpertsConfig
from lightning_megatron.plan.layout import ParallelLayout
from tests.world import run_world

SIZE, INNER, NUM_EXPERTS, TOP_K, TOKENS = 5, 6, 8, 3, 24
TRANSPORTS = ("one_sided", "all_gather", "all_to_all")


def integers(seed: int, *shape: int, low: int = -1, high: int = 1) -> Tensor:
    """Draw whole numbers, all sums and products of which float64 holds."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(low, high + 1, shape, generator=draw).double()


def floats(seed: int, *shape: int, low: int = -1, high: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).double()


def popular_first(seed: int, tokens: int) -> Tensor:
    """Draw selections, most of which are of the first rank's experts; some are of none."""
    draw = torch.Generator().manual_seed(seed)
    scores = torch.rand(tokens, NUM_EXPERTS, generator=draw) + torch.linspace(1, 0, NUM_EXPERTS)
    experts = scores.topk(TOP_K).indices
    return experts.masked_fill(torch.rand(experts.shape, generator=draw) < 0.1, -1)


@dataclass(frozen=True)
class Case:
    """What runs on all ranks: transport, places (0: without clones), draw of numbers, and the way
    of gradients.
    """

    transport: str
    places: int
    draw: Callable[..., Tensor] = integers
    has_slots: bool = False
    seed: int = 0


@dataclass(frozen=True)
class Watched(CloneCollectives):
    """Transfers that notice gradients which count as complete too early."""

    reported: list[str]

    def give_back(self, gradients: Tensor) -> Tensor:
        returned = super().give_back(gradients)
        matrix = "down" if gradients.shape[1] == SIZE else "up"
        assert not any(matrix in name for name in self.reported), "clones' gradients come first"
        return returned


def run(mesh: ParallelMesh, case: Case) -> dict[str, Tensor]:
    """Return outputs and gradients of two microbatches on this rank."""
    config = ExpertsConfig(num_experts=NUM_EXPERTS, top_k=TOP_K, ffn_hidden_size=INNER)
    experts = GroupedMLP(SIZE, config, mesh, activation="relu").double()
    reported: list[str] = []
    slots = {}
    for name, weight in experts.named_parameters():
        number, matrix = name.split(".")[:2]
        seed = 2 * int(number) + (matrix == "down")
        weight.data = case.draw(1000 * case.seed + seed, *weight.shape)
        if case.has_slots:
            tell = lambda name=name: reported.append(name)  # noqa: E731
            slots[name] = GradientSlot(torch.full_like(weight, torch.nan), tell, scale=2.0)
            set_slot(weight, slots[name])
    clones = CloneSettings(case.places) if case.places else None
    way: Any = case.transport
    dispatcher = choose_transport(NUM_EXPERTS, TOP_K, mesh, way, clones=clones).dispatcher
    # Without equal counts ranks may have any number of tokens.
    tokens = TOKENS if dispatcher.needs_equal_counts else TOKENS - 5 * mesh.ep.rank
    found: dict[str, Tensor] = {}
    for microbatch in range(2):
        seed = 100 * case.seed + 10 * microbatch + mesh.ep.rank
        hidden = case.draw(seed + 1, tokens, SIZE).requires_grad_()
        scales = case.draw(seed + 2, tokens, TOP_K, low=1, high=3).requires_grad_()
        prepared = dispatcher.prepare(hidden, scales, popular_first(seed, tokens))
        arrived = dispatcher.receive(dispatcher.send(prepared))
        source = None
        if arrived.clones is not None:
            source = Watched(mesh.ep, arrived.clones, reported)
            found[f"{microbatch} moved"] = arrived.clones.amounts.sum()
        rows = experts(arrived.rows, arrived.probabilities, arrived.ends, source)
        output = dispatcher.combine(dispatcher.send_back(rows, arrived))
        reported.clear()
        output.backward(case.draw(seed + 3, tokens, SIZE))
        assert sorted(reported) == sorted(slots), "each gradient is complete once"
        assert hidden.grad is not None
        assert scales.grad is not None
        found |= {f"{microbatch} output": output.detach(), f"{microbatch} hidden": hidden.grad}
        found[f"{microbatch} probabilities"] = scales.grad
    for name, weight in experts.named_parameters():
        gradient = slots[name].gradient if case.has_slots else weight.grad
        assert gradient is not None
        found[name] = gradient
    return found


def distance(mesh: ParallelMesh, case: Case) -> tuple[float, int]:
    """Return how far a case is from the same without clones, and how many selections move."""
    found = run(mesh, case)
    moved = sum(int(found.pop(f"{microbatch} moved")) for microbatch in range(2))
    wanted = run(mesh, replace(case, places=0))
    assert found.keys() == wanted.keys()
    apart = max(
        float((one - wanted[name]).abs().max() / wanted[name].abs().max().clamp(min=1))
        for name, one in found.items()
    )
    return apart, moved


def any_legal_plan(counts: Tensor, places: int, min_rows: int) -> PlacedClones:
    """Draw clones of any other ranks' experts, and the selections that go to them."""
    layout = ExpertPlaces(*counts.shape, places)
    draw = torch.Generator().manual_seed(int(counts.sum()))
    here = torch.arange(layout.num_places) // places
    owners = torch.randint(-1, NUM_EXPERTS, (layout.num_places,), generator=draw)
    owners[owners // layout.homes == here] = -1
    left = counts.clone().long()
    off = torch.zeros(layout.num_ranks, layout.num_places, dtype=torch.int64)
    for place, owner in enumerate(owners.tolist()):
        if owner >= 0:
            share = torch.rand(layout.num_ranks, generator=draw, dtype=torch.float64)
            off[:, place] = (left[:, owner] * share).round().long()
            left[:, owner] -= off[:, place]
    rows = torch.zeros(layout.num_ranks, dtype=torch.int64)
    return PlacedClones(layout, owners, off.sum(0), off, rows)


def cases(ep: int) -> dict[str, Case]:
    """Name the cases of a number of ranks."""
    found = {
        f"{transport}, {places} places, slots {has_slots}": Case(
            transport, places, has_slots=has_slots, seed=places
        )
        for transport in TRANSPORTS
        for places, has_slots in ((1, True), (2, False))
    }
    for places in (1, 3):
        found[f"floats, {places} places"] = Case("one_sided", places, floats, places == 3)
    for seed, transport in enumerate(TRANSPORTS):
        found[f"any plan, {transport}"] = Case(transport, 2, has_slots=seed > 0, seed=seed)
    return found | {name: Case("one_sided", 2) for name in BROKEN if ep == 4}


def _distances(rank: int, size: int) -> dict[str, tuple[float, int]]:
    found = {}
    for ep in (4, 2):
        mesh = ParallelMesh.create(ParallelLayout(size, ep=ep))
        for name, case in cases(ep).items():
            with pytest.MonkeyPatch.context() as patch:
                if name.startswith("any plan"):
                    patch.setattr(cloning_dispatcher, "place_clones", any_legal_plan)
                BROKEN.get(name, lambda patch: None)(patch)
                found[f"ep {ep}, {name}"] = distance(mesh, case)
        mesh.destroy()
    return found


def swapped(patch: pytest.MonkeyPatch) -> None:
    """Let clones compute with the weights of the next expert of their home rank."""
    right = CloneCollectives.fetch

    def fetch(self: CloneCollectives, weights: Any) -> Tensor:
        return right(self, [*weights[1:], weights[0]])

    patch.setattr(CloneCollectives, "fetch", fetch)


def twice(patch: pytest.MonkeyPatch) -> None:
    """Add the gradients of clones twice."""
    right = CloneCollectives.give_back
    patch.setattr(CloneCollectives, "give_back", lambda self, grads: 2 * right(self, grads))


#: What is wrong on purpose, so that the comparison must notice it on some rank.
BROKEN = {"swapped weights": swapped, "gradients twice": twice}


def test_clones_change_no_bit_of_exact_sums() -> None:
    ranks = run_world(_distances, 4)
    assert len(ranks[0]) == len(cases(4)) + len(cases(2))
    for what in ranks[0]:
        apart = max(found[what][0] for found in ranks)
        assert all(found[what][1] > 0 for found in ranks), f"{what}: nothing moves"
        if any(name in what for name in BROKEN):
            assert apart > 0.1, f"{what}: not noticed"
        elif "floats" in what:
            assert apart < 1e-12, f"{what}: {apart}"
        else:
            assert apart == 0, f"{what}: {apart}"


def test_places_need_other_ranks() -> None:
    with pytest.raises(ParallelPlanError, match=r"places \(1\) must be at most 0"):
        choose_transport(8, 2, ParallelMesh.single(), clones=CloneSettings(1))


def on_gpus(monkeypatch: pytest.MonkeyPatch, why_not: str | None) -> ParallelMesh:
    """Return the mesh of two GPUs that cannot put tokens for a reason, or that can."""
    monkeypatch.setattr(choosing, "why_no_puts", lambda axis, device: why_not)
    monkeypatch.setattr(choosing, "transfer_over", lambda axis, each, device: None)
    single = ParallelMesh.single()
    return replace(single, ep=MeshAxis("ep", (0, 1)), device=torch.device("cuda"))


@pytest.mark.parametrize("has_shared", [False, True])
@pytest.mark.parametrize("top_k", [1, 2])
def test_auto_takes_puts_beside_clones(
    monkeypatch: pytest.MonkeyPatch, top_k: int, has_shared: bool
) -> None:
    options = {"has_shared": has_shared, "clones": CloneSettings(1)}
    choice = choose_transport(4, top_k, on_gpus(monkeypatch, None), **options)  # type: ignore[arg-type]
    assert choice.transport == "one_sided"
    assert choice.reason.endswith("to experts and their clones: expert_clones needs it")


def test_gpus_that_cannot_put_are_named_where_auto_would_take_puts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mesh = on_gpus(monkeypatch, "there is no NVLink")
    with pytest.raises(UnsupportedError, match=r"into each other's memory: there is no NVLink\."):
        choose_transport(4, 2, mesh, clones=CloneSettings(1))


@pytest.mark.parametrize(("settings", "name"), [((0,), "places"), ((1, -1), "min_rows")])
def test_settings_of_clones_are_checked(settings: tuple[int, ...], name: str) -> None:
    with pytest.raises(ParallelPlanError, match=f"{name} must"):
        CloneSettings(*settings)
