"""Matrix products at the border of tensor-parallel regions, overlapped with communication."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from lightning_megatron.groups.collective_matmul import all_gather_matmul, matmul_reduce_scatter
from lightning_megatron.groups.collectives import (
    BoundaryGradients,
    all_gather_sequence,
    reduce_from_axis,
    reduce_scatter_sequence,
)
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.pending import (
    Pending,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from lightning_megatron.layers.deferred_product import give_product, open_queue, ready
from lightning_megatron.layers.gradient_slot import MatrixProduct, slot_of
from lightning_megatron.layers.one_shot import one_shot_all_reduce_
from lightning_megatron.layers.vector_product import linear
from lightning_megatron.shapes import Float, Shaped


def column_linear(
    hidden: Float[Tensor, "seq_local *batch in_features"],
    weight: Float[Tensor, "out_local in_features"],
    bias: Float[Tensor, "out_local"] | None,
    mesh: ParallelMesh,
) -> Float[Tensor, "seq *batch out_local"]:
    """Enter a tensor-parallel region and multiply by this rank's rows of a weight.

    Equal to ``linear(full sequence, weight, bias)``, with the gradient of the input summed over tp.
    The input is the only activation that is kept. Under sequence parallelism this rank keeps only
    its positions of the input, and the backward pass all-gathers the input again. Gradients of
    weights and biases with a gradient slot are added to the slot and bypass autograd.

    Communication: backward an all-reduce over tp, overlapped with the weight gradient. Under
        sequence parallelism forward an all-gather; backward an all-gather, overlapped with the
        input gradient, and a reduce-scatter, overlapped with the weight gradient. If the weight
        gradient is deferred to a weight half, that half runs the all-gather instead of the
        backward pass.
    Source: Shoeybi et al. 2019, section 3; Korthikanti et al. 2022, section 4.2.2.
    """
    if _is_plain(weight, bias, mesh):
        return linear(hidden, weight, bias)
    return _ColumnLinear.apply(hidden, weight, bias, mesh)


def row_linear(
    hidden: Float[Tensor, "seq *batch in_local"],
    weight: Float[Tensor, "out_features in_local"],
    bias: Float[Tensor, "out_features"] | None,
    mesh: ParallelMesh,
) -> Float[Tensor, "seq_local *batch out_features"]:
    """Multiply by this rank's columns of a weight and leave the tensor-parallel region.

    The bias is added once, after the sum over the ranks.

    Equal to ``linear(full input, full weight, bias)``. The input is the only activation that is
    kept. Gradients of weights and biases with a gradient slot are added to the slot and bypass
    autograd.

    Communication: an all-reduce over tp forward; under sequence parallelism a reduce-scatter
        forward and an all-gather backward. ``groups.collective_matmul`` documents when they
        overlap with the matrix products.
    Source: Shoeybi et al. 2019, section 3; Korthikanti et al. 2022, section 4.2.2.
    """
    if _is_plain(weight, bias, mesh):
        return linear(hidden, weight, bias)
    return _RowLinear.apply(hidden, weight, bias, mesh)


def leave_tensor_region(
    part: Float[Tensor, "seq *batch hidden"], mesh: ParallelMesh
) -> Float[Tensor, "seq_local *batch hidden"]:
    """Sum the partial results of the tensor-parallel ranks, which may be overwritten.

    Communication: all-reduce over tp; under sequence parallelism reduce-scatter, backward
        all-gather.
    """
    if mesh.sequence_parallel:
        return reduce_scatter_sequence(part, mesh.tp)
    if not part.requires_grad:
        return one_shot_all_reduce_(part, mesh.tp, "sum")
    return reduce_from_axis(part, mesh.tp)


def _is_plain(weight: Tensor, bias: Tensor | None, mesh: ParallelMesh) -> bool:
    return mesh.tp.size == 1 and slot_of(weight) is None and slot_of(bias) is None


def column_border(ctx: Any) -> BoundaryGradients | None:
    """Return the border at which a tensor-parallel region begins: the input gradient is summed."""
    mesh = ctx.mesh
    if mesh.tp.size == 1:
        return None
    return BoundaryGradients((mesh.sequence_parallel, True, True), takes_parts=True)


def row_border(ctx: Any) -> BoundaryGradients | None:
    """Return the border at which the region ends: the output is summed before the bias."""
    shares = ctx.mesh.sequence_parallel
    return (
        None
        if ctx.mesh.tp.size == 1
        else BoundaryGradients((True, True, shares), takes_parts=shares)
    )


class _ColumnLinear(torch.autograd.Function):
    border = staticmethod(column_border)

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        mesh: ParallelMesh,
    ) -> Tensor:
        _keep(ctx, hidden, weight, bias, mesh)
        if not mesh.sequence_parallel:
            return linear(hidden, weight, bias)
        if not mesh.tp.overlaps_matmul:
            return F.linear(all_gather_sequence(hidden, mesh.tp), weight, bias)
        _, output = all_gather_matmul(hidden, weight.t(), mesh.tp, keep=False)
        return add_bias(output, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight = ctx.saved_tensors
        grad = grads[0]
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        leaving = Pending()
        grad_hidden = None
        grad_weight = None
        start = partial(_start_inputs, hidden, ctx.mesh)
        if needs_weight and open_queue(ctx) is None:
            # The all-gather overlaps with the input gradient.
            start = partial(ready, start())
        if needs_hidden:
            grad_hidden, leaving = start_summing(_input_gradient(grad, weight), ctx.mesh)
        # The bias and weight gradients overlap with the sum of the input gradient.
        grad_bias = bias_gradient(ctx, grad)
        if needs_weight:
            grad_weight = _give_weight_gradient(ctx, grad, start)
        leaving.wait()
        return (
            None if grad_hidden is None else grad_hidden.to(ctx.hidden_dtype),
            grad_weight,
            grad_bias,
            None,
        )


class _RowLinear(torch.autograd.Function):
    border = staticmethod(row_border)

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        mesh: ParallelMesh,
    ) -> Tensor:
        _keep(ctx, hidden, weight, bias, mesh)
        if mesh.tp.size == 1:
            return linear(hidden, weight, bias)
        if mesh.sequence_parallel:
            return add_bias(matmul_reduce_scatter(hidden, weight.t(), mesh.tp), bias)
        # No other code has a reference to the partial result, so the sum may overwrite it.
        part = linear(hidden, weight)
        return add_bias(one_shot_all_reduce_(part, mesh.tp, "sum"), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight = ctx.saved_tensors
        grad = grads[0]
        tp = ctx.mesh.tp
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        full = grad
        arriving = Pending()
        grad_hidden = None
        grad_weight = None
        if ctx.mesh.sequence_parallel and tp.overlaps_matmul and needs_hidden:
            gathered, grad_hidden = all_gather_matmul(
                grad,
                weight.to(grad.dtype),
                tp,
                keep=needs_weight,
            )
            full = grad if gathered is None else gathered
        elif ctx.mesh.sequence_parallel and (needs_hidden or needs_weight):
            full, arriving = start_gathering(grad, ctx.mesh)
        grad_bias = bias_gradient(ctx, grad)
        arriving.wait()
        if needs_hidden:
            if grad_hidden is None:
                grad_hidden = _input_gradient(full, weight)
            grad_hidden = grad_hidden.to(ctx.hidden_dtype)
        if needs_weight:
            inputs = partial(ready, hidden.detach())
            grad_weight = _give_weight_gradient(ctx, full, partial(ready, inputs))
        return grad_hidden, grad_weight, grad_bias, None


def _keep(
    ctx: Any,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    mesh: ParallelMesh,
) -> None:
    """Save the operands for the backward pass, each only if the gradient of the other is needed."""
    needs_hidden, needs_weight = ctx.needs_input_grad[:2]
    kept_hidden = hidden if needs_weight else None
    kept_weight = weight if needs_hidden else None
    ctx.save_for_backward(kept_hidden, kept_weight)
    remember(ctx, hidden, weight, bias, mesh)


def remember(
    ctx: Any,
    hidden: Float[Tensor, "*tokens in_local"],
    weight: Float[Tensor, "out_local in_local"],
    bias: Float[Tensor, "out_local"] | None,
    mesh: ParallelMesh,
) -> None:
    """Store in the context all that the backward pass of a linear layer needs besides tensors.

    Args:
        ctx: Context of the layer.
        hidden: Input.
        weight: Weight.
        bias: Bias; None without one.
        mesh: Process groups of this rank.
    """
    ctx.mesh = mesh
    ctx.hidden_dtype = hidden.dtype
    ctx.weight_dtype = weight.dtype
    ctx.bias_dtype = None if bias is None else bias.dtype
    # Slots are looked up in the forward pass: a weight that is frozen here gets no gradient, even
    # if it is unfrozen before the backward pass.
    ctx.weight_slot = slot_of(weight)
    ctx.bias_slot = slot_of(bias)


def add_bias(
    output: Float[Tensor, "*tokens features"], bias: Float[Tensor, "features"] | None
) -> Float[Tensor, "*tokens features"]:
    """Return the sum of an output and a bias, in the memory of the output if dtypes agree."""
    if bias is None:
        return output
    return output.add_(bias) if bias.dtype == output.dtype else output + bias


def start_gathering(
    x: Shaped[Tensor, "seq_local ..."], mesh: ParallelMesh
) -> tuple[Shaped[Tensor, "seq ..."], Pending]:
    """Start to all-gather the positions of the tensor-parallel ranks."""
    x = x.contiguous()
    full = x.new_empty((mesh.tp.size * x.shape[0], *x.shape[1:]))
    return full, start_all_gather(full, x, mesh.tp)


def start_summing(
    x: Float[Tensor, "seq ..."], mesh: ParallelMesh
) -> tuple[Float[Tensor, "seq_local ..."], Pending]:
    """Start to sum over the tensor-parallel ranks.

    Under sequence parallelism each rank gets the sum for its positions only.
    """
    if not mesh.sequence_parallel:
        return x, start_all_reduce(x, mesh.tp)
    out = x.new_empty((x.shape[0] // mesh.tp.size, *x.shape[1:]))
    return out, start_reduce_scatter(out, x, mesh.tp)


def as_rows(x: Float[Tensor, "*tokens features"]) -> Float[Tensor, "rows features"]:
    """Return the tokens of an activation as rows of a matrix."""
    return x.reshape(-1, x.shape[-1])


def _input_gradient(grad: Tensor, weight: Tensor) -> Tensor:
    # Under autocast the gradient may have a narrower dtype than the weight.
    return torch.mm(as_rows(grad), weight.to(grad.dtype)).view(*grad.shape[:-1], weight.shape[1])


def _start_inputs(hidden: Tensor, mesh: ParallelMesh) -> Callable[[], Tensor]:
    """Start to gather the inputs of a column layer; return the function that waits for them."""
    # Detached, because a deferred product would keep the graph alive that computed the inputs.
    hidden = hidden.detach()
    if not mesh.sequence_parallel:
        return partial(ready, hidden)
    full, arriving = start_gathering(hidden, mesh)

    def wait() -> Tensor:
        arriving.wait()
        return full

    return wait


def _give_weight_gradient(
    ctx: Any, grad: Tensor, start: Callable[[], Callable[[], Tensor]]
) -> Tensor | None:
    rows = as_rows(grad.detach())

    def multiply(inputs: Tensor) -> MatrixProduct:
        return MatrixProduct(rows, as_rows(inputs).to(rows.dtype))

    return give_product(ctx, start, multiply)


def bias_gradient(
    ctx: Any, grad: Float[Tensor, "*tokens features"]
) -> Float[Tensor, "features"] | None:
    """Return the gradient of the third argument, a bias; None if it is not needed or has a slot.

    Args:
        ctx: Context of a linear layer, with ``bias_slot`` and ``bias_dtype``.
        grad: Gradient of the outputs.
    """
    if not ctx.needs_input_grad[2]:
        return None
    if ctx.bias_slot is not None:
        ctx.bias_slot.add(as_rows(grad).sum(0, dtype=ctx.bias_slot.dtype))
        return None
    return as_rows(grad).sum(0).to(ctx.bias_dtype)
