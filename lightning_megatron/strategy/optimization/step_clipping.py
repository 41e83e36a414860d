"""Clipping of a step's gradients: immediately, or together with the fused update."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_megatron.optimizer.clip import Clipping, scale_gradients_
from lightning_megatron.optimizer.main_parameters import MainParameters, names_in

Deferral = Literal["nothing", "scaling", "all"]
"""Part of the clipping that the update does: nothing, the product with the factor, or all."""


@dataclass(frozen=True)
class DeferredClipping:
    """Clipping that the update of the parameters completes.

    Args:
        clipping: Kind, limit and parameters of the clipping.
        norm: Scalar tensor into which :meth:`receive` copies the norm; None for clipping by value.
        begun: Norm and factor, if they have already been computed.
    """

    clipping: Clipping
    norm: Tensor | None = None
    begun: tuple[Tensor | None, Tensor | None] | None = None

    @property
    def form(self) -> Hashable:
        """Return the values that a graph of :meth:`begin` treats as constants."""
        return self.clipping.form

    def begin(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the norm, and the factor by which gradients must be multiplied; None without them.

        Communication: that of :meth:`Clipping.begin`, unless the norm has already been computed.
        """
        return self.begun or self.clipping.begin()

    def receive(self, norm: Tensor | None) -> None:
        """Copy the norm that :meth:`begin`, or a replay of it, has computed."""
        if norm is not None and self.norm is not None and norm is not self.norm:
            self.norm.copy_(norm)


class StepClipping:
    """Clipping of the gradients of each step.

    With clipping by norm, the fused update itself multiplies by the factor. The graph of a captured
    update also includes the computation of the norm, or the clipping by value.

    Args:
        main: Parameters of this rank.
        note: Function that receives the kind and the value of each norm, for a check after the
            update.
    """

    def __init__(self, main: MainParameters, note: Callable[[str, Tensor], None]) -> None:
        self._main = main
        self._note = note
        self._deferral: Deferral = "nothing"
        self._deferred: DeferredClipping | None = None

    @contextmanager
    def defer_to(self, deferral: Deferral) -> Iterator[None]:
        """Defer clipping inside the block to the code that calls :meth:`take`.

        Args:
            deferral: Part of the clipping that is deferred; the rest happens immediately.
        """
        self._deferral = deferral
        try:
            yield
        finally:
            self._deferral = "nothing"
            self._deferred = None

    def by_norm(self, optimizer: Optimizer, max_norm: float) -> Tensor:
        """Clip by the global norm, which counts each element of each full tensor once.

        Args:
            optimizer: Optimizer whose gradients are clipped.
            max_norm: Upper limit of the norm.

        Returns:
            The norm before clipping. If all of the clipping is deferred, the tensor receives its
            value with the update of the parameters.

        Communication: one all-reduce of a scalar over the world.
        """
        self.apply()
        clipping = Clipping(self._main, self._names_of(optimizer), "norm", max_norm)
        if self._deferral == "all":
            norm = torch.empty((), dtype=torch.float32, device=self._main.mesh.device)
            self._deferred = DeferredClipping(clipping, norm)
        else:
            computed, factor = clipping.begin()
            assert computed is not None, "clipping by norm has a norm"
            norm = computed
            self._deferred = DeferredClipping(clipping, norm, (norm, factor))
        self._note("gradient norm", norm)
        if self._deferral == "nothing":
            self.apply()
        return norm

    def by_value(self, optimizer: Optimizer, limit: float) -> None:
        """Clip every element of an optimizer's gradients to ``[-limit, limit]``."""
        self.apply()
        clipping = Clipping(self._main, self._names_of(optimizer), "value", limit)
        if self._deferral == "all":
            self._deferred = DeferredClipping(clipping)
        else:
            clipping.begin()

    def apply(self) -> None:
        """Complete deferred clipping now, if there is any."""
        deferred = self.take()
        if deferred is None:
            return
        norm, factor = deferred.begin()
        deferred.receive(norm)
        if factor is not None:
            scale_gradients_(self._main, factor, deferred.clipping.names)

    def take(self) -> DeferredClipping | None:
        """Return the deferred clipping and remove it from this object; None without any."""
        deferred = self._deferred
        self._deferred = None
        return deferred

    def _names_of(self, optimizer: Optimizer) -> set[str]:
        return names_in(self._main.names_of(optimizer))
