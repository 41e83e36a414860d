"""Collectives and their conjugates equal the computation of one process, forward and backward."""

from __future__ import annotations

import copy

import pytest
import torch

from lightning_megatron.errors import ParallelPlanError, RankMismatchError
from lightning_megatron.groups.axis import MeshAxis
from lightning_megatron.groups.collectives import (
    all_gather_objects,
    all_gather_sequence,
    all_reduce_,
    broadcast_,
    broadcast_object,
    copy_to_axis,
    gather_from_axis,
    reduce_from_axis,
    reduce_scatter_sequence,
    split_to_axis,
)
from lightning_megatron.groups.fingerprint import check_same_everywhere
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.p2p import start_transfers
from lightning_megatron.plan.layout import ParallelLayout
from tests.world import run_world

PAIRS = [
    copy_to_axis,
    reduce_from_axis,
    lambda x, axis: gather_from_axis(x, axis, 0),
    lambda x, axis: gather_from_axis(x, axis, 2),
    lambda x, axis: all_gather_sequence(x, axis, 0),
    lambda x, axis: all_gather_sequence(x, axis, 1),
    lambda x, axis: reduce_scatter_sequence(x, axis, 0),
    lambda x, axis: reduce_scatter_sequence(x, axis, 2),
    lambda x, axis: split_to_axis(x, axis, 1),
]


