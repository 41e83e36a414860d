"""The port of the job's store: nobody can take it between its choice and the store's start."""

from __future__ import annotations

import socket
import threading
from datetime import timedelta

import pytest
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment

from lightning_megatron import UnsupportedError
from lightning_megatron.groups.agent_store import open_store
from lightning_megatron.strategy.process.reserved_port import ReservedPort

_TIMEOUT = timedelta(seconds=30)


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> LightningEnvironment:
    monkeypatch.delenv("MASTER_PORT", raising=False)
    return LightningEnvironment()


def test_a_rank_that_connects_first_waits_for_the_store_on_the_reserved_port(
    environment: LightningEnvironment,
) -> None:
    held = ReservedPort()
    held.hold(environment)
    port = environment.main_port
    with pytest.raises(OSError, match="in use"), socket.socket() as other:
        other.bind(("127.0.0.1", port))

    found: list[dist.Store] = []

    def connect() -> None:
        found.append(open_store("127.0.0.1", port, 1, 2, _TIMEOUT, use_agent_store=False))

    early = threading.Thread(target=connect)
    early.start()
    store = open_store(
        "127.0.0.1", port, 0, 2, _TIMEOUT, use_agent_store=False, listener=held.detach()
    )
    early.join(timeout=30)
    store.set("key", "value")
    assert found[0].get("key") == b"value"
    assert held.detach() is None


def test_a_port_of_another_process_is_refused_before_ranks_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(port))
        with pytest.raises(UnsupportedError, match=f"port {port} cannot be used .*MASTER_PORT"):
            ReservedPort().hold(LightningEnvironment())


def test_a_port_is_free_after_its_release(environment: LightningEnvironment) -> None:
    held = ReservedPort()
    held.hold(environment)
    held.release()
    again = ReservedPort()
    again.hold(environment)
    again.release()
