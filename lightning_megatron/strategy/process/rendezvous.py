"""Rendezvous of the processes of a job, with a comparison of their configurations."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
from lightning.fabric.plugins import ClusterEnvironment

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.agent_store import open_store
from lightning_megatron.groups.fingerprint import check_same_in_store
from lightning_megatron.groups.mesh_groups import DEFAULT_TIMEOUTS
from lightning_megatron.strategy.private.processes import default_backend, init_process_group

#: Environment variable that torchrun sets if ranks should use the store of its agent.
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
_REMEDY = (
    "Start every rank with the same command, environment and files. A hyperparameter that must "
    "differ, such as a time, belongs into save_hyperparameters(ignore=...)."
)


def check_backend(backend: str | None, device: torch.device) -> None:
    """Refuse NCCL for processes without GPUs.

    Args:
        backend: Backend of the process groups; None means the default of the device.
    """
    if backend == "nccl" and device.type != "cuda":
        raise UnsupportedError(
            "job.backend 'nccl' needs GPUs, because NCCL sends only GPU memory: the "
            f"Trainer's device is {device.type}. Use Trainer(accelerator='gpu'), or leave "
            "job.backend out."
        )


def join_processes(
    environment: ClusterEnvironment | None,
    rank: int,
    size: int,
    device: torch.device,
    backend: str | None,
    timeout: timedelta | None,
    configuration: Mapping[str, str | int],
    listener: int | None = None,
) -> None:
    """Compare the configurations of all ranks and create their process group if none exists.

    Args:
        size: Number of ranks of the job (ranks).
        backend: ``nccl`` or ``gloo``; None means the default of the device.
        timeout: Timeout of collectives; None means torch's default.
        configuration: Settings that must be equal on all ranks, by name.
        listener: File descriptor of a socket that listens on the store's port; None without one.

    Communication: collective over all ranks.
    """
    assert environment is not None, "the Trainer sets the cluster environment"
    # Start times of processes differ more than arrival times at collectives. A short timeout is
    # therefore raised to the default here; the groups of the mesh use it unchanged.
    join_timeout = DEFAULT_TIMEOUTS[device.type]
    join_timeout = max(timeout or join_timeout, join_timeout)
    options: dict[str, Any] = {"device_id": device} if device.type == "cuda" else {}
    use_agent_store = os.environ.get(AGENT_STORE) == "True"
    store = open_store(
        environment.main_address,
        environment.main_port,
        rank,
        size,
        join_timeout,
        use_agent_store,
        listener,
    )
    # Ranks with different configurations might create groups with different backends and hang, so
    # that the comparison comes first.
    check_same_in_store(store, rank, range(size), configuration, join_timeout, _REMEDY)
    init_process_group(
        environment,
        backend or default_backend(device),
        store=store,
        timeout=join_timeout,
        **options,
    )
