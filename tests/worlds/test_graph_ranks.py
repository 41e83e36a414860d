"""Two ranks capture, replay, release and fail together, and each knows what the others do."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron.errors import CaptureError, SpeedWarning, UnsupportedError
from lightning_megatron.graphs.agreement import KeyAgreement, failure_of_any
from lightning_megatron.groups.collectives import all_reduce_, is_true_anywhere
from lightning_megatron.groups.generators import GeneratorPool
from lightning_megatron.groups.journal import DeviceCounter, DeviceProgress
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.pending import start_all_reduce, start_transfers
from lightning_megatron.plan.cuda_graphs import CudaGraphs
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.strategy.process.rank_status import RankStatus, hang_report
from tests.graphs.test_tape import captured
from tests.graphs.test_update_graph import Parameters, graph_of, run
from tests.graphs.trained import observers_of
from tests.optimizer.runs import Run
from tests.strategy.test_run_graphs import make_graphs, run_steps
from tests.tape import TapeBackend
from tests.world import run_world


def exchange(mesh: ParallelMesh, rank: int) -> None:
    """Check that replays repeat collectives and that captures refuse unsupported ones."""
    backend, x = TapeBackend(mesh.launcher), torch.ones(2)
    with pytest.raises(UnsupportedError, match="1 are in flight"):
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


def check_agreement(mesh: ParallelMesh, rank: int) -> None:
    world, keys = mesh.world_cpu, KeyAgreement(mesh.world_cpu)
    settings = CudaGraphs("segments")
    failure = f"layers 4..5, slot {rank}: RuntimeError: no memory"
    assert failure_of_any(None, world, settings) is None
    last, both = (
        failure_of_any(one, world, settings) for one in (failure if rank else None, failure)
    )
    assert last == "rank 1 could not capture layers 4..5, slot 1: RuntimeError: no memory."
    assert both == (
        "rank 0 could not capture layers 4..5, slot 0: RuntimeError: no memory. Ranks that failed, "
        "too: 1."
    )
    assert is_true_anywhere(rank == 1, world)
    assert not is_true_anywhere(False, world)
    assert keys.agree([("tokens", (4, 8))] * 2)
    assert not keys.agree([("tokens", (4, 8 + rank))])
    assert not keys.agree([("tokens", (4, 8))] * (1 + rank))


def check_updates(mesh: ParallelMesh, rank: int) -> None:
    """All ranks capture, replay and fail together."""
    parameters = Parameters(mesh)
    graph = graph_of(parameters)
    before = mesh.journal.counts.get("world", 0)
    assert run(graph, parameters, 4) == [True, True, True, False]
    if rank == 1:
        parameters.value = parameters.value.clone()
    # The rank without a change waits for the other rank, and both capture.
    assert run(graph, parameters, 5) == [True, True, True, False, False]
    assert parameters.value.tolist() == [2.0 * 45] * 3
    assert mesh.journal.counts["world"] - before == 9
    failing, messages = Parameters(mesh, fails=rank == 1), list[str]()
    assert all(run(graph_of(failing, messages), failing, 4))
    assert failing.value.tolist() == [2.0 * 10] * 3
    (said,) = messages
    assert "rank 1 could not capture the update" in said
    strict = Parameters(mesh, fails=rank == 1)
    graph = graph_of(strict, on_failure="error")
    run(graph, strict, 2)
    with pytest.raises(CaptureError, match="rank 1 could not capture the update of the param"):
        run(graph, strict)


def check_captures(mesh: ParallelMesh, rank: int) -> None:
    """All ranks capture and release at the same steps."""
    graphs, captures, module = make_graphs(mesh=mesh)
    run_steps(graphs, captures, 3)
    if rank == 1:
        module.weight.data = module.weight.data.clone()
    assert run_steps(graphs, captures, 2, epoch=1) == [False, True]
    if rank == 0:
        captures.failure = "layers 0..1, forward: RuntimeError: no"
    graphs.recheck()
    module.bias.requires_grad_(False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_steps(graphs, captures, 2, epoch=1)
    assert graphs.is_off
    assert captures.calls == ["begin", "release", "begin", "close"]
    texts = [str(warning.message) for warning in caught if warning.category is SpeedWarning]
    assert rank or any("rank 0 could not capture layers 0..1" in text for text in texts)
    graphs, captures, _ = make_graphs(mesh=mesh, joins=True)
    run_steps(graphs, captures, 2)
    assert run_steps(graphs, captures, shapes=(4, 8)) == [True]
    assert run_steps(graphs, captures, shapes=(4, 8 + rank)) == [False]


def check_hang_report(rank: int, size: int) -> None:
    """The report names the last part of a device whose second collective in a graph never starts."""
    mesh = ParallelMesh.create(ParallelLayout(size, tp=2))
    journal = mesh.journal
    journal.device = DeviceCounter(torch.device("cpu"))
    observers = observers_of(Run({"weight": nn.Parameter(torch.zeros(1))}, mesh))
    value, has_stopped = torch.ones(2), False

    def step() -> Tensor:
        for number in range(3):
            journal.begin_part(f"F of microbatch {number} in chunk 0")
            if number == 1:
                mesh.launcher.run(fail)
            all_reduce_(value, mesh.tp)
        return value

    def fail() -> None:
        if has_stopped:
            raise InterruptedError

    with observers.recording("the whole step", GeneratorPool(torch.device("cpu"))) as recorded:
        graph, _ = captured(step, TapeBackend(mesh.launcher))
    effects = recorded()
    with observers.repeat(effects):
        graph.replay()
    assert journal.device.progress == DeviceProgress(3, 3, "F of microbatch 2 in chunk 0")
    has_stopped = True
    with pytest.raises(InterruptedError), observers.repeat(effects):
        graph.replay()
    status = RankStatus.observe(rank, 1, "train, global_step 5", journal)
    assert RankStatus.from_text(status.to_text()) == status
    assert status.device == DeviceProgress(5, 6, "F of microbatch 1 in chunk 0")
    text = hang_report({rank: status}, [rank], {})
    assert "has begun 5 of 6 captured parts, last F of microbatch 1 in chunk 0" in text
    mesh.destroy()


def run_all(rank: int, size: int) -> None:
    mesh = ParallelMesh.create(ParallelLayout(size))
    for check in (check_agreement, exchange, check_updates, check_captures):
        check(mesh, rank)
    mesh.destroy()
    check_hang_report(rank, size)


def test_all_ranks_agree_capture_replay_release_and_fail_together() -> None:
    run_world(run_all, 2)
