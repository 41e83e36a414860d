"""Losses of layers inside a model, which the backward pass of the main loss starts without being told of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class LossWeight:
    """Say what the main loss of the microbatch that runs now is multiplied by before its backward pass.

    Layers read it when they attach a loss; whoever runs the microbatches sets it. A tensor may be filled in until the
    backward pass of its microbatch: a stage that does not compute the main loss learns of its weight no earlier.

    Args:
        value: The weight.
    """

    def __init__(self, value: float | Tensor = 1.0) -> None:
        self.value = value


def attach_loss(x: Tensor, loss: Tensor, scale: float | Tensor) -> Tensor:
    """Return ``x``, whose backward pass also starts one at ``loss``.

    Equal to ``x``; gradients are those of ``main loss x its factor + loss x scale``.

    What the caller owes, in each forward pass of a microbatch:

    * ``x`` leads to the main loss of this microbatch, also through later stages: a backward pass that does not come
      by brings the loss no gradient. The probabilities of a router do.
    * ``scale`` is what the main loss of this microbatch is multiplied by before its backward pass: the weight of the
      microbatch in the step (one over their number, where they are alike) times the loss scale, if there is one. A
      stage that does not compute the main loss must be told. A tensor is read in the backward pass: so a captured graph
      follows it, and a weight that is found late, such as a count of tokens, can be filled in until then. Microbatches
      in flight at once need a tensor each.
    * ``loss`` is this rank's part by the rule at the head of ``experts.balance``: weights that see only this rank's
      tokens are ``partial``, and gradients are averaged over the data group. It is attached once: on each tp rank
      without sequence parallelism, too, as every one of them makes the whole gradient of what it holds a copy of.

    Shapes: x any; loss a number.

    Args:
        x: What the main loss is computed from.
        loss: What else to minimise, coefficient included.
        scale: Factor of the loss in the backward pass.
    """
    return _Attached.apply(x, loss, scale)


class _Attached(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, scale: float | Tensor) -> Tensor:
        ctx.scale, ctx.loss_dtype, ctx.loss_device = scale, loss.dtype, loss.device
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if isinstance(ctx.scale, Tensor):
            start = ctx.scale.detach().to(ctx.loss_device, ctx.loss_dtype, copy=True)
        else:
            start = torch.full((), ctx.scale, dtype=ctx.loss_dtype, device=ctx.loss_device)
        return grads[0], start, None
