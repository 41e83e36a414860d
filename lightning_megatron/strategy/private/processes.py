"""Private names of Lightning's launcher and process groups, of its handling of SIGTERM and of
SLURM's signals, and of the lines that it prints at the start of a run.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.fabric.utilities.distributed import (
    _get_default_process_group_backend_for_device as default_backend,
)
from lightning.fabric.utilities.distributed import _init_dist_connection as init_process_group
from lightning.fabric.utilities.distributed import (
    _set_num_threads_if_needed as set_num_threads_if_needed,
)
from lightning.fabric.utilities.distributed import _sync_ddp_if_available as reduce_over_group
from lightning.fabric.utilities.seed import reset_seed as reset_seed
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch import Trainer
from lightning.pytorch.strategies.launchers.subprocess_script import (
    _SubprocessScriptLauncher as SubprocessScriptLauncher,
)
from lightning.pytorch.utilities.exceptions import SIGTERMException as SIGTERMException
from lightning.pytorch.utilities.exceptions import _TunerExitException as TunerExitException
from lightning_utilities.core.rank_zero import rank_zero_only as utils_rank_zero_only

from lightning_megatron.strategy.private.loops import replace_method

__all__ = [
    "SubprocessScriptLauncher",
    "TunerExitException",
    "default_backend",
    "init_process_group",
    "reduce_over_group",
    "set_num_threads_if_needed",
    "utils_rank_zero_only",
]


#: Loggers of Lightning, and the beginnings of their lines on which no user can act.
_NOISE = {
    "lightning.pytorch.utilities.rank_zero": ("💡 Tip", "TPU available: False"),
    "lightning.pytorch.trainer.connectors.checkpoint_connector": ("`weights_only` was not set",),
}
#: Beginnings of warnings on which no user can act, because nothing is wrong: a resumed run has a
#: folder of its own, and a data module without validation has no loaders.
_WARNINGS = (r"The dirpath has changed from", r"Total length of `list` across ranks is zero")


@contextmanager
def without_noise(num_data_ranks: int = 1) -> Iterator[None]:
    """Hide what Lightning prints about its own code, other products and missing hardware.

    Args:
        num_data_ranks: Number of data-parallel ranks. With one, logged values have nothing to be
            averaged with, which Lightning advises (ranks).
    """
    with warnings.catch_warnings(), ExitStack() as undo:
        warnings.filterwarnings(
            "ignore", category=FutureWarning, module=r"lightning\.pytorch\.utilities\._pytree"
        )
        for beginning in _WARNINGS:
            warnings.filterwarnings("ignore", beginning, UserWarning)
        if num_data_ranks == 1:
            warnings.filterwarnings(
                "ignore", r"It is recommended to use `self\.log", PossibleUserWarning
            )
        for name, beginnings in _NOISE.items():
            hide = _Hide(beginnings)
            logging.getLogger(name).addFilter(hide)
            undo.callback(logging.getLogger(name).removeFilter, hide)
        yield


class _Hide(logging.Filter):
    """Filter of lines by their beginnings."""

    def __init__(self, beginnings: tuple[str, ...]) -> None:
        super().__init__()
        self._beginnings = beginnings

    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(self._beginnings)


def replace_signal_check(
    trainer: Trainer,
    check: Callable[[], None],
    notify: Callable[..., None],
    notify_requeue: Callable[..., None],
    undo: ExitStack,
) -> None:
    """Call ``check`` before every training batch, in place of Lightning's signal handling.

    Args:
        check: Function called before every training batch.
        notify: Handler of SIGTERM.
        notify_requeue: Handler of SLURM's time-limit signal.
    """
    loop = trainer.fit_loop.epoch_loop
    connector = trainer._signal_connector
    advance = loop.advance

    def checked(data_fetcher: Any) -> None:
        check()
        advance(data_fetcher)

    replace_method(undo, loop, "advance", checked)
    replace_method(undo, loop, "_broadcast_sigterm_tensor", lambda: None)
    replace_method(undo, connector, "_sigterm_notifier_fn", notify)
    replace_method(undo, connector, "_slurm_sigusr_handler_fn", notify_requeue)


def announce_sigterm(trainer: Trainer) -> None:
    """Set Lightning's flag for a received SIGTERM."""
    trainer._signal_connector.received_sigterm = True


def requeues_itself(trainer: Trainer) -> bool:
    """Return whether Lightning requeues an interrupted SLURM job and resumes it."""
    environment = trainer._accelerator_connector.cluster_environment
    return isinstance(environment, SLURMEnvironment) and environment.auto_requeue


def slurm_save_path(trainer: Trainer) -> str:
    """Return the path at which Lightning looks for a requeued SLURM job's checkpoint."""
    return trainer._checkpoint_connector.hpc_save_path(trainer.default_root_dir)
