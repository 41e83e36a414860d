"""Mixtures of experts on every grid of four ranks equal one process with all experts."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron.errors import RankMismatchError
from lightning_megatron.experts.compute.grouped_mlp import GroupedMLP
from lightning_megatron.experts.layer import MixtureOfExperts
from lightning_megatron.experts.routing.attached_loss import attach_loss
from lightning_megatron.experts.routing.balance import add_over_tokens_
from lightning_megatron.experts.routing.router import Router
from lightning_megatron.experts.routing.statistics import (
    RouterStatistics,
    StepStatistics,
    step_statistics,
)
from lightning_megatron.experts.transport import cloning_dispatcher
from lightning_megatron.experts.transport.choose_transport import choose_transport
from lightning_megatron.experts.transport.clone_transfer import CloneCollectives
from lightning_megatron.experts.transport.cloning import PlacedClones, place_clones
from lightning_megatron.experts.transport.dispatchers import (
    check_equal_counts,
)
from lightning_megatron.experts.transport.peer_transfer import Collectives
from lightning_megatron.experts.transport.rank_rows import RankRows, gather_rows
from lightning_megatron.groups import in_flight
from lightning_megatron.groups.collectives import all_gather_objects, all_reduce_
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import shard_spec_of
from lightning_megatron.layers.init import initialize_
from lightning_megatron.plan.cloning import ClonePlan, CloneSettings, plan_clones
from lightning_megatron.plan.experts import ExpertsConfig, Transport
from lightning_megatron.plan.layout import ParallelLayout
from tests.experts.cloned_layer import Case, any_legal_plan, distance, floats
from tests.experts.dense import Routed, dense, draw, route
from tests.experts.layers import SETTINGS, S, hidden_of, layer_of, run
from tests.experts.routed_by_hand import SETTINGS as ROUTERS
from tests.experts.routed_by_hand import B as BATCH
from tests.experts.routed_by_hand import D as WIDTH
from tests.experts.routed_by_hand import E as EXPERTS
from tests.experts.routed_by_hand import S as LENGTH
from tests.experts.routed_by_hand import config_of, gradients, losses_of, main_loss, router_of
from tests.experts.routed_by_hand import draw as draw_tensor
from tests.oracles import assert_equal, gather_full, sequence_part
from tests.recorded import record_starts
from tests.sweeps import chosen
from tests.world import run_world

NUM_EXPERTS, SIZE, INNER, NUM_TOKENS = 4, 6, 8, 5
CONFIG = ExpertsConfig(num_experts=NUM_EXPERTS, top_k=2, ffn_hidden_size=INNER)
GRIDS: dict[str, dict[str, Any]] = chosen(
    {
        "ep4": {"ep": 4},
        "ep2 edp2": {"ep": 2},
        "tp2, ep2 edp2": {"tp": 2, "ep": 2, "etp": 1},
        "tp2, etp2 ep2": {"tp": 2, "ep": 2},
        "tp4, ep4": {"tp": 4, "ep": 4, "etp": 1},
        "tp4, etp4": {"tp": 4},
        "tp4, etp2 ep2": {"tp": 4, "ep": 2, "etp": 2},
        "etp2 ep2 in dp4": {"etp": 2, "ep": 2},
    },
    "ep4",
    "tp2, ep2 edp2",
    "tp4, etp2 ep2",
)
#: Settings, sequence parallelism, transport, length and places for clones of layers. A length that
#: is no multiple of tp is padded.
LAYERS = [
    *((name, False, "auto", S, 0) for name in SETTINGS),
    *(("plain", False, transport, S, 0) for transport in ("all_to_all", "one_sided")),
    ("plain", False, "all_gather", S, 1),
    ("plain", False, "all_to_all", S, 1),
    ("capacity", False, "one_sided", S, 2),
    ("shared", False, "all_to_all", S, 2),
    *((name, True, "auto", S, 0) for name in ("plain", "shared", "experts with biases")),
    ("plain", True, "one_sided", S, 1),
    ("plain", True, "all_to_all", S, 0),
    ("plain", False, "all_gather", 5, 0),
    ("capacity", False, "one_sided", 5, 0),
    ("shared", False, "all_to_all", 3, 0),
]
#: Layout, transport, routing and numbers of tokens of dispatchers.
DISPATCHES: list[tuple[str, Transport, str, str]] = [
    ("ep2", "all_gather", "dropped", "some"),
    ("ep2", "all_to_all", "some without tokens", "different"),
    ("ep4", "all_gather", "every expert", "some"),
    ("ep4", "all_to_all", "all to one", "some"),
    ("ep4", "all_to_all", "random", "none"),
    ("ep4", "one_sided", "some without tokens", "some"),
    ("ep2 etp2", "all_gather", "random", "none"),
    ("ep2 etp2", "all_to_all", "dropped", "some"),
    ("ep2 etp2", "one_sided", "every expert", "some"),
    ("etp2", "all_gather", "dropped", "some"),
]
DISPATCH_LAYOUTS = {
    "ep2": {"ep": 2},
    "ep4": {"ep": 4},
    "ep2 etp2": {"ep": 2, "etp": 2},
    "etp2": {"etp": 2},
}


def run_all(rank: int, size: int) -> dict[str, Any]:
    check_dispatches(size)
    outcomes: dict[str, Any] = {"layers": errors_of_grids(size), "clones": compare_clones(size)}
    outcomes["rows"] = count_rows_of_layouts(size)
    check_routers_and_statistics(size)
    mesh = ParallelMesh.create(ParallelLayout(size, ep=2))
    check_unequal_counts(mesh)
    check_dispatched_tokens(mesh)
    check_overlap(mesh)
    mesh.destroy()
    return outcomes


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_world(run_all, 4)


# Layers.


def check_inputs_sent_again(
    layer_with_kept_inputs: MixtureOfExperts,
    layer: MixtureOfExperts,
    inputs: list[Tensor],
    output: Tensor,
    gradient: Tensor,
) -> None:
    """Compare, bitwise, a layer that sends inputs of experts again with a layer that keeps them."""
    layer.sends_inputs_again = True
    actual = run(layer, *inputs)
    assert torch.equal(actual[0], output)
    assert torch.equal(actual[1], gradient)
    for parameter, expected_parameter in zip(
        layer.parameters(), layer_with_kept_inputs.parameters(), strict=True
    ):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, expected_parameter.grad)


def errors_of_layer(
    mesh: ParallelMesh, name: str, transport: str, length: int, places: int
) -> dict[str, float]:
    """Return the largest differences of outputs and gradients to one process with the tokens of all
    data ranks.
    """
    options = {"transport": transport, "clones": CloneSettings(places) if places else None}
    layer, single_process = layer_of(mesh, options, **SETTINGS[name]), layer_of(**SETTINGS[name])
    layer.recomputes_experts = places == 1
    # Each data rank has a microbatch of one sequence.
    inputs = [
        draw("hidden", name, number, shape=(length, 1, SIZE)) for number in range(mesh.dp.size)
    ]
    output_gradients = [
        draw("outer", name, number, shape=(length, 1, SIZE)) for number in range(mesh.dp.size)
    ]
    expected_results = [
        run(single_process, *microbatch)
        for microbatch in zip(inputs, output_gradients, strict=True)
    ]
    local_inputs = [tensor[mesh.dp.rank] for tensor in (inputs, output_gradients)]
    expected = expected_results[mesh.dp.rank]
    if mesh.sequence_parallel:
        local_inputs = [tensor.chunk(mesh.tp.size)[mesh.tp.rank] for tensor in local_inputs]
        expected = tuple(tensor.chunk(mesh.tp.size)[mesh.tp.rank] for tensor in expected)
    output, gradient = run(layer, *local_inputs)
    check_inputs_sent_again(
        layer, layer_of(mesh, options, **SETTINGS[name]), local_inputs, output, gradient
    )
    errors = {
        "output": float((output - expected[0]).abs().max()),
        "input": float((gradient - expected[1]).abs().max()),
    }
    expected_parameters = dict(single_process.named_parameters())
    for parameter_name, parameter in layer.named_parameters():
        assert parameter.grad is not None, parameter_name
        spec, total = shard_spec_of(parameter, mesh.tp.rank), parameter.grad.clone()
        if spec.partial:
            all_reduce_(total, mesh.tp)
        all_reduce_(total, mesh.replica_axis(spec.is_expert))
        errors[parameter_name] = float(
            (total - spec.shard(expected_parameters[parameter_name].grad)).abs().max()
        )
    return errors


def errors_of_grids(size: int) -> dict[str, dict[str, float]]:
    errors: dict[str, dict[str, float]] = {}
    for grid, options in GRIDS.items():
        layout = ParallelLayout(size, **options)
        for sequence_parallel in (False, True)[: 1 + (layout.tp > 1)]:
            mesh = ParallelMesh.create(layout, sequence_parallel=sequence_parallel)
            for name, needs_sp, transport, length, places in LAYERS:
                is_legal = (length == S or layout.tp > 1) and (places == 0 or layout.ep > 1)
                if needs_sp == sequence_parallel and is_legal:
                    case = f"{grid}, {name}, sp {needs_sp}, {transport}, {length}, places {places}"
                    errors[case] = errors_of_layer(mesh, name, transport, length, places)
            mesh.destroy()
    return errors


def test_layers_on_every_grid_equal_one_process(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert len(result["layers"]) > 40
        for case, errors in result["layers"].items():
            assert max(errors.values()) < 1e-10, (case, errors)


# Dispatchers, whose transports bring tokens to experts and back.

#: Number of tokens of a rank.
COUNTS = {
    "some": lambda rank: NUM_TOKENS,
    "none": lambda rank: 0,
    "different": lambda rank: 2 * rank,
}


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
        routed = route(case, COUNTS[tokens](rank), SIZE, NUM_EXPERTS, rank)
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
        route(case, COUNTS[tokens](mesh.rank), SIZE, NUM_EXPERTS, mesh.rank),
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


def check_dispatches(size: int) -> None:
    torch.use_deterministic_algorithms(True)  # fills uninitialized memory with NaN
    for layout, sizes in DISPATCH_LAYOUTS.items():
        mesh = ParallelMesh.create(ParallelLayout(size, **sizes))
        for name, transport, case, tokens in DISPATCHES:
            if name == layout:
                errors = compute_errors(transport, case, tokens, mesh)
                assert max(errors.values()) < 1e-10, (layout, transport, case, tokens, errors)
        mesh.destroy()
    torch.use_deterministic_algorithms(False)


def check_unequal_counts(mesh: ParallelMesh) -> None:
    """Ranks that gather each other's tokens must have equally many; all of them say so."""
    message = "must have equally many tokens in a microbatch: this rank has [45]"
    check_equal_counts(4, mesh)
    with pytest.raises(RankMismatchError, match=message):
        check_equal_counts(4 + mesh.ep.rank, mesh)


