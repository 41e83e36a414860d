"""What backward runs from is the sum over tokens, or the mean over samples; what is reported is the
mean.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron.pipeline.microbatch import Microbatch
from lightning_megatron.strategy.step.microbatch_losses import MicrobatchLosses, choose_token_scale

NAN = float("nan")


def parts(*sizes: int) -> list[Microbatch]:
    return [Microbatch(torch.zeros(size, 4, dtype=torch.long), size) for size in sizes]


def run(
    losses: MicrobatchLosses, steps: list[tuple[float, Any]], dtype: torch.dtype = torch.float64
) -> Tensor:
    """Return the gradient of a weight that every microbatch's loss is multiplied by."""
    weight = torch.ones((), dtype=dtype, requires_grad=True)
    for number, (value, count) in enumerate(steps):
        loss = weight * torch.tensor(value, dtype=dtype)
        output = loss if count is None else {"loss": loss, "num_tokens": count}
        scalar = losses.take(output, number)
        if scalar is not None:
            scalar.backward()
    assert weight.grad is not None
    return weight.grad


def test_samples_weigh_without_counts() -> None:
    losses = MicrobatchLosses(parts(3, 1), factor=8.0, divisor=2, token_scale=4)
    gradient = run(losses, [(1.0, None), (5.0, None)])
    assert gradient.item() == 2.0 / 2 * 8.0
    assert (
        losses.counts,
        losses.report().item(),
        losses.num_tokens(torch.device("cpu")).item(),
    ) == (None, 1.0, 0.0)


@pytest.mark.parametrize("kind", [int, float, torch.tensor])
def test_tokens_weigh_with_counts(kind: Any) -> None:
    losses = MicrobatchLosses(parts(2, 2, 2), factor=8.0, divisor=2, token_scale=16)
    gradient = run(losses, [(1.0, kind(6)), (5.0, kind(2)), (NAN, kind(0))])
    tokens = losses.num_tokens(torch.device("cpu"))
    assert tokens.dtype == torch.float64
    assert tokens.item() == 8 / 16
    # The division by what all ranks and accumulated batches have counted is left to the optimizer's
    # step.
    assert (gradient / tokens).item() == 2.0 * 8.0
    assert losses.report().item() == 2.0


def test_nothing_is_counted() -> None:
    losses = MicrobatchLosses(parts(1), factor=1.0, divisor=1, token_scale=4)
    assert losses.take({"loss": torch.tensor(NAN, requires_grad=True), "num_tokens": 0}, 0) is None
    assert losses.report().item() == 0.0
    assert losses.num_tokens(torch.device("cpu")).item() == 0.0


def test_a_mean_over_no_label_has_a_gradient_of_zero_where_the_host_does_not_know_the_count() -> (
    None
):
    """cross_entropy gives NaN for such a microbatch; the weight 0 alone keeps it out of the
    gradients.
    """
    logits = torch.randn(3, 5, requires_grad=True)
    loss = torch.nn.functional.cross_entropy(logits, torch.full((3,), -100))
    assert loss.isnan()
    (loss * torch.zeros(())).backward()
    assert logits.grad is not None
    assert logits.grad.abs().sum() == 0.0


def test_half_losses_are_weighed_and_reported_in_float32() -> None:
    losses = MicrobatchLosses(parts(1, 1), factor=1.0, divisor=1, token_scale=1)
    value = torch.tensor(100.0, dtype=torch.float16, requires_grad=True)
    scalar = losses.take({"loss": value, "num_tokens": 5000}, 0)
    assert scalar is not None
    assert (scalar.dtype, scalar.item()) == (torch.float32, 500_000.0)
    losses.take({"loss": value.detach() + 1, "num_tokens": 5000}, 1)
    assert losses.dtype == torch.float32
    assert losses.report().item() == 100.5


def test_counts_for_some_microbatches_only_are_refused_at_once() -> None:
    losses = MicrobatchLosses(parts(1, 1), factor=1.0, divisor=1, token_scale=1)
    losses.take({"loss": torch.ones(()), "num_tokens": 1}, 0)
    with pytest.raises(ValueError, match="for every microbatch or for none"):
        losses.take(torch.ones(()), 1)


def test_a_unit_is_a_power_of_two_near_the_tokens_of_a_batch() -> None:
    assert choose_token_scale(parts(3, 2)) == 16
    assert choose_token_scale(parts(4)) == 16
    assert choose_token_scale([Microbatch(torch.zeros(3), 3)]) == 2
    assert choose_token_scale([]) == 1
