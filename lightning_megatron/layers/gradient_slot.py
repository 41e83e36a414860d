"""The place where a parameter's gradient is summed over the microbatches of a step, outside of autograd's ``.grad``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.layers.stacked_view import stacked_view

_ATTRIBUTE = "gradient_slot"
_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Owner:
    """Hold what several slots ask and tell whoever sums their gradients, in one call for all of them.

    Args:
        accepts: Tells whether gradients of all of them count now.
        on_gradients: Called after an addition to each.
    """

    accepts: Callable[[], bool]
    on_gradients: Callable[[], None]


class GradientSlot:
    """Sum a parameter's gradients in a given tensor, which may be wider than the parameter.

    The first gradient of a step overwrites what is there, so nobody has to clear the tensor before.

    Args:
        gradient: The sum, of the parameter's local shape.
        on_gradient: Called after every addition.
        accepts: Tells whether gradients count now; those that come while it says no are dropped.
        join: Returns the owner of several slots that were given the same ``join``; None asks and tells one by one.
        scale: What every gradient is multiplied by before it is added.
    """

    def __init__(
        self,
        gradient: Tensor,
        on_gradient: Callable[[], None],
        accepts: Callable[[], bool] = lambda: True,
        join: Callable[[Sequence[GradientSlot]], Owner] | None = None,
        scale: float = 1.0,
    ) -> None:
        self.gradient, self.scale = gradient, scale
        self.is_empty = True
        self._on_gradient, self._accepts, self._join = on_gradient, accepts, join
        self._row: SlotRow | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Return the type of the sum."""
        return self.gradient.dtype

    @torch.no_grad()
    def add(self, gradient: Tensor) -> None:
        """Add a gradient of the parameter's shape, in any dtype."""
        if not self._accepts():
            return
        if self.is_empty:
            self.gradient.copy_(gradient)
            if self.scale != 1:
                self.gradient.mul_(self.scale)
        else:
            self.gradient.add_(gradient, alpha=self.scale)
        self._added()

    @torch.no_grad()
    def add_sum(self, parts: Tensor) -> None:
        """Add a gradient that comes in parts, which are summed where the slot is, if they may.

        Equal to ``add(parts.sum(0))``.

        Shapes: parts ``(N, *shape)``.
        """
        if not self._accepts():
            return
        if not self.is_empty or self.scale != 1 or self.gradient.dtype != parts.dtype:
            self.add(parts.sum(0))
            return
        torch.sum(parts, 0, out=self.gradient)
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
        if _add_product(self.gradient, left, right, is_empty=self.is_empty, scale=self.scale):
            self._added()
        else:
            self.add(left.t() @ right)

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
        self.gradient.index_add_(0, index, rows, alpha=self.scale)
        self._added()

    def clear(self) -> None:
        """Begin a new step."""
        self.is_empty = True

    def _added(self) -> None:
        self.is_empty = False
        self._on_gradient()


class SlotRow:
    """Several slots that one kernel adds to: those of parameters of one shape, at equal distances in one memory.

    Args:
        slots: The slots, in the order of their places.
    """

    def __init__(self, slots: Sequence[GradientSlot]) -> None:
        self._slots = tuple(slots)
        #: What every gradient is multiplied by before it is added.
        self.scale = slots[0].scale
        is_one_scale = all(slot.scale == self.scale for slot in slots)
        #: The sums as one tensor ``(E, *shape)``; None where they do not lie so, or are of different scales.
        self.sums = stacked_view([slot.gradient for slot in slots]) if is_one_scale else None
        self.is_contiguous = slots[0].gradient.is_contiguous()
        self._owner = self.owner_of(slots)
        self._places: list[int] | None = None
        self._weights: Tensor | None = None

    @staticmethod
    def of(slots: Sequence[GradientSlot]) -> SlotRow:
        """Return the row of these slots, which the first of them remembers: a slot's memory never changes."""
        row = slots[0]._row
        if row is None or row._slots != tuple(slots):
            row = slots[0]._row = SlotRow(slots)
        return row

    def stacked_weights(self, weights: Sequence[Tensor]) -> Tensor | None:
        """Return :func:`stacked_view` of the parameters, which is looked for again when they have moved only."""
        places = [weight.data_ptr() for weight in weights]
        if places != self._places:
            self._places, self._weights = places, stacked_view(weights)
        return self._weights

    @torch.no_grad()
    def add(self, add: Callable[[Tensor, bool], None]) -> bool:
        """Let one kernel add the gradients of all parameters, and tell whether it could.

        It can where the sums are one tensor, all slots accept gradients, and either all hold a sum or none does.
        Otherwise nothing has happened, and each slot is to be given its own gradient.

        Args:
            add: Gets the sums as one tensor, and whether it is to overwrite what is there; it applies :attr:`scale`.
        """
        states = [slot.is_empty for slot in self._slots]
        is_empty = states[0]
        if self.sums is None or states.count(is_empty) != len(states) or not self._owner.accepts():
            return False
        add(self.sums, is_empty)
        for slot in self._slots:
            slot.is_empty = False
        self._owner.on_gradients()
        return True

    @staticmethod
    def owner_of(slots: Sequence[GradientSlot]) -> Owner:
        """Return what stands for all slots together before whoever sums their gradients."""
        joins = [slot._join for slot in slots]
        join = joins[0] if joins.count(joins[0]) == len(joins) else None
        if join is not None:
            return join(slots)

        def tell() -> None:
            for slot in slots:
                slot._on_gradient()

        return Owner(lambda: all(slot._accepts() for slot in slots), tell)


