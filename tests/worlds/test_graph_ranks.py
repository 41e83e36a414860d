"""Two ranks capture, replay, release and fail together, and each knows what the others do."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron.errors import CaptureError, SpeedWarning, UnsupportedError
from lightning_megatron.graphs.agreement import KeyAgreement, failure_of_any, is_true_anywhere
from lightning_megatron.graphs.effects import EffectObservers
from lightning_megatron.graphs.tape import TapeBackend
from lightning_megatron.groups.collectives import all_reduce_
from lightning_megatron.groups.device_counter import DeviceCounter, DeviceProgress
from lightning_megatron.groups.generators import GeneratorPool
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.p2p import start_transfers
from lightning_megatron.groups.pending import start_all_reduce
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.plan.experts import ExpertsConfig
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.strategy.process.rank_status import RankStatus, hang_report
from tests.graphs.steps import SIZES, Step
from tests.graphs.test_tape import captured
from tests.graphs.test_update_graph import Parameters, graph_of, run
from tests.strategy.test_run_graphs import make_graphs, run_steps
from tests.world import run_world

DROPOUT = GPTConfig.gpt2(**SIZES, hidden_dropout=0.2, attention_dropout=0.3)
EXPERTS = GPTConfig.llama(
    **SIZES,
    num_kv_heads=2,
    ffn_hidden_size=24,
    experts=ExpertsConfig(num_experts=4, top_k=2, ffn_hidden_size=16, shared_ffn_hidden_size=8),
)
FAILED = "layers 4..5, backward, slot {}: RuntimeError: no memory"


def agree(mesh: ParallelMesh, rank: int) -> dict[str, Any]:
    world = mesh.world_cpu
    keys = KeyAgreement(world)
    return {
        "none": failure_of_any(None, world),
        "last": failure_of_any(FAILED.format(rank) if rank else None, world),
        "both": failure_of_any(FAILED.format(rank), world),
        "anywhere": is_true_anywhere(rank == 1, world),
        "nowhere": is_true_anywhere(False, world),
        "same": keys.agree([("tokens", (4, 8))] * 2),
        "other shape": keys.agree([("tokens", (4, 8 + rank))]),
        "other number": keys.agree([("tokens", (4, 8))] * (1 + rank)),
    }


def exchange(mesh: ParallelMesh, rank: int) -> None:
    """Check that replays repeat collectives and that captures refuse unsupported ones."""
    backend, x = TapeBackend(mesh.launcher), torch.ones(2)
    with pytest.raises(UnsupportedError, match="it left 1 in flight"):
        captured(lambda: start_all_reduce(x, mesh.dp), backend)
    with pytest.raises(UnsupportedError, match="it called c10d.allreduce_"):
        captured(lambda: torch.distributed.all_reduce(x), backend)

    def step() -> tuple[Tensor, Tensor]:
        received = torch.empty(2)
        sent = x * 3
        transfers = start_transfers([(sent, 1 - rank)], [(received, 1 - rank)], mesh.dp)
        reduction = start_all_reduce(x, mesh.dp, "mean")
        assert not transfers.is_done(), "a recording cannot know the state of transfers"
        square = sent.square()
        transfers.wait()
        reduction.wait()
        return all_reduce_(square, mesh.dp), received

    graph, (square, received) = captured(step, backend)
    assert torch.equal(x, torch.ones(2)), "captures leave the input unchanged"
    for number in (1.0, 2.0):
        x.fill_(number + rank)
        graph.replay()
        assert torch.equal(received, torch.full((2,), 3 * (number + 1 - rank)))
        assert torch.equal(square, torch.full((2,), 9 * (number**2 + (number + 1) ** 2)))
        assert torch.equal(x, torch.full((2,), number + 0.5))


def replay_models(size: int) -> None:
    """Check captured steps of models over tp and over ep against eager steps."""
    mesh = ParallelMesh.create(ParallelLayout(size, tp=size), sequence_parallel=True)
    Step(DROPOUT, mesh).assert_replays_equal_eager(TapeBackend(mesh.launcher), "tp2")
    mesh.destroy()
    mesh = ParallelMesh.create(ParallelLayout(size, ep=size))
    backend = TapeBackend(mesh.launcher)
    for transport in ("all_gather", "one_sided"):
        step = Step(EXPERTS, mesh, transport)  # type: ignore[arg-type]
        with pytest.raises(UnsupportedError, match=r"Tensor.tolist"):
            step.captured(backend)
        # Ranks compare their numbers of tokens outside of captures.
        step.model._check_tokens = lambda num_tokens: None  # type: ignore[method-assign]
        step.assert_replays_equal_eager(backend, f"ep2 by {transport}")
    with pytest.raises(UnsupportedError, match=r"Tensor.tolist"):
        Step(EXPERTS, mesh, "all_to_all").captured(backend)
    mesh.destroy()


def update(mesh: ParallelMesh, rank: int) -> dict[str, Any]:
    outcomes: dict[str, Any] = {}
    parameters = Parameters(mesh)
    graph = graph_of(parameters)
    before = mesh.journal.counts.get("world", 0)
    outcomes["first"] = run(graph, parameters, 4)
    if rank == 1:
        parameters.value = parameters.value.clone()
    # The rank without a change waits for the other rank, and both capture.
    outcomes["changed"] = run(graph, parameters, 5)
    outcomes["value"] = parameters.value.tolist()
    outcomes["count"] = mesh.journal.counts["world"] - before
    failing = Parameters(mesh, fails=rank == 1)
    messages: list[str] = []
    graph = graph_of(failing, messages)
    outcomes["failed"] = run(graph, failing, 4)
    outcomes["failed value"] = failing.value.tolist()
    outcomes["said"] = messages
    strict = Parameters(mesh, fails=rank == 1)
    graph = graph_of(strict, on_failure="error")
    run(graph, strict, 2)
    with pytest.raises(CaptureError, match="rank 1 could not capture the update of the param"):
        run(graph, strict)
    return outcomes


def capture_and_release(mesh: ParallelMesh, rank: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    graphs, captures, module = make_graphs(mesh=mesh)
    run_steps(graphs, captures, 3)
    if rank == 1:
        module.weight.data = module.weight.data.clone()
    results["moved on one"] = run_steps(graphs, captures, 2, epoch=1)
    if rank == 0:
        captures.failure = "layers 0..1, forward: RuntimeError: no"
    graphs.recheck()
    module.bias.requires_grad_(False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_steps(graphs, captures, 2, epoch=1)
    results["off"] = graphs.is_off
    results["calls"] = captures.calls
    # Rank 0 alone warns.
    texts = [str(warning.message) for warning in caught if warning.category is SpeedWarning]
    named = any("rank 0 could not capture layers 0..1" in text for text in texts)
    results["warned"] = named or rank == 1
    graphs, captures, _ = make_graphs(mesh=mesh, joins=True)
    run_steps(graphs, captures, 2)
    results["same shapes"] = run_steps(graphs, captures, shapes=(4, 8))
    results["other shapes"] = run_steps(graphs, captures, shapes=(4, 8 + rank))
    return results


class Stop(RuntimeError):
    """The device stops."""


def stop(rank: int, size: int) -> tuple[str, RankStatus]:
    """Return the report and status of a device whose second collective in a graph never starts."""
    mesh = ParallelMesh.create(ParallelLayout(size, tp=2))
    journal = mesh.journal
    journal.device = DeviceCounter(torch.device("cpu"))
    observers = EffectObservers(mesh.random, journal)
    value = torch.ones(2)
    has_stopped = False

    def step() -> Tensor:
        for number in range(3):
            journal.begin_part(f"F of microbatch {number} in chunk 0")
            if number == 1:
                mesh.launcher.run(fail)
            all_reduce_(value, mesh.tp)
        return value

    def fail() -> None:
        if has_stopped:
            raise Stop

    with observers.recording("the whole step", GeneratorPool(torch.device("cpu"))) as recorder:
        graph, _ = captured(step, TapeBackend(mesh.launcher))
    effects = recorder.effects
    with observers.repeat(effects):
        graph.replay()
    assert journal.device.progress == DeviceProgress(3, 3, "F of microbatch 2 in chunk 0")
    has_stopped = True
    with pytest.raises(Stop), observers.repeat(effects):
        graph.replay()
    status = RankStatus.observe(rank, 1, "train, global_step 5", journal)
    assert RankStatus.from_text(status.to_text()) == status
    mesh.destroy()
    return hang_report({rank: status}, [rank], {}), status


def world_of_two(rank: int, size: int) -> dict[str, Any]:
    mesh = ParallelMesh.create(ParallelLayout(size))
    results: dict[str, Any] = {"agreement": agree(mesh, rank)}
    exchange(mesh, rank)
    results["update"] = update(mesh, rank)
    results["captures"] = capture_and_release(mesh, rank)
    mesh.destroy()
    results["stopped"] = stop(rank, size)
    torch.set_default_dtype(torch.float64)
    replay_models(size)
    return results


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    """Run all checks; those of collectives and models fail inside."""
    return run_world(world_of_two, 2)


def test_all_ranks_agree_on_failures_and_shapes(ranks: Any) -> None:
    assert [results["agreement"] for results in ranks] == [
        {
            "none": None,
            "last": f"rank 1 could not capture {FAILED.format(1)}.",
            "both": f"rank 0 could not capture {FAILED.format(0)}. Ranks that failed, too: 1.",
            "anywhere": True,
            "nowhere": False,
            "same": True,
            "other shape": False,
            "other number": False,
        }
    ] * 2


def test_all_ranks_capture_replay_and_fail_together_in_updates(ranks: Any) -> None:
    for results in ranks:
        outcomes = results["update"]
        assert outcomes["first"] == [True, True, True, False]
        assert outcomes["changed"] == [True, True, True, False, False]
        assert outcomes["value"] == [2.0 * 45] * 3
        assert outcomes["count"] == 9
        assert all(outcomes["failed"])
        assert outcomes["failed value"] == [2.0 * 10] * 3
        (said,) = outcomes["said"]
        assert "rank 1 could not capture the update" in said


def test_all_ranks_capture_and_release_at_the_same_steps(ranks: Any) -> None:
    for results in ranks:
        assert results["captures"] == {
            "moved on one": [False, True],
            "off": True,
            "calls": ["begin", "release", "begin", "close"],
            "warned": True,
            "same shapes": [True],
            "other shapes": [False],
        }


def test_a_hang_report_names_the_last_part_of_a_stopped_device(ranks: Any) -> None:
    for results in ranks:
        text, status = results["stopped"]
        assert status.device == DeviceProgress(5, 6, "F of microbatch 1 in chunk 0")
        assert (
            "the device has begun 5 of 6 captured parts, last F of microbatch 1 in chunk 0" in text
        )
