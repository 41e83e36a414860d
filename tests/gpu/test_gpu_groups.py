"""Tests that NCCL communicators have the settings of their axis, and that parts of a job have
separate communicators.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_megatron import MegatronStrategy
from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.groups.axis import MeshAxis
from lightning_megatron.groups.collectives import all_gather_objects, all_reduce_
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.nccl_options import torch_options
from lightning_megatron.plan.layout import ParallelLayout
from tests.gpu.ranks import run_ranks
from tests.gpu.shared_gpu import gpu_of, require_gpus
from tests.world import run_world

FILE = """
tp: {min_ctas: 2, max_ctas: 6, cga_cluster_size: 2}
mp: {max_ctas: 3, is_high_priority_stream: true}
dp_cp: {max_ctas: 5}
"""


def _options_of(axis: MeshAxis) -> Any:
    assert axis.group is not None
    return axis.group._get_backend(torch.device("cuda")).options


def _read_back(rank: int, size: int, path: str) -> None:
    options: Any = MegatronStrategy(job={"nccl": path}).options.job.nccl
    device = gpu_of(rank)
    for layout, names in (
        (ParallelLayout(size, tp=2), ("tp", "model")),
        (ParallelLayout(size), ("data",)),
    ):
        mesh = ParallelMesh.create(layout, device=device, options=options)
        for name in names:
            axis = getattr(mesh, name)
            total = all_reduce_(torch.ones(1 << 20, device=device), axis)
            assert total.min().item() == total.max().item() == size
            actual, expected = _options_of(axis), dict(options[name])
            if "high_priority" in expected:
                assert actual.is_high_priority_stream == expected.pop("high_priority")
            assert {key: getattr(actual.config, key) for key in expected} == expected
            assert all_gather_objects(rank, getattr(mesh, f"{name}_cpu")) == list(range(size))
            assert dist.get_backend(getattr(mesh, f"{name}_cpu").group) == "gloo"
        plain = _options_of(mesh.world)
        assert plain.config.max_ctas != 6
        assert not plain.is_high_priority_stream
        mesh.destroy()


@pytest.mark.gpu2
def test_the_communicator_of_each_axis_has_the_settings_of_a_file(tmp_path):
    path = tmp_path / "nccl.yaml"
    path.write_text(FILE)
    run_ranks(_read_back, 2, str(path), needs_nccl="the settings are those of NCCL")


def _parts(rank: int, size: int) -> None:
    device = gpu_of(rank % 2)
    first = rank < 2
    for _ in range(2):
        layout = ParallelLayout(2, tp=2) if first else ParallelLayout(2, rank_offset=2)
        mesh = ParallelMesh.create(layout, device=device, backend="nccl")
        axis = mesh.tp if first else mesh.dp
        for _ in range(3):
            total = all_reduce_(torch.full((1000,), rank + 1.0, device=device), axis)
            assert total.tolist() == [3.0 if first else 7.0] * 1000
        mesh.destroy()


@pytest.mark.gpu2
def test_two_parts_of_a_job_have_separate_communicators():
    require_gpus(2)
    run_world(_parts, 4)


def _split_parts(rank: int, size: int) -> None:
    device = gpu_of(rank)
    if rank < 2:
        mesh = ParallelMesh.create(ParallelLayout(2, tp=2), device=device)
        assert all_reduce_(torch.ones(4, device=device), mesh.tp).tolist() == [2.0] * 4
        mesh.destroy()
    full_mesh = ParallelMesh.create(ParallelLayout(size, tp=2), device=device)
    assert all_reduce_(torch.ones(4, device=device), full_mesh.world).tolist() == [float(size)] * 4
    full_mesh.destroy()


@pytest.mark.gpu4
def test_a_mesh_of_some_ranks_does_not_split_the_communicator_of_all_ranks():
    run_ranks(_split_parts, 4)


@pytest.mark.gpu
def test_every_listed_setting_exists_or_is_refused_by_name():
    if not hasattr(dist, "ProcessGroupNCCL"):
        pytest.skip("needs a torch with NCCL")
    known = {
        "blocking": 1, "cga_cluster_size": 2, "min_ctas": 1, "max_ctas": 4, "net_name": "Socket",
    }  # fmt: skip
    for setting, value in known.items():
        assert getattr(torch_options({setting: value}).config, setting) == value
    newer = (
        "split_share", "traffic_class", "collnet_enable", "cta_policy", "shrink_share", "nvls_ctas",
    )  # fmt: skip
    refusals = {}
    for setting in newer:
        try:
            assert getattr(torch_options({setting: 1}).config, setting) == 1
        except ParallelPlanError as error:
            refusals[setting] = str(error)
    assert all(f"'{name}' needs a newer version" in text for name, text in refusals.items())
