"""Grouped linear layer whose last groups belong to clones of other ranks' experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_megatron.experts.compute import grouped_operator
from lightning_megatron.experts.compute.backends import Bundled, Loop
from lightning_megatron.experts.compute.choose_backend import BackendName, choose_backend
from lightning_megatron.experts.compute.grouped_linear import require_kernels
from lightning_megatron.layers.fused.choose_kernels import warn_of_slow_path
from lightning_megatron.layers.parameters.gradient_slot import (
    GradientSlot,
    add_to_slots,
    cached_stack,
    slots_of,
)
from lightning_megatron.layers.parameters.remade import Recipe
from lightning_megatron.shapes import Float, Int

#: Function from rows, weights of homes, weights of clones and ends to the output.
Output = Callable[[Tensor, Sequence[Tensor] | Tensor, Tensor, Tensor], Tensor]


class CloneSource(Protocol):
    """Transfer of one matrix of experts to their clones on this rank, and of gradients back.

    All ranks call the methods in the same order, whatever the plan is.
    """

    @property
    def plan(self) -> tuple[Int[Tensor, "..."], ...]:
        """Return the tensors of the plan that the methods read."""

    def for_plan(self, *plan: Int[Tensor, "..."]) -> CloneSource:
        """Return the transfer for another plan, such as one that a recomputation has computed."""

    def fetch(
        self, weights: Sequence[Float[Tensor, "out_local in_local"]]
    ) -> Float[Tensor, "places out_local in_local"]:
        """Return the weights of the clones on this rank; those of empty places have no rows."""

    def gradients(
        self, like: Float[Tensor, "out_local in_local"]
    ) -> Float[Tensor, "places out_local in_local"]:
        """Return the tensor for the gradients of this rank's clones, in the dtype of ``like``."""

    def give_back(
        self, gradients: Float[Tensor, "places out_local in_local"]
    ) -> Float[Tensor, "homes out_local in_local"] | None:
        """Return the sum of the gradients of all clones of each of this rank's experts.

        ``gradients`` is the tensor of :meth:`gradients`, with every place of this rank written.
        None means that the backward pass of the transport adds them to the experts' gradients.
        """


@torch.compiler.disable
def cloned_linear(
    rows: Float[Tensor, "rows in_local"],
    weights: Sequence[Float[Tensor, "out_local in_local"]],
    ends: Int[Tensor, "groups"],
    clones: CloneSource,
    backend: BackendName | None = None,
    recipe: Recipe | None = None,
) -> Float[Tensor, "rows out_local"]:
    """Multiply each group of rows by the transpose of its own weight, or of a clone's weight.

    Equal to :func:`~lightning_megatron.experts.compute.grouped_linear.grouped_linear` with the
    weights of all homes and then of all clones. The gradient of an expert is complete, and reported
    to its slot once, after its clones on other ranks have returned theirs.

    The backward pass fetches the weights of clones again instead of keeping them. It computes
    weight gradients at once, even if slots have a queue for them, because other ranks wait for
    those of clones. The weights of all ranks must be trained, or all frozen.

    Communication: that of ``clones``: one fetch in the forward pass, a fetch and a return of
        gradients in the backward pass.
    """
    if backend is None:
        out_features, in_features = weights[0].shape
        choice = choose_backend(rows.device, rows.dtype, len(weights), in_features, out_features)
        backend = choice.backend
    if backend == "grouped_mm":
        warn_of_slow_path(
            "weights of experts and of their clones are copied side by side for each product, "
            "because torch's grouped product takes one stack of weights. The bundled kernels copy "
            "nothing (lightning-megatron kernels build), and without clones nothing is copied."
        )
    implementation = grouped_operator.implementation_of(backend)
    output = implementation.output_of_both
    return _ClonedLinear.apply(
        rows.contiguous(), ends, implementation, output, clones, recipe, *weights
    )


