"""Start one process per device from a plain ``python train.py``, and end all of them together."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any

from lightning.fabric.plugins.environments import ClusterEnvironment
from typing_extensions import override

from lightning_megatron.strategy.failure import LAUNCHER_PID, FailureWatch
from lightning_megatron.strategy.private import SubprocessScriptLauncher


class MegatronLauncher(SubprocessScriptLauncher):
    """Launch like ``ddp`` does, and report a failure of this rank before callbacks and clean-up run.

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

        return super().launch(guarded, *args, trainer=trainer, **kwargs)

    @override
    def _call_children_scripts(self) -> None:
        os.environ[LAUNCHER_PID] = str(os.getpid())
        try:
            super()._call_children_scripts()
        finally:
            del os.environ[LAUNCHER_PID]
