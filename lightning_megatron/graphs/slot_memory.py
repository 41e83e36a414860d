"""Memory of a slot, and the microbatch whose activations lie in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from lightning_megatron.graphs.backend import CaptureBackend
from lightning_megatron.plan.actions import PipelineUnit


@dataclass(frozen=True, eq=False)
class Tenant:
    """Microbatch of one step whose activations lie in a slot.

    Args:
        unit: Chunk and microbatch.
    """

    unit: PipelineUnit


class SlotMemory:
    """Memory of the graphs of one chunk in one slot, in the order of their captures.

    Args:
        backend: Backend of the graphs.
    """

    #: Whether several microbatches use the memory between forward and backward pass in turn.
    is_shared = False

    def __init__(self, backend: CaptureBackend) -> None:
        #: Pool of the graphs of forward and backward passes.
        self.pool = backend.make_pool()
        #: Pool of the graphs of weight halves, which run later than they are captured.
        self.weight_pool = backend.make_pool()
        #: Microbatch whose activations lie in the memory; None if none does.
        self.tenant: Tenant | None = None
        self._written: set[int] = set()

    def add(self, tensors: Sequence[Tensor | None]) -> None:
        """Record tensors that a graph of this memory writes."""
        self._written.update(tensor.data_ptr() for tensor in tensors if tensor is not None)

    def has(self, tensor: Tensor) -> bool:
        """Return whether a graph of this memory writes a tensor at each of its replays."""
        return tensor.data_ptr() in self._written

    def handed_over(self, tensor: Tensor) -> Tensor:
        """Return a result of a graph, valid until the slot is used again."""
        return tensor.detach()

    def keep(self, tensors: Sequence[Tensor]) -> None:
        """Keep the tensors that the tenant's backward pass reads; here nothing overwrites them
        before.
        """

    def recall(self, tenant: Tenant) -> bool:
        """Return whether the activations of a microbatch lie in the memory."""
        return tenant is self.tenant

    def leave(self, unit: PipelineUnit) -> None:
        """Free the memory, after the backward pass of its microbatch."""
        self.tenant = None

    def clear(self) -> None:
        """Free the memory of all microbatches."""
        self.tenant = None


class SharedMemory(SlotMemory):
    """Memory of graphs that all microbatches of a chunk use in turn.

    Between its forward and its backward pass a microbatch needs only the inputs of its layers. They
    are copied out when another microbatch arrives, and copied back before the backward pass. The
    chunk therefore needs one set of graphs, and keeps as much for each microbatch as eager steps
    do. Nothing is copied for a microbatch whose backward pass follows its forward pass directly.

    Args:
        backend: Backend of the graphs.
    """

    is_shared = True

    def __init__(self, backend: CaptureBackend) -> None:
        super().__init__(backend)
        #: Tensors of graphs that the backward passes of microbatches read.
        self._read: dict[Tenant, list[Tensor]] = {}
        #: Copies of these tensors for microbatches whose values are not in the graphs' tensors.
        self._copies: dict[Tenant, list[Tensor]] = {}

    def enter(self, tenant: Tenant) -> None:
        """Let a microbatch use the memory, before its forward pass."""
        self._copy_out()
        self._read[tenant] = []
        self.tenant = tenant

    @override
    def handed_over(self, tensor: Tensor) -> Tensor:
        """Return a copy of a result of a graph, which other microbatches overwrite soon."""
        return tensor.detach().clone()

    @override
    def keep(self, tensors: Sequence[Tensor]) -> None:
        """Keep the tensors that the tenant's backward pass reads.

        Args:
            tensors: Tensors of a graph, with the values of the tenant.
        """
        if self.tenant is not None:
            self._read[self.tenant] += tensors

    @override
    def recall(self, tenant: Tenant) -> bool:
        """Bring the values of a microbatch back, and return whether they exist."""
        if tenant is not self.tenant and tenant in self._copies:
            self._copy_out()
            _copy(self._copies.pop(tenant), self._read[tenant])
            self.tenant = tenant
        return tenant is self.tenant

    @override
    def leave(self, unit: PipelineUnit) -> None:
        """Release the values of a microbatch, after its backward pass."""
        for tenant in [tenant for tenant in self._read if tenant.unit == unit]:
            del self._read[tenant]
            self._copies.pop(tenant, None)
            if tenant is self.tenant:
                self.tenant = None

    @override
    def clear(self) -> None:
        """Release the values of all microbatches."""
        self.tenant = None
        self._read.clear()
        self._copies.clear()

    def _copy_out(self) -> None:
        if self.tenant is None:
            return
        read = self._read[self.tenant]
        copies = [torch.empty_like(tensor) for tensor in read]
        _copy(read, copies)
        self._copies[self.tenant] = copies
        self.tenant = None


@torch.no_grad()
def _copy(tensors: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    if tensors:
        # A captured backward pass must not find that its saved tensors have changed.
        torch._foreach_copy_([target.data for target in targets], list(tensors))
