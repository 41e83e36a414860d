"""What LightningModules that train on tokens share: mean loss, logging, optimizer and learning rate schedule."""

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
from lightning_megatron.models.schedule import WarmupSchedule
from lightning_megatron.plan.settings import Count, Index, NotNegative, Positive, Probability, Range, settled_arguments

#: The label that is no token.
IGNORED = -100


class TokenModule(LightningModule):
    """Train, validate and test on batches of ``{"tokens": (B, S), "labels": (B, S)}``; label -100 is ignored.

    Logs ``train_loss``, ``val_loss`` and ``test_loss`` (nats a token), and ``val_bits_per_byte`` and
    ``test_bits_per_byte`` where the bytes of a token are known. A subclass says how many tokens it knows and computes
    the loss.

    Args:
        learning_rate: Highest learning rate, reached after the warm-up.
        weight_decay: Decay of matrices; biases and norms (one-dimensional parameters) do not decay.
        betas: Decay rates of AdamW's moments.
        warmup_steps: Optimizer steps over which the learning rate rises from 0 (steps).
        max_steps: Optimizer steps after which the learning rate is lowest; None takes the length of the training
            (steps).
        schedule: How the learning rate falls after the warm-up: ``cosine``, ``linear`` or ``constant``.
        min_lr_ratio: Lowest learning rate, as a part of the highest.
        bytes_per_token: Mean length of a token, for bits per byte; None asks the data module (bytes).
        token_weighted: Whether the gradients of a step under MegatronStrategy are those of the mean over all its
            tokens, whichever rank and microbatch they are on; else microbatches and ranks weigh by their samples, as
            ranks do under every other strategy. The two differ where samples have ignored labels.

    Raises:
        ParallelPlanError: For a value of another type or outside of its range.
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
        given = settled_arguments(TokenModule.__init__, locals())
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
        """Count the tokens that the model knows."""

    @abstractmethod
    def mean_loss(self, batch: Mapping[str, Tensor], num_tokens: Tensor, is_trained: bool) -> Tensor:
        """Return the mean loss of a batch over its labels that are not ignored, 0 if all are.

        Args:
            batch: Tokens and labels.
            num_tokens: Labels that are not ignored, on the device.
            is_trained: Whether the loss is one to learn from, or one to judge by.
        """

    def setup(self, stage: str) -> None:
        """Refuse data whose token ids the model does not have; the data module is set up when this is called.

        Raises:
            ParallelPlanError: If the vocabulary of the data is larger than that of the model.
        """
        found = _vocab_size_of(getattr(self.trainer, "datamodule", None))
        if found is not None and found > self.vocab_size:
            raise ParallelPlanError(
                f"vocab_size ({self.vocab_size}) of the model must be at least that of the data ({found}), "
                "because every token id is a row of the embedding. "
                f"Use a vocab_size of {found} or more, or the tokenizer that the model was made for."
            )

    def training_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Tensor | dict[str, Tensor]:
        """Return the mean loss of the batch's tokens, and how many they are."""
        num_tokens = _count(batch)
        loss = self.mean_loss(batch, num_tokens, is_trained=True)
        self.log(
            "train_loss", loss.detach(), on_step=True, prog_bar=True, sync_dist=True, batch_size=len(batch["tokens"])
        )
        return {"loss": loss, "num_tokens": num_tokens} if self.token_weighted else loss

    def validation_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> None:
        """Log the mean loss of the batch's tokens."""
        self._evaluate(batch, "val")

    def test_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> None:
        """Log the mean loss of the batch's tokens."""
        self._evaluate(batch, "test")

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Return AdamW and the schedule of its learning rate, by step."""
        decayed = [p for p in self.parameters() if p.requires_grad and p.dim() > 1]
        others = [p for p in self.parameters() if p.requires_grad and p.dim() <= 1]
        # Both groups exist on every rank, also on one that holds no parameter of a kind, so that checkpoints line up.
        groups = [{"params": decayed, "weight_decay": self.weight_decay}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(
            groups, lr=self.learning_rate, betas=(self.betas[0], self.betas[1]), fused=self._is_fused() or None
        )
        schedule = WarmupSchedule(self.schedule, self.warmup_steps, self._num_steps(), self.min_lr_ratio)
        # A lambda is not saved with the scheduler, so a resumed training follows the settings it is given.
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: schedule.factor(step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def _is_fused(self) -> bool:
        """Tell whether one kernel updates all parameters: on GPUs, except where Lightning cannot clip for it."""
        on_gpu = all(parameter.is_cuda for parameter in self.parameters())
        return on_gpu and isinstance(self.device_mesh, ParallelMesh)

    def _evaluate(self, batch: Mapping[str, Tensor], name: str) -> None:
        num_tokens = _count(batch)
        loss = self.mean_loss(batch, num_tokens, is_trained=False)
        # A mean over batches and ranks weighs by this; a number would have to be read from the device.
        weight: Any = num_tokens.to(loss.dtype)
        self.log(f"{name}_loss", loss, prog_bar=True, sync_dist=True, batch_size=weight)
        length = self._bytes_per_token()
        if length:
            self.log(f"{name}_bits_per_byte", loss / (math.log(2.0) * length), sync_dist=True, batch_size=weight)

    def _bytes_per_token(self) -> float | None:
        if self.bytes_per_token is not None:
            return self.bytes_per_token
        return getattr(getattr(self.trainer, "datamodule", None), "bytes_per_token", None)

    def _num_steps(self) -> int | None:
        """Return the optimizer steps until the learning rate is lowest; None if training has no known end."""
        if self.max_steps is not None:
            return self.max_steps
        if self.schedule == "constant":
            return None
        known = self.trainer.estimated_stepping_batches
        return int(known) if math.isfinite(known) and known > 0 else None


def _count(batch: Mapping[str, Tensor]) -> Tensor:
    return (batch["labels"] != IGNORED).sum()


def _vocab_size_of(data: Any) -> int | None:
    """Return the vocabulary of a data module; None if it has none, or cannot know which tokenizer wrote its files."""
    with suppress(UnsupportedError):
        found = getattr(data, "vocab_size", None)
        return found if isinstance(found, int) else None
    return None
