"""Mixtures of experts on every grid of four ranks equal one process with all experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron.errors import RankMismatchError
from lightning_megatron.experts.compute.grouped_mlp import GroupedMLP
from lightning_megatron.experts.layer import MixtureOfExperts
from lightning_megatron.experts.routing.attached_loss import attach_loss
from lightning_megatron.experts.routing.router import Routing
from lightning_megatron.experts.routing.statistics import RouterStatistics, step_statistics
from lightning_megatron.experts.transport.choose_transport import choose_transport
from lightning_megatron.experts.transport.dispatchers import check_equal_counts
from lightning_megatron.experts.transport.rank_rows import RankRows, gather_rows
from lightning_megatron.groups import in_flight
from lightning_megatron.groups.collectives import all_gather_objects, all_reduce_
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import shard_spec_of
from lightning_megatron.layers.parameters.init import initialize_
from lightning_megatron.plan.expert_clones import ExpertClones
from lightning_megatron.plan.experts import ExpertsConfig, Transport
from lightning_megatron.plan.layout import ParallelLayout
from tests.experts.dense import Routed, dense, draw, route
from tests.experts.layers import SETTINGS, S, layer_of, run
from tests.experts.routed_by_hand import SETTINGS as ROUTERS
from tests.experts.routed_by_hand import B as BATCH
from tests.experts.routed_by_hand import D as WIDTH
from tests.experts.routed_by_hand import S as LENGTH
from tests.experts.routed_by_hand import config_of, gradients, losses_of, router_of
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
#: Settings, sequence parallelism, transport, length (no multiple of tp is padded) and places for clones.
LAYERS = [
    *((name, False, "auto", S, 0) for name in SETTINGS),
    *(("plain", False, transport, S, 0) for transport in ("all_to_all", "one_sided")),
    ("plain", False, "auto", S, 1),
    ("capacity", False, "one_sided", S, 2),
    ("shared", False, "one_sided", S, 2),
    *(("one choice", False, transport, S, 0) for transport in ("one_sided", "all_gather")),
    *((name, True, "auto", S, 0) for name in ("plain", "shared", "experts with biases")),
    ("plain", True, "one_sided", S, 1),
    ("plain", True, "all_to_all", S, 0),
    ("plain", False, "all_gather", 5, 0),
    ("capacity", False, "one_sided", 5, 0),
    ("shared", False, "all_to_all", 3, 0),
]
#: Layout, transport, routing and numbers of tokens of dispatchers.
DISPATCHES: list[tuple[dict[str, int], Transport, str, str]] = [
    ({"ep": 2}, "all_gather", "dropped", "some"),
    ({"ep": 2}, "all_to_all", "some without tokens", "different"),
    ({"ep": 4}, "all_gather", "every expert", "some"),
    ({"ep": 4}, "all_to_all", "all to one", "some"),
    ({"ep": 4}, "all_to_all", "random", "none"),
    ({"ep": 4}, "one_sided", "some without tokens", "some"),
    *(
        ({"ep": ep}, kind, "one expert", "some")
        for ep, kind in ((2, "one_sided"), (4, "all_gather"), (4, "one_sided"))
    ),
    ({"ep": 2, "etp": 2}, "all_gather", "random", "none"),
    ({"ep": 2, "etp": 2}, "one_sided", "every expert", "some"),
]


def run_all(rank: int, size: int) -> None:
    check_dispatches(size)
    check_grids(size)
    check_counted_rows(size)
    check_routers(size)
    mesh = ParallelMesh.create(ParallelLayout(size, ep=2))
    check_unequal_counts(mesh)
    check_overlap(mesh)
    mesh.destroy()


def test_layers_dispatchers_and_routers_equal_those_of_one_process() -> None:
    run_world(run_all, 4)


# Layers.


def check_grids(size: int) -> None:
    for grid, options in GRIDS.items():
        layout = ParallelLayout(size, **options)
        for sequence_parallel in (False, True)[: 1 + (layout.tp > 1)]:
            mesh = ParallelMesh.create(layout, sequence_parallel=sequence_parallel)
            for name, needs_sp, transport, length, places in LAYERS:
                is_legal = (length == S or layout.tp > 1) and (places == 0 or layout.ep > 1)
                if needs_sp == sequence_parallel and is_legal:
                    what = f"{grid}, {name}, sp {needs_sp}, {transport}, {length}, places {places}"
                    check_layer(mesh, name, transport, length, places, what)
            mesh.destroy()


def check_layer(
    mesh: ParallelMesh, name: str, transport: str, length: int, places: int, what: str
) -> None:
    """Compare outputs and gradients with those of one process with the tokens of all data ranks."""
    options = {"transport": transport, "clones": ExpertClones(places) if places else None}
    layer, twin = layer_of(mesh, options, **SETTINGS[name]), layer_of(**SETTINGS[name])
    layer.recomputes_experts = places == 1
    # Each data rank has a microbatch of one sequence.
    inputs, output_gradients = (
        [draw(kind, name, number, shape=(length, 1, SIZE)) for number in range(mesh.dp.size)]
        for kind in ("hidden", "outer")
    )
    results = [run(twin, *pair) for pair in zip(inputs, output_gradients, strict=True)]
    given, expected = (inputs[mesh.dp.rank], output_gradients[mesh.dp.rank]), results[mesh.dp.rank]
    if mesh.sequence_parallel:
        given, expected = (
            tuple(tensor.chunk(mesh.tp.size)[mesh.tp.rank] for tensor in tensors)
            for tensors in (given, expected)
        )
    found = run(layer, *given)
    # A layer that sends the inputs of experts again has the same bits.
    again = layer_of(mesh, options, **SETTINGS[name])
    again.sends_inputs_again = True
    assert all(map(torch.equal, run(again, *given), found)), what
    for kind, actual, wanted in zip(("output", "input gradient"), found, expected, strict=True):
        assert_equal(actual, wanted, f"{what}: {kind}")
    gradients = {key: parameter.grad for key, parameter in twin.named_parameters()}
    for (key, parameter), copy in zip(layer.named_parameters(), again.parameters(), strict=True):
        assert parameter.grad is not None, f"{what}: {key}"
        assert torch.equal(parameter.grad, copy.grad), f"{what}: {key}"
        spec, total = shard_spec_of(parameter, mesh.tp.rank), parameter.grad.clone()
        if spec.partial:
            all_reduce_(total, mesh.tp)
        all_reduce_(total, mesh.replica_axis(spec.is_expert))
        assert_equal(total, spec.shard(gradients[key]), f"{what}: gradient of {key}")


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


def routed_tokens(case: str, tokens: str, rank: int) -> Routed:
    return route(case, COUNTS[tokens](rank), SIZE, NUM_EXPERTS, rank)


def tensors_of(output: Tensor, routed: Routed) -> dict[str, Tensor]:
    (output * routed.outer).sum().backward()
    leaves = {"hidden": routed.hidden, "probabilities": routed.probabilities}
    return {"output": output.detach()} | {key: gradient_of(leaf) for key, leaf in leaves.items()}


def gradient_of(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def check_dispatch(transport: Transport, case: str, tokens: str, mesh: ParallelMesh) -> None:
    """Compare with all experts and all tokens of the expert grid of this rank."""
    grid = next(ranks for ranks in mesh.layout.expert_groups("etp-ep") if mesh.rank in ranks)
    all_experts, module = build_experts(ParallelMesh.single()), build_experts(mesh)
    weights = list(zip(all_experts.weights("gate_up"), all_experts.weights("down"), strict=True))
    expected: dict[str, Tensor] = {}
    for rank in grid:
        routed = routed_tokens(case, tokens, rank)
        tensors = tensors_of(dense(routed, weights, "swiglu"), routed)
        expected = tensors if rank == mesh.rank else expected
    routed = routed_tokens(case, tokens, mesh.rank)
    dispatcher = choose_transport(NUM_EXPERTS, routed.experts.shape[1], mesh, transport).dispatcher
    prepared = dispatcher.prepare(routed.hidden, routed.probabilities, routed.experts)
    received = dispatcher.receive(dispatcher.send(prepared))
    outputs = module(received.rows, received.probabilities, received.ends)
    actual = tensors_of(dispatcher.combine(dispatcher.send_back(outputs, received)), routed)
    twins = dict(all_experts.named_parameters())
    for key, parameter in module.named_parameters():
        actual[key] = gradient_of(parameter)
        expected[key] = shard_spec_of(parameter).shard(gradient_of(twins[key]))
    for key, tensor in actual.items():
        assert_equal(tensor, expected[key], f"{transport}, {case}, {tokens}: {key}")


def check_dispatches(size: int) -> None:
    torch.use_deterministic_algorithms(True)  # fills uninitialized memory with NaN
    for sizes, transport, case, tokens in DISPATCHES:
        mesh = ParallelMesh.create(ParallelLayout(size, **sizes))
        check_dispatch(transport, case, tokens, mesh)
        mesh.destroy()
    torch.use_deterministic_algorithms(False)


def check_unequal_counts(mesh: ParallelMesh) -> None:
    """Ranks that gather each other's tokens must have equally many; all of them say so."""
    message = "must have equally many tokens in a microbatch: this rank has [45]"
    check_equal_counts(4, mesh)
    with pytest.raises(RankMismatchError, match=message):
        check_equal_counts(4 + mesh.ep.rank, mesh)


