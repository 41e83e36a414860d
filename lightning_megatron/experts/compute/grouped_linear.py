"""Grouped linear layer and the activation after it, as two operators or fused into one launch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.experts.compute import grouped_operator
from lightning_megatron.experts.compute.backends import Bundled, HomesAndClones, Loop
from lightning_megatron.experts.compute.choose_backend import BackendName, choose_backend
from lightning_megatron.layers.fused.choose_kernels import fused_kernels, warn_of_slow_path
from lightning_megatron.layers.mlp import activate
from lightning_megatron.layers.parameters.gradient_slot import (
    GradientSlot,
    SlotRow,
    add_to_slots,
    slots_of,
)
from lightning_megatron.layers.parameters.remade import Recipe
from lightning_megatron.plan.model_shape import Activation
from lightning_megatron.shapes import Float, Int

#: Kernels of activations times probabilities.
_FUSED: Mapping[Activation, str] = {
    "swiglu": "apply_weighted_swiglu",
    "clamped_swiglu": "apply_weighted_clamped_swiglu",
}
#: Function from rows, weights (or their stack) and ends to the output.
Output = Callable[[Tensor, Any, Tensor], Tensor]
#: Weights of one matrix of the clones on this rank, and the memory for their gradients.
CloneTensors = tuple[
    Float[Tensor, "places out_local in_local"], Float[Tensor, "places out_local in_local"]
]


def grouped_linear(
    rows: Float[Tensor, "rows in_local"],
    weights: Sequence[Float[Tensor, "out_local in_local"]],
    ends: Int[Tensor, "experts"],
    backend: BackendName | None = None,
    recipe: Recipe | None = None,
    clones: CloneTensors | None = None,
) -> Float[Tensor, "rows out_local"]:
    """Multiply each group of rows by the transpose of its own weight.

    Equal to ``linear(rows[ends[e - 1]:ends[e]], weights[e])`` for every group ``e``, with int32
    ends on the device of rows. Rows past the last end are neither read nor written, forward and
    backward: their values in the output and in the gradient of ``rows`` are undefined. The weight
    of an empty group has a gradient of zeros.

    The gradient of a weight with a gradient slot is added to the slot. The bundled kernels
    accumulate it in float32 if the slots have a constant stride in one buffer. If all weights have
    slots, the product may be left to the weight half of the backward pass.

    Weights with a constant stride in one buffer, in order, are used in place. Other weights are
    first copied into one tensor. Pass a stack as ``stack.unbind()``.

    Under ``torch.compile`` this is a single operator, and gradients reach slots through autograd.
    The dtype of rows is that of the product, also under autocast.

    With clones the last groups are theirs. The backward pass reads their weights again, and
    computes weight gradients at once, because other ranks wait for those of clones. It reports no
    gradient to its slot: the transport does so when it has added those of clones on other ranks.

    Args:
        backend: Backend of the product; None asks :func:`choose_backend` at each call.
        recipe: How the backward pass recomputes the rows; None keeps them. ``torch.compile``
            decides itself what to keep.
        clones: Weights and gradients of the clones on this rank, without ``torch.compile``; None
            without places for clones.
    """
    weights = tuple(weights)
    if torch.compiler.is_compiling():
        return grouped_operator.grouped_linear(rows, weights, ends, backend)
    if backend is None:
        out_features, in_features = weights[0].shape
        backend = choose_backend(
            rows.device, rows.dtype, len(weights), in_features, out_features
        ).backend
    if backend == "grouped_mm" and clones is not None:
        warn_of_slow_path(
            "weights of experts and of their clones are copied side by side for each product, "
            "because torch's grouped product takes one stack of weights. The bundled kernels copy "
            "nothing (lightning-megatron kernels build), and without clones nothing is copied."
        )
    implementation = grouped_operator.implementation_of(backend)
    output = implementation.output
    return _differentiable_product(rows, weights, ends, implementation, output, recipe, clones)


def grouped_swiglu(
    rows: Float[Tensor, "rows hidden"],
    weights: Sequence[Float[Tensor, "gate_up hidden"]],
    probabilities: Float[Tensor, "rows"],
    ends: Int[Tensor, "experts"],
    recipe: Recipe | None = None,
    clones: CloneTensors | None = None,
) -> tuple[Float[Tensor, "rows gate_up//2"], Recipe | None]:
    """Multiply each group of rows by its weight, apply SwiGLU, and scale rows by probabilities.

    Equal to ``silu(gate) * up * probability`` with
    ``gate, up = grouped_linear(rows, weights, ends).chunk(2, -1)``. The product is rounded to the
    dtype of rows before the activation, so the result equals that of the two separate operators.
    Their kernels compute the gradients, from the product that the forward pass saves. With
    gradients off the product is not stored. This includes the first forward pass of recomputed
    experts.

    The rules of :func:`grouped_linear` hold for weights, slots, ends, clones and rows past the last
    end.
    The rows must be in bfloat16 on a GPU that the bundled kernels and the Triton kernels support.

    Returns:
        The result, and how to recompute it from the product that is kept; None without gradients.

    Source: Shazeer 2020.
    """
    kernels = _require_kernels(rows)
    weights = tuple(weights)
    factors = probabilities.detach().float().contiguous()
    if not torch.is_grad_enabled():
        both = _with_clones(weights, clones)
        return Bundled.swiglu(rows.contiguous(), both, factors, ends, keep=False)[0], None
    # One launch computes product and activation, but autograd sees them as two operators.
    activated: list[Tensor] = []

    def output(rows: Tensor, weights: Any, ends: Tensor) -> Tensor:
        result, kept = Bundled.swiglu(rows, weights, factors, ends, keep=True)
        assert kept is not None, "the product is asked for"
        activated.append(result)
        return kept

    inner = _differentiable_product(rows, weights, ends, Bundled, output, recipe, clones)
    result = kernels.apply_weighted_swiglu(inner, probabilities, ends, activated[0])
    return result, Recipe.of(kernels.apply_weighted_swiglu, inner, probabilities, ends)


def _require_kernels(rows: Float[Tensor, "rows hidden"]) -> ModuleType:
    """Return the fused kernels of SwiGLU's gradients; raise ``UnsupportedError`` without them."""
    kernels = fused_kernels(rows)
    if kernels is None:
        raise UnsupportedError(
            "rows must be of a half type on a GPU with Triton, outside of autocast: they are "
            f"{rows.dtype} on {rows.device}. Only the Triton kernels compute the gradients of "
            "grouped_swiglu. Use grouped_linear and an activation."
        )
    return kernels


