"""Gradient clipping for a model that is distributed over ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_megatron.groups.collectives import all_reduce_
from lightning_megatron.optimizer.main_parameters import MainParameters, names_in
from lightning_megatron.shapes import Float

#: Part of the clipping that the update does: nothing, the product with the factor, or all.
Deferral = Literal["nothing", "scaling", "all"]


@torch.no_grad()
def grad_norm(main: MainParameters, names: Collection[str] | None = None) -> Float[Tensor, ""]:
    """Compute the 2-norm of the whole model's gradient, or of that of the named parameters.

    Equal to the total norm of ``torch.nn.utils.clip_grad_norm_`` over the full tensors of one
    process: replicated elements count once, tied copies and padding rows do not count. The host
    does not wait for the device. The norm is float32; it is float64 if any gradient is float64.

    Communication: one all-reduce of a scalar over the world.
    """
    counted = main.counted_gradients(names)
    total = torch.zeros((), dtype=torch.float64, device=main.mesh.device)
    for dtype in dict.fromkeys(gradient.dtype for gradient in counted):
        of_dtype = [gradient for gradient in counted if gradient.dtype == dtype]
        if dtype.is_complex:
            of_dtype = [torch.view_as_real(gradient) for gradient in of_dtype]
        norm_dtype = torch.promote_types(of_dtype[0].dtype, torch.float32)
        norms = torch.stack(torch._foreach_norm(of_dtype, 2, dtype=norm_dtype))
        total += norms.double().square().sum()
    # The scalar is float64 on all ranks, because stages may hold gradients of different dtypes.
    norm = all_reduce_(total, main.mesh.world).sqrt()
    # The dtype follows from the buffers, because a rank without gradients must return the same
    # dtype as the other ranks.
    is_double = any(buffer.gradients.dtype == torch.float64 for buffer in main.buffers)
    return norm if is_double else norm.float()


@torch.no_grad()
def clip_coefficient(
    main: MainParameters, max_norm: float, names: Collection[str] | None = None
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """Compute the norm, and the factor, at most 1, that scales it to at most ``max_norm``.

    The host does not wait for either.

    Communication: one all-reduce of a scalar over the world.
    """
    norm = grad_norm(main, names)
    # torch adds the same small number.
    return norm, torch.clamp(max_norm / (norm + 1e-6), max=1.0)


@torch.no_grad()
def clip_by_value_(
    main: MainParameters, value: float, names: Collection[str] | None = None
) -> None:
    """Clamp every gradient element to [-value, value] in place.

    Equal to ``torch.nn.utils.clip_grad_value_``.
    """
    gradients = main.gradients(names)
    if gradients:
        torch._foreach_clamp_min_(gradients, -value)
        torch._foreach_clamp_max_(gradients, value)


@dataclass(frozen=True)
class Clipping:
    """Clipping of gradients that the update of their parameters completes.

    Args:
        algorithm: ``norm`` limits the norm of all gradients, ``value`` limits every element.
        limit: Upper limit of the norm, or of the magnitude of the elements.
        norm: Scalar that :meth:`receive` sets to the norm; None for clipping by value.
        factor: Factor that follows from the norm; None if it is not computed yet.
    """

    main: MainParameters
    names: Collection[str]
    algorithm: Literal["norm", "value"]
    limit: float
    norm: Float[Tensor, ""] | None = None
    factor: Float[Tensor, ""] | None = None

    @property
    def form(self) -> Hashable:
        """Return the settings that a captured CUDA graph contains as constants."""
        return self.algorithm, self.limit

    def begin(self) -> tuple[Float[Tensor, ""] | None, Float[Tensor, ""] | None]:
        """Clip by value in place (None, None), or return the norm and the clipping factor.

        Communication: that of :func:`clip_coefficient`, unless the factor is computed already.
        """
        if self.algorithm == "value":
            clip_by_value_(self.main, self.limit, self.names)
        elif self.factor is None:
            return clip_coefficient(self.main, self.limit, self.names)
        return self.norm, self.factor

    def receive(self, norm: Float[Tensor, ""] | None) -> None:
        """Copy the norm that :meth:`begin`, or a replay of it, has computed."""
        if norm is not None and self.norm is not None and norm is not self.norm:
            self.norm.copy_(norm)


class StepClipping:
    """Clipping of the gradients of each step.

    With clipping by norm, the fused update itself multiplies by the factor. The graph of a captured
    update also includes the computation of the norm, or the clipping by value.

    Args:
        note: Function that receives the kind and the value of each norm, for a check after the
            update.
    """

    def __init__(self, main: MainParameters, note: Callable[[str, Tensor], None]) -> None:
        self._main = main
        self._note = note
        self._deferral: Deferral = "nothing"
        self._deferred: Clipping | None = None

    @contextmanager
    def defer_to(self, deferral: Deferral) -> Iterator[None]:
        """Defer a part of the clipping inside the block to the code that calls :meth:`take`."""
        self._deferral = deferral
        try:
            yield
        finally:
            self._deferral = "nothing"
            self._deferred = None

    def by_norm(self, optimizer: Optimizer, max_norm: float) -> Float[Tensor, ""]:
        """Clip by the global norm, which counts each element of each full tensor once.

        The result is the norm before clipping. If all of the clipping is deferred, the tensor
        receives its value with the update of the parameters.

        Communication: one all-reduce of a scalar over the world.
        """
        self.apply()
        names = names_in(self._main.names_of(optimizer))
        if self._deferral == "all":
            norm = torch.empty((), dtype=torch.float32, device=self._main.mesh.device)
            self._deferred = Clipping(self._main, names, "norm", max_norm, norm)
        else:
            norm, factor = clip_coefficient(self._main, max_norm, names)
            self._deferred = Clipping(self._main, names, "norm", max_norm, norm, factor)
        self._note("gradient norm", norm)
        if self._deferral == "nothing":
            self.apply()
        return norm

    def by_value(self, optimizer: Optimizer, limit: float) -> None:
        """Clip every element of an optimizer's gradients to ``[-limit, limit]``."""
        self.apply()
        names = names_in(self._main.names_of(optimizer))
        self._deferred = Clipping(self._main, names, "value", limit)
        if self._deferral != "all":
            self.apply()

    def apply(self) -> None:
        """Complete deferred clipping now, if there is any."""
        deferred = self.take()
        if deferred is not None:
            norm, factor = deferred.begin()
            deferred.receive(norm)
            if factor is not None:
                self._main.scale_gradients_(factor, deferred.names)

    def take(self) -> Clipping | None:
        """Return the deferred clipping and remove it from this object; None without any."""
        deferred = self._deferred
        self._deferred = None
        return deferred
