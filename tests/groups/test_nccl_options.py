"""NCCL settings reach the communicator of their axis; unknown ones are refused before any group."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
import yaml

from lightning_megatron import MegatronStrategy
from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.groups import mesh_groups
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.nccl_options import GROUP_NAMES, read_nccl_options
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.strategy.options.strategy_options import notes_on

#: File in the form of Megatron-LM's nccl_communicator_config_path.
MEGATRON_FILE = """
dp:
  cga_cluster_size: 2
  max_ctas: 32
  min_ctas: 8
dp_cp:
  net_name: IB
mp:
  is_high_priority_stream: true
ep_dp: {max_ctas: 4}
"""

EXPECTED_OPTIONS = {
    "dp": {"cga_cluster_size": 2, "max_ctas": 32, "min_ctas": 8},
    "data": {"net_name": "IB"},
    "model": {"high_priority": True},
    "edp": {"max_ctas": 4},
}


class Options:
    """Stand-in for ``ProcessGroupNCCL.Options`` of an NCCL without the newest fields."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self.config = SimpleNamespace(max_ctas=-1, min_ctas=-1, cga_cluster_size=-1, net_name=None)


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace torch's NCCL options by a stand-in that can be created and read."""
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), raising=False)


def test_a_file_of_megatron_lm_is_read_like_a_mapping(tmp_path: Path) -> None:
    path = tmp_path / "nccl.yaml"
    path.write_text(MEGATRON_FILE)
    assert read_nccl_options(str(path)) == EXPECTED_OPTIONS == read_nccl_options(EXPECTED_OPTIONS)
    assert MegatronStrategy(job={"nccl": str(path)}).options.job.nccl == EXPECTED_OPTIONS
    assert read_nccl_options(yaml.safe_load(MEGATRON_FILE)) == EXPECTED_OPTIONS
    (tmp_path / "empty.yaml").write_text("")
    assert read_nccl_options(str(tmp_path / "empty.yaml")) == {} == read_nccl_options(None)


@pytest.fixture
def created_groups(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[int, ...], Any]]:
    """Return the NCCL groups that a mesh of 8 ranks creates, with ranks and options."""
    groups: list[tuple[tuple[int, ...], Any]] = []

    def new_group(ranks: list[int], **options: Any) -> Any:
        if options["backend"] == "nccl":
            groups.append((tuple(ranks), options["pg_options"]))
        return SimpleNamespace(options=options.get("pg_options"))

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 8)
    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(mesh_groups, "check_same_in_store", lambda *_: 0)
    monkeypatch.setattr(mesh_groups, "default_store", lambda: None)
    default = SimpleNamespace(bound_device_id=None)
    monkeypatch.setattr(mesh_groups.distributed_c10d, "_get_default_group", lambda: default)
    return groups


@pytest.mark.usefixtures("nccl", "created_groups")
def test_cp_has_high_priority_whatever_the_data_group_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    for of_data in (False, True):
        options = {"data": {"high_priority": of_data}}
        mesh = ParallelMesh.create(ParallelLayout(8, cp=8), backend="nccl", options=options)
        assert mesh.cp.ranks == mesh.data.ranks
        assert mesh.cp.group is not mesh.data.group
        assert mesh.cp.group.options.is_high_priority_stream
        assert mesh.data.group.options.is_high_priority_stream == of_data


@pytest.mark.usefixtures("nccl")
def test_nccl_settings_reach_the_group_of_their_axis(
    monkeypatch: pytest.MonkeyPatch, created_groups: list[tuple[tuple[int, ...], Any]]
) -> None:
    limits: Any = {name: {"max_ctas": number} for number, name in enumerate(GROUP_NAMES, 1)}
    limits["tp"] = {"min_ctas": 3, "high_priority": True}
    for rank in (0, 6):
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        mesh = ParallelMesh.create(ParallelLayout(8, tp=2, pp=2), backend="nccl", options=limits)
        for name, settings in limits.items():
            axis = getattr(mesh, name)
            if axis.size == 1:
                assert axis.group is None
                continue
            config, is_high = axis.group.options.config, axis.group.options.is_high_priority_stream
            expected = settings.get("min_ctas", -1), settings.get("max_ctas", -1)
            assert (config.min_ctas, config.max_ctas) == expected, name
            assert is_high == (name in ("tp", "cp", "pp", "ep")), name
    assert ((0, 1), 3) in [(ranks, options.config.min_ctas) for ranks, options in created_groups]


