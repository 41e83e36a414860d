"""Private names of Lightning's callbacks and profilers that this project uses.

``tests/strategy/test_private.py`` checks that they exist.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace
from typing import Any

from lightning.fabric.utilities.throughput import Throughput
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    ModelCheckpoint,
    ModelPruning,
    ModelSummary,
    StochasticWeightAveraging,
    ThroughputMonitor,
    WeightAveraging,
)
from lightning.pytorch.loggers import Logger
from lightning.pytorch.profilers import PyTorchProfiler
from lightning.pytorch.utilities.model_summary import ModelSummary as Summary
from lightning.pytorch.utilities.model_summary import get_human_readable_count
from torch import nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel
from typing_extensions import override

from lightning_megatron.checkpoint.consolidate import OPTIMIZERS
from lightning_megatron.errors import UnsupportedError
from lightning_megatron.strategy.private.loops import callbacks_of, replace_method


def add_groups_on_every_stage(trainer: Trainer) -> None:
    """Let finetuning callbacks add a parameter group on stages with nothing to unfreeze.

    The callbacks then set the learning rate of the last group. Without an added group, that would
    be the wrong group on such a stage.
    """
    for callback in callbacks_of(trainer, BaseFinetuning):
        callback.unfreeze_and_add_param_group = partial(  # type: ignore[method-assign]
            _unfreeze_and_add, type(callback).unfreeze_and_add_param_group
        )


def _unfreeze_and_add(
    add: Callable[..., None],
    modules: Any,
    optimizer: Optimizer,
    lr: float | None = None,
    initial_denom_lr: float = 10.0,
    train_bn: bool = True,
) -> None:
    before = len(optimizer.param_groups)
    add(modules, optimizer, lr, initial_denom_lr, train_bn)
    if len(optimizer.param_groups) == before:
        # Lightning gives this learning rate to a group with parameters.
        rate = optimizer.param_groups[0]["lr"] if lr is None else lr
        divisor = initial_denom_lr if lr is None else 1.0
        optimizer.add_param_group({"params": [], "lr": rate / divisor})


def patch_finetuning(trainer: Trainer, main_of: Callable[[], Mapping[str, nn.Parameter]]) -> None:
    """Let finetuning callbacks work on the main parameters that optimizers train.

    Args:
        trainer: Trainer with the callbacks.
        main_of: Function that returns the main parameters by parameter name.
    """
    for callback in callbacks_of(trainer, BaseFinetuning):
        apply = type(callback)._apply_mapping_to_param_groups
        callback._apply_mapping_to_param_groups = partial(  # type: ignore[method-assign]
            _apply_with_main_parameters, apply, main_of
        )


def _apply_with_main_parameters(
    apply: Callable[..., list[dict[str, Any]]],
    main_of: Callable[[], Mapping[str, nn.Parameter]],
    groups: list[dict[str, Any]],
    mapping: Mapping[Any, Any],
) -> list[dict[str, Any]]:
    by_name = main_of()
    # Lightning maps parameters to names when it saves, and names to parameters when it restores.
    is_by_name = all(isinstance(key, str) for key in mapping)
    return apply(
        groups,
        {**mapping, **(by_name if is_by_name else {main: name for name, main in by_name.items()})},
    )


def restore_finetuning(
    trainer: Trainer, module: LightningModule, checkpoint: Mapping[str, Any]
) -> None:
    """Restore the groups of finetuning callbacks, after Lightning's own attempt was too early.

    Args:
        trainer: Trainer with the callbacks.
        module: Module that the callbacks unfreeze.
        checkpoint: Checkpoint with the states of all callbacks, and with those of the optimizers if
            it is a directory. Callback states name parameters of the first stage only, optimizer
            states those of all stages.
    """
    states = checkpoint.get("callbacks", {})
    present = {name for name, _ in module.named_parameters()}
    named = []
    for optimizer_state in checkpoint.get(OPTIMIZERS) or ():
        named.append([group["parameters"] for group in optimizer_state["groups"]])
    for callback in callbacks_of(trainer, BaseFinetuning):
        if callback.state_key not in states:
            continue
        callback.load_state_dict(states[callback.state_key])
        metadata: dict[int, list[dict[str, Any]]] = {}
        for index, groups in callback._internal_optimizer_metadata.items():
            metadata[index] = []
            names_of_groups = _names_of(groups, named[index : index + 1])
            for group, names in zip(groups, names_of_groups, strict=True):
                names_here = [name for name in names if name in present]
                metadata[index].append({**group, "params": names_here})
        callback._internal_optimizer_metadata = metadata
        callback.on_fit_start(trainer, module)


def _names_of(
    groups: Sequence[Mapping[str, Any]], named: Sequence[Sequence[Sequence[str]]]
) -> Sequence[Sequence[str]]:
    """Return the parameter names of groups, over all stages if they are known."""
    known = named and len(named[0]) == len(groups)
    return named[0] if known else [group["params"] for group in groups]


def announce_saves(
    trainer: Trainer,
    will_exist: Callable[[str], bool | None],
    link: Callable[[str, str], bool],
    undo: ExitStack,
) -> None:
    """Let checkpoint callbacks treat checkpoints being written as existing.

    Args:
        trainer: Trainer with the checkpoint callbacks.
        will_exist: Function that returns whether a path will exist, the same on all ranks; None if
            the file system decides.
        link: Function called with target and link path. It schedules the link for the end of the
            save in progress, and returns False if no save is running.
    """
    for callback in callbacks_of(trainer, ModelCheckpoint):
        _announce(callback, will_exist, link, undo)


def _announce(
    callback: ModelCheckpoint,
    will_exist: Callable[[str], bool | None],
    link: Callable[[str, str], bool],
    undo: ExitStack,
) -> None:
    kind = type(callback)

    def file_exists(filepath: Any, trainer: Trainer) -> bool:
        exists = will_exist(filepath)
        return kind.file_exists(callback, filepath, trainer) if exists is None else exists

    def link_checkpoint(trainer: Trainer, filepath: str, linkpath: str) -> None:
        if not link(filepath, linkpath):
            kind._link_checkpoint(trainer, filepath, linkpath)

    replace_method(undo, callback, "file_exists", file_exists)
    replace_method(undo, callback, "_link_checkpoint", link_checkpoint)


class NewestCheckpoint(ModelCheckpoint):
    """Checkpoint callback whose ``last.ckpt`` is the newest one: also when it is not the best.

    Lightning saves ``last.ckpt`` only with a checkpoint that is among the best, and at the end of a
    fit only if there is none yet.
    """

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_validation_end(trainer, pl_module)
        if not self._should_save_on_train_epoch_end(trainer):
            self._save_newest(trainer)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_epoch_end(trainer, pl_module)
        if self._should_save_on_train_epoch_end(trainer):
            self._save_newest(trainer)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._save_newest(trainer)

    def _save_newest(self, trainer: Trainer) -> None:
        """Save ``last.ckpt`` unless this step has been saved."""
        if not self.save_last or self._should_skip_saving_checkpoint(trainer):
            return
        if trainer.is_global_zero and os.path.islink(self.last_model_path):
            # A file would be written to the best checkpoint, to which the link points.
            os.remove(self.last_model_path)
        kept = self.save_last
        self.save_last = True
        self._save_last_checkpoint(trainer, self._monitor_candidates(trainer))
        self.save_last = kept


def remove_found_checkpoint(
    trainer: Trainer, was_found: Callable[[str], bool], undo: ExitStack
) -> None:
    """Let checkpoint callbacks also remove the checkpoint from which the run resumed, if not named.

    Lightning keeps it, because the user named it. Each restart of a job that resumes from its last
    checkpoint would otherwise leave one more.

    Args:
        trainer: Trainer with the checkpoint callbacks.
        was_found: Function that returns whether a path was found, and not given by the user.
    """
    for callback in callbacks_of(trainer, ModelCheckpoint):
        should_remove = partial(_should_remove, callback, was_found)
        replace_method(undo, callback, "_should_remove_checkpoint", should_remove)


def _should_remove(
    callback: ModelCheckpoint,
    was_found: Callable[[str], bool],
    trainer: Any,
    previous: str,
    current: str,
) -> bool:
    if trainer.ckpt_path is not None and was_found(trainer.ckpt_path):
        trainer = SimpleNamespace(ckpt_path=None)
    return type(callback)._should_remove_checkpoint(callback, trainer, previous, current)


def skip_first_copy(trainer: Trainer) -> None:
    """Let averaging callbacks make no copy of the module in their next ``setup``.

    A callback with a ``setup`` of its own makes one, which :func:`average_parts` replaces.
    """
    for callback in averaging_callbacks(trainer):
        if type(callback).setup is WeightAveraging.setup:
            callback.setup = lambda *_, callback=callback, **__: vars(callback).pop("setup")  # type: ignore[method-assign]


def averaging_callbacks(trainer: Trainer) -> list[WeightAveraging]:
    """Return the callbacks that average weights after steps."""
    return callbacks_of(trainer, WeightAveraging)


class _Part(nn.Module):
    """Parameters and buffers of a module, without its code."""

    def forward(self, *_: Any, **__: Any) -> None:
        """Raise, because only the trained model can compute with parts of the weights."""
        raise UnsupportedError(
            "the averaged model of a WeightAveraging callback cannot be called with tp, pp or ep "
            "above 1: it has only the averages of this rank's weights. Validation runs with the "
            "averages, and so does the model after the training."
        )


def average_parts(callback: WeightAveraging, module: nn.Module, source: Any) -> None:
    """Let a callback average the tensors of a module that has been divided among the ranks.

    Args:
        module: Divided module, whose names the averages get.
        source: Object with the method ``parameters`` of the module, which gives the first averages.
    """
    parameters = {
        id(parameter): nn.Parameter(value.detach(), parameter.requires_grad)
        for parameter, value in zip(module.parameters(), source.parameters(), strict=True)
    }
    callback._average_model = AveragedModel(
        _part_of(module, parameters, {}),
        callback._device or next(iter(parameters.values())).device,
        use_buffers=callback._use_buffers,
        **callback._kwargs,
    )


def _part_of(
    module: nn.Module, parameters: Mapping[int, nn.Parameter], made: dict[int, nn.Module]
) -> nn.Module:
    if id(module) not in made:
        part = made[id(module)] = _Part()
        for key, parameter in module._parameters.items():
            part._parameters[key] = None if parameter is None else parameters[id(parameter)]
        part._buffers.update(module._buffers)
        part._non_persistent_buffers_set.update(module._non_persistent_buffers_set)
        for key, child in module._modules.items():
            part._modules[key] = None if child is None else _part_of(child, parameters, made)
    return made[id(module)]


def patch_averaging(
    callback: WeightAveraging,
    source: Any,
    swap: Callable[[nn.Module, nn.Module], None],
    undo: ExitStack,
) -> None:
    """Let a callback average the tensors of ``source``, and apply averages by ``swap``.

    Args:
        callback: Averaging callback with its copy of the model.
        source: Object with the methods ``parameters`` and ``buffers`` of the model.
        swap: Function called with the model and the averages, first to apply the averages and then
            to restore the weights.
    """
    average = callback._average_model
    assert average is not None, "the callback's setup comes before the strategy's"
    update = type(average).update_parameters
    replace_method(undo, average, "update_parameters", lambda model: update(average, source))
    replace_method(undo, callback, "_swap_models", lambda module: swap(module, average.module))


def begin_averages(callback: WeightAveraging, source: Any) -> None:
    """Set the averages to the tensors of ``source``, as :func:`patch_averaging` gets it."""
    assert callback._average_model is not None, "the callback averages in this fit"
    average = callback._average_model.module
    for to, values in (
        (average.parameters(), source.parameters()),
        (average.buffers(), source.buffers()),
    ):
        for tensor, value in zip(to, values, strict=True):
            tensor.data.copy_(value)


def load_own_tensors(callback: WeightAveraging, undo: ExitStack) -> None:
    """Let a callback load no weights from a checkpoint, because the strategy loads them.

    The callback gets the averages and weights of this rank instead of full ones.
    """

    def load(trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        average = callback._average_model
        if average is not None:
            checkpoint = {**checkpoint, "state_dict": average.module.state_dict()}
            if "current_model_state" in checkpoint:
                checkpoint["current_model_state"] = pl_module.state_dict()
        type(callback).on_load_checkpoint(callback, trainer, pl_module, checkpoint)

    replace_method(undo, callback, "on_load_checkpoint", load)


class _Copies(nn.Module):
    """Copies of parameters, in their order."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__()
        for number, parameter in enumerate(parameters):
            self.register_parameter(
                str(number), nn.Parameter(parameter.detach().clone(), requires_grad=False)
            )


