"""States of several gradient slots at once."""

from __future__ import annotations

import pytest
import torch

from lightning_megatron.layers.gradient_slot import GradientSlot
from lightning_megatron.layers.slot_states import (
    fill_empty,
    mark_filled,
    preserve_states,
    state_of,
)


def slots_over(*values: float) -> tuple[list[GradientSlot], list[int]]:
    """Return slots over memory with these values, and a list that counts their notices."""
    notices: list[int] = []
    slots = [
        GradientSlot(torch.full((2,), value), lambda index=index: notices.append(index))
        for index, value in enumerate(values)
    ]
    return slots, notices


def test_slots_are_empty_filled_or_mixed() -> None:
    slots, notices = slots_over(1.0, 2.0)
    assert state_of(slots) == "empty"
    slots[0].add(torch.ones(2))
    assert state_of(slots) == "mixed"
    mark_filled(slots, {})
    assert state_of(slots) == "filled"
    assert notices == [0], "a mark is no notice"
    assert state_of([]) == "empty"


def test_a_mixed_state_is_resolved_by_zeros_in_the_empty_slots_only() -> None:
    slots, notices = slots_over(float("nan"), float("nan"))
    slots[0].add(torch.full((2,), 3.0))
    fill_empty(slots)
    assert state_of(slots) == "filled"
    assert notices == [0]
    for slot in slots:
        slot.add(torch.full((2,), 4.0))
    assert [slot.gradient.tolist() for slot in slots] == [[7.0, 7.0], [4.0, 4.0]]


def test_states_come_back_after_a_block_that_changed_them_or_failed() -> None:
    slots, _ = slots_over(1.0, 2.0)
    slots[0].add(torch.ones(2))

    def change() -> None:
        with preserve_states(slots):
            slots[0].clear()
            slots[1].add(torch.ones(2))
            raise KeyError

    with pytest.raises(KeyError):
        change()
    assert [slot.is_empty for slot in slots] == [False, True]
