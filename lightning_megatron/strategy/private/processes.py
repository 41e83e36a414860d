"""Private names of Lightning's launcher and process groups."""

from __future__ import annotations

from lightning.fabric.utilities.distributed import (
    _get_default_process_group_backend_for_device as default_backend,
)
from lightning.fabric.utilities.distributed import _init_dist_connection as init_process_group
from lightning.fabric.utilities.distributed import (
    _set_num_threads_if_needed as set_num_threads_if_needed,
)
from lightning.fabric.utilities.distributed import _sync_ddp_if_available as reduce_over_group
from lightning.fabric.utilities.seed import reset_seed as reset_seed
from lightning.pytorch.strategies.launchers.subprocess_script import (
    _SubprocessScriptLauncher as SubprocessScriptLauncher,
)
from lightning.pytorch.utilities.exceptions import _TunerExitException as TunerExitException
from lightning_utilities.core.rank_zero import rank_zero_only as utils_rank_zero_only

__all__ = [
    "SubprocessScriptLauncher",
    "TunerExitException",
    "default_backend",
    "init_process_group",
    "reduce_over_group",
    "reset_seed",
    "set_num_threads_if_needed",
    "utils_rank_zero_only",
]
