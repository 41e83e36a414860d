"""Sums, norms, clipping and updates on four ranks match one process that holds the full tensors."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.collectives import all_gather_objects
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import ShardSpec, set_shard_spec
from lightning_megatron.optimizer import (
    DistributedOptimizerConfig,
    DynamicLossScale,
    MainParameters,
)
from lightning_megatron.optimizer.sharding import BufferPlanner
from lightning_megatron.optimizer.ties import check_ties as check_tied_groups
from lightning_megatron.optimizer.user_writes import ShardedGradient
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.plan.shards import ShardRange, even_range
from tests.optimizer.runs import Run
from tests.optimizer.synthetic import (
    HEAD,
    WORD,
    full_gradients,
    parameters,
    pieces,
    recorded_messages,
    set_gradients,
)
from tests.oracles import assert_equal
from tests.world import run_world

LAYOUTS: tuple[dict[str, int], ...] = ({"tp": 4}, {"tp": 2, "pp": 2}, {"pp": 2}, {})
DIVISIONS = (
    DistributedOptimizerConfig(),
    DistributedOptimizerConfig(bucket_size=40),
    DistributedOptimizerConfig(zero=0, bucket_size=40),
)


def run_all(rank: int, size: int) -> None:
    for sizes in LAYOUTS:
        mesh = ParallelMesh.create(ParallelLayout(size, **sizes), seed=1)
        for division in DIVISIONS:
            check_layout(mesh, division)
        with patch.object(BufferPlanner, "granularity_for", lambda *_: "parameters"):
            check_layout(mesh, DistributedOptimizerConfig())
        if not sizes:
            check_unused_gradients(mesh)
            check_late_gradient(mesh)
        if sizes == {"pp": 2}:
            check_stages(mesh)
            check_ties(mesh)
        mesh.destroy()
    mesh = ParallelMesh.create(ParallelLayout(size, tp=2))
    check_sharded_gradients(mesh)
    mesh.destroy()
    mesh = ParallelMesh.create(ParallelLayout(size, ep=2))
    check_unused_experts(mesh)
    mesh.destroy()


def test_gradients_and_updates_of_four_ranks_match_one_process() -> None:
    run_world(run_all, 4)


def distance(run: Run, truth: dict[str, Tensor]) -> float:
    """Return the largest difference of this rank's finished gradients from the full gradients."""
    largest = 0.0
    for name, main_slice in run.main.slices.items():
        assert main_slice.main.grad is not None, f"{name} has a gradient"
        for box, view in main_slice.placement.local_views(main_slice.main.grad):
            full = truth[WORD if name == HEAD else name]
            for dim, (start, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
                full = full.narrow(dim, start, size)
            largest = max(largest, (view - full).abs().max().item())
    return largest


def check_layout(mesh: ParallelMesh, division: DistributedOptimizerConfig) -> None:
    """Compare sums, norm, clipping and update with those of one process."""
    run, named = Run(parameters(mesh), mesh, division), dict(parameters(mesh))
    set_gradients(named, mesh)
    halves = {name: p.grad / 2 for name, p in named.items() if p.grad is not None}
    truth = full_gradients(mesh.data.size)
    # The second step starts its sums inside the backward pass.
    for _ in range(2):
        run.zero_grad()
        run.backward(halves, is_last=False)
        run.backward(halves)
        run.finish()
        assert distance(run, truth) < 1e-10, "gradient"
    twins = [nn.Parameter(torch.zeros_like(full)) for full in truth.values()]
    for twin, full in zip(twins, truth.values(), strict=True):
        twin.grad = full.clone()
    expected_norm = float(nn.utils.clip_grad_norm_(twins, 0.5))
    assert run.clip(0.5) == pytest.approx(expected_norm, abs=1e-10)
    clipped = {
        name: twin.grad for name, twin in zip(truth, twins, strict=True) if twin.grad is not None
    }
    assert distance(run, clipped) < 1e-10, "clipped gradient"
    # A norm below the limit must leave the gradients bitwise as they are.
    before = [gradient.clone() for gradient in run.main.gradients()]
    run.clip(100.0)
    assert all(map(torch.equal, run.main.gradients(), before))
    weights = {name: run.main.parameter(name).detach().clone() for name in run.main.names}
    run.step()
    for name, piece in pieces(mesh).items():
        gradient = piece.spec.shard(clipped[WORD if name == HEAD else name], piece.local_size)
        expected = weights[name] - 0.1 * gradient
        assert_equal(run.main.parameter(name), expected, f"update of {name}")


def held(run: Run) -> dict[str, list[float]]:
    """Return the values of the gradients that this rank holds, by name."""
    grads = {name: main_slice.main.grad for name, main_slice in run.main.slices.items()}
    return {name: sorted(set(g.flatten().tolist())) for name, g in grads.items() if g is not None}


def among(actual: dict[str, Any], expected: dict[str, Any]) -> bool:
    """Return whether a rank holds only expected gradients; it has no part of some parameters."""
    return all(value == expected.get(name) for name, value in actual.items())


def check_unused_gradients(mesh: ParallelMesh) -> None:
    """A parameter has no gradient in a step in which no rank uses it, and the log says so once."""
    names = ("everywhere", "somewhere", "nowhere")
    run = Run({name: nn.Parameter(torch.ones(200)) for name in names}, mesh)
    with recorded_messages() as records:
        for _ in range(2):
            run.zero_grad()
            gradients = {"everywhere": torch.full((200,), float(mesh.rank))}
            if mesh.rank == 0:
                gradients["somewhere"] = torch.full((200,), 8.0)
            run.backward(gradients)
            run.finish()
    assert among(held(run), {"everywhere": [1.5], "somewhere": [2.0]})
    assert sum("nowhere" in record and "on any rank" in record for record in records) == 1
    on_this_rank = sum("somewhere" in record and "on this rank" in record for record in records)
    assert on_this_rank == (mesh.rank != 0)
    assert not any("everywhere" in record for record in records[:2])
    run.backward({"nowhere": torch.full((200,), 4.0 * mesh.rank)})
    run.finish()
    assert among({k: v for k, v in held(run).items() if k == "nowhere"}, {"nowhere": [6.0]})
    run.zero_grad()
    run.backward({"everywhere": torch.ones(200)})
    run.finish()
    assert among(held(run), {"everywhere": [1.0]})
    assert any(all_gather_objects(bool(held(run)), mesh.world_cpu))


def check_late_gradient(mesh: ParallelMesh) -> None:
    """A gradient that arrives after its sum has started is refused."""
    run = Run({"weight": nn.Parameter(torch.ones(3))}, mesh)
    message = "'weight' received a second gradient afterwards.*optimizer.overlap_gradients=False"
    for uses in (1, 2):
        run.reducer.begin_last_backward(0)
        with pytest.raises(RuntimeError, match=message) if uses == 2 else nullcontext():
            for _ in range(uses):
                run.main.parameter("weight").sum().backward()
            run.reducer.start_reduction(0)
            run.finish()


def check_stages(mesh: ParallelMesh) -> None:
    """All stages agree on an overflow; what they cannot share is refused."""
    whole, name = DistributedOptimizerConfig(zero=0), f"weight{mesh.pp.rank}"
    run = Run({name: nn.Parameter(torch.ones(1))}, mesh, whole)
    for value in (1.0, float("nan")):
        # The last rank alone has a value that is not finite, and the first has no gradient at all.
        if mesh.rank:
            run.give(name, torch.tensor([value if mesh.rank == 3 else 1.0]))
        assert DynamicLossScale().found_nonfinite(run.main) == (value != 1.0)
    with pytest.raises(UnsupportedError, match="several pipeline stages have.*'outside.weight'"):
        Run({"outside.weight": nn.Parameter(torch.ones(1))}, mesh)
    parameter, spec = nn.Parameter(full()), ShardSpec((6, 3), (ShardRange(0, 6, 0),))
    parameter.grad = ShardedGradient.of(full(), spec, mesh)
    with pytest.raises(UnsupportedError, match=r"clip_grad_norm_ cannot be used with pp \(2\)"):
        nn.utils.clip_grad_norm_([parameter], 1.0)


def check_ties(mesh: ParallelMesh) -> None:
    """Both copies of a tied weight have a gradient, or none, and the same group of an optimizer."""
    run = Run(parameters(mesh), mesh)
    for left_out in ((WORD, HEAD), (WORD,)):
        run.zero_grad()
        run.backward({n: run.main.parameter(n) for n in run.main.names if n not in left_out})
        run.finish()
        tied = {name for name in held(run) if name in (WORD, HEAD)}
        found = set().union(*all_gather_objects(tied, mesh.world_cpu))
        assert found == (set() if HEAD in left_out else {WORD, HEAD})
    for is_split in (False, True):
        named = parameters(mesh)
        groups: list[Any] = [
            {"params": [p for name, p in named.items() if (name == HEAD and is_split) == is_second]}
            for is_second in (False, True)
        ]
        main, optimizer = MainParameters(named, mesh), torch.optim.SGD(groups, lr=0.1)
        main.attach(optimizer)
        message = f"{WORD!r} is in group 0.*its copy {HEAD!r} in group 1"
        with pytest.raises(UnsupportedError, match=message) if is_split else nullcontext():
            check_tied_groups(optimizer, main)


# Gradients that a user's code reads as if they were whole.


NUMBERS: dict[str, Callable[[Tensor], Tensor]] = {
    "norm": lambda g: g.norm(),
    "1-norm of data": lambda g: g.data.norm(1.0),
    "inf-norm": lambda g: g.norm(float("inf")),
    "vector_norm": lambda g: torch.linalg.vector_norm(g, 2.0),
    "foreach": lambda g: torch._foreach_norm([g], 2.0)[0],
    "sum": lambda g: g.sum(),
    "mean": lambda g: torch.mean(g),
    "max": lambda g: g.abs().max(),
    "min": lambda g: (g * 2).min(),
    "finite": lambda g: g.isfinite().all().double(),
    "infinite": lambda g: torch.isinf(g / 0).any().double(),
    "copied": lambda g: g.detach().clone().square().sum(),
}


def full() -> Tensor:
    return torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def check_sharded_gradients(mesh: ParallelMesh) -> None:
    """Reductions of a sharded gradient match the full one, other operations act on the shard."""
    rank = mesh.tp.rank
    padding = torch.full((2, 3), 7.0, dtype=torch.float64)
    padded = torch.cat([full()[4:], padding]) if rank else full()[:4]
    expected = {name: float(number(full())) for name, number in NUMBERS.items()}
    for ranges, local in (
        (ShardRange(3 * rank, 3 * rank + 3, 0), full()[3 * rank : 3 * rank + 3]),
        (ShardRange(0, 6, rank), full()),
        (ShardRange(4 * rank, min(4 * rank + 4, 6), 0), padded),
    ):
        sharded = ShardedGradient.of(local.clone(), ShardSpec((6, 3), (ranges,)), mesh)
        actual = {name: float(number(sharded)) for name, number in NUMBERS.items()}
        assert actual == pytest.approx(expected), ranges
        assert type(sharded.sum(0)) is Tensor
        torch.testing.assert_close(sharded.sum(0), local.sum(0))
        sharded.mul_(2)
        torch.testing.assert_close(sharded.as_subclass(Tensor), local * 2)


def check_unused_experts(mesh: ParallelMesh) -> None:
    """Gradients of experts are summed over the ranks that hold them, and experts without tokens do not
    hang, and get no gradient if no rank that holds them has one.
    """
    named = {name: nn.Parameter(torch.zeros(2, 6)) for name in ("up", "down", "dense")}
    for name, parameter in named.items():
        experts = (even_range(4, mesh.ep.size, mesh.ep.rank),)
        if name != "dense":
            set_shard_spec(parameter, ShardSpec((4, 6), experts, is_expert=True))
    run = Run(named, mesh)
    gradients = {name: torch.full((2, 6), float(mesh.rank)) for name in named}
    # Ranks 1 and 3 hold the experts of ep rank 1, and neither has a gradient of `up`.
    if mesh.ep.rank == 1:
        del gradients["up"]
    if mesh.rank == 0:
        del gradients["down"]
    run.backward(gradients)
    run.finish()
    # Means over the losses of four data ranks.
    expected = {"up": [0.5], "down": [(2 if mesh.ep.rank == 0 else 4) / 4], "dense": [1.5]}
    if mesh.ep.rank == 1:
        del expected["up"]
    assert among(held(run), expected), held(run)
