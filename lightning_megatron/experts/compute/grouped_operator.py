"""Grouped products as custom operators of torch, for tracing and recording of operators."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from lightning_megatron.experts.compute.backends import BACKENDS, Loop, Weights
from lightning_megatron.experts.compute.choose_backend import BackendName, choose_backend
from lightning_megatron.layers.parameters.gradient_slot import GradientSlot, SlotRow
from lightning_megatron.shapes import Float, Int

_NAME = "lightning_megatron::grouped_linear"


@torch.library.custom_op(
    _NAME,
    mutates_args=(),
    schema="(Tensor rows, Tensor[] weights, Tensor ends, str? backend) -> Tensor",
)
def _output(rows: Tensor, weights: Sequence[Tensor], ends: Tensor, backend: str | None) -> Tensor:
    out_features, in_features = weights[0].shape
    implementation = _backend(rows, ends, in_features, out_features, backend)
    return implementation.output(rows.contiguous(), weights, ends)


@torch.library.custom_op(
    f"{_NAME}_input_gradient",
    mutates_args=(),
    schema="(Tensor grad, Tensor[] weights, Tensor ends, str? backend) -> Tensor",
)
def _input_gradient(
    grad: Tensor, weights: Sequence[Tensor], ends: Tensor, backend: str | None
) -> Tensor:
    out_features, in_features = weights[0].shape
    implementation = _backend(grad, ends, in_features, out_features, backend)
    return implementation.input_gradient(grad.contiguous(), weights, ends)


@torch.library.custom_op(
    f"{_NAME}_weight_gradients",
    mutates_args=(),
    schema="(Tensor grad, Tensor rows, Tensor ends, str? backend) -> Tensor",
)
def _weight_gradients(grad: Tensor, rows: Tensor, ends: Tensor, backend: str | None) -> Tensor:
    implementation = _backend(rows, ends, rows.shape[1], grad.shape[1], backend)
    return implementation.weight_gradients(grad.contiguous(), rows.contiguous(), ends)


@torch.library.custom_op(
    f"{_NAME}_add_weight_gradients",
    mutates_args=("sums",),
    schema=(
        "(Tensor grad, Tensor rows, Tensor ends, Tensor(a!)[] sums, bool[] are_empty, "
        "bool[] are_accepted, float[] scales) -> ()"
    ),
)
def _add_weight_gradients(
    grad: Tensor,
    rows: Tensor,
    ends: Tensor,
    sums: Sequence[Tensor],
    are_empty: Sequence[bool],
    are_accepted: Sequence[bool],
    scales: Sequence[float],
) -> None:
    # An operator takes tensors and numbers alone, so the slots are built again here.
    slots = []
    for gradient_sum, is_empty, is_accepted, scale in zip(
        sums, are_empty, are_accepted, scales, strict=True
    ):
        accepts = partial(bool, is_accepted)
        slot = GradientSlot(gradient_sum, on_gradient=lambda: None, accepts=accepts, scale=scale)
        slot.is_empty = is_empty
        slots.append(slot)
    Loop.add_weight_gradients(grad, rows, ends, slots)


@_output.register_fake
def _(rows: Tensor, weights: Sequence[Tensor], ends: Tensor, backend: str | None) -> Tensor:
    return rows.new_empty((rows.shape[0], weights[0].shape[0]))


@_input_gradient.register_fake
def _(grad: Tensor, weights: Sequence[Tensor], ends: Tensor, backend: str | None) -> Tensor:
    return grad.new_empty((grad.shape[0], weights[0].shape[1]))


@_weight_gradients.register_fake
def _(grad: Tensor, rows: Tensor, ends: Tensor, backend: str | None) -> Tensor:
    return grad.new_empty((ends.shape[0], grad.shape[1], rows.shape[1]))


@_add_weight_gradients.register_fake
def _(
    grad: Tensor,
    rows: Tensor,
    ends: Tensor,
    sums: Sequence[Tensor],
    are_empty: Sequence[bool],
    are_accepted: Sequence[bool],
    scales: Sequence[float],
) -> None:
    return None


def _keep(
    ctx: Any, inputs: tuple[Tensor, Sequence[Tensor], Tensor, str | None], output: Tensor
) -> None:
    rows, weights, ends, ctx.backend = inputs
    ctx.save_for_backward(rows, ends, *weights)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, list[Tensor | None], None, None]:
    rows, ends, *weights = ctx.saved_tensors
    needs_rows, needs_weights = ctx.needs_input_grad[:2]
    grad_rows = _input_gradient(grad, weights, ends, ctx.backend) if needs_rows else None
    grad_weights: list[Tensor | None] = [None] * len(weights)
    if any(needs_weights):
        gradients = _weight_gradients(grad, rows, ends, ctx.backend).unbind()
        grad_weights = [
            gradient.to(weight.dtype) if needed else None
            for gradient, weight, needed in zip(gradients, weights, needs_weights, strict=True)
        ]
    return grad_rows, grad_weights, None, None


_output.register_autograd(_differentiate, setup_context=_keep)


def grouped_linear(
    rows: Float[Tensor, "rows in_local"],
    weights: Sequence[Float[Tensor, "out_local in_local"]],
    ends: Int[Tensor, "experts"],
    backend: BackendName | None = None,
) -> Float[Tensor, "rows out_local"]:
    """Call ``torch.ops.lightning_megatron.grouped_linear``, which can be traced.

    Equal to :func:`experts.compute.grouped_linear.grouped_linear` for weights without gradient
    slots. If the backend is None, the operator chooses one when it runs.
    """
    return cast(Tensor, _output(rows, list(weights), ends, backend))


class LoopOperators(Loop):
    """Loop over groups, each product of which is one operator of torch.

    A recording of the operators inside the loop would keep the ends of the recorded call, because
    the loop reads them on the host. A recording of whole products reads them whenever it is run.
    """

    @staticmethod
    def output(
        rows: Float[Tensor, "rows in_local"],
        weights: Weights,
        ends: Int[Tensor, "experts"],
    ) -> Float[Tensor, "rows out_local"]:
        """Return rows times the transposes of weights."""
        return cast(Tensor, _output(rows, list(weights), ends, "loop"))

    @staticmethod
    def input_gradient(
        grad: Float[Tensor, "rows out_local"],
        weights: Weights,
        ends: Int[Tensor, "experts"],
    ) -> Float[Tensor, "rows in_local"]:
        """Return the gradient of rows."""
        return cast(Tensor, _input_gradient(grad, list(weights), ends, "loop"))

    @staticmethod
    def weight_gradients(
        grad: Float[Tensor, "rows out_local"],
        rows: Float[Tensor, "rows in_local"],
        ends: Int[Tensor, "experts"],
    ) -> Float[Tensor, "experts out_local in_local"]:
        """Return the gradients of all weights as one stack."""
        return cast(Tensor, _weight_gradients(grad, rows, ends, "loop"))

    @staticmethod
    def add_weight_gradients(
        grad: Float[Tensor, "rows out_local"],
        rows: Float[Tensor, "rows in_local"],
        ends: Int[Tensor, "experts"],
        slots: Sequence[GradientSlot],
    ) -> None:
        """Add the gradient of every weight to its slot."""
        scales = [slot.scale for slot in slots]
        SlotRow.of(slots).add_each(
            lambda sums, are_empty, are_accepted: _add_weight_gradients(
                grad, rows, ends, sums, are_empty, are_accepted, scales
            )
        )


def implementation_of(backend: BackendName) -> type[Loop]:
    """Return the implementation of a backend, each product of which is one operator of torch."""
    return LoopOperators if backend == "loop" else BACKENDS[backend]


def _backend(
    tensor: Tensor, ends: Tensor, in_features: int, out_features: int, backend: str | None
) -> type[Loop]:
    if backend is None:
        num_groups = ends.shape[0]
        backend = choose_backend(
            tensor.device, tensor.dtype, num_groups, in_features, out_features
        ).backend
    return BACKENDS[cast(BackendName, backend)]
