"""All-gather of updated parameters, overlapped with the next forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.pending import Pending, start_all_gather
from lightning_megatron.shapes import Shaped
from lightning_megatron.training.flat_buffer import FlatBuffer

#: A bucket: (index of its buffer, index in the buffer).
_BucketKey = tuple[int, int]


class ParameterGather:
    """Pending all-gathers of parameter buckets, in the order of the forward pass."""

    def __init__(self) -> None:
        self._pending: dict[_BucketKey, Pending] = {}
        self._hooks: list[RemovableHandle] = []
        # Buckets whose parameters are all awaited by the modules that read them.
        self._awaited: set[_BucketKey] = set()
        # Buckets of each parameter, by its identity.
        self._buckets_of: Mapping[int, list[_BucketKey]] = {}

    def start(self, buffers: Sequence[FlatBuffer], mesh: ParallelMesh) -> None:
        """Start one all-gather for every bucket that is partitioned over ranks.

        Buckets with a parameter that no module waits for are complete on return.
        """
        self.wait()
        for index, buffer in enumerate(buffers):
            if buffer.plan.num_parts == 1:
                continue
            # Buckets are laid out in the order of the backward pass.
            for number in reversed(range(len(buffer.plan.buckets))):
                bucket = buffer.plan.buckets[number]
                whole = buffer.parameters[bucket.start : bucket.stop]
                own = buffer.own_part(buffer.parameters, number)
                self._pending[index, number] = start_all_gather(
                    whole, own, mesh.copies(buffer.is_expert)
                )
        self._complete([bucket for bucket in self._pending if bucket not in self._awaited])

    def wait(self) -> None:
        """Wait for all buckets."""
        self._complete(tuple(self._pending))

    def wait_for(self, parameters: Iterable[Shaped[Tensor, "..."]]) -> None:
        """Wait for the buckets of some parameters, before they are read.

        The hooks of :meth:`wait_before` call this. A replay of a CUDA graph runs no hooks, so the
        code that replays it calls this method with the parameters that the graph reads.

        Args:
            parameters: Parameters of the buffers that :meth:`wait_before` got last. Parameters of
                no buffer, such as frozen ones, are complete already.
        """
        # In all microbatches but the first nothing is pending.
        if not self._pending:
            return
        for one in parameters:
            self._complete(self._buckets_of.get(id(one), ()))

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
            gathered = tuple(one for one in module.parameters() if id(one) in buckets_of)
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
        """Remove the hooks from the modules."""
        self.wait()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._awaited.clear()
        self._buckets_of = {}

    def _complete(self, buckets: Iterable[_BucketKey]) -> None:
        for bucket in buckets:
            pending = self._pending.pop(bucket, None)
            if pending is not None:
                pending.wait()


def _waiting(
    wait_for: Callable[[Iterable[Tensor]], None], parameters: tuple[nn.Parameter, ...]
) -> Callable[..., None]:
    # A plain function: a module that is copied keeps it as it is.
    def hook(module: nn.Module, args: Any) -> None:
        wait_for(parameters)

    return hook


def _buckets_by_parameter(buffers: Sequence[FlatBuffer]) -> Mapping[int, list[_BucketKey]]:
    found: dict[int, list[_BucketKey]] = {}
    for index, buffer in enumerate(buffers):
        for number, bucket in enumerate(buffer.plan.buckets):
            for placed in bucket.placed:
                found.setdefault(id(buffer.members[placed.name]), []).append((index, number))
    return found
