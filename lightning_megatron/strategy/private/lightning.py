"""Private names of Lightning that this project uses, checked by ``tests/strategy/test_private.py``.

The rest of the package reads Lightning's loops through the functions below, and otherwise imports
only public names.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
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
from lightning.fabric.utilities.seed import pl_worker_init_function as seed_worker
from lightning.fabric.utilities.seed import reset_seed as reset_seed
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loops.optimization.automatic import Closure as Closure
from lightning.pytorch.loops.optimization.automatic import ClosureResult as ClosureResult
from lightning.pytorch.loops.optimization.automatic import (
    _AutomaticOptimization as AutomaticOptimization,
)
from lightning.pytorch.plugins.precision import MixedPrecision as MixedPrecision
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.strategies.launchers.subprocess_script import (
    _SubprocessScriptLauncher as SubprocessScriptLauncher,
)
from lightning.pytorch.trainer import call
from lightning.pytorch.tuner.lr_finder import _LRCallback as LRSearch
from lightning.pytorch.utilities.exceptions import SIGTERMException as SIGTERMException
from lightning.pytorch.utilities.exceptions import _TunerExitException as TunerExitException
from lightning.pytorch.utilities.model_helpers import is_overridden as is_overridden
from lightning_utilities.core.rank_zero import rank_zero_only as utils_rank_zero_only
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader

__all__ = [
    "AutomaticOptimization",
    "LRSearch",
    "Closure",
    "ClosureResult",
    "MixedPrecision",
    "SIGTERMException",
    "SubprocessScriptLauncher",
    "TunerExitException",
    "default_backend",
    "init_process_group",
    "is_overridden",
    "reduce_over_group",
    "reset_seed",
    "seed_worker",
    "set_num_threads_if_needed",
    "utils_rank_zero_only",
]

#: Value of ``ckpt_path`` that selects the newest checkpoint.
LAST = "last"

#: Attributes that the functions below use: (path of the owner from the trainer, name).
TRAINER_ATTRIBUTES = (
    ("fit_loop.epoch_loop", "automatic_optimization"),
    ("fit_loop.epoch_loop", "total_batch_idx"),
    ("fit_loop.epoch_loop", "_broadcast_sigterm_tensor"),
    ("fit_loop.epoch_loop.automatic_optimization", "optim_progress"),
    ("fit_loop.epoch_loop.automatic_optimization", "_skip_backward"),
    ("fit_loop.epoch_loop.automatic_optimization", "_make_closure"),
    ("fit_loop.epoch_loop.automatic_optimization", "_make_zero_grad_fn"),
    ("fit_loop", "_should_accumulate"),
    ("fit_loop", "_skip_backward"),
    ("fit_loop", "_combined_loader"),
    ("", "log_every_n_steps"),
    ("", "_signal_connector"),
    ("_signal_connector", "_sigterm_notifier_fn"),
    ("_signal_connector", "_slurm_sigusr_handler_fn"),
    ("_signal_connector", "received_sigterm"),
    ("_accelerator_connector", "cluster_environment"),
    ("_checkpoint_connector", "hpc_save_path"),
    ("fit_loop.epoch_loop", "advance"),
    ("fit_loop.epoch_loop", "_batches_that_stepped"),
    ("", "_checkpoint_connector"),
    ("", "_data_connector"),
    ("_data_connector", "_requires_distributed_sampler"),
    ("_checkpoint_connector", "_parse_ckpt_path"),
    ("_checkpoint_connector", "resume_start"),
    ("fit_loop", "on_advance_end"),
    ("fit_loop.epoch_loop.val_loop", "_store_dataloader_outputs"),
    ("fit_loop.epoch_loop.val_loop", "_on_evaluation_epoch_end"),
    ("predict_loop", "_on_predict_epoch_end"),
)


def automatic_optimization(trainer: Trainer) -> AutomaticOptimization:
    """Return the loop that runs the closure and the optimizer."""
    return trainer.fit_loop.epoch_loop.automatic_optimization


def replace_automatic_optimization(trainer: Trainer, loop: AutomaticOptimization) -> None:
    """Replace the optimization loop, and keep the counters and settings of the previous one."""
    previous = automatic_optimization(trainer)
    loop.optim_progress = previous.optim_progress
    loop._skip_backward = previous._skip_backward
    trainer.fit_loop.epoch_loop.automatic_optimization = loop


def skips_backward(trainer: Trainer) -> bool:
    """Return whether stochastic weight averaging runs this pass without gradients."""
    return bool(trainer.fit_loop._skip_backward)


def accumulates(trainer: Trainer) -> bool:
    """Return whether the optimizer steps at a later batch."""
    return bool(trainer.fit_loop._should_accumulate())


def logged_step(trainer: Trainer) -> int:
    """Return the step number under which Lightning logs this batch."""
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)


def is_logged(trainer: Trainer) -> bool:
    """Return whether loggers receive the values of this batch; the same on all ranks."""
    # Lightning's own condition also depends on should_stop, which one rank may set earlier than
    # another.
    every = trainer.log_every_n_steps  # type: ignore[attr-defined]
    return every > 0 and (logged_step(trainer) + 1) % every == 0


def searches_learning_rate(trainer: Trainer) -> bool:
    """Return whether this fit is one of the Tuner's, in which losses are expected to explode."""
    return any(isinstance(one, LRSearch) for one in trainer.callbacks)  # type: ignore[attr-defined]


