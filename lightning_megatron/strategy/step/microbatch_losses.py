"""Losses and token counts of a step's microbatches: scaled for the backward pass, and for logs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.groups.collectives import all_reduce_
from lightning_megatron.groups.fingerprint import check_same_everywhere
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.pipeline.microbatch import Microbatch, count_tokens
from lightning_megatron.strategy.logs.merge import (
    Weight,
    loss_in,
    scalar_on,
    stack_scalars,
    token_count_in,
    token_counts_in,
    total_weight,
    weighted_mean,
)


def choose_token_scale(microbatches: Sequence[Microbatch]) -> int:
    """Return the largest power of two up to the token count of a batch (tokens).

    Token counts are divided by this scale before they multiply a loss. Gradients then have about
    the magnitude of those of a mean over the batch, which half precision can represent, and
    division by a power of two is exact. The count of a microbatch is that of
    :func:`~lightning_megatron.pipeline.microbatch.count_tokens`, which includes padded and
    ignored tokens, or the number of samples if it finds no tokens.
    """
    num_tokens = sum(count_tokens(part.data) or part.num_samples for part in microbatches)
    return 1 << (max(num_tokens, 1).bit_length() - 1)


class MicrobatchLosses:
    """Losses of the microbatches of one batch.

    A step is *counted* if it returns ``num_tokens``, the number of tokens that its loss averages.
    The backward pass of a counted step starts from the sum of ``loss * num_tokens / token_scale``.
    Its gradients, divided by the sum of :meth:`num_tokens` over all microbatches, ranks and
    accumulated batches, equal those of the mean over all tokens. The backward pass of any other
    step starts from the mean over samples, as in Lightning.

    Args:
        factor: Factor of the loss, used only in the backward pass. A scalar in float64 may change
            between the replays of a graph.
        divisor: Number of batches whose gradients are accumulated; not applied to a counted step
            (batches).
        token_scale: Divisor of token counts, the same on all ranks and for all batches (tokens).
    """

    def __init__(
        self,
        microbatches: Sequence[Microbatch],
        factor: float | Tensor,
        divisor: int,
        token_scale: int,
    ) -> None:
        self._num_samples = [part.num_samples for part in microbatches]
        self._factor = factor
        self._divisor = divisor
        self._token_scale = token_scale
        self._outputs: list[Any] = []
        self._numbers: list[int] = []
        self._losses: list[Tensor] = []
        self._weights: dict[int, Weight] = {}
        self.num_missing = 0

    def take(self, output: Any, number: int) -> Tensor | None:
        """Record a microbatch's loss and return the weighted loss for its backward pass.

        The result is None if the microbatch has no backward pass, because the step returned None or
        the host knows that the microbatch has no tokens. In the latter case not even a NaN loss
        reaches the gradients.
        """
        loss = loss_in(output)
        count = token_count_in(output)
        self._weights[number] = 0.0
        counted = {} if count is None else {"num_tokens": count}
        self._outputs.append(None if loss is None else counted)
        self._numbers.append(number)
        token_counts_in(self._outputs)
        if loss is None:
            self.num_missing += 1
            self._losses.append(torch.zeros(()))
            return None
        self._losses.append(loss.detach())
        if count is None:
            weight: Weight = (
                self._num_samples[number] / sum(self._num_samples) / self._divisor * self._factor
            )
            self._weights[number] = weight
            return _times(loss, weight)
        if not isinstance(count, Tensor) and count == 0:
            return None
        # The product of loss and token count may overflow in half precision.
        wide = loss.to(torch.promote_types(loss.dtype, torch.float32))
        tokens = count.to(wide.dtype) if isinstance(count, Tensor) else count
        self._weights[number] = tokens * (self._factor / self._token_scale)
        return _times(wide, self._weights[number])

    def weight_of(self, number: int) -> Weight:
        """Return the factor of a recorded microbatch's loss."""
        return self._weights[number]

    def check_complete(self) -> None:
        """Refuse a step that has returned no loss for a microbatch, where other ranks exist."""
        if self.num_missing:
            raise RuntimeError(
                "training_step must return a loss on every rank and for every microbatch: it "
                "returned None. The other ranks wait for the gradients of this rank. To skip a "
                "batch, return a loss of zero, such as 0.0 * output.sum()."
            )

    @property
    def is_empty(self) -> bool:
        """Return whether no microbatch of this rank had a loss."""
        return self.num_missing == len(self._losses)

    @property
    def counts(self) -> list[Weight] | None:
        """Tokens of each microbatch in run order; None if the step returns no counts (tokens)."""
        return token_counts_in(self._outputs)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the reported loss: that of the step, at least float32."""
        dtypes = [loss.dtype for loss in self._losses] or [torch.get_default_dtype()]
        return reduce(torch.promote_types, dtypes, torch.float32)

    def report(self) -> Tensor:
        """Return the mean loss in float64: over tokens, or over samples divided by ``divisor``.

        Without any tokens the mean is 0.
        """
        if not self._losses:
            return torch.zeros((), dtype=torch.float64)
        values = stack_scalars(self._losses)
        counts = self.counts
        if counts is not None:
            return weighted_mean(values, counts)
        sizes = [self._num_samples[number] for number in self._numbers]
        # A microbatch without a loss counts as one whose loss is 0.
        return weighted_mean(values, sizes) / self._divisor

    def num_tokens(self, device: torch.device) -> Tensor:
        """Return the token count divided by ``token_scale``, in float64; 0 if not counted."""
        counts = self.counts
        return scalar_on(0 if counts is None else total_weight(counts), device) / self._token_scale


class TokenCounting:
    """Scale of token counts, and whether steps count tokens: the same on all ranks of a fit."""

    def __init__(self, mesh: ParallelMesh) -> None:
        self._mesh = mesh
        self._scale: int | None = None
        self._is_counted: bool | None = None

    def scale(self, microbatches: Sequence[Microbatch]) -> int:
        """Return the divisor of token counts, chosen from the first batches of all ranks (tokens).

        Communication: at the first call one all-reduce over the data axis on the CPU.
        """
        if self._scale is None:
            local_scale = torch.tensor(choose_token_scale(microbatches))
            self._scale = int(all_reduce_(local_scale, self._mesh.data_cpu, "max"))
        return self._scale

    def check(self, is_counted: bool) -> None:
        """Refuse steps that return token counts on some ranks or in some batches only.

        Communication: at the first call one gather over the world on the CPU.
        """
        if self._is_counted is None:
            check_same_everywhere(
                self._mesh.world_cpu, {"training_step returns num_tokens": is_counted}
            )
            self._is_counted = is_counted
        elif is_counted != self._is_counted:
            raise ValueError(
                "training_step must return num_tokens for every batch of a fit or for none: it "
                f"{'does so now, but did not' if is_counted else 'does not do so now, but did'} "
                "before. Gradients are averaged either over tokens or over samples, not over both. "
                "Return 0 for a batch without a valid token."
            )


def _times(loss: Tensor, weight: Weight) -> Tensor:
    """Return the product in the dtype of the loss, rounded once."""
    if not isinstance(weight, Tensor):
        return loss * weight if weight != 1.0 else loss
    # torch multiplies a loss by a number in this dtype.
    wide = torch.promote_types(loss.dtype, torch.float32)
    return (loss.to(wide) * weight.to(wide)).to(loss.dtype)
