"""Two hosts of their own on one machine: network namespaces with a cable between them, each with a
host name.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.faults.holder import namespace

TOOLS = ("ip", "unshare", "nsenter")


@dataclass(frozen=True)
class Host:
    """Name what stands for one host: namespaces that end with the last process in them.

    Args:
        name: Its host name.
        address: Its address on the cable.
        pid: The process that keeps the namespaces.
    """

    name: str
    address: str
    pid: int

    @property
    def device(self) -> str:
        """Return the name of its end of the cable."""
        return f"{self.name}-cable"

    @property
    def command(self) -> tuple[str, ...]:
        """Return what to put before a command that shall run there."""
        return "nsenter", f"--target={self.pid}", "--net", "--uts", "--"

    def processes(self) -> list[int]:
        """List the processes that run there."""
        found, own = [], os.readlink(f"/proc/{self.pid}/ns/net")
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if os.readlink(path / "ns/net") == own and int(path.name) != self.pid:
                    found.append(int(path.name))
        return found

    def lose(self) -> None:
        """Pull the cable, so that nothing tells the other host, then kill every process."""
        run(*self.command, "ip", "link", "set", self.device, "down")
        self.kill()

    def kill(self) -> None:
        """Kill every process, those that appear meanwhile included."""
        while found := self.processes():
            for pid in found:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for pid in found:
                # Children of this process stay as zombies, which have left their namespaces.
                with suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)


def run(*command: str) -> None:
    """Run a short command.

    Raises:
        RuntimeError: If it fails, with what it said.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


@contextmanager
def host(name: str, address: str) -> Iterator[Host]:
    """Start a host without network for the length of the block."""
    with namespace("--net", "--uts", script='hostname "$0"', arguments=(name,)) as process:
        made = Host(name, address, process.pid)
        try:
            yield made
        finally:
            made.kill()


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Return two hosts that are connected to each other and to nothing else; skip the test where
    that cannot be.
    """
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if os.geteuid() or missing:
        pytest.skip(
            f"two hosts need root and {', '.join(TOOLS)}: user {os.geteuid()}, missing {missing}"
        )
    with ExitStack() as stack:
        try:
            one = stack.enter_context(host("one", "10.77.0.1"))
            two = stack.enter_context(host("two", "10.77.0.2"))
            peer = ("peer", "name", two.device, "netns", str(two.pid))
            run(*one.command, "ip", "link", "add", one.device, "type", "veth", *peer)
            for each in (one, two):
                run(*each.command, "ip", "address", "add", f"{each.address}/24", "dev", each.device)
                for device in ("lo", each.device):
                    run(*each.command, "ip", "link", "set", device, "up")
        except RuntimeError as error:
            pytest.skip(f"two hosts cannot be made here: {error}")
        yield one, two