def total_batch_index(trainer: Trainer) -> int:
    """Return the number of training batches before this one, over all epochs (batches)."""
    return int(trainer.fit_loop.epoch_loop.total_batch_idx)


def train_dataloaders(trainer: Trainer) -> list[Any]:
    """Return the training dataloaders; empty before they are set up."""
    loader = trainer.fit_loop._combined_loader
    return [] if loader is None else list(loader.flattened)


def training_loader_states(trainer: Trainer) -> list[Any]:
    """Return the states of this rank's resumable dataloaders."""
    loader = trainer.fit_loop._combined_loader
    return [] if loader is None else list(loader._state_dicts())


def call_after_backward_hooks(trainer: Trainer) -> None:
    """Call ``on_after_backward`` of callbacks and module, as Lightning's backward does."""
    call._call_callback_hooks(trainer, "on_after_backward")
    call._call_lightning_module_hook(trainer, "on_after_backward")


def run_backward(trainer: Trainer, loss: Tensor, prepare: Callable[[], None]) -> None:
    """Call ``on_before_backward`` hooks, then the module's ``backward``, as Lightning does.

    Args:
        trainer: Trainer of the fit.
        loss: Loss from which the backward pass starts.
        prepare: Function called between the hooks and the backward pass.
    """
    call._call_callback_hooks(trainer, "on_before_backward", loss)
    call._call_lightning_module_hook(trainer, "on_before_backward", loss)
    prepare()
    with trainer.profiler.profile(f"[Strategy]{type(trainer.strategy).__name__}.backward"):  # type: ignore[attr-defined]
        trainer.lightning_module.backward(loss)


def call_strategy_step(trainer: Trainer, args: tuple[Any, ...]) -> Any:
    """Run the strategy's training step under the profiler, with the hook's name for logging."""
    return call._call_strategy_hook(trainer, "training_step", *args)


def forward_zero_grad(strategy: Strategy) -> None:
    """Forward ``zero_grad`` of Lightning's optimizer wrappers to the wrapped optimizers.

    A wrapper's own method is that of the optimizer's class, and ignores a method that was replaced
    on the instance.
    """
    for wrapper in strategy._lightning_optimizers:
        wrapper.zero_grad = partial(_zero_grad_of, wrapper._optimizer)  # type: ignore[attr-defined]


def _zero_grad_of(optimizer: Optimizer, set_to_none: bool = True) -> None:
    optimizer.zero_grad(set_to_none)


def publish_device_mesh(module: LightningModule, mesh: Any) -> None:
    """Set ``self.device_mesh`` of a LightningModule to ``mesh``."""
    module._device_mesh = mesh


def replace_signal_check(
    trainer: Trainer,
    check: Callable[[], None],
    notify: Callable[..., None],
    notify_requeue: Callable[..., None],
) -> None:
    """Call ``check`` before every training batch, in place of Lightning's signal handling.

    Args:
        trainer: Trainer of the fit.
        check: Function called before every training batch.
        notify: Handler of SIGTERM.
        notify_requeue: Handler of SLURM's time-limit signal.
    """
    loop, connector = trainer.fit_loop.epoch_loop, trainer._signal_connector
    advance = loop.advance

    def checked(data_fetcher: Any) -> None:
        check()
        advance(data_fetcher)

    loop.advance = checked  # type: ignore[method-assign]
    loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
    connector._sigterm_notifier_fn = notify  # type: ignore[method-assign]
    connector._slurm_sigusr_handler_fn = notify_requeue  # type: ignore[method-assign]


