"""Losses and outputs of microbatches become the loss and the output of the batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron.pipeline.microbatch import Microbatch
from lightning_megatron.strategy.logs.merge import (
    loss_in,
    merge_outputs,
    token_count_in,
    token_counts_in,
    weighted_mean,
)
from lightning_megatron.strategy.step.microbatch_losses import MicrobatchLosses, choose_token_scale

NAN = float("nan")


def make_microbatches(*sizes: int) -> list[Microbatch]:
    return [Microbatch(torch.zeros(size, 4, dtype=torch.long), size) for size in sizes]


def run(
    losses: MicrobatchLosses, steps: list[tuple[float, Any]], dtype: torch.dtype = torch.float64
) -> Tensor:
    """Return the gradient of a weight that multiplies the loss of every microbatch."""
    weight = torch.ones((), dtype=dtype, requires_grad=True)
    for number, (value, count) in enumerate(steps):
        loss = weight * torch.tensor(value, dtype=dtype)
        output = loss if count is None else {"loss": loss, "num_tokens": count}
        scalar = losses.take(output, number)
        if scalar is not None:
            scalar.backward()
    assert weight.grad is not None
    return weight.grad


def test_losses_are_weighted_by_samples_without_token_counts() -> None:
    losses = MicrobatchLosses(make_microbatches(3, 1), factor=8.0, divisor=2, token_scale=4)
    gradient = run(losses, [(1.0, None), (5.0, None)])
    assert gradient.item() == 2.0 / 2 * 8.0
    assert (
        losses.counts,
        losses.report().item(),
        losses.num_tokens(torch.device("cpu")).item(),
    ) == (None, 1.0, 0.0)


@pytest.mark.parametrize("kind", [int, float, torch.tensor])
def test_losses_are_weighted_by_tokens_with_token_counts(kind: Any) -> None:
    losses = MicrobatchLosses(make_microbatches(2, 2, 2), factor=8.0, divisor=2, token_scale=16)
    gradient = run(losses, [(1.0, kind(6)), (5.0, kind(2)), (NAN, kind(0))])
    tokens = losses.num_tokens(torch.device("cpu"))
    assert tokens.dtype == torch.float64
    assert tokens.item() == 8 / 16
    # The optimizer's step divides by the tokens of all ranks and accumulated batches.
    assert (gradient / tokens).item() == 2.0 * 8.0
    assert losses.report().item() == 2.0


def test_zero_tokens_give_no_loss_for_backward_and_report_zero() -> None:
    losses = MicrobatchLosses(make_microbatches(1), factor=1.0, divisor=1, token_scale=4)
    assert losses.take({"loss": torch.tensor(NAN, requires_grad=True), "num_tokens": 0}, 0) is None
    assert losses.report().item() == 0.0
    assert losses.num_tokens(torch.device("cpu")).item() == 0.0


def test_half_precision_losses_are_weighted_and_reported_in_float32() -> None:
    losses = MicrobatchLosses(make_microbatches(1, 1), factor=1.0, divisor=1, token_scale=1)
    value = torch.tensor(100.0, dtype=torch.float16, requires_grad=True)
    scalar = losses.take({"loss": value, "num_tokens": 5000}, 0)
    assert scalar is not None
    assert (scalar.dtype, scalar.item()) == (torch.float32, 500_000.0)
    losses.take({"loss": value.detach() + 1, "num_tokens": 5000}, 1)
    assert losses.dtype == torch.float32
    assert losses.report().item() == 100.5


def test_token_counts_for_only_some_microbatches_are_refused() -> None:
    losses = MicrobatchLosses(make_microbatches(1, 1), factor=1.0, divisor=1, token_scale=1)
    losses.take({"loss": torch.ones(()), "num_tokens": 1}, 0)
    with pytest.raises(ValueError, match="for every microbatch or for none"):
        losses.take(torch.ones(()), 1)


def test_token_scale_is_a_power_of_two_near_the_tokens_of_a_batch() -> None:
    assert choose_token_scale(make_microbatches(3, 2)) == 16
    assert choose_token_scale(make_microbatches(4)) == 16
    assert choose_token_scale([Microbatch(torch.zeros(3), 3)]) == 2
    assert choose_token_scale([]) == 1


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
