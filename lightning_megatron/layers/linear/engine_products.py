"""Linear layers of Transformer Engine at the border of tensor-parallel regions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.groups.collectives import (
    all_gather_sequence,
    all_reduce_,
    reduce_scatter_sequence,
)
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.pending import Pending
from lightning_megatron.layers.fp8.magnitude import Magnitude
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
from lightning_megatron.layers.transformer_engine.engine_scaling import (
    EngineProduct,
    EngineScaling,
    Factor,
)
from lightning_megatron.shapes import Float


# torch.compile cannot trace Transformer Engine.
@torch.compiler.disable
def engine_column_linear(
    hidden: Float[Tensor, "seq_local *batch in_features"],
    weight: Float[Tensor, "out_local in_features"],
    bias: Float[Tensor, "out_local"] | None,
    mesh: ParallelMesh,
    scaling: EngineScaling,
) -> Float[Tensor, "seq *batch out_local"]:
    """Enter a tensor-parallel region and multiply by this rank's rows of a weight.

    Equal to :func:`~lightning_megatron.layers.linear.regions.column_linear` of the factors that
    Transformer Engine casts. The cast input is kept for the backward pass; under sequence
    parallelism this rank's positions of the input before the cast are kept instead.

    Communication: as ``column_linear``, but matrix products are not split to overlap with it.
    """
    products = _EngineProducts(scaling, torch.is_grad_enabled())
    output = _EngineColumnLinear.apply(hidden, weight, bias, mesh, products, None)
    return output.view(-1, *hidden.shape[1:-1], weight.shape[0])


@torch.compiler.disable
def engine_row_linear(
    hidden: Float[Tensor, "seq *batch in_local"],
    weight: Float[Tensor, "out_features in_local"],
    bias: Float[Tensor, "out_features"] | None,
    mesh: ParallelMesh,
    scaling: EngineScaling,
) -> Float[Tensor, "seq_local *batch out_features"]:
    """Multiply by this rank's columns of a weight, and leave the tensor-parallel region.

    Equal to :func:`~lightning_megatron.layers.linear.regions.row_linear` of the factors that
    Transformer Engine casts. The cast input is kept for the backward pass.

    Communication: as ``row_linear``, but matrix products are not split to overlap with it.
    """
    products = _EngineProducts(scaling, torch.is_grad_enabled())
    return _EngineRowLinear.apply(hidden, weight, bias, mesh, products, None)


class _EngineColumnLinear(ColumnLinear):
    """Column layer of Transformer Engine.

    It has its own type because matrices in 8 bits are not saved as plain tensors, on which the
    search of ``graphs.observation`` relies.
    """


class _EngineRowLinear(RowLinear):
    """Row layer of Transformer Engine, with its own type as :class:`_EngineColumnLinear`."""


@dataclass(frozen=True)
class _EngineProducts(LayerProducts):
    """Casts and products of a linear layer with Transformer Engine.

    Args:
        counts: Whether magnitudes of the forward pass count towards the scales of the next step.
    """

    scaling: EngineScaling
    counts: bool

    def gather_and_multiply(
        self, ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, magnitude: Magnitude | None
    ) -> Tensor:
        gathers = ctx.mesh.sequence_parallel
        full = all_gather_sequence(x, ctx.mesh.tp) if gathers else x
        output, inputs = self._forward_product(ctx, full, weight, keeps=not gathers)
        self._save(ctx, x if gathers else inputs, weight)
        return add_bias(output, bias)

    def multiply_and_sum(
        self, ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, magnitude: Magnitude | None
    ) -> Tensor:
        part, inputs = self._forward_product(ctx, x, weight, keeps=True)
        self._save(ctx, inputs, weight)
        part = part.view(*x.shape[:-1], weight.shape[0])
        if ctx.mesh.sequence_parallel:
            return add_bias(reduce_scatter_sequence(part, ctx.mesh.tp), bias)
        return add_bias(all_reduce_(part, ctx.mesh.tp), bias)

    def saved(self, ctx: Any) -> tuple[Factor, Tensor | None]:
        engine = import_module("transformer_engine.pytorch")
        inputs, weight = engine.restore_from_saved(ctx.forms, list(ctx.saved_tensors))
        return inputs, weight

    def receive(
        self, ctx: Any, grad: Tensor, inputs: Factor
    ) -> tuple[Factor, Callable[[], Callable[[], Factor]]]:
        if inputs is not None and ctx.mesh.sequence_parallel:
            inputs = inputs.detach()
        # The inputs arrive while the gradient of the inputs is computed.
        start = start_early(ctx, partial(self._start_inputs, inputs, ctx.mesh, ctx.dtype))
        return self._cast_gradient(ctx, grad), start

    def gather_gradient(
        self, ctx: Any, grad: Tensor, weight: Tensor | None
    ) -> Callable[[], tuple[Factor, None]]:
        full = grad
        arriving = Pending()
        if ctx.mesh.sequence_parallel:
            full, arriving = start_gathering(grad, ctx.mesh)

        def cast_all() -> tuple[Factor, None]:
            arriving.wait()
            return self._cast_gradient(ctx, full), None

        return cast_all

    def input_gradient(self, ctx: Any, gradient: Factor, weight: Tensor | None) -> Tensor:
        scaling = self.scaling
        matrix = scaling.cast_weight(weight, ctx.dtype, columns=True, counts=True)
        padded = scaling.product(matrix, gradient, "input gradient", ctx.dtype)
        return padded[: ctx.num_rows].to(ctx.hidden_dtype).view(-1, *ctx.hidden_shape[1:])

    def weight_product(self, ctx: Any, gradient: Factor) -> Callable[[Factor], EngineProduct]:
        scaling = self.scaling
        dtype = ctx.weight_dtype
        return lambda inputs: EngineProduct(scaling, inputs, gradient, dtype)

    def _forward_product(
        self, ctx: Any, hidden: Tensor, weight: Tensor, *, keeps: bool
    ) -> tuple[Tensor, Factor]:
        """Return the outputs as rows, and the cast inputs if the weight gradient needs them."""
        scaling = self.scaling
        counts = self.counts
        ctx.dtype = dtype_of_products(hidden)
        rows = as_rows(hidden).to(ctx.dtype)
        keeps = keeps and ctx.needs_input_grad[1]
        inputs = scaling.cast(scaling.padded(rows), "input", columns=keeps, counts=counts)
        matrix = scaling.cast_weight(weight, ctx.dtype, columns=False, counts=counts)
        output = scaling.product(matrix, inputs, "forward", ctx.dtype)
        if keeps and scaling.settings is not None:
            # Only the weight gradient needs the inputs again, and it sums over their columns.
            inputs.update_usage(rowwise_usage=False, columnwise_usage=True)
        # Products in 8 bits have rows of padding.
        ctx.num_rows = len(rows)
        return output[: len(rows)], inputs if keeps else None

    def _cast_gradient(self, ctx: Any, grad: Tensor) -> Factor:
        rows = self.scaling.padded(as_rows(grad).to(ctx.dtype))
        return self.scaling.cast(rows, "gradient", columns=ctx.needs_input_grad[1], counts=True)

    def _start_inputs(
        self, kept: Factor, mesh: ParallelMesh, dtype: torch.dtype
    ) -> Callable[[], Factor]:
        """Start to all-gather the inputs of a column layer, if ranks kept parts of them."""
        if not mesh.sequence_parallel:
            return partial(ready, kept)
        full, arriving = start_gathering(kept, mesh)

        def cast_all() -> Factor:
            arriving.wait()
            rows = self.scaling.padded(as_rows(full).to(dtype))
            return self.scaling.cast(rows, "input", columns=True, counts=True)

        return cast_all

    def _save(self, ctx: Any, inputs: Factor | None, weight: Tensor) -> None:
        """Save the factors for the backward pass, which may be matrices in 8 bits."""
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        engine = import_module("transformer_engine.pytorch")
        kept = inputs if needs_weight else None
        # A weight that is kept in 8 bits is read from the memory of the optimizer.
        reads = needs_hidden and self.scaling.stored is None
        tensors, ctx.forms = engine.prepare_for_saving(kept, weight if reads else None)
        ctx.save_for_backward(*tensors)
