"""Differentiable collectives that overlap with computation between their start and their wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_megatron.groups.axis import MeshAxis
from lightning_megatron.groups.pending import (
    Pending,
    start_all_gather,
    start_all_to_all,
    start_reduce_scatter,
)

#: Function that starts a collective, and returns the tensor for the result and the handle to wait
#: for.
Start = Callable[[Tensor], tuple[Tensor, Pending]]


class InFlight:
    """Tensor in flight between ranks, whose start and wait autograd records.

    Backward reverses the order: the gradient's collective starts where forward waited, and
    completes where forward started. Autograd runs later nodes first. The backward of the
    computation between start and wait therefore overlaps with the gradient's collective.

    Args:
        x: Tensor to send. Without ``forward``, :meth:`wait` returns it.
    """

    def __init__(
        self, x: Tensor, forward: Start | None = None, backward: Start | None = None
    ) -> None:
        self._backward = backward
        self._pending = Pending()
        self._returning: tuple[Tensor, Pending] | None = None
        self._result: Tensor | None = x if forward is None else _Departure.apply(x, self, forward)

    def wait(self) -> Tensor:
        """Return the result; call this once.

        This drops the object's reference to the result, because autograd keeps the object alive.
        """
        result = self._result
        self._result = None
        assert result is not None, "wait is called once"
        return result if self._backward is None else _Arrival.apply(result, self)


def start_all_gather_sequence(x: Tensor, axis: MeshAxis) -> InFlight:
    """Start :func:`groups.collectives.all_gather_sequence` along the first dimension.

    Shapes: x ``(N, ...)``; result ``(axis.size * N, ...)``.
    """
    if axis.group is None:
        return InFlight(x)

    def gather(x: Tensor) -> tuple[Tensor, Pending]:
        whole = x.new_empty((axis.size * x.shape[0], *x.shape[1:]))
        return whole, start_all_gather(whole, x.contiguous(), axis)

    def scatter(grad: Tensor) -> tuple[Tensor, Pending]:
        part = grad.new_empty((grad.shape[0] // axis.size, *grad.shape[1:]))
        return part, start_reduce_scatter(part, grad.contiguous(), axis)

    return InFlight(x, gather, scatter)


def start_all_to_all_rows(
    x: Tensor, sends: Sequence[int], receives: Sequence[int], axis: MeshAxis
) -> InFlight:
    """Start :func:`groups.collectives.all_to_all_rows`.

    Shapes: x ``(sum(sends), ...)``; result ``(sum(receives), ...)``.
    """
    if axis.group is None:
        return InFlight(x)

    def all_to_all(outgoing: Sequence[int], incoming: Sequence[int]) -> Start:
        def start(x: Tensor) -> tuple[Tensor, Pending]:
            result = x.new_empty((sum(incoming), *x.shape[1:]))
            return result, start_all_to_all(result, x.contiguous(), outgoing, incoming, axis)

        return start

    return InFlight(x, all_to_all(sends, receives), all_to_all(receives, sends))


class _Departure(torch.autograd.Function):
    """Start of a collective in forward, and wait for the gradient's collective in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, flight: InFlight, start: Start) -> Tensor:
        ctx.flight = flight
        result, flight._pending = start(x)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # `grads` is the gradient before its collective, which _Arrival.backward passes on only
        # because autograd checks its shape. The gradient of `x` is the result of that collective.
        assert ctx.flight._returning is not None, (
            "_Arrival.backward has started the gradient's collective"
        )
        gradient, pending = ctx.flight._returning
        ctx.flight._returning = None
        pending.wait()
        return gradient, None, None


class _Arrival(torch.autograd.Function):
    """Wait for a collective in forward, and start of the gradient's collective in backward."""

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
