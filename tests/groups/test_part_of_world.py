"""Layouts of disjoint parts of a job coexist, and every axis has a CPU counterpart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_megatron import GPT, GPTConfig, ParallelPlanError
from lightning_megatron.groups.collectives import all_gather_objects, all_reduce_
from lightning_megatron.groups.mesh import GROUP_NAMES, ParallelMesh
from lightning_megatron.plan.layout import ParallelLayout
from tests.world import run_world

CONFIG = GPTConfig.llama(
    vocab_size=32,
    max_seq_length=8,
    num_layers=2,
    hidden_size=16,
    num_heads=2,
    ffn_hidden_size=24,
    vocab_multiple=1,
)


def trained_losses(mesh: ParallelMesh) -> list[float]:
    """Train a small GPT for three steps under tp and dp, and list the losses of the full batch."""
    tokens = torch.randint(0, 32, (4, 8), generator=torch.Generator().manual_seed(1))
    local = tokens.chunk(mesh.data.size)[mesh.data.rank]
    model = GPT(CONFIG, mesh, seed=3).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(3):
        loss = model(local, local.roll(-1, 1)).mean()
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                all_reduce_(parameter.grad, mesh.data, "mean")
        optimizer.step()
        losses.append(float(all_reduce_(loss.detach().clone(), mesh.data, "mean")))
    return losses


def _train_side_by_side(rank: int, size: int) -> list[list[float]]:
    is_first_part = rank < 2
    losses = []
    # Both parts create their groups twice with the same ranks; then the first part creates more.
    layout = ParallelLayout(2, tp=2) if is_first_part else ParallelLayout(2, rank_offset=2)
    for _ in range(2):
        mesh = ParallelMesh.create(layout, seed=1)
        assert mesh.world.ranks == ((0, 1) if is_first_part else (2, 3))
        assert all_gather_objects(rank, mesh.world_cpu) == list(mesh.world.ranks)
        losses.append(trained_losses(mesh))
        mesh.destroy()
    if is_first_part:
        mesh = ParallelMesh.create(ParallelLayout(2, pp=2))
        assert all_gather_objects(rank, mesh.embedding_cpu) == [0, 1]
        mesh.destroy()
    return losses


def _check_unequal_parts(rank: int, size: int) -> None:
    if rank:
        stages = ParallelMesh.create(ParallelLayout(3, pp=3, rank_offset=1))
        assert stages.embedding.ranks == ((2,) if rank == 2 else (1, 3))
        for name in GROUP_NAMES:
            axis = stages.on_cpu(name)
            assert all_gather_objects(rank, axis) == list(axis.ranks), name
    else:
        assert ParallelMesh.create(ParallelLayout(1)).world.size == 1
    # Collectives of all ranks still work after the parts are gone.
    all_ranks = dist.new_group(list(range(size)))
    total = torch.ones(1)
    dist.all_reduce(total, group=all_ranks)
    assert total.item() == size
    mesh = ParallelMesh.create(ParallelLayout(size, tp=2))
    assert all_gather_objects(rank, mesh.world_cpu) == list(range(size))
    mesh.destroy()
    if rank:
        stages.destroy()


def _check_rank_outside(rank: int, size: int) -> None:
    if rank == 0:
        with pytest.raises(ParallelPlanError, match="rank 0 is not in 1 to 3. Give this rank a"):
            ParallelMesh.create(ParallelLayout(3, rank_offset=1))


def _world(rank: int, size: int) -> Any:
    torch.set_default_dtype(torch.float64)
    _check_rank_outside(rank, size)
    losses = _train_side_by_side(rank, size)
    _check_unequal_parts(rank, size)
    _check_cpu_axes(rank, size)
    return losses


def _check_cpu_axes(rank: int, size: int) -> None:
    mesh = ParallelMesh.create(ParallelLayout(size, tp=2, ep=2))
    for name in GROUP_NAMES:
        axis, cpu_axis = getattr(mesh, name), mesh.on_cpu(name)
        assert (cpu_axis.name, cpu_axis.ranks, cpu_axis.rank) == (
            f"{name}_cpu",
            axis.ranks,
            axis.rank,
        )
        assert all_gather_objects(rank, cpu_axis) == list(axis.ranks)
        assert cpu_axis.group is None or dist.get_backend(cpu_axis.group) == "gloo"
    with pytest.raises(ParallelPlanError, match="'tensor' is not. Use world, tp, cp, dp"):
        mesh.on_cpu("tensor")
    mesh.destroy()


def test_layouts_of_disjoint_ranks_train_like_one_process() -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        expected = trained_losses(ParallelMesh.single(seed=1))
    finally:
        torch.set_default_dtype(before)
    for runs in run_world(_world, 4):
        for actual in runs:
            assert actual == pytest.approx(expected, abs=1e-10)
    assert expected[2] < expected[0]


def test_cpu_axes_of_a_single_process_have_one_rank() -> None:
    mesh = ParallelMesh.single()
    assert all(mesh.on_cpu(name).size == 1 for name in GROUP_NAMES)
