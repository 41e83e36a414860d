"""Matrix products with a collective before or after them, optionally overlapped piece by piece.

With ``axis.overlaps_matmul``, and for half types on GPUs, they run on torch's symmetric memory:
copy engines transfer the pieces of other ranks, so that the products keep all multiprocessors.
Otherwise the collective and the product run one after the other. The functions have no autograd.
"""

from __future__ import annotations

import torch
import torch.distributed._symmetric_memory as symmetric_memory  # registers torch.ops.symm_mem
from torch import Tensor

from lightning_megatron.groups.axis import MeshAxis
from lightning_megatron.groups.collectives import all_gather_sequence, reduce_scatter_sequence
from lightning_megatron.half_types import HALF_TYPES


def all_gather_matmul(
    x: Tensor, matrix: Tensor, axis: MeshAxis, *, keep: bool
) -> tuple[Tensor | None, Tensor]:
    """Join the axis's tensors along the first dimension and multiply them by a matrix.

    The second result equals ``full @ matrix``, where ``full`` is the joined tensor.

    Shapes: x ``(N, ..., K)``; matrix ``(K, M)``; result ``(axis.size * N, ..., K)`` and
        ``(axis.size * N, ..., M)``.

    Args:
        keep: Whether the joined tensor is needed, too; otherwise it is returned only if it exists
            anyway.

    Communication: an all-gather.
    """
    if matrix.dtype == x.dtype and overlaps_products(x, x.dtype, axis):
        name = _noted_group("all_gather_matmul", axis)
        full, (product,) = torch.ops.symm_mem.fused_all_gather_matmul(
            x.contiguous(), [matrix], 0, name, return_A=keep
        )
        return full, product
    full = all_gather_sequence(x, axis)
    return full, full @ matrix


def matmul_reduce_scatter(x: Tensor, matrix: Tensor, axis: MeshAxis) -> Tensor:
    """Multiply by a matrix, sum over the ranks, and return this rank's part of the first dimension.

    Shapes: x ``(axis.size * N, ..., K)``; matrix ``(K, M)``; result ``(N, ..., M)``.
    Communication: a reduce-scatter.
    """
    if matrix.dtype == x.dtype and overlaps_products(x, x.dtype, axis):
        name = _noted_group("matmul_reduce_scatter", axis)
        return torch.ops.symm_mem.fused_matmul_reduce_scatter(
            x.contiguous(), matrix, "sum", 0, name
        )
    return reduce_scatter_sequence(x @ matrix, axis)


def overlaps_products(x: Tensor, dtype: torch.dtype, axis: MeshAxis) -> bool:
    """Return whether products of a type overlap with a collective; ``x`` is their left factor."""
    return axis.overlaps_matmul and axis.size > 1 and x.is_cuda and dtype in HALF_TYPES


def all_gather_scaled_matmul(
    x: Tensor,
    matrix: Tensor,
    scales: tuple[Tensor, Tensor],
    axis: MeshAxis,
    dtype: torch.dtype,
    *,
    fast: bool,
) -> tuple[Tensor, Tensor]:
    """Join the rows of the axis's matrices of 8 bits and multiply them by a matrix, overlapped.

    The second result equals ``full @ matrix`` times both scales, where ``full`` is the joined
    matrix.

    Shapes: x ``(N, K)``; matrix ``(K, M)``; scales ``(1,)``; result ``(axis.size * N, K)`` and
        ``(axis.size * N, M)``.

    Args:
        matrix: Right factor in 8 bits, the transpose of a contiguous matrix.
        scales: Scale of the left factor, which is the same on all ranks, and of the right one.
        axis: Axis of the ranks, for which :func:`overlaps_products` holds.
        fast: Whether the chip may sum up with fewer bits.

    Communication: an all-gather of 8 bits.
    """
    name = _noted_group("all_gather_scaled_matmul", axis)
    left, right = scales
    full, (product,) = torch.ops.symm_mem.fused_all_gather_scaled_matmul(
        x, [matrix], left, [right], 0, name, [None], [None], [dtype], [fast]
    )
    return full, product


def scaled_matmul_reduce_scatter(
    x: Tensor,
    matrix: Tensor,
    scales: tuple[Tensor, Tensor],
    axis: MeshAxis,
    dtype: torch.dtype,
    *,
    fast: bool,
) -> Tensor:
    """Multiply matrices of 8 bits, sum over the ranks, and return this rank's rows, overlapped.

    Products are rounded to their type before they are summed, as without overlap.

    Shapes: x ``(axis.size * N, K)``; matrix ``(K, M)``; scales ``(1,)``; result ``(N, M)``.

    Args:
        matrix: Right factor, the transpose of a contiguous matrix.
        axis: Axis of the ranks, for which :func:`overlaps_products` holds.
        fast: Whether the chip may sum up with fewer bits.

    Communication: a reduce-scatter.
    """
    name = _noted_group("scaled_matmul_reduce_scatter", axis)
    shape = [x.shape[0], matrix.shape[1]]
    return torch.ops.symm_mem.fused_scaled_matmul_reduce_scatter(
        x, matrix, *scales, "sum", 0, 0, name, shape, out_dtype=dtype, use_fast_accum=fast
    )


def workspaces() -> tuple[Tensor, ...]:
    """Return the symmetric memory that overlapped products of all axes use now.

    torch replaces the memory of a group when a product needs more. A CUDA graph must keep what it
    was captured with, because its replays still transfer pieces through it.
    """
    cached = symmetric_memory._group_name_to_workspace_tensor.values()
    return tuple(memory for memory in cached if memory is not None)


def release_workspace(axis: MeshAxis) -> None:
    """Free the symmetric memory of an axis, which torch caches under the name of its group."""
    if axis.overlaps_matmul and axis.group is not None:
        symmetric_memory._group_name_to_workspace_tensor.pop(axis.group.group_name, None)


def _noted_group(kind: str, axis: MeshAxis) -> str:
    """Record in the journal that a product starts, and return the name of its group."""
    assert axis.group is not None, "an axis of one rank is not pipelined"
    axis.note(kind)
    return str(axis.group.group_name)
