"""Losses of preference pairs from the log-probabilities of their answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.shapes import Float, Int

#: Losses that support label smoothing.
_SMOOTHED = ("sigmoid", "robust")


@dataclass(frozen=True)
class PairLoss:
    """Loss of a pair as a function of the log-ratios of its answers.

    The log-ratio of an answer is its log-probability by the model minus that by the reference
    model. ``margin`` is the log-ratio of the chosen answer minus that of the rejected answer.

    - ``sigmoid``: ``-log sigmoid(beta margin)`` (Rafailov et al. 2023, arXiv:2305.18290); with
      ``label_smoothing``, the mean of this loss and the loss of swapped answers, weighted by the
      probability of each label (cDPO).
    - ``robust``: the unbiased estimate for labels that are wrong with the probability
      ``label_smoothing`` (Chowdhury et al. 2024, arXiv:2403.00409).
    - ``hinge``: ``max(0, 1 - beta margin)`` (Zhao et al. 2023, arXiv:2305.10425).
    - ``ipo``: ``(margin - 1 / (2 beta))^2`` with log-ratios that are means over tokens (Azar et al.
      2023, arXiv:2310.12036).
    - ``apo_zero``: ``1 - sigmoid(beta chosen) + sigmoid(beta rejected)`` of the log-ratios
      (D'Oosterlinck et al. 2024, arXiv:2408.06266).

    Args:
        beta: Weight of the log-ratios; for ``ipo`` the weight of the regularization.
        label_smoothing: Probability that a label is wrong, for ``sigmoid`` and ``robust``.

    Raises:
        ParallelPlanError: If the loss does not support the label smoothing.
    """

    loss_type: Literal["sigmoid", "robust", "hinge", "ipo", "apo_zero"] = "sigmoid"
    beta: float = 0.1
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        if self.label_smoothing and self.loss_type not in _SMOOTHED:
            raise ParallelPlanError(
                f"label_smoothing ({self.label_smoothing}) must be 0 with loss_type "
                f"{self.loss_type!r}, which does not support label smoothing. Use loss_type "
                "'sigmoid' or 'robust', or leave label_smoothing out."
            )
        if self.label_smoothing >= 0.5:
            raise ParallelPlanError(
                f"label_smoothing must be below 0.5: it is {self.label_smoothing}, which means "
                "that most labels are wrong, so the model would learn to prefer the rejected "
                "answers. Swap the chosen and rejected answers, or use a smaller value."
            )

    def of(
        self, ratios: Float[Tensor, "pairs 2"], num_tokens: Int[Tensor, "pairs 2"]
    ) -> Float[Tensor, " pairs"]:
        """Return the loss of each pair.

        Args:
            ratios: Log-ratio of the chosen and of the rejected answer (nats).
            num_tokens: Number of tokens of each answer (tokens).
        """
        beta = self.beta
        chosen = ratios[:, 0]
        rejected = ratios[:, 1]
        margin = chosen - rejected
        if self.loss_type == "hinge":
            return torch.relu(1.0 - beta * margin)
        if self.loss_type == "ipo":
            means = ratios / num_tokens.clamp(min=1)
            return (means[:, 0] - means[:, 1] - 1.0 / (2.0 * beta)) ** 2
        if self.loss_type == "apo_zero":
            return 1.0 - torch.sigmoid(beta * chosen) + torch.sigmoid(beta * rejected)
        right = -F.logsigmoid(beta * margin)
        if not self.label_smoothing:
            return right
        wrong = -F.logsigmoid(-beta * margin)
        share = self.label_smoothing
        if self.loss_type == "robust":
            return ((1.0 - share) * right - share * wrong) / (1.0 - 2.0 * share)
        return (1.0 - share) * right + share * wrong