def check_dispatched_tokens(mesh: ParallelMesh) -> None:
    """Ranks receive only tokens that chose their experts."""
    rank = mesh.ep.rank
    hidden = torch.arange(3.0).view(3, 1).expand(3, 4) + 10 * rank
    experts = torch.tensor([[0, 1], [3, -1], [-1, -1]])
    probabilities = torch.full((3, 2), 0.5 + rank)
    buffer = Collectives(mesh.ep, 2).dispatch(hidden, probabilities, experts)
    # On both ranks token 0 chose experts of the first rank, token 1 chose an expert of the
    # second rank, and token 2 chose none.
    expected = torch.full((6, 4), torch.nan)
    expected[[rank, 3 + rank]] = torch.tensor([[0.0], [10.0]]) + rank
    assert torch.equal(buffer.rows.nan_to_num(99.0), expected.nan_to_num(99.0))
    assert torch.equal(buffer.experts, experts.repeat(2, 1))
    assert torch.equal(buffer.scales, torch.tensor([0.5, 1.5]).repeat_interleave(6).view(6, 2))
    again = Collectives(mesh.ep, 2).dispatch(hidden, None, experts)
    assert again.region is buffer.region
    assert again.scales is None


# The shared expert runs during the transport of tokens, forward and backward.


def record_events(layer: Any, patch: pytest.MonkeyPatch) -> list[str]:
    """Run forward and backward, and return the events in order."""
    events: list[str] = []
    record_starts(patch, in_flight, ("all_gather", "reduce_scatter", "all_to_all"), events)
    layer.shared.register_forward_hook(lambda *_: events.append("shared"))
    layer.experts.register_forward_hook(lambda *_: events.append("experts"))
    layer.shared.register_full_backward_hook(lambda *_: events.append("shared backward"))
    output = layer(hidden_of("beside").requires_grad_())
    events.append("backward")
    output.backward(hidden_of("outer"))
    return events


