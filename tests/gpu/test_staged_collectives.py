"""Tests that collectives staged through the host equal those of the backend, also in order.

The tests also stage tensors of the CPU, whose results arrive only after a wait.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron.groups.axis import MeshAxis
from lightning_megatron.groups.collectives import all_reduce_, barrier, broadcast_
from lightning_megatron.groups.pending import (
    start_all_gather,
    start_all_reduce,
    start_all_to_all,
    start_reduce_scatter,
    start_transfers,
)
from tests.gpu.staged_collectives import StagedCollectives
from tests.world import run_world


def _rows(rank: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(6, 3, generator=generator, dtype=torch.float64).to(dtype)


def _exchange(axis: MeshAxis) -> Tensor:
    """Send two tensors to the peer, and receive two from it."""
    received = [torch.zeros(6, 3, dtype=torch.float64) for _ in range(2)]
    peer = 1 - axis.rank
    transfers = start_transfers(
        [(_rows(axis.rank + 10 * number), peer) for number in range(2)],
        [(tensor, peer) for tensor in received],
        axis,
    )
    transfers.wait()
    assert transfers.is_done()
    return torch.stack(received)


def _run(start: Callable[..., Any], axis: MeshAxis, *shape: int, **options: Any) -> Tensor:
    out = torch.zeros(shape, dtype=torch.float64)
    start(out, _rows(axis.rank), *options.pop("sizes", ()), axis, **options).wait()
    return out


def _reduce(op: Any, axis: MeshAxis, dtype: torch.dtype = torch.float64) -> Tensor:
    tensor = _rows(axis.rank, dtype)
    start_all_reduce(tensor, axis, op).wait()
    return tensor


def _in_place(axis: MeshAxis) -> Tensor:
    """Scatter sums into a part of the summed tensor, and gather them from there."""
    rows = _rows(axis.rank)
    part = rows[3 * axis.rank : 3 * axis.rank + 3]
    start_reduce_scatter(part, rows, axis).wait()
    start_all_gather(rows, part, axis).wait()
    return rows


CALLS: dict[str, Callable[[MeshAxis], Tensor]] = {
    "sum": lambda axis: _reduce("sum", axis),
    "mean": lambda axis: _reduce("mean", axis),
    "max": lambda axis: _reduce("max", axis),
    "half": lambda axis: _reduce("sum", axis, torch.bfloat16),
    "one number": lambda axis: all_reduce_(torch.tensor(1.5 + axis.rank), axis),
    "scattered": lambda axis: _run(start_reduce_scatter, axis, 3, 3),
    "scattered mean": lambda axis: _run(start_reduce_scatter, axis, 3, 3, op="mean"),
    "gathered": lambda axis: _run(start_all_gather, axis, 12, 3),
    "in place": _in_place,
    "exchanged": lambda axis: _run(
        start_all_to_all,
        axis,
        4 if axis.rank == 0 else 8,
        3,
        sizes=((2, 4), (2, 2)) if axis.rank == 0 else ((2, 4), (4, 4)),
    ),
    "broadcast": lambda axis: broadcast_(_rows(axis.rank), axis, 1),
    "transferred": _exchange,
}


def _compare(rank: int, size: int) -> None:
    ranks = tuple(range(size))
    plain = MeshAxis("tp", ranks, rank, dist.new_group(list(ranks)))
    expected = {name: call(plain) for name, call in CALLS.items()}
    StagedCollectives(stages=lambda tensor: True).install()
    options: dict[str, Any] = {"pg_options": "NCCL's", "device_id": "a GPU"}
    group = dist.new_group(list(ranks), backend="nccl", **options)
    assert dist.get_backend(group) == "nccl"
    assert dist.get_backend(plain.group) == dist.get_backend() == "gloo"
    staged = MeshAxis("tp", ranks, rank, group)
    for name, call in CALLS.items():
        assert torch.equal(call(staged), expected[name]), name
    barrier(staged)
    dist.barrier(group=group, device_ids=[0])

    pending_sum = _rows(rank)
    pending = start_all_reduce(pending_sum, staged)
    assert torch.equal(pending_sum, _rows(rank)), "the result arrived before the wait"
    pending.wait()
    assert torch.equal(pending_sum, expected["sum"])
    pending.wait()
    assert torch.equal(pending_sum, expected["sum"])


def test_staged_collectives_equal_collectives_of_the_backend():
    run_world(_compare, 2)