def check_overlap(mesh: ParallelMesh) -> None:
    """The shared expert runs during the transport of tokens, forward and backward."""
    for transport, dispatch, combine in (
        ("all_gather", "all_gather", "reduce_scatter"),
        ("all_to_all", "all_to_all", "all_to_all"),
    ):
        layer = layer_of(mesh, {"transport": transport}, shared_ffn_hidden_size=8)
        events: list[str] = []
        layer.shared.register_forward_hook(lambda *_, events=events: events.append("shared"))
        layer.shared.register_full_backward_hook(lambda *_, events=events: events.append("shared"))
        with pytest.MonkeyPatch.context() as patch:
            record_starts(patch, in_flight, ("all_gather", "reduce_scatter", "all_to_all"), events)
            output = layer(draw("beside", shape=(S, 1, SIZE)).requires_grad_())
            num_forward = len(events)
            output.sum().backward()
        for name, found in ((dispatch, events[:num_forward]), (combine, events[num_forward:])):
            found = [event for event in found if event == "shared" or event.startswith(name)]
            at = found.index("shared")
            assert set(found[:at]) == {f"{name} starts"}, (transport, found)
            assert found[at + 1] == f"{name} ends", (transport, found)


# Counted rows of ranks.

ROW_CONFIG = ExpertsConfig(num_experts=8, top_k=3, ffn_hidden_size=8, capacity_factor=1.5)