def copy_replaced_parameters(trainer: Trainer, module: LightningModule) -> None:
    """Let stochastic weight averaging use the parameters that exist after module replacement.

    A callback that found no parameters at its ``setup``, because the module was still empty, is
    left as it is.
    """
    for callback in callbacks_of(trainer, StochasticWeightAveraging):
        if callback._average_model is not None:
            copied = [parameter.shape for parameter in callback._average_model.parameters()]
            if copied and copied != [parameter.shape for parameter in module.parameters()]:
                callback._average_model = _Copies(module.parameters())  # type: ignore[assignment]


def recomputes_statistics(trainer: Trainer) -> bool:
    """Return whether stochastic weight averaging has copied a module with batch norms."""
    return any(
        callback._average_model is not None
        and callback.pl_module_contains_batch_norm(callback._average_model)
        for callback in callbacks_of(trainer, StochasticWeightAveraging)
    )


def traces_graph(logger: Logger) -> bool:
    """Return whether a logger runs the module on rank 0 alone, to trace its graph."""
    # The logger of a fast_dev_run returns a value for every attribute.
    return getattr(logger, "_log_graph", False) is True


def resets_weights(callback: ModelPruning) -> bool:
    """Return whether a callback resets pruned modules to their first weights."""
    return bool(callback._use_lottery_ticket_hypothesis)


