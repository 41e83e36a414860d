"""States of several gradient slots at once, for backward passes that run without Python.

The first gradient of a step overwrites the sum in its slot, and later ones are added to it. Layers
choose between the two in Python, by :attr:`GradientSlot.is_empty`. A CUDA graph repeats the choice
of its capture, so a backward pass has two graphs: one for empty slots and one for filled slots. The
code that replays them chooses one by :func:`state_of`, and sets the flags that the pass would have
set by :func:`mark_filled`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor

from lightning_megatron.layers.gradient_slot import GradientSlot
from lightning_megatron.shapes import Int

#: ``empty`` if no slot has a sum, ``filled`` if all have one, ``mixed`` otherwise.
SlotState = Literal["empty", "filled", "mixed"]


def state_of(slots: Iterable[GradientSlot]) -> SlotState:
    """Return whether no slot, every slot or some slots hold a sum; ``empty`` without slots."""
    flags = {slot.is_empty for slot in slots}
    if len(flags) > 1:
        return "mixed"
    return "filled" if False in flags else "empty"


def mark_filled(
    slots: Iterable[GradientSlot], rows: Mapping[GradientSlot, tuple[Int[Tensor, "rows"], ...]]
) -> None:
    """Record that a replay added gradients to these slots, without a call of their owners.

    Args:
        slots: The slots.
        rows: Rows of the gradients, for slots that got only gradients of known rows. The tensors
            are copied, because the next replay overwrites them.
    """
    for slot in slots:
        slot_rows = rows.get(slot)
        slot.note_filled(None if slot_rows is None else tuple(index.clone() for index in slot_rows))


@torch.no_grad()
def fill_empty(slots: Iterable[GradientSlot]) -> None:
    """Fill the empty slots with zeros, so that a pass can add its gradients to all of them.

    This resolves a mixed state: adding to zeros equals overwriting.
    """
    for slot in slots:
        if slot.is_empty:
            slot.gradient.zero_()
            slot.is_empty = False


@contextmanager
def preserve_states(slots: Iterable[GradientSlot]) -> Iterator[None]:
    """Restore the current states of the slots when the block ends."""
    before = [(slot, slot.is_empty, slot.rows) for slot in slots]
    try:
        yield
    finally:
        for slot, is_empty, rows in before:
            slot.is_empty = is_empty
            slot.rows = rows