def weighted_activation(
    inner: Float[Tensor, "rows features"],
    probabilities: Float[Tensor, "rows"],
    ends: Int[Tensor, "experts"],
    activation: Activation,
) -> tuple[Float[Tensor, "rows ffn"], Recipe | None]:
    """Apply an activation to rows, and multiply each row by its probability.

    Rows past the last end are undefined.

    Returns:
        The result, and how to recompute it from the tensors that its gradients need; None inside
        ``torch.compile``.
    """
    kernels = fused_kernels(inner) if activation in _FUSED else None
    if kernels is not None:
        run = getattr(kernels, _FUSED[activation])
        return run(inner, probabilities, ends), Recipe.of(run, inner, probabilities, ends)
    activated = activate(inner, activation)
    result = _weighted(activated, probabilities)
    if torch.compiler.is_compiling():
        return result, None
    return result, Recipe.of(_weighted, activated, probabilities)


def _weighted(activated: Tensor, probabilities: Tensor) -> Tensor:
    return (activated * probabilities.unsqueeze(-1)).to(activated.dtype)


def _differentiable_product(
    rows: Tensor,
    weights: tuple[Tensor, ...],
    ends: Tensor,
    backend: type[Loop],
    output: Output,
    recipe: Recipe | None,
    clones: CloneTensors | None,
) -> Tensor:
    """Compute a grouped product with gradients, as documented in :func:`grouped_linear`."""
    rows = rows.contiguous()
    slots: list[GradientSlot] = []
    if torch.is_grad_enabled():
        slots = [slot for slot in slots_of(weights) if slot is not None]
    if len(slots) == len(weights):
        return _IntoSlots.apply(
            rows, ends, backend, output, recipe, clones, weights[0], weights, slots
        )
    return _GroupedLinear.apply(rows, ends, backend, output, recipe, clones, *weights)


