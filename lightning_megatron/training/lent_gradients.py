"""Gradients in flat buffers, shown to user code as ``parameter.grad``."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from torch import Tensor, nn

from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import shard_spec_of
from lightning_megatron.training.parted_gradient import PartedGradient


@dataclass(frozen=True)
class _Loan:
    """Parameter, its gradient in the flat buffer, and the tensor shown as ``parameter.grad``."""

    parameter: nn.Parameter
    gradient: Tensor
    shown: Tensor


class LentGradients:
    """Views of the flat gradient buffers as ``parameter.grad`` between backward passes.

    User code may write into a gradient, replace it or set it to None; :meth:`take_over` adopts the
    change.

    Args:
        mesh: Process groups of this rank.
    """

    def __init__(self, mesh: ParallelMesh) -> None:
        self._mesh = mesh
        #: Whether gradients are shown at all. Every data-parallel rank then sums whole ones, not
        #: only its part.
        self.is_on = False
        self._lent: dict[str, _Loan] = {}
        self._known: dict[str, _Loan] = {}

    def lend(self, name: str, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Show a gradient as ``parameter.grad``."""
        loan = self._known.get(name)
        if loan is None or loan.gradient is not gradient:
            spec = shard_spec_of(parameter, self._mesh.tp.rank)
            loan = self._known[name] = _Loan(
                parameter, gradient, PartedGradient.of(gradient, spec, self._mesh)
            )
        if parameter.grad is not loan.shown:
            parameter.grad = None
            # Sums may be wider than the parameter, and what replaces them narrower.
            parameter.grad_dtype = None
            parameter.grad = loan.shown
        self._lent[name] = loan

    def gradients(self, names: Collection[str] | None = None) -> list[Tensor]:
        """List the shown gradients of the named parameters, or of all."""
        return [
            loan.gradient for name, loan in self._lent.items() if names is None or name in names
        ]

    def take_over(self) -> set[str]:
        """Copy replaced gradients into the buffers; return the names of those set to None."""
        removed = set()
        for name, loan in self._lent.items():
            found = loan.parameter.grad
            if found is None:
                removed.add(name)
            elif found is not loan.shown:
                loan.gradient.copy_(found.as_subclass(Tensor))
                loan.parameter.grad = loan.shown
        self.take_back(removed)
        return removed

    def take_back(self, names: Iterable[str] | None = None) -> None:
        """Set ``parameter.grad`` to None, before autograd adds to it."""
        for name in list(self._lent if names is None else names):
            if name in self._lent:
                parameter = self._lent.pop(name).parameter
                parameter.grad = None
                parameter.grad_dtype = parameter.dtype
