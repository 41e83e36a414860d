"""Rendezvous of the processes of a job on a reserved port, with a comparison of configurations."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from ipaddress import ip_address
from typing import Any

import torch
from lightning.fabric.plugins import ClusterEnvironment

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.agent_store import open_store
from lightning_megatron.groups.fingerprint import check_same_in_store
from lightning_megatron.groups.mesh_groups import DEFAULT_TIMEOUTS, FEW_RANKS
from lightning_megatron.strategy.options.records import JobOptions
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
    job: JobOptions,
    configuration: Mapping[str, str | int],
    listener: int | None,
) -> None:
    """Compare the configurations of all ranks and create their process group if none exists.

    Args:
        size: Number of ranks of the job (ranks).
        configuration: Settings that must be equal on all ranks, by name.
        listener: File descriptor of a socket that listens on the store's port; None without one.

    Communication: collective over all ranks.
    """
    assert environment is not None, "the Trainer sets the cluster environment"
    # Start times of processes differ more than arrival times at collectives. A short timeout is
    # therefore raised to the default here; the groups of the mesh use it unchanged.
    join_timeout = DEFAULT_TIMEOUTS[device.type]
    join_timeout = max(job.timeout_delta or join_timeout, join_timeout)
    options: dict[str, Any] = {"device_id": device} if device.type == "cuda" else {}
    if size > FEW_RANKS:
        # Connect pairs of ranks at their first message: all of them are size ** 2 connections.
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    store = open_store(
        environment.main_address,
        environment.main_port,
        rank,
        size,
        join_timeout,
        os.environ.get(AGENT_STORE) == "True",
        listener,
    )
    # Ranks with different configurations might create groups with different backends and hang, so
    # that the comparison comes first.
    check_same_in_store(store, rank, range(size), configuration, join_timeout, _REMEDY)
    init_process_group(
        environment,
        job.backend or default_backend(device),
        store=store,
        timeout=join_timeout,
        **options,
    )


class ReservedPort:
    """Listening socket on the port that the other ranks are told to connect to.

    The ranks start seconds before rank 0 opens its store. Without a socket on the port, another
    process of this machine could take the port in between, and the job would end with "address
    already in use".
    """

    def __init__(self) -> None:
        self._socket: socket.socket | None = None

    def hold(self, environment: ClusterEnvironment) -> None:
        """Listen on the port of the job's store. Ranks that connect early wait for the store."""
        # The port of an earlier launch that failed may be the same.
        self.release()
        port = environment.main_port
        try:
            self._socket = _listen(environment.main_address, port)
        except OSError as error:
            raise UnsupportedError(
                f"the ranks must meet at a free port of this machine: port {port} cannot be used "
                f"({error.strerror}). Set the environment variable MASTER_PORT to a free port, or "
                "unset it to use any free port."
            ) from error

    def detach(self) -> int | None:
        """Return the file descriptor of the socket, whose new owner closes it; None without one."""
        descriptor = None if self._socket is None else self._socket.detach()
        self._socket = None
        return descriptor

    def release(self) -> None:
        """Close the socket, if one is held."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _listen(address: str, port: int) -> socket.socket:
    """Return a socket that listens on a port of this machine.

    Whoever can connect to the job's store can run code in its ranks. A job whose ranks meet at a
    loopback address can therefore not be reached from other machines. Other addresses may be names
    of this machine that only other machines know, so that the socket then listens on all addresses.
    """
    loopback = _loopback(address, port)
    if loopback is not None:
        return socket.create_server(loopback[1], family=loopback[0], backlog=socket.SOMAXCONN)
    if not socket.has_dualstack_ipv6():
        return socket.create_server(("", port), backlog=socket.SOMAXCONN)
    return socket.create_server(
        ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=socket.SOMAXCONN
    )


def _loopback(address: str, port: int) -> tuple[socket.AddressFamily, Any] | None:
    """Return family and socket address of a loopback address; None for other addresses."""
    try:
        found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    except socket.gaierror:
        return None
    family, _, _, _, name = found[0]
    return (family, name) if ip_address(name[0]).is_loopback else None
