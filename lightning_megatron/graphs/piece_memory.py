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
        self._written.update(one.data_ptr() for one in tensors if one is not None)

    def has(self, tensor: Tensor) -> bool:
        """Return whether a graph of this memory writes a tensor at each of its replays."""
        return tensor.data_ptr() in self._written
