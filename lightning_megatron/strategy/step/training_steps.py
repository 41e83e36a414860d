"""Training and evaluation steps of a run, with all work around the user's step."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.pipeline.microbatch import count_samples
from lightning_megatron.pipeline.step_plans import signature_of
from lightning_megatron.strategy.checks.batch_comparison import BatchComparison
from lightning_megatron.strategy.modules.buffers import SharedBuffers
from lightning_megatron.strategy.optimization.layer_states import LayerStates
from lightning_megatron.strategy.optimization.mixtures import MixtureRuntime
from lightning_megatron.strategy.optimization.precision import MegatronPrecision
from lightning_megatron.strategy.optimization.training_state import TrainingState
from lightning_megatron.strategy.options.expert_option import check_limited_step
from lightning_megatron.strategy.private.data_loading import train_dataloaders
from lightning_megatron.strategy.private.loops import (
    accumulates,
    call_after_backward_hooks,
    is_logged,
    run_backward,
    skips_backward,
    total_batch_index,
)
from lightning_megatron.strategy.process.dataloaders import deals_in_turn
from lightning_megatron.strategy.step.batch_growth import BatchGrowth
from lightning_megatron.strategy.step.raw_backward import wrap_backward_passes
from lightning_megatron.strategy.step.run_graphs import RunGraphs
from lightning_megatron.strategy.step.runner import StepRunner
from lightning_megatron.strategy.step.scheduled_loop import ClearGradients
from lightning_megatron.strategy.step.step_values import BackwardPasses, StepResult
from lightning_megatron.strategy.trials.unsharded_modules import name_unsharded_modules

#: Names of batches in error texts, by step.
_KINDS = {"validation_step": "validation", "test_step": "test", "predict_step": "prediction"}


class TrainingSteps:
    """Training and evaluation steps of one run.

    Args:
        module: The user's module.
        mesh: The groups of this rank.
        precision: Precision of the run.
        state: Main parameters and gradients of the run.
        mixtures: Mixture-of-experts layers of this rank.
        states: State that the layers of this rank accumulate during a step.
        buffers: Buffers that the data-parallel ranks synchronise.
        runner: Runner of the user's steps on microbatches.
        comparison: Comparison of batches between ranks that must read the same ones.
        overlaps_gradients: Whether sums of gradients may start during the backward pass.
        graphs: CUDA graphs of the steps; None to run all steps eagerly.
    """

    def __init__(
        self,
        module: LightningModule,
        mesh: ParallelMesh,
        precision: MegatronPrecision,
        state: TrainingState,
        mixtures: MixtureRuntime,
        states: LayerStates,
        buffers: SharedBuffers,
        runner: StepRunner,
        comparison: BatchComparison,
        overlaps_gradients: bool,
        graphs: RunGraphs | None = None,
    ) -> None:
        self._module = module
        self._mesh = mesh
        self._precision = precision
        self._state = state
        self._mixtures = mixtures
        self._states = states
        self._buffers = buffers
        self._runner = runner
        self._comparison = comparison
        self._overlaps_gradients = overlaps_gradients
        self._graphs = graphs
        self._growth = BatchGrowth(module.trainer)
        self._num_batches = 0
        self._clear_gradients: ClearGradients | None = None

    def prepare(self, clear_gradients: ClearGradients | None) -> None:
        """Set the function that clears the previous step's gradients; None while they accumulate.

        Args:
            clear_gradients: Function that calls Lightning's hooks and ``zero_grad``.
        """
        self._clear_gradients = clear_gradients

    def train(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run ``training_step`` with its backward passes; return its output for the whole batch.

        Args:
            args: Arguments of the step; the first one is the batch of this data-parallel rank.
            kwargs: Further arguments of the step, in manual optimization.

        Communication: that of :meth:`BatchComparison.check`, :meth:`StepRunner.train` and
            :class:`StepGradients`.
        """
        trainer = self._module.trainer
        step = total_batch_index(trainer)
        is_automatic = self._module.automatic_optimization
        self._buffers.begin_batch(not is_automatic or not accumulates(trainer))
        self._num_batches += 1
        self._comparison.check("training_step", "training", self._num_batches, args[0])
        self._state.checks.begin_step(step, not accumulates(trainer) and is_logged(trainer))
        if self._state.attach_new(trainer.optimizers, trainer.current_epoch) and self._graphs:
            self._graphs.note_change()
        self._mixtures.check_trained(trainer.current_epoch)
        self._mesh.random.deals_in_turn = any(map(deals_in_turn, train_dataloaders(trainer)))
        self._state.main.user_writes.adopt_noted()
        with self._precision.train_step_context():
            if is_automatic:
                return self._train(args, step)
            return self._train_by_hand(args, kwargs, step)

    def _train(self, args: tuple[Any, ...], step: int) -> Any:
        """Run a step of automatic optimization."""
        trainer = self._module.trainer
        passes = None if skips_backward(trainer) else self._backward_passes()
        with self._by_graphs(args[0], passes is not None):
            result = self._runner.train(
                self._module,
                args[0],
                args[1:],
                step=step,
                passes=passes,
                divisor=trainer.accumulate_grad_batches,
                factor=self._precision.loss_factor,
                values_to_log=self._precision.values_to_log(),
            )
        if passes is not None:
            self._end_backward(result)
        return result.output

    def _by_graphs(self, batch: Any, has_backward: bool) -> AbstractContextManager[None]:
        """Return the context in which graphs replace the captured parts of a step."""
        if self._graphs is None or not has_backward:
            return nullcontext()
        growth = self._growth.reason(batch)
        if growth is not None:
            # Graphs of whole steps have a fixed number of microbatches.
            self._graphs.capture_again(growth)
        return self._graphs.step(signature_of(batch), self._module.trainer.current_epoch)

    def recheck(self) -> None:
        """Check before the next step whether graphs are still valid; called on all ranks."""
        if self._graphs is not None:
            self._graphs.recheck()

    def _backward_passes(self) -> BackwardPasses:
        will_step = not accumulates(self._module.trainer)
        overlaps = self._overlaps_gradients and will_step
        states = self._states if will_step and self._states.is_used else None
        return BackwardPasses(
            self._hide_and_clear,
            self._state.gradients.hide,
            self._run_backward,
            self._clear_gradients is None,
            will_step,
            self._state.gradients.observer if overlaps else None,
            self._state.checks.inspector,
            self._mixtures.loss_weight,
            self._state.gradients.weight_gradients,
            states,
        )

    def _hide_and_clear(self) -> None:
        if self._clear_gradients is not None:
            self._clear_gradients()
        if self._mesh.pp.size > 1:
            self._state.gradients.hide()

    def _run_backward(self, loss: Tensor) -> None:
        run_backward(self._module.trainer, loss, self._state.gradients.hide)

    def _end_backward(self, result: StepResult) -> None:
        """Finish the gradients if the optimizer steps, and call the hooks after backward passes."""
        will_step = not accumulates(self._module.trainer)
        self._state.checks.note("loss", result.loss)
        self._state.gradients.end_batch(result.num_tokens, will_step)
        if will_step:
            self._finish_step()
        call_after_backward_hooks(self._module.trainer)

    def _train_by_hand(self, args: tuple[Any, ...], kwargs: dict[str, Any], step: int) -> Any:
        """Run a step of manual optimization, whose backward passes user code runs."""
        if self._runner.limited_rows is not None:
            check_limited_step(is_automatic=False)
        self._state.main.wait()
        dp = self._mesh.dp
        count = count_samples(args[0])
        samples = self._mesh.random.samples_of(range(count), count, dp.rank, dp.size)
        self._mesh.random.begin_microbatch(step, dp.rank, samples)
        if self._mixtures.loss_weight is not None:
            self._mixtures.loss_weight.value = self._precision.loss_factor
        guard = self._runner.reads.guard(self._module, "training_step")
        passes = wrap_backward_passes(self._state.gradients.raw_backward)
        with guard, passes, name_unsharded_modules(self._module, self._mesh):
            output = self._module.training_step(*args, **kwargs)
        self._finish_step()
        return output

    def _finish_step(self) -> None:
        """End the step of layers with state; capture again if their scales become delayed ones."""
        if self._states.finish_step() and self._graphs is not None:
            self._graphs.capture_again("products in 8 bits have scales of earlier steps now")

    def evaluate(self, name: str, args: tuple[Any, ...]) -> Any:
        """Run ``validation_step``, ``test_step`` or ``predict_step``; return its output.

        Args:
            name: Name of the step.
            args: Arguments of the step: the batch, its index, and the index of the dataloader if
                there are several.

        Communication: that of :meth:`BatchComparison.check` and :meth:`StepRunner.evaluate`.
        """
        self._state.main.wait()
        batch = args[0]
        other_args = args[1:]
        step = other_args[0] if other_args and isinstance(other_args[0], int) else 0
        key = (name, *other_args[1:])
        self._comparison.check(key, _KINDS[name], step + 1, batch)
        by_graphs: AbstractContextManager[None] = nullcontext()
        if self._graphs is not None:
            by_graphs = self._graphs.evaluation(key, signature_of(batch), step)
        return self._runner.evaluate(
            self._module, name, batch, other_args, step=step, key=key, by_graphs=by_graphs
        )