class StackedSlot:
    """Sum the gradient of a product's weight for several parameters, which are its rows.

    Equal to giving the slot of each parameter its rows of every gradient. One matrix product adds to all of them where
    their sums are neighbours in memory.

    Args:
        slots: The slots of the parameters, from the first row to the last.
        rows: Rows of each parameter (elements).
    """

    def __init__(self, slots: Sequence[GradientSlot], rows: Sequence[int]) -> None:
        self.slots = tuple(slots)
        self._rows = list(rows)
        self._owner = SlotRow.owner_of(slots)
        self._whole = self._joined_sums()

    @property
    def dtype(self) -> torch.dtype:
        """Return the type of the sums."""
        return self.slots[0].dtype

    def add(self, gradient: Tensor) -> None:
        """Add a gradient of the shape of all parameters, one below the other."""
        for slot, part in zip(self.slots, gradient.split(self._rows), strict=True):
            slot.add(part)

    def add_product(self, left: Tensor, right: Tensor) -> None:
        """Add ``left^T @ right``, as :meth:`GradientSlot.add_product` does.

        Shapes: left ``(N, out)``; right ``(N, in)``.
        """
        first, states = self.slots[0], [slot.is_empty for slot in self.slots]
        if self._whole is None or states.count(states[0]) != len(states) or not self._owner.accepts():
            for slot, part in zip(self.slots, left.split(self._rows, dim=1), strict=True):
                slot.add_product(part, right)
            return
        with torch.no_grad():
            if not _add_product(self._whole, left, right, is_empty=states[0], scale=first.scale):
                self.add(left.t() @ right)
                return
        for slot in self.slots:
            slot.is_empty = False
        self._owner.on_gradients()

    def _joined_sums(self) -> Tensor | None:
        """Return the sums as one tensor; None where they are not neighbours or differ in scale or type."""
        first, end = self.slots[0], self.slots[0].gradient.data_ptr()
        for slot in self.slots:
            one = slot.gradient
            if one.data_ptr() != end or slot.scale != first.scale or one.dtype != first.dtype:
                return None
            end += one.nbytes
        shape = (sum(self._rows), *first.gradient.shape[1:])
        return first.gradient.as_strided(shape, first.gradient.stride())


def _add_product(sums: Tensor, left: Tensor, right: Tensor, *, is_empty: bool, scale: float) -> bool:
    """Add ``left^T @ right`` by one matrix product, and return whether there is one for these types."""
    factors = {"beta": 0 if is_empty else 1, "alpha": scale}
    if sums.dtype == torch.float32 and left.is_cuda and left.dtype in _HALF and right.dtype == left.dtype:
        torch.addmm(sums, left.t(), right, out_dtype=torch.float32, out=sums, **factors)
    elif sums.dtype == left.dtype == right.dtype:
        torch.addmm(sums, left.t(), right, out=sums, **factors)
    else:
        return False
    return True


def slot_of(parameter: Tensor | None) -> Any:
    """Return where a parameter's gradient is summed; None where autograd keeps it, and for one that is frozen.

    A parameter with hooks of its own gets its gradient by autograd, which runs them; not where blocks are compiled.

    Returns:
        A :class:`GradientSlot`, of several parameters in a row a :class:`StackedSlot`, or None.
    """
    if parameter is None or not parameter.requires_grad:
        return None
    slot = getattr(parameter, _ATTRIBUTE, None)
    if slot is None or torch.compiler.is_compiling():
        return slot
    return None if parameter._backward_hooks else slot


def slots_of(parameters: Sequence[Tensor]) -> list[GradientSlot | None]:
    """Return the slot of each parameter, as :func:`slot_of` does."""
    return [slot_of(one) for one in parameters]


def set_slot(parameter: Tensor, slot: GradientSlot | StackedSlot | None) -> None:
    """Attach a slot to a parameter, or take it away."""
    if slot is not None:
        setattr(parameter, _ATTRIBUTE, slot)
    elif hasattr(parameter, _ATTRIBUTE):
        delattr(parameter, _ATTRIBUTE)
