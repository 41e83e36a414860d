"""Linear layers in 8 bits at the border of tensor-parallel regions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_megatron.groups.collectives import all_gather_sequence, all_reduce_
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.pending import Pending
from lightning_megatron.layers.deferred_product import open_queue, ready
from lightning_megatron.layers.fp8.magnitude import GradientMagnitude, Magnitude
from lightning_megatron.layers.fp8.operand import (
    Operand,
    Operands,
    needed,
    product,
    transposed,
)
from lightning_megatron.layers.fp8.overlapped_products import (
    gathered,
    gathered_product,
    scattered_product,
)
from lightning_megatron.layers.fp8.scaling import Axes, Scaling
from lightning_megatron.layers.fp8.weight_products import (
    Inputs,
    give_weight_gradient,
    start_inputs,
)
from lightning_megatron.layers.regions import (
    add_bias,
    as_rows,
    bias_gradient,
    column_border,
    remember,
    row_border,
    start_summing,
)
from lightning_megatron.shapes import Float


def fp8_column_linear(
    hidden: Float[Tensor, "seq_local *batch in_features"],
    weight: Float[Tensor, "out_local in_features"],
    bias: Float[Tensor, "out_local"] | None,
    mesh: ParallelMesh,
    scaling: Scaling,
    magnitude: Magnitude | None = None,
    of_gradient: GradientMagnitude | None = None,
) -> Float[Tensor, "seq *batch out_local"]:
    """Enter a tensor-parallel region and multiply by this rank's rows of a weight, in 8 bits.

    Equal to :func:`~lightning_megatron.layers.regions.column_linear` of the rounded factors. The
    cast input is kept for the backward pass; under sequence parallelism only this rank's positions
    of it. If scales belong to rows, columns or blocks, sequence parallelism keeps the input before
    the cast instead.

    Args:
        hidden: The input.
        weight: This rank's rows of the weight.
        bias: This rank's part of the bias; None without one.
        mesh: Process groups of this rank.
        scaling: Settings of the layer's casts.
        magnitude: Largest magnitude of the input; None computes it.
        of_gradient: Object in which the backward pass of the operator that reads the output stores
            the magnitude of the output's gradient; None computes it.

    Communication: as ``column_linear``, and an all-reduce of magnitudes for each tensor that ranks
        share, unless scales come from earlier steps. With one scale per tensor the all-gathers of
        sequence parallelism transfer 8-bit values.
    """
    # Magnitudes in evaluations and trials do not count as magnitudes of a step.
    scaling = scaling.counting(torch.is_grad_enabled())
    output = _FP8ColumnLinear.apply(hidden, weight, bias, mesh, scaling, magnitude, of_gradient)
    return output.view(-1, *hidden.shape[1:-1], weight.shape[0])


def fp8_row_linear(
    hidden: Float[Tensor, "seq *batch in_local"],
    weight: Float[Tensor, "out_features in_local"],
    bias: Float[Tensor, "out_features"] | None,
    mesh: ParallelMesh,
    scaling: Scaling,
    magnitude: Magnitude | None = None,
) -> Float[Tensor, "seq_local *batch out_features"]:
    """Multiply by this rank's columns of a weight in 8 bits, and leave the tensor-parallel region.

    Equal to :func:`~lightning_megatron.layers.regions.row_linear` of the rounded factors. The cast
    input is kept for the backward pass.

    Args:
        hidden: The input.
        weight: This rank's columns of the weight.
        bias: The bias; None without one.
        mesh: Process groups of this rank.
        scaling: Settings of the layer's casts.
        magnitude: Largest magnitude of this rank's input; None computes it.

    Communication: as ``row_linear``, and an all-reduce of magnitudes for each tensor that ranks
        share, unless scales come from earlier steps. With one scale per tensor the all-gather of
        sequence parallelism transfers 8-bit values.
    """
    scaling = scaling.counting(torch.is_grad_enabled())
    return _FP8RowLinear.apply(hidden, weight, bias, mesh, scaling, magnitude)


class _FP8ColumnLinear(torch.autograd.Function):
    border = staticmethod(column_border)

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        mesh: ParallelMesh,
        scaling: Scaling,
        magnitude: Magnitude | None,
        of_gradient: GradientMagnitude | None,
    ) -> Tensor:
        remember(ctx, hidden, weight, bias, mesh)
        ctx.scaling = scaling
        ctx.of_gradient = of_gradient
        ctx.hidden_shape = hidden.shape
        keeps_input = ctx.needs_input_grad[1]
        bits = None if magnitude is None else magnitude.of(hidden)
        kept: tuple[Tensor | None, Tensor | None] = (None, None)
        if not mesh.sequence_parallel:
            inputs = scaling.cast_input(
                as_rows(hidden), rows=True, columns=keeps_input, row_axes=(mesh.cp,), bits=bits
            )
            rows = inputs.rows
            if inputs.columns is not None:
                kept = inputs.columns.values, inputs.columns.scale
        elif scaling.has_one_scale:
            axes = mesh.cp, mesh.tp
            cast = scaling.cast_input(
                as_rows(hidden), rows=True, columns=False, row_axes=axes, bits=bits
            )
            rows = needed(cast.rows)
            kept = rows.values, rows.scale
        else:
            full = as_rows(all_gather_sequence(hidden, mesh.tp))
            rows = scaling.cast_input(full, rows=True, columns=False, row_axes=(mesh.cp,)).rows
            kept = hidden, None
        matrix = scaling.cast_weight(weight, rows=True, columns=False, row_axes=(mesh.tp,))
        _save(ctx, kept if keeps_input else (None, None), weight, matrix)
        left = needed(rows)
        right = needed(matrix.rows)
        dtype = _forward_dtype(hidden)
        emulate = scaling.emulate
        fast = scaling.sums_fast
        if mesh.sequence_parallel and scaling.has_one_scale:
            _, output = gathered_product(left, right, mesh, dtype, emulate=emulate, fast=fast)
        else:
            output = product(left, right, dtype, emulate=emulate, fast=fast)
        return add_bias(output, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        kept, scale, weight, magnitude = ctx.saved_tensors
        mesh = ctx.mesh
        grad = as_rows(grads[0])
        bits = None if ctx.of_gradient is None else ctx.of_gradient.take(grads[0])
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        cast = ctx.scaling.cast_gradient(
            grad,
            rows=needs_hidden,
            columns=needs_weight,
            row_axes=(mesh.cp,),
            column_axes=(mesh.tp,),
            bits=bits,
        )
        start: Callable[[], Inputs] = partial(start_inputs, kept, scale, mesh, ctx.scaling)
        if needs_weight and open_queue(ctx) is None:
            # The inputs arrive while the input gradient is computed. An all-gather before the cast
            # would delay its all-reduce of magnitudes, which uses the same communicator.
            inputs = start()
            start = partial(ready, inputs)
        grad_hidden = None
        leaving = Pending()
        if needs_hidden:
            part = _input_gradient(ctx, cast, weight, magnitude, (mesh.tp,), ())
            part = part.view(-1, *ctx.hidden_shape[1:])
            grad_hidden, leaving = start_summing(part, mesh)
        # The bias and weight gradients overlap with the sum of the input gradient.
        grad_bias = bias_gradient(ctx, grad)
        grad_weight = give_weight_gradient(ctx, cast.columns, start) if needs_weight else None
        leaving.wait()
        return grad_hidden, grad_weight, grad_bias, *[None] * 4


class _FP8RowLinear(torch.autograd.Function):
    border = staticmethod(row_border)

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        mesh: ParallelMesh,
        scaling: Scaling,
        magnitude: Magnitude | None,
    ) -> Tensor:
        remember(ctx, hidden, weight, bias, mesh)
        ctx.scaling = scaling
        ctx.hidden_shape = hidden.shape
        keeps_input = ctx.needs_input_grad[1]
        bits = None if magnitude is None else magnitude.of(hidden)
        inputs = scaling.cast_input(
            as_rows(hidden),
            rows=True,
            columns=keeps_input,
            row_axes=(mesh.cp,),
            column_axes=(mesh.tp,),
            bits=bits,
        )
        matrix = scaling.cast_weight(weight, rows=True, columns=False, column_axes=(mesh.tp,))
        columns = inputs.columns
        kept = (None, None) if columns is None else (columns.values, columns.scale)
        _save(ctx, kept, weight, matrix)
        left = needed(inputs.rows)
        right = needed(matrix.rows)
        dtype = _forward_dtype(hidden)
        emulate = scaling.emulate
        fast = scaling.sums_fast
        if mesh.sequence_parallel:
            output = scattered_product(left, right, mesh, dtype, emulate=emulate, fast=fast)
        else:
            output = all_reduce_(product(left, right, dtype, emulate=emulate, fast=fast), mesh.tp)
        return add_bias(output.view(-1, *hidden.shape[1:-1], weight.shape[0]), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        kept, scale, weight, magnitude = ctx.saved_tensors
        mesh = ctx.mesh
        grad = grads[0]
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_bias = bias_gradient(ctx, grad)
        if mesh.sequence_parallel and ctx.scaling.has_one_scale:
            input_gradient, columns = _gathered_gradients(ctx, grad, weight, magnitude)
        else:
            full = all_gather_sequence(grad, mesh.tp) if mesh.sequence_parallel else grad
            cast = ctx.scaling.cast_gradient(
                as_rows(full), rows=needs_hidden, columns=needs_weight, row_axes=(mesh.cp,)
            )
            columns = cast.columns
            input_gradient = None
            if needs_hidden:
                input_gradient = _input_gradient(ctx, cast, weight, magnitude, (), (mesh.tp,))
        grad_hidden = None if input_gradient is None else input_gradient.view(ctx.hidden_shape)
        grad_weight = None
        if needs_weight:
            start = partial(ready, partial(Operand, kept, scale))
            grad_weight = give_weight_gradient(ctx, columns, start)
        return grad_hidden, grad_weight, grad_bias, *[None] * 3


def _save(
    ctx: Any, kept: tuple[Tensor | None, Tensor | None], weight: Tensor, matrix: Operands
) -> None:
    # A weight that is kept in 8 bits is read from the memory of the optimizer.
    needs_weight = ctx.needs_input_grad[0] and ctx.scaling.stored is None
    kept_weight = (weight, matrix.magnitude) if needs_weight else (None, None)
    ctx.save_for_backward(*kept, *kept_weight)


def _forward_dtype(hidden: Tensor) -> torch.dtype:
    """Return the dtype of the outputs."""
    kind = hidden.device.type
    is_autocast = torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if is_autocast else hidden.dtype


def _input_gradient(
    ctx: Any,
    cast: Operands,
    weight: Tensor | None,
    magnitude: Tensor | None,
    row_axes: Axes,
    column_axes: Axes,
) -> Tensor:
    """Return the gradient of the inputs as rows, in the dtype of the inputs.

    Args:
        ctx: Context of the layer.
        cast: Gradient of the outputs.
        weight: The weight; None if it is kept in 8 bits.
        magnitude: Magnitudes of the weight that the forward pass found; None if there are none.
        row_axes: Axes whose ranks hold other rows of the weight.
        column_axes: Axes whose ranks hold other columns of the weight.
    """
    matrix = _weight_columns(ctx, weight, magnitude, row_axes, column_axes)
    return product(needed(cast.rows), matrix, ctx.hidden_dtype, emulate=ctx.scaling.emulate)


def _weight_columns(
    ctx: Any, weight: Tensor | None, magnitude: Tensor | None, row_axes: Axes, column_axes: Axes
) -> Operand:
    """Return the operand of the columns of the weight, with the arguments of `_input_gradient`."""
    matrix = ctx.scaling.cast_weight(
        weight,
        rows=False,
        columns=True,
        row_axes=row_axes,
        column_axes=column_axes,
        magnitude=magnitude,
    )
    return needed(matrix.columns)


def _gathered_gradients(
    ctx: Any, grad: Tensor, weight: Tensor | None, magnitude: Tensor | None
) -> tuple[Tensor | None, Operand | None]:
    """Return the input gradient of a row layer, and its output gradient as operand of columns.

    Each is None if it is not needed. This is for sequence parallelism with one scale per tensor.

    Args:
        ctx: Context of the layer.
        grad: Gradient of the outputs at this rank's positions.
        weight: The weight; None if it is kept in 8 bits.
        magnitude: Magnitudes of the weight that the forward pass found; None if there are none.
    """
    mesh = ctx.mesh
    scaling = ctx.scaling
    axes = mesh.cp, mesh.tp
    local = needed(
        scaling.cast_gradient(as_rows(grad), rows=True, columns=False, row_axes=axes).rows
    )
    input_gradient = None
    if ctx.needs_input_grad[0]:
        matrix = _weight_columns(ctx, weight, magnitude, (), (mesh.tp,))
        full, input_gradient = gathered_product(
            local, matrix, mesh, ctx.hidden_dtype, emulate=scaling.emulate
        )
    else:
        full = gathered(local, mesh)
    columns = transposed(full, scaling.settings.multiple) if ctx.needs_input_grad[1] else None
    return input_gradient, columns
