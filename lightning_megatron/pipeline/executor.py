"""Executor of pipeline schedules: one loop over a stage's instructions, for any schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.models.remote_tensor import with_values
from lightning_megatron.models.stage import PipelinedModule, StageCursor, StageDone
from lightning_megatron.pipeline.action_times import ActionTimes
from lightning_megatron.pipeline.microbatch import Microbatch
from lightning_megatron.pipeline.step_plans import StepFn, StepPlans, Trial
from lightning_megatron.pipeline.step_run import (
    ActionObserver,
    BackwardObserver,
    BackwardPasses,
    StepRun,
    new_weight,
)
from lightning_megatron.plan.actions import Action, PassPair
from lightning_megatron.plan.schedule import Schedule, ScheduleName, build_schedule
from lightning_megatron.plan.simulate import ReductionPoint, reduction_points
from lightning_megatron.plan.transfers import Instruction, TransferBatch, plan_transfers

#: Function that returns the schedule for a number of microbatches, and a flag that is True if the
#: run has no backward passes.
BuildSchedule = Callable[[int, bool], Schedule]
#: Points at which gradients are reduced, by the number of compute actions that precede them.
Points = Mapping[int, Sequence[ReductionPoint]]


class PipelineExecutor:
    """Run the forward and backward passes of one step's microbatches on this rank's stage.

    The result equals that of one process that calls ``step_fn`` on every microbatch and runs the
    backward pass from the sum of the losses. A schedule may split a backward pass into an input
    half (I), which ends with the gradients for the previous stage, and a weight half (W). Layers
    that do not know
    :class:`~lightning_megatron.layers.parameters.weight_gradient_queue.WeightGradientQueue` compute
    their weight gradients in the input half.

    Args:
        mesh: The groups of this rank; ``mesh.pp`` is the pipeline.
        model: Module that is cut into stages; None with one stage, where ``step_fn`` need not call
            a pipelined module.
        schedule: Name of the schedule, or the function that builds it.
        microbatch_group_size: Number of microbatches that run through one chunk before the next
            chunk runs; None means one for each stage (interleaved only).
        around_passes: Function from the number of microbatches to a context manager, in which a run
            with backward passes runs its passes; None means no such context.
        after_forwards: Function that is called after the last forward pass of this rank in each
            run, and returns a function that is called after the last pass of the run. None in
            either place calls nothing.
        actions: Observer of the actions of steps, such as one that replays CUDA graphs.
    """

    def __init__(
        self,
        mesh: ParallelMesh,
        model: PipelinedModule | None,
        schedule: ScheduleName | BuildSchedule = "1f1b",
        microbatch_group_size: int | None = None,
        around_passes: Callable[[int], AbstractContextManager[None]] | None = None,
        after_forwards: Callable[[], Callable[[], None] | None] | None = None,
        actions: ActionObserver | None = None,
    ) -> None:
        self.mesh = mesh
        self.model = model
        self._num_chunks = model.num_chunks if model is not None else 1
        self._schedule = schedule
        self._group_size = microbatch_group_size
        self._around_passes = around_passes
        self._after_forwards = after_forwards
        self._programs: dict[tuple[int, bool], tuple[Schedule, Sequence[Instruction], Points]] = {}
        self.plans = StepPlans(self.call)
        self._actions = actions
        #: Recorders of the times of the actions in runs with backward passes, unless a graph
        #: captures the run.
        self.times: list[ActionTimes] = []
        # Graphs read the weight of a microbatch at one address.
        self._fixed_weight = None if actions is None else new_weight(mesh.device)

    def run(
        self,
        step_fn: StepFn,
        microbatches: Sequence[Microbatch],
        backward: BackwardPasses | None = None,
        *,
        step: int = 0,
        trial: Trial | None = None,
    ) -> list[Any]:
        """Run all microbatches.

        Args:
            step_fn: Function of a microbatch's data. It calls the model the same number of times
                for every microbatch, and may return any value.
            microbatches: Microbatches, the same on all ranks of one data-parallel rank.
            backward: Backward passes, which accumulate into ``.grad``; None runs forward passes
                only.
            step: Number of this run, which selects the random streams (batches).
            trial: Name of the kind of step, such as training or validation. The first run with each
                name, and every run without a name, first probes the step without values. The probe
                counts the calls of the model, and finds the values that each stage needs from
                earlier stages.

        Returns:
            Results of ``step_fn`` for each microbatch on the last stage; an empty list on the
            others.

        Communication: the point-to-point transfers of
            :func:`~lightning_megatron.plan.transfers.plan_transfers`. If layers attach losses, each
            gradient is accompanied by the weight of its microbatch.
        """
        run = StepRun(
            self.mesh,
            self._num_chunks,
            self.plans,
            step_fn,
            microbatches,
            step,
            backward,
            self._fixed_weight,
            self._actions,
            () if backward is None or self.mesh.journal.is_recording else self.times,
        )
        if self.model is not None and self.mesh.pp.size > 1:
            self._prepare(run, self.model, trial or Trial())
        around: AbstractContextManager[None] = nullcontext()
        if backward is not None and self._around_passes is not None:
            around = self._around_passes(len(microbatches))
        with around, run.whole_step():
            self._run_program(run, None if backward is None else backward.observer)
        return run.results

    def _prepare(self, run: StepRun, model: PipelinedModule, trial: Trial) -> None:
        """Find the plan of a step, and run the computations that it requests on all stages."""
        run.seek(0)
        run.plan = self.plans.of(trial, model, run.step_fn, run.microbatches[0])
        self.plans.collect(trial, run.step_fn, run.microbatches, run.seek)

    def use_schedule(self, schedule: ScheduleName | BuildSchedule) -> None:
        """Use another schedule, with the same placement of chunks, from the next run on."""
        self._schedule = schedule
        self._programs.clear()

    def _run_program(self, run: StepRun, observer: BackwardObserver | None) -> None:
        schedule, instructions, points = self._program(
            len(run.microbatches), run.backward is not None
        )
        if self._actions is not None:
            self._actions.begin_step(schedule)
        num_actions = 0
        last_forward: Action | None = None
        if self._after_forwards is not None:
            *_, last_forward = (a for a in schedule.actions(self.mesh.pp.rank) if a.kind == "F")
        finish: Callable[[], None] | None = None
        for instruction in instructions:
            if isinstance(instruction, TransferBatch):
                run.start_transfers(instruction.sends, instruction.receives)
                continue
            actions = instruction.actions
            indices = range(num_actions, num_actions + len(actions))
            due = [point for index in indices for point in points.get(index, ())]
            if observer is not None and any(point.early for point in due):
                run.announce(actions[-1], observer)
            if isinstance(instruction, PassPair):
                run.compute_pair(instruction)
            else:
                run.compute(instruction)
            if self._after_forwards is not None and last_forward in actions:
                finish = self._after_forwards()
            for point in due:
                if observer is not None:
                    observer.start_reduction(point.chunk)
            num_actions += len(actions)
        if finish is not None:
            finish()

    def _program(
        self, num_microbatches: int, backward: bool
    ) -> tuple[Schedule, Sequence[Instruction], Points]:
        key = (num_microbatches, backward)
        if key not in self._programs:
            schedule = self._build_schedule(num_microbatches, not backward)
            self._check_placement(schedule)
            points: dict[int, list[ReductionPoint]] = {}
            for point in reduction_points(schedule)[self.mesh.pp.rank] if backward else ():
                points.setdefault(point.after_action, []).append(point)
            instructions = plan_transfers(schedule)[self.mesh.pp.rank]
            self._programs[key] = schedule, instructions, points
        return self._programs[key]

    def _build_schedule(self, num_microbatches: int, forward_only: bool) -> Schedule:
        if callable(self._schedule):
            return self._schedule(num_microbatches, forward_only).validate()
        return build_schedule(
            self._schedule,
            self.mesh.pp.size,
            num_microbatches,
            self._num_chunks,
            self._group_size,
            forward_only=forward_only,
            is_paired=self.mesh.turns is not None and not forward_only,
        )

    def _check_placement(self, schedule: Schedule) -> None:
        placement = self.mesh.layout.placement
        if schedule.placement != placement:
            raise ParallelPlanError(
                "a schedule must place chunks as the layout does, because the layers are already "
                f"placed: schedule {schedule.name!r} has {schedule.placement}, the layout has "
                f"{placement}. Give the layout the shape and sizes of the schedule."
            )

    @property
    def runs_to_end(self) -> bool:
        """Return whether the running call is of the last virtual stage, and not a probe."""
        if self.model is None or self.model.cursor is None:
            return True
        return not self.model.cursor.probe and self.model.is_last_stage(self.model.cursor.chunk)

    @property
    def is_probe(self) -> bool:
        """Return whether the running call is a probe, which has no values."""
        return self.model is not None and self.model.cursor is not None and self.model.cursor.probe

    @property
    def is_repeated(self) -> bool:
        """Return whether the side effects of the running call must be discarded.

        The step runs once for each chunk and probe, but its side effects, such as logged values,
        must happen once for each microbatch. The stage that computes the loss keeps those of its
        last chunk, every other stage those of its first chunk.
        """
        if self.model is None or self.model.cursor is None:
            return False
        cursor = self.model.cursor
        return cursor.probe or cursor.chunk != (
            self.model.num_chunks - 1 if self.mesh.has_loss else 0
        )

    def call(
        self, step_fn: StepFn, microbatch: Microbatch, cursor: StageCursor | None
    ) -> tuple[Any, bool]:
        """Call the user's step with the model set to one stage.

        Returns:
            The result of the step, and whether the step ran to its end.
        """
        if self.model is None or cursor is None:
            return step_fn(microbatch.data), True
        self.model.cursor = cursor
        self.model.side_calls = self.plans.side_calls_of(microbatch)
        try:
            # All stages, chunks and probes run the code before the model, and must draw the same
            # random numbers there.
            with self.mesh.random.fork_default(), self.model.without_other_stages():
                result = step_fn(microbatch.data)
                return result if cursor.probe else with_values(result, "the step returns it"), True
        except StageDone:
            return None, False
        finally:
            self.model.cursor = None
            self.model.side_calls = None
