"""Distribution of the gradients of several weights to their slots or to autograd."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lightning_megatron.layers.gradient_slot import GradientSlot
from lightning_megatron.shapes import Float


def add_to_slots(
    gradients: Float[Tensor, "experts *shape"],
    weights: Sequence[Float[Tensor, "*shape"]],
    slots: Sequence[GradientSlot | None],
    needed: Sequence[bool],
) -> list[Float[Tensor, "*shape"] | None]:
    """Add the gradients of weights to their slots, and return those of weights without slots.

    Args:
        gradients: Gradients of all weights as one stack.
        weights: One weight for each expert.
        slots: Slot of each weight; None means that autograd accumulates its gradient.
        needed: Whether each weight needs a gradient.

    Returns:
        Gradient of each weight for autograd; None if the gradient is in a slot or not needed.
    """
    remaining: list[Tensor | None] = [None] * len(weights)
    for number, (weight, slot) in enumerate(zip(weights, slots, strict=True)):
        if slot is not None:
            slot.add(gradients[number])
        elif needed[number]:
            remaining[number] = gradients[number].to(weight.dtype)
    return remaining
