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
from lightning_megatron.groups.mesh import DEFAULT_TIMEOUTS
from lightning_megatron.strategy.private import default_backend, init_process_group

#: Set by torchrun for ranks that are to meet in its own store.
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"


def check_backend(backend: str | None, device: torch.device) -> None:
    """Refuse NCCL for processes without GPUs.

    Raises:
        UnsupportedError: For it.
    """
    if backend == "nccl" and device.type != "cuda":
        raise UnsupportedError(
            f"process_group_backend 'nccl' needs GPUs, because NCCL sends their memory alone: the Trainer's device is "
            f"{device.type}. Use Trainer(accelerator='gpu'), or leave process_group_backend out."
        )


def join_processes(
    environment: ClusterEnvironment | None,
    rank: int,
    size: int,
    device: torch.device,
    backend: str | None,
    timeout: timedelta | None,
    configuration: Mapping[str, str | int],
) -> None:
    """Compare the configurations of all ranks and create their process group if none exists.

    Args:
        environment: Where the first rank is.
        rank: Rank of this process.
        size: Ranks of the job.
        device: Device of this process.
        backend: ``nccl`` or ``gloo``; None chooses by the device.
        timeout: How long a collective may wait for a rank; None leaves torch's default.
        configuration: What must be equal on all ranks, by name.

    Raises:
        RankMismatchError: On every rank, if configurations differ, or ranks do not come in time.

    Communication: collective over all ranks.
    """
    assert environment is not None, "the Trainer sets the cluster environment"
    # Processes start further apart than they arrive at collectives, whose groups get the timeout alone.
    patience = DEFAULT_TIMEOUTS[device.type]
    patience = max(timeout or patience, patience)
    options: dict[str, Any] = {"device_id": device} if device.type == "cuda" else {}
    of_agent = os.environ.get(AGENT_STORE) == "True"
    store = open_store(environment.main_address, environment.main_port, rank, size, patience, of_agent)
    # Ranks that disagree may not even make groups of the same backend: they are compared before.
    check_same_in_store(store, rank, range(size), configuration, patience)
    init_process_group(environment, backend or default_backend(device), store=store, timeout=patience, **options)
