"""The environment variables of each launcher determine the ranks; no process is started."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest
import torch
from lightning import Trainer
from lightning.pytorch.plugins.environments import (
    LightningEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)

from lightning_megatron import MegatronStrategy, UnsupportedError
from lightning_megatron.strategy.process.launcher import MegatronLauncher
from lightning_megatron.strategy.process.parent_watch import LAUNCHER


def strategy_of(devices: int, num_nodes: int = 1, **sizes: Any) -> MegatronStrategy:
    strategy = MegatronStrategy(**sizes)
    Trainer(
        accelerator="cpu", devices=devices, num_nodes=num_nodes, strategy=strategy, logger=False
    )
    return strategy


def test_slurm_variables_determine_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {
        "SLURM_NTASKS": "8",
        "SLURM_NTASKS_PER_NODE": "4",
        "SLURM_PROCID": "6",
        "SLURM_LOCALID": "2",
    }
    variables |= {
        "SLURM_NODEID": "1",
        "SLURM_JOB_ID": "77",
        "SLURM_JOB_NAME": "train",
        "SLURM_NODELIST": "node[3-4]",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    strategy = strategy_of(4, num_nodes=2, tp=2, pp=2)
    assert isinstance(strategy.cluster_environment, SLURMEnvironment)
    assert strategy.cluster_environment.creates_processes_externally
    assert (strategy.global_rank, strategy.local_rank, strategy.node_rank, strategy.world_size) == (
        6,
        2,
        1,
        8,
    )
    assert strategy.cluster_environment.main_address == "node3"
    assert strategy.layout.coordinates(6) == {"tp": 0, "cp": 0, "dp": 1, "pp": 1}
    assert strategy.distributed_sampler_kwargs == {"num_replicas": 2, "rank": 1}
    assert not strategy.is_global_zero


def test_torchrun_variables_determine_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {
        "TORCHELASTIC_RUN_ID": "run",
        "RANK": "3",
        "LOCAL_RANK": "3",
        "GROUP_RANK": "0",
        "WORLD_SIZE": "4",
    }
    for name, value in {**variables, "MASTER_ADDR": "localhost", "MASTER_PORT": "1234"}.items():
        monkeypatch.setenv(name, value)
    strategy = strategy_of(4, tp=2)
    assert isinstance(strategy.cluster_environment, TorchElasticEnvironment)
    assert strategy.global_rank == 3
    assert strategy.distributed_sampler_kwargs == {"num_replicas": 2, "rank": 1}


def test_script_without_a_launcher_starts_its_own_processes() -> None:
    strategy = strategy_of(4, tp=2, pp=2)
    assert isinstance(strategy.cluster_environment, LightningEnvironment)
    assert isinstance(strategy.launcher, MegatronLauncher)
    assert not strategy.cluster_environment.creates_processes_externally
    assert (strategy.num_processes, strategy.num_nodes, strategy.root_device) == (
        4,
        1,
        torch.device("cpu"),
    )
    assert strategy.is_distributed


@pytest.mark.parametrize(
    ("program", "source"), [("-c", "python -c"), ("-", "standard input"), ("", "standard input")]
)
def test_programs_without_a_file_are_refused_before_processes_start(
    program: str, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [program])
    launcher = strategy_of(2, tp=2).launcher
    assert isinstance(launcher, MegatronLauncher)
    monkeypatch.setattr(launcher, "_check", lambda arguments: None)
    with pytest.raises(UnsupportedError, match=f"must be a file, .*: it comes from {source}"):
        launcher.launch(lambda: None)


def test_launched_processes_get_the_process_id_of_their_launcher(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[dict[str, str]] = []

    class Process:
        def __init__(self, command: Any, env: dict[str, str], cwd: Any) -> None:
            started.append(env)

    monkeypatch.setattr("subprocess.Popen", Process)
    launcher = strategy_of(3, tp=3).launcher
    assert isinstance(launcher, MegatronLauncher)
    launcher._call_children_scripts()
    assert [env["LOCAL_RANK"] for env in started] == ["1", "2"]
    assert all(env[LAUNCHER].split()[0] == str(os.getpid()) for env in started)


def test_tensor_and_pipeline_ranks_of_a_replica_have_the_same_data_rank() -> None:
    strategy = MegatronStrategy(tp=2, pp=2)
    Trainer(accelerator="cpu", devices=8, strategy=strategy, logger=False)
    data_ranks = [strategy.layout.coordinates(rank)["dp"] for rank in range(8)]
    assert data_ranks == [0, 0, 1, 1, 0, 0, 1, 1]


def test_mesh_exists_only_while_the_trainer_runs() -> None:
    with pytest.raises(RuntimeError, match="must be used while the Trainer runs"):
        _ = strategy_of(1).mesh
