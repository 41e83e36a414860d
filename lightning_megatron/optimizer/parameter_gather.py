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
from lightning_megatron.optimizer.flat_buffer import FlatBuffer, UseOrder, same_objects
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

    buffers: Sequence[FlatBuffer]
    mesh: ParallelMesh
    left: deque[_BucketKey]
    missing: Mapping[_BucketKey, set[str] | None]

    def next_complete(self) -> _BucketKey | None:
        return self.left.popleft() if self.left and self.missing[self.left[0]] == set() else None


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

    def __init__(self, order: UseOrder) -> None:
        self._order = order
        # The buffers of the last call of `_buckets_in_order`, and their buckets in order.
        self._ordered: tuple[Sequence[FlatBuffer], list[_BucketKey]] = (), []
        #: Whether :meth:`start` defers the all-gathers to the first read of parameters. All ranks
        #: must have the same value, and must first read parameters at the same point of a step.
        self.defers = False
        self._deferred: tuple[tuple[FlatBuffer, ...], ParallelMesh] | None = None
        self._during_update: _UpdateGathers | None = None
        self._recorded: RecordedGather | None = None
        self._pending: dict[_BucketKey, Pending] = {}
        self._hooks: list[RemovableHandle] = []
        # Buckets for which modules wait: a module reads each of their parameters.
        self._awaited: set[_BucketKey] = set()
        # Buckets of each parameter, by its identity.
        self._buckets_of: Mapping[int, list[_BucketKey]] = {}

    @property
    def is_deferred(self) -> bool:
        """Return whether all-gathers are deferred and have not started yet."""
        return self._deferred is not None

    def start(self, buffers: Sequence[FlatBuffer], mesh: ParallelMesh) -> None:
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
            self._deferred = tuple(buffers), mesh
        if not self.defers:
            self.begin()

    def start_during_update(
        self, buffers: Sequence[FlatBuffer], mesh: ParallelMesh, names: Set[str]
    ) -> None:
        """Let all-gathers start as soon as the named parameters of their buckets are updated.

        :meth:`mark_updated` must name these parameters, and :meth:`start` must follow, with the
        same buffers.

        Communication: that of :meth:`wait`.
        """
        self.wait()
        order = self._buckets_in_order(buffers)
        if self.defers or not order:
            return
        missing = {key: _missing_of(buffers, key, names) for key in order}
        self._during_update = _UpdateGathers(buffers, mesh, deque(order), missing)

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
        while (key := gathers.next_complete()) is not None:
            self._start_bucket(key, gathers.buffers, gathers.mesh)

    def begin(self) -> None:
        """Start the deferred all-gathers, if there are any.

        Communication: that of :meth:`start`.
        """
        if self._deferred is None:
            return
        buffers, mesh = self._deferred
        self._deferred = None
        if self._recorded is not None:
            self._recorded.gathers = True
        gathers = self._during_update
        self._during_update = None
        for key in self._buckets_in_order(buffers) if gathers is None else gathers.left:
            self._start_bucket(key, buffers, mesh)
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
            parameters: Parameters of the buffers of the last call of :meth:`wait_before`.
                Parameters outside of buffers, such as frozen ones, are complete already.

        Communication: that of :meth:`begin`.
        """
        self.begin()
        # Nothing is pending after the first microbatch of a step.
        if not self._pending:
            return
        for parameter in parameters:
            self._complete(self._buckets_of.get(id(parameter), ()))

    def wait_before(self, modules: Iterable[nn.Module], buffers: Sequence[FlatBuffer]) -> None:
        """Make each module wait before its forward pass for the buckets of its parameters.

        Args:
            modules: Modules that read no parameter of another module, unless that module ran before
                them.
            buffers: Buffers in the order in which :meth:`start` gets them.
        """
        buckets_of = self._buckets_of = _buckets_by_parameter(buffers)
        read = set[int]()
        for module in modules:
            gathered = tuple(
                parameter for parameter in module.parameters() if id(parameter) in buckets_of
            )
            if gathered:
                self._hooks.append(
                    module.register_forward_pre_hook(_waiting(self.wait_for, gathered))
                )
            read.update(map(id, module.parameters()))
        unread = {
            bucket
            for parameter, held_in in buckets_of.items()
            if parameter not in read
            for bucket in held_in
        }
        self._awaited |= {bucket for held_in in buckets_of.values() for bucket in held_in} - unread

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
        self._buckets_of = {}

    def _buckets_in_order(self, buffers: Sequence[FlatBuffer]) -> list[_BucketKey]:
        """List the buckets that ranks share, by the first of their parameters to be read."""
        if not same_objects(buffers, self._ordered[0]):
            shared = [
                (index, number)
                for index, buffer in enumerate(buffers)
                for number in buffer.sharding.gathered
            ]
            shared.sort(key=lambda key: self._order.first(_names_of(buffers, key)))
            self._ordered = tuple(buffers), shared
        return self._ordered[1]

    def _start_bucket(
        self, key: _BucketKey, buffers: Sequence[FlatBuffer], mesh: ParallelMesh
    ) -> None:
        index, number = key
        buffer = buffers[index]
        self._pending[key] = buffer.sharding.start_gather(buffer.parameters, number, mesh)

    def _complete(self, buckets: Iterable[_BucketKey]) -> None:
        for bucket in buckets:
            pending = self._pending.pop(bucket, None)
            if pending is not None:
                pending.wait()


def _names_of(buffers: Sequence[FlatBuffer], key: _BucketKey) -> Iterator[str]:
    index, number = key
    return (placed.name for placed in buffers[index].plan.buckets[number].placed)


def _missing_of(buffers: Sequence[FlatBuffer], key: _BucketKey, names: Set[str]) -> set[str] | None:
    """Return which parameters of a bucket are updated; None if the update does not store them."""
    if not buffers[key[0]].is_stored_by_update:
        return None
    return {name for name in _names_of(buffers, key) if name in names}


def _waiting(
    wait_for: Callable[[Iterable[Tensor]], None], parameters: tuple[nn.Parameter, ...]
) -> Callable[..., None]:
    # The hook is a plain function, because copy.deepcopy of a module does not copy functions.
    def hook(module: nn.Module, args: Any) -> None:
        wait_for(parameters)

    return hook


def _buckets_by_parameter(buffers: Sequence[FlatBuffer]) -> Mapping[int, list[_BucketKey]]:
    buckets: dict[int, list[_BucketKey]] = {}
    for index, buffer in enumerate(buffers):
        for number, bucket in enumerate(buffer.plan.buckets):
            for placed in bucket.placed:
                buckets.setdefault(id(buffer.members[placed.name]), []).append((index, number))
    return buckets