@torch.compiler.disable
def cloned_swiglu(
    rows: Float[Tensor, "rows hidden"],
    weights: Sequence[Float[Tensor, "gate_up hidden"]],
    probabilities: Float[Tensor, "rows"],
    ends: Int[Tensor, "groups"],
    clones: CloneSource,
    recipe: Recipe | None = None,
) -> tuple[Float[Tensor, "rows gate_up//2"], Recipe | None]:
    """Multiply rows as :func:`cloned_linear` does, apply SwiGLU, and scale by probabilities.

    Equal to :func:`~lightning_megatron.experts.compute.grouped_linear.grouped_swiglu` with the
    weights of all homes and then of all clones. The rows must be of the same kind.

    Communication: that of :func:`cloned_linear`.
    """
    kernels = require_kernels(rows)
    factors = probabilities.detach().float().contiguous()
    if not torch.is_grad_enabled():
        result, _ = Bundled.swiglu_of_both(
            rows.contiguous(), weights, clones.fetch(weights), factors, ends, keep=False
        )
        return result, None
    # One launch computes product and activation, but autograd sees them as two operators.
    activated: list[Tensor] = []

    def output(
        rows: Tensor, homes: Sequence[Tensor] | Tensor, clones: Tensor, ends: Tensor
    ) -> Tensor:
        result, kept = Bundled.swiglu_of_both(rows, homes, clones, factors, ends, keep=True)
        assert kept is not None, "the product is asked for"
        activated.append(result)
        return kept

    inner = _ClonedLinear.apply(rows.contiguous(), ends, Bundled, output, clones, recipe, *weights)
    result = kernels.apply_weighted_swiglu(inner, probabilities, ends, activated[0])
    return result, Recipe.of(kernels.apply_weighted_swiglu, inner, probabilities, ends)


class _ClonedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        ends: Tensor,
        backend: type[Loop],
        output: Output,
        clones: CloneSource,
        recipe: Recipe | None,
        *weights: Tensor,
    ) -> Tensor:
        recipe = recipe or Recipe.of_tensor(rows)
        ctx.save_for_backward(ends, *clones.plan, *weights, *recipe.tensors)
        ctx.num_plan = len(clones.plan)
        ctx.make_rows = recipe.make
        ctx.backend = backend
        ctx.clones = clones
        # These are the slots at the time of the forward pass, as in a product without clones.
        ctx.slots = slots_of(weights)
        return output(rows, _stack_or_all(weights, ctx.slots), clones.fetch(weights), ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ends, *tensors = ctx.saved_tensors
        first = ctx.num_plan
        last = first + len(ctx.slots)
        clones: CloneSource = ctx.clones.for_plan(*tensors[:first])
        weights = tensors[first:last]
        grad = grads[0].contiguous()
        grad_weights: list[Tensor | None] = [None] * len(weights)
        if any(ctx.needs_input_grad[6:]) or all(slot is not None for slot in ctx.slots):
            # Weight gradients come first, so that recomputed rows need no memory at the same time
            # as the next gradient.
            rows = ctx.make_rows(*tensors[last:])
            grad_weights = _weight_gradients(ctx, clones, grad, rows, ends, weights)
            del rows
        grad_rows = None
        if ctx.needs_input_grad[0]:
            homes = _stack_or_all(weights, ctx.slots)
            grad_rows = ctx.backend.input_gradient_of_both(grad, homes, clones.fetch(weights), ends)
        return grad_rows, None, None, None, None, None, *grad_weights


def _weight_gradients(
    ctx: Any,
    clones: CloneSource,
    grad: Tensor,
    rows: Tensor,
    ends: Tensor,
    weights: Sequence[Tensor],
) -> list[Tensor | None]:
    """Compute the gradients of homes and clones; return those of homes that autograd passes on."""
    needed = ctx.needs_input_grad[6:]
    slots = [slot for slot in ctx.slots if slot is not None]
    grad_weights: list[Tensor | None] = [None] * len(weights)
    if len(slots) == len(weights):
        places = clones.gradients(slots[0].gradient)
        parts = [slot.first_part() for slot in slots]
        ctx.backend.add_weight_gradients_of_both(grad, rows, ends, parts, places)
    else:
        gradients = ctx.backend.weight_gradients(grad, rows, ends)
        places = clones.gradients(weights[0])
        places.copy_(gradients[len(weights) :])
        parts_or_none = [None if slot is None else slot.first_part() for slot in ctx.slots]
        grad_weights = add_to_slots(gradients[: len(weights)], weights, parts_or_none, needed)
    returned = clones.give_back(places)
    if returned is None:
        return grad_weights
    rest = add_to_slots(returned, weights, ctx.slots, needed)
    return [
        None if gradient is None or returned_gradient is None else gradient + returned_gradient
        for gradient, returned_gradient in zip(grad_weights, rest, strict=True)
    ]


def _stack_or_all(
    weights: Sequence[Tensor], slots: Sequence[GradientSlot | None]
) -> Sequence[Tensor] | Tensor:
    """Return weights as one view, or else one by one."""
    view = cached_stack(weights, slots)
    return weights if view is None else view
