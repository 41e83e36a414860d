"""Matrix products at the border of tensor-parallel regions, overlapped with communication."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

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
from lightning_megatron.layers.fp8.magnitude import Magnitude
from lightning_megatron.layers.fused.one_shot import one_shot_all_reduce_
from lightning_megatron.layers.fused.vector_product import linear
from lightning_megatron.layers.parameters.gradient_slot import (
    GradientProduct,
    GradientSlot,
    MatrixProduct,
    StackedSlot,
    slot_of,
)
from lightning_megatron.layers.parameters.weight_gradient_queue import Add, WeightGradientQueue
from lightning_megatron.shapes import Float, Shaped

T = TypeVar("T")


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
    return ColumnLinear.apply(hidden, weight, bias, mesh, _NATIVE, None)


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
    return RowLinear.apply(hidden, weight, bias, mesh, _NATIVE, None)


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


class ColumnLinear(torch.autograd.Function):
    """Beginning of a tensor-parallel region.

    Forward ``y = gather(x) @ W^T + b``; backward ``dx = sum(dy @ W)``, ``dW = dy^T @ gather(x)``
    and ``db = sum of the rows of dy``. Under sequence parallelism ``gather`` is an all-gather and
    ``sum`` a reduce-scatter; otherwise ``gather`` is the identity and ``sum`` an all-reduce.
    """

    @staticmethod
    def border(ctx: Any) -> BoundaryGradients | None:
        """Return the border at which the region begins: the input gradient is summed."""
        mesh = ctx.mesh
        if mesh.tp.size == 1:
            return None
        return BoundaryGradients((mesh.sequence_parallel, True, True), takes_parts=True)

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Shaped[Tensor, "..."],
        weight: Shaped[Tensor, "..."],
        bias: Shaped[Tensor, "..."] | None,
        mesh: ParallelMesh,
        products: LayerProducts,
        magnitude: Magnitude | None,
    ) -> Shaped[Tensor, "..."]:
        _remember(ctx, hidden, weight, bias, mesh, products)
        return products.gather_and_multiply(ctx, hidden, weight, bias, magnitude)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, *grads: Shaped[Tensor, "..."]
    ) -> tuple[Shaped[Tensor, "..."] | None, ...]:
        products: LayerProducts = ctx.products
        inputs, weight = products.saved(ctx)
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        gradient, start = products.receive(ctx, grads[0], inputs)
        leaving = Pending()
        grad_hidden = None
        grad_weight = None
        if needs_hidden:
            part = products.input_gradient(ctx, gradient, weight)
            grad_hidden, leaving = start_summing(part, ctx.mesh)
        # The bias and weight gradients overlap with the sum of the input gradient.
        grad_bias = _bias_gradient(ctx, grads[0])
        if needs_weight:
            grad_weight = give_product(ctx, start, products.weight_product(ctx, gradient))
        leaving.wait()
        if grad_hidden is not None:
            grad_hidden = grad_hidden.to(ctx.hidden_dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None


class RowLinear(torch.autograd.Function):
    """End of a tensor-parallel region.

    Forward ``y = sum(x @ W^T) + b``; backward ``dx = gather(dy) @ W``, ``dW = gather(dy)^T @ x``
    and ``db = sum of the rows of dy``, with ``gather`` and ``sum`` as for :class:`ColumnLinear`.
    """

    @staticmethod
    def border(ctx: Any) -> BoundaryGradients | None:
        """Return the border at which the region ends: the output is summed before the bias."""
        if ctx.mesh.tp.size == 1:
            return None
        shares = ctx.mesh.sequence_parallel
        return BoundaryGradients((True, True, shares), takes_parts=shares)

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Shaped[Tensor, "..."],
        weight: Shaped[Tensor, "..."],
        bias: Shaped[Tensor, "..."] | None,
        mesh: ParallelMesh,
        products: LayerProducts,
        magnitude: Magnitude | None,
    ) -> Shaped[Tensor, "..."]:
        _remember(ctx, hidden, weight, bias, mesh, products)
        return products.multiply_and_sum(ctx, hidden, weight, bias, magnitude)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, *grads: Shaped[Tensor, "..."]
    ) -> tuple[Shaped[Tensor, "..."] | None, ...]:
        products: LayerProducts = ctx.products
        inputs, weight = products.saved(ctx)
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        arriving = products.gather_gradient(ctx, grads[0], weight)
        grad_bias = _bias_gradient(ctx, grads[0])
        gradient, grad_hidden = arriving()
        grad_weight = None
        if needs_hidden:
            if grad_hidden is None:
                grad_hidden = products.input_gradient(ctx, gradient, weight)
            grad_hidden = grad_hidden.to(ctx.hidden_dtype)
        if needs_weight:
            start = partial(ready, partial(ready, inputs))
            grad_weight = give_product(ctx, start, products.weight_product(ctx, gradient))
        return grad_hidden, grad_weight, grad_bias, None, None, None


class LayerProducts:
    """Products of a linear layer in the dtype of its input, by torch or a kernel of this package.

    Subclasses compute in other formats of numbers, and have factors of other types. ``x`` is the
    input, ``W`` the weight, ``b`` the bias and ``dy`` the gradient of the output;
    :class:`ColumnLinear` and :class:`RowLinear` say what ``gather`` and ``sum`` are. Every method
    gets the context of the layer, with the attributes that ``_remember`` sets. What
    :meth:`receive` and :meth:`weight_product` return must not keep the context: a deferred weight
    gradient would keep the graph alive that computed the inputs.
    """

    def gather_and_multiply(
        self, ctx: Any, x: Any, weight: Any, bias: Any, magnitude: Magnitude | None
    ) -> Shaped[Tensor, "..."]:
        """Return ``gather(x) @ W^T + b``, and save what the backward pass needs of ``x`` and ``W``.

        The magnitude of ``x`` is None if it is not known.
        """
        _save_operands(ctx, x, weight)
        tp = ctx.mesh.tp
        if not ctx.mesh.sequence_parallel:
            return linear(x, weight, bias)
        if not tp.overlaps_matmul:
            return F.linear(all_gather_sequence(x, tp), weight, bias)
        _, output = all_gather_matmul(x, weight.t(), tp, keep=False)
        return add_bias(output, bias)

    def multiply_and_sum(
        self, ctx: Any, x: Any, weight: Any, bias: Any, magnitude: Magnitude | None
    ) -> Shaped[Tensor, "..."]:
        """Return ``sum(x @ W^T) + b``, and save as :meth:`gather_and_multiply` does."""
        _save_operands(ctx, x, weight)
        tp = ctx.mesh.tp
        if tp.size == 1:
            return linear(x, weight, bias)
        if ctx.mesh.sequence_parallel:
            return add_bias(matmul_reduce_scatter(x, weight.t(), tp), bias)
        # No other code has a reference to the partial result, so the sum may overwrite it.
        part = linear(x, weight)
        return add_bias(one_shot_all_reduce_(part, tp, "sum"), bias)

    def saved(self, ctx: Any) -> tuple[Any, Any]:
        """Return the saved input and weight; one that no gradient needs may be None."""
        hidden, weight = ctx.saved_tensors
        return None if hidden is None else hidden.detach(), weight

    def receive(
        self, ctx: Any, grad: Any, inputs: Any
    ) -> tuple[Any, Callable[[], Callable[[], Any]]]:
        """Return ``dy`` of a column layer as factor, and the result of :func:`start_early` for the
        function that starts ``gather(x)`` of the saved input.
        """
        # The all-gather overlaps with the input gradient.
        return grad, start_early(ctx, partial(_start_inputs, inputs, ctx.mesh))

    def gather_gradient(
        self, ctx: Any, grad: Any, weight: Any
    ) -> Callable[[], tuple[Any, Shaped[Tensor, "..."] | None]]:
        """Start ``gather(dy)`` of a row layer; return the function that waits for it.

        The function returns ``dy`` as factor, and ``dy @ W`` of the saved weight if that product
        overlaps with the communication, else None.
        """
        mesh = ctx.mesh
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        if mesh.sequence_parallel and mesh.tp.overlaps_matmul and weight is not None:
            matrix = weight.to(grad.dtype)
            full, grad_hidden = all_gather_matmul(grad, matrix, mesh.tp, keep=needs_weight)
            return partial(ready, (grad if full is None else full, grad_hidden))
        if mesh.sequence_parallel and (needs_hidden or needs_weight):
            full, arriving = start_gathering(grad, mesh)
            return partial(_after, arriving, (full, None))
        return partial(ready, (grad, None))

    def input_gradient(self, ctx: Any, gradient: Any, weight: Any) -> Shaped[Tensor, "..."]:
        """Return ``dy @ W`` of a factor and the saved weight."""
        # Under autocast the gradient may have a narrower dtype than the weight.
        product = torch.mm(as_rows(gradient), weight.to(gradient.dtype))
        return product.view(*gradient.shape[:-1], weight.shape[1])

    def weight_product(self, ctx: Any, gradient: Any) -> Callable[[Any], GradientProduct]:
        """Return the function that returns ``dy^T @ x`` for the ``x`` that has arrived."""
        rows = as_rows(gradient.detach())
        return lambda inputs: MatrixProduct(rows, as_rows(inputs).to(rows.dtype))


_NATIVE = LayerProducts()


def _save_operands(ctx: Any, x: Tensor, weight: Tensor) -> None:
    """Save each operand only if the gradient of the other is needed."""
    kept_input = x if ctx.needs_input_grad[1] else None
    kept_weight = weight if ctx.needs_input_grad[0] else None
    ctx.save_for_backward(kept_input, kept_weight)


def _remember(
    ctx: Any,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    mesh: ParallelMesh,
    products: LayerProducts,
) -> None:
    """Store in the context what the backward pass needs besides tensors."""
    ctx.mesh = mesh
    ctx.products = products
    ctx.hidden_shape = hidden.shape
    ctx.hidden_dtype = hidden.dtype
    ctx.weight_dtype = weight.dtype
    ctx.bias_dtype = None if bias is None else bias.dtype
    # Slots are looked up in the forward pass: a weight that is frozen here gets no gradient, even
    # if it is unfrozen before the backward pass.
    ctx.weight_slot = slot_of(weight)
    ctx.bias_slot = slot_of(bias)


def start_early(ctx: Any, start: Callable[[], T]) -> Callable[[], T]:
    """Start the communication of the inputs of a column layer, unless the weight half starts it.

    ``start`` returns the function that waits for the inputs, and so does the result.
    """
    if ctx.needs_input_grad[1] and open_queue(ctx) is None:
        return partial(ready, start())
    return start


def dtype_of_products(hidden: Float[Tensor, "*tokens in_features"]) -> torch.dtype:
    """Return the dtype of a linear layer's products: that of autocast, or that of the input."""
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype


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


