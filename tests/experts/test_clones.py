"""Experts with clones equal those without, to the last bit where sums are exact."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron.errors import ParallelPlanError, UnsupportedError
from lightning_megatron.experts.transport import choose_transport as choosing
from lightning_megatron.experts.transport import cloning_dispatcher
from lightning_megatron.experts.transport.choose_transport import choose_transport
from lightning_megatron.experts.transport.clone_transfer import CloneCollectives
from lightning_megatron.groups.axis import MeshAxis
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.plan.cloning import CloneSettings
from lightning_megatron.plan.layout import ParallelLayout
from tests.experts.cloned_layer import Case, any_legal_plan, distance, floats
from tests.world import run_world

TRANSPORTS = ("one_sided", "all_gather", "all_to_all")


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


def on_gpus(monkeypatch: pytest.MonkeyPatch, reason_unavailable: str | None) -> ParallelMesh:
    """Return the mesh of two GPUs that cannot put tokens for a reason, or that can."""
    monkeypatch.setattr(choosing, "reason_against_puts", lambda axis, device: reason_unavailable)
    monkeypatch.setattr(choosing, "transfer_over", lambda axis, each, device: None)
    single = ParallelMesh.single()
    return replace(single, ep=MeshAxis("ep", (0, 1)), device=torch.device("cuda"))


@pytest.mark.parametrize("has_shared", [False, True])
@pytest.mark.parametrize("top_k", [1, 2])
def test_auto_means_puts_with_clones(
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
