"""Updated parameters are whole when they are read, whoever reads them."""

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


def test_what_no_module_waits_for_is_whole_when_publishing_returns() -> None:
    for seen in run_world(_publish_late, 2):
        assert seen == {"waiting": 1.0, "outside": 1.0}


def _publish_late(rank: int, size: int) -> dict[str, float]:
    mesh = ParallelMesh.create(ParallelLayout(size), device="cpu")
    waiting, outside = nn.Linear(2, 3, bias=False), nn.Linear(2, 3, bias=False)
    named = {"outside.weight": outside.weight, "waiting.weight": waiting.weight}
    main = MainParameters(named, mesh, DistributedOptimizerConfig(bucket_size=6))
    main.attach(torch.optim.SGD(named.values(), lr=0.1))
    main.gather.wait_before([waiting], main.buffers)
    with torch.no_grad():
        for one in main.slices.values():
            one.main.fill_(1.0)
    # The parts of the last rank come late; who does not wait for them sees old values.
    time.sleep(0.5 * rank)
    main.publish(wait=False)
    least = {"outside": float(outside.weight.min())}
    waiting(torch.zeros(1, 2))
    least["waiting"] = float(waiting.weight.min())
    main.wait()
    return least


def test_a_replay_that_runs_no_hooks_waits_for_the_parameters_that_it_reads() -> None:
    for seen in run_world(_wait_for, 2):
        assert seen == {"read": 1.0, "pending before": 2, "pending after": 1, "frozen": 1}


def _wait_for(rank: int, size: int) -> dict[str, float]:
    mesh = ParallelMesh.create(ParallelLayout(size), device="cpu")
    read, other = nn.Linear(2, 3, bias=False), nn.Linear(2, 3, bias=False)
    frozen = nn.Parameter(torch.ones(1), requires_grad=False)
    named = {"read.weight": read.weight, "other.weight": other.weight, "frozen": frozen}
    main = MainParameters(named, mesh, DistributedOptimizerConfig(bucket_size=6))
    main.attach(torch.optim.SGD([read.weight, other.weight], lr=0.1))
    main.gather.wait_before([read, other], main.buffers)
    with torch.no_grad():
        for one in main.slices.values():
            one.main.fill_(1.0)
    # The parts of the last rank come late; who does not wait for them sees old values.
    time.sleep(0.5 * rank)
    main.publish(wait=False)
    found: dict[str, float] = {"pending before": len(main.gather._pending)}
    # The forward pass of the module does not run, and its hooks neither.
    main.gather.wait_for([read.weight])
    found |= {"read": float(read.weight.min()), "pending after": len(main.gather._pending)}
    main.gather.wait_for([frozen])
    found["frozen"] = len(main.gather._pending)
    main.wait()
    return found


def test_deferred_gathers_start_with_the_first_reader_and_a_recording_leaves_them() -> None:
    for seen in run_world(_defer, 2):
        assert seen == {
            "deferred": (True, 0),
            "recorded": (True, True, 0),
            "read": (False, 1.0, 2),
            "nothing is trained": True,
            "nothing is divided": False,
        }


def _defer(rank: int, size: int) -> dict[str, Any]:
    mesh = ParallelMesh.create(ParallelLayout(size), device="cpu")
    read, other = nn.Linear(2, 3, bias=False), nn.Linear(2, 3, bias=False)
    named = {"read.weight": read.weight, "other.weight": other.weight}
    main = MainParameters(named, mesh, DistributedOptimizerConfig(bucket_size=6))
    main.attach(torch.optim.SGD(named.values(), lr=0.1))
    gather = main.gather
    gather.wait_before([read, other], main.buffers)
    gather.defers = True
    with torch.no_grad():
        for one in main.slices.values():
            one.main.fill_(1.0)
    before = sum(mesh.journal.counts.values())

    def started() -> int:
        return sum(mesh.journal.counts.values()) - before

    main.publish(wait=False)
    found: dict[str, Any] = {"deferred": (gather.is_deferred, started())}
    # What runs on the tape of a graph is undone after the capture.
    launcher = TapeBackend(mesh.launcher)
    with mesh.journal.recording(), gather.recording() as recorded:
        launcher.capture(main.wait, launcher.make_pool())
    found["recorded"] = recorded.gathers, gather.is_deferred, started()
    read(torch.zeros(1, 2))
    found["read"] = gather.is_deferred, float(read.weight.min()), started()
    main.wait()
    others = {
        "trained": DistributedOptimizerConfig(),
        "divided": DistributedOptimizerConfig(zero=0),
    }
    for name, config in others.items():
        main = MainParameters({}, mesh, config)
        main.gather.defers = True
        main.publish(wait=False)
        found[f"nothing is {name}"] = main.gather.is_deferred
    return found


def test_gathers_start_in_one_order_as_soon_as_their_parameters_are_updated() -> None:
    for seen in run_world(_update, 2):
        assert seen == {
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

    def started(from_: int) -> int:
        return sum(mesh.journal.counts.values()) - from_

    found: dict[str, Any] = {}
    before = started(0)
    main.gather.start_during_update(main.buffers, mesh, set(named))
    with torch.no_grad():
        for name, number in {"second": 1, "first": 0}.items():
            layers[number].weight.fill_(1.0)
            main.gather.mark_updated([f"{number}.weight"])
            # The second bucket waits for the first one, as on all ranks.
            found[name] = started(before)
        layers[2].weight.fill_(1.0)
    main.publish(wait=False, stored=True)
    found["published"] = started(before)
    main.wait()
    found["whole"] = [float(layer.weight.detach().min()) for layer in layers]
    before = started(0)
    main.publish()
    found["again"] = started(before)
    main.gather.defers = True
    before = started(0)
    main.gather.start_during_update(main.buffers, mesh, set(named))
    main.gather.mark_updated(list(named))
    main.publish(wait=False, stored=True)
    found["deferred"] = started(before)
    main.wait()
    return found


def test_buckets_of_several_buffers_are_gathered_in_the_order_of_use() -> None:
    for found in run_world(_order_of_use, 2):
        assert found == [f"{number}.weight" for number in range(4)]


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
