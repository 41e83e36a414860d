"""Port of a job's store, which the first process reserves as soon as it is chosen."""

from __future__ import annotations

import socket
from ipaddress import ip_address
from typing import Any

from lightning.fabric.plugins import ClusterEnvironment

from lightning_megatron.errors import UnsupportedError


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
        if self._socket is None:
            return None
        descriptor = self._socket.detach()
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
