"""The place where a parameter's gradient is summed over the microbatches of a step, outside of autograd's ``.grad``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from lightning_megatron.layers.stacked_view import stacked_view

_ATTRIBUTE = "gradient_slot"
_HALF = (torch.float16, torch.bfloat16)


class GradientSlot:
    """Sum a parameter's gradients in a given tensor, which may be wider than the parameter.

    The first gradient of a step overwrites what is there, so nobody has to clear the tensor before.

    Args:
        gradient: The sum, of the parameter's local shape.
        on_gradient: Called after every addition.
        accepts: Tells whether gradients count now; those that come while it says no are dropped.
    """

    def __init__(
        self, gradient: Tensor, on_gradient: Callable[[], None], accepts: Callable[[], bool] = lambda: True
    ) -> None:
        self.gradient = gradient
        self.is_empty = True
        self._on_gradient, self._accepts = on_gradient, accepts

    @torch.no_grad()
    def add(self, gradient: Tensor) -> None:
        """Add a gradient of the parameter's shape, in any dtype."""
        if not self._accepts():
            return
        if self.is_empty:
            self.gradient.copy_(gradient)
        else:
            self.gradient.add_(gradient)
        self._added()

    @torch.no_grad()
    def add_product(self, left: Tensor, right: Tensor) -> None:
        """Add the weight gradient of a linear layer, ``left^T @ right``.

        Equal to ``add(left.t() @ right)``; half types on a GPU are multiplied and summed in the slot's float32 by one
        matrix product, without rounding to half and without a temporary.

        Shapes: left ``(N, out)``; right ``(N, in)``; the slot ``(out, in)``.
        """
        if not self._accepts():
            return
        if self.gradient.dtype == torch.float32 and left.is_cuda and left.dtype in _HALF and right.dtype == left.dtype:
            if self.is_empty:
                torch.mm(left.t(), right, out_dtype=torch.float32, out=self.gradient)
            else:
                torch.addmm(self.gradient, left.t(), right, out_dtype=torch.float32, out=self.gradient)
        elif self.gradient.dtype == left.dtype == right.dtype:
            torch.addmm(self.gradient, left.t(), right, beta=0 if self.is_empty else 1, out=self.gradient)
        else:
            self.add(left.t() @ right)
            return
        self._added()

    @torch.no_grad()
    def add_rows(self, index: Tensor, rows: Tensor) -> None:
        """Add the gradient of a table of which some rows were read.

        The result is the same in every run if at most one of the rows with equal index is not zero.

        Shapes: index ``(N)``; rows ``(N, D)`` in the slot's dtype; the slot ``(V, D)``.
        """
        if not self._accepts():
            return
        if self.is_empty:
            self.gradient.zero_()
        self.gradient.index_add_(0, index, rows)
        self._added()

    def clear(self) -> None:
        """Begin a new step."""
        self.is_empty = True

    def _added(self) -> None:
        self.is_empty = False
        self._on_gradient()


@torch.no_grad()
def add_to_all(slots: Sequence[GradientSlot], add: Callable[[Tensor, bool], None]) -> bool:
    """Let one kernel add the gradients of several parameters, and tell whether it could.

    It can where the slots lie at equal distances in one memory, all of them accept gradients, and either all hold a sum
    or none does. Otherwise nothing has happened, and each slot is to be given its own gradient.

    Args:
        slots: Of parameters of one shape, in the order of their places.
        add: Gets the sums as one tensor ``(E, *shape)``, and whether it is to overwrite what is there.
    """
    is_empty = slots[0].is_empty
    if not all(slot.is_empty == is_empty and slot._accepts() for slot in slots):
        return False
    sums = stacked_view([slot.gradient for slot in slots])
    if sums is None:
        return False
    add(sums, is_empty)
    for slot in slots:
        slot._added()
    return True


def slot_of(parameter: Tensor | None) -> GradientSlot | None:
    """Return where a parameter's gradient is summed; None where autograd keeps it, and for one that is frozen."""
    if parameter is None or not parameter.requires_grad:
        return None
    return getattr(parameter, _ATTRIBUTE, None)


def set_slot(parameter: nn.Parameter, slot: GradientSlot | None) -> None:
    """Attach a slot to a parameter, or take it away."""
    if slot is not None:
        setattr(parameter, _ATTRIBUTE, slot)
    elif hasattr(parameter, _ATTRIBUTE):
        delattr(parameter, _ATTRIBUTE)
