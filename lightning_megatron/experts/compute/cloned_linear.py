"""Grouped linear layer whose last groups belong to clones of other ranks' experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_megatron.experts.compute import grouped_operator
from lightning_megatron.experts.compute.backends import Loop
from lightning_megatron.experts.compute.choose_backend import BackendName, choose_backend
from lightning_megatron.experts.compute.grouped_linear import hand_over
from lightning_megatron.layers.choose_kernels import warn_of_slow_path
from lightning_megatron.layers.gradient_slot import GradientSlot, slots_of
from lightning_megatron.shapes import Float, Int


class CloneSource(Protocol):
    """Interface of the way of weights to the clones on this rank, and of gradients back.

    All ranks call the methods in the same order, whatever the plan is.
    """

    def fetch(
        self, weights: Sequence[Float[Tensor, "out_local in_local"]]
    ) -> Float[Tensor, "places out_local in_local"]:
        """Return the weights of the clones on this rank; those of empty places are finite.

        Args:
            weights: One matrix of every expert at home on this rank.
        """

    def give_back(
        self, gradients: Float[Tensor, "places out_local in_local"]
    ) -> Float[Tensor, "homes out_local in_local"]:
        """Return the sum of the gradients of all clones of each of this rank's experts.

        Args:
            gradients: Gradient of the weight of every place of this rank.
        """


@torch.compiler.disable
def cloned_linear(
    rows: Float[Tensor, "rows in_local"],
    weights: Sequence[Float[Tensor, "out_local in_local"]],
    ends: Int[Tensor, "groups"],
    clones: CloneSource,
    backend: BackendName | None = None,
) -> Float[Tensor, "rows out_local"]:
    """Multiply each group of rows by the transpose of its own weight, or of a clone's weight.

    Equal to :func:`~lightning_megatron.experts.compute.grouped_linear.grouped_linear` with the
    weights of all homes and then of all clones. The gradient of an expert is complete, and reported
    to its slot once, after its clones on other ranks have given theirs back.

    The backward pass fetches the weights of clones again instead of keeping them. It computes the
    gradients of weights at once, also if slots have a queue for them, because other ranks wait for
    those of clones. The weights of all ranks are trained, or all are frozen.

    Args:
        rows: Rows sorted by group: first the homes, then the clones.
        weights: One weight for each home.
        ends: Index one past the last row of each group.
        clones: Way of weights and gradients between homes and clones.
        backend: Backend of the product; None asks :func:`choose_backend`.

    Communication: that of ``clones``: one fetch in the forward pass, a fetch and a return of
        gradients in the backward pass.
    """
    if backend is None:
        out_features, in_features = weights[0].shape
        sizes = len(weights), in_features, out_features
        backend = choose_backend(rows.device, rows.dtype, *sizes).backend
    if backend != "loop":
        warn_of_slow_path(
            "weights of experts and of their clones are copied side by side for each product, "
            "because the kernels take one stack of weights. Without clones nothing is copied."
        )
    implementation = grouped_operator.implementation_of(backend)
    return _ClonedLinear.apply(rows.contiguous(), ends, implementation, clones, *weights)


class _ClonedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        ends: Tensor,
        backend: type[Loop],
        clones: CloneSource,
        *weights: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(rows, ends, *weights)
        ctx.backend = backend
        ctx.clones = clones
        # Slots at the time of the forward pass, as in a product without clones.
        ctx.slots = slots_of(weights)
        return backend.output(rows, [*weights, *clones.fetch(weights).unbind()], ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, ends, *weights = ctx.saved_tensors
        grad = grads[0].contiguous()
        grad_rows = None
        if ctx.needs_input_grad[0]:
            every = [*weights, *ctx.clones.fetch(weights).unbind()]
            grad_rows = ctx.backend.input_gradient(grad, every, ends)
        slots = [slot for slot in ctx.slots if slot is not None]
        if len(slots) == len(weights):
            _add_to_slots(grad, rows, ends, ctx.backend, ctx.clones, slots)
            return grad_rows, None, None, None, *([None] * len(weights))
        if not any(ctx.needs_input_grad[4:]):
            return grad_rows, None, None, None, *([None] * len(weights))
        found = ctx.backend.weight_gradients(grad, rows, ends)
        homes, places = found.tensor_split((len(weights),))
        total = homes + ctx.clones.give_back(places)
        grad_weights = hand_over(total, weights, ctx.slots, ctx.needs_input_grad[4:])
        return grad_rows, None, None, None, *grad_weights


@torch.no_grad()
def _add_to_slots(
    grad: Tensor,
    rows: Tensor,
    ends: Tensor,
    backend: type[Loop],
    clones: CloneSource,
    slots: Sequence[GradientSlot],
) -> None:
    """Add the gradients of homes and of their clones to the homes' slots.

    The gradients of clones have the dtype of the slots on their way.
    """
    shape = (ends.shape[0] - len(slots), *slots[0].gradient.shape)
    sums = slots[0].gradient.new_zeros(shape)
    firsts = [slot.first_part() for slot in slots]
    places = [GradientSlot(one, on_gradient=lambda: None) for one in sums.unbind()]
    backend.add_weight_gradients(grad, rows, ends, [*firsts, *places])
    returned = clones.give_back(sums)
    for slot, first, last in zip(slots, firsts, returned.unbind(), strict=True):
        slot.add_last_part(first, last)