def check_overlap(mesh: ParallelMesh) -> None:
    torch.set_default_dtype(torch.float64)
    for transport, dispatch, combine, num_tensors in (
        ("all_gather", "all_gather", "reduce_scatter", 3),
        ("all_to_all", "all_to_all", "all_to_all", 2),
    ):
        layer = layer_of(mesh, {"transport": transport}, shared_ffn_hidden_size=8, shared_gate=True)
        with pytest.MonkeyPatch.context() as patch:
            events = record_events(layer, patch)
        forward = (
            [f"{dispatch} starts"] * num_tensors + ["shared"] + [f"{dispatch} ends"] * num_tensors
        )
        # Indices of experts have no gradients.
        backward = [f"{combine} starts"] * 2 + ["shared backward"] + [f"{combine} ends"] * 2
        assert events == [*forward, "experts", "backward", *backward], (transport, events)


# Clones of experts do not change the bits of exact sums.

TRANSPORTS = ("one_sided", "all_gather", "all_to_all")


def make_cases(ep: int) -> dict[str, Case]:
    """Return named cases for a number of ranks."""
    cases = {
        "one sided, slots": Case("one_sided", 1, has_slots=True, seed=1),
        "floats": Case("one_sided", 3, floats, has_slots=True),
        "any plan, one sided": Case("one_sided", 2),
    }
    if ep == 2:
        return cases
    cases["all-gather"] = Case("all_gather", 2, seed=2)
    cases["any plan, all-gather"] = Case("all_gather", 2, has_slots=True, seed=1)
    cases["any plan, all-to-all"] = Case("all_to_all", 2, has_slots=True, seed=2)
    return cases | {name: Case("one_sided", 2) for name in BROKEN}


