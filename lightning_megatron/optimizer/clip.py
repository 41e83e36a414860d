"""Gradient clipping for a model that is distributed over ranks."""

from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightning_megatron.groups.collectives import all_reduce_
from lightning_megatron.optimizer.main_parameters import MainParameters
from lightning_megatron.shapes import Float


@torch.no_grad()
def grad_norm(main: MainParameters, names: Collection[str] | None = None) -> Float[Tensor, ""]:
    """Compute the 2-norm of the whole model's gradient.

    Equal to the total norm of ``torch.nn.utils.clip_grad_norm_`` over the full tensors of one
    process: replicated elements count once, tied copies and padding rows do not count. The host
    does not wait for the device.

    The norm is float32; it is float64 if any gradient is float64.

    Args:
        main: Parameters of this rank, after their gradients were summed over the ranks.
        names: Names of the parameters to count; None means all.

    Communication: one all-reduce of a scalar over the world.
    """
    counted = main.counted_gradients(names)
    total = torch.zeros((), dtype=torch.float64, device=main.mesh.device)
    for dtype in dict.fromkeys(gradient.dtype for gradient in counted):
        of_dtype = [gradient for gradient in counted if gradient.dtype == dtype]
        if dtype.is_complex:
            of_dtype = [torch.view_as_real(gradient) for gradient in of_dtype]
        total += (
            torch.stack(torch._foreach_norm(of_dtype, 2, dtype=_norm_dtype(of_dtype[0].dtype)))
            .double()
            .square()
            .sum()
        )
    # The scalar is float64 on all ranks, because stages may hold gradients of different dtypes.
    norm = all_reduce_(total, main.mesh.world).sqrt()
    # The dtype follows from the buffers, because a rank without gradients must return the same
    # dtype as the other ranks.
    is_double = any(buffer.gradients.dtype == torch.float64 for buffer in main.buffers)
    return norm if is_double else norm.float()


@torch.no_grad()
def clip_by_norm_(
    main: MainParameters, max_norm: float, names: Collection[str] | None = None
) -> Float[Tensor, ""]:
    """Scale gradients in place so that their global norm is at most ``max_norm``.

    Equal to ``torch.nn.utils.clip_grad_norm_`` over the full tensors of one process.

    Args:
        main: Parameters of this rank, after their gradients were summed over the ranks.
        max_norm: Upper limit of the norm; gradients with a smaller norm do not change.
        names: Names of the parameters to clip, by the norm of these alone; None means all.

    Returns:
        The norm before clipping, a scalar tensor; the host does not wait for it.

    Communication: one all-reduce of a scalar over the world.
    """
    norm, coefficient = clip_coefficient(main, max_norm, names)
    scale_gradients_(main, coefficient, names)
    return norm


@torch.no_grad()
def clip_coefficient(
    main: MainParameters, max_norm: float, names: Collection[str] | None = None
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """Compute the factor that scales the global gradient norm to at most ``max_norm``.

    Args:
        main: Parameters of this rank, after their gradients were summed over the ranks.
        max_norm: Upper limit of the norm; gradients with a smaller norm get the factor 1.
        names: Names of the parameters to consider; None means all.

    Returns:
        The norm and the factor, scalar tensors; the host does not wait for them.

    Communication: one all-reduce of a scalar over the world.
    """
    norm = grad_norm(main, names)
    return norm, torch.clamp(max_norm / (norm + 1e-6), max=1.0)


@torch.no_grad()
def scale_gradients_(
    main: MainParameters, coefficient: Float[Tensor, ""], names: Collection[str] | None = None
) -> None:
    """Multiply the gradients of the named parameters, or of all, by a scalar in place."""
    gradients = main.gradients(names)
    if gradients:
        torch._foreach_mul_(gradients, coefficient)


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
    """Gradient clipping that runs later, as a part of the optimizer step.

    Args:
        main: Parameters of this rank.
        names: Names of the parameters whose gradients are clipped.
        algorithm: ``norm`` limits the norm of all gradients, ``value`` limits every element.
        limit: Upper limit of the norm, or of the magnitude of the elements.
    """

    main: MainParameters
    names: Collection[str]
    algorithm: Literal["norm", "value"]
    limit: float

    @property
    def form(self) -> Hashable:
        """Return the settings that a captured CUDA graph contains as constants."""
        return self.algorithm, self.limit

    def begin(self) -> tuple[Float[Tensor, ""] | None, Float[Tensor, ""] | None]:
        """Clip by value in place, or compute the norm and the factor for clipping by norm.

        Returns:
            The norm and the factor, scalar tensors; (None, None) for clipping by value.

        Communication: that of :func:`clip_coefficient`; none for clipping by value.
        """
        if self.algorithm == "norm":
            return clip_coefficient(self.main, self.limit, self.names)
        clip_by_value_(self.main, self.limit, self.names)
        return None, None


def _norm_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
