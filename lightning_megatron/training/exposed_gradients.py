"""Gradients in flat buffers, shown to user code as ``parameter.grad``."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from torch import Tensor, nn

from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import shard_spec_of
from lightning_megatron.shapes import Shaped
from lightning_megatron.training.sharded_gradient import ShardedGradient


@dataclass(frozen=True)
class _ExposedGradient:
    """Parameter, its gradient in the flat buffer, and the tensor shown as ``parameter.grad``."""

    parameter: nn.Parameter
    gradient: Tensor
    exposed: Tensor


class ExposedGradients:
    """Views of the flat gradient buffers as ``parameter.grad`` between backward passes.

    User code may write into a gradient, replace it or set it to None. :meth:`adopt_user_changes`
    applies such changes to the buffers.

    Args:
        mesh: Process groups of this rank.
    """

    def __init__(self, mesh: ParallelMesh) -> None:
        self._mesh = mesh
        #: Whether gradients are shown. If so, every data-parallel rank gets full reduced gradients,
        #: instead of its part.
        self.is_on = False
        self._exposed: dict[str, _ExposedGradient] = {}
        self._known: dict[str, _ExposedGradient] = {}

    def expose(self, name: str, parameter: nn.Parameter, gradient: Shaped[Tensor, "..."]) -> None:
        """Show a gradient as ``parameter.grad``."""
        entry = self._known.get(name)
        if entry is None or entry.gradient is not gradient:
            spec = shard_spec_of(parameter, self._mesh.tp.rank)
            entry = self._known[name] = _ExposedGradient(
                parameter, gradient, ShardedGradient.of(gradient, spec, self._mesh)
            )
        if parameter.grad is not entry.exposed:
            parameter.grad = None
            # The dtype of an accumulated gradient may be wider than that of the parameter, and the
            # dtype of a gradient that user code assigns may be narrower.
            parameter.grad_dtype = None
            parameter.grad = entry.exposed
        self._exposed[name] = entry

    def gradients(self, names: Collection[str] | None = None) -> list[Shaped[Tensor, "..."]]:
        """List the shown gradients of the named parameters, or of all."""
        return [
            entry.gradient
            for name, entry in self._exposed.items()
            if names is None or name in names
        ]

    def adopt_user_changes(self) -> set[str]:
        """Copy replaced gradients into the buffers; return the names of those set to None."""
        removed = set()
        for name, entry in self._exposed.items():
            gradient = entry.parameter.grad
            if gradient is None:
                removed.add(name)
            elif gradient is not entry.exposed:
                entry.gradient.copy_(gradient.as_subclass(Tensor))
                entry.parameter.grad = entry.exposed
        self.withdraw(removed)
        return removed

    def withdraw(self, names: Iterable[str] | None = None) -> None:
        """Set ``parameter.grad`` to None, before autograd adds to it."""
        for name in list(self._exposed if names is None else names):
            if name in self._exposed:
                parameter = self._exposed.pop(name).parameter
                parameter.grad = None
                parameter.grad_dtype = parameter.dtype
