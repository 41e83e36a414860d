"""Base class of LightningModules that train on tokens, with logging, optimizer and schedule."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Any, Literal

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor

from lightning_megatron.errors import ParallelPlanError, UnsupportedError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.models.learning_rate import WarmupSchedule
from lightning_megatron.plan.settings import (
    Count,
    Index,
    NotNegative,
    Positive,
    Probability,
    Range,
    coerced_arguments,
)
from lightning_megatron.shapes import Float, Int, Shaped

#: Label of positions without a target token.
IGNORED = -100


class TokenModule(LightningModule):
    """Train, validate and test on batches of ``{"tokens": (batch, seq), "labels": (batch, seq)}``.

    Labels of -100 are ignored. The module logs ``train_loss``, ``val_loss`` and ``test_loss`` (nats
    per token). It also logs ``val_bits_per_byte`` and ``test_bits_per_byte`` if the mean bytes per
    token are known. A subclass provides the vocabulary size and the mean loss.

    Args:
        learning_rate: Highest learning rate, reached after the warm-up.
        weight_decay: Weight decay of matrices; one-dimensional parameters (biases, norms) have
            none.
        betas: Decay rates of AdamW's moments.
        warmup_steps: Length of the learning rate's rise from 0 (optimizer steps).
        max_steps: Step at which the learning rate reaches its lowest value; None means the end of
            the training (optimizer steps).
        schedule: Shape of the decay after the warm-up: ``cosine``, ``linear`` or ``constant``.
        min_lr_ratio: Lowest learning rate as a fraction of the highest.
        bytes_per_token: Mean length of a token, for bits per byte; None asks the data module
            (bytes).
        token_weighted: Whether a step under MegatronStrategy computes the gradient of the mean over
            all its tokens, on all ranks and in all microbatches. Otherwise microbatches and ranks
            are weighted by their samples, as ranks are under other strategies. The two differ if
            samples have ignored labels.

    Raises:
        ParallelPlanError: If a value has a wrong type or is out of range.
    """

    def __init__(
        self,
        learning_rate: NotNegative = 3e-4,
        weight_decay: NotNegative = 0.1,
        betas: tuple[Probability, Probability] = (0.9, 0.95),
        warmup_steps: Index = 0,
        max_steps: Count | None = None,
        schedule: Literal["cosine", "linear", "constant"] = "cosine",
        min_lr_ratio: Annotated[float, Range(least=0, most=1)] = 0.1,
        bytes_per_token: Positive | None = None,
        token_weighted: bool = True,
    ) -> None:
        given = coerced_arguments(TokenModule.__init__, locals())
        super().__init__()
        self.learning_rate: float = given["learning_rate"]
        self.weight_decay: float = given["weight_decay"]
        self.betas: tuple[float, float] = given["betas"]
        self.warmup_steps: int = given["warmup_steps"]
        self.max_steps: int | None = given["max_steps"]
        self.schedule: Literal["cosine", "linear", "constant"] = given["schedule"]
        self.min_lr_ratio: float = given["min_lr_ratio"]
        self.bytes_per_token: float | None = given["bytes_per_token"]
        self.token_weighted: bool = given["token_weighted"]
        self.save_hyperparameters(given)

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Return the size of the model's vocabulary."""

    @abstractmethod
    def mean_loss(
        self,
        batch: Mapping[str, Int[Tensor, "batch _"]],
        num_tokens: Int[Tensor, ""],
        is_trained: bool,
    ) -> Float[Tensor, ""]:
        """Return the mean loss over the labels of a batch that are not ignored, 0 if all are.

        Args:
            batch: Tokens and labels.
            num_tokens: Number of labels that are not ignored, as a tensor on the device.
            is_trained: Whether the loss is for training; otherwise it is for evaluation.
        """

    def setup(self, stage: str) -> None:
        """Raise if the vocabulary of the data, whose module is set up already, exceeds the model's.

        Raises:
            ParallelPlanError: If the vocabulary of the data is larger than that of the model.
        """
        found = _vocab_size_of(getattr(self.trainer, "datamodule", None))
        if found is not None and found > self.vocab_size:
            raise ParallelPlanError(
                f"vocab_size ({self.vocab_size}) of the model must be at least the vocab_size of "
                f"the data ({found}), because every token id selects a row of the embedding. Use a "
                f"vocab_size of {found} or more, or the model's own tokenizer."
            )

    def training_step(
        self, batch: Mapping[str, Int[Tensor, "batch _"]], batch_idx: int
    ) -> Float[Tensor, ""] | dict[str, Shaped[Tensor, ""]]:
        """Return the mean loss of the batch's tokens and, if ``token_weighted``, their number."""
        num_tokens = _count(batch)
        loss = self.mean_loss(batch, num_tokens, is_trained=True)
        self.log(
            "train_loss",
            loss.detach(),
            on_step=True,
            prog_bar=True,
            sync_dist=True,
            batch_size=len(batch["tokens"]),
        )
        return {"loss": loss, "num_tokens": num_tokens} if self.token_weighted else loss

    def validation_step(self, batch: Mapping[str, Int[Tensor, "batch _"]], batch_idx: int) -> None:
        """Log the mean loss of the batch's tokens."""
        self._evaluate(batch, "val")

    def test_step(self, batch: Mapping[str, Int[Tensor, "batch _"]], batch_idx: int) -> None:
        """Log the mean loss of the batch's tokens."""
        self._evaluate(batch, "test")

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Return AdamW and its learning rate schedule, which advances with each optimizer step."""
        decayed = [p for p in self.parameters() if p.requires_grad and p.dim() > 1]
        others = [p for p in self.parameters() if p.requires_grad and p.dim() <= 1]
        # Both groups exist on every rank, even if empty, so that optimizer checkpoints of all ranks
        # match.
        groups = [
            {"params": decayed, "weight_decay": self.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(
            groups,
            lr=self.learning_rate,
            betas=(self.betas[0], self.betas[1]),
            fused=self._is_fused() or None,
        )
        schedule = WarmupSchedule(
            self.schedule, self.warmup_steps, self._num_steps(), self.min_lr_ratio
        )
        # LambdaLR does not save a lambda, so that a resumed training uses the current settings.
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: schedule.factor(step))
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    def _is_fused(self) -> bool:
        """Return whether to use fused AdamW: on GPUs, where MegatronStrategy clips gradients.

        Lightning's own precision plugins cannot clip gradients for a fused optimizer.
        """
        on_gpu = all(parameter.is_cuda for parameter in self.parameters())
        return on_gpu and isinstance(self.device_mesh, ParallelMesh)

    def _evaluate(self, batch: Mapping[str, Tensor], name: str) -> None:
        num_tokens = _count(batch)
        loss = self.mean_loss(batch, num_tokens, is_trained=False)
        # The weight of this batch in the mean over batches and ranks, as a tensor to avoid a host
        # read.
        weight: Any = num_tokens.to(loss.dtype)
        self.log(f"{name}_loss", loss, prog_bar=True, sync_dist=True, batch_size=weight)
        length = self._bytes_per_token()
        if length:
            self.log(
                f"{name}_bits_per_byte",
                loss / (math.log(2.0) * length),
                sync_dist=True,
                batch_size=weight,
            )

    def _bytes_per_token(self) -> float | None:
        if self.bytes_per_token is not None:
            return self.bytes_per_token
        return getattr(getattr(self.trainer, "datamodule", None), "bytes_per_token", None)

    def _num_steps(self) -> int | None:
        """Return the step at which the decay ends; None if the training has no known end."""
        if self.max_steps is not None:
            return self.max_steps
        if self.schedule == "constant":
            return None
        known = self.trainer.estimated_stepping_batches
        return int(known) if math.isfinite(known) and known > 0 else None


def _count(batch: Mapping[str, Tensor]) -> Tensor:
    return (batch["labels"] != IGNORED).sum()


def _vocab_size_of(data: Any) -> int | None:
    """Return the vocabulary size of a data module; None if it is not known."""
    with suppress(UnsupportedError):
        found = getattr(data, "vocab_size", None)
        return found if isinstance(found, int) else None
    return None
