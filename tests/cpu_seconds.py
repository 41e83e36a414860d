"""CPU seconds of every test with all processes that it starts, summed by folder and held against
written budgets.

Time on the clock depends on what else runs, CPU seconds on the machine: a slow one gets more of
them, by how long it takes for a fixed piece of work.
"""

from __future__ import annotations

import os
import resource
import time
from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

#: A folder fails above this multiple of its budget.
TOLERANCE = 1.25
#: CPU seconds of the fixed piece of work on the machine of the budgets.
REFERENCE = 0.09
START = "(imports and collection)"


def seconds_so_far() -> float:
    """Return the CPU seconds of this process, and of the ended processes that it and the fork
    server started.
    """
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages) + _fork_server()


def _fork_server() -> float:
    # Ranks of a world are children of the fork server, which lives as long as pytest does.
    server = forkserver._forkserver  # type: ignore[attr-defined]
    stat = Path(f"/proc/{server._forkserver_pid}/stat")
    if server._forkserver_pid is None or not stat.exists():
        return 0.0
    # Behind the name, which may hold spaces: user and system time of ended children. The server's own
    # imports belong to no test.
    ticks = stat.read_text().rpartition(")")[2].split()[13:15]
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


class CpuSeconds:
    """Plugin that measures the phases of all tests and prints the sums by folder at the end."""

    def __init__(self, config: pytest.Config) -> None:
        lines = () if config.getoption("--sweeps") else config.getini("cpu_budgets")
        self._budgets = dict(_budget(line) for line in lines)
        self._by_folder: Counter[str] = Counter()
        self._worker_output = getattr(config, "workeroutput", None)
        self._log = config.getoption("--cpu-log")
        self._last = 0.0

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self) -> None:
        """Count what every process takes to import and collect."""
        self._by_folder[START] += seconds_so_far()
        if self._worker_output is not None:
            self._worker_output["start_seconds"] = seconds_so_far()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Add what a worker took to import and collect."""
        self._by_folder[START] += getattr(node, "workeroutput", {}).get("start_seconds", 0.0)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Count from here what the test's first phase takes."""
        self._last = seconds_so_far()
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Iterator[None]:
        """Give the report of a phase its seconds, which travel with it from a worker."""
        report = yield
        now = seconds_so_far()
        report.cpu_seconds, self._last = now - self._last, now
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add a phase to the sum of its folder."""
        seconds = getattr(report, "cpu_seconds", 0.0)
        self._by_folder[_folder(report.nodeid)] += seconds
        if self._log and self._worker_output is None and seconds >= 0.01:
            with open(self._log, "a") as log:
                log.write(f"{seconds:.2f} {report.when} {report.nodeid}\n")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail a run whose tests all passed where a folder took too long."""
        if self._over() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the seconds by folder, and which are too many."""
        terminalreporter.section("CPU seconds by folder")
        for folder, seconds in sorted(self._by_folder.items()):
            budget = self._budgets.get(folder)
            of = "" if budget is None else f" of {budget}"
            terminalreporter.write_line(f"{seconds:7.1f}{of}  {folder}")
        terminalreporter.write_line(f"{self._by_folder.total():7.1f}  together")
        for folder in self._over():
            terminalreporter.write_line(
                f"{folder} takes {self._by_folder[folder]:.0f} CPU seconds; its budget is "
                f"{self._budgets[folder]}, of which a quarter may be exceeded, on a machine that is "
                f"{self._slowness:.1f} times as fast as this one.\n"
                "Make its tests smaller (--cpu-log FILE lists them), or raise cpu_budgets in "
                "pyproject.toml and say why.",
                red=True,
            )

    @cached_property
    def _slowness(self) -> float:
        """How many times as long as the machine of the budgets this one takes; at least 1."""
        start = time.process_time()
        sum(number * number for number in range(2_000_000))
        return max(1.0, (time.process_time() - start) / REFERENCE)

    def _over(self) -> list[str]:
        over = [
            folder
            for folder, budget in self._budgets.items()
            if self._by_folder[folder] > TOLERANCE * budget
        ]
        # Only a run that is over its budgets asks how slow the machine is.
        return [
            folder
            for folder in over
            if self._by_folder[folder] > TOLERANCE * self._budgets[folder] * self._slowness
        ]


def _budget(line: str) -> tuple[str, int]:
    folder, _, seconds = line.partition("=")
    return folder.strip(), int(seconds)


def _folder(nodeid: str) -> str:
    parts = Path(nodeid.partition("::")[0]).parts
    return parts[1] if len(parts) > 2 else "."
