"""Outputs of microbatches are merged into the output of the batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_megatron.strategy.logs.merge import (
    loss_in,
    merge_outputs,
    token_count_in,
    token_counts_in,
    weighted_mean,
)


def test_scalars_are_averaged_over_samples() -> None:
    assert merge_outputs([torch.tensor(1.0), torch.tensor(4.0)], [2, 1]).item() == 2.0


def test_rows_and_lists_are_joined_in_order() -> None:
    rows = merge_outputs([torch.ones(2, 3), torch.zeros(1, 3)], [2, 1])
    assert rows.shape == (3, 3)
    assert merge_outputs([["a", "b"], ["c"]], [2, 1]) == ["a", "b", "c"]


def test_containers_are_merged_entry_by_entry() -> None:
    outputs = [
        {"loss": torch.tensor(float(i)), "ids": torch.tensor([i]), "kind": "x"} for i in range(2)
    ]
    merged = merge_outputs(outputs, [1, 1])
    assert (merged["loss"].item(), merged["ids"].tolist(), merged["kind"]) == (0.5, [0, 1], "x")
    assert merge_outputs([(1, torch.ones(1)), (1, torch.ones(1))], [1, 1])[1].shape == (2,)


@pytest.mark.parametrize(
    ("outputs", "expected"),
    [([], None), ([None, None], None), (["only"], "only"), (["a", "b"], ["a", "b"])],
)
def test_outputs_without_tensors_become_none_one_value_or_a_list(
    outputs: list[Any], expected: Any
) -> None:
    assert merge_outputs(outputs, [1] * len(outputs)) == expected


def test_rows_of_different_widths_are_not_joined() -> None:
    assert len(merge_outputs([torch.ones(1, 2), torch.ones(1, 3)], [1, 1])) == 2


@pytest.mark.parametrize(
    ("output", "words"), [({"other": 1}, "must have the key 'loss'"), (3.0, "must return the loss")]
)
def test_a_step_without_a_loss_is_refused(output: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        loss_in(output)


@pytest.mark.parametrize("count", [3, 3.0, torch.tensor(3), torch.tensor([3.0])])
def test_token_counts_on_the_host_become_numbers(count: Any) -> None:
    actual = token_count_in({"loss": 1.0, "num_tokens": count})
    assert not isinstance(actual, torch.Tensor)
    assert actual == 3


def test_token_counts_on_a_device_become_scalars_on_that_device() -> None:
    count = torch.tensor([3], device="meta")
    actual = token_count_in({"num_tokens": count})
    assert isinstance(actual, torch.Tensor)
    assert actual.shape == ()
    assert actual.device.type == "meta"


@pytest.mark.parametrize(
    "count", [-1, True, "3", float("nan"), torch.inf, torch.tensor(-2), torch.ones(2)]
)
def test_values_that_are_not_token_counts_are_refused(count: Any) -> None:
    with pytest.raises(ValueError, match="num_tokens must be a number of tokens"):
        token_count_in({"num_tokens": count})


def test_token_counts_must_come_from_all_microbatches_or_none() -> None:
    assert token_counts_in([torch.ones(()), {"loss": 1}, None]) is None
    assert token_counts_in([{"num_tokens": 2}, None, {"num_tokens": 0}]) == [2, 0, 0]
    with pytest.raises(ValueError, match="missing for 1 of 2, first for microbatch 1"):
        token_counts_in([{"num_tokens": 2}, {"loss": 1.0}])


@pytest.mark.parametrize("as_tensors", [False, True])
def test_values_with_zero_weight_do_not_affect_the_mean(as_tensors: bool) -> None:
    def mean(values: list[float], weights: list[int]) -> float:
        wrapped: Any = [torch.tensor(weight) for weight in weights] if as_tensors else weights
        return weighted_mean(torch.tensor(values, dtype=torch.float64), wrapped).item()

    nan = float("nan")
    assert mean([1.0, nan, 5.0], [3, 0, 1]) == 2.0
    assert mean([nan, nan], [0, 0]) == 0.0
    assert mean([2.0, 4.0], [5, 5]) == 3.0
