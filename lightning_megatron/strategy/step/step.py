"""A step from top to bottom: from Lightning's batch to finished gradients and logged values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_megatron.graphs.step_graph import RanStep
from lightning_megatron.groups.collectives import broadcast_object
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.pipeline.executor import PipelineExecutor
from lightning_megatron.pipeline.microbatch import Microbatch, copy_batch, count_samples
from lightning_megatron.pipeline.step_plans import Trial, signature_of
from lightning_megatron.pipeline.step_run import BackwardPasses
from lightning_megatron.strategy.checks.batch_comparison import BatchComparison
from lightning_megatron.strategy.logs.log_record import Recorder
from lightning_megatron.strategy.logs.log_replay import LogReplay
from lightning_megatron.strategy.logs.merge import (
    Weight,
    merge_outputs,
    token_counts_in,
    total_weight,
)
from lightning_megatron.strategy.logs.step_output import StepOutput
from lightning_megatron.strategy.modules.attribute_sync import AttributeSync
from lightning_megatron.strategy.modules.buffers import SharedBuffers
from lightning_megatron.strategy.optimization.layer_states import LayerStates
from lightning_megatron.strategy.optimization.precision import MegatronPrecision
from lightning_megatron.strategy.optimization.training_state import TrainingState
from lightning_megatron.strategy.private.data_loading import train_dataloaders
from lightning_megatron.strategy.private.loops import (
    ClearGradients,
    accumulates,
    call_after_backward_hooks,
    is_logged,
    run_backward,
    skips_backward,
    total_batch_index,
)
from lightning_megatron.strategy.process.dataloaders import deals_in_turn
from lightning_megatron.strategy.step.batch_cuts import BatchCuts
from lightning_megatron.strategy.step.limited_rows import LimitedRows
from lightning_megatron.strategy.step.microbatch_losses import MicrobatchLosses, TokenCounting
from lightning_megatron.strategy.step.run_graphs import RunGraphs
from lightning_megatron.strategy.step.schedule_choice import ScheduleChoice
from lightning_megatron.strategy.step.step_values import (
    MicrobatchOutputs,
    RunCall,
    StepCall,
    StepResult,
    TrainingPasses,
    step_outputs,
)
from lightning_megatron.strategy.step.weight_reads import WeightReads
from lightning_megatron.strategy.trials.feature_trial import FeatureTrials, name_cut_layers
from lightning_megatron.strategy.trials.microbatch_check import MicrobatchTrials
from lightning_megatron.strategy.trials.weight_writes import preserve_state

#: Names of batches in error texts, by step.
_KINDS = {"validation_step": "validation", "test_step": "test", "predict_step": "prediction"}


@dataclass(frozen=True)
class StepTrials:
    """Trials of each kind of step at its first batch."""

    microbatches: MicrobatchTrials
    features: FeatureTrials


@dataclass(eq=False)
class Step:
    """Training and evaluation steps of one run, with all that happens around the user's step.

    :meth:`train` is the formula of a step, and the methods stand in the order of their calls. What
    surrounds the user's step acts in this order, from outside to inside:

    1. ``comparison`` compares the batch between ranks that must read the same one.
    2. ``graphs`` permit or forbid graphs in this step; in an evaluation only around 7 to 9.
    3. ``cuts`` cut the batch into microbatches.
    4. ``trials`` try the step at its first batch.
    5. ``attributes`` record the attributes of the module before the run, and share them after it.
    6. The log calls of a run are recorded, and replayed on every rank after it.
    7. ``limited_rows``, a limit on the rows of experts, may run a step again.
    8. ``graphs.whole_steps`` run in the place of 9.
    9. ``executor`` runs the schedule, whose actions call the user's step and its backward passes.

    Gradients are finished after all of them. In a fit, the closure of the optimizer's step calls
    :meth:`train`: see ``TrainingState.update``.

    Args:
        state: Main parameters and gradients of the run, checked before and completed after a step.
        graphs: CUDA graphs, permitted or forbidden for a step; None to run all steps eagerly.
        trials: Trials of steps at their first batch; None skips them.
        limited_rows: Limit on the rows of experts; None without one.
        choice: Choice of the schedule by the times of the first steps; None keeps the executor's.
        overlaps_gradients: Whether sums of gradients may start during the backward pass.
    """

    module: LightningModule
    mesh: ParallelMesh
    precision: MegatronPrecision
    state: TrainingState
    layers: LayerStates
    buffers: SharedBuffers
    comparison: BatchComparison
    graphs: RunGraphs | None
    cuts: BatchCuts
    trials: StepTrials | None
    attributes: AttributeSync
    limited_rows: LimitedRows | None
    choice: ScheduleChoice | None
    executor: PipelineExecutor
    _: KW_ONLY
    overlaps_gradients: bool

    def __post_init__(self) -> None:
        self._output = StepOutput(self.mesh)
        self._replay = LogReplay(self.mesh)
        self._counting = TokenCounting(self.mesh)
        self._reads = WeightReads(self.mesh)
        self._num_batches = 0
        self._clear_gradients: ClearGradients | None = None

    def prepare(self, clear_gradients: ClearGradients | None) -> None:
        """Set the function that clears the last step's gradients; None while they accumulate."""
        self._clear_gradients = clear_gradients

    # ---- a training step

    def train(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run ``training_step`` with its backward passes; return its output for the whole batch.

        The first argument is the batch of this data-parallel rank; ``kwargs`` are for manual
        optimization.

        Communication: that of :meth:`BatchComparison.check`, of the schedule, of
            :meth:`LogReplay.replay` and of :class:`StepGradients`; at the first batch one
            all-reduce over the data axis and one gather over the world, on the CPU.
        """
        index = total_batch_index(self.module.trainer)
        self._begin(args[0], index)
        with self.precision.train_step_context():
            if not self.module.automatic_optimization:
                return self._train_by_hand(args, kwargs, index)
            passes = self._passes()
            with self._permit_graphs(args[0], passes):
                call = self._cut(args, index, passes)
                self._try(call, args[0])
                # The outputs of microbatches are freed before the gradients are finished.
                result = self._replay_training(call, self._run_to_train(call))
            self._finish_gradients(result, passes)
            return result.output

    def _begin(self, batch: Any, index: int) -> None:
        """Check the batch, and look for what user code has changed since the last step."""
        trainer = self.module.trainer
        will_step = not accumulates(trainer)
        self.buffers.begin_batch(will_step or not self.module.automatic_optimization)
        self._num_batches += 1
        self.comparison.check("training_step", "training", self._num_batches, batch)
        self.state.checks.begin_step(index, will_step and is_logged(trainer))
        if self.state.attach_new(trainer.optimizers, trainer.current_epoch) and self.graphs:
            self.graphs.note_change()
        self.layers.check_trained(trainer.current_epoch)
        self.mesh.random.deals_in_turn = any(map(deals_in_turn, train_dataloaders(trainer)))
        self.state.main.user_writes.adopt_noted()

    def _passes(self) -> TrainingPasses | None:
        """Return the backward passes; None if this batch computes no gradients."""
        trainer = self.module.trainer
        if skips_backward(trainer):
            return None
        will_step = not accumulates(trainer)
        overlaps = self.overlaps_gradients and will_step
        states = self.layers if will_step and self.layers.is_used else None
        backward = BackwardPasses(
            run=self._run_backward,
            observer=self.state.reducer if overlaps else None,
            inspector=self.state.checks.inspector,
            loss_weight=self.layers.loss_weight,
            weight_gradients=self.state.reducer.weight_gradients,
        )
        return TrainingPasses(
            backward,
            self._clear_and_hide,
            self.state.gradients.hide,
            adds=self._clear_gradients is None,
            will_step=will_step,
            states=states,
        )

    def _clear_and_hide(self) -> None:
        if self._clear_gradients is not None:
            self._clear_gradients()
        if self.mesh.pp.size > 1:
            self.state.gradients.hide()

    def _run_backward(self, loss: Tensor) -> None:
        run_backward(self.module.trainer, loss, self.state.gradients.hide)

    def _permit_graphs(
        self, batch: Any, passes: TrainingPasses | None
    ) -> AbstractContextManager[None]:
        """Return the context in which graphs replace the captured parts of a training step."""
        if self.graphs is None or passes is None:
            return nullcontext()
        growth = self.cuts.growth_of(batch)
        if growth is not None:
            # Graphs of whole steps have a fixed number of microbatches.
            self.graphs.capture_again(growth)
        epoch = self.module.trainer.current_epoch
        return self.graphs.step(signature_of(batch), epoch, is_final=not self._is_choosing)

    def _cut(self, args: tuple[Any, ...], index: int, passes: TrainingPasses | None) -> StepCall:
        microbatches = self.cuts.cut_to_train(args[0], has_backward=passes is not None)
        may_replay = passes is not None and not self._is_choosing
        return StepCall(("training_step",), microbatches, args[1:], index, passes, may_replay)

    @property
    def _is_choosing(self) -> bool:
        """Return whether the schedule of the steps is still chosen; the same on all ranks."""
        return self.choice is not None and self.choice.measured is None

    def _try(self, call: StepCall, batch: Any) -> None:
        """Try a step at its first batch, for microbatches and for sharded features."""
        self._output.begin(self.module)
        if self.trials is None or call.name == "predict_step":
            return
        run = partial(self._run_trial, call)
        if self.cuts.may_cut(batch):
            self.trials.microbatches.check(call.key, batch, call.microbatches, run)
        self.trials.features.check(call.name, call.microbatches[0], run)

    def _run_trial(
        self,
        call: StepCall,
        parts: Sequence[Microbatch],
        recorder: Recorder,
        begin: Callable[[], None],
    ) -> list[Any]:
        """Run a step on parts of its batch without backward passes, as trials need it."""
        with self._replay.record(self.module, recorder):
            return self._run_microbatches(replace(call, microbatches=parts), recorder, begin=begin)

    def _run_to_train(self, call: StepCall) -> RanStep[MicrobatchOutputs]:
        """Run a training step, whose log calls follow those of the strategy itself."""
        self.attributes.begin()
        has_backward = call.passes is not None
        with self._replay.record(self.module) as recorder:
            call = replace(
                call,
                factor=self.precision.loss_factor,
                divisor=self.module.trainer.accumulate_grad_batches,
                token_scale=self._counting.scale(call.microbatches),
            )
            with nullcontext() if has_backward else torch.no_grad():
                ran = self._run(call)
        recorder.adopt(ran.result.recorder)
        if self.choice is not None and has_backward:
            self.choice.end_step(len(call.microbatches))
        return replace(ran, result=replace(ran.result, recorder=recorder))

    def _replay_training(self, call: StepCall, ran: RanStep[MicrobatchOutputs]) -> StepResult:
        """Log the values of a training step on every rank, and share its loss and attributes."""
        outputs = ran.result.outputs
        losses = ran.result.losses
        assert losses is not None, "a training step has losses"
        if call.passes is None:
            for number, output in enumerate(outputs):
                losses.take(output, number)
        if self.mesh.has_loss and self.mesh.world.size > 1:
            losses.check_complete()
        returns_more = bool(outputs) and isinstance(outputs[0], Mapping)
        replayed = self._replay.replay(
            self.module,
            ran.result.recorder,
            (call.name, ran.graph),
            [losses.report(), losses.num_tokens(self.mesh.device)],
            losses.counts,
            returns_more,
            is_repeated=ran.is_repeated,
        )
        self.attributes.share_after(call.name)
        has_loss = not (self.mesh.has_loss and losses.is_empty)
        if has_loss:
            self._counting.check(replayed.is_counted)
        loss, num_tokens = replayed.extra
        result = StepResult(None, loss, num_tokens if replayed.is_counted else None)
        if not has_loss:
            return result
        mean: Any = loss.to(losses.dtype)
        merged = None
        if returns_more:
            merged = _merged(step_outputs(ran), call.microbatches, losses.counts)
        if replayed.returns_more:
            merged = self.attributes.outputs_after(call.name, merged)
        return replace(
            result, output={**merged, "loss": mean} if isinstance(merged, Mapping) else mean
        )

    def _finish_gradients(self, result: StepResult, passes: TrainingPasses | None) -> None:
        """Finish the gradients if the optimizer steps, and call the hooks after backward passes."""
        if passes is None:
            return
        self.state.checks.note("loss", result.loss)
        self.state.gradients.end_batch(result.num_tokens, passes.will_step)
        if passes.will_step:
            self._finish_states()
        call_after_backward_hooks(self.module.trainer)

    def _finish_states(self) -> None:
        """End the step of layers with state; capture again if their scales become delayed ones."""
        if self.layers.finish_step() and self.graphs is not None:
            self.graphs.capture_again("products in 8 bits have scales of earlier steps now")

    def _train_by_hand(self, args: tuple[Any, ...], kwargs: dict[str, Any], index: int) -> Any:
        """Run a step of manual optimization, whose backward passes user code runs."""
        self.state.main.wait()
        dp = self.mesh.dp
        count = count_samples(args[0])
        samples = self.mesh.random.samples_of(range(count), count, dp.rank, dp.size)
        self.mesh.random.begin_microbatch(index, dp.rank, samples)
        if self.layers.loss_weight is not None:
            self.layers.loss_weight.value = self.precision.loss_factor
        guard = self._reads.guard(self.module, "training_step")
        passes = _wrap_backward_passes(self.state.gradients.raw_backward)
        with guard, passes, name_cut_layers(self.module, self.mesh):
            output = self.module.training_step(*args, **kwargs)
        self._finish_states()
        return output

    # ---- an evaluation step

    def evaluate(self, name: str, args: tuple[Any, ...]) -> Any:
        """Run ``validation_step``, ``test_step`` or ``predict_step`` with its arguments.

        The result is the step's output for the batch on the last stage. Every stage receives
        predictions, and other outputs that a hook receives.

        Communication: that of :meth:`BatchComparison.check`, of the schedule and of
            :meth:`LogReplay.replay`.
        """
        self.state.main.wait()
        batch = args[0]
        index = args[1] if len(args) > 1 and isinstance(args[1], int) else 0
        key = (name, *args[2:])
        self.comparison.check(key, _KINDS[name], index + 1, batch)
        by_graphs: AbstractContextManager[None] = nullcontext()
        if self.graphs is not None:
            by_graphs = self.graphs.evaluation(key, signature_of(batch), index)
        call = StepCall(key, self.cuts.cut(batch), args[1:], index)
        self._try(call, batch)
        self.attributes.begin()
        with by_graphs:
            ran = self._run(call)
        if name == "predict_step":
            return self._share_predictions(call, ran)
        return self._replay_evaluation(call, ran)

    def _replay_evaluation(self, call: StepCall, ran: RanStep[MicrobatchOutputs]) -> Any:
        """Log the values of an evaluation step on every rank, and share its outputs."""
        outputs = step_outputs(ran)
        counts = token_counts_in(outputs)
        merged = _merged(outputs, call.microbatches, counts)
        self._replay.replay(
            self.module,
            ran.result.recorder,
            (*call.key, ran.graph),
            counts=counts,
            is_repeated=ran.is_repeated,
        )
        self.attributes.share_after(call.name)
        return self.attributes.outputs_after(call.name, merged)

    def _share_predictions(self, call: StepCall, ran: RanStep[MicrobatchOutputs]) -> Any:
        """Return the predictions of the last stage on every stage."""
        merged = _merged(step_outputs(ran), call.microbatches, None)
        self._replay.share_outputs(self.module, ran.result.recorder)
        self.attributes.share_after(call.name)
        pp_cpu = self.mesh.pp_cpu
        if pp_cpu.size == 1:
            return merged
        on_cpu = apply_to_collection(merged, Tensor, Tensor.cpu)
        return broadcast_object(on_cpu, pp_cpu, pp_cpu.size - 1)

    # ---- a run of the schedule, the same for training, evaluation and trials

    def _run(self, call: StepCall) -> RanStep[MicrobatchOutputs]:
        """Run a step with a limit on the rows of experts, and by whole graphs, if there are."""
        run: RunCall = self._run_schedule
        if self.graphs is not None and self.graphs.whole_steps is not None:
            run = partial(self.graphs.whole_steps.run, run)
        if self.limited_rows is not None:
            run = partial(self.limited_rows.run, run)
        return run(call)

    def _run_schedule(self, call: StepCall) -> RanStep[MicrobatchOutputs]:
        """Run the microbatches of a step eagerly, inside of all that surrounds runs."""
        losses: MicrobatchLosses | None = None
        if call.is_training:
            losses = MicrobatchLosses(
                call.microbatches, call.factor, call.divisor, call.token_scale
            )
        with self._replay.record(self.module) as recorder:
            outputs = self._run_microbatches(call, recorder, losses)
        return RanStep(MicrobatchOutputs(outputs, recorder, losses))

    def _run_microbatches(
        self,
        call: StepCall,
        recorder: Recorder,
        losses: MicrobatchLosses | None = None,
        begin: Callable[[], None] | None = None,
    ) -> list[Any]:
        """Run the schedule over the microbatches; return the outputs of the last stage.

        Args:
            losses: Losses that backward passes start from; None runs no backward passes.
            begin: Function that a trial calls before each microbatch; None outside of trials.
        """
        guard = self._reads.guard(self.module, call.name)
        run_user_step = partial(self._run_user_step, call, recorder, guard, begin)
        trial = Trial(call.name, partial(preserve_state, self.module, call.name))
        draws: AbstractContextManager[Any] = nullcontext()
        if self.trials is not None:
            draws = self.trials.features.draws.streams()
        backward: BackwardPasses | None = None
        if losses is not None and call.passes is not None:
            if self.mesh.pp.size > 1:
                call.passes.clear()
            backward = replace(
                call.passes.backward,
                loss_of=partial(self._loss_of, call.passes, losses),
                weight_of=losses.weight_of,
            )
        with draws:
            return self.executor.run(
                run_user_step, call.microbatches, backward, step=call.index, trial=trial
            )

    def _run_user_step(
        self,
        call: StepCall,
        recorder: Recorder,
        guard: AbstractContextManager[Any],
        begin: Callable[[], None] | None,
        data: Any,
    ) -> Any:
        is_direct = self.mesh.pp.size == 1 and len(call.microbatches) == 1 and not recorder.is_trial
        is_repeated = self.mesh.pp.size > 1 or self.layers.row_limit is not None
        sizes = {id(part.data): part.num_samples for part in call.microbatches}
        recorder.begin(sizes[id(data)], is_muted=not self.executor.runs_to_end)
        if begin is not None:
            begin()
        output: AbstractContextManager[None] = nullcontext()
        if not is_direct:
            output = self._output.of(self.module, recorder, self.executor)
        with (
            output,
            self.attributes.trial() if self.executor.is_repeated else nullcontext(),
            guard,
            name_cut_layers(self.module, self.mesh),
        ):
            # A step may change its batch, and another run needs it as it was.
            data = copy_batch(data) if is_repeated else data
            return getattr(self.module, call.name)(data, *call.args)

    def _loss_of(
        self, passes: TrainingPasses, losses: MicrobatchLosses, output: Any, number: int
    ) -> Tensor | None:
        """Return the loss from which the backward pass of a microbatch starts."""
        if self.mesh.pp.size == 1 and number == 0:
            passes.clear()
        if isinstance(output, Mapping):
            # The output of a replaced model gathers its logits at the first read, which must
            # precede the backward pass.
            tuple(output.values())
        return losses.take(output, number)


def _merged(
    outputs: list[Any], microbatches: Sequence[Microbatch], counts: list[Weight] | None
) -> Any:
    detached = apply_to_collection(outputs, Tensor, Tensor.detach)
    if counts is None:
        return merge_outputs(detached, [part.num_samples for part in microbatches])
    merged = merge_outputs(detached, counts)
    if not isinstance(merged, Mapping):
        return merged
    return {**merged, "num_tokens": total_weight(counts)}


@contextmanager
def _wrap_backward_passes(around: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Run every backward pass that starts inside the block in a new context.

    The interception covers ``loss.backward()`` and ``torch.autograd.backward(...)``. A nested pass,
    such as that of recomputed activations, runs in the context of the outer pass.
    """
    original = torch.autograd.backward
    is_inside = False

    def backward(*args: Any, **kwargs: Any) -> None:
        nonlocal is_inside
        if is_inside:
            original(*args, **kwargs)
            return
        is_inside = True
        try:
            with around():
                original(*args, **kwargs)
        finally:
            is_inside = False

    # Tensor.backward looks up this function by name at every call, so the replacement takes effect.
    torch.autograd.backward = backward
    try:
        yield
    finally:
        torch.autograd.backward = original
