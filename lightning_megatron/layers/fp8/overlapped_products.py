"""Products in 8 bits that overlap with the communication of sequence parallelism if possible."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_megatron.groups.collective_matmul import (
    all_gather_scaled_matmul,
    overlaps_scaled_products,
    scaled_matmul_reduce_scatter,
)
from lightning_megatron.groups.collectives import reduce_scatter_sequence
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.fp8.operand import Operand, product
from lightning_megatron.layers.regions import start_gathering
from lightning_megatron.shapes import Float


def gathered(local: Operand, mesh: ParallelMesh) -> Operand:
    """All-gather the rows of the tensor-parallel ranks, which have the same scale.

    Args:
        local: This rank's rows.
        mesh: Process groups of this rank.

    Communication: an all-gather of 8-bit values over tp.
    """
    full, arriving = start_gathering(local.values.view(torch.uint8), mesh)
    arriving.wait()
    return Operand(full.view(local.values.dtype), local.scale)


def gathered_product(
    local: Operand,
    right: Operand,
    mesh: ParallelMesh,
    dtype: torch.dtype,
    *,
    emulate: bool,
    fast: bool = False,
) -> tuple[Operand, Float[Tensor, "rows columns"]]:
    """All-gather the rows of the tensor-parallel ranks, and multiply them by another matrix.

    Args:
        local: This rank's rows of the left factor, which has one scale on all ranks.
        right: Right factor, with one scale.
        mesh: Process groups of this rank.
        dtype: Dtype of the product.
        emulate: As for :func:`~lightning_megatron.layers.fp8.operand.product`.
        fast: As for ``product``.

    Returns:
        The gathered left factor, and the product.

    Communication: an all-gather of 8-bit values over tp, which overlaps with the product if the
        tensor axis is configured for it.
    """
    if emulate or not overlaps_scaled_products(local.values, dtype, mesh.tp):
        full = gathered(local, mesh)
        return full, product(full, right, dtype, emulate=emulate, fast=fast)
    scales = local.scale, right.scale
    values, result = all_gather_scaled_matmul(
        local.values, right.values.t(), scales, mesh.tp, dtype, fast=fast
    )
    return Operand(values, local.scale), result


def scattered_product(
    left: Operand,
    right: Operand,
    mesh: ParallelMesh,
    dtype: torch.dtype,
    *,
    emulate: bool,
    fast: bool = False,
) -> Float[Tensor, "rows columns"]:
    """Multiply two factors, and return this rank's rows of the sum over the tensor-parallel ranks.

    Args:
        left: Left factor.
        right: Right factor.
        mesh: Process groups of this rank.
        dtype: Dtype of the product.
        emulate: As for :func:`~lightning_megatron.layers.fp8.operand.product`.
        fast: As for ``product``.

    Communication: a reduce-scatter over tp, which overlaps with the product if the tensor axis is
        configured for it and both factors have one scale.
    """
    is_single = left.scale.numel() == right.scale.numel() == 1
    if emulate or not is_single or not overlaps_scaled_products(left.values, dtype, mesh.tp):
        part = product(left, right, dtype, emulate=emulate, fast=fast)
        return reduce_scatter_sequence(part, mesh.tp)
    scales = left.scale, right.scale
    return scaled_matmul_reduce_scatter(
        left.values, right.values.t(), scales, mesh.tp, dtype, fast=fast
    )
