"""Sums over the data-parallel ranks start when the last weight half of a chunk has added what they
need.
"""

from __future__ import annotations

import torch
from torch import nn

from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.init import initialize_
from lightning_megatron.layers.linear import ColumnParallelLinear
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.training import DistributedOptimizerConfig
from tests.oracles import assert_equal
from tests.training.runs import Run
from tests.world import run_world

NUM_STEPS = 2


def started(run: Run) -> set[str]:
    """Return the parameters whose sums over the ranks have started."""
    return {
        name
        for bucket in run.reducer._starts.buckets
        if bucket.pending is not None
        for name in bucket.names
    }


def check_sums(rank: int, size: int) -> None:
    torch.set_default_dtype(torch.float64)
    mesh = ParallelMesh.create(ParallelLayout(size))
    model = nn.ModuleDict({"unused": ColumnParallelLinear(4, 4, mesh, bias=False)})
    model["first"] = ColumnParallelLinear(4, 4, mesh)
    model["last"] = ColumnParallelLinear(4, 4, mesh)
    initialize_(model, "cpu", seed=1)
    # Each parameter is a bucket of its own.
    run = Run(dict(model.named_parameters()), mesh, DistributedOptimizerConfig(bucket_size=1))
    queue = run.reducer.weight_gradients
    inputs = torch.randn(size, 3, 1, 4, generator=torch.Generator().manual_seed(3))
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    truth = {name: weight.requires_grad_() for name, weight in weights.items()}
    hidden = inputs @ truth["first.weight"].t() + truth["first.bias"]
    (hidden.tanh() @ truth["last.weight"].t() + truth["last.bias"]).sin().sum().backward()
    for step in range(NUM_STEPS):
        run.zero_grad()
        with queue.open(step):
            model["last"](model["first"](inputs[rank]).tanh()).sin().sum().backward()
        assert not started(run)
        run.reducer.begin_last_weight_half(0, queue.count_left(step))
        # In the order of the buffers, up to the first bucket that lacks a product.
        assert "last.weight" not in started(run)
        assert "first.weight" not in started(run)
        queue.run(step)
        assert started(run) == set(truth)
        run.reducer.start_reduction(0)
        run.finish()
        for name, one in run.main.slices.items():
            assert (one.main.grad is None) == (name == "unused.weight")
            views = () if one.main.grad is None else one.placement.local_views(one.main.grad)
            for box, view in views:
                full = truth[name].grad / size
                for dim, (start, length) in enumerate(zip(box.offsets, box.sizes, strict=True)):
                    full = full.narrow(dim, start, length)
                assert_equal(view, full, f"step {step}: {name}", 1e-12)
    mesh.destroy()


def test_sums_start_in_the_last_weight_half() -> None:
    run_world(check_sums, 2)
