"""A ready LightningModule that trains a GPT: loss, optimizer and learning rate schedule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.random import derive_seed
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.gpt import GPT, single_mesh
from lightning_megatron.models.token_module import IGNORED, TokenModule
from lightning_megatron.plan.settings import Probability, settled_arguments


class CausalLM(TokenModule):
    """Train, validate and test a GPT on batches of ``{"tokens": (B, S), "labels": (B, S)}``; label -100 is ignored.

    Runs under MegatronStrategy in any layout, and unchanged under ``ddp`` or on one device. Logs ``train_loss``,
    ``val_loss`` and ``test_loss`` (nats a token), and ``val_bits_per_byte`` and ``test_bits_per_byte`` where the bytes
    of a token are known.

    Args:
        config: Shape of the model.
        label_smoothing: Probability spread evenly over the vocabulary in training; validation and test use none.
        training: Arguments of `TokenModule`: ``learning_rate``, ``weight_decay``, ``betas``, ``warmup_steps``,
            ``max_steps``, ``schedule``, ``min_lr_ratio``, ``bytes_per_token``, ``token_weighted``.

    Raises:
        ParallelPlanError: For a value of another type or outside of its range.
    """

    def __init__(self, config: GPTConfig, label_smoothing: Probability = 0.0, **training: Any) -> None:
        given = settled_arguments(CausalLM.__init__, locals())
        super().__init__(**training)
        # A checkpoint stores plain values, so the configuration comes back as a mapping.
        self.config: GPTConfig = given["config"]
        self.label_smoothing: float = given["label_smoothing"]
        self.save_hyperparameters({"config": asdict(self.config), "label_smoothing": self.label_smoothing})
        self.model: GPT | None = None

    @property
    @override
    def vocab_size(self) -> int:
        return self.config.vocab_size

    def configure_model(self) -> None:
        """Build this rank's part of the model; called once for every fit, validate, test and predict."""
        if self.model is None:
            self.model = GPT(self.config, mesh=self._mesh(), seed=torch.initial_seed())

    def forward(self, tokens: Tensor, labels: Tensor | None = None, label_smoothing: float = 0.0) -> Tensor:
        """Return the loss of every token, or the logits when there are no labels.

        Shapes: tokens and labels ``(B, S)``; losses ``(B, S)``; logits ``(B, S, V)``.
        """
        assert self.model is not None, "configure_model builds the model before its first use"
        return self.model(tokens, labels, label_smoothing=label_smoothing, ignore_index=IGNORED)

    @override
    def training_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Tensor | dict[str, Tensor]:
        if self.device_mesh is None:
            # Only MegatronStrategy moves the random streams on by itself.
            assert self.model is not None, "configure_model builds the model before its first use"
            self.model.mesh.random.device = self.device
            self.model.mesh.random.begin_microbatch(self.global_step, batch_idx)
        return super().training_step(batch, batch_idx)

    def predict_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Tensor:
        """Return the loss of every token, or the logits of a batch without labels."""
        return self(batch["tokens"], batch.get("labels"))

    @override
    def mean_loss(self, batch: Mapping[str, Tensor], num_tokens: Tensor, is_trained: bool) -> Tensor:
        smoothing = self.label_smoothing if is_trained else 0.0
        return self(batch["tokens"], batch["labels"], smoothing).sum() / num_tokens.clamp(min=1)

    def _mesh(self) -> ParallelMesh:
        found: Any = self.device_mesh
        if isinstance(found, ParallelMesh):
            return found
        if found is not None:
            raise UnsupportedError(
                f"CausalLM cannot be cut by a {type(found).__name__}, because it is built from this package's layers. "
                "Use MegatronStrategy, ddp or one device."
            )
        # Every data-parallel process drops other elements, while all start from the same weights.
        return single_mesh(derive_seed(torch.initial_seed(), self.global_rank))
