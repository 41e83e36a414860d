"""Linear layers in 8 bits at the border of tensor-parallel regions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.groups.collective_matmul import (
    all_gather_scaled_matmul,
    overlaps_products,
    scaled_matmul_reduce_scatter,
)
from lightning_megatron.groups.collectives import (
    all_gather_sequence,
    all_reduce_,
    reduce_scatter_sequence,
)
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.fp8.magnitude import GradientMagnitude, Magnitude
from lightning_megatron.layers.fp8.operand import (
    Operand,
    Operands,
    ScaledProduct,
    needed,
    product,
    transposed,
)
from lightning_megatron.layers.fp8.scaling import Scaling
from lightning_megatron.layers.linear.regions import (
    ColumnLinear,
    LayerProducts,
    RowLinear,
    add_bias,
    as_rows,
    dtype_of_products,
    ready,
    start_early,
    start_gathering,
)
from lightning_megatron.shapes import Float

#: Weight and bit patterns of its magnitudes; a weight that is kept in 8 bits is None.
_KeptWeight = tuple[Tensor | None, Tensor | None]
#: Input in 8 bits, or this rank's part of it before the cast.
_KeptInput = Operand | Tensor


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

    Equal to :func:`~lightning_megatron.layers.linear.regions.column_linear` of the rounded factors.
    The cast input is kept for the backward pass; under sequence parallelism only this rank's
    positions of it. If scales belong to rows, columns or blocks, sequence parallelism keeps the
    input before the cast instead.

    Args:
        magnitude: Largest magnitude of the input; None computes it.
        of_gradient: Object in which the backward pass of the operator that reads the output stores
            the magnitude of the output's gradient; None computes it.

    Communication: as ``column_linear``, and an all-reduce of magnitudes for each tensor that ranks
        share, unless scales come from earlier steps. With one scale per tensor the all-gathers of
        sequence parallelism transfer 8-bit values.
    """
    products = _FP8Products(scaling.counting(torch.is_grad_enabled()), of_gradient)
    output = _FP8ColumnLinear.apply(hidden, weight, bias, mesh, products, magnitude)
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

    Equal to :func:`~lightning_megatron.layers.linear.regions.row_linear` of the rounded factors.
    The cast input is kept for the backward pass.

    Args:
        magnitude: Largest magnitude of this rank's input; None computes it.

    Communication: as ``row_linear``, and an all-reduce of magnitudes for each tensor that ranks
        share, unless scales come from earlier steps. With one scale per tensor the all-gather of
        sequence parallelism transfers 8-bit values.
    """
    products = _FP8Products(scaling.counting(torch.is_grad_enabled()), None)
    return _FP8RowLinear.apply(hidden, weight, bias, mesh, products, magnitude)


class _FP8ColumnLinear(ColumnLinear):
    """Column layer in 8 bits.

    It has its own type because the casts that microbatches share are not saved tensors, on which
    the search of ``graphs.observation`` relies.
    """


class _FP8RowLinear(RowLinear):
    """Row layer in 8 bits, with its own type as :class:`_FP8ColumnLinear`."""


@dataclass(frozen=True)
class _FP8Products(LayerProducts):
    """Casts and products of a linear layer in 8 bits."""

    scaling: Scaling
    of_gradient: GradientMagnitude | None

    def gather_and_multiply(
        self, ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, magnitude: Magnitude | None
    ) -> Tensor:
        mesh = ctx.mesh
        ctx.weight_axes = {"row_axes": (mesh.tp,)}
        left, kept = self._cast_column_input(ctx, x, magnitude)
        right = self._cast_and_save(ctx, kept, weight)
        dtype = dtype_of_products(x)
        if mesh.sequence_parallel and self.scaling.has_one_scale:
            _, output = gathered_product(left, right, mesh, dtype, **self._forward_settings)
        else:
            output = product(left, right, dtype, **self._forward_settings)
        return add_bias(output, bias)

    def multiply_and_sum(
        self, ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, magnitude: Magnitude | None
    ) -> Tensor:
        mesh = ctx.mesh
        ctx.weight_axes = {"column_axes": (mesh.tp,)}
        inputs = self.scaling.cast(
            as_rows(x),
            "input",
            rows=True,
            columns=ctx.needs_input_grad[1],
            row_axes=(mesh.cp,),
            column_axes=(mesh.tp,),
            bits=None if magnitude is None else magnitude.of(x),
        )
        left = needed(inputs.rows)
        right = self._cast_and_save(ctx, inputs.columns, weight)
        dtype = dtype_of_products(x)
        if mesh.sequence_parallel:
            output = scattered_product(left, right, mesh, dtype, **self._forward_settings)
        else:
            output = all_reduce_(product(left, right, dtype, **self._forward_settings), mesh.tp)
        return add_bias(output.view(-1, *x.shape[1:-1], weight.shape[0]), bias)

    def saved(self, ctx: Any) -> tuple[_KeptInput | None, _KeptWeight]:
        values, scale, weight, magnitude = ctx.saved_tensors
        if values is None:
            return None, (weight, magnitude)
        kept = values.detach() if scale is None else Operand(values, scale)
        return kept, (weight, magnitude)

    def receive(
        self, ctx: Any, grad: Tensor, inputs: _KeptInput | None
    ) -> tuple[Operands, Callable[[], Callable[[], Operand]]]:
        mesh = ctx.mesh
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        cast = self.scaling.cast(
            as_rows(grad),
            "gradient",
            rows=needs_hidden,
            columns=needs_weight,
            row_axes=(mesh.cp,),
            column_axes=(mesh.tp,),
            bits=None if self.of_gradient is None else self.of_gradient.take(grad),
        )
        # The inputs arrive while the input gradient is computed. An all-gather before the cast
        # would delay its all-reduce of magnitudes, which uses the same communicator.
        return cast, start_early(ctx, partial(_start_inputs, inputs, mesh, self.scaling))

    def gather_gradient(
        self, ctx: Any, grad: Tensor, weight: _KeptWeight
    ) -> Callable[[], tuple[Operands, Tensor | None]]:
        if ctx.mesh.sequence_parallel and self.scaling.has_one_scale:
            return partial(self._gathered_gradients, ctx, grad, weight)
        return partial(self._gathered_then_cast, ctx, grad)

    def input_gradient(self, ctx: Any, gradient: Operands, weight: _KeptWeight) -> Tensor:
        matrix = self._weight_columns(ctx, weight)
        left = needed(gradient.rows)
        part = product(left, matrix, ctx.hidden_dtype, emulate=self.scaling.emulate)
        return part.view(-1, *ctx.hidden_shape[1:])

    def weight_product(self, ctx: Any, gradient: Operands) -> Callable[[Operand], ScaledProduct]:
        settings = {"emulate": self.scaling.emulate, "dtype": ctx.weight_dtype}
        return partial(ScaledProduct, needed(gradient.columns), **settings)

    @property
    def _forward_settings(self) -> dict[str, Any]:
        # Forward products may accumulate with fewer bits, which is faster.
        fast = self.scaling.settings.recipe != "blockwise"
        return {"emulate": self.scaling.emulate, "fast": fast}

    def _cast_column_input(
        self, ctx: Any, x: Tensor, magnitude: Magnitude | None
    ) -> tuple[Operand, _KeptInput | None]:
        """Return the operand of the inputs, and what is kept of them for the weight gradient.

        Without sequence parallelism, or with scales of several elements, the operand has the inputs
        at all positions, otherwise this rank's.
        """
        mesh = ctx.mesh
        cast = partial(self.scaling.cast, use="input", row_axes=(mesh.cp,))
        bits = None if magnitude is None else magnitude.of(x)
        keeps = ctx.needs_input_grad[1]
        if not mesh.sequence_parallel:
            inputs = cast(as_rows(x), rows=True, columns=keeps, bits=bits)
            return needed(inputs.rows), inputs.columns
        if self.scaling.has_one_scale:
            axes = mesh.cp, mesh.tp
            rows = needed(cast(as_rows(x), rows=True, columns=False, row_axes=axes, bits=bits).rows)
            return rows, rows if keeps else None
        full = as_rows(all_gather_sequence(x, mesh.tp))
        rows = needed(cast(full, rows=True, columns=False).rows)
        return rows, x if keeps else None

    def _cast_and_save(self, ctx: Any, kept: _KeptInput | None, weight: Tensor) -> Operand:
        """Return the operand of the rows of the weight, and save what the backward pass needs."""
        matrix = self.scaling.cast_weight(weight, rows=True, columns=False, **ctx.weight_axes)
        tensors = (kept.values, kept.scale) if isinstance(kept, Operand) else (kept, None)
        # A weight that is kept in 8 bits is read from the memory of the optimizer.
        needs_weight = ctx.needs_input_grad[0] and self.scaling.stored is None
        kept_weight = (weight, matrix.magnitude) if needs_weight else (None, None)
        ctx.save_for_backward(*tensors, *kept_weight)
        return needed(matrix.rows)

    def _weight_columns(self, ctx: Any, weight: _KeptWeight) -> Operand:
        matrix, magnitude = weight
        cast = self.scaling.cast_weight(
            matrix, rows=False, columns=True, magnitude=magnitude, **ctx.weight_axes
        )
        return needed(cast.columns)

    def _gathered_gradients(
        self, ctx: Any, grad: Tensor, weight: _KeptWeight
    ) -> tuple[Operands, Tensor | None]:
        """Return both gradients, under sequence parallelism with one scale per tensor."""
        mesh = ctx.mesh
        scaling = self.scaling
        axes = mesh.cp, mesh.tp
        local = needed(
            scaling.cast(as_rows(grad), "gradient", rows=True, columns=False, row_axes=axes).rows
        )
        input_gradient = None
        if ctx.needs_input_grad[0]:
            matrix = self._weight_columns(ctx, weight)
            full, part = gathered_product(
                local, matrix, mesh, ctx.hidden_dtype, emulate=scaling.emulate
            )
            input_gradient = part.view(ctx.hidden_shape)
        else:
            full = gathered(local, mesh)
        columns = transposed(full, scaling.settings.multiple) if ctx.needs_input_grad[1] else None
        return Operands(None, columns), input_gradient

    def _gathered_then_cast(self, ctx: Any, grad: Tensor) -> tuple[Operands, None]:
        mesh = ctx.mesh
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        full = all_gather_sequence(grad, mesh.tp) if mesh.sequence_parallel else grad
        cast = self.scaling.cast(
            as_rows(full), "gradient", rows=needs_hidden, columns=needs_weight, row_axes=(mesh.cp,)
        )
        return cast, None


def _start_inputs(
    kept: _KeptInput | None, mesh: ParallelMesh, scaling: Scaling
) -> Callable[[], Operand]:
    """Start to all-gather the inputs of a column layer, if ranks kept parts of them."""
    assert kept is not None, "inputs are kept if the weight gradient needs them"
    if isinstance(kept, Tensor):
        full, arriving = start_gathering(kept, mesh)

        def cast_all() -> Operand:
            arriving.wait()
            inputs = scaling.cast(
                as_rows(full), "input", rows=False, columns=True, row_axes=(mesh.cp,)
            )
            return needed(inputs.columns)

        return cast_all
    if not mesh.sequence_parallel:
        return partial(ready, kept)
    full, arriving = start_gathering(kept.values.view(torch.uint8), mesh)

    def transpose_all() -> Operand:
        arriving.wait()
        values = full.view(kept.values.dtype)
        return transposed(Operand(values, kept.scale), scaling.settings.multiple)

    return transpose_all


def gathered(local: Operand, mesh: ParallelMesh) -> Operand:
    """All-gather the rows of the tensor-parallel ranks, which have the same scale.

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
    """All-gather the rows of a factor with one scale; return them and their product.

    Communication: an all-gather of 8-bit values over tp, which overlaps with the product if the
        tensor axis is configured for it.
    """
    if emulate or not overlaps_products(local.values, dtype, mesh.tp):
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

    Communication: a reduce-scatter over tp, which overlaps with the product if the tensor axis is
        configured for it and both factors have one scale.
    """
    is_single = left.scale.numel() == right.scale.numel() == 1
    if emulate or not is_single or not overlaps_products(left.values, dtype, mesh.tp):
        part = product(left, right, dtype, emulate=emulate, fast=fast)
        return reduce_scatter_sequence(part, mesh.tp)
    scales = left.scale, right.scale
    return scaled_matmul_reduce_scatter(
        left.values, right.values.t(), scales, mesh.tp, dtype, fast=fast
    )