def restore_signal_check(trainer: Trainer) -> None:
    """Undo :func:`replace_signal_check`."""
    for owner, names in (
        (trainer.fit_loop.epoch_loop, ("advance", "_broadcast_sigterm_tensor")),
        (trainer._signal_connector, ("_sigterm_notifier_fn", "_slurm_sigusr_handler_fn")),
    ):
        for name in names:
            vars(owner).pop(name, None)


def call_before_epoch_ends(trainer: Trainer, function: Callable[[], None]) -> None:
    """Call a function before the hooks and metrics at the end of an epoch or dataloader."""
    for owner, name in _epoch_ends(trainer):
        setattr(owner, name, partial(_after, function, getattr(type(owner), name), owner))


def restore_epoch_ends(trainer: Trainer) -> None:
    """Undo :func:`call_before_epoch_ends`."""
    for owner, name in _epoch_ends(trainer):
        vars(owner).pop(name, None)


def _epoch_ends(trainer: Trainer) -> list[tuple[Any, str]]:
    evaluations = (trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop)
    return [
        (trainer.fit_loop, "on_advance_end"),
        *(
            (loop, name)
            for loop in evaluations
            for name in ("_store_dataloader_outputs", "_on_evaluation_epoch_end")
        ),
        (trainer.predict_loop, "_on_predict_epoch_end"),
    ]


def _after(function: Callable[[], None], method: Callable[[Any], Any], owner: Any) -> Any:
    function()
    return method(owner)


def requeues_itself(trainer: Trainer) -> bool:
    """Return whether Lightning requeues an interrupted SLURM job and resumes it."""
    environment = trainer._accelerator_connector.cluster_environment
    return isinstance(environment, SLURMEnvironment) and environment.auto_requeue


def slurm_save_path(trainer: Trainer) -> str:
    """Return the path at which Lightning looks for a requeued SLURM job's checkpoint."""
    return trainer._checkpoint_connector.hpc_save_path(trainer.default_root_dir)


def replace_last_checkpoint_search(trainer: Trainer, find: Callable[[], str | None]) -> None:
    """Resolve ``ckpt_path="last"`` by ``find``, once all ranks of the run can communicate.

    Lightning searches the file system on every rank separately, before process groups exist. Ranks
    could find different checkpoints.

    Args:
        trainer: Trainer of the run.
        find: Function that returns the path of the newest checkpoint; None without one.
    """
    connector = trainer._checkpoint_connector
    parse, start = type(connector)._parse_ckpt_path, type(connector).resume_start

    def parse_later(state_fn: Any, ckpt_path: Any, **options: Any) -> Any:
        return ckpt_path if ckpt_path == LAST else parse(connector, state_fn, ckpt_path, **options)

    def start_with_found(checkpoint_path: Any = None, weights_only: bool | None = None) -> None:
        start(connector, find() if checkpoint_path == LAST else checkpoint_path, weights_only)

    connector._parse_ckpt_path = parse_later  # type: ignore[method-assign,assignment]
    connector.resume_start = start_with_found  # type: ignore[method-assign]


def filter_sampler_injection(trainer: Trainer, asks: Callable[[DataLoader], bool]) -> None:
    """Let Lightning replace a dataloader's sampler only if ``asks`` returns True, too."""
    connector = trainer._data_connector
    requires = type(connector)._requires_distributed_sampler

    def asked(dataloader: DataLoader) -> bool:
        return requires(connector, dataloader) and asks(dataloader)

    connector._requires_distributed_sampler = asked  # type: ignore[method-assign]


def restore_sampler_injection(trainer: Trainer) -> None:
    """Undo :func:`filter_sampler_injection`."""
    vars(trainer._data_connector).pop("_requires_distributed_sampler", None)


def announce_sigterm(trainer: Trainer) -> None:
    """Set Lightning's flag for a received SIGTERM."""
    trainer._signal_connector.received_sigterm = True
