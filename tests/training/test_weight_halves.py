"""Gradient sums over the data-parallel ranks start when the last weight half of a chunk has added
their last terms.
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


def started_parameters(run: Run) -> set[str]:
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
    references = {name: weight.requires_grad_() for name, weight in weights.items()}
    hidden = inputs @ references["first.weight"].t() + references["first.bias"]
    (hidden.tanh() @ references["last.weight"].t() + references["last.bias"]).sin().sum().backward()
    for step in range(NUM_STEPS):
        run.zero_grad()
        with queue.open(step):
            model["last"](model["first"](inputs[rank]).tanh()).sin().sum().backward()
        assert not started_parameters(run)
        run.reducer.begin_last_weight_half(0, queue.count_left(step))
        # Sums start in the order of the buffers, up to the first bucket that lacks a product.
        assert "last.weight" not in started_parameters(run)
        assert "first.weight" not in started_parameters(run)
        queue.run(step)
        assert started_parameters(run) == set(references)
        run.reducer.start_reduction(0)
        run.finish()
        for name, main_slice in run.main.slices.items():
            assert (main_slice.main.grad is None) == (name == "unused.weight")
            views = (
                ()
                if main_slice.main.grad is None
                else main_slice.placement.local_views(main_slice.main.grad)
            )
            for box, view in views:
                full = references[name].grad / size
                for dim, (start, length) in enumerate(zip(box.offsets, box.sizes, strict=True)):
                    full = full.narrow(dim, start, length)
                assert_equal(view, full, f"step {step}: {name}", 1e-12)
    mesh.destroy()


def test_gradient_sums_start_in_the_last_weight_half() -> None:
    run_world(check_sums, 2)
