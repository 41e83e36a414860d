"""All-gather of updated parameters, overlapped with the next forward pass."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.pending import Pending
from lightning_megatron.optimizer.flat_buffer import FlatBuffer, UseOrder
from lightning_megatron.shapes import Shaped

#: Key of a bucket: index of the buffer, and index in the buffer.
_BucketKey = tuple[int, int]


@dataclass(frozen=True)
class _UpdateGathers:
    """All-gathers that start while parameters are updated.

    Args:
        left: Buckets whose all-gathers have not started, in order.
        missing: Names of the parameters of each bucket that this rank must still update; None for a
            bucket that the update does not complete.
    """

    mesh: ParallelMesh
    left: deque[_BucketKey]
    missing: Mapping[_BucketKey, set[str] | None]


@dataclass
class RecordedGather:
    """Record of a captured computation: whether it starts and awaits deferred all-gathers."""

    gathers: bool = False


class ParameterGather:
    """Pending all-gathers of parameter buckets, in the order of the forward pass.

    With :attr:`defers`, :meth:`start` starts no all-gather. The parts of other ranks stay outdated
    until the first read of parameters, when :meth:`begin`, :meth:`wait` or :meth:`wait_for` starts
    all all-gathers, so that a CUDA graph of the next step can contain them. Without :attr:`defers`,
    the all-gathers can start during the update of the parameters: see :meth:`start_during_update`.
    """

    def __init__(self, order: UseOrder, buffers: Sequence[FlatBuffer]) -> None:
        self._order = order
        self._buffers = buffers
        # The number of buffers at the last call of `_buckets_in_order`, and their buckets in order.
        self._ordered: tuple[int, list[_BucketKey]] = 0, []
        #: Whether :meth:`start` defers the all-gathers to the first read of parameters. All ranks
        #: must have the same value, and must first read parameters at the same point of a step.
        self.defers = False
        self._deferred: ParallelMesh | None = None
        self._during_update: _UpdateGathers | None = None
        self._recorded: RecordedGather | None = None
        self._pending: dict[_BucketKey, Pending] = {}
        self._hooks: list[RemovableHandle] = []
        # Buckets for which modules wait: a module reads each of their parameters.
        self._awaited: set[_BucketKey] = set()
        # Bucket of each parameter, by its identity.
        self._bucket_of: Mapping[int, _BucketKey] = {}

    @property
    def is_deferred(self) -> bool:
        """Return whether all-gathers are deferred and have not started yet."""
        return self._deferred is not None

    def start(self, mesh: ParallelMesh) -> None:
        """Start one all-gather for every bucket that is partitioned over ranks, or defer them all.

        If no module waits for one of a bucket's parameters, this method waits for the bucket after
        it has started all of them.

        Communication: one all-gather over the data axis, or over that of experts, for each bucket;
        with :attr:`defers` at the next :meth:`begin`, :meth:`wait` or :meth:`wait_for`. All-gathers
        that :meth:`mark_updated` has started do not start again.
        """
        if self._during_update is None:
            self.wait()
        # A stage without trained parameters defers, too, so that all ranks choose the same graph.
        # If etp is smaller than tp, experts can have replicas although other parameters have none.
        if mesh.data.size > 1 or mesh.edp.size > 1:
            self._deferred = mesh
        if not self.defers:
            self.begin()

    def start_during_update(self, mesh: ParallelMesh, names: Set[str]) -> None:
        """Let all-gathers start as soon as the named parameters of their buckets are updated.

        :meth:`mark_updated` must name these parameters, and :meth:`start` must follow.

        Communication: that of :meth:`wait`.
        """
        self.wait()
        order = self._buckets_in_order()
        if self.defers or not order:
            return
        missing = {key: self._missing_of(key, names) for key in order}
        self._during_update = _UpdateGathers(mesh, deque(order), missing)

    def mark_updated(self, names: Iterable[str]) -> None:
        """Start the all-gathers of buckets that these parameters complete.

        The update of the parameters is enqueued on the current stream. The all-gathers start in the
        order of :meth:`start`, which is the same on all ranks: a complete bucket waits for the
        buckets before it.

        Communication: one all-gather over the data axis, or over that of experts, for each bucket.
        """
        gathers = self._during_update
        if gathers is None:
            return
        for missing in filter(None, gathers.missing.values()):
            missing.difference_update(names)
        while gathers.left and gathers.missing[gathers.left[0]] == set():
            self._start_bucket(gathers.left.popleft(), gathers.mesh)

    def begin(self) -> None:
        """Start the deferred all-gathers, if there are any.

        Communication: that of :meth:`start`.
        """
        if self._deferred is None:
            return
        mesh = self._deferred
        self._deferred = None
        if self._recorded is not None:
            self._recorded.gathers = True
        gathers = self._during_update
        self._during_update = None
        for key in self._buckets_in_order() if gathers is None else gathers.left:
            self._start_bucket(key, mesh)
        self._complete([bucket for bucket in self._pending if bucket not in self._awaited])

    def wait(self) -> None:
        """Wait for all buckets.

        Communication: that of :meth:`begin`.
        """
        self.begin()
        self.wait_for_started()

    def wait_for_started(self) -> None:
        """Wait for the buckets whose all-gathers have started; deferred ones stay deferred."""
        self._complete(tuple(self._pending))

    @contextmanager
    def recording(self) -> Iterator[RecordedGather]:
        """Record the block's all-gathers, and restore the state of all buckets when it ends.

        A capture starts nothing on the device. The code that replays it calls
        :meth:`mark_gathered` if the recorded computation gathers.
        """
        if self._recorded is not None:
            raise RuntimeError(
                "recordings of gathered parameters must not be nested: a gather would belong to "
                "two captured computations. End the first recording before the next one starts."
            )
        before = self._deferred, dict(self._pending)
        recorded = self._recorded = RecordedGather()
        try:
            yield recorded
        finally:
            self._recorded = None
            self._deferred, self._pending = before

    def mark_gathered(self) -> None:
        """Record that a replay has gathered the deferred buckets and waited for them."""
        self._deferred = None

    def wait_for(self, parameters: Iterable[Shaped[Tensor, "..."]]) -> None:
        """Wait for the buckets of some parameters, before they are read.

        The hooks of :meth:`wait_before` call this. A replay of a CUDA graph runs no hooks, so the
        code that replays it calls this method with the parameters that the graph reads.

        Args:
            parameters: Parameters of the buffers at the last call of :meth:`wait_before`.
                Parameters outside of buffers, such as frozen ones, are complete already.

        Communication: that of :meth:`begin`.
        """
        self.begin()
        # Nothing is pending after the first microbatch of a step.
        if not self._pending:
            return
        buckets = map(self._bucket_of.get, map(id, parameters))
        self._complete(filter(None, buckets))

    def wait_before(self, modules: Iterable[nn.Module]) -> None:
        """Make each module wait before its forward pass for the buckets of its parameters.

        Args:
            modules: Modules that read no parameter of another module, unless that module ran before
                them.
        """
        bucket_of = self._bucket_of = {
            id(buffer.members[placed.name]): (index, number)
            for index, buffer in enumerate(self._buffers)
            for number, bucket in enumerate(buffer.plan.buckets)
            for placed in bucket.placed
        }
        read = set[int]()
        for module in modules:
            parameters = tuple(module.parameters())
            read.update(map(id, parameters))
            gathered = tuple(parameter for parameter in parameters if id(parameter) in bucket_of)
            if gathered:
                hook = _waiting(self.wait_for, gathered)
                self._hooks.append(module.register_forward_pre_hook(hook))
        unread = {bucket for parameter, bucket in bucket_of.items() if parameter not in read}
        self._awaited |= set(bucket_of.values()) - unread

    def release(self) -> None:
        """Remove the hooks from the modules.

        Deferred all-gathers are discarded, because other ranks may have failed. A run that ends
        without an error has waited for all parameters before.
        """
        self._deferred = None
        self._during_update = None
        self.wait_for_started()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._awaited.clear()
        self._bucket_of = {}

    def _buckets_in_order(self) -> list[_BucketKey]:
        """List the buckets that ranks share, by the first of their parameters to be read."""
        num_buffers, ordered = self._ordered
        if num_buffers != len(self._buffers):
            shared = [
                (index, number)
                for index, buffer in enumerate(self._buffers)
                for number in buffer.sharding.gathered
            ]
            ordered = sorted(shared, key=lambda key: self._order.first(self._names_of(key)))
            self._ordered = len(self._buffers), ordered
        return ordered

    def _start_bucket(self, key: _BucketKey, mesh: ParallelMesh) -> None:
        index, number = key
        buffer = self._buffers[index]
        self._pending[key] = buffer.sharding.start_gather(buffer.parameters, number, mesh)

    def _names_of(self, key: _BucketKey) -> Iterator[str]:
        index, number = key
        return (placed.name for placed in self._buffers[index].plan.buckets[number].placed)

    def _missing_of(self, key: _BucketKey, names: Set[str]) -> set[str] | None:
        """Return which parameters of a bucket are updated; None if the update does not store."""
        if not self._buffers[key[0]].is_stored_by_update:
            return None
        return {name for name in self._names_of(key) if name in names}

    def _complete(self, buckets: Iterable[_BucketKey]) -> None:
        for bucket in buckets:
            pending = self._pending.pop(bucket, None)
            if pending is not None:
                pending.wait()


def _waiting(
    wait_for: Callable[[Iterable[Tensor]], None], parameters: tuple[nn.Parameter, ...]
) -> Callable[..., None]:
    # The hook is a plain function, because copy.deepcopy of a module does not copy functions.
    def hook(module: nn.Module, args: Any) -> None:
        wait_for(parameters)

    return hook