def pruned_modules(callback: ModelPruning) -> list[nn.Module]:
    """Return the modules that a callback will prune; known after its ``setup``."""
    return [module for module, _ in callback._parameters_to_prune]


def record_module_names_again(trainer: Trainer) -> None:
    """Remove the PyTorch profiler's module hooks, so that its next record registers them again."""
    profiler = trainer.profiler  # type: ignore[attr-defined]
    if isinstance(profiler, PyTorchProfiler) and profiler._register is not None:
        profiler._register.__exit__(None, None, None)
        profiler._register = None


def count_replicas_once(trainer: Trainer, ranks_per_replica: int) -> None:
    """Let throughput monitors count the batch of a model replica once, not for each of its ranks.

    Args:
        trainer: Trainer whose callbacks have been set up for this run.
        ranks_per_replica: Ranks that read the same data (ranks).
    """
    for callback in callbacks_of(trainer, ThroughputMonitor):
        for throughput in callback._throughputs.values():
            throughput.compute = partial(  # type: ignore[method-assign]
                _throughput_of_replicas, throughput, ranks_per_replica
            )


def _throughput_of_replicas(throughput: Throughput, ranks_per_replica: int) -> dict[str, Any]:
    metrics = type(throughput).compute(throughput)
    separator = throughput.separator
    # Lightning multiplies by the number of ranks. Operations are those of the whole replica.
    counted = {"batches_per_sec", "samples_per_sec", "items_per_sec", "flops_per_sec"}
    counted |= {f"device{separator}flops_per_sec", f"device{separator}mfu"}
    return {
        name: value / ranks_per_replica if name in counted else value
        for name, value in metrics.items()
    }


