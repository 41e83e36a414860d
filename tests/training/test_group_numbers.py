"""The table of an optimizer's groups holds their hyperparameters in float32 and keeps its address."""

from __future__ import annotations

import math
from typing import Any

import torch

from lightning_megatron.training.group_numbers import GroupNumbers, numbers_of

GROUP = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def test_numbers_of_a_group_hold_every_hyperparameter() -> None:
    lr, high1, low1, high2, low2, *later_numbers = numbers_of(GROUP, is_decoupled=True)
    assert lr == 0.01
    assert [high1 + low1, high2 + low2] == [math.log(0.9), math.log(0.95)]
    assert high1 == float(torch.tensor(high1)) != math.log(0.9)
    assert later_numbers == [0.9, 1 - 0.9, 0.95, 1 - 0.95, 1e-8, 0.01 * 0.1, 0.0]
    assert numbers_of(GROUP, is_decoupled=False)[10] == 0.1
    assert math.exp(numbers_of(GROUP | {"betas": (0.0, 0.9)}, True)[1]) == 0.0


def test_the_table_is_written_in_place_if_a_number_has_changed() -> None:
    numbers = GroupNumbers(torch.device("cpu"))
    groups: list[dict[str, Any]] = [dict(GROUP), GROUP | {"lr": 0.5}]
    numbers.fill(groups, [True, False])
    first, second = numbers.rows
    expected = [numbers_of(groups[0], True), numbers_of(groups[1], False)]
    assert torch.equal(torch.stack((first, second)), torch.tensor(expected))
    groups[1]["lr"] = 0.25
    numbers.fill(groups, [True, False])
    assert second[0] == 0.25, "the row is still that of the table"
    second.zero_()
    numbers.fill(groups, [True, False])
    assert not second.any(), "nothing is copied if no number has changed"
    numbers.fill([*groups, groups[0]], [True, False, True])
    assert len(numbers.rows) == 3
    assert numbers.rows[1][0] == 0.25
