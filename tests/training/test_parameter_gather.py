"""Updated parameters are fully gathered before any module, graph replay or user reads them."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

from lightning_megatron.graphs.tape import TapeBackend
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.training import DistributedOptimizerConfig, MainParameters
from tests.world import run_world


def test_parameters_without_a_waiting_module_are_gathered_when_publish_returns() -> None:
    for minima in run_world(_publish_late, 2):
        assert minima == {"waiting": 1.0, "outside": 1.0}


def _publish_late(rank: int, size: int) -> dict[str, float]:
    mesh = ParallelMesh.create(ParallelLayout(size), device="cpu")
    waiting, outside = nn.Linear(2, 3, bias=False), nn.Linear(2, 3, bias=False)
    named = {"outside.weight": outside.weight, "waiting.weight": waiting.weight}
    main = MainParameters(named, mesh, DistributedOptimizerConfig(bucket_size=6))
    main.attach(torch.optim.SGD(named.values(), lr=0.1))
    main.gather.wait_before([waiting], main.buffers)
    with torch.no_grad():
        for main_slice in main.slices.values():
            main_slice.main.fill_(1.0)
    # The parts of the last rank come late; a reader that does not wait for them sees old values.
    time.sleep(0.5 * rank)
    main.publish(wait=False)
    minima = {"outside": float(outside.weight.min())}
    waiting(torch.zeros(1, 2))
    minima["waiting"] = float(waiting.weight.min())
    main.wait()
    return minima


def test_wait_for_finishes_only_the_gathers_of_the_named_parameters() -> None:
    for outcome in run_world(_wait_for, 2):
        assert outcome == {"read": 1.0, "pending before": 2, "pending after": 1, "frozen": 1}


def _wait_for(rank: int, size: int) -> dict[str, float]:
    mesh = ParallelMesh.create(ParallelLayout(size), device="cpu")
    read, unread = nn.Linear(2, 3, bias=False), nn.Linear(2, 3, bias=False)
    frozen = nn.Parameter(torch.ones(1), requires_grad=False)
    named = {"read.weight": read.weight, "other.weight": unread.weight, "frozen": frozen}
    main = MainParameters(named, mesh, DistributedOptimizerConfig(bucket_size=6))
    main.attach(torch.optim.SGD([read.weight, unread.weight], lr=0.1))
    main.gather.wait_before([read, unread], main.buffers)
    with torch.no_grad():
        for main_slice in main.slices.values():
            main_slice.main.fill_(1.0)
    # The parts of the last rank come late; a reader that does not wait for them sees old values.
    time.sleep(0.5 * rank)
    main.publish(wait=False)
    outcome: dict[str, float] = {"pending before": len(main.gather._pending)}
    # Neither the forward pass of the module nor its hooks run.
    main.gather.wait_for([read.weight])
    outcome |= {"read": float(read.weight.min()), "pending after": len(main.gather._pending)}
    main.gather.wait_for([frozen])
    outcome["frozen"] = len(main.gather._pending)
    main.wait()
    return outcome


def test_deferred_gathers_start_with_the_first_reader_and_not_in_a_recording() -> None:
    for outcome in run_world(_defer, 2):
        assert outcome == {
            "deferred": (True, 0),
            "recorded": (True, True, 0),
            "read": (False, 1.0, 2),
            "nothing is trained": True,
            "nothing is divided": False,
        }


def _defer(rank: int, size: int) -> dict[str, Any]:
    mesh = ParallelMesh.create(ParallelLayout(size), device="cpu")
    read, unread = nn.Linear(2, 3, bias=False), nn.Linear(2, 3, bias=False)
    named = {"read.weight": read.weight, "other.weight": unread.weight}
    main = MainParameters(named, mesh, DistributedOptimizerConfig(bucket_size=6))
    main.attach(torch.optim.SGD(named.values(), lr=0.1))
    gather = main.gather
    gather.wait_before([read, unread], main.buffers)
    gather.defers = True
    with torch.no_grad():
        for main_slice in main.slices.values():
            main_slice.main.fill_(1.0)
    before = sum(mesh.journal.counts.values())

    def started() -> int:
        return sum(mesh.journal.counts.values()) - before

    main.publish(wait=False)
    outcome: dict[str, Any] = {"deferred": (gather.is_deferred, started())}
    # The capture undoes everything that runs on the tape of a graph.
    launcher = TapeBackend(mesh.launcher)
    with mesh.journal.recording(), gather.recording() as recorded:
        launcher.capture(main.wait, launcher.make_pool())
    outcome["recorded"] = recorded.gathers, gather.is_deferred, started()
    read(torch.zeros(1, 2))
    outcome["read"] = gather.is_deferred, float(read.weight.min()), started()
    main.wait()
    configs = {
        "trained": DistributedOptimizerConfig(),
        "divided": DistributedOptimizerConfig(zero=0),
    }
    for name, config in configs.items():
        main = MainParameters({}, mesh, config)
        main.gather.defers = True
        main.publish(wait=False)
        outcome[f"nothing is {name}"] = main.gather.is_deferred
    return outcome


def test_gathers_start_in_a_fixed_order_once_their_parameters_are_updated() -> None:
    for outcome in run_world(_update, 2):
        assert outcome == {
            "second": 0,
            "first": 2,
            "published": 3,
            "whole": [1.0, 1.0, 1.0],
            "again": 3,
            "deferred": 0,
        }


def _update(rank: int, size: int) -> dict[str, Any]:
    mesh = ParallelMesh.create(ParallelLayout(size), device="cpu")
    # Both ranks have a part of each of the three buckets.
    layers = [nn.Linear(16, 16, bias=False) for _ in range(3)]
    named = {f"{number}.weight": layer.weight for number, layer in enumerate(layers)}
    main = MainParameters(named, mesh, DistributedOptimizerConfig(bucket_size=256))
    main.attach(torch.optim.SGD(named.values(), lr=0.1))
    main.gather.wait_before(layers, main.buffers)

    def started(offset: int) -> int:
        return sum(mesh.journal.counts.values()) - offset

    outcome: dict[str, Any] = {}
    before = started(0)
    main.gather.start_during_update(main.buffers, mesh, set(named))
    with torch.no_grad():
        for name, number in {"second": 1, "first": 0}.items():
            layers[number].weight.fill_(1.0)
            main.gather.mark_updated([f"{number}.weight"])
            # The second bucket waits for the first bucket on all ranks.
            outcome[name] = started(before)
        layers[2].weight.fill_(1.0)
    main.publish(wait=False, stored=True)
    outcome["published"] = started(before)
    main.wait()
    outcome["whole"] = [float(layer.weight.detach().min()) for layer in layers]
    before = started(0)
    main.publish()
    outcome["again"] = started(before)
    main.gather.defers = True
    before = started(0)
    main.gather.start_during_update(main.buffers, mesh, set(named))
    main.gather.mark_updated(list(named))
    main.publish(wait=False, stored=True)
    outcome["deferred"] = started(before)
    main.wait()
    return outcome


def test_buckets_of_several_buffers_are_gathered_in_the_order_of_use() -> None:
    for names in run_world(_order_of_use, 2):
        assert names == [f"{number}.weight" for number in range(4)]


def _order_of_use(rank: int, size: int) -> list[str]:
    mesh = ParallelMesh.create(ParallelLayout(size), device="cpu")
    # Each dtype has its own buffer.
    dtypes = (torch.float64, torch.float32, torch.float64, torch.float32)
    layers = [nn.Linear(16, 16, bias=False, dtype=dtype) for dtype in dtypes]
    named = {f"{number}.weight": layer.weight for number, layer in enumerate(layers)}
    main = MainParameters(named, mesh, DistributedOptimizerConfig(bucket_size=256))
    main.attach(torch.optim.SGD(named.values(), lr=0.1))
    main.gather.wait_before(layers, main.buffers)
    main.publish(wait=False)
    keys = list(main.gather._pending)
    main.wait()
    assert main.order.sorted(reversed(list(named))) == list(named)
    buckets = [main.buffers[index].plan.buckets[number] for index, number in keys]
    return [placed.name for bucket in buckets for placed in bucket.placed]