#: Function that counts the whole model's elements and the trained ones in modules, by name.
CountElements = Callable[[Sequence[str]], Mapping[str, tuple[int, int]]]

#: Lightning's name of the column with the numbers of rank 0, which its tables know.
_PER_RANK = "Params per Device"


def summarize_whole_model(trainer: Trainer, count: CountElements, undo: ExitStack) -> None:
    """Let summaries count the parameters of all ranks, and those of rank 0 in a column of its own.

    Args:
        count: Function with a collective call; all ranks have the same callbacks.
    """
    for callback in callbacks_of(trainer, ModelSummary):
        replace_method(undo, callback, "_summary", partial(_summary_of, callback, count))


def _summary_of(
    callback: ModelSummary, count: CountElements, trainer: Trainer, module: LightningModule
) -> Summary:
    return _WholeSummary(module, callback._max_depth, count)


class _WholeSummary(Summary):
    """Summary of a module of which this rank holds a part."""

    def __init__(self, model: LightningModule, max_depth: int, count: CountElements) -> None:
        super().__init__(model, max_depth)
        self._counts = count(self.layer_names)

    @property
    @override
    def param_nums(self) -> list[int]:
        return [self._counts[name][0] for name in self.layer_names]

    @property
    @override
    def total_parameters(self) -> int:
        return self._counts[""][0]

    @property
    @override
    def trainable_parameters(self) -> int:
        return self._counts[""][1]

    @override
    def _get_summary_data(self) -> list[tuple[str, list[str]]]:
        columns = super()._get_summary_data()
        rows = [layer.num_parameters for layer in self._layer_summary.values()]
        texts = list(map(get_human_readable_count, rows))
        # A last row has the parameters outside of these layers.
        texts += ["n/a"] * (len(columns[0][1]) - len(texts))
        place = [name for name, _ in columns].index("Params") + 1
        return [*columns[:place], (_PER_RANK, texts), *columns[place:]]