def _input(rank: int, shape=(4, 8, 4)) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def _expected(axis: MeshAxis) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the result of each pair and the gradient of sum(w * result), from inputs of all ranks."""
    inputs = [_input(peer) for peer in axis.ranks]
    size, rank = axis.size, axis.rank
    total = sum(inputs)

    def weight(peer: int, like: torch.Tensor) -> torch.Tensor:
        return _input(100 + axis.ranks[peer], tuple(like.shape))

    rows = []
    rows.append((inputs[rank], sum(weight(peer, inputs[0]) for peer in range(size))))
    rows.append((total, weight(rank, total)))
    for dim in (0, 2):
        joined = torch.cat(inputs, dim)
        rows.append((joined, weight(rank, joined).chunk(size, dim)[rank]))
    for dim in (0, 1):
        joined = torch.cat(inputs, dim)
        rows.append(
            (joined, sum(weight(peer, joined) for peer in range(size)).chunk(size, dim)[rank])
        )
    for dim in (0, 2):
        part = total.chunk(size, dim)[rank]
        rows.append((part, torch.cat([weight(peer, part) for peer in range(size)], dim)))
    part = inputs[rank].chunk(size, 1)[rank]
    rows.append((part, torch.cat([weight(peer, part) for peer in range(size)], 1)))
    return rows


def _check_pairs(axis: MeshAxis) -> None:
    for pair, (expected, expected_grad) in zip(PAIRS, _expected(axis), strict=True):
        x = _input(axis.ranks[axis.rank]).requires_grad_()
        before = x.detach().clone()
        actual = pair(x, axis)
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
        (actual * _input(100 + axis.ranks[axis.rank], tuple(actual.shape))).sum().backward()
        torch.testing.assert_close(x.grad, expected_grad, rtol=0, atol=1e-12)
        assert torch.equal(x.detach(), before)


def _check_reductions_and_broadcasts(axis: MeshAxis) -> None:
    local = _input(axis.ranks[axis.rank])
    stacked = torch.stack([_input(peer) for peer in axis.ranks])
    for op, expected in {
        "sum": stacked.sum(0),
        "mean": stacked.mean(0),
        "max": stacked.amax(0),
        "min": stacked.amin(0),
    }.items():
        torch.testing.assert_close(all_reduce_(local.clone(), axis, op), expected)
    assert torch.equal(broadcast_(local.clone(), axis, axis.size - 1), stacked[-1])
    assert all_gather_objects(axis.rank, axis) == list(range(axis.size))
    assert broadcast_object(f"from {axis.rank}", axis, axis.size - 1) == f"from {axis.size - 1}"


def _check_p2p(axis: MeshAxis) -> None:
    forward, backward = (axis.rank + 1) % axis.size, (axis.rank - 1) % axis.size
    a, b = torch.full((3,), float(axis.rank)), torch.full((2,), 10.0 + axis.rank)
    from_before, from_after = torch.empty(3), torch.empty(2)
    start_transfers(
        [(a, forward), (b, backward)], [(from_before, backward), (from_after, forward)], axis
    ).wait()
    assert from_before.tolist() == [float(backward)] * 3
    assert from_after.tolist() == [10.0 + forward] * 2


def _check_fingerprint(rank: int, mesh: ParallelMesh) -> None:
    check_same_everywhere(mesh.world_cpu, {"tp": 2, "torch": torch.__version__})
    with pytest.raises(RankMismatchError, match=r"rank 3 has seed=2, the others 1"):
        check_same_everywhere(mesh.world_cpu, {"tp": 2, "seed": 2 if rank == 3 else 1})


def _check_indivisible_reduce_scatter(axis: MeshAxis) -> None:
    with pytest.raises(
        ValueError, match=r"dimension 0 \(3\) must be a multiple of tp \(2\).*Pad it to 4"
    ):
        reduce_scatter_sequence(torch.zeros(3), axis)


def _world(rank: int, size: int) -> dict[str, tuple[int, ...]]:
    with pytest.raises(ParallelPlanError, match="has 4 ranks, and the layout needs 8"):
        ParallelMesh.create(ParallelLayout(8, tp=2))
    mesh = ParallelMesh.create(ParallelLayout(size, tp=2, pp=2), seed=7)
    _check_pairs(mesh.tp)
    _check_reductions_and_broadcasts(mesh.tp)
    _check_p2p(mesh.world)
    _check_fingerprint(rank, mesh)
    _check_indivisible_reduce_scatter(mesh.tp)
    assert mesh.dp.group is None, "a group of one must not exist"
    ranks = {
        name: getattr(mesh, name).ranks
        for name in ("tp", "pp", "dp", "data", "model", "embedding", "world_cpu")
    }
    mesh.destroy()
    wide = ParallelMesh.create(ParallelLayout(size, tp=4))
    _check_pairs(wide.tp)
    wide.destroy()
    middle = ParallelMesh.create(ParallelLayout(size, pp=4))
    assert (middle.embedding.size == 2) == (rank in (0, 3))
    middle.destroy()
    return ranks


def test_conjugate_pairs_and_collectives_match_one_process():
    ranks = run_world(_world, 4)
    assert ranks[0]["tp"] == (0, 1)
    assert ranks[0]["pp"] == (0, 2)
    assert ranks[0]["dp"] == ranks[0]["data"] == (0,)
    assert ranks[0]["model"] == ranks[0]["world_cpu"] == (0, 1, 2, 3)
    assert ranks[0]["embedding"] == (0, 2)
    assert ranks[3]["tp"] == (2, 3)
    assert ranks[3]["embedding"] == (1, 3)


def test_collectives_over_an_axis_of_one_rank_return_their_input():
    axis = MeshAxis("tp")
    x = torch.randn(4, 8, 4)
    for pair in PAIRS:
        assert pair(x, axis) is x
    assert all_reduce_(x, axis) is x
    assert broadcast_object("same", axis) == "same"
    check_same_everywhere(axis, {"anything": 1})
    start_transfers([], [], axis).wait()


def test_a_single_mesh_needs_no_process_group():
    mesh = ParallelMesh.single(seed=3)
    assert copy.deepcopy(mesh) is mesh, "a copied module must stay in its groups"
    assert copy.deepcopy(mesh.tp) is mesh.tp
    assert not torch.distributed.is_initialized()
    assert mesh.tp.size == mesh.world.size == 1
    assert mesh.random.seed == 3
    mesh.destroy()
