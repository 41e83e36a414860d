"""Processes of a job: the launcher's variables, the port of its store, failures, and what is left."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch.plugins.environments import (
    LightningEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)
from lightning.pytorch.utilities import _pytree
from torch.utils.data import DataLoader, RandomSampler

from lightning_megatron import MegatronStrategy
from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.agent_store import first_claim, open_store
from lightning_megatron.once import say_once
from lightning_megatron.strategy.private.processes import without_noise
from lightning_megatron.strategy.process import children as children_module
from lightning_megatron.strategy.process.children import (
    LAUNCHER,
    ChildProcesses,
    launcher_is_gone,
    launcher_mark,
)
from lightning_megatron.strategy.process.dataloaders import seed_dataloader
from lightning_megatron.strategy.process.failure import FailureWatch
from lightning_megatron.strategy.process.launcher import MegatronLauncher
from lightning_megatron.strategy.process.rank_status import start_time_of
from lightning_megatron.strategy.process.rendezvous import ReservedPort
from tests.fits import Job, trainer_of

TIMEOUT = timedelta(seconds=30)
#: What a launcher does outside of a run when a process ends.
NOTE_EXIT = FailureWatch(0).note_exit

# ---- ranks


def strategy_of(devices: int, num_nodes: int = 1, **sizes: Any) -> MegatronStrategy:
    job = Job(strategy=sizes, trainer={"num_nodes": num_nodes, "use_distributed_sampler": True})
    strategy = trainer_of(job, devices).strategy
    assert isinstance(strategy, MegatronStrategy)
    return strategy


SLURM = {
    "SLURM_NTASKS": "8", "SLURM_NTASKS_PER_NODE": "4", "SLURM_PROCID": "6", "SLURM_LOCALID": "2",
    "SLURM_NODEID": "1", "SLURM_JOB_ID": "77", "SLURM_JOB_NAME": "train", "SLURM_NODELIST": "node[3-4]",
}  # fmt: skip
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "run", "RANK": "3", "LOCAL_RANK": "3", "GROUP_RANK": "0", "WORLD_SIZE": "4",
    "MASTER_ADDR": "localhost", "MASTER_PORT": "1234",
}  # fmt: skip


def test_variables_of_launchers_determine_ranks(monkeypatch):
    with monkeypatch.context() as patch:
        for name, value in SLURM.items():
            patch.setenv(name, value)
        strategy = strategy_of(4, num_nodes=2, tp=2, pp=2)
        environment: Any = strategy.cluster_environment
        assert isinstance(environment, SLURMEnvironment)
        assert (strategy.global_rank, strategy.local_rank, strategy.node_rank) == (6, 2, 1)
        assert strategy.world_size == 8
        assert environment.main_address == "node3"
        assert strategy.layout.coordinates(6) == {"tp": 0, "cp": 0, "dp": 1, "pp": 1}
        assert strategy.distributed_sampler_kwargs == {"num_replicas": 2, "rank": 1}
        assert not strategy.is_global_zero
    with monkeypatch.context() as patch:
        for name, value in TORCHRUN.items():
            patch.setenv(name, value)
        strategy = strategy_of(4, tp=2)
        assert isinstance(strategy.cluster_environment, TorchElasticEnvironment)
        assert strategy.global_rank == 3
        assert strategy.distributed_sampler_kwargs == {"num_replicas": 2, "rank": 1}
    strategy = strategy_of(4, tp=2, pp=2)
    assert isinstance(strategy.cluster_environment, LightningEnvironment)
    assert isinstance(strategy.launcher, MegatronLauncher)
    assert not strategy.cluster_environment.creates_processes_externally
    assert (strategy.num_processes, strategy.num_nodes) == (4, 1)
    assert strategy.root_device == torch.device("cpu")
    assert strategy.is_distributed


def test_programs_without_a_file_are_refused_before_processes_start(monkeypatch):
    launcher: Any = strategy_of(2, tp=2).launcher
    monkeypatch.setattr(launcher, "_check", lambda arguments: None)
    for program, source in (("-c", "python -c"), ("", "standard input")):
        monkeypatch.setattr(sys, "argv", [program])
        with pytest.raises(UnsupportedError, match=f"must be a file, .*: it comes from {source}"):
            launcher.launch(lambda: None)


def test_seeds_of_data_loaders_depend_on_the_data_rank_alone(monkeypatch):
    strategy = strategy_of(4, tp=2)
    monkeypatch.setitem(os.environ, "PL_SEED_WORKERS", "1")
    draws = []
    for rank in range(4):
        strategy.cluster_environment.set_global_rank(rank)  # type: ignore[union-attr]
        prepared: Any = strategy.process_dataloader(DataLoader(range(4), shuffle=True))
        draws.append((prepared.generator.initial_seed(), prepared.worker_init_fn.keywords["rank"]))
        assert prepared.sampler.generator.initial_seed() not in dict(draws)
    assert draws[0] == draws[1] != draws[2] == draws[3]


def test_samplers_that_users_divide_have_one_order_on_all_data_ranks():
    loaders = [DataLoader(range(32), sampler=RandomSampler(range(32))) for _ in range(3)]
    for loader, seed, data_rank in zip(loaders, (1, 1, 2), (0, 1, 0), strict=True):
        seed_dataloader(loader, seed, data_rank)
    first, second, reseeded = (list(loader.sampler) for loader in loaders)
    assert first == second != reseeded
    own, other, _ = (loader.generator.initial_seed() for loader in loaders)
    assert own != other


# ---- the port of the store


@pytest.fixture
def environment(monkeypatch):
    monkeypatch.delenv("MASTER_PORT", raising=False)
    return LightningEnvironment()


def test_rank_that_connects_first_waits_for_the_store_on_the_reserved_port(environment):
    reserved = ReservedPort()
    reserved.hold(environment)
    port, stores = environment.main_port, list[dist.Store]()
    with pytest.raises(OSError, match="in use"), socket.socket() as other_socket:
        other_socket.bind(("127.0.0.1", port))

    def connect(rank, listener=None):
        arguments: Any = "127.0.0.1", port, rank, 2, TIMEOUT
        return open_store(*arguments, use_agent_store=False, listener=listener)

    thread = threading.Thread(target=lambda: stores.append(connect(1)))
    thread.start()
    store = connect(0, reserved.detach())
    thread.join(timeout=30)
    store.set("key", "value")
    assert stores[0].get("key") == b"value"
    assert reserved.detach() is None


def test_ranks_that_meet_at_a_loopback_address_are_not_reachable_from_outside(
    environment, monkeypatch
):
    for address in ("127.0.0.1", "localhost", "0.0.0.0"):
        monkeypatch.setenv("MASTER_ADDR", address)
        monkeypatch.delenv("MASTER_PORT", raising=False)
        reserved = ReservedPort()
        reserved.hold(LightningEnvironment())
        descriptor = reserved.detach()
        assert descriptor is not None
        with socket.socket(fileno=descriptor) as held:
            bound = ip_address(held.getsockname()[0])
        assert bound.is_loopback == (address != "0.0.0.0")


def test_a_port_in_use_is_refused_before_ranks_start_and_a_released_port_is_free(
    environment, monkeypatch
):
    for _ in range(2):
        reserved = ReservedPort()
        reserved.hold(environment)
        reserved.release()
        assert reserved.detach() is None
    with socket.create_server(("", environment.main_port)) as other_socket:
        port = other_socket.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(port))
        with pytest.raises(UnsupportedError, match=f"port {port} cannot be used .*MASTER_PORT"):
            ReservedPort().hold(LightningEnvironment())


def test_only_what_no_user_can_act_on_is_hidden_at_the_start_of_a_run():
    log = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    lines = ["💡 Tip: install this", "TPU available: False, using: 0", "GPU available: False"]
    records = [log.makeRecord(log.name, logging.INFO, "", 1, line, (), None) for line in lines]
    advice = "It is recommended to use `self.log('val_loss', ..., sync_dist=True)`"
    for num_data_ranks, expected in ((1, ["mine"]), (2, [advice, "mine"])):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            with without_noise(num_data_ranks):
                assert list(map(bool, map(log.filter, records))) == [False, False, True]
                _pytree._tree_flatten(1)
                warnings.warn(advice, PossibleUserWarning, stacklevel=1)
                warnings.warn("mine", FutureWarning, stacklevel=1)
        assert [str(one.message) for one in seen] == expected
    assert all(map(log.filter, records))


# ---- failures


def test_keyboard_interrupts_and_system_exits_are_not_failures(capsys):
    for exception in (KeyboardInterrupt, SystemExit):
        watch = FailureWatch(0)
        with pytest.raises(exception), watch.guard():
            raise exception
        assert not watch.has_failed
    assert not capsys.readouterr().err


def test_the_message_of_a_refusal_stands_once_before_its_traceback_and_alone_in_a_command(
    capsys, monkeypatch
):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    for shown, is_traced in (("0", False), ("1", True), (None, True)):
        monkeypatch.delenv("LIGHTNING_MEGATRON_TRACEBACK", raising=False)
        if shown is not None:
            monkeypatch.setenv("LIGHTNING_MEGATRON_TRACEBACK", shown)
        watch = FailureWatch(0)
        refusal = UnsupportedError("two of three")
        with pytest.raises(UnsupportedError), watch.guard():
            raise refusal
        watch.cleanup_done()
        printed = capsys.readouterr().err
        assert printed.count("two of three") == 1
        assert is_traced == ("Traceback" in printed.partition("two of three")[2])


def test_ranks_of_a_launcher_say_once_what_they_refuse_before_they_have_joined(
    capsys, monkeypatch, tmp_path
):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("LIGHTNING_MEGATRON_TRACEBACK", "0")
    told = []
    # The last two are those of a launcher's next attempt, and of another launcher.
    for parent, rank, text in (
        (1, "0", "a"), (1, "1", "a"), (1, "1", "b"), (1, "0", "b"), (1, "0", "a"), (2, "1", "a")
    ):  # fmt: skip
        monkeypatch.setattr("os.getppid", lambda parent=parent: parent)
        monkeypatch.setenv("RANK", rank)
        watch = FailureWatch(int(rank), 2)
        with pytest.raises(UnsupportedError), watch.guard():
            raise UnsupportedError(text)
        watch.cleanup_done()
        told.append(capsys.readouterr().err.count(f"[rank {rank}] {text}"))
    assert told == [1, 0, 1, 0, 1, 1]


def test_another_machine_of_torchrun_names_the_one_that_said_a_refusal(
    capsys, monkeypatch, tmp_path
):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setattr("socket.gethostname", lambda: "node")
    agents = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1"}
    agents |= {"MASTER_PORT": str(store.port), "GROUP_WORLD_SIZE": "2"}
    told = []
    for machine, text, attempt in (
        ("1", "a", "0"),
        ("0", "a", "0"),
        ("0", "b", "0"),
        ("0", "a", "1"),
    ):
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        monkeypatch.setattr("os.getppid", lambda parent=f"{machine}{attempt}": parent)
        own = {"RANK": machine, "GROUP_RANK": machine, "TORCHELASTIC_RESTART_COUNT": attempt}
        for name, value in (agents | own).items():
            monkeypatch.setenv(name, value)
        say_once(text, lambda text=text: print(text, file=sys.stderr), first_claim)
        told.append(capsys.readouterr().err.strip())
    other = "node (machine 0) refuses the same as node (machine 1), which says why"
    assert told == ["a", other, "b", "a"]
    monkeypatch.setenv("MASTER_PORT", "1")
    say_once("c", lambda: print("c", file=sys.stderr), first_claim)
    assert capsys.readouterr().err == "c\n"


def test_the_first_failed_rank_is_named_before_its_report_is_printed(tmp_path):
    first, second = FailureWatch(0, 2), FailureWatch(1, 2)
    first._joined = second._joined = SimpleNamespace(path=tmp_path)  # type: ignore[assignment]
    assert second._first() == ("", None)
    assert [watch._claim() for watch in (first, second)] == [True, False]
    for message in (None, "", "two\nlines"):
        if message is not None:
            first._report_is_printed("rank 0", message)
        assert second._first() == first._first() == ("rank 0", message)
    assert not second._claim_first("rank 1")


# ---- launched processes and files


def start(code: str) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-S", "-c", code])


def test_a_failed_launched_process_ends_its_launcher_with_its_exit_code(capsys):
    for code, expected in (
        ("import sys; sys.exit(3)", 3),
        ("import os; os.kill(os.getpid(), 9)", 137),
    ):
        ended: list[int] = []
        ChildProcesses([start(""), start(code)], 1, ended.append, NOTE_EXIT)._wait()
        assert ended == [expected]
        killed = "[rank 2] was ended by SIGKILL" in capsys.readouterr().err
        assert killed == (expected == 137)


def test_a_script_that_raises_stops_launched_processes_that_do_not_end(capsys, monkeypatch):
    monkeypatch.setattr(sys, "last_value", ValueError("after the fit"), raising=False)
    monkeypatch.setattr(children_module, "_GRACE_SECONDS", 0.2)
    ended: list[int] = []
    processes = [start(code) for code in ("", "import time; time.sleep(60)")]

    def end(code):
        ended.append(code)
        raise SystemExit

    with pytest.raises(SystemExit):
        ChildProcesses(processes, 1, end, NOTE_EXIT)._wait()
    assert processes[1].wait() == -signal.SIGKILL
    assert ended == [1]
    expected = "rank 2 did not end within 0.2 s after the script of rank 0 and will be stopped."
    assert expected in capsys.readouterr().err


def test_launched_processes_that_succeed_or_are_forgotten_do_not_end_their_launcher():
    ended: list[int] = []
    succeeds, forgotten = start(""), start("import time; time.sleep(60)")
    ChildProcesses([succeeds], 1, ended.append, NOTE_EXIT)._wait()
    assert succeeds.returncode == 0
    children = ChildProcesses([forgotten], 1, ended.append, NOTE_EXIT)
    children.forget()
    forgotten.kill()
    forgotten.wait()
    children._wait()
    assert not ended


def test_a_rank_detects_that_its_launcher_is_gone(monkeypatch):
    torchrun = {"TORCHELASTIC_RUN_ID": "x"}
    monkeypatch.setattr("os.getppid", lambda: 17)
    assert launcher_is_gone({}) is None
    checks: Any = [
        launcher_is_gone(variables)
        for variables in (
            {LAUNCHER: "12 345"},
            {LAUNCHER: launcher_mark()},
            {LAUNCHER: "17 1"},
            torchrun,
        )
    ]
    assert [is_gone() for is_gone in checks] == [True, False, False, False]
    monkeypatch.setattr("os.getppid", lambda: 1)
    assert [is_gone() for is_gone in checks[2:]] == [True, True]
    assert launcher_is_gone(torchrun) is None


def test_a_killed_process_counts_as_ended_before_its_parent_waits_for_it():
    with subprocess.Popen(["sleep", "60"]) as process:
        assert start_time_of(process.pid)
        process.kill()
        deadline = time.monotonic() + 10
        while start_time_of(process.pid) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not start_time_of(process.pid)
        assert Path("/proc", str(process.pid)).exists(), "nobody has asked for its exit code yet"
