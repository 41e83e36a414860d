"""Weight gradients of linear layers in 8 bits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.deferred_product import give_product
from lightning_megatron.layers.fp8.operand import Operand, ScaledProduct, needed, transposed
from lightning_megatron.layers.fp8.scaling import Scaling
from lightning_megatron.layers.regions import as_rows, start_gathering
from lightning_megatron.shapes import Float, Shaped

#: Waits for the inputs of a layer, and returns the operand of their columns.
Inputs = Callable[[], Operand]


def start_inputs(
    kept: Shaped[Tensor, "..."],
    scale: Float[Tensor, "..."] | None,
    mesh: ParallelMesh,
    scaling: Scaling,
) -> Inputs:
    """Start to all-gather the inputs of a column layer, if ranks kept parts of them.

    Args:
        kept: Inputs that the forward pass kept.
        scale: Scales of these inputs; None if they are not in 8 bits.
        mesh: Process groups of this rank.
        scaling: Settings of the layer's casts.

    Communication: under sequence parallelism an all-gather over tp.
    """
    if scale is None:
        full, arriving = start_gathering(kept, mesh)

        def cast_all() -> Operand:
            arriving.wait()
            inputs = scaling.cast_input(
                as_rows(full), rows=False, columns=True, row_axes=(mesh.cp,)
            )
            return needed(inputs.columns)

        return cast_all
    if not mesh.sequence_parallel:
        return partial(Operand, kept, scale)
    full, arriving = start_gathering(kept.view(torch.uint8), mesh)

    def transpose_all() -> Operand:
        arriving.wait()
        return transposed(Operand(full.view(kept.dtype), scale), scaling.settings.multiple)

    return transpose_all


def give_weight_gradient(
    ctx: Any, gradient: Operand | None, start: Callable[[], Inputs]
) -> Float[Tensor, "out_local in_local"] | None:
    """Add the weight gradient to its slot, defer it to the weight half, or return it.

    Args:
        ctx: Context of the layer.
        gradient: Gradient of the outputs as operand of columns.
        start: Function that starts the communication of the inputs, and returns the function that
            waits for them and returns their operand.

    Returns:
        The gradient if the weight has no slot, else None.
    """
    settings = {"emulate": ctx.scaling.emulate, "dtype": ctx.weight_dtype}
    return give_product(ctx, start, partial(ScaledProduct, needed(gradient), **settings))
