"""Auxiliary losses that a layer attaches to an activation of the main loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_megatron.shapes import Float


class LossWeight:
    """Factor of the current microbatch's main loss before its backward pass.

    The code that runs the microbatches sets it, and layers read it when they attach a loss. A
    tensor may be filled in until the backward pass of its microbatch. A pipeline stage that does
    not compute the main loss receives the weight only then.
    """

    def __init__(self, value: float | Float[Tensor, ""] = 1.0) -> None:
        self.value = value


def attach_loss(
    x: Float[Tensor, "*shape"], loss: Float[Tensor, ""], scale: float | Float[Tensor, ""]
) -> Float[Tensor, "*shape"]:
    """Return ``x`` unchanged, and add the gradient of ``loss`` to the backward pass through it.

    The output equals ``x``. The gradients are those of ``main loss x its factor + loss x scale``.

    The caller must ensure three things in each forward pass of a microbatch:

    * The main loss of this microbatch depends on ``x``, possibly through later stages. Otherwise no
      backward pass reaches ``x``, and ``loss`` gets no gradient. A router attaches its losses to
      its probabilities.
    * ``scale`` is the factor of the main loss of this microbatch before its backward pass. It is
      the weight of the microbatch in the step (``1 / number`` for microbatches of equal weight)
      times the loss scale, if there is one. A stage that does not compute the main loss must
      receive this factor. A tensor is read during the backward pass, so a captured graph uses its
      current value, and a weight such as a token count may be filled in late. Microbatches that are
      in flight together need one tensor each, unless the tensor is written before each backward
      pass.
    * ``loss`` is this rank's part under the rule in the docstring of ``experts.routing.balance``.
      Weights that see only this rank's tokens are ``partial``, and gradients are averaged over the
      data group. The loss is attached once on every tp rank. Without sequence parallelism, too,
      each tp rank computes the whole gradient of its replicated parameters.

    Args:
        x: Activation that the main loss depends on.
        loss: Additional loss, multiplied by its coefficient.
        scale: Factor of the loss in the backward pass.
    """
    return _Attached.apply(x, loss, scale)


class _Attached(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, scale: float | Tensor) -> Tensor:
        ctx.scale = scale
        ctx.loss_dtype = loss.dtype
        ctx.loss_device = loss.device
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # The gradient is a copy, because the executor may reuse the tensor for another microbatch.
        if isinstance(ctx.scale, Tensor):
            start = ctx.scale.detach().to(ctx.loss_device, ctx.loss_dtype, copy=True)
        else:
            start = torch.full((), ctx.scale, dtype=ctx.loss_dtype, device=ctx.loss_device)
        return grads[0], start, None
