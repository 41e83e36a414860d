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
from lightning_megatron.strategy.step.microbatch_losses import MicrobatchLosses

NAN, CPU = float("nan"), torch.device("cpu")


def make_microbatches(*sizes: int) -> list[Microbatch]:
    return [Microbatch(torch.zeros(size, 4, dtype=torch.long), size) for size in sizes]


def losses_of(
    *sizes: int, factor: float = 1.0, divisor: int = 1, scale: int = 1
) -> MicrobatchLosses:
    return MicrobatchLosses(
        make_microbatches(*sizes), factor=factor, divisor=divisor, token_scale=scale
    )


def gradient_of(losses: MicrobatchLosses, steps: list[tuple[float, Any]]) -> Tensor:
    """Return the gradient of a weight that multiplies the loss of every microbatch."""
    weight = torch.ones((), dtype=torch.float64, requires_grad=True)
    for number, (value, count) in enumerate(steps):
        loss = weight * value
        scalar = losses.take(loss if count is None else {"loss": loss, "num_tokens": count}, number)
        if scalar is not None:
            scalar.backward()
    assert weight.grad is not None
    return weight.grad


def test_losses_are_weighted_by_samples_without_token_counts():
    losses = losses_of(3, 1, factor=8.0, divisor=2, scale=4)
    assert gradient_of(losses, [(1.0, None), (5.0, None)]).item() == 2.0 / 2 * 8.0
    assert losses.counts is None
    assert (losses.report().item(), losses.num_tokens(CPU).item()) == (1.0, 0.0)


@pytest.mark.parametrize("kind", [int, float, torch.tensor])
def test_losses_are_weighted_by_tokens_with_token_counts(kind):
    losses = losses_of(2, 2, 2, factor=8.0, divisor=2, scale=16)
    gradient = gradient_of(losses, [(1.0, kind(6)), (5.0, kind(2)), (NAN, kind(0))])
    tokens = losses.num_tokens(CPU)
    assert (tokens.dtype, tokens.item()) == (torch.float64, 8 / 16)
    # The optimizer's step divides by the tokens of all ranks and accumulated batches.
    assert (gradient / tokens).item() == 2.0 * 8.0
    assert losses.report().item() == 2.0


def test_zero_tokens_give_no_loss_for_backward_and_report_zero():
    losses = losses_of(1, scale=4)
    assert losses.take({"loss": torch.tensor(NAN, requires_grad=True), "num_tokens": 0}, 0) is None
    assert losses.report().item() == losses.num_tokens(CPU).item() == 0.0


def test_half_precision_losses_are_weighted_and_reported_in_float32():
    losses = losses_of(1, 1)
    value = torch.tensor(100.0, dtype=torch.float16, requires_grad=True)
    scalar = losses.take({"loss": value, "num_tokens": 5000}, 0)
    assert scalar is not None
    assert (scalar.dtype, scalar.item()) == (torch.float32, 500_000.0)
    losses.take({"loss": value.detach() + 1, "num_tokens": 5000}, 1)
    assert (losses.dtype, losses.report().item()) == (torch.float32, 100.5)


def test_outputs_are_averaged_joined_or_listed_entry_by_entry():
    assert merge_outputs([torch.tensor(1.0), torch.tensor(4.0)], [2, 1]).item() == 2.0
    assert merge_outputs([torch.ones(2, 3), torch.zeros(1, 3)], [2, 1]).shape == (3, 3)
    assert len(merge_outputs([torch.ones(1, 2), torch.ones(1, 3)], [1, 1])) == 2, "other widths"
    outputs = [
        {"loss": torch.tensor(float(i)), "ids": torch.tensor([i]), "kind": "x"} for i in range(2)
    ]
    merged = merge_outputs(outputs, [1, 1])
    assert (merged["loss"].item(), merged["ids"].tolist(), merged["kind"]) == (0.5, [0, 1], "x")
    assert merge_outputs([(1, torch.ones(1)), (1, torch.ones(1))], [1, 1])[1].shape == (2,)
    for given, expected in (
        ([["a", "b"], ["c"]], ["a", "b", "c"]),
        ([], None),
        ([None, None], None),
        (["only"], "only"),
        (["a", "b"], ["a", "b"]),
    ):
        assert merge_outputs(given, [1] * len(given)) == expected


def test_token_counts_on_the_host_become_numbers_and_those_on_a_device_scalars():
    for count in (3, 3.0, torch.tensor(3), torch.tensor([3.0])):
        actual = token_count_in({"loss": 1.0, "num_tokens": count})
        assert not isinstance(actual, Tensor)
        assert actual == 3
    on_device = token_count_in({"num_tokens": torch.tensor([3], device="meta")})
    assert isinstance(on_device, Tensor)
    assert (on_device.shape, on_device.device.type) == ((), "meta")


def test_token_counts_must_come_from_all_microbatches_or_none():
    assert token_counts_in([torch.ones(()), {"loss": 1}, None]) is None
    assert token_counts_in([{"num_tokens": 2}, None, {"num_tokens": 0}]) == [2, 0, 0]
    with pytest.raises(ValueError, match="missing for 1 of 2, first for microbatch 1"):
        token_counts_in([{"num_tokens": 2}, {"loss": 1.0}])
    losses = losses_of(1, 1)
    losses.take({"loss": torch.ones(()), "num_tokens": 1}, 0)
    with pytest.raises(ValueError, match="for every microbatch or for none"):
        losses.take(torch.ones(()), 1)


def test_outputs_without_a_loss_or_with_wrong_token_counts_are_refused():
    for output, words in (
        ({"other": 1}, "must have the key 'loss'"),
        (3.0, "must return the loss"),
    ):
        with pytest.raises(ValueError, match=words):
            loss_in(output)
    for count in (-1, True, "3", NAN, torch.inf, torch.tensor(-2), torch.ones(2)):
        with pytest.raises(ValueError, match="num_tokens must be a number of tokens"):
            token_count_in({"num_tokens": count})


@pytest.mark.parametrize("kind", [int, torch.tensor])
def test_values_with_zero_weight_do_not_affect_the_mean(kind):
    for values, weights, expected in (
        ([1.0, NAN, 5.0], [3, 0, 1], 2.0),
        ([NAN, NAN], [0, 0], 0.0),
        ([2.0, 4.0], [5, 5], 3.0),
    ):
        wrapped = [kind(weight) for weight in weights]
        assert weighted_mean(torch.tensor(values, dtype=torch.float64), wrapped).item() == expected
