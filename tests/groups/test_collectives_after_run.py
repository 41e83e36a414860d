"""Collectives of a mesh whose groups have been destroyed are refused with what to do instead."""

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
        ranks = getattr(mesh, axis)
        assert all_reduce_(torch.ones(2), ranks).tolist() == [2.0, 2.0]
        mesh.destroy()
        words = f"while fit, .* over {axis}.*after the run.*on_train_end.*save it"
        with pytest.raises(UnsupportedError, match=words):
            all_reduce_(torch.ones(2), ranks)
        with pytest.raises(UnsupportedError, match=words):
            start_transfers([(torch.ones(2), 1 - rank)], [], ranks)
        with pytest.raises(UnsupportedError, match="after the run"):
            all_gather_objects(1, mesh.world_cpu)
        x = torch.ones(2, requires_grad=True)
        with pytest.raises(UnsupportedError, match=words):
            copy_to_axis(x, ranks).sum().backward()
        # Axes of one rank never communicate.
        assert all_reduce_(torch.ones(2), mesh.cp).tolist() == [1.0, 1.0]


def test_collectives_after_the_groups_are_destroyed_say_what_to_do() -> None:
    run_world(_world, 2)
