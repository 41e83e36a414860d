"""Gradient sums start as soon as their gradients are there, and parameters are gathered before
anybody reads them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import replicated_spec, set_shard_spec
from lightning_megatron.layers.linear.linear import ColumnParallelLinear
from lightning_megatron.layers.parameters.init import initialize_
from lightning_megatron.optimizer import DistributedOptimizerConfig, MainParameters
from lightning_megatron.optimizer.gradient_buckets import GradientBucket
from lightning_megatron.plan.layout import ParallelLayout
from tests.optimizer.row_exchanges import (
    DIVISIONS,
    EXPECTED,
    KINDS,
    errors_of_sums,
    weights_after,
    weights_of_twin,
)
from tests.optimizer.runs import Run
from tests.world import run_world


def run_all(rank: int, size: int) -> dict[str, Any]:
    mesh = ParallelMesh.create(ParallelLayout(size), device="cpu")
    check_waits(mesh)
    check_gathers_during_updates(mesh)
    check_order_of_starts(mesh)
    row_exchanges = exchange_rows(mesh)
    torch.set_default_dtype(torch.float64)
    check_weight_halves(mesh)
    return row_exchanges


def test_sums_and_gathers_start_in_time_and_rows_are_exchanged_as_full_tables() -> None:
    twins = {kind: weights_of_twin(kind, 2) for kind in KINDS}
    limits = {"torch.float64": 1e-15, "torch.float32": 1e-6, "torch.bfloat16": 0.02}
    for rank, result in enumerate(run_world(run_all, 2)):
        for name, error in result.pop("sums").items():
            assert error <= limits.get(name, 0.0), (rank, name)
        for name, (weights, exchanges) in result.items():
            kind, _, _ = name.partition(", ")
            twin = twins[kind if kind in twins else "equal"]
            for key, weight in weights.items():
                torch.testing.assert_close(weight, twin[key], rtol=0, atol=1e-12, msg=name)
            assert exchanges == EXPECTED[kind](2), (rank, name)


# Parameters are gathered after an update.


class Gathered:
    """Layers whose weights of ``size`` elements are divided over two ranks, each weight a bucket of
    its own.
    """

    def __init__(self, mesh: ParallelMesh, layers: dict[str, nn.Linear], size: int = 6) -> None:
        self.mesh = mesh
        self.named = {f"{name}.weight": layer.weight for name, layer in layers.items()}
        self.main = MainParameters(self.named, mesh, DistributedOptimizerConfig(bucket_size=size))
        self.main.attach(torch.optim.SGD(self.named.values(), lr=0.1))
        self.gather, self.before = self.main.gather, sum(mesh.journal.counts.values())

    def started(self) -> int:
        """Return the number of collectives that have started since."""
        return sum(self.mesh.journal.counts.values()) - self.before


def check_waits(mesh: ParallelMesh) -> None:
    """Readers wait for the parts of the last rank, which come late, and only for those."""
    layers = {name: nn.Linear(2, 3, bias=False) for name in ("outside", "waiting", "read")}
    run = Gathered(mesh, layers)
    run.gather.wait_before([layers["waiting"], layers["read"]])
    with torch.no_grad():
        for main_slice in run.main.slices.values():
            main_slice.main.fill_(1.0)
    time.sleep(0.2 * mesh.rank)
    run.main.publish(wait=False)
    assert layers["outside"].weight.min() == 1, "nobody would wait for it later"
    assert len(run.gather._pending) == 2
    layers["waiting"](torch.zeros(1, 2))
    assert layers["waiting"].weight.min() == 1
    run.gather.wait_for([nn.Parameter(torch.ones(1), requires_grad=False)])
    assert len(run.gather._pending) == 1
    # Neither the forward pass of the module nor its hooks run.
    run.gather.wait_for([layers["read"].weight])
    assert layers["read"].weight.min() == 1
    run.main.wait()


def check_gathers_during_updates(mesh: ParallelMesh) -> None:
    """Gathers start in a fixed order once their parameters are updated."""
    # Each dtype has its own buffer, and both ranks have a part of each bucket.
    dtypes = (torch.float64, torch.float32, torch.float64, torch.float32)
    layers = {str(n): nn.Linear(16, 16, bias=False, dtype=dtype) for n, dtype in enumerate(dtypes)}
    run = Gathered(mesh, layers, 256)
    run.gather.wait_before(list(layers.values()))
    run.main.publish(wait=False)
    buckets = [run.main.buffers[at].plan.buckets[number] for at, number in run.gather._pending]
    order = [placed.name for bucket in buckets for placed in bucket.placed]
    assert order == run.main.order.sorted(reversed(list(run.named))) == list(run.named)
    run.main.wait()
    layers = {str(number): nn.Linear(16, 16, bias=False) for number in range(3)}
    run = Gathered(mesh, layers, 256)
    run.gather.wait_before(list(layers.values()))
    run.gather.start_during_update(mesh, set(run.named))
    # The second bucket waits for the first bucket on all ranks.
    for name, num_started in {"1": 0, "0": 2, "2": 2}.items():
        layers[name].weight.data.fill_(1.0)
        if name != "2":
            run.gather.mark_updated([f"{name}.weight"])
        assert run.started() == num_started
    run.main.publish(wait=False, stored=True)
    assert run.started() == 3
    run.main.wait()
    assert all(layer.weight.min() == 1 for layer in layers.values())


# Buckets start their sums in the backward pass and in weight halves.


@contextmanager
def recorded_buckets(started: list[Any]) -> Iterator[None]:
    """Add the names of buckets to a list when their sums start."""
    start = GradientBucket.start

    def record_start(bucket: GradientBucket, *args: Any) -> None:
        started.append(bucket.names)
        start(bucket, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GradientBucket, "start", record_start)
        yield


def check_order_of_starts(mesh: ParallelMesh) -> None:
    """Buckets of experts do not wait for buckets of parameters that are used earlier."""
    order = ("table", "experts.0", "dense", "experts.1")
    named = {name: nn.Parameter(torch.ones(16, 8, dtype=torch.float64)) for name in order}
    for name, parameter in named.items():
        spec = replicated_spec(parameter, mesh.tp.rank)
        set_shard_spec(parameter, replace(spec, is_expert=name.startswith("experts")))
    run = Run(named, mesh, DistributedOptimizerConfig(bucket_size=128))
    started: list[Any] = []
    before_last: list[Any] = []
    with recorded_buckets(started):
        for _ in range(2):
            run.zero_grad()
            started.clear()
            run.reducer.begin_last_backward(0)
            for name in reversed(order):
                before_last = list(started)
                (run.main.parameter(name) * 2.0).sum().backward()
            run.reducer.start_reduction(0)
            run.finish()
    assert before_last == [("experts.1",), ("dense",), ("experts.0",)]


def started_parameters(run: Run) -> set[str]:
    """Return the parameters whose sums over the ranks have started."""
    return {
        name
        for bucket in run.reducer._starts.buckets
        if bucket.pending is not None
        for name in bucket.names
    }


def check_weight_halves(mesh: ParallelMesh) -> None:
    model = nn.ModuleDict({"unused": ColumnParallelLinear(4, 4, mesh, bias=False)})
    model["first"] = ColumnParallelLinear(4, 4, mesh)
    model["last"] = ColumnParallelLinear(4, 4, mesh)
    initialize_(model, "cpu", seed=1)
    # Each parameter is a bucket of its own.
    run = Run(dict(model.named_parameters()), mesh, DistributedOptimizerConfig(bucket_size=1))
    queue = run.reducer.weight_gradients
    inputs = torch.randn(3, 1, 4, generator=torch.Generator().manual_seed(mesh.rank))
    for step in range(2):
        run.zero_grad()
        with queue.open(step):
            model["last"](model["first"](inputs).tanh()).sin().sum().backward()
        assert not started_parameters(run)
        run.reducer.begin_last_weight_half(0, queue.count_left(step))
        # Sums start in the order of the buffers, up to the first bucket that lacks a product.
        assert "last.weight" not in started_parameters(run)
        assert "first.weight" not in started_parameters(run)
        queue.run(step)
        assert started_parameters(run) == set(run.main.names)
        run.reducer.start_reduction(0)
        run.finish()
        for name, main_slice in run.main.slices.items():
            assert (main_slice.main.grad is None) == (name == "unused.weight")


# Gradients of embeddings that ranks exchange by rows.


def exchange_rows(mesh: ParallelMesh) -> dict[str, Any]:
    outcomes: dict[str, Any] = {"sums": errors_of_sums(mesh)}
    for kind in KINDS:
        for name, division in DIVISIONS.items():
            outcomes[f"{kind}, {name}"] = weights_after(mesh, division, kind)
    outcomes["default buckets"] = weights_after(mesh, DistributedOptimizerConfig(), "equal")
    return outcomes
