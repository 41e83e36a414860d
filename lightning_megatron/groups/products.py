"""Matrix products with a collective before or after them, which may run piece by piece beside each other.

Where the axis says so, and for half types on GPUs, torch's symmetric memory runs them: every rank copies the others'
pieces with the copy engines, which takes no multiprocessor from the products. Elsewhere the collective and the product
run one after the other. None of them is seen by autograd.
"""

from __future__ import annotations

import torch
import torch.distributed._symmetric_memory as symmetric_memory  # registers torch.ops.symm_mem
from torch import Tensor

from lightning_megatron.groups.axis import MeshAxis
from lightning_megatron.groups.collectives import all_gather_sequence, reduce_scatter_sequence

_HALF = (torch.float16, torch.bfloat16)


def gathered_product(x: Tensor, matrix: Tensor, axis: MeshAxis, *, keep: bool) -> tuple[Tensor | None, Tensor]:
    """Join the axis's tensors along the first dimension and multiply them by a matrix.

    Equal to ``full @ matrix`` with ``full`` the joined tensor.

    Shapes: x ``(N, ..., K)``; matrix ``(K, M)``; result ``(axis.size * N, ..., K)`` and ``(axis.size * N, ..., M)``.

    Args:
        x: This rank's part.
        matrix: The right factor.
        axis: The ranks.
        keep: Whether the joined tensor is wanted, too; it is returned in any case where it is made.

    Communication: an all-gather.
    """
    if _is_pipelined(x, matrix, axis):
        assert axis.group is not None, "an axis of one rank is not pipelined"
        axis.note("gathered_product")
        name = axis.group.group_name
        full, (product,) = torch.ops.symm_mem.fused_all_gather_matmul(x.contiguous(), [matrix], 0, name, return_A=keep)
        return full, product
    full = all_gather_sequence(x, axis)
    return full, full @ matrix


def scattered_product(x: Tensor, matrix: Tensor, axis: MeshAxis) -> Tensor:
    """Multiply by a matrix, add the products of the axis's ranks, and keep this rank's part of the first dimension.

    Shapes: x ``(axis.size * N, ..., K)``; matrix ``(K, M)``; result ``(N, ..., M)``.
    Communication: a reduce-scatter.
    """
    if _is_pipelined(x, matrix, axis):
        assert axis.group is not None, "an axis of one rank is not pipelined"
        axis.note("scattered_product")
        name = axis.group.group_name
        return torch.ops.symm_mem.fused_matmul_reduce_scatter(x.contiguous(), matrix, "sum", 0, name)
    return reduce_scatter_sequence(x @ matrix, axis)


def release_workspace(axis: MeshAxis) -> None:
    """Give back the memory that an axis's ranks share, which torch keeps under the name of their group."""
    if axis.pipelines_products and axis.group is not None:
        symmetric_memory._group_name_to_workspace_tensor.pop(axis.group.group_name, None)


def _is_pipelined(x: Tensor, matrix: Tensor, axis: MeshAxis) -> bool:
    return axis.pipelines_products and axis.size > 1 and x.is_cuda and x.dtype in _HALF and matrix.dtype == x.dtype
