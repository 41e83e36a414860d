"""Executor of pipeline schedules: one loop over a stage's instructions, for any schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.experts.routing.attached_loss import LossWeight
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.p2p import PendingTransfers, start_transfers
from lightning_megatron.models.stage import PipelinedModule, StageCursor, StageDone
from lightning_megatron.models.step_plan import StepPlan, wrong_calls
from lightning_megatron.pipeline.loss_weights import MicrobatchWeights
from lightning_megatron.pipeline.microbatch import Microbatch
from lightning_megatron.pipeline.step_plans import BoundaryForm, StepPlans, Trial, form_of
from lightning_megatron.plan.schedule import Action, ScheduleName, build_schedule
from lightning_megatron.plan.sync_points import ReductionPoint, reduction_points
from lightning_megatron.plan.transfers import Compute, Program, Transfer, plan_transfers


class BackwardObserver(Protocol):
    """Interface that is notified of the last backward pass of each chunk in a step."""

    def begin_last_backward(self, chunk: int) -> None:
        """Prepare for the last backward pass of ``chunk`` in this step, which runs next."""

    def start_reduction(self, chunk: int) -> None:
        """Start the reduction of the gradients of ``chunk``, which are now complete."""


StepFn = Callable[[Any], Any]
LossOf = Callable[[Any, int], Tensor | None]
WeightOf = Callable[[int], float | Tensor]
RunBackward = Callable[[Tensor], None]
Inspector = Callable[[Any, bool], None]
#: One forward or backward pass: (chunk, microbatch).
_Unit = tuple[int, int]
#: Reduction points by the number of compute actions that precede them.
Points = Mapping[int, Sequence[ReductionPoint]]


class PipelineExecutor:
    """Run the forward and backward passes of one step's microbatches on this rank's stage.

    The result equals that of one process that calls ``step_fn`` on every microbatch and runs the
    backward pass from the sum of the losses.

    Args:
        mesh: The groups of this rank; ``mesh.pp`` is the pipeline.
        model: Module that is cut into stages; None with one stage, where ``step_fn`` is
            unrestricted.
        schedule: Name of the schedule: ``1f1b``, ``interleaved`` or ``gpipe``.
        microbatch_group_size: Number of microbatches that run through one chunk before the next
            chunk runs; None means one for each stage (interleaved only).
    """

    def __init__(
        self,
        mesh: ParallelMesh,
        model: PipelinedModule | None,
        schedule: ScheduleName = "1f1b",
        microbatch_group_size: int | None = None,
    ) -> None:
        self.mesh = mesh
        self.model = model
        self._schedule = schedule
        self._group_size = microbatch_group_size
        self._programs: dict[tuple[int, bool], tuple[Program, Points]] = {}
        self.plans = StepPlans(self.call)

    def run(
        self,
        step_fn: StepFn,
        microbatches: Sequence[Microbatch],
        *,
        backward: bool,
        loss_of: LossOf | None = None,
        weight_of: WeightOf = lambda number: 1.0,
        run_backward: RunBackward = Tensor.backward,
        observer: BackwardObserver | None = None,
        inspector: Inspector | None = None,
        loss_weight: LossWeight | None = None,
        step: int = 0,
        trial: Trial | None = None,
    ) -> list[Any]:
        """Run all microbatches.

        Args:
            step_fn: Function of a microbatch's data. It calls the model the same number of times
                for every microbatch, and may return any value.
            microbatches: Microbatches, the same on all ranks of one data-parallel rank.
            backward: Whether to run the backward passes, which accumulate into ``.grad``.
            loss_of: Function from a result of ``step_fn`` and the microbatch's number to the
                weighted scalar loss, or to None for a microbatch without a loss.
            weight_of: Function from a microbatch's number to the factor that ``loss_of`` has
                applied, for losses that layers attach; called on the last stage.
            run_backward: Function that runs the backward pass from a result of ``loss_of``; called
                on the last stage.
            observer: Object that is notified of the last backward pass of each chunk; None if the
                optimizer does not step after this run.
            inspector: Function called before each backward pass with its first graph node, and
                whether that node computed the loss.
            loss_weight: Factor of the main loss, for layers that attach losses; None if there are
                none.
            step: Number of this run, which selects the random streams (batches).
            trial: Name of the kind of step that ``step_fn`` is. The first run of each name, and
                every run without a name, first probes the step without values. The probe counts the
                calls of the model, and finds the values that each stage needs from earlier ones.

        Returns:
            Results of ``step_fn`` for each microbatch on the last stage; an empty list on the
            others.

        Communication: the point-to-point transfers of
            :func:`~lightning_megatron.plan.transfers.plan_transfers`. If layers attach losses, each
            gradient is accompanied by the weight of its microbatch.
        """
        weights = MicrobatchWeights(loss_weight if backward else None, self.mesh.device)
        run = _Run(
            self,
            step_fn,
            microbatches,
            loss_of,
            weight_of,
            run_backward,
            inspector,
            weights,
            step,
            backward,
        )
        if self.model is not None and self.mesh.pp.size > 1:
            run.seek(0)
            run.plan = self.plans.of(trial or Trial(), self.model, step_fn, microbatches[0])
        program, points = self._program(len(microbatches), backward)
        num_actions = 0
        for instruction in program.instructions(self.mesh.pp.rank):
            if isinstance(instruction, Compute):
                here = points.get(num_actions, ())
                _announce(here, observer)
                run.compute(instruction.action)
                _reduce(here, observer)
                num_actions += 1
            else:
                run.start_transfers(instruction.sends, instruction.receives)
        run.finish()
        return run.results

    def _program(self, num_microbatches: int, backward: bool) -> tuple[Program, Points]:
        key = (num_microbatches, backward)
        if key not in self._programs:
            num_chunks = self.model.num_chunks if self.model is not None else 1
            schedule = build_schedule(
                self._schedule,
                self.mesh.pp.size,
                num_microbatches,
                num_chunks,
                self._group_size,
                forward_only=not backward,
            )
            points: dict[int, list[ReductionPoint]] = {}
            for point in reduction_points(schedule)[self.mesh.pp.rank] if backward else ():
                points.setdefault(point.after_action, []).append(point)
            self._programs[key] = plan_transfers(schedule), points
        return self._programs[key]

    @property
    def runs_to_end(self) -> bool:
        """Return whether the running call is of the last virtual stage, and not a probe."""
        if self.model is None or self.model.cursor is None:
            return True
        return not self.model.cursor.probe and self.model.is_last_stage(self.model.cursor.chunk)

    @property
    def is_repeated(self) -> bool:
        """Return whether the side effects of the running call must be discarded.

        The step runs once for each chunk and probe, but its side effects must happen once for each
        microbatch. They stay for the last chunk on the last stage, and for the first chunk
        elsewhere.
        """
        if self.model is None or self.model.cursor is None:
            return False
        cursor = self.model.cursor
        return cursor.probe or cursor.chunk != (
            self.model.num_chunks - 1 if self.mesh.pp.is_last else 0
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
        try:
            # All stages, chunks and probes run the code before the model, and must draw the same
            # random numbers.
            with self.mesh.random.fork_default(), self.model.hidden():
                result = step_fn(microbatch.data)
                return result if cursor.probe else self.model.settled(result), True
        except StageDone:
            return None, False
        finally:
            self.model.cursor = None


def _announce(points: Sequence[ReductionPoint], observer: BackwardObserver | None) -> None:
    for point in points:
        if observer is not None and point.early:
            observer.begin_last_backward(point.chunk)


def _reduce(points: Sequence[ReductionPoint], observer: BackwardObserver | None) -> None:
    for point in points:
        if observer is not None:
            observer.start_reduction(point.chunk)


class _Run:
    """State of one run: inputs, outputs and gradients in flight, by (chunk, microbatch)."""

    def __init__(
        self,
        executor: PipelineExecutor,
        step_fn: StepFn,
        microbatches: Sequence[Microbatch],
        loss_of: LossOf | None,
        weight_of: WeightOf,
        run_backward: RunBackward,
        inspector: Inspector | None,
        weights: MicrobatchWeights,
        step: int,
        backward: bool,
    ) -> None:
        self.executor = executor
        self.step_fn = step_fn
        self.microbatches = microbatches
        self.loss_of = loss_of
        self.weight_of = weight_of
        self.run_backward = run_backward
        self.inspector = inspector
        self.step = step
        self.backward = backward
        self.results: list[Any] = []
        self._axis = executor.mesh.pp
        self._last_chunk = executor.model.num_chunks - 1 if executor.model is not None else 0
        self.plan = StepPlan()
        self._inputs: dict[_Unit, list[Tensor]] = {}
        self._losses: dict[_Unit, Tensor | None] = {}
        self._outputs: dict[_Unit, list[Tensor]] = {}
        self._edges: dict[_Unit, list[GradientEdge | None]] = {}
        #: Shapes and dtypes of the sent outputs, whose gradients will arrive.
        self._sent: dict[_Unit, Sequence[BoundaryForm]] = {}
        self._gradients: dict[_Unit, list[Tensor]] = {}
        self._arrivals: dict[tuple[str, _Unit], PendingTransfers] = {}
        self._boundaries: dict[Any, list[BoundaryForm]] = {}
        self._pending: list[PendingTransfers] = []
        self._weights = weights

    def compute(self, action: Action) -> None:
        """Run one forward or backward pass."""
        unit = (action.chunk, action.microbatch)
        if action.kind == "F":
            self._forward(unit)
        elif action.kind == "B":
            self._backward(unit)
        else:
            raise UnsupportedError(
                f"the executor runs forward (F) and backward (B) actions: {action.kind!r}."
            )

    def start_transfers(self, sends: Sequence[Transfer], receives: Sequence[Transfer]) -> None:
        """Start a batch of transfers. The pass that reads a received tensor waits for it."""
        outgoing = [
            (tensor, transfer.peer) for transfer in sends for tensor in self._outgoing(transfer)
        ]
        buffers = [self._buffers(transfer) for transfer in receives]
        incoming = [
            (one, transfer.peer)
            for transfer, made in zip(receives, buffers, strict=True)
            for one in made
        ]
        weights = self._weights
        outgoing += weights.messages(sends)
        incoming += weights.messages(receives)
        pending = start_transfers(outgoing, incoming, self._axis)
        # Keep sends that are not done, because their tensors must stay alive.
        self._pending = [one for one in self._pending if not one.is_done()] + [pending]
        for transfer, made in zip(receives, buffers, strict=True):
            unit = (transfer.chunk, transfer.microbatch)
            (self._inputs if transfer.kind == "F" else self._gradients)[unit] = made
            self._arrivals[transfer.kind, unit] = pending

    def finish(self) -> None:
        """Wait for the last transfers."""
        for pending in self._pending:
            pending.wait()

    def _forward(self, unit: _Unit) -> None:
        chunk, number = unit
        microbatch = self.microbatches[number]
        self.seek(number)
        self._weights.begin(number)
        cursor = None
        if self._axis.size > 1:
            received = self._arrived("F", unit, self._inputs)
            for tensor in received if self.backward else ():
                tensor.requires_grad_(tensor.is_floating_point())
            cursor = StageCursor(chunk, received, plan=self.plan)
        result, ended = self.executor.call(self.step_fn, microbatch, cursor)
        is_last = self._axis.is_last and chunk == self._last_chunk
        if cursor is not None and (ended != is_last or cursor.calls != self.plan.num_calls):
            raise UnsupportedError(wrong_calls(self.plan.num_calls, cursor.calls))
        if is_last:
            self.results.append(result)
            if self.backward and self.loss_of is not None:
                self._losses[unit] = self.loss_of(result, number)
            if self.backward:
                self._weights.fill(number, self.weight_of(number))
        elif cursor is not None:
            self._outputs[unit] = cursor.sent
        if not self.backward:
            self._inputs.pop(unit, None)

    def _backward(self, unit: _Unit) -> None:
        # A layer whose activations are recomputed attaches its losses again, and reads the weight.
        self._weights.begin(unit[1])
        loss = self._losses.pop(unit, None)
        if loss is not None:
            self._inspect(loss.grad_fn, True)
            self.run_backward(loss)
        gradients = self._arrived("B", unit, self._gradients)
        self._gradients.pop(unit, None)
        # An edge is None if its output needs no gradient, as on a stage whose parameters are all
        # frozen.
        both = zip(self._edges.pop(unit, ()), gradients, strict=True)
        pairs = [(edge, gradient) for edge, gradient in both if edge is not None]
        for edge, _ in pairs:
            self._inspect(edge.node, False)
        if pairs:
            torch.autograd.backward(
                [edge for edge, _ in pairs], [gradient for _, gradient in pairs]
            )
        received = [one for one in self._inputs.pop(unit, ()) if one.is_floating_point()]
        self._gradients[unit] = [
            torch.zeros_like(one) if one.grad is None else one.grad for one in received
        ]

    def _inspect(self, node: Any, is_loss: bool) -> None:
        if self.inspector is not None:
            self.inspector(node, is_loss)

    def _outgoing(self, transfer: Transfer) -> list[Tensor]:
        unit = (transfer.chunk, transfer.microbatch)
        if transfer.kind == "B":
            return [gradient.contiguous() for gradient in self._gradients.pop(unit)]
        # The backward pass starts from graph edges. It does not need the outputs' values, so their
        # memory is released as soon as the transfer is done.
        outputs = self._outputs.pop(unit)
        if self.backward:
            floating = [output for output in outputs if output.is_floating_point()]
            self._sent[unit] = [(output.shape, output.dtype) for output in floating]
            self._edges[unit] = [
                get_gradient_edge(one) if one.requires_grad else None for one in floating
            ]
        return [output.detach().contiguous() for output in outputs]

    def _buffers(self, transfer: Transfer) -> list[Tensor]:
        device = self.executor.mesh.device
        unit = (transfer.chunk, transfer.microbatch)
        forms = self._sent.pop(unit) if transfer.kind == "B" else self._forms(transfer)
        return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in forms]

    def _forms(self, transfer: Transfer) -> Sequence[BoundaryForm]:
        microbatch = self.microbatches[transfer.microbatch]
        # Cached for this run only: the next run may have another step function, or one that gives
        # the model another part of an equally shaped batch.
        key = transfer.chunk, form_of(microbatch.data)
        if key not in self._boundaries:
            self.seek(transfer.microbatch)
            self._boundaries[key] = self.executor.plans.forms(
                self.step_fn, microbatch, self.plan, transfer.chunk
            )
        return self._boundaries[key]

    def seek(self, number: int) -> None:
        """Move the random streams to the start of a microbatch."""
        mesh = self.executor.mesh
        mesh.random.begin_microbatch(self.step, number * mesh.dp.size + mesh.dp.rank)

    def _arrived(self, kind: str, unit: _Unit, where: dict[_Unit, list[Tensor]]) -> list[Tensor]:
        pending = self._arrivals.pop((kind, unit), None)
        if pending is not None:
            pending.wait()
        return where.get(unit, [])
