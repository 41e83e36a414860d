"""CUDA graphs of one fit: when they are captured, replayed, given up and released."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn

from lightning_megatron.errors import SpeedWarning, UnsupportedError
from lightning_megatron.graphs.addresses import Addresses
from lightning_megatron.graphs.agreement import (
    KeyAgreement,
    eager_warning,
    failure_of_any,
    is_true_anywhere,
)
from lightning_megatron.graphs.report import GraphReport
from lightning_megatron.graphs.update_graph import UpdateGraph
from lightning_megatron.groups.collectives import all_gather_objects
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.plan.cuda_graphs import CudaGraphs

#: Most sentences about parts that run eagerly; some data has other shapes in every step.
_MOST_SENTENCES = 8


class StepCaptures(Protocol):
    """Graphs of this rank's training steps."""

    @property
    def joins_other_data(self) -> bool:
        """Return whether graphs hold collectives with ranks that read other data."""

    @property
    def num_graphs(self) -> int:
        """Return the number of graphs that exist now."""

    @property
    def failure(self) -> str | None:
        """Return what could not be captured, and why; None if nothing has failed."""

    @property
    def eager(self) -> Mapping[tuple[str, str], int]:
        """Return how often a reason made a captured part run eagerly, by part and reason."""

    def begin(self) -> None:
        """Capture from the next step on what its microbatches need."""

    def permit(self, replays: bool) -> None:
        """Permit or forbid captures and replays from the next step on."""

    def end_step(self) -> None:
        """Undo what permission has changed for the step only."""

    def report(self) -> GraphReport:
        """Return what is captured now."""

    def release(self) -> None:
        """Free all graphs, and capture no more until the next :meth:`begin`."""

    def close(self) -> None:
        """Free all graphs, and let the model run as before."""


