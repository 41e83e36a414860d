"""Common state of several gradient slots: empty, filled or mixed."""

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


def make_slots(*values: float) -> tuple[list[GradientSlot], list[int]]:
    """Return slots over memory with these values, and a list of the slots that gave notice."""
    notices: list[int] = []
    slots = [
        GradientSlot(torch.full((2,), value), lambda index=index: notices.append(index))
        for index, value in enumerate(values)
    ]
    return slots, notices


def test_slots_are_empty_filled_or_mixed() -> None:
    slots, notices = make_slots(1.0, 2.0)
    assert state_of(slots) == "empty"
    slots[0].add(torch.ones(2))
    assert state_of(slots) == "mixed"
    mark_filled(slots, {})
    assert state_of(slots) == "filled"
    assert notices == [0], "a mark gives no notice"
    assert state_of([]) == "empty"


def test_fill_empty_writes_zeros_into_empty_slots_only() -> None:
    slots, notices = make_slots(float("nan"), float("nan"))
    slots[0].add(torch.full((2,), 3.0))
    fill_empty(slots)
    assert state_of(slots) == "filled"
    assert notices == [0]
    for slot in slots:
        slot.add(torch.full((2,), 4.0))
    assert [slot.gradient.tolist() for slot in slots] == [[7.0, 7.0], [4.0, 4.0]]


def test_preserve_states_restores_states_after_an_error() -> None:
    slots, _ = make_slots(1.0, 2.0)
    slots[0].add(torch.ones(2))

    def change() -> None:
        with preserve_states(slots):
            slots[0].clear()
            slots[1].add(torch.ones(2))
            raise KeyError

    with pytest.raises(KeyError):
        change()
    assert [slot.is_empty for slot in slots] == [False, True]
