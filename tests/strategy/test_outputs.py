"""What microbatches return becomes what the batch would have returned."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_megatron.strategy.outputs import loss_in, merge_outputs


def test_scalars_are_averaged_over_samples() -> None:
    assert merge_outputs([torch.tensor(1.0), torch.tensor(4.0)], [2, 1]).item() == 2.0


def test_rows_and_lists_are_joined_in_order() -> None:
    rows = merge_outputs([torch.ones(2, 3), torch.zeros(1, 3)], [2, 1])
    assert rows.shape == (3, 3)
    assert merge_outputs([["a", "b"], ["c"]], [2, 1]) == ["a", "b", "c"]


def test_containers_are_merged_entry_by_entry() -> None:
    outputs = [{"loss": torch.tensor(float(i)), "ids": torch.tensor([i]), "kind": "x"} for i in range(2)]
    merged = merge_outputs(outputs, [1, 1])
    assert (merged["loss"].item(), merged["ids"].tolist(), merged["kind"]) == (0.5, [0, 1], "x")
    assert merge_outputs([(1, torch.ones(1)), (1, torch.ones(1))], [1, 1])[1].shape == (2,)


@pytest.mark.parametrize(
    ("outputs", "expected"), [([], None), ([None, None], None), (["only"], "only"), (["a", "b"], ["a", "b"])]
)
def test_other_values(outputs: list[Any], expected: Any) -> None:
    assert merge_outputs(outputs, [1] * len(outputs)) == expected


def test_rows_of_different_widths_stay_apart() -> None:
    assert len(merge_outputs([torch.ones(1, 2), torch.ones(1, 3)], [1, 1])) == 2


@pytest.mark.parametrize(("output", "words"), [({"other": 1}, "without the key 'loss'"), (3.0, "must return the loss")])
def test_a_step_without_a_loss_is_refused(output: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        loss_in(output)
