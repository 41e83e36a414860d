"""Collectives that autograd sees, and that run beside what is computed between their start and the wait for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_megatron.groups.axis import MeshAxis
from lightning_megatron.groups.pending import Pending, start_all_gather, start_exchange_rows, start_reduce_scatter

#: Starts a collective of a tensor; returns where its result will be, and what to wait for.
Start = Callable[[Tensor], tuple[Tensor, Pending]]


class InFlight:
    """Hold a tensor on its way between ranks.

    Backward the other way round: what gradients need is started where the result was waited for, and waited for where
    it was started. Autograd runs later nodes first, so that the backward of what was computed between the two in the
    forward pass runs beside the communication of the backward pass.

    Args:
        x: What is sent; where there is nothing to send, what :meth:`wait` returns.
        forward: Starts its way.
        backward: Starts the way of the gradient of what arrives.
    """

    def __init__(self, x: Tensor, forward: Start | None = None, backward: Start | None = None) -> None:
        self._backward = backward
        self._pending = Pending()
        self._returning: tuple[Tensor, Pending] | None = None
        self._result: Tensor | None = x if forward is None else _Departure.apply(x, self, forward)

    def wait(self) -> Tensor:
        """Return what arrives, once: autograd keeps this object, and would keep the tensor with it."""
        result, self._result = self._result, None
        assert result is not None, "what arrives is taken once"
        return result if self._backward is None else _Arrival.apply(result, self)


def start_all_gather_sequence(x: Tensor, axis: MeshAxis) -> InFlight:
    """Start what :func:`groups.collectives.all_gather_sequence` does along the first dimension.

    Shapes: x ``(N, ...)``; what arrives ``(axis.size * N, ...)``.
    """
    if axis.group is None:
        return InFlight(x)

    def gather(x: Tensor) -> tuple[Tensor, Pending]:
        whole = x.new_empty((axis.size * x.shape[0], *x.shape[1:]))
        return whole, start_all_gather(whole, x.contiguous(), axis)

    def scatter(grad: Tensor) -> tuple[Tensor, Pending]:
        own = grad.new_empty((grad.shape[0] // axis.size, *grad.shape[1:]))
        return own, start_reduce_scatter(own, grad.contiguous(), axis)

    return InFlight(x, gather, scatter)


def start_row_exchange(x: Tensor, sends: Sequence[int], receives: Sequence[int], axis: MeshAxis) -> InFlight:
    """Start what :func:`groups.collectives.exchange_rows` does.

    Shapes: x ``(sum(sends), ...)``; what arrives ``(sum(receives), ...)``.
    """
    if axis.group is None:
        return InFlight(x)

    def exchange(outgoing: Sequence[int], incoming: Sequence[int]) -> Start:
        def start(x: Tensor) -> tuple[Tensor, Pending]:
            result = x.new_empty((sum(incoming), *x.shape[1:]))
            return result, start_exchange_rows(result, x.contiguous(), outgoing, incoming, axis)

        return start

    return InFlight(x, exchange(sends, receives), exchange(receives, sends))


class _Departure(torch.autograd.Function):
    """Start a collective; backward wait for the one of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, flight: InFlight, start: Start) -> Tensor:
        ctx.flight = flight
        result, flight._pending = start(x)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # What autograd hands over is the gradient before its way: it has the shape that autograd checks.
        assert ctx.flight._returning is not None, "the gradient's way starts where the result was waited for"
        gradient, pending = ctx.flight._returning
        ctx.flight._returning = None
        pending.wait()
        return gradient, None, None


class _Arrival(torch.autograd.Function):
    """Wait for a collective; backward start the one of the gradient."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, flight: InFlight) -> Tensor:
        ctx.flight = flight
        flight._pending.wait()
        return result.view_as(result)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.flight._returning = ctx.flight._backward(grads[0])
        return grads[0], None
