"""Memory of a slot, and the microbatch whose activations lie in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_megatron.graphs.backend import CaptureBackend
from lightning_megatron.plan.actions import PipelineUnit


@dataclass(eq=False)
class Tenant:
    """Microbatch of one step that uses the memory of a slot.

    Args:
        read: Tensors of graphs of a shared slot that the backward pass reads.
        copies: Copies of these tensors, while the memory has the values of another microbatch.
    """

    read: list[Tensor] = field(default_factory=list)
    copies: list[Tensor] | None = None


class SlotMemory:
    """Memory of the graphs of one chunk in one slot, in the order of their captures.

    Several microbatches use a *shared* memory in turn: that of graphs of layers that keep only
    their inputs. Between its forward and its backward pass a microbatch then needs only the inputs
    of its layers. They are copied out when another microbatch arrives, and copied back before the
    backward pass. The chunk therefore needs one set of graphs, and keeps as much for each
    microbatch as eager steps do. Nothing is copied for a microbatch whose backward pass follows its
    forward pass directly.

    Args:
        backend: Backend of the graphs.
    """

    def __init__(self, backend: CaptureBackend, is_shared: bool) -> None:
        #: Pool of the graphs of forward and backward passes.
        self.pool = backend.make_pool()
        #: Pool of the graphs of weight halves, which run later than they are captured.
        self.weight_pool = backend.make_pool()
        #: Whether several microbatches use the memory between forward and backward pass in turn.
        self.is_shared = is_shared
        #: Microbatch whose activations lie in the memory; None if none does.
        self.tenant: Tenant | None = None
        self._tenants: dict[PipelineUnit, Tenant] = {}
        self._written: set[int] = set()

    def enter(self, unit: PipelineUnit) -> None:
        """Let a microbatch use the memory, before its forward pass."""
        assert self.is_shared or self.tenant is None, "a slot holds one microbatch at a time"
        self._copy_out()
        self.tenant = self._tenants[unit] = Tenant()

    def add(self, tensors: Sequence[Tensor | None]) -> None:
        """Record tensors that a graph of this memory writes."""
        self._written.update(tensor.data_ptr() for tensor in tensors if tensor is not None)

    def has(self, tensor: Tensor) -> bool:
        """Return whether a graph of this memory writes a tensor at each of its replays."""
        return tensor.data_ptr() in self._written

    def handed_over(self, tensor: Tensor) -> Tensor:
        """Return a result of a graph, valid until the slot is used again.

        Of a shared slot it is a copy, because other microbatches overwrite the result soon.
        """
        return tensor.detach().clone() if self.is_shared else tensor.detach()

    def keep(self, tensors: Sequence[Tensor]) -> None:
        """Keep the tensors, with the values of the tenant, that its backward pass reads."""
        if self.is_shared and self.tenant is not None:
            self.tenant.read += tensors

    def recall(self, tenant: Tenant) -> bool:
        """Bring the values of a microbatch back, and return whether they are in the memory."""
        if tenant is not self.tenant and tenant.copies is not None:
            self._copy_out()
            _copy(tenant.copies, tenant.read)
            tenant.copies = None
            self.tenant = tenant
        return tenant is self.tenant

    def leave(self, unit: PipelineUnit) -> None:
        """Free the memory of a microbatch, after its backward pass."""
        tenant = self._tenants.pop(unit, None)
        if tenant is not None:
            tenant.copies = None
            self.tenant = None if tenant is self.tenant else self.tenant

    def clear(self) -> None:
        """Free the memory of all microbatches."""
        for unit in list(self._tenants):
            self.leave(unit)

    def _copy_out(self) -> None:
        if self.tenant is not None:
            self.tenant.copies = [torch.empty_like(tensor) for tensor in self.tenant.read]
            _copy(self.tenant.read, self.tenant.copies)
            self.tenant = None


@torch.no_grad()
def _copy(tensors: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    if tensors:
        # A captured backward pass must not find that its saved tensors have changed.
        torch._foreach_copy_([target.data for target in targets], list(tensors))
