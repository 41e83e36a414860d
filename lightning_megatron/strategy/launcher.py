"""Launcher that starts one process per device from a plain ``python train.py``."""

from __future__ import annotations

import inspect
import os
import signal
from collections.abc import Callable, Mapping
from typing import Any

from lightning.fabric.plugins.environments import ClusterEnvironment
from typing_extensions import override

from lightning_megatron.strategy.children import Children
from lightning_megatron.strategy.failure import FailureWatch
from lightning_megatron.strategy.parent_watch import LAUNCHER, launcher_mark
from lightning_megatron.strategy.private import SubprocessScriptLauncher, set_num_threads_if_needed


class MegatronLauncher(SubprocessScriptLauncher):
    """Subprocess launcher like that of ``ddp``, which reports failures before clean-up runs.

    Args:
        cluster_environment: Knows the ranks and whether somebody else starts the processes.
        num_processes: Processes on this node.
        num_nodes: Nodes of the job.
        watch: Returns the failure watch of this rank.
        check: Refuses what cannot run, given the arguments of ``fit``, ``validate``, ``test`` or ``predict`` by name,
            and the ``trainer``.
    """

    def __init__(
        self,
        cluster_environment: ClusterEnvironment,
        num_processes: int,
        num_nodes: int,
        watch: Callable[[], FailureWatch],
        check: Callable[[Mapping[str, Any]], None],
    ) -> None:
        super().__init__(cluster_environment, num_processes, num_nodes)
        self._watch, self._check = watch, check
        self._children: Children | None = None

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        # Before any other process is started, so that the user reads one traceback.
        arguments = inspect.signature(function).bind_partial(*args, **kwargs).arguments
        self._check({**arguments, "trainer": trainer})

        def guarded(*inner_args: Any, **inner_kwargs: Any) -> Any:
            if self.num_processes * self.num_nodes == 1:
                return function(*inner_args, **inner_kwargs)
            with self._watch().guard():
                return function(*inner_args, **inner_kwargs)

        # As Lightning's own, but for its watch over the launched processes, which ours replaces: that looks every five
        # seconds, and not when this process is at its end.
        environment = self.cluster_environment
        environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not environment.creates_processes_externally:
            self._call_children_scripts()
            first = environment.node_rank() * self.num_processes + 1
            self._children = Children(self.procs, first, lambda code: self._watch().end(code))
            self._children.watch()
        set_num_threads_if_needed(num_processes=self.num_processes)
        return guarded(*args, **kwargs)

    @override
    def kill(self, signum: Any) -> None:
        if self._children is None or signum != signal.SIGKILL:
            super().kill(signum)
            return
        # After Ctrl-C: this process has left the job, and the others cannot take their files along.
        self._children.forget()
        super().kill(signum)
        self._children.wait_for_end()
        self._watch().leave_after_others()

    @override
    def _call_children_scripts(self) -> None:
        os.environ[LAUNCHER] = launcher_mark()
        try:
            super()._call_children_scripts()
        finally:
            del os.environ[LAUNCHER]