@pytest.mark.usefixtures("nccl")
def test_settings_unknown_to_the_installed_nccl_are_refused_before_any_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dist, "new_group", None)
    message = (
        "'nvls_ctas' needs a newer version. Use cga_cluster_size, high_priority, max_ctas, min_ctas, "
        "net_name."
    )
    with pytest.raises(ParallelPlanError, match=message):
        MegatronStrategy(job={"nccl": {"tp": {"nvls_ctas": 4}}})


def test_settings_are_refused_with_gloo_and_noted_on_cpu() -> None:
    with pytest.raises(ParallelPlanError, match="cannot be used with job.backend 'gloo'"):
        MegatronStrategy(job={"nccl": {"tp": {"max_ctas": 4}}, "backend": "gloo"})
    options = MegatronStrategy(job={"nccl": {"tp": {"max_ctas": 4}}}).options
    assert "no effect on cpu" in notes_on(options, "32-true", "cpu")[-1]
    assert not any("nccl" in note for note in notes_on(options, "32-true", "cuda"))


REFUSED: list[tuple[Any, str]] = [
    ({"pipeline": {}}, "'pipeline' is not one of them. Use world, tp, cp"),
    ({"pp": {"max_cta": 4}}, "'max_cta' is not one of them. Use high_priority, blocking"),
    ({"pp": {"max_ctas": "4"}}, "max_ctas must be a whole number of at least 1: it is '4'"),
    ({"pp": {"high_priority": 1}}, "high_priority must be True or False: it is 1"),
    ({"pp": {"net_name": None}}, "net_name must be text: it is None"),
    ({"pp": {"blocking": 2}}, "blocking must be 0 or 1: it is 2"),
    ({"pp": {"min_ctas": 4, "max_ctas": 2}}, "min_ctas (4) of job.nccl['pp'] must be at most"),
    ({"mp": {}, "model": {}}, "must name model once: model is another name of it"),
    (
        {"pp": {"high_priority": True, "is_high_priority_stream": True}},
        "must name high_priority once",
    ),
    ({"pp": [4]}, "job.nccl['pp'] must be a mapping: it is [4]"),
    (5, "job.nccl must be a mapping"),
    ("/no/such/file.yaml", "No such file or directory"),
]
DAMAGED = {
    "tp: {max_ctas: 2}\ntp: {max_ctas: 4}\n": "'tp' occurs twice",
    "tp: {max_ctas: 2, max_ctas: 4}\n": "'max_ctas' occurs twice",
    "false\n": "the content of '2.yaml' must be a mapping: it is False",
    "tp: &a {max_ctas: *a}\n": "max_ctas must be a whole number of at least 1: it is {",
    # Written out, the last of these mappings has 2**60 values.
    "a0: &a0 {}\n"
    + "".join(
        f"a{i + 1}: &a{i + 1} {{x: *a{i}, y: *a{i}}}\n" for i in range(60)
    ): "'a0' is not one of",
    "tp: [": "cannot be read",
    "tp: !!python/object/apply:os.system ['touch gadget']\n": "cannot be read",
    "[" * 5000: "cannot be read",
    "# " + "x" * 200_000: "more than 100000 bytes",
}


def test_illegal_options_and_damaged_files_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "folder.yaml").mkdir()
    cases = [*REFUSED, *((name, "is not a regular file") for name in ("pipe.yaml", "folder.yaml"))]
    for number, (text, message) in enumerate(DAMAGED.items()):
        (tmp_path / f"{number}.yaml").write_text(text)
        cases.append((f"{number}.yaml", message))
    for options, message in cases:
        with pytest.raises(ParallelPlanError) as caught:
            MegatronStrategy(job={"nccl": options})
        assert message in str(caught.value)
        assert len(str(caught.value)) < 800
    assert not (tmp_path / "gadget").exists(), "a file of settings must not run code"
