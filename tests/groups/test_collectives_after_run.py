"""Collectives of a mesh whose groups were destroyed raise an error that says what to do instead."""

from __future__ import annotations

import pytest
import torch

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.collectives import all_gather_objects, all_reduce_, copy_to_axis
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.p2p import start_transfers
from lightning_megatron.plan.layout import ParallelLayout
from tests.world import run_world


def _world(rank: int, size: int) -> None:
    for axis in ("tp", "pp"):
        mesh = ParallelMesh.create(ParallelLayout(size, **{axis: size}))
        group = getattr(mesh, axis)
        assert all_reduce_(torch.ones(2), group).tolist() == [2.0, 2.0]
        mesh.destroy()
        message = f"while fit, .* over {axis}.*after the run.*on_train_end.*save it"
        with pytest.raises(UnsupportedError, match=message):
            all_reduce_(torch.ones(2), group)
        with pytest.raises(UnsupportedError, match=message):
            start_transfers([(torch.ones(2), 1 - rank)], [], group)
        with pytest.raises(UnsupportedError, match="after the run"):
            all_gather_objects(1, mesh.world_cpu)
        x = torch.ones(2, requires_grad=True)
        with pytest.raises(UnsupportedError, match=message):
            copy_to_axis(x, group).sum().backward()
        # Axes of one rank never communicate.
        assert all_reduce_(torch.ones(2), mesh.cp).tolist() == [1.0, 1.0]


def test_collectives_after_the_groups_are_destroyed_raise_with_advice() -> None:
    run_world(_world, 2)
