"""Checks and updates of Lightning callbacks that hold references to the user's model."""

from __future__ import annotations

from contextlib import ExitStack

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import (
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.strategy.optimization.parameter_readers import gradient_changer
from lightning_megatron.strategy.options.strategy_options import StrategyOptions
from lightning_megatron.strategy.private.callback_patches import (
    add_groups_on_every_stage,
    copy_replaced_parameters,
    pruned_modules,
    recomputes_statistics,
    resets_weights,
    traces_graph,
)
from lightning_megatron.strategy.private.loops import callbacks_of, may_accumulate


def check_callbacks(trainer: Trainer, layout: ParallelLayout, options: StrategyOptions) -> None:
    """Refuse callbacks and loggers that need the whole model if each rank has only a part.

    Callbacks with a method ``check_before_launch`` check the Trainer themselves.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        getattr(callback, "check_before_launch", lambda trainer: None)(trainer)
    if options.experts.rows is not None and may_accumulate(trainer):
        _check_limited_sums(gradient_changer(trainer))
    if options.products is not None and options.products.parameters is not None:
        _check_no_writer(trainer)
    if (layout.tp, layout.pp, layout.ep) == (1, 1, 1):
        return
    for logger in trainer.loggers:
        if traces_graph(logger):
            raise UnsupportedError(
                f"{type(logger).__name__}(log_graph=True) cannot be used with tp ({layout.tp}), pp "
                f"({layout.pp}) or ep ({layout.ep}) above 1, because it runs the module only on "
                "rank 0, which would wait for the other ranks. Use log_graph=False."
            )
    for callback in callbacks_of(trainer, ModelPruning):
        raise UnsupportedError(
            f"{type(callback).__name__} needs the whole model on every rank: tp is {layout.tp}, pp "
            f"{layout.pp} and ep {layout.ep}. Lightning's callback chooses the weights that it "
            "prunes before the model is cut. Use tp=1, pp=1 and ep=1, with any number of "
            "data-parallel ranks, or leave the callback out."
        )


def _check_limited_sums(changer: str | None) -> None:
    """Refuse gradient accumulation that the strategy cannot run again without the limit on rows."""
    if changer is not None:
        raise UnsupportedError(
            f"experts.rows with accumulated gradients cannot be used with {changer}, which may "
            "change gradients between batches: a batch that needs more rows is run again with all "
            "earlier batches of its optimizer step, which would lose its changes. Change gradients "
            "in on_before_optimizer_step, set reads_gradients = False in the class of the hook if "
            "it changes none, or use experts.rows=None."
        )


def _check_no_writer(trainer: Trainer) -> None:
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, (StochasticWeightAveraging, WeightAveraging, ModelPruning)):
            raise UnsupportedError(
                f"fp8.parameters ('fp8') cannot be used with {type(callback).__name__}, because "
                "the callback writes weights of the model, and weights in 8 bits cannot be "
                "written. Leave fp8.parameters or the callback out."
            )


def hide_example_input(module: LightningModule, undo: ExitStack) -> None:
    """Hide ``example_input_array``, with which summaries would call a single pipeline stage."""
    example = module.example_input_array
    undo.callback(setattr, module, "example_input_array", example)
    module.example_input_array = None
    if example is not None:
        rank_zero_info(
            "Summaries show no sizes of inputs and outputs with pp above 1: a stage cannot run "
            "example_input_array."
        )


def update_callbacks(
    trainer: Trainer, module: LightningModule, layout: ParallelLayout, options: StrategyOptions
) -> None:
    """Point callbacks at the modules that replaced those they reference."""
    check_callbacks(trainer, layout, options)
    if layout.pp > 1:
        if recomputes_statistics(trainer):
            raise UnsupportedError(
                f"StochasticWeightAveraging cannot be used with pp ({layout.pp}) above 1 and batch "
                "norms, because it recomputes their statistics in an epoch of forward passes, and "
                "stages run forward and backward passes together. Use pp=1, or norms without "
                "running statistics."
            )
        add_groups_on_every_stage(trainer)
    copy_replaced_parameters(trainer, module)
    known = {id(part) for part in module.modules()}
    for callback in callbacks_of(trainer, ModelPruning):
        if resets_weights(callback):
            raise UnsupportedError(
                f"{type(callback).__name__} cannot be used with "
                "use_lottery_ticket_hypothesis=True: Lightning's callback replaces the memory of "
                "the parameters, but the optimizers train parts of flat buffers. Use "
                "use_lottery_ticket_hypothesis=False."
            )
        replaced = [part for part in pruned_modules(callback) if id(part) not in known]
        if replaced:
            raise UnsupportedError(
                f"{type(callback).__name__} prunes weights of {type(replaced[0]).__name__}, which "
                "this strategy has replaced by its own layer before the first step. Its mask would "
                "have no effect. Leave the callback out, or train with strategy='ddp'."
            )


def saves_optimizers(trainer: Trainer) -> bool:
    """Return whether a callback will save optimizer states."""
    return any(not saver.save_weights_only for saver in callbacks_of(trainer, ModelCheckpoint))