def _start_inputs(hidden: Tensor | None, mesh: ParallelMesh) -> Callable[[], Tensor]:
    """Start to gather the inputs of a column layer; return the function that waits for them."""
    assert hidden is not None, "inputs are kept if the weight gradient needs them"
    if not mesh.sequence_parallel:
        return partial(ready, hidden)
    full, arriving = start_gathering(hidden, mesh)
    return partial(_after, arriving, full)


def _after(arriving: Pending, value: T) -> T:
    arriving.wait()
    return value


def _bias_gradient(ctx: Any, grad: Tensor) -> Tensor | None:
    """Return the gradient of the bias; None if it is not needed or went to a slot."""
    if not ctx.needs_input_grad[2]:
        return None
    if ctx.bias_slot is not None:
        ctx.bias_slot.add(as_rows(grad).sum(0, dtype=ctx.bias_slot.dtype))
        return None
    return as_rows(grad).sum(0).to(ctx.bias_dtype)


def ready(value: T) -> T:
    """Return the argument; ``partial(ready, x)`` stands for a transfer that is complete."""
    return value


def open_queue(ctx: Any) -> WeightGradientQueue | None:
    """Return the queue for the weight gradient; None if the gradient is computed at once."""
    slot = ctx.weight_slot
    return None if slot is None or not ctx.needs_input_grad[1] else slot.open_queue


def give_product(
    ctx: Any, start: Callable[[], Callable[[], T]], multiply: Callable[[T], GradientProduct]
) -> Float[Tensor, "out_local in_local"] | None:
    """Add a weight gradient to its slot, defer it to the weight half, or return it.

    Args:
        start: Function that starts the communication of the inputs, and returns the function that
            waits for them and returns them.
    """
    queue = open_queue(ctx)
    slot = ctx.weight_slot
    if queue is not None:
        queue.put(partial(_start_product, slot, start, multiply), slot.slots)
        return None
    product = multiply(start()())
    if slot is None:
        return product.value().to(ctx.weight_dtype)
    slot.add_computed(product)
    return None


def _start_product(
    slot: GradientSlot | StackedSlot,
    start: Callable[[], Callable[[], T]],
    multiply: Callable[[T], GradientProduct],
) -> Add:
    """Start the communication of a deferred product; the result adds it."""
    inputs = start()
    return lambda: slot.add_computed(multiply(inputs()))
