"""A rank that raises ends the job, and its traceback is printed first."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_megatron.strategy.process import children as children_module
from lightning_megatron.strategy.process import parent_watch
from lightning_megatron.strategy.process.children import ChildProcesses
from lightning_megatron.strategy.process.failure import FailureWatch
from lightning_megatron.strategy.process.job_folder import JobFolder
from lightning_megatron.strategy.process.parent_watch import (
    LAUNCHER,
    launcher_is_gone,
    launcher_mark,
)
from lightning_megatron.strategy.process.rank_status import start_time_of
from tests.strategy.scripts import ROOT, run_script
from tests.sweeps import chosen

#: What a launcher does outside of a run when a process ends.
NOTE_EXIT = FailureWatch(0).note_exit


@pytest.mark.parametrize(
    ("kind", "rank"),
    chosen(
        [("raise", 3), ("raise", 1), ("hang", 1), ("teardown", 1)],
        ("raise", 1),
        ("hang", 1),
        ("teardown", 1),
    ),
)
def test_a_failing_rank_ends_the_job_with_its_traceback_first(
    kind: str, rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    result = run_script("run_failure", kind, str(rank), timeout=120)
    assert result.returncode == 1
    assert not list(tmp_path.glob("lightning_megatron*"))
    error_position = result.stderr.index("ArithmeticError: the third batch is bad")
    assert (
        f"[rank {rank}] failed; the other ranks will be stopped." in result.stderr[:error_position]
    )
    assert result.stderr.count("Traceback (most recent call last)") == 1
    later_positions = [
        match.start() for match in re.finditer(r"\[rank \d\] (stops|waits)", result.stderr)
    ]
    # Ranks that hang may be stopped before they print anything, and no rank waits for the last hook
    # of another rank.
    assert later_positions or kind != "raise"
    assert all(position > error_position for position in later_positions)


@pytest.mark.parametrize(
    ("kind", "how"),
    chosen(
        [
            ("os_exit", "ended with exit code 7 and without an error message"),
            ("sys_exit", r"left the run by SystemExit\(0\) at .*run_failure.py:\d+"),
            ("sigsegv", "was ended by SIGSEGV"),
            ("interrupt", r"left the run by KeyboardInterrupt\(\) at .*run_failure.py:\d+"),
        ],
        ("os_exit", "ended with exit code 7 and without an error message"),
        ("sys_exit", r"left the run by SystemExit\(0\) at .*run_failure.py:\d+"),
    ),
)
def test_a_rank_that_ends_by_itself_is_named_before_the_ranks_that_miss_it(
    kind: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    result = run_script("run_failure", kind, "1", timeout=120)
    assert result.returncode != 0
    reports = re.findall(r"^\[rank \d\].*", result.stderr, re.MULTILINE)
    assert re.fullmatch(rf"\[rank 1\] {how}; the other ranks will be stopped\.", reports[0])
    assert all(report.startswith("[rank 0] stops after rank 1 failed") for report in reports[1:])
    assert not list(tmp_path.glob("lightning_megatron*"))


def test_the_first_failing_rank_prints_its_traceback_and_later_ranks_refer_to_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    first, second = FailureWatch(2, num_local=2), FailureWatch(5, num_local=2)

    def fail(
        watch: FailureWatch, error: Exception, before: Callable[[], None] = lambda: None
    ) -> None:
        with watch.guard():
            watch.join_job("job-of-this-test")
            before()
            raise error

    def first_fails() -> None:
        with pytest.raises(ZeroDivisionError):
            fail(first, ZeroDivisionError("the cause"))

    with pytest.raises(KeyError):
        fail(second, KeyError("what followed"), first_fails)
    first.cleanup_done()
    second.cleanup_done()
    output = capsys.readouterr().err
    assert (
        output.index("[rank 2] failed")
        < output.index("ZeroDivisionError: the cause")
        < output.index("[rank 5] stops after")
    )
    assert output.count("Traceback") == 1
    assert first.has_failed
    assert second.has_failed


@pytest.mark.parametrize("exception", [KeyboardInterrupt, SystemExit])
def test_keyboard_interrupts_and_system_exits_are_not_failures(
    exception: type[BaseException], capsys: pytest.CaptureFixture[str]
) -> None:
    watch = FailureWatch(0)
    with pytest.raises(exception), watch.guard():
        raise exception
    assert not watch.has_failed
    assert not capsys.readouterr().err


def processes_with(argument: str) -> list[str]:
    """List the processes that were started with an argument."""
    return [
        path.parent.name
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if has_argument(path, argument)
    ]


def has_argument(path: Path, argument: str) -> bool:
    try:
        return argument in path.read_text(errors="replace")
    except OSError:
        return False


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"still not so after {seconds} seconds"
        time.sleep(0.2)


@pytest.mark.skipif(sys.platform != "linux", reason="reads the list of processes from /proc")
@pytest.mark.parametrize(
    ("launcher", "number"),
    chosen(
        [("own", signal.SIGKILL), ("torchrun", signal.SIGKILL), ("own", signal.SIGINT)],
        ("own", signal.SIGKILL),
        ("own", signal.SIGINT),
    ),
)
def test_launched_ranks_end_after_the_process_that_launched_them(
    launcher: str, number: signal.Signals, tmp_path: Path
) -> None:
    marker = f"marker-{launcher}-{number.name}-{os.getpid()}"
    torchrun = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        if launcher == "torchrun"
        else []
    )
    with subprocess.Popen(
        [sys.executable, *torchrun, "-m", "tests.strategy.run_failure", "hang", "-1", marker],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)},
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        for _ in range(2 if torchrun else 1):
            while "waits forever" not in process.stderr.readline():
                assert process.poll() is None
        process.send_signal(number)
        process.wait()
        killed = time.monotonic()
        wait_until(lambda: not processes_with(marker), 30)
        # An idle machine needs less than a second.
        assert time.monotonic() - killed < 5
    assert not list(tmp_path.glob("lightning_megatron*"))


HUNG_WORKER = """
import time, torch
from torch.utils.data import DataLoader, Dataset
from lightning_megatron.strategy.process.dataloaders import seed_dataloader

