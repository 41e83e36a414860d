"""Every expert grid of four ranks computes what one process with all experts does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_megatron.experts.dispatch import choose_dispatcher
from lightning_megatron.experts.grouped_mlp import GroupedMLP
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import shard_spec_of
from lightning_megatron.layers.init import initialize_
from lightning_megatron.plan.experts import ExpertsConfig
from lightning_megatron.plan.layout import ParallelLayout
from tests.experts.dense import CASES, Routed, dense, route
from tests.world import run_world

NUM_EXPERTS, SIZE, INNER, NUM_TOKENS = 4, 6, 8, 5
CONFIG = ExpertsConfig(num_experts=NUM_EXPERTS, top_k=2, ffn_hidden_size=INNER)
LAYOUTS = {"ep2": {"ep": 2}, "ep4": {"ep": 4}, "ep2 etp2": {"ep": 2, "etp": 2}, "etp2": {"etp": 2}}
SIZES = (NUM_TOKENS, 0)


def experts_on(mesh: ParallelMesh) -> GroupedMLP:
    module = GroupedMLP(SIZE, CONFIG, mesh).double()
    initialize_(module, "cpu", 1)
    # As drawn they are so small that errors of outputs would be, too.
    for parameter in module.parameters():
        parameter.data.mul_(20.0)
    return module


def expected(name: str, case: str, num_tokens: int, mesh: ParallelMesh, grid: list[int]) -> dict[str, Any]:
    """Compute what this rank must find, from all tokens of its expert grid and all experts."""
    whole = experts_on(ParallelMesh.single())
    weights = list(zip(whole.weights("gate_up"), whole.weights("down"), strict=True))
    found: dict[str, Any] = {}
    for rank in grid:
        routed = route(case, num_tokens, SIZE, NUM_EXPERTS, name, rank)
        output = dense(routed, weights, "swiglu")
        (output * routed.outer).sum().backward()
        if rank == mesh.rank:
            found = results_of(output, routed)
    return found | {key: _gradient(parameter) for key, parameter in whole.named_parameters()}


def results_of(output: torch.Tensor, routed: Routed) -> dict[str, Any]:
    gradients = {"hidden": _gradient(routed.hidden), "probabilities": _gradient(routed.probabilities)}
    return {"output": output.detach(), **gradients}


def _gradient(leaf: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def errors_of(name: str, case: str, num_tokens: int, mesh: ParallelMesh) -> dict[str, float]:
    grid = next(ranks for ranks in mesh.layout.expert_groups("etp-ep") if mesh.rank in ranks)
    wanted = expected(name, case, num_tokens, mesh, grid)
    module, routed = experts_on(mesh), route(case, num_tokens, SIZE, NUM_EXPERTS, name, mesh.rank)
    dispatcher = choose_dispatcher(NUM_EXPERTS, mesh).dispatcher
    sent = dispatcher.dispatch(routed.hidden, routed.probabilities, routed.experts)
    output = dispatcher.combine(module(sent.rows, sent.probabilities, sent.ends), sent)
    (output * routed.outer).sum().backward()
    errors = {key: _distance(one, wanted[key]) for key, one in results_of(output, routed).items()}
    for key, parameter in module.named_parameters():
        errors[key] = _distance(_gradient(parameter), shard_spec_of(parameter).shard(wanted[key]))
    return errors


def _distance(one: Any, other: torch.Tensor) -> float:
    assert one.shape == other.shape
    difference = (one - other).abs()
    return float(difference.max()) if difference.numel() else 0.0


def world(rank: int, size: int) -> dict[str, dict[str, float]]:
    torch.use_deterministic_algorithms(True)  # fills memory that nobody has written with NaN
    found = {}
    for name, sizes in LAYOUTS.items():
        mesh = ParallelMesh.create(ParallelLayout(size, **sizes))
        for case in CASES:
            for num_tokens in SIZES:
                found[f"{name}, {case}, {num_tokens}"] = errors_of(name, case, num_tokens, mesh)
        mesh.destroy()
    return found


@pytest.fixture(scope="module")
def results() -> list[dict[str, dict[str, float]]]:
    return run_world(world, 4)


@pytest.mark.parametrize("num_tokens", SIZES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_outputs_and_all_gradients_equal_those_of_one_process(
    results: list[dict[str, dict[str, float]]], layout: str, case: str, num_tokens: int
) -> None:
    for rank, found in enumerate(results):
        for what, error in found[f"{layout}, {case}, {num_tokens}"].items():
            assert error < 1e-10, f"rank {rank}: {what} differs by {error}"


def test_the_choice_of_a_dispatcher_says_why() -> None:
    assert "this rank holds all experts" in choose_dispatcher(4, ParallelMesh.single()).reason
