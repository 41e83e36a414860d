"""No other process can take the port of the job's store between its choice and its use."""

from __future__ import annotations

import socket
import threading
from datetime import timedelta
from ipaddress import ip_address

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


def test_rank_that_connects_first_waits_for_the_store_on_the_reserved_port(
    environment: LightningEnvironment,
) -> None:
    reserved = ReservedPort()
    reserved.hold(environment)
    port = environment.main_port
    with pytest.raises(OSError, match="in use"), socket.socket() as other_socket:
        other_socket.bind(("127.0.0.1", port))

    stores: list[dist.Store] = []

    def connect() -> None:
        stores.append(open_store("127.0.0.1", port, 1, 2, _TIMEOUT, use_agent_store=False))

    thread = threading.Thread(target=connect)
    thread.start()
    store = open_store(
        "127.0.0.1", port, 0, 2, _TIMEOUT, use_agent_store=False, listener=reserved.detach()
    )
    thread.join(timeout=30)
    store.set("key", "value")
    assert stores[0].get("key") == b"value"
    assert reserved.detach() is None


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost", "0.0.0.0"])
def test_ranks_that_meet_at_a_loopback_address_are_not_reachable_from_outside(
    address: str, environment: LightningEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_ADDR", address)
    reserved = ReservedPort()
    reserved.hold(environment)
    descriptor = reserved.detach()
    assert descriptor is not None
    with socket.socket(fileno=descriptor) as held:
        bound = ip_address(held.getsockname()[0])
    assert bound.is_loopback == (address != "0.0.0.0")


def test_port_in_use_is_refused_before_ranks_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("", 0)) as other_socket:
        port = other_socket.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(port))
        with pytest.raises(UnsupportedError, match=f"port {port} cannot be used .*MASTER_PORT"):
            ReservedPort().hold(LightningEnvironment())


def test_port_is_free_after_its_release(environment: LightningEnvironment) -> None:
    reserved = ReservedPort()
    reserved.hold(environment)
    reserved.release()
    assert reserved.detach() is None
    second = ReservedPort()
    second.hold(environment)
    second.release()
    with socket.create_server(("", environment.main_port)) as other_socket:
        assert other_socket.getsockname()[1] == environment.main_port
