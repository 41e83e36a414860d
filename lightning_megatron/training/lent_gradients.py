"""Gradients that user code reads as ``parameter.grad``, although they are summed in flat buffers."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torch import Tensor, nn


class LentGradients:
    """Show gradients as ``parameter.grad`` between two backward passes, as views of the flat buffers.

    User code may write into a gradient, replace it or set it to None; :meth:`take_over` says what it did.
    """

    def __init__(self) -> None:
        #: Whether gradients are shown at all. Every data-parallel rank then sums whole ones, not only its part.
        self.is_on = False
        self._lent: dict[str, tuple[nn.Parameter, Tensor]] = {}

    def lend(self, name: str, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Let a parameter show its gradient."""
        if parameter.grad is not gradient:
            parameter.grad = None
            # Sums may be wider than the parameter, and what replaces them narrower.
            parameter.grad_dtype = None
            parameter.grad = gradient
        self._lent[name] = (parameter, gradient)

    def gradients(self, names: Collection[str] | None = None) -> list[Tensor]:
        """List the gradients that are shown, of the named parameters or of all."""
        return [gradient for name, (_, gradient) in self._lent.items() if names is None or name in names]

    def take_over(self) -> set[str]:
        """Copy gradients that were replaced into their places; return the names of those that were set to None."""
        removed = set()
        for name, (parameter, gradient) in self._lent.items():
            if parameter.grad is None:
                removed.add(name)
            elif parameter.grad is not gradient:
                gradient.copy_(parameter.grad)
                parameter.grad = gradient
        self.take_back(removed)
        return removed

    def take_back(self, names: Iterable[str] | None = None) -> None:
        """Let parameters show nothing, before autograd adds to what they show."""
        for name in list(self._lent if names is None else names):
            if name in self._lent:
                parameter, _ = self._lent.pop(name)
                parameter.grad = None
                parameter.grad_dtype = parameter.dtype
