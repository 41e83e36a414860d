"""Memory of a slot, and the microbatch whose activations lie in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from lightning_megatron.graphs.backend import CaptureBackend
from lightning_megatron.plan.actions import PipelineUnit


@dataclass(frozen=True, eq=False)
class Tenant:
    """Microbatch of one step whose activations lie in a slot.

    Args:
        unit: Chunk and microbatch.
    """

    unit: PipelineUnit


class PieceMemory:
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
