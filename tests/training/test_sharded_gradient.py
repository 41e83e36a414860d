"""Reductions of a sharded gradient match the full gradient, and other operations act on the local
shard.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron import UnsupportedError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import ShardSpec
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.plan.shards import ShardRange
from lightning_megatron.training.sharded_gradient import ShardedGradient
from tests.world import run_world

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


def _measure_on_two_ranks(rank: int, size: int) -> dict[str, Any]:
    mesh = ParallelMesh.create(ParallelLayout(2, tp=2), device=torch.device("cpu"), seed=1)
    cut = ShardSpec((6, 3), (ShardRange(3 * rank, 3 * rank + 3, 0),))
    copied = ShardSpec((6, 3), (ShardRange(0, 6, rank),))
    padded = ShardSpec((6, 3), (ShardRange(4 * rank, min(4 * rank + 4, 6), 0),))
    padding = torch.full((2, 3), 7.0, dtype=torch.float64)
    locals_ = {
        "cut": (cut, full()[3 * rank : 3 * rank + 3]),
        "copied": (copied, full()),
        "padded": (padded, torch.cat([full()[4:], padding]) if rank else full()[:4]),
    }
    outcome: dict[str, Any] = {}
    for sharding, (spec, local) in locals_.items():
        sharded = ShardedGradient.of(local.clone(), spec, mesh)
        outcome[sharding] = {name: float(number(sharded)) for name, number in NUMBERS.items()}
        assert type(sharded.sum(0)) is Tensor
        torch.testing.assert_close(sharded.sum(0), local.sum(0))
        sharded.mul_(2)
        torch.testing.assert_close(sharded.as_subclass(Tensor), local * 2)
    mesh.destroy()
    mesh = ParallelMesh.create(ParallelLayout(2, pp=2), device=torch.device("cpu"), seed=1)
    parameter = torch.nn.Parameter(full())
    parameter.grad = ShardedGradient.of(full(), copied, mesh)
    with pytest.raises(UnsupportedError) as raised:
        torch.nn.utils.clip_grad_norm_([parameter], 1.0)
    mesh.destroy()
    return {**outcome, "message": str(raised.value)}


def test_reductions_of_a_sharded_gradient_match_the_full_gradient() -> None:
    expected = {name: float(number(full())) for name, number in NUMBERS.items()}
    for outcome in run_world(_measure_on_two_ranks, 2):
        message = outcome.pop("message")
        assert message.startswith("torch.nn.utils.clip_grad_norm_ cannot be used with pp (2)")
        for sharding, numbers in outcome.items():
            assert numbers == pytest.approx(expected), sharding