def count_rows(mesh: ParallelMesh, clones: ExpertClones | None) -> RankRows:
    """Train on microbatches, and return the counted rows of a layer."""
    layer = MixtureOfExperts(SIZE, ROW_CONFIG, mesh, transport="one_sided", clones=clones).double()
    weight = torch.randn(8, SIZE, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    # Larger scores of the first experts make the first rank the busiest.
    weight[:2] += 0.5
    layer.router.weight.data = weight
    layer.rank_rows.is_on = True
    for microbatch in range(3):
        generator = torch.Generator().manual_seed(10 * mesh.dp.rank + microbatch)
        hidden = torch.randn(8, 2, SIZE, generator=generator, dtype=torch.float64) + 0.5
        layer.train(microbatch != 1)
        layer(hidden)
    return layer.rank_rows


def check_counted_rows(size: int) -> None:
    """Clones even out the rows of ranks, and every rank counts them alike."""
    for sizes in ({"ep": 2}, {"tp": 2, "ep": 2, "etp": 2}, {"tp": 2, "ep": 4, "etp": 1}):
        mesh = ParallelMesh.create(ParallelLayout(size, **sizes))
        (plain,), (cloned,) = (
            gather_rows({5: count_rows(mesh, clones).sums}, mesh).values()
            for clones in (None, ExpertClones(2, min_rows=2))
        )
        assert plain.before.tolist() == plain.after.tolist() == cloned.before.tolist(), sizes
        # Two of three microbatches train, on every replica.
        assert plain.num_microbatches == cloned.num_microbatches == 2 * mesh.edp.size, sizes
        assert int(cloned.after.sum()) == int(cloned.before.sum()), sizes
        assert int(cloned.after.max()) < int(cloned.before.max()), sizes
        assert (float(plain.moved), float(plain.clones)) == (0, 0), sizes
        assert float(cloned.moved) > 0.05, sizes
        assert int(plain.needed) > int(cloned.needed), sizes
        figures = [[value.tolist() for value in vars(step).values()] for step in (plain, cloned)]
        assert all_gather_objects(figures, mesh.world_cpu) == [figures] * size, sizes
        mesh.destroy()


# Routers.


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
    (step,), (expected_step,) = (
        step_of(given, of_mesh, config).values()
        for given, of_mesh in ((routing, mesh), (expected, ParallelMesh.single()))
    )
    assert torch.equal(step.load, expected_step.load * mesh.dp.size), case_name
    for field in ("entropy", "balance_loss", "z_loss"):
        value = getattr(step, field)
        assert_equal(value, getattr(expected_step, field), f"{case_name}: {field}")


def step_of(routing: Routing, mesh: ParallelMesh, config: ExpertsConfig) -> Any:
    """Return the statistics of a step of one microbatch."""
    statistics = RouterStatistics(config, mesh.device)
    statistics.add_(routing)
    return step_statistics({1: statistics}, mesh)


def check_routers(size: int) -> None:
    for sizes, shares in (({"tp": 2}, False), ({"tp": 2}, True), ({"cp": 2}, False)):
        layout = ParallelLayout(size, **sizes)
        mesh = ParallelMesh.create(layout, seed=3, sequence_parallel=shares)
        for name, settings in WORLD_SETTINGS.items():
            config = config_of(**settings)
            # Capacity and random numbers depend on the cp rank.
            if mesh.cp.size == 1 or not (config.capacity_factor or config.jitter):
                compare_with_one_process(config, mesh, f"{name}, {sizes}, sp {shares}")
        mesh.destroy()
