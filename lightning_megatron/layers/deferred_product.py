"""Weight gradients that are added to their slots at once, or deferred to the weight half."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from torch import Tensor

from lightning_megatron.layers.gradient_slot import GradientProduct, GradientSlot, StackedSlot
from lightning_megatron.layers.weight_gradient_queue import Add, WeightGradientQueue
from lightning_megatron.shapes import Float

T = TypeVar("T")


def ready(value: T) -> T:
    """Return the argument; ``partial(ready, x)`` stands for a transfer that is complete."""
    return value


def open_queue(ctx: Any) -> WeightGradientQueue | None:
    """Return the queue for the weight gradient; None if the gradient is computed at once."""
    slot = ctx.weight_slot
    return None if slot is None or not ctx.needs_input_grad[1] else slot.open_queue


def give_product(
    ctx: Any, start: Callable[[], Callable[[], T]], multiply: Callable[[T], GradientProduct]
) -> Float[Tensor, "out_local in_local"] | None:
    """Add a weight gradient to its slot, defer it to the weight half, or return it.

    Args:
        ctx: Context of the layer.
        start: Function that starts the communication of the inputs, and returns the function that
            waits for them and returns them.
        multiply: Function that returns the product with the inputs.

    Returns:
        The gradient in the dtype of the weight if the weight has no slot, else None.
    """
    queue = open_queue(ctx)
    slot = ctx.weight_slot
    if queue is not None:
        queue.put(partial(_start_product, slot, start, multiply), slot.slots)
        return None
    product = multiply(start()())
    if slot is None:
        return product.value().to(ctx.weight_dtype)
    slot.add_computed(product)
    return None


def _start_product(
    slot: GradientSlot | StackedSlot,
    start: Callable[[], Callable[[], T]],
    multiply: Callable[[T], GradientProduct],
) -> Add:
    """Start the communication of a deferred product, and return the function that adds it."""
    inputs = start()
    return lambda: slot.add_computed(multiply(inputs()))
