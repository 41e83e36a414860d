"""Launcher that starts one process per device from a plain ``python train.py``."""

from __future__ import annotations

import inspect
import os
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from lightning.fabric.plugins.environments import ClusterEnvironment
from typing_extensions import override

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.strategy.private.processes import (
    SubprocessScriptLauncher,
    set_num_threads_if_needed,
    without_noise,
)
from lightning_megatron.strategy.process.children import LAUNCHER, ChildProcesses, launcher_mark
from lightning_megatron.strategy.process.failure import FailureWatch
from lightning_megatron.strategy.process.rendezvous import ReservedPort


class MegatronLauncher(SubprocessScriptLauncher):
    """Subprocess launcher like that of ``ddp``, which reports failures before clean-up runs.

    Args:
        num_processes: Number of processes on this node (processes).
        num_nodes: Number of nodes of the job (nodes).
        watch: Failure watch of this rank.
        port: Port of the job's store, held before other processes start.
        check: Function that raises an error for runs that are not supported. It receives the
            arguments of ``fit``, ``validate``, ``test`` or ``predict``, and ``trainer``, by name.
        num_data_ranks: Function that returns the number of data-parallel ranks, which the check may
            choose (ranks).
        explain: Function that returns what to add to the error of a device whose memory is full.
    """

    def __init__(
        self,
        cluster_environment: ClusterEnvironment,
        num_processes: int,
        num_nodes: int,
        watch: FailureWatch,
        port: ReservedPort,
        check: Callable[[Mapping[str, Any]], None],
        num_data_ranks: Callable[[], int],
        explain: Callable[[BaseException], str],
    ) -> None:
        super().__init__(cluster_environment, num_processes, num_nodes)
        self._watch = watch
        self._port = port
        self._check = check
        self._num_data_ranks = num_data_ranks
        self._explain = explain
        self._children: ChildProcesses | None = None

    @override
    def launch(
        self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any
    ) -> Any:
        # Check before other processes start, so that an error prints only one traceback.
        arguments = inspect.signature(function).bind_partial(*args, **kwargs).arguments
        self._check({**arguments, "trainer": trainer})

        # The rest equals Lightning's launcher, except that ``ChildProcesses`` supervises the
        # processes. Lightning polls them every five seconds, and stops when this process exits.
        environment = self.cluster_environment
        environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not environment.creates_processes_externally:
            if self.num_processes > 1:
                check_has_file(sys.argv[0])
            if self.num_processes * self.num_nodes > 1 and environment.node_rank() == 0:
                self._port.hold(environment)
            self._call_children_scripts()
            first = environment.node_rank() * self.num_processes + 1
            if self.procs:
                # ChildProcesses lives until this process exits, and gets no reference to this
                # launcher, which would keep the trainer and its tensors in memory.
                watch = self._watch
                self._children = ChildProcesses(self.procs, first, watch.end, watch.note_exit)
                self._children.watch()
        set_num_threads_if_needed(num_processes=self.num_processes)
        # A single process has no other ranks to notify.
        is_alone = self.num_processes * self.num_nodes == 1
        guard = nullcontext() if is_alone else self._watch.guard()
        with without_noise(self._num_data_ranks()), guard:
            try:
                return function(*args, **kwargs)
            except torch.OutOfMemoryError as error:
                try:
                    report = self._explain(error)
                except (
                    AttributeError,
                    LookupError,
                    RuntimeError,
                    TypeError,
                    ValueError,
                ) as failure:
                    report = f"What was held is unknown: {type(failure).__name__}: {failure}"
                error.add_note(f"\n{report}")
                raise

    @override
    def kill(self, signum: Any) -> None:
        if self._children is None or signum != signal.SIGKILL:
            super().kill(signum)
            return
        # After Ctrl-C this process has already left the job folder. Killed ranks cannot remove
        # their files, so this process removes them.
        self._children.forget()
        super().kill(signum)
        self._children.wait_for_end()
        self._watch.remove_all_files()

    @override
    def _call_children_scripts(self) -> None:
        os.environ[LAUNCHER] = launcher_mark()
        try:
            super()._call_children_scripts()
        finally:
            del os.environ[LAUNCHER]


def check_has_file(program: str) -> None:
    """Check that other processes can run the program of this process."""
    if program in {"-c", "-", ""}:
        source = "python -c" if program == "-c" else "standard input"
        raise UnsupportedError(
            "a program that starts one process for each device must be a file, because every "
            f"process runs it from its beginning: it comes from {source}. Save it as a file and "
            "run `python train.py`."
        )
