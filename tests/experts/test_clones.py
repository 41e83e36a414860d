"""Experts with clones equal experts without clones, to the last bit where sums are exact."""

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


def make_cases(ep: int) -> dict[str, Case]:
    """Return named cases for a number of ranks."""
    named_cases = {
        f"{transport}, {places} places, slots {has_slots}": Case(
            transport, places, has_slots=has_slots, seed=places
        )
        for transport in TRANSPORTS
        for places, has_slots in ((1, True), (2, False))
    }
    for places in (1, 3):
        named_cases[f"floats, {places} places"] = Case("one_sided", places, floats, places == 3)
    for seed, transport in enumerate(TRANSPORTS):
        named_cases[f"any plan, {transport}"] = Case(transport, 2, has_slots=seed > 0, seed=seed)
    return named_cases | {name: Case("one_sided", 2) for name in BROKEN if ep == 4}


def _compare_cases(rank: int, size: int) -> dict[str, tuple[float, int]]:
    results = {}
    for ep in (4, 2):
        mesh = ParallelMesh.create(ParallelLayout(size, ep=ep))
        for name, case in make_cases(ep).items():
            with pytest.MonkeyPatch.context() as patch:
                if name.startswith("any plan"):
                    patch.setattr(cloning_dispatcher, "place_clones", any_legal_plan)
                BROKEN.get(name, lambda patch: None)(patch)
                results[f"ep {ep}, {name}"] = distance(mesh, case)
        mesh.destroy()
    return results


def swap_weights(patch: pytest.MonkeyPatch) -> None:
    """Let clones compute with the weights of the next expert of their home rank."""
    original = CloneCollectives.fetch

    def fetch(self: CloneCollectives, weights: Any) -> Tensor:
        return original(self, [*weights[1:], weights[0]])

    patch.setattr(CloneCollectives, "fetch", fetch)


def double_gradients(patch: pytest.MonkeyPatch) -> None:
    """Add the gradients of clones twice."""
    original = CloneCollectives.give_back
    patch.setattr(CloneCollectives, "give_back", lambda self, grads: 2 * original(self, grads))


#: Cases with a deliberate error, which the comparison must find on some rank.
BROKEN = {"swapped weights": swap_weights, "gradients twice": double_gradients}


def test_clones_do_not_change_the_bits_of_exact_sums() -> None:
    ranks = run_world(_compare_cases, 4)
    assert len(ranks[0]) == len(make_cases(4)) + len(make_cases(2))
    for case_name in ranks[0]:
        largest_difference = max(results[case_name][0] for results in ranks)
        assert all(results[case_name][1] > 0 for results in ranks), f"{case_name}: nothing moves"
        if any(name in case_name for name in BROKEN):
            assert largest_difference > 0.1, f"{case_name}: not noticed"
        elif "floats" in case_name:
            assert largest_difference < 1e-12, f"{case_name}: {largest_difference}"
        else:
            assert largest_difference == 0, f"{case_name}: {largest_difference}"


def test_places_for_clones_without_other_ranks_are_refused() -> None:
    with pytest.raises(ParallelPlanError, match=r"places \(1\) must be at most 0"):
        choose_transport(8, 2, ParallelMesh.single(), clones=CloneSettings(1))


def make_gpu_mesh(monkeypatch: pytest.MonkeyPatch, reason_unavailable: str | None) -> ParallelMesh:
    """Return the mesh of two GPUs that can put tokens unless there is a reason against it."""
    monkeypatch.setattr(choosing, "reason_against_puts", lambda axis, device: reason_unavailable)
    monkeypatch.setattr(choosing, "transfer_over", lambda axis, experts_each, device: None)
    single = ParallelMesh.single()
    return replace(single, ep=MeshAxis("ep", (0, 1)), device=torch.device("cuda"))


@pytest.mark.parametrize("has_shared", [False, True])
@pytest.mark.parametrize("top_k", [1, 2])
def test_auto_chooses_puts_for_clones(
    monkeypatch: pytest.MonkeyPatch, top_k: int, has_shared: bool
) -> None:
    options = {"has_shared": has_shared, "clones": CloneSettings(1)}
    choice = choose_transport(4, top_k, make_gpu_mesh(monkeypatch, None), **options)  # type: ignore[arg-type]
    assert choice.transport == "one_sided"
    assert choice.reason.endswith("to experts and their clones: expert_clones needs it")


def test_auto_with_clones_raises_with_the_reason_against_puts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mesh = make_gpu_mesh(monkeypatch, "there is no NVLink")
    with pytest.raises(UnsupportedError, match=r"into each other's memory: there is no NVLink\."):
        choose_transport(4, 2, mesh, clones=CloneSettings(1))


@pytest.mark.parametrize(("settings", "name"), [((0,), "places"), ((1, -1), "min_rows")])
def test_illegal_settings_of_clones_are_refused(settings: tuple[int, ...], name: str) -> None:
    with pytest.raises(ParallelPlanError, match=f"{name} must"):
        CloneSettings(*settings)
