"""Gradient clipping over a model that is spread over ranks: every element of every full tensor counts once."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from lightning_megatron.groups.collectives import all_reduce_
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.training.main_parameters import MainParameters


@torch.no_grad()
def grad_norm(main: MainParameters, mesh: ParallelMesh, names: Collection[str] | None = None) -> Tensor:
    """Compute the 2-norm of the whole model's gradient.

    Equal to the total norm of ``torch.nn.utils.clip_grad_norm_`` over the full tensors of one process. Copies of a
    range, tied copies and padding rows do not count. The host does not wait for the device.

    Shapes: result ``()``, float32, or float64 where gradients are.

    Args:
        main: The parameters of this rank, after their gradients were summed over the ranks.
        mesh: The groups of this rank.
        names: Count only these parameters of this rank; None means all.

    Communication: one all-reduce of a scalar over tp x pp.
    """
    counted = _counted_gradients(main, mesh, names)
    total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    for dtype in dict.fromkeys(gradient.dtype for gradient in counted):
        same = [gradient for gradient in counted if gradient.dtype == dtype]
        total += torch.stack(torch._foreach_norm(same, 2, dtype=_norm_dtype(dtype))).double().square().sum()
    # A double scalar costs nothing, and makes the message equal on stages that hold different dtypes.
    norm = all_reduce_(total, mesh.model).sqrt()
    return norm if any(gradient.dtype == torch.float64 for gradient in counted) else norm.float()


@torch.no_grad()
def clip_by_norm_(
    main: MainParameters, mesh: ParallelMesh, max_norm: float, names: Collection[str] | None = None
) -> Tensor:
    """Scale the gradients down in place so that their norm over the whole model is at most ``max_norm``.

    Equal to ``torch.nn.utils.clip_grad_norm_`` over the full tensors of one process.

    Args:
        main: The parameters of this rank, after their gradients were summed over the ranks.
        mesh: The groups of this rank.
        max_norm: The largest norm that is left as it is.
        names: Clip only these parameters of this rank, by their own norm; None means all.

    Returns:
        the norm before clipping, a tensor of no dimension; the host does not wait for it.

    Communication: one all-reduce of a scalar over tp x pp.
    """
    norm = grad_norm(main, mesh, names)
    coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    gradients = main.gradients(names)
    if gradients:
        torch._foreach_mul_(gradients, coefficient)
    return norm


@torch.no_grad()
def clip_by_value_(main: MainParameters, value: float, names: Collection[str] | None = None) -> None:
    """Clamp every gradient element to [-value, value] in place.

    Equal to ``torch.nn.utils.clip_grad_value_``.
    """
    gradients = main.gradients(names)
    if gradients:
        torch._foreach_clamp_min_(gradients, -value)
        torch._foreach_clamp_max_(gradients, value)


def _counted_gradients(main: MainParameters, mesh: ParallelMesh, names: Collection[str] | None) -> list[Tensor]:
    """List the pieces of this rank's gradients that no other rank of tp x pp counts."""
    counted = []
    for name, parameter in main.trainable():
        if parameter.grad is None or (names is not None and name not in names):
            continue
        spec = main.spec(name, mesh.tp.rank)
        if spec.tied_to is None:
            counted += [view for box, view in spec.local_views(parameter.grad) if box.copy == 0]
    return counted


def _norm_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