class RunGraphs:
    """CUDA graphs of one fit.

    The first steps of a fit are eager, because they make what a capture cannot make: workspaces,
    communicators and compiled kernels. The next step captures. If a rank fails, all ranks go on
    eagerly.

    A load of a checkpoint or a thawed parameter can change what graphs must read and write. Then
    all ranks capture again after one eager step. The ranks look for such changes together: after a
    load, at the first step of an epoch, and with ``check=True`` before every step. Between these
    points a rank that sees a change goes on eagerly alone.

    Args:
        settings: Settings of the graphs.
        captures: Graphs of this rank.
        module: The module whose parameters, gradients and buffers the graphs use.
        mesh: The groups of this rank.
        num_eager: Number of eager steps before the captures begin (steps).
        num_capturing: Number of steps that together capture every graph, such as those of one
            optimizer step with accumulated gradients (steps).
        is_final: Returns whether the schedule of the steps is final; the same on all ranks.
        update: Graph of the update of the parameters, which looks for changes itself; None without
            one.
    """

    def __init__(
        self,
        settings: CudaGraphs,
        captures: StepCaptures,
        module: nn.Module,
        mesh: ParallelMesh,
        num_eager: int,
        num_capturing: int = 1,
        is_final: Callable[[], bool] = lambda: True,
        update: UpdateGraph[Any] | None = None,
    ) -> None:
        self._settings = settings
        self._update = update
        self._captures = captures
        self._module = module
        self._mesh = mesh
        self._num_capturing = num_capturing
        self._is_final = is_final
        self.is_off = False
        #: Eager steps that must still run before the captures (steps).
        self._num_eager_left = num_eager
        #: Steps after which ranks still exchange failures of captures (steps).
        self._num_capturing_left = 0
        #: Addresses when the captures began; None before.
        self._addresses: Addresses | None = None
        self._must_look = False
        self._has_changed = False
        self._epoch = 0
        self._said: set[tuple[str, str]] = set()
        # Without such collectives, ranks with other data may replay other graphs.
        self._keys: KeyAgreement | None = None
        if captures.joins_other_data:
            self._keys = KeyAgreement(mesh.world_cpu, settings.fixed_shapes)

    @property
    def num_graphs(self) -> int:
        """Return the number of graphs of this rank that exist now."""
        of_update = 0 if self._update is None else self._update.num_graphs
        return self._captures.num_graphs + of_update

    def look_again(self) -> None:
        """Look for changes before the next step; called on all ranks, as after a load."""
        self._must_look = True

    def note_change(self) -> None:
        """Go on eagerly on this rank, whose trained parameters have changed, until all look."""
        self._has_changed = self._addresses is not None

    @contextmanager
    def step(self, shapes: Hashable, epoch: int) -> Iterator[None]:
        """Run a training step inside the block, by graphs where they serve it.

        Args:
            shapes: Shapes of this rank's batch.
            epoch: Index of the epoch (epochs).

        Raises:
            CaptureError: If a rank cannot capture and the user asked for an error.
            RankMismatchError: If a step breaks the promise of equal shapes.
            UnsupportedError: If a new shape comes and the user asked for an error.

        Communication: on the CPU over the world. A gather after each step that captures; an
            all-reduce of a flag where the ranks look for changes; that of :class:`KeyAgreement`.
        """
        if self.is_off:
            yield
            return
        self._look(epoch)
        if self._addresses is None and self._num_eager_left <= 0 and self._is_final():
            self._addresses = Addresses.of(self._module)
            self._num_capturing_left = self._num_capturing
            self._captures.begin()
        self._captures.permit(self._may_replay(shapes))
        try:
            yield
        finally:
            self._captures.end_step()
        self._end_step()

    def close(self) -> None:
        """Free all graphs; process groups must still exist."""
        self._captures.close()
        self._addresses = None
        if self._update is not None:
            self._update.close()

    def _may_replay(self, shapes: Hashable) -> bool:
        if self._addresses is None:
            return False
        if self._keys is None:
            return not self._has_changed
        return self._keys.agree([self._has_changed, shapes]) and not self._has_changed

    def _end_step(self) -> None:
        if self._addresses is None:
            self._num_eager_left -= 1
            return
        if self._num_capturing_left > 0:
            self._num_capturing_left -= 1
            self._exchange_failures()
            if self._num_capturing_left == 0 and not self.is_off:
                self._say()
        self._name_eager()

    def _look(self, epoch: int) -> None:
        """Release the graphs of all ranks if what those of one rank use has changed."""
        is_shared = self._must_look or self._settings.check or epoch != self._epoch
        self._epoch = epoch
        self._must_look = False
        if not is_shared or self._addresses is None:
            return
        change = Addresses.of(self._module).change_from(self._addresses)
        if is_true_anywhere(self._has_changed or change is not None, self._mesh.world_cpu):
            what = change or "parameters have changed on another rank"
            rank_zero_info(f"CUDA graphs are captured again after one eager step: {what}.")
            self._captures.release()
            self._addresses = None
            self._num_eager_left = 1
        self._has_changed = False

    def _exchange_failures(self) -> None:
        failure = failure_of_any(self._captures.failure, self._mesh.world_cpu)
        if failure is not None:
            self.is_off = True
            self._captures.permit(False)
            self._captures.close()
            self._addresses = None
            words = eager_warning(failure, raises=self._settings.on_failure == "error")
            rank_zero_warn(words, category=SpeedWarning)

    def _name_eager(self) -> None:
        """Name captured parts that ran eagerly, each with its reason once."""
        for part, reason in self._captures.eager:
            if (part, reason) in self._said:
                continue
            if self._settings.on_new_shape == "error":
                raise UnsupportedError(
                    f"cuda_graphs with on_new_shape='error' needs the captured shapes in every "
                    f"step: {part} got {reason}. Use drop_last=True and one length for all "
                    "samples, or on_new_shape='eager'."
                )
            self._said.add((part, reason))
            if len(self._said) <= _MOST_SENTENCES:
                rank_zero_warn(
                    f"CUDA graphs: {part}, {reason}: run eagerly (said once for each shape).",
                    category=SpeedWarning,
                )

    def _say(self) -> None:
        """Log what is captured, stage by stage if there are several."""
        lines = all_gather_objects(self._captures.report().line(), self._mesh.pp_cpu)
        for stage, line in enumerate(lines):
            rank_zero_info(line if len(lines) == 1 else f"Stage {stage}: {line}")
