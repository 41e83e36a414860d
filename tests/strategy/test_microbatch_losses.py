"""Backward uses the loss summed over tokens or averaged over samples; reports use the mean."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron.pipeline.microbatch import Microbatch
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


def test_mean_over_zero_labels_has_zero_gradients_after_multiplication_by_zero() -> None:
    """cross_entropy gives NaN for a microbatch without labels; multiplication by 0 gives zero
    gradients.
    """
    logits = torch.randn(3, 5, requires_grad=True)
    loss = torch.nn.functional.cross_entropy(logits, torch.full((3,), -100))
    assert loss.isnan()
    (loss * torch.zeros(())).backward()
    assert logits.grad is not None
    assert logits.grad.abs().sum() == 0.0


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
