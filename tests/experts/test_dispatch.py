"""Every expert grid of four ranks equals one process with all experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.experts.compute.grouped_mlp import GroupedMLP
from lightning_megatron.experts.transport import choose_transport as choosing
from lightning_megatron.experts.transport import peer_transfer
from lightning_megatron.experts.transport.choose_transport import choose_transport
from lightning_megatron.experts.transport.dispatchers import AllToAllDispatcher, GatherDispatcher
from lightning_megatron.experts.transport.one_sided import OneSidedDispatcher
from lightning_megatron.groups.axis import MeshAxis
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import shard_spec_of
from lightning_megatron.layers.init import initialize_
from lightning_megatron.nest import leaves
from lightning_megatron.plan.experts import ExpertsConfig, Transport
from lightning_megatron.plan.layout import ParallelLayout
from tests.experts.dense import CASES, Routed, dense, route
from tests.experts.trained import TrainedExperts
from tests.world import run_world

NUM_EXPERTS, SIZE, INNER, NUM_TOKENS = 4, 6, 8, 5
CONFIG = ExpertsConfig(num_experts=NUM_EXPERTS, top_k=2, ffn_hidden_size=INNER)
LAYOUTS = {"ep2": {"ep": 2}, "ep4": {"ep": 4}, "ep2 etp2": {"ep": 2, "etp": 2}, "etp2": {"etp": 2}}
TRANSPORTS: tuple[Transport, ...] = ("all_gather", "all_to_all", "one_sided")
#: Number of tokens of a rank.
SIZES = {
    "some": lambda rank: NUM_TOKENS,
    "none": lambda rank: 0,
    "different": lambda rank: 2 * rank,
}


def list_runs() -> list[tuple[str, Transport, str, str]]:
    """List all combinations of layout, transport, routing and numbers of tokens."""
    combinations = []
    for layout, sizes in LAYOUTS.items():
        for transport in TRANSPORTS if "ep" in sizes else TRANSPORTS[:1]:
            is_static = transport != "all_to_all" or "etp" in sizes
            token_counts = [name for name in SIZES if name != "different" or not is_static]
            combinations += [
                (layout, transport, case, token_count)
                for case in CASES
                for token_count in token_counts
            ]
    return combinations


def build_experts(mesh: ParallelMesh) -> GroupedMLP:
    module = GroupedMLP(SIZE, CONFIG, mesh).double()
    initialize_(module, "cpu", 1)
    # Initial weights are so small that errors of outputs would be small, too.
    for parameter in module.parameters():
        parameter.data.mul_(20.0)
    return module


def expected_results(case: str, tokens: str, mesh: ParallelMesh, grid: list[int]) -> dict[str, Any]:
    """Compute the results of this rank from all tokens of its expert grid and all experts."""
    all_experts = build_experts(ParallelMesh.single())
    weights = list(zip(all_experts.weights("gate_up"), all_experts.weights("down"), strict=True))
    results: dict[str, Any] = {}
    for rank in grid:
        routed = route(case, SIZES[tokens](rank), SIZE, NUM_EXPERTS, rank)
        output = dense(routed, weights, "swiglu")
        (output * routed.outer).sum().backward()
        if rank == mesh.rank:
            results = results_of(output, routed)
    return results | {
        key: _gradient(parameter) for key, parameter in all_experts.named_parameters()
    }


def results_of(output: torch.Tensor, routed: Routed) -> dict[str, Any]:
    gradients = {
        "hidden": _gradient(routed.hidden),
        "probabilities": _gradient(routed.probabilities),
    }
    return {"output": output.detach(), **gradients}


def _gradient(leaf: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def compute_errors(
    transport: Transport, case: str, tokens: str, mesh: ParallelMesh
) -> dict[str, float]:
    grid = next(ranks for ranks in mesh.layout.expert_groups("etp-ep") if mesh.rank in ranks)
    expected = expected_results(case, tokens, mesh, grid)
    module, routed = (
        build_experts(mesh),
        route(case, SIZES[tokens](mesh.rank), SIZE, NUM_EXPERTS, mesh.rank),
    )
    dispatcher = choose_transport(NUM_EXPERTS, routed.experts.shape[1], mesh, transport).dispatcher
    prepared = dispatcher.prepare(routed.hidden, routed.probabilities, routed.experts)
    received = dispatcher.receive(dispatcher.send(prepared))
    outputs = module(received.rows, received.probabilities, received.ends)
    output = dispatcher.combine(dispatcher.send_back(outputs, received))
    (output * routed.outer).sum().backward()
    errors = {
        key: _largest_difference(actual, expected[key])
        for key, actual in results_of(output, routed).items()
    }
    for key, parameter in module.named_parameters():
        errors[key] = _largest_difference(
            _gradient(parameter), shard_spec_of(parameter).shard(expected[key])
        )
    return errors


def _largest_difference(actual: Any, expected: torch.Tensor) -> float:
    assert actual.shape == expected.shape
    difference = (actual - expected).abs()
    return float(difference.max()) if difference.numel() else 0.0


def compare_resumed_training(folder: str, before: ParallelMesh, after: ParallelMesh) -> float:
    """Train a step in one layout and a step in another; return the largest difference to two steps in
    the second layout.
    """
    first_training, resumed_training, uninterrupted = (
        TrainedExperts(build_experts(mesh), mesh) for mesh in (before, after, after)
    )
    first_training.train(0)
    first_training.save(folder)
    uninterrupted.train(0)
    resumed_training.load(folder)
    resumed_training.train(1)
    uninterrupted.train(1)
    pairs = zip(
        resumed_training.module.parameters(), uninterrupted.module.parameters(), strict=True
    )
    return max(
        _largest_difference(actual.detach(), expected.detach()) for actual, expected in pairs
    )


def _world(
    rank: int, size: int, folder: str
) -> tuple[dict[tuple[str, ...], dict[str, float]], dict[str, float]]:
    torch.use_deterministic_algorithms(True)  # fills uninitialized memory with NaN
    meshes = {
        name: ParallelMesh.create(ParallelLayout(size, **sizes)) for name, sizes in LAYOUTS.items()
    }
    errors = {run: compute_errors(*run[1:], meshes[run[0]]) for run in list_runs()}
    names = list(meshes)
    saved = {
        f"{before} to {after}": compare_resumed_training(
            f"{folder}/{number}", meshes[before], meshes[after]
        )
        for number, (before, after) in enumerate(zip(names, [*names[1:], names[0]], strict=True))
    }
    return errors, saved


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return run_world(_world, 4, str(tmp_path_factory.mktemp("experts")))


@pytest.mark.parametrize("run", list_runs(), ids=" ".join)
def test_outputs_and_all_gradients_equal_those_of_one_process(
    results: list[Any], run: tuple[str, ...]
) -> None:
    for rank, (errors_of_runs, _) in enumerate(results):
        for name, error in errors_of_runs[run].items():
            assert error < 1e-10, f"rank {rank}: {name} differs by {error}"


def test_training_resumes_in_another_layout(results: list[Any]) -> None:
    for _, saved in results:
        assert len(saved) == len(LAYOUTS)
        for layouts, error in saved.items():
            assert error < 1e-10, layouts


def test_shapes_before_and_after_an_all_to_all_do_not_depend_on_the_routing() -> None:
    dispatcher = AllToAllDispatcher(NUM_EXPERTS, MeshAxis("ep", (0,)))
    shapes, row_counts = [], []
    for case in CASES:
        routed = route(case, NUM_TOKENS, SIZE, NUM_EXPERTS, 0)
        chosen = routed.experts[:, :1]
        prepared = dispatcher.prepare(routed.hidden, routed.probabilities[:, :1], chosen)
        dispatched = dispatcher.receive(dispatcher.send(prepared))
        returned = dispatcher.send_back(dispatched.rows, dispatched)
        values = [
            tensor for _, tensor in leaves((prepared, returned)) if isinstance(tensor, torch.Tensor)
        ]
        shapes.append([tuple(tensor.shape) for tensor in values])
        row_counts.append(dispatched.rows.shape[0])
        is_kept = (chosen >= 0).to(routed.hidden.dtype)
        assert torch.equal(dispatcher.combine(returned), routed.hidden * is_kept), case
    assert shapes[1:] == shapes[:-1]
    assert len(set(row_counts)) > 1


def test_the_choice_of_a_dispatcher_has_its_reason() -> None:
    single = ParallelMesh.single()
    assert "this rank has all experts" in choose_transport(4, 2, single).reason
    mesh = replace(single, ep=MeshAxis("ep", (0, 1)))
    for top_k, transport, kind, reason in (
        (2, "auto", GatherDispatcher, "top_k (2) is at least ep (2)"),
        (1, "auto", AllToAllDispatcher, "top_k (1) is below ep (2)"),
        (1, "all_gather", GatherDispatcher, "asked for"),
        (2, "all_to_all", AllToAllDispatcher, "asked for"),
        (1, "one_sided", OneSidedDispatcher, "asked for"),
    ):
        choice = choose_transport(4, top_k, mesh, transport)  # type: ignore[arg-type]
        assert isinstance(choice.dispatcher, kind)
        assert reason in choice.reason


@pytest.mark.parametrize(
    ("reason_unavailable", "top_k", "has_shared", "kind", "reason"),
    [
        (
            None,
            2,
            False,
            "one_sided",
            "at least ep (2), and these GPUs write into each other's memory",
        ),
        (None, 1, False, "all_to_all", "top_k (1) is below ep (2)"),
        (None, 2, True, "all_gather", "no puts: an all-gather overlaps with the shared expert"),
        ("ranks are far apart", 2, False, "all_gather", "no puts: ranks are far apart"),
    ],
)
def test_auto_chooses_puts_on_gpus_that_support_them(
    monkeypatch: pytest.MonkeyPatch,
    reason_unavailable: str | None,
    top_k: int,
    has_shared: bool,
    kind: str,
    reason: str,
) -> None:
    single = ParallelMesh.single()
    mesh = replace(single, ep=MeshAxis("ep", (0, 1)), device=torch.device("cuda"))
    monkeypatch.setattr(choosing, "reason_against_puts", lambda axis, device: reason_unavailable)
    monkeypatch.setattr(choosing, "transfer_over", lambda axis, experts_each, device: None)
    choice = choose_transport(4, top_k, mesh, has_shared=has_shared)
    assert choice.transport == kind
    assert isinstance(choice.dispatcher, OneSidedDispatcher) == (kind == "one_sided")
    assert choice.reason.endswith(reason)


def test_requested_puts_without_support_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = replace(ParallelMesh.single(), ep=MeshAxis("ep", (0, 1)), device=torch.device("cuda"))
    monkeypatch.setattr(
        peer_transfer, "reason_against_puts", lambda axis, device: "ranks are far apart"
    )
    with pytest.raises(
        UnsupportedError, match="write into each other's memory: ranks are far apart"
    ) as raised:
        choose_transport(4, 2, mesh, "one_sided")
    assert "'all_gather', 'all_to_all' or 'auto'" in str(raised.value)
