"""Graphs of the update of the parameters, with the gradient norm and the clipping."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from lightning_megatron.graphs.agreement import failure_of_any
from lightning_megatron.graphs.backend import (
    CAPTURE_ERRORS,
    CaptureBackend,
    CapturedGraph,
    collection_paused,
)
from lightning_megatron.groups.collectives import all_reduce_
from lightning_megatron.groups.journal import RecordedCall
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.plan.cuda_graphs import CudaGraphs

T = TypeVar("T")

_NAME = "the update of the parameters"
# Ways in which a rank can run an update; all ranks use the least capable rank's way.
_EAGER, _CAPTURE, _REPLAY = range(3)


@dataclass(frozen=True)
class Update(Generic[T]):
    """One update of parameters, which may run eagerly, be captured or be replayed.

    Args:
        form: What a graph assumes besides the tensors, such as the limit of the norm.
        tensors: Object that identifies all tensors that outlive the update; updates with the same
            object use the same tensors. The graph keeps it alive.
        addresses: Function that returns the addresses of the tensors.
        parts: Functions that update the parameters one after the other, with no effects but
            collectives and writes to tensors. Each has a graph of its own. The result of the first
            one is that of the update.
        reason_against: Why later updates cannot use the same tensors; None if they can.
        after_part: Function that gets the number of each part when the current stream has its
            work; no graph contains what it does.
    """

    form: Hashable
    tensors: object
    addresses: Callable[[], Hashable]
    parts: Sequence[Callable[[], Any]]
    reason_against: str | None = None
    after_part: Callable[[int], None] = lambda number: None

    def run(self) -> T:
        """Run all parts eagerly."""
        results = []
        for number, part in enumerate(self.parts):
            results.append(part())
            self.after_part(number)
        result: T = results[0]
        return result


@dataclass(frozen=True)
class _Captured(Generic[T]):
    """Captured update.

    Args:
        key: Form of the update, with addresses if they are checked.
        tensors: Object that identifies its tensors.
        graphs: The graph of each part.
        collectives: Collectives that each replay starts.
        result: What the update returned, in tensors of the first graph.
        releases: Stack that destroys the graphs, in the reverse order of their captures.
    """

    key: Hashable
    tensors: object
    graphs: tuple[CapturedGraph, ...]
    collectives: tuple[RecordedCall, ...]
    result: T
    releases: ExitStack


class UpdateGraph(Generic[T]):
    """Graphs of the updates of one optimizer, one for each part.

    The first updates of the same tensors run eagerly, which creates what a capture needs, such as
    tables of addresses and compiled kernels. The next one is captured, which runs nothing on a GPU,
    and replayed at once, like all later ones. A replay is bitwise equal to the eager update. After
    a change, such as a loaded state, updates run eagerly and are captured again. All ranks capture,
    replay or run eagerly together.

    Args:
        say: Function that logs a sentence.
        warn: Function that warns of a loss of speed.
    """

    def __init__(
        self,
        backend: CaptureBackend,
        mesh: ParallelMesh,
        settings: CudaGraphs,
        say: Callable[[str], None] = lambda sentence: None,
        warn: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        self._backend = backend
        self._mesh = mesh
        self._settings = settings
        self._say = say
        self._warn = warn
        self._captured: _Captured[T] | None = None
        # Form and tensors of the last eager updates, and the number of consecutive ones.
        self._eager: tuple[Hashable, object] = (None, None)
        self._num_eager = 0
        self._said: set[str] = set()
        #: Whether all updates run eagerly, because a capture has failed or the fit has ended.
        self.is_off = False

    @property
    def num_graphs(self) -> int:
        """Return the number of graphs."""
        return 0 if self._captured is None else len(self._captured.graphs)

    @torch.no_grad()
    def run(self, update: Update[T]) -> T:
        """Run an update: eagerly, by new graphs or by the old ones.

        Returns:
            What the update returned. If graphs ran it, the tensors are those of the first one: the
            next replay overwrites them.

        Raises:
            CaptureError: If a rank cannot capture and the user asked for an error.

        Communication: that of the update; one all-reduce of a number over the world on the CPU,
            and at a capture one gather of objects.
        """
        if self.is_off:
            return update.run()
        key = (update.form, update.addresses() if self._settings.check else None)
        decision = torch.tensor(self._able(update, key))
        lowest = int(all_reduce_(decision, self._mesh.world_cpu, "min"))
        if lowest == _EAGER:
            self._count(update, key)
            return update.run()
        if lowest == _CAPTURE and not self._captures(update, key):
            return update.run()
        captured = self._captured
        assert captured is not None, "a rank that agrees to replay has a graph"
        number = len(captured.collectives)
        label = f"replay of {_NAME}, {number} collective{'' if number == 1 else 's'}"
        self._mesh.journal.repeat(captured.collectives, label)
        for part, graph in enumerate(captured.graphs):
            graph.replay()
            update.after_part(part)
        return captured.result

    def release(self) -> None:
        """Destroy the graphs, and begin again with eager updates.

        Process groups whose collectives the graphs hold must still exist.
        """
        if self._captured is not None:
            self._captured.releases.close()
        self._captured = None
        self._eager = (None, None)
        self._num_eager = 0

    def close(self) -> None:
        """Destroy the graphs, and run everything eagerly from now on."""
        self.release()
        self.is_off = True

    def _able(self, update: Update[T], key: Hashable) -> int:
        """Return how this rank could run an update."""
        if update.reason_against is not None:
            sentence = f"CUDA graphs: {_NAME} runs eagerly: {update.reason_against}."
            self._once(self._warn, sentence)
            return _EAGER
        captured = self._captured
        if captured is not None and captured.key == key and captured.tensors is update.tensors:
            return _REPLAY
        is_warm = self._num_eager >= self._settings.warmup_steps
        return _CAPTURE if is_warm and self._ran_before(update, key) else _EAGER

    def _count(self, update: Update[T], key: Hashable) -> None:
        """Count an eager update among those with its form and tensors."""
        if self._captured is not None and self._captured.tensors is not update.tensors:
            # What its kernels read is replaced by that of the new tensors.
            self.release()
        if update.reason_against is not None:
            return
        if not self._ran_before(update, key):
            self._eager = key, update.tensors
            self._num_eager = 0
        self._num_eager += 1

    def _ran_before(self, update: Update[T], key: Hashable) -> bool:
        """Return whether the last eager update had this form and these tensors."""
        form, tensors = self._eager
        return self._num_eager > 0 and form == key and tensors is update.tensors

    def _captures(self, update: Update[T], key: Hashable) -> bool:
        """Capture an update; return whether all ranks could do so."""
        self.release()
        failure = None
        try:
            self._captured = self._capture(update, key)
        except CAPTURE_ERRORS as error:
            failure = f"{_NAME}: {type(error).__name__}: {error}"
        failure = failure_of_any(failure, self._mesh.world_cpu, self._settings)
        if failure is None:
            number = len(update.parts)
            words = f"{number} graph{'' if number == 1 else 's'}"
            line = f"CUDA graphs (optimizer): {_NAME}, with norm and clipping, in {words}."
            self._once(self._say, line)
            return True
        self.close()
        self._warn(f"CUDA graphs (optimizer) are off: {failure} All ranks update eagerly.")
        return False

    def _once(self, say: Callable[[str], None], sentence: str) -> None:
        if sentence not in self._said:
            self._said.add(sentence)
            say(sentence)

    def _capture(self, update: Update[T], key: Hashable) -> _Captured[T]:
        pool = self._backend.make_pool()
        captured = []
        with ExitStack() as stack:
            with collection_paused(), self._mesh.journal.recording() as collectives:
                for part in update.parts:
                    captured.append(self._backend.capture(part, pool))
                    stack.callback(captured[-1][0].release)
            releases = stack.pop_all()
        graphs = tuple(graph for graph, _ in captured)
        result = captured[0][1]
        return _Captured(key, update.tensors, graphs, tuple(collectives), result, releases)
