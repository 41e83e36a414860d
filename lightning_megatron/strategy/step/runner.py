"""Execution of a user's step on microbatches, with loss and logs sent to every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_megatron.graphs.step_graph import RanStep
from lightning_megatron.groups.collectives import broadcast_object
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.pipeline.executor import PipelineExecutor
from lightning_megatron.pipeline.microbatch import Microbatch, copy_batch, is_cut, split_batch
from lightning_megatron.pipeline.step_plans import Trial
from lightning_megatron.plan.microbatches import MicrobatchRule
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
from lightning_megatron.strategy.step.custom_order_check import CustomOrderCheck
from lightning_megatron.strategy.step.limited_rows import LimitedRows
from lightning_megatron.strategy.step.microbatch_losses import MicrobatchLosses
from lightning_megatron.strategy.step.schedule_choice import ScheduleChoice
from lightning_megatron.strategy.step.step_values import (
    BackwardPasses,
    MicrobatchOutputs,
    StepResult,
    step_outputs,
)
from lightning_megatron.strategy.step.token_counting import TokenCounting
from lightning_megatron.strategy.step.weight_reads import WeightReads
from lightning_megatron.strategy.step.whole_steps import WholeSteps
from lightning_megatron.strategy.trials.feature_trial import FeatureTrials
from lightning_megatron.strategy.trials.microbatch_check import MicrobatchTrials
from lightning_megatron.strategy.trials.unsharded_modules import name_unsharded_modules
from lightning_megatron.strategy.trials.weight_writes import preserve_state


class StepRunner:
    """Runner of training and evaluation steps: split, schedule and replay of logs.

    Args:
        mesh: The groups of this rank.
        executor: Executor of the pipeline schedule.
        rule: Rule that cuts batches into microbatches.
        kept: Module attributes that steps set.
        trials: Trials of steps at their first batch, for microbatches and for features that tp
            shards; None skips them.
        choice: Choice of the schedule by the times of the first steps; None keeps the executor's.
        whole_steps: Graphs of whole steps; None without such graphs.
        limited_rows: Steps whose experts have a limit on their rows; None without a limit.
    """

    def __init__(
        self,
        mesh: ParallelMesh,
        executor: PipelineExecutor,
        rule: MicrobatchRule,
        kept: AttributeSync,
        trials: tuple[MicrobatchTrials, FeatureTrials] | None = None,
        choice: ScheduleChoice | None = None,
        whole_steps: WholeSteps | None = None,
        limited_rows: LimitedRows | None = None,
    ) -> None:
        self._mesh = mesh
        self._executor = executor
        self._rule = rule
        self._attribute_sync = kept
        self._trials = trials
        self._choice = choice
        self._order_check = CustomOrderCheck(mesh, rule.schedule)
        self.reads = WeightReads(mesh)
        self._whole_steps = whole_steps
        #: Steps whose experts have a limit on their rows; None without a limit.
        self.limited_rows = limited_rows
        self._has_said_size = False
        self._replay = LogReplay(mesh)
        self._output = StepOutput(mesh)
        self._counting = TokenCounting(mesh)

    def train(
        self,
        module: LightningModule,
        batch: Any,
        args: tuple[Any, ...],
        *,
        step: int,
        passes: BackwardPasses | None,
        divisor: int,
        factor: float,
        values_to_log: Mapping[str, float],
    ) -> StepResult:
        """Run ``training_step`` and its backward pass on every microbatch.

        Args:
            module: The user's module.
            batch: The batch of this data-parallel rank.
            args: Further arguments of the step.
            step: Index of the batch in the whole fit, for the random streams (batches).
            passes: Settings of the backward passes; None computes no gradients.
            divisor: Batches whose gradients are accumulated (batches).
            factor: Loss scale.
            values_to_log: Further values to log, known on every rank.

        Raises:
            ParallelPlanError: If the user's own schedule cannot run the microbatches.
            ValueError: If a step counts tokens of some microbatches or batches only.
            RankMismatchError: At the first batch, if a step counts tokens on some ranks only.

        Communication: that of the schedule and of :meth:`LogReplay.replay`; at the first batch one
        all-reduce over the data axis and one gather over the world, on the CPU.
        """
        microbatches = self._cut_to_train(batch, passes is not None)
        self._output.begin(module)
        self._try(module, ("training_step",), batch, microbatches, args, step)
        self._attribute_sync.begin()
        with self._replay.record(module) as recorder:
            for name, value in values_to_log.items():
                module.log(name, value, on_step=True, on_epoch=False)
            ran = self._train(module, microbatches, args, step, passes, divisor, factor)
        recorder.adopt(ran.result.recorder)
        outputs = ran.result.outputs
        losses = ran.result.losses
        assert losses is not None, "a training step has losses"
        if self._choice is not None and passes is not None:
            self._choice.end_step(len(microbatches))
        if passes is None:
            for number, output in enumerate(outputs):
                losses.take(output, number)
        if self._mesh.has_loss and self._mesh.world.size > 1:
            losses.check_complete()
        extra = [losses.report(), losses.num_tokens(self._mesh.device)]
        counts = losses.counts
        returns_more = bool(outputs) and isinstance(outputs[0], Mapping)
        replayed = self._replay.replay(
            module,
            recorder,
            ("training_step", ran.graph),
            extra,
            counts,
            returns_more,
            is_repeated=ran.is_repeated,
        )
        self._attribute_sync.share_after("training_step")
        has_loss = not (self._mesh.has_loss and losses.is_empty)
        if has_loss:
            self._counting.check(replayed.is_counted)
        loss, num_tokens = replayed.extra
        result = StepResult(None, loss, num_tokens if replayed.is_counted else None)
        if not has_loss:
            return result
        mean: Any = loss.to(losses.dtype)
        merged = None
        if returns_more:
            merged = self._merged(step_outputs(ran), microbatches, counts)
        if replayed.returns_more:
            merged = self._attribute_sync.outputs_after("training_step", merged)
        return replace(
            result, output={**merged, "loss": mean} if isinstance(merged, Mapping) else mean
        )

    def _train(
        self,
        module: LightningModule,
        microbatches: list[Microbatch],
        args: tuple[Any, ...],
        step: int,
        passes: BackwardPasses | None,
        divisor: int,
        factor: float,
    ) -> RanStep[MicrobatchOutputs]:
        """Run the microbatches of a training step, eagerly or by a graph."""
        token_scale = self._counting.scale(microbatches)

        def run(
            parts: Sequence[Microbatch],
            factor: float | Tensor,
            passes: BackwardPasses | None,
            args: tuple[Any, ...],
        ) -> MicrobatchOutputs:
            losses = MicrobatchLosses(parts, factor, divisor, token_scale)
            guard = self.reads.guard(module, "training_step")
            with self._replay.record(module) as log:
                outputs = self._run(
                    module, "training_step", list(parts), args, log, step, losses, passes, guard
                )
            return MicrobatchOutputs(outputs, log, losses)

        graphs = self._whole_steps
        limited = self.limited_rows
        is_choosing = self._choice is not None and self._choice.measured is None

        def eagerly(passes: BackwardPasses | None) -> RanStep[MicrobatchOutputs]:
            if graphs is not None:
                graphs.begin_gather()
            return RanStep(run(microbatches, factor, passes, args))

        if passes is None:
            once = partial(eagerly, None)
            with torch.no_grad():
                return once() if limited is None else limited.run(once, once)
        first: Callable[[BackwardPasses], RanStep[MicrobatchOutputs]] = eagerly
        if graphs is not None and not is_choosing:
            by_graph = partial(graphs.train, microbatches, args, run=run, step=step)
            first = partial(by_graph, factor=factor, divisor=divisor)
        return first(passes) if limited is None else limited.train(first, eagerly, passes)

    def evaluate(
        self,
        module: LightningModule,
        name: str,
        batch: Any,
        args: tuple[Any, ...],
        *,
        step: int,
        key: tuple[Any, ...],
        by_graphs: AbstractContextManager[None],
    ) -> Any:
        """Run ``validation_step``, ``test_step`` or ``predict_step`` on every microbatch.

        Args:
            module: The user's module.
            name: Name of the step.
            batch: The batch of this data-parallel rank.
            args: Further arguments of the step.
            step: Index of the batch (batches).
            key: Hook and dataloader, which identify the set of log calls.
            by_graphs: Context in which graphs replace the captured parts of the microbatches.

        Returns:
            The step's output for the batch on the last stage. Every stage receives predictions, and
            other outputs that a hook receives.
        """
        microbatches = self._cut(batch)
        self._output.begin(module)
        if name != "predict_step":
            self._try(module, key, batch, microbatches, args, step)
        self._attribute_sync.begin()

        def run(parts: Sequence[Microbatch], args: tuple[Any, ...]) -> MicrobatchOutputs:
            guard = self.reads.guard(module, name)
            with self._replay.record(module) as log:
                outputs = self._run(module, name, list(parts), args, log, step, guard=guard)
            return MicrobatchOutputs(outputs, log)

        def eagerly() -> RanStep[MicrobatchOutputs]:
            return RanStep(run(microbatches, args))

        graphs = self._whole_steps
        limited = self.limited_rows
        first = eagerly
        if graphs is not None and graphs.evaluates:
            first = partial(graphs.evaluate, key, microbatches, args, run, step=step)
        with by_graphs:
            ran = first() if limited is None else limited.run(first, eagerly)
        outputs = step_outputs(ran)
        recorder = ran.result.recorder
        counts = None if name == "predict_step" else token_counts_in(outputs)
        merged = self._merged(outputs, microbatches, counts)
        if name != "predict_step":
            self._replay.replay(
                module, recorder, (*key, ran.graph), counts=counts, is_repeated=ran.is_repeated
            )
            self._attribute_sync.share_after(name)
            return self._attribute_sync.outputs_after(name, merged)
        self._replay.share_outputs(module, recorder)
        self._attribute_sync.share_after(name)
        pp_cpu = self._mesh.pp_cpu
        if pp_cpu.size == 1:
            return merged
        on_cpu = apply_to_collection(merged, Tensor, Tensor.cpu)
        return broadcast_object(on_cpu, pp_cpu, pp_cpu.size - 1)

    def _cut(self, batch: Any) -> list[Microbatch]:
        return split_batch(batch, None if self._rule.is_whole else self._rule.size_for)

    def _cut_to_train(self, batch: Any, has_backward: bool) -> list[Microbatch]:
        """Cut a training batch, and check that the schedule can run its microbatches."""
        microbatches = self._cut(batch)
        if has_backward:
            self._order_check.check(len(microbatches))
        self._log_size(batch, microbatches)
        return microbatches

    def _try(
        self,
        module: LightningModule,
        key: tuple[Any, ...],
        batch: Any,
        microbatches: list[Microbatch],
        args: tuple[Any, ...],
        step: int,
    ) -> None:
        """Try a step at its first batch, for microbatches and for sharded features."""
        if self._trials is None:
            return
        microbatch_trials, feature_trials = self._trials

        def run(
            parts: Sequence[Microbatch], recorder: Recorder, begin: Callable[[], None]
        ) -> list[Any]:
            guard = self.reads.guard(module, key[0])
            with self._replay.record(module, recorder):
                return self._run(
                    module, key[0], list(parts), args, recorder, step, guard=guard, begin=begin
                )

        if is_cut(batch) or not self._rule.is_whole:
            microbatch_trials.check(key, batch, microbatches, run)
        feature_trials.check(key[0], microbatches[0], run)

    def _log_size(self, batch: Any, microbatches: list[Microbatch]) -> None:
        """Log the number of microbatches once, if the user has not set their size."""
        if self._has_said_size or not self._rule.is_chosen or is_cut(batch):
            return
        self._has_said_size = True
        count = len(microbatches)
        size = microbatches[0].num_samples
        rank_zero_info(
            f"microbatch_size is {size}: a batch of "
            f"{sum(part.num_samples for part in microbatches)} samples is cut into {count} "
            f"microbatches, so that each of the {self._rule.num_stages} pipeline stages waits for "
            f"{self._rule.idle_share(count):.0%} of a step."
        )

    def _run(
        self,
        module: LightningModule,
        name: str,
        microbatches: list[Microbatch],
        args: tuple[Any, ...],
        recorder: Recorder,
        step: int,
        losses: MicrobatchLosses | None = None,
        passes: BackwardPasses | None = None,
        guard: AbstractContextManager[Any] | None = None,
        begin: Callable[[], None] = lambda: None,
    ) -> list[Any]:
        is_repeated = self._mesh.pp.size > 1 or self.limited_rows is not None
        sizes = {id(part.data): part.num_samples for part in microbatches}
        step_fn = getattr(module, name)
        trial = Trial(name, partial(preserve_state, module, name))
        guard = nullcontext() if guard is None else guard
        is_direct = self._mesh.pp.size == 1 and len(microbatches) == 1 and not recorder.is_trial
        draws = nullcontext() if self._trials is None else self._trials[1].draws.streams()

        def run_on(data: Any) -> Any:
            recorder.begin(sizes[id(data)], is_muted=not self._executor.runs_to_end)
            begin()
            output: AbstractContextManager[None] = nullcontext()
            if not is_direct:
                output = self._output.of(module, recorder, self._executor)
            with (
                output,
                self._attribute_sync.trial() if self._executor.is_repeated else nullcontext(),
                guard,
                name_unsharded_modules(module, self._mesh),
            ):
                # A step may change its batch, and another run needs it as it was.
                return step_fn(copy_batch(data) if is_repeated else data, *args)

        if losses is None or passes is None:
            with draws:
                return self._executor.run(
                    run_on, microbatches, backward=False, step=step, trial=trial
                )
        if self._mesh.pp.size > 1:
            passes.clear_gradients()

        def loss_of(output: Any, number: int) -> Tensor | None:
            if self._mesh.pp.size == 1 and number == 0:
                passes.clear_gradients()
            if isinstance(output, Mapping):
                # The output of a replaced model gathers its logits at the first read, which must
                # precede the backward pass.
                tuple(output.values())
            return losses.take(output, number)

        with draws:
            return self._executor.run(
                run_on,
                microbatches,
                backward=True,
                loss_of=loss_of,
                weight_of=losses.weight_of,
                run_backward=passes.run,
                observer=passes.observer,
                inspector=passes.inspector,
                loss_weight=passes.loss_weight,
                weight_gradients=passes.weight_gradients,
                step=step,
                trial=trial,
                times=None if self._choice is None else self._choice.times,
            )

    def _merged(
        self, outputs: list[Any], microbatches: list[Microbatch], counts: list[Weight] | None
    ) -> Any:
        detached = apply_to_collection(outputs, Tensor, Tensor.detach)
        if counts is None:
            return merge_outputs(detached, [part.num_samples for part in microbatches])
        merged = merge_outputs(detached, counts)
        return (
            {**merged, "num_tokens": total_weight(counts)}
            if isinstance(merged, Mapping)
            else merged
        )
