"""Every expert grid of four ranks computes what one process with all experts does."""

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
#: How many tokens a rank has.
SIZES = {
    "some": lambda rank: NUM_TOKENS,
    "none": lambda rank: 0,
    "different": lambda rank: 2 * rank,
}


def runs() -> list[tuple[str, Transport, str, str]]:
    """List what is tried: layout, transport, routing and numbers of tokens."""
    found = []
    for layout, sizes in LAYOUTS.items():
        for transport in TRANSPORTS if "ep" in sizes else TRANSPORTS[:1]:
            is_static = transport != "all_to_all" or "etp" in sizes
            numbers = [name for name in SIZES if name != "different" or not is_static]
            found += [(layout, transport, case, number) for case in CASES for number in numbers]
    return found


def experts_on(mesh: ParallelMesh) -> GroupedMLP:
    module = GroupedMLP(SIZE, CONFIG, mesh).double()
    initialize_(module, "cpu", 1)
    # As drawn they are so small that errors of outputs would be, too.
    for parameter in module.parameters():
        parameter.data.mul_(20.0)
    return module


def expected(case: str, tokens: str, mesh: ParallelMesh, grid: list[int]) -> dict[str, Any]:
    """Compute what this rank must find, from all tokens of its expert grid and all experts."""
    whole = experts_on(ParallelMesh.single())
    weights = list(zip(whole.weights("gate_up"), whole.weights("down"), strict=True))
    found: dict[str, Any] = {}
    for rank in grid:
        routed = route(case, SIZES[tokens](rank), SIZE, NUM_EXPERTS, rank)
        output = dense(routed, weights, "swiglu")
        (output * routed.outer).sum().backward()
        if rank == mesh.rank:
            found = results_of(output, routed)
    return found | {key: _gradient(parameter) for key, parameter in whole.named_parameters()}


def results_of(output: torch.Tensor, routed: Routed) -> dict[str, Any]:
    gradients = {
        "hidden": _gradient(routed.hidden),
        "probabilities": _gradient(routed.probabilities),
    }
    return {"output": output.detach(), **gradients}


def _gradient(leaf: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def errors_of(transport: Transport, case: str, tokens: str, mesh: ParallelMesh) -> dict[str, float]:
    grid = next(ranks for ranks in mesh.layout.expert_groups("etp-ep") if mesh.rank in ranks)
    wanted = expected(case, tokens, mesh, grid)
    module, routed = (
        experts_on(mesh),
        route(case, SIZES[tokens](mesh.rank), SIZE, NUM_EXPERTS, mesh.rank),
    )
    dispatcher = choose_transport(NUM_EXPERTS, routed.experts.shape[1], mesh, transport).dispatcher
    prepared = dispatcher.prepare(routed.hidden, routed.probabilities, routed.experts)
    sent = dispatcher.receive(dispatcher.send(prepared))
    outputs = module(sent.rows, sent.probabilities, sent.ends)
    output = dispatcher.combine(dispatcher.send_back(outputs, sent))
    (output * routed.outer).sum().backward()
    errors = {key: _distance(one, wanted[key]) for key, one in results_of(output, routed).items()}
    for key, parameter in module.named_parameters():
        errors[key] = _distance(_gradient(parameter), shard_spec_of(parameter).shard(wanted[key]))
    return errors


def _distance(one: Any, other: torch.Tensor) -> float:
    assert one.shape == other.shape
    difference = (one - other).abs()
    return float(difference.max()) if difference.numel() else 0.0


def resumed(folder: str, before: ParallelMesh, after: ParallelMesh) -> float:
    """Train a step in one layout and one in another, and return how far that is from two in the
    latter.
    """
    first, second, both = (
        TrainedExperts(experts_on(mesh), mesh) for mesh in (before, after, after)
    )
    first.train(0)
    first.save(folder)
    both.train(0)
    second.load(folder)
    second.train(1)
    both.train(1)
    pairs = zip(second.module.parameters(), both.module.parameters(), strict=True)
    return max(_distance(one.detach(), other.detach()) for one, other in pairs)


def world(
    rank: int, size: int, folder: str
) -> tuple[dict[tuple[str, ...], dict[str, float]], dict[str, float]]:
    torch.use_deterministic_algorithms(True)  # fills memory that nobody has written with NaN
    meshes = {
        name: ParallelMesh.create(ParallelLayout(size, **sizes)) for name, sizes in LAYOUTS.items()
    }
    errors = {run: errors_of(*run[1:], meshes[run[0]]) for run in runs()}
    names = list(meshes)
    saved = {
        f"{before} to {after}": resumed(f"{folder}/{number}", meshes[before], meshes[after])
        for number, (before, after) in enumerate(zip(names, [*names[1:], names[0]], strict=True))
    }
    return errors, saved


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return run_world(world, 4, str(tmp_path_factory.mktemp("experts")))


@pytest.mark.parametrize("run", runs(), ids=" ".join)
def test_outputs_and_all_gradients_equal_those_of_one_process(
    results: list[Any], run: tuple[str, ...]
) -> None:
    for rank, (found, _) in enumerate(results):
        for what, error in found[run].items():
            assert error < 1e-10, f"rank {rank}: {what} differs by {error}"


def test_training_continues_in_another_layout(results: list[Any]) -> None:
    for _, saved in results:
        assert len(saved) == len(LAYOUTS)
        for layouts, error in saved.items():
            assert error < 1e-10, layouts


def test_only_the_steps_between_depend_on_the_routing_in_an_all_to_all() -> None:
    dispatcher = AllToAllDispatcher(NUM_EXPERTS, MeshAxis("ep", (0,)))
    shapes, numbers = [], []
    for case in CASES:
        routed = route(case, NUM_TOKENS, SIZE, NUM_EXPERTS, 0)
        chosen = routed.experts[:, :1]
        prepared = dispatcher.prepare(routed.hidden, routed.probabilities[:, :1], chosen)
        dispatched = dispatcher.receive(dispatcher.send(prepared))
        returned = dispatcher.send_back(dispatched.rows, dispatched)
        values = [one for _, one in leaves((prepared, returned)) if isinstance(one, torch.Tensor)]
        shapes.append([tuple(one.shape) for one in values])
        numbers.append(dispatched.rows.shape[0])
        is_here = (chosen >= 0).to(routed.hidden.dtype)
        assert torch.equal(dispatcher.combine(returned), routed.hidden * is_here), case
    assert shapes[1:] == shapes[:-1]
    assert len(set(numbers)) > 1


def test_the_choice_of_a_dispatcher_says_why() -> None:
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
def test_gpus_put_tokens_where_they_can(
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
    monkeypatch.setattr(choosing, "transfer_over", lambda axis, each, device: None)
    choice = choose_transport(4, top_k, mesh, has_shared=has_shared)
    assert choice.transport == kind
    assert isinstance(choice.dispatcher, OneSidedDispatcher) == (kind == "one_sided")
    assert choice.reason.endswith(reason)


def test_puts_that_were_asked_for_are_never_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = replace(ParallelMesh.single(), ep=MeshAxis("ep", (0, 1)), device=torch.device("cuda"))
    monkeypatch.setattr(
        peer_transfer, "reason_against_puts", lambda axis, device: "ranks are far apart"
    )
    with pytest.raises(
        UnsupportedError, match="write into each other's memory: ranks are far apart"
    ) as raised:
        choose_transport(4, 2, mesh, "one_sided")
    assert "'all_gather', 'all_to_all' or 'auto'" in str(raised.value)
