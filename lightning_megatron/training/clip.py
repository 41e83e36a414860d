"""Gradient clipping over a model that is spread over ranks: every element of every full tensor counts once."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from lightning_megatron.groups.collectives import all_reduce_
from lightning_megatron.training.main_parameters import MainParameters


@torch.no_grad()
def grad_norm(main: MainParameters, names: Collection[str] | None = None) -> Tensor:
    """Compute the 2-norm of the whole model's gradient.

    Equal to the total norm of ``torch.nn.utils.clip_grad_norm_`` over the full tensors of one process. Copies of a
    range, tied copies and padding rows do not count. The host does not wait for the device.

    Shapes: result ``()``, float32, or float64 where gradients are.

    Args:
        main: The parameters of this rank, after their gradients were summed over the ranks.
        names: Count only these parameters; None means all.

    Communication: one all-reduce of a scalar over the world.
    """
    counted = main.counted_gradients(names)
    total = torch.zeros((), dtype=torch.float64, device=main.mesh.device)
    for dtype in dict.fromkeys(gradient.dtype for gradient in counted):
        same = [gradient for gradient in counted if gradient.dtype == dtype]
        total += torch.stack(torch._foreach_norm(same, 2, dtype=_norm_dtype(dtype))).double().square().sum()
    # A double scalar costs nothing, and makes the message equal on stages that hold different dtypes.
    norm = all_reduce_(total, main.mesh.world).sqrt()
    return norm if any(gradient.dtype == torch.float64 for gradient in main.gradients(names)) else norm.float()


@torch.no_grad()
def clip_by_norm_(main: MainParameters, max_norm: float, names: Collection[str] | None = None) -> Tensor:
    """Scale the gradients down in place so that their norm over the whole model is at most ``max_norm``.

    Equal to ``torch.nn.utils.clip_grad_norm_`` over the full tensors of one process.

    Args:
        main: The parameters of this rank, after their gradients were summed over the ranks.
        max_norm: The largest norm that is left as it is.
        names: Clip only these parameters, by their own norm; None means all.

    Returns:
        the norm before clipping, a tensor of no dimension; the host does not wait for it.

    Communication: one all-reduce of a scalar over the world.
    """
    norm, coefficient = clip_coefficient(main, max_norm, names)
    scale_gradients_(main, coefficient, names)
    return norm


@torch.no_grad()
def clip_coefficient(
    main: MainParameters, max_norm: float, names: Collection[str] | None = None
) -> tuple[Tensor, Tensor]:
    """Find what the gradients must be multiplied by so that their norm over the whole model is at most ``max_norm``.

    Args:
        main: The parameters of this rank, after their gradients were summed over the ranks.
        max_norm: The largest norm that is left as it is.
        names: Look only at these parameters; None means all.

    Returns:
        The norm and the factor, tensors of no dimension; the host does not wait for them.

    Communication: one all-reduce of a scalar over the world.
    """
    norm = grad_norm(main, names)
    return norm, torch.clamp(max_norm / (norm + 1e-6), max=1.0)


@torch.no_grad()
def scale_gradients_(main: MainParameters, coefficient: Tensor, names: Collection[str] | None = None) -> None:
    """Multiply the gradients by a scalar in place: those of the named parameters, or all."""
    gradients = main.gradients(names)
    if gradients:
        torch._foreach_mul_(gradients, coefficient)


@torch.no_grad()
def clip_by_value_(main: MainParameters, value: float, names: Collection[str] | None = None) -> None:
    """Clamp every gradient element to [-value, value] in place.

    Equal to ``torch.nn.utils.clip_grad_value_``.
    """
    gradients = main.gradients(names)
    if gradients:
        torch._foreach_clamp_min_(gradients, -value)
        torch._foreach_clamp_max_(gradients, value)


def _norm_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
