"""Linear layers of Transformer Engine at the border of tensor-parallel regions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_megatron.groups.collectives import (
    all_gather_sequence,
    all_reduce_,
    reduce_scatter_sequence,
)
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.pending import Pending
from lightning_megatron.layers.deferred_product import give_product, open_queue, ready
from lightning_megatron.layers.regions import (
    add_bias,
    as_rows,
    bias_gradient,
    column_border,
    remember,
    row_border,
    start_gathering,
    start_summing,
)
from lightning_megatron.layers.transformer_engine.engine_scaling import (
    EngineProduct,
    EngineScaling,
    Factor,
)
from lightning_megatron.shapes import Float

#: Function that waits for the inputs of a layer, and returns them as a factor.
_Inputs = Callable[[], Factor]


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

    Equal to :func:`~lightning_megatron.layers.regions.column_linear` of the factors that
    Transformer Engine casts. The cast input is kept for the backward pass; under sequence
    parallelism this rank's positions of the input before the cast are kept instead.

    Communication: as ``column_linear``, but matrix products are not split to overlap with it.
    """
    counts = torch.is_grad_enabled()
    output = _EngineColumnLinear.apply(hidden, weight, bias, mesh, scaling, counts)
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

    Equal to :func:`~lightning_megatron.layers.regions.row_linear` of the factors that Transformer
    Engine casts. The cast input is kept for the backward pass.

    Communication: as ``row_linear``, but matrix products are not split to overlap with it.
    """
    return _EngineRowLinear.apply(hidden, weight, bias, mesh, scaling, torch.is_grad_enabled())


class _EngineColumnLinear(torch.autograd.Function):
    border = staticmethod(column_border)

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        mesh: ParallelMesh,
        scaling: EngineScaling,
        counts: bool,
    ) -> Tensor:
        remember(ctx, hidden, weight, bias, mesh)
        ctx.scaling = scaling
        ctx.hidden_shape = hidden.shape
        gathers = mesh.sequence_parallel
        full = all_gather_sequence(hidden, mesh.tp) if gathers else hidden
        output, inputs = _forward_product(ctx, full, weight, counts, keeps=not gathers)
        _save(ctx, hidden if gathers else inputs, weight)
        return add_bias(output, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        kept, weight = _saved(ctx)
        mesh = ctx.mesh
        grad = as_rows(grads[0])
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        start: Callable[[], _Inputs] = partial(_start_inputs, ctx, kept)
        if needs_weight and open_queue(ctx) is None:
            # The inputs arrive while the gradient of the inputs is computed.
            start = partial(ready, start())
        cast = _cast_gradient(ctx, grad, needs_weight)
        grad_hidden = None
        leaving = Pending()
        if needs_hidden:
            part = _input_gradient(ctx, cast, weight, len(grad))
            grad_hidden, leaving = start_summing(part.view(-1, *ctx.hidden_shape[1:]), mesh)
        # The bias and weight gradients overlap with the sum of the input gradient.
        grad_bias = bias_gradient(ctx, grad)
        grad_weight = _give_weight_gradient(ctx, cast, start) if needs_weight else None
        leaving.wait()
        return grad_hidden, grad_weight, grad_bias, None, None, None


class _EngineRowLinear(torch.autograd.Function):
    border = staticmethod(row_border)

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        mesh: ParallelMesh,
        scaling: EngineScaling,
        counts: bool,
    ) -> Tensor:
        remember(ctx, hidden, weight, bias, mesh)
        ctx.scaling = scaling
        ctx.hidden_shape = hidden.shape
        part, inputs = _forward_product(ctx, hidden, weight, counts, keeps=True)
        _save(ctx, inputs, weight)
        part = part.view(*hidden.shape[:-1], weight.shape[0])
        if mesh.sequence_parallel:
            return add_bias(reduce_scatter_sequence(part, mesh.tp), bias)
        return add_bias(all_reduce_(part, mesh.tp), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        kept, weight = _saved(ctx)
        mesh = ctx.mesh
        grad = grads[0]
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        full = grad
        arriving = Pending()
        if mesh.sequence_parallel:
            full, arriving = start_gathering(grad, mesh)
        grad_bias = bias_gradient(ctx, grad)
        arriving.wait()
        rows = as_rows(full)
        cast = _cast_gradient(ctx, rows, needs_weight)
        grad_hidden = None
        if needs_hidden:
            grad_hidden = _input_gradient(ctx, cast, weight, len(rows)).view(ctx.hidden_shape)
        grad_weight = None
        if needs_weight:
            start = partial(ready, partial(ready, kept))
            grad_weight = _give_weight_gradient(ctx, cast, start)
        return grad_hidden, grad_weight, grad_bias, None, None, None


def _forward_product(
    ctx: Any, hidden: Tensor, weight: Tensor, counts: bool, *, keeps: bool
) -> tuple[Tensor, Factor]:
    """Return the outputs as rows, and the cast inputs for the weight gradient.

    Args:
        ctx: Context of the layer.
        hidden: Inputs at all positions.
        weight: The weight.
        counts: Whether magnitudes count towards the scales of the next step.
        keeps: Whether the cast inputs are kept.
    """
    scaling: EngineScaling = ctx.scaling
    kind = hidden.device.type
    is_autocast = torch.is_autocast_enabled(kind)
    ctx.dtype = torch.get_autocast_dtype(kind) if is_autocast else hidden.dtype
    rows = as_rows(hidden).to(ctx.dtype)
    keeps = keeps and ctx.needs_input_grad[1]
    inputs = scaling.cast(scaling.padded(rows), "input", columns=keeps, counts=counts)
    matrix = scaling.cast(weight.to(ctx.dtype), "weight", columns=False, counts=counts)
    output = scaling.product(matrix, inputs, "forward", ctx.dtype)
    if keeps and scaling.settings is not None:
        # Only the weight gradient needs the inputs again, and it sums over their columns.
        inputs.update_usage(rowwise_usage=False, columnwise_usage=True)
    return output[: len(rows)], inputs if keeps else None


def _save(ctx: Any, inputs: Factor | None, weight: Tensor) -> None:
    """Save the factors for the backward pass, which may be matrices in 8 bits."""
    needs_hidden, needs_weight = ctx.needs_input_grad[:2]
    engine = import_module("transformer_engine.pytorch")
    kept = inputs if needs_weight else None
    tensors, ctx.forms = engine.prepare_for_saving(kept, weight if needs_hidden else None)
    ctx.save_for_backward(*tensors)


def _saved(ctx: Any) -> tuple[Factor, Tensor]:
    engine = import_module("transformer_engine.pytorch")
    inputs, weight = engine.restore_from_saved(ctx.forms, list(ctx.saved_tensors))
    return inputs, weight


def _cast_gradient(ctx: Any, grad: Tensor, needs_weight: bool) -> Factor:
    rows = ctx.scaling.padded(grad.to(ctx.dtype))
    return ctx.scaling.cast(rows, "gradient", columns=needs_weight, counts=True)


def _input_gradient(ctx: Any, cast: Factor, weight: Tensor, num_rows: int) -> Tensor:
    """Return the gradient of the inputs as rows, in the dtype of the inputs."""
    matrix = ctx.scaling.cast(weight.to(ctx.dtype), "weight", columns=True, counts=True)
    gradient: Tensor = ctx.scaling.product(matrix, cast, "input gradient", ctx.dtype)
    return gradient[:num_rows].to(ctx.hidden_dtype)


def _start_inputs(ctx: Any, kept: Factor) -> _Inputs:
    """Start to all-gather the inputs of a column layer, if ranks kept parts of them."""
    if not ctx.mesh.sequence_parallel:
        return partial(ready, kept)
    full, arriving = start_gathering(kept.detach(), ctx.mesh)

    def cast_all() -> Factor:
        arriving.wait()
        rows = ctx.scaling.padded(as_rows(full).to(ctx.dtype))
        return ctx.scaling.cast(rows, "input", columns=True, counts=True)

    return cast_all


def _give_weight_gradient(
    ctx: Any, gradient: Factor, start: Callable[[], _Inputs]
) -> Tensor | None:
    """Add the weight gradient to its slot, defer it to the weight half, or return it."""
    scaling: EngineScaling = ctx.scaling
    dtype = ctx.weight_dtype
    return give_product(ctx, start, lambda inputs: EngineProduct(scaling, inputs, gradient, dtype))