class _IntoSlots(torch.autograd.Function):
    """Grouped product whose weights all have gradient slots, to which the backward pass adds.

    Autograd sees only the first weight, because every further tensor input costs more host time in
    autograd than its slot does.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        ends: Tensor,
        backend: type[Loop],
        output: Output,
        recipe: Recipe | None,
        clones: CloneTensors | None,
        first: Tensor,
        weights: tuple[Tensor, ...],
        slots: list[GradientSlot],
    ) -> Tensor:
        recipe = recipe or Recipe.of_tensor(rows)
        ctx.save_for_backward(ends, *recipe.tensors)
        ctx.make_rows = recipe.make
        ctx.backend = backend
        ctx.clones = clones
        ctx.weights = weights
        ctx.slots = slots
        # The weights bypass `save_for_backward`, so the check for in-place changes is made here.
        ctx.versions = _versions(weights)
        # None unless the stack is a view: a copy would stay in memory until the backward pass.
        ctx.view = SlotRow.of(slots).stacked_weights(weights)
        return output(rows, _with_clones(weights if ctx.view is None else ctx.view, clones), ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ends, *kept = ctx.saved_tensors
        if _versions(ctx.weights) != ctx.versions:
            raise RuntimeError(
                "weights must not change between a forward and its backward pass: one of a grouped "
                "product was modified by an inplace operation. The gradient would be wrong. Step "
                "the optimizer after the backward pass."
            )
        grad = grads[0].contiguous()
        # Weight gradients come first, so that recomputed rows need no memory at the same time as
        # the next gradient.
        rows = ctx.make_rows(*kept)
        if ctx.clones is None:
            _add_or_queue(ctx.backend, grad, rows, ends, ctx.slots)
        else:
            slots = HomesAndClones(_first_parts(ctx.slots), _slots_of_memory(ctx.clones))
            ctx.backend.add_weight_gradients(grad, rows, ends, slots)
        del rows
        grad_rows = None
        if ctx.needs_input_grad[0]:
            weights = _with_clones(ctx.weights if ctx.view is None else ctx.view, ctx.clones)
            grad_rows = ctx.backend.input_gradient(grad, weights, ends)
        return grad_rows, None, None, None, None, None, None, None, None


def _add_or_queue(
    backend: type[Loop], grad: Tensor, rows: Tensor, ends: Tensor, slots: list[GradientSlot]
) -> None:
    """Add weight gradients to slots, or leave that to the weight half of the backward pass."""
    queue = slots[0].open_queue
    if queue is None:
        backend.add_weight_gradients(grad, rows, ends, slots)
        return
    # The tensors are detached, because the rows would keep the graph that computed them. The
    # product needs no communication, so its start does nothing but return it.
    left = partial(backend.add_weight_gradients, grad.detach(), rows.detach(), ends, slots)
    queue.put(lambda: left, slots)


def _versions(weights: tuple[Tensor, ...]) -> list[int]:
    return [weight._version for weight in weights]


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        ends: Tensor,
        backend: type[Loop],
        output: Output,
        recipe: Recipe | None,
        clones: CloneTensors | None,
        *weights: Tensor,
    ) -> Tensor:
        recipe = recipe or Recipe.of_tensor(rows)
        needs_weights = any(ctx.needs_input_grad[6:])
        ctx.save_for_backward(ends, *weights, *(recipe.tensors if needs_weights else ()))
        ctx.make_rows = recipe.make if needs_weights else None
        ctx.backend = backend
        ctx.clones = clones
        # These are the slots at the time of the forward pass: a weight that is frozen now gets no
        # gradient, even if it is unfrozen before the backward pass.
        ctx.slots = slots_of(weights)
        return output(rows, _with_clones(weights, clones), ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ends, *tensors = ctx.saved_tensors
        weights = tensors[: len(ctx.slots)]
        kept = tensors[len(ctx.slots) :]
        grad = grads[0].contiguous()
        grad_weights: list[Tensor | None] = [None] * len(weights)
        if ctx.make_rows is not None:
            gradients = ctx.backend.weight_gradients(grad, ctx.make_rows(*kept), ends)
            slots = ctx.slots
            if ctx.clones is not None:
                ctx.clones[1].copy_(gradients[len(weights) :])
                slots = _first_parts(slots)
            grad_weights = add_to_slots(gradients, weights, slots, ctx.needs_input_grad[6:])
        grad_rows = None
        if ctx.needs_input_grad[0]:
            both = _with_clones(weights, ctx.clones)
            grad_rows = ctx.backend.input_gradient(grad, both, ends)
        return grad_rows, None, None, None, None, None, *grad_weights


def _with_clones(weights: Sequence[Tensor] | Tensor, clones: CloneTensors | None) -> Any:
    return weights if clones is None else HomesAndClones(weights, clones[0])


def _first_parts(slots: Sequence[GradientSlot | None]) -> list[GradientSlot | None]:
    return [None if slot is None else slot.first_part() for slot in slots]


def _slots_of_memory(clones: CloneTensors) -> list[GradientSlot]:
    return [GradientSlot(gradient, on_gradient=lambda: None) for gradient in clones[1]]
