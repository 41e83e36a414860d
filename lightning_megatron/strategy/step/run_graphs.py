"""CUDA graphs of one run: when they are captured, replayed, given up and released."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn

from lightning_megatron.errors import SpeedWarning, UnsupportedError
from lightning_megatron.graphs.addresses import Addresses
from lightning_megatron.graphs.agreement import (
    KeyAgreement,
    failure_of_any,
)
from lightning_megatron.graphs.graph_keys import TRAINING
from lightning_megatron.graphs.report import StepCaptures
from lightning_megatron.graphs.runner import GraphRunner
from lightning_megatron.graphs.update_graph import UpdateGraph
from lightning_megatron.groups.collectives import all_gather_objects, is_true_anywhere
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.pipeline.step_run import ActionObserver
from lightning_megatron.plan.cuda_graphs import CudaGraphs
from lightning_megatron.strategy.step.whole_steps import WholeSteps

#: Maximum number of warnings about eager parts, because some data has new shapes in every step.
_MAX_WARNINGS = 8


@dataclass
class CapturePhase:
    """Progress of one kind of steps: first eager steps, then captures, then replays.

    Args:
        num_eager_left: Eager steps that must still run before the captures (steps).
        keys: Agreement with ranks that read other data; None if no graph contains collectives
            with them.
        num_capturing_left: Number of next steps after which ranks exchange failures of captures
            (steps).
        addresses: Addresses of tensors at the start of the captures; None before.
    """

    num_eager_left: int
    keys: KeyAgreement | None = None
    num_capturing_left: int = 0
    addresses: Addresses | None = field(default=None, repr=False)

    @property
    def has_begun(self) -> bool:
        """Return whether the captures have begun."""
        return self.addresses is not None

    def may_replay(self, shapes: Hashable, has_changed: bool) -> bool:
        """Return whether this rank may capture and replay in a step.

        It may not if tensors that graphs use ``has_changed`` on this rank since the captures.

        Communication: that of :class:`KeyAgreement`.
        """
        if not self.has_begun:
            return False
        if self.keys is None:
            return not has_changed
        return self.keys.agree([has_changed, shapes]) and not has_changed


class RunGraphs:
    """CUDA graphs of one run.

    The first steps of each kind run eagerly, because they create objects that a capture cannot
    create: workspaces, communicators and compiled kernels. The next step captures. If the capture
    fails on any rank, all ranks continue eagerly.

    Loading a checkpoint or unfreezing a parameter can change the tensors that graphs must read and
    write. All ranks then capture again after one eager step of each kind. The ranks look for such
    changes together: after a load, at the first training step of an epoch, at the first batch of
    an evaluation, and before every step with ``check=True``. Between these points, a rank that
    notices a change switches to eager steps by itself.

    Args:
        num_capturing: Number of training steps that together capture every graph, such as those of
            one optimizer step with accumulated gradients (steps).
        update: Graph of the parameter update, which itself checks for changes; None without one.
    """

    def __init__(
        self,
        settings: CudaGraphs,
        captures: StepCaptures,
        module: nn.Module,
        mesh: ParallelMesh,
        num_capturing: int = 1,
        update: UpdateGraph[Any] | None = None,
        whole_steps: WholeSteps | None = None,
    ) -> None:
        #: Steps that graphs hold as a whole; None if graphs hold parts of a model.
        self.whole_steps = whole_steps
        self._settings = settings
        self._update = update
        self._captures = captures
        self._module = module
        self._mesh = mesh
        # Graphs of whole steps count the eager steps of each form of a step themselves.
        self._num_eager = 0 if captures.is_joint else settings.warmup_steps
        self._num_capturing = num_capturing
        self.is_off = False
        self._phases: dict[str, CapturePhase] = {}
        self._must_look = False
        self._has_changed = False
        self._epoch = 0
        # Kind of the running step, and the change that the strategy has announced on all ranks.
        self._kind: str | None = None
        self._common_change: str | None = None
        self._logged: set[tuple[str, str]] = set()
        self._num_known = 0
        # Whether the graphs have changed since the last log line about captured parts.
        self._is_unsaid = False

    @property
    def actions(self) -> ActionObserver | None:
        """Return the observer of a step's actions, which assigns memory to microbatches; None if
        none is needed.
        """
        return self._captures if isinstance(self._captures, GraphRunner) else None

    @property
    def num_graphs(self) -> int:
        """Return the number of graphs of this rank that exist now."""
        num_update_graphs = 0 if self._update is None else self._update.num_graphs
        return self._captures.num_graphs + num_update_graphs

    @property
    def has_training_graphs(self) -> bool:
        """Return whether graphs of training steps exist, not only of evaluation steps."""
        counts = self._captures.counts
        return counts.num_graphs > counts.num_evaluating

    def recheck(self) -> None:
        """Look for changes before the next step; called on all ranks, for example after a load."""
        self._must_look = True

    def note_change(self) -> None:
        """Record that the trained parameters of this rank have changed.

        This rank runs eagerly until all ranks look for changes.
        """
        self._has_changed = any(phase.has_begun for phase in self._phases.values())

    def suspend(self) -> None:
        """Run the rest of the current step eagerly; called on all ranks."""
        if self._kind is not None:
            self._captures.permit(self._kind, False)

    def capture_again(self, reason: str) -> None:
        """Capture all graphs again after the current step; called on all ranks."""
        self._common_change = reason

    def step(
        self, shapes: Hashable, epoch: int, is_final: bool = True
    ) -> AbstractContextManager[None]:
        """Return the context of a training step, in which graphs replace the captured parts.

        Args:
            is_final: Whether the schedule of the training steps is final; the same on all ranks.

        Communication: on the CPU over the world: a gather after each step that captures; an
            all-reduce of a flag when the ranks look for changes, and after each step with
            ``on_new_shape="capture"``; that of :class:`KeyAgreement`.
        """
        is_new = epoch != self._epoch
        self._epoch = epoch
        return self._serving(TRAINING, shapes, is_new, is_final)

    def evaluation(
        self, key: Sequence[Any], shapes: Hashable, batch: int
    ) -> AbstractContextManager[None]:
        """Return the context of an evaluation step, in which graphs run if ``evaluation`` is set.

        Communication: that of :meth:`step`.
        """
        if not self._settings.evaluation:
            return nullcontext()
        return self._serving(" ".join(map(str, key)), shapes, batch == 0, True)

    @contextmanager
    def _serving(self, kind: str, shapes: Hashable, looks: bool, is_final: bool) -> Iterator[None]:
        phase = self._phase(kind)
        if not self.is_off:
            self._release_outdated(phase, looks)
        if self.is_off:
            yield
            return
        if not phase.has_begun and phase.num_eager_left <= 0 and is_final:
            phase.addresses = Addresses.of(self._module)
            phase.num_capturing_left = self._num_capturing if kind == TRAINING else 1
            self._captures.begin(kind)
        self._captures.permit(kind, phase.may_replay(shapes, self._has_changed))
        self._kind = kind
        try:
            yield
        finally:
            self._kind = None
            self._captures.end_step()
        self._end_step(phase)

    def close(self) -> None:
        """Free all graphs; process groups must still exist."""
        self._captures.close()
        self._phases.clear()
        if self._update is not None:
            self._update.close()

    def _phase(self, kind: str) -> CapturePhase:
        if kind not in self._phases:
            # Without such collectives, ranks with different data may replay different graphs.
            keys = None
            if self._captures.communicates_across_data:
                keys = KeyAgreement(self._mesh.world_cpu, self._settings.fixed_shapes)
            self._phases[kind] = CapturePhase(self._num_eager, keys)
        return self._phases[kind]

    def _end_step(self, phase: CapturePhase) -> None:
        if not phase.has_begun:
            phase.num_eager_left -= 1
            return
        has_captured = self._has_captured(phase)
        if has_captured and not self._captures.is_joint:
            self._exchange_failures()
        elif self._captures.is_joint and self._captures.failure is not None:
            self._turn_off(self._captures.failure)
        self._is_unsaid = self._is_unsaid or has_captured
        is_due = not has_captured if self._captures.is_joint else not phase.num_capturing_left
        if self._is_unsaid and is_due and not self.is_off:
            self._is_unsaid = False
            self._log_captures()
        self._name_eager()

    def _has_captured(self, phase: CapturePhase) -> bool:
        """Return whether a rank may have captured in a step; the same on all ranks."""
        is_capturing = phase.num_capturing_left > 0
        if is_capturing:
            phase.num_capturing_left -= 1
        elif not self._captures.is_joint and self._settings.on_new_shape != "capture":
            return False
        number = self._captures.num_graphs
        has_new = number > self._num_known
        self._num_known = number
        if self._captures.is_joint:
            return has_new
        return is_capturing or is_true_anywhere(has_new, self._mesh.world_cpu)

    def _release_outdated(self, phase: CapturePhase, looks: bool) -> None:
        """Release the graphs of all ranks if tensors that graphs of any rank use have changed."""
        if self._common_change is not None:
            self._release(self._common_change)
        is_shared = self._must_look or self._settings.check or looks
        if not is_shared or not phase.has_begun:
            return
        assert phase.addresses is not None, "the captures have begun"
        self._must_look = False
        change = Addresses.of(self._module).change_from(phase.addresses)
        # A capture may have failed later than the steps in which ranks exchange failures.
        has_failed = self._captures.failure is not None
        is_changed = self._has_changed or change is not None
        self._has_changed = False
        if not is_true_anywhere(is_changed or has_failed, self._mesh.world_cpu):
            return
        self._exchange_failures()
        if self.is_off:
            return
        self._release(change or "parameters have changed on another rank")

    def _release(self, change: str) -> None:
        """Release all graphs, so that ranks capture again after one eager step of each kind."""
        self._common_change = None
        if not any(phase.has_begun for phase in self._phases.values()):
            return
        rank_zero_info(f"CUDA graphs are captured again after one eager step: {change}.")
        self._captures.release()
        for phase in self._phases.values():
            if phase.has_begun:
                phase.num_eager_left = 1
            phase.addresses = None
            phase.num_capturing_left = 0

    def _exchange_failures(self) -> None:
        failure = failure_of_any(self._captures.failure, self._mesh.world_cpu, self._settings)
        if failure is not None:
            self._turn_off(failure)

    def _turn_off(self, failure: str) -> None:
        """Run all steps eagerly from now on, because a rank has failed to capture."""
        self.is_off = True
        self._captures.close()
        self._phases.clear()
        rank_zero_warn(
            f"CUDA graphs of steps are off: {failure} All ranks run their steps eagerly.",
            category=SpeedWarning,
        )

    def _name_eager(self) -> None:
        """Warn once for each captured part and reason for which the part ran eagerly."""
        for part, reason in self._captures.eager:
            if self._settings.on_new_shape == "error" and not self._captures.is_joint:
                raise UnsupportedError(
                    "with cuda_graphs and on_new_shape='error' every step must have captured "
                    f"shapes: {part}, {reason}. Use drop_last=True and one length for all samples, "
                    "or on_new_shape of eager or capture."
                )
            if (part, reason) not in self._logged and len(self._logged) < _MAX_WARNINGS:
                self._logged.add((part, reason))
                rank_zero_warn(
                    f"CUDA graphs: {part}, {reason}: run eagerly (said once for each shape)",
                    category=SpeedWarning,
                )
        # New shapes in every step would make the number of entries grow with the steps.
        self._captures.eager.clear()

    def _log_captures(self) -> None:
        lines = all_gather_objects(self._captures.report(), self._mesh.pp_cpu)
        for stage, line in enumerate(lines):
            rank_zero_info(line if len(lines) == 1 else f"Stage {stage}: {line}")