class Hangs(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        time.sleep(600 * index)
        return torch.zeros(3)

batches = iter(seed_dataloader(DataLoader(Hangs(), num_workers=1), 0, 0))
next(batches)
print("hangs", flush=True)
next(batches)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the list of processes from /proc")
def test_a_data_worker_that_hangs_ends_with_its_rank_and_leaves_no_files(tmp_path: Path) -> None:
    marker = f"marker-worker-{os.getpid()}"
    with subprocess.Popen(
        [sys.executable, "-c", HUNG_WORKER, marker],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "hangs\n"
        assert len(processes_with(marker)) == 2
        assert list(tmp_path.glob("pymp-*"))
        process.kill()
        process.wait()
        wait_until(lambda: not processes_with(marker), 60)
    assert not list(tmp_path.glob("pymp-*"))


def start(code: str) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-S", "-c", code])


@pytest.mark.parametrize(
    ("codes", "expected"),
    [(("", "import sys; sys.exit(3)"), 3), (("", "import os; os.kill(os.getpid(), 9)"), 137)],
)
def test_a_failed_launched_process_ends_its_launcher_with_its_exit_code(
    codes: tuple[str, ...], expected: int, capsys: pytest.CaptureFixture[str]
) -> None:
    ended: list[int] = []
    children = ChildProcesses([start(code) for code in codes], 1, ended.append, NOTE_EXIT)
    children._wait()
    assert ended == [expected]
    assert ("[rank 2] was ended by SIGKILL" in capsys.readouterr().err) == (expected == 137)


def test_a_script_that_raises_stops_launched_processes_that_do_not_end(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "last_value", ValueError("after the fit"), raising=False)
    monkeypatch.setattr(children_module, "_GRACE_SECONDS", 0.2)
    begun = time.monotonic()
    ended: list[int] = []
    processes = [start(code) for code in ("", "import time; time.sleep(60)")]

    def end(code: int) -> None:
        ended.append(code)
        raise SystemExit

    with pytest.raises(SystemExit):
        ChildProcesses(processes, 1, end, NOTE_EXIT)._wait()
    assert processes[1].wait() == -signal.SIGKILL
    assert time.monotonic() - begun < 30
    assert ended == [1]
    expected = "rank 2 did not end within 0.2 s after the script of rank 0 and will be stopped."
    assert expected in capsys.readouterr().err


def test_a_launched_process_that_succeeds_does_not_end_its_launcher() -> None:
    ended: list[int] = []
    processes = [start("import time; time.sleep(0.2)")]
    ChildProcesses(processes, 1, ended.append, NOTE_EXIT)._wait()
    assert processes[0].returncode == 0
    assert not ended


def test_a_launched_process_that_the_launcher_kills_is_not_a_failure() -> None:
    ended: list[int] = []
    processes = [start("import time; time.sleep(60)")]
    children = ChildProcesses(processes, 1, ended.append, NOTE_EXIT)
    children.forget()
    processes[0].kill()
    processes[0].wait()
    children._wait()
    assert not ended


def test_a_rank_detects_that_its_launcher_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getppid", lambda: 17)
    assert launcher_is_gone({}) is None
    assert launcher_is_gone({LAUNCHER: "12 345"})()  # type: ignore[misc]
    assert not launcher_is_gone({LAUNCHER: launcher_mark()})()  # type: ignore[misc]
    checks = [
        launcher_is_gone(variables)
        for variables in ({LAUNCHER: "17 1"}, {"TORCHELASTIC_RUN_ID": "x"})
    ]
    assert [is_gone() for is_gone in checks] == [False, False]  # type: ignore[misc]
    monkeypatch.setattr("os.getppid", lambda: 1)
    assert [is_gone() for is_gone in checks] == [True, True]  # type: ignore[misc]
    assert launcher_is_gone({"TORCHELASTIC_RUN_ID": "x"}) is None


def test_the_watch_of_a_launcher_ends_with_its_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    class Owner:
        def end(self) -> None:
            """End nothing: the launcher lives."""

    monkeypatch.setattr(parent_watch, "launcher_is_gone", lambda environment: lambda: False)
    before = set(threading.enumerate())
    owner = Owner()
    parent_watch.watch_launcher(owner.end)
    (thread,) = set(threading.enumerate()) - before
    thread.join(0.5)
    assert thread.is_alive()
    del owner
    thread.join(10)
    assert not thread.is_alive()


def test_the_last_rank_to_leave_removes_the_folder_of_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    first, second = JobFolder("job", 0), JobFolder("job", 1)
    (first.path / "process_2").write_text(f"{os.getpid()} 1 {socket.gethostname()}")
    first.leave()
    assert second.path.exists()
    second.leave()
    assert not list(tmp_path.iterdir())


def test_a_new_job_removes_the_folders_of_killed_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    prefix, host = f"lightning_megatron_{os.getuid()}_", socket.gethostname()
    processes = {
        f"{prefix}old": (8 * 86400.0, "1 2 another"),
        f"{prefix}elsewhere": (6 * 86400.0, "1 2 another"),
        f"{prefix}dead": (90.0, f"{os.getpid()} 1 {host}"),
        f"{prefix}starting": (30.0, f"{os.getpid()} 1 {host}"),
        f"{prefix}alive": (90.0, f"{launcher_mark()} {host}"),
        "lightning_megatron_another_users": (8 * 86400.0, ""),
    }
    for name, (age, process) in processes.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / "process_0").write_text(process)
        os.utime(folder, (time.time() - age,) * 2)
    JobFolder("now", 0)
    remaining = {folder.name.removeprefix(prefix) for folder in tmp_path.iterdir()}
    assert remaining == {
        "elsewhere",
        "starting",
        "alive",
        "now",
        "lightning_megatron_another_users",
    }


def test_a_new_job_ignores_entries_of_its_folders_names_that_are_not_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    prefix = f"lightning_megatron_{os.getuid()}_"
    others, target = tmp_path / f"{prefix}others", tmp_path / "target"
    for folder in (others, target):
        folder.mkdir()
        os.mkfifo(folder / "process_0")
    os.mkfifo(tmp_path / f"{prefix}fifo")
    (tmp_path / f"{prefix}text").write_text("no folder")
    (tmp_path / f"{prefix}link").symlink_to(target)
    dead = tmp_path / f"{prefix}zz_dead"
    dead.mkdir()
    (dead / "process_0").write_text(f"{os.getpid()} 1 {socket.gethostname()}")
    for entry in tmp_path.iterdir():
        os.utime(entry, (time.time() - 90.0,) * 2, follow_symlinks=False)
    lstat = Path.lstat
    read_text = Path.read_text

    def lstat_of_others(path: Path) -> os.stat_result:
        status = lstat(path)
        fields = [*status[:4], status.st_uid + (path == others), *status[5:]]
        return os.stat_result(fields)

    def read_file(path: Path, *args: Any, **options: Any) -> str:
        assert path.is_file(), "reading a pipe would wait forever"
        return read_text(path, *args, **options)

    monkeypatch.setattr(Path, "lstat", lstat_of_others)
    monkeypatch.setattr(Path, "read_text", read_file)
    job = JobFolder("now", 0)
    assert not dead.exists()
    assert {entry.name for entry in tmp_path.iterdir()} == {
        *(f"{prefix}{name}" for name in ("others", "fifo", "text", "link", "now")),
        "target",
    }
    assert job.path.stat().st_mode & 0o077 == 0


def test_a_killed_process_counts_as_ended_before_its_parent_waits_for_it() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        assert start_time_of(process.pid)
        process.kill()
        deadline = time.monotonic() + 10
        while start_time_of(process.pid) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not start_time_of(process.pid)
        assert Path("/proc", str(process.pid)).exists(), "nobody has asked for its exit code yet"
