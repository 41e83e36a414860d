"""Metrics of language models, computed from the losses and hits of labels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from typing_extensions import override

from lightning_megatron.building_blocks import IGNORED, Count, coerced_arguments
from lightning_megatron.shapes import Bool, Float, Int


class WordPerplexity(Metric):
    """Perplexity of a text, normalised by the number of words of the original text.

    It equals ``exp(sum of losses / number of words)``. Perplexities per word are comparable between
    models with different tokenizers; perplexities per token are not. Losses are summed in float64.

    Args:
        num_words: Number of words of the original text, before detokenization (words). None means
            the number of labels, which gives the perplexity per token.
        metric: Arguments of ``torchmetrics.Metric``.

    Raises:
        ParallelPlanError: If ``num_words`` is not a whole number of at least 1.

    Source: Shoeybi et al. 2019, appendix E.1.
    """

    is_differentiable = False
    higher_is_better = False
    full_state_update = False
    loss_sum: Tensor
    num_labels: Tensor

    def __init__(self, num_words: Count | None = None, **metric: Any) -> None:
        arguments = coerced_arguments(WordPerplexity.__init__, locals())
        super().__init__(**metric)
        self.num_words: int | None = arguments["num_words"]
        self.add_state("loss_sum", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("num_labels", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    @override
    def update(self, losses: Float[Tensor, "batch seq"], labels: Int[Tensor, "batch seq"]) -> None:
        """Add the losses of a batch of labels.

        Args:
            losses: Loss of each label (nats).
            labels: Token id of each label, or -100 where the loss does not count.
        """
        is_counted = labels != IGNORED
        self.loss_sum += losses.detach().double().masked_fill(~is_counted, 0.0).sum()
        self.num_labels += is_counted.sum()

    @override
    def compute(self) -> Float[Tensor, ""]:
        """Return the perplexity; NaN without labels."""
        divisor = self.num_labels if self.num_words is None else self.num_words
        mean = self.loss_sum / divisor
        return mean.exp().masked_fill(self.num_labels == 0, torch.nan)


class ClozeAccuracy(Metric):
    """Fraction of rows in which every label is the model's most probable token.

    A row is a passage whose last word the model predicts: its labels are the tokens of that word,
    and -100 elsewhere. The model reads the passage including the word (teacher forcing). A row
    counts as correct only if all tokens of the word are correct. Rows without labels do not count.

    Args:
        metric: Arguments of ``torchmetrics.Metric``.

    Source: Shoeybi et al. 2019, section 5.3 and appendix E.2.
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False
    num_right: Tensor
    num_rows: Tensor

    def __init__(self, **metric: Any) -> None:
        super().__init__(**metric)
        self.add_state("num_right", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("num_rows", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    @override
    def update(self, hits: Bool[Tensor, "batch seq"], labels: Int[Tensor, "batch seq"]) -> None:
        """Add a batch of rows.

        Args:
            hits: Whether each label has the largest logit.
            labels: Token ids of the predicted word, -100 elsewhere.
        """
        is_label = labels != IGNORED
        has_labels = is_label.any(-1)
        self.num_right += ((hits | ~is_label).all(-1) & has_labels).sum()
        self.num_rows += has_labels.sum()

    @override
    def compute(self) -> Float[Tensor, ""]:
        """Return the fraction of correct rows; NaN without rows with labels."""
        return self.num_right.double() / self.num_rows
