"""Hook that moves gradients from autograd into gradient slots."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.layers.gradient_slot import GradientSlot


def move_hook(slot: GradientSlot) -> Callable[[nn.Parameter], None]:
    """Return the hook that moves a parameter's gradient from autograd into a slot.

    Raises:
        UnsupportedError: In the hook, if the gradient is not dense.
    """

    def hook(parameter: nn.Parameter) -> None:
        gradient = parameter.grad
        parameter.grad = None
        if gradient is None:
            return
        if gradient.layout != torch.strided:
            raise UnsupportedError(
                f"gradients must be dense: one of shape {tuple(parameter.shape)} is "
                f"{gradient.layout}. Flat buffers hold dense tensors only. Use sparse=False in the "
                "embedding."
            )
        slot.add(gradient)

    return hook
