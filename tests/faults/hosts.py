"""Two hosts on one machine: network namespaces with host names and a cable between them."""

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

TOOLS = ("ip", "unshare", "nsenter")


@dataclass(frozen=True)
class Host:
    """Namespaces that act as one host and end with the last process in them: its name, its address
    on the cable, and the process that keeps the namespaces open.
    """

    name: str
    address: str
    pid: int

    @property
    def device(self) -> str:
        """Return the network device at this host's end of the cable."""
        return f"{self.name}-cable"

    @property
    def command(self) -> tuple[str, ...]:
        """Return the words before a command that run it on this host."""
        return "nsenter", f"--target={self.pid}", "--net", "--uts", "--"

    def processes(self) -> list[int]:
        """List the processes that run on this host."""
        pids, network = [], os.readlink(f"/proc/{self.pid}/ns/net")
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if os.readlink(path / "ns/net") == network and int(path.name) != self.pid:
                    pids.append(int(path.name))
        return pids

    def lose(self) -> None:
        """Disconnect the cable, so that the other host is not notified, and kill every process."""
        run(*self.command, "ip", "link", "set", self.device, "down")
        self.kill()

    def kill(self) -> None:
        """Kill every process, including those that start meanwhile."""
        while pids := self.processes():
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for pid in pids:
                # Children of this process stay as zombies, which have left their namespaces.
                with suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)


def run(*command: str) -> None:
    """Run a short command; raise RuntimeError with its message if it fails."""
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"{' '.join(command)}: {result.stderr.strip()}")


@contextmanager
def host(name: str, address: str) -> Iterator[Host]:
    """Start a host without a network for the duration of the block."""
    # The holder waits for the end of its input, which also comes if this process is killed.
    script = f"hostname {name} && echo ready && exec cat"
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process: subprocess.Popen[str] = subprocess.Popen(
        ["unshare", "--net", "--uts", "sh", "-c", script],
        **pipes,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None, "there is a pipe"
    assert process.stderr is not None, "there is a pipe"
    try:
        if process.stdout.readline() != "ready\n":
            raise RuntimeError(process.stderr.read().strip())
        new_host = Host(name, address, process.pid)
        try:
            yield new_host
        finally:
            new_host.kill()
    finally:
        process.kill()
        process.communicate()


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Yield two hosts that are connected only to each other, or skip the test."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if os.geteuid() or missing:
        pytest.skip(
            f"two hosts need root and {', '.join(TOOLS)}: user {os.geteuid()}, missing {missing}"
        )
    with ExitStack() as stack:
        try:
            first = stack.enter_context(host("one", "10.77.0.1"))
            second = stack.enter_context(host("two", "10.77.0.2"))
            link = f"{first.device} type veth peer name {second.device} netns {second.pid}"
            run(*first.command, "ip", "link", "add", *link.split())
            for end in (first, second):
                run(*end.command, "ip", "address", "add", f"{end.address}/24", "dev", end.device)
                for device in ("lo", end.device):
                    run(*end.command, "ip", "link", "set", device, "up")
        except RuntimeError as error:
            pytest.skip(f"two hosts cannot be made here: {error}")
        yield first, second