def compare_clones(size: int) -> dict[str, tuple[float, int]]:
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


def test_clones_do_not_change_the_bits_of_exact_sums(results: list[dict[str, Any]]) -> None:
    for name in results[0]["clones"]:
        largest_difference = max(result["clones"][name][0] for result in results)
        assert all(result["clones"][name][1] > 0 for result in results), f"{name}: nothing moves"
        if any(broken in name for broken in BROKEN):
            assert largest_difference > 0.1, f"{name}: not noticed"
        else:
            limit = 1e-12 if "floats" in name else 0.0
            assert largest_difference <= limit, f"{name}: {largest_difference}"


# Counted rows of ranks equal the plans of clones in Python numbers.

ROW_CONFIG = ExpertsConfig(num_experts=8, top_k=3, ffn_hidden_size=8, capacity_factor=1.5)
MICROBATCHES = 3
ROW_LAYOUTS: dict[str, dict[str, Any]] = {
    "ep2": {"ep": 2},
    "tp2, etp2": {"tp": 2, "ep": 2, "etp": 2},
    "tp2, etp1": {"tp": 2, "ep": 4, "etp": 1},
}


def count_rows(mesh: ParallelMesh, clones: CloneSettings | None) -> RankRows:
    """Train on microbatches, and return the counted rows of a layer."""
    layer = MixtureOfExperts(SIZE, ROW_CONFIG, mesh, transport="all_gather", clones=clones).double()
    weight = torch.randn(8, SIZE, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    # Larger scores of the first experts make the first rank the busiest.
    weight[:2] += 0.5
    layer.router.weight.data = weight
    layer.rank_rows.is_on = True
    for microbatch in range(MICROBATCHES):
        generator = torch.Generator().manual_seed(10 * mesh.dp.rank + microbatch)
        hidden = torch.randn(8, 2, SIZE, generator=generator, dtype=torch.float64) + 0.5
        layer.train(microbatch != 1)
        layer(hidden)
    return layer.rank_rows


def gather_figures(counts: Mapping[int, Tensor], mesh: ParallelMesh) -> dict[str, Any]:
    (step,) = gather_rows(counts, mesh).values()
    return {name: value.tolist() for name, value in vars(step).items()}


def figures_of_plans(plans: list[list[ClonePlan]], counts: list[list[Any]]) -> dict[str, Any]:
    """Return the figures of a step from the plans of all replicas and microbatches."""
    all_plans = [plan for of_replica in plans for plan in of_replica]
    homes = all_plans[0].layout.homes
    before = [
        [
            sum(map(sum, (row[first : first + homes] for row in of_microbatch)))
            for first in range(0, 8, homes)
        ]
        for of_replica in counts
        for of_microbatch in of_replica
    ]
    moved = sum(sum(plan.amounts) for plan in all_plans)
    after = [sum(rows) for rows in zip(*(plan.rows for plan in all_plans), strict=True)]
    return {
        "before": [sum(rows) for rows in zip(*before, strict=True)],
        "after": after,
        "moved": moved / sum(after),
        "clones": sum(owner >= 0 for plan in all_plans for owner in plan.owners) / len(all_plans),
        "away": [
            sum(owner // homes == rank for plan in all_plans for owner in plan.owners)
            / len(all_plans)
            for rank in range(8 // homes)
        ],
        "num_microbatches": len(all_plans),
        "needed": max(max(plan.rows) for plan in all_plans),
    }


def record_and_place(
    planned: list[Any], counts: Tensor, places: int, min_rows: int
) -> PlacedClones:
    planned.append(counts.tolist())
    return place_clones(counts, places, min_rows)


def count_rows_of_layouts(size: int) -> dict[str, tuple[Any, ...]]:
    results = {}
    for name, sizes in ROW_LAYOUTS.items():
        mesh = ParallelMesh.create(ParallelLayout(size, **sizes))
        plain = gather_figures({5: count_rows(mesh, None).sums}, mesh)
        planned: list[Any] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cloning_dispatcher, "place_clones", partial(record_and_place, planned))
            cloned = gather_figures({5: count_rows(mesh, CloneSettings(2, min_rows=2)).sums}, mesh)
        # The second microbatch is an evaluation.
        del planned[1]
        counts = all_gather_objects(planned, mesh.on_cpu("edp"))
        plans = [
            [plan_clones(of_microbatch, 2, 2) for of_microbatch in of_replica]
            for of_replica in counts
        ]
        results[name] = plain, cloned, figures_of_plans(plans, counts)
        mesh.destroy()
    return results


def test_counted_rows_equal_those_of_the_plans(results: list[dict[str, Any]]) -> None:
    for name in ROW_LAYOUTS:
        plain, cloned, planned = results[0]["rows"][name]
        assert cloned.keys() == planned.keys()
        for figure, value in planned.items():
            assert cloned[figure] == pytest.approx(value), f"{name}: {figure}"
        assert cloned["moved"] > 0.05, name
        assert max(cloned["after"]) < max(cloned["before"]), name
        assert plain["before"] == plain["after"] == cloned["before"], name
        assert (plain["moved"], plain["clones"]) == (0, 0), name
        assert plain["needed"] > cloned["needed"], name
        assert all(result["rows"][name][:2] == (plain, cloned) for result in results), name


# Routers and their statistics.


WORLD_SETTINGS: dict[str, dict[str, Any]] = {
    **{
        name: ROUTERS[name]
        for name in ("groups", "DeepSeek-V3", "the last step's load", "capacity")
    },
    "jitter": {"jitter": 0.3, "capacity_factor": 0.9, "aux_loss_scope": "sequence"},
}


def compare_with_one_process(config: ExpertsConfig, mesh: ParallelMesh, case_name: str) -> None:
    full = draw_tensor(LENGTH, BATCH, WIDTH, seed=4).requires_grad_()
    single_process = router_of(config, ParallelMesh.single(seed=3))
    expected = single_process(full)
    weights = draw_tensor(LENGTH * BATCH, config.top_k, seed=5)
    total = (weights * expected.probabilities).sum() + losses_of(expected)
    expected_grad_hidden, expected_grad_weight = gradients(total, full, single_process.weight)

    def local_part(x: Tensor) -> Tensor:
        x = x.unflatten(0, (LENGTH, BATCH)) if x.shape[0] == LENGTH * BATCH else x
        x = x.chunk(mesh.cp.size)[mesh.cp.rank]
        return sequence_part(x, mesh)

    hidden = local_part(full).detach().requires_grad_()
    router = router_of(config, mesh)
    routing = router(hidden)
    assert torch.equal(routing.experts, local_part(expected.experts).flatten(0, 1)), case_name
    assert_equal(
        routing.probabilities,
        local_part(expected.probabilities).flatten(0, 1),
        f"{case_name}: probabilities",
    )
    # Gradients are averaged over the data group, which includes cp.
    attached = attach_loss(routing.probabilities, losses_of(routing), 1.0)
    local_loss = (local_part(weights).flatten(0, 1) * attached).sum() * mesh.cp.size
    grad_hidden, grad_weight = gradients(local_loss, hidden, router.weight)
    spec = shard_spec_of(router.weight, mesh.tp.rank)
    assert spec.partial == mesh.sequence_parallel, case_name
    grad_weight = gather_full(grad_weight, spec, mesh, sum_copies=spec.partial)
    assert_equal(
        all_reduce_(grad_weight, mesh.data, "mean"),
        expected_grad_weight,
        f"{case_name}: gradient of the weight",
    )
    assert_equal(
        grad_hidden / mesh.cp.size,
        local_part(expected_grad_hidden),
        f"{case_name}: gradient of hidden",
    )
    for field in ("balance_loss", "z_loss"):
        value = getattr(routing, field).detach().clone()
        all_reduce_(value, mesh.data, "mean")
        if mesh.sequence_parallel:
            all_reduce_(value, mesh.tp)
        assert_equal(value, getattr(expected, field), f"{case_name}: {field}")
    assert torch.equal(
        add_over_tokens_(routing.load.to(torch.int64, copy=True), mesh),
        expected.load.long() * mesh.dp.size,
    ), case_name


def train(config: ExpertsConfig, mesh: ParallelMesh, num_microbatches: int) -> Router:
    """Take three steps on the microbatches of this data rank, as callers of a router do."""
    router = router_of(config, mesh)
    for step in range(3):
        load = torch.zeros(EXPERTS, dtype=torch.int32)
        for number in range(num_microbatches):
            routing = router(
                draw_tensor(
                    LENGTH, BATCH, WIDTH, seed=10 * step + mesh.dp.rank * num_microbatches + number
                )
            )
            attached = attach_loss(
                routing.probabilities, losses_of(routing), 1.0 / num_microbatches
            )
            (main_loss(attached) / (LENGTH * BATCH * num_microbatches)).backward()
            load += routing.load
        assert router.weight.grad is not None
        with torch.no_grad():
            router.weight.sub_(all_reduce_(router.weight.grad, mesh.data, "mean"))
        router.weight.grad = None
        router.update_(add_over_tokens_(load.to(torch.int64, copy=True), mesh))
    return router


def draw_microbatch(layer: int, number: int) -> Tensor:
    """Draw the tokens of a layer in a microbatch, which differ between layers and microbatches."""
    return draw_tensor(LENGTH, BATCH, WIDTH, seed=10 * layer + number)


def count_step(
    settings: Mapping[str, Any], mesh: ParallelMesh
) -> tuple[dict[int, RouterStatistics], Mapping[int, StepStatistics]]:
    """Route the tokens of this rank in a step; return counts of layers and statistics of the step."""
    config = config_of(**settings)
    router = router_of(config, mesh)
    layers = {layer: RouterStatistics(config, mesh.device) for layer in (1, 3)}
    for layer, statistics in layers.items():
        for number in range(mesh.dp.rank, 4, mesh.dp.size):
            hidden = draw_microbatch(layer, number).chunk(mesh.cp.size)[mesh.cp.rank]
            statistics.add_(router(sequence_part(hidden, mesh)))
    return layers, step_statistics(layers, mesh)


def check_routers_and_statistics(size: int) -> None:
    for sizes, sequence_parallel in (
        ({"tp": 2}, False),
        ({"tp": 2}, True),
        ({"cp": 2}, False),
        ({}, False),
    ):
        mesh = ParallelMesh.create(
            ParallelLayout(size, **sizes), seed=3, sequence_parallel=sequence_parallel
        )
        what = f"{sizes}, sp {sequence_parallel}"
        for name, settings in WORLD_SETTINGS.items() if sizes else ():
            config = config_of(**settings)
            # Capacity and random numbers depend on the cp rank.
            if mesh.cp.size == 1 or not (config.capacity_factor or config.jitter):
                compare_with_one_process(config, mesh, f"{name}, {what}")
        for settings in ({"scoring": "sigmoid"}, {"capacity_factor": 0.7})[: 3 - mesh.cp.size]:
            check_statistics(mesh, settings, what)
        if not sizes:
            check_steps_of_data_ranks(mesh)
        mesh.destroy()


def check_statistics(mesh: ParallelMesh, settings: Any, what: str) -> None:
    _, expected_steps = count_step(settings, ParallelMesh.single())
    layers, steps = count_step(settings, mesh)
    for layer, step in steps.items():
        for field in ("load", "dropped", "entropy", "balance_loss", "z_loss"):
            actual, expected = getattr(step, field), getattr(expected_steps[layer], field)
            assert_equal(actual.double(), expected.double(), f"{what}, layer {layer}: {field}")
        load = add_over_tokens_(layers[layer].load.to(torch.int64, copy=True), mesh)
        assert torch.equal(step.load, load), what


def check_steps_of_data_ranks(mesh: ParallelMesh) -> None:
    config = config_of(
        scoring="sigmoid", expert_bias=True, expert_bias_rate=0.05, aux_loss_scope="global"
    )
    expected = train(config, ParallelMesh.single(), 4).state_dict()
    assert float((expected["weight"] - draw_tensor(EXPERTS, WIDTH, seed=1)).abs().max()) > 0.1
    for name, value in train(config, mesh, 1).state_dict().items():
        assert_equal(value, expected[name], f"{name} after steps on four data ranks")


def test_routers_and_dispatchers_equal_those_of_one_process(results: list[dict[str, Any]]) -> None:
    assert len(results) == 4, "every rank has made its checks"
