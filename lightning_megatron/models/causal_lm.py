"""LightningModule that trains a GPT, with loss, optimizer and learning rate schedule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from lightning_megatron.hub import TOKENIZER
from lightning_megatron.layers.attention.span import AttentionSpan
from lightning_megatron.layers.context_parallel.sequence_order import length_multiple
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.gpt import GPT
from lightning_megatron.models.token_module import IGNORED, TokenModule
from lightning_megatron.plan.settings import Probability, coerced_arguments
from lightning_megatron.shapes import Float, Int


class CausalLM(TokenModule):
    """Train, validate and test a GPT on token batches.

    The module runs under MegatronStrategy in any layout, and unchanged under ``ddp`` or on one
    device. It logs ``train_loss``, ``val_loss`` and ``test_loss`` (nats per token), and
    ``val_bits_per_byte`` and ``test_bits_per_byte`` if the mean number of bytes per token is known.

    Shapes:
        A batch is {"tokens": (B, S), "labels": (B, S)}. The loss ignores labels of -100. With
        {"lengths": (B, L)}, the number of tokens of each document, attention and positions restart
        in each document.

    Args:
        config: Configuration of the model.
        label_smoothing: Probability that training spreads evenly over the vocabulary. Validation
            and test do not use label smoothing.
        training: Arguments of ``TokenModule``: ``learning_rate``, ``weight_decay``, ``betas``,
            ``warmup_steps``, ``max_steps``, ``schedule``, ``min_lr_ratio``, ``bytes_per_token``,
            ``token_weighted``, ``lr_schedule``, ``weight_decay_schedule``.

    Raises:
        ParallelPlanError: If a value has a wrong type or is out of range.
    """

    def __init__(
        self, config: GPTConfig, label_smoothing: Probability = 0.0, **training: Any
    ) -> None:
        arguments = coerced_arguments(CausalLM.__init__, locals())
        super().__init__(**training)
        # `arguments` has a GPTConfig, also if a checkpoint passed a mapping of plain values.
        self.config: GPTConfig = arguments["config"]
        self.label_smoothing: float = arguments["label_smoothing"]
        self.save_hyperparameters(
            {"config": asdict(self.config), "label_smoothing": self.label_smoothing}
        )
        self.model: GPT | None = None

    @property
    @override
    def vocab_size(self) -> int:
        return self.config.vocab_size

    def configure_model(self) -> None:
        """Build this rank's part of the model; called for each fit, validate, test and predict."""
        if self.model is None:
            self.model = GPT(self.config, mesh=self.parallel_mesh(), seed=torch.initial_seed())

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the files of the data module's tokenizer, if it has one."""
        data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
        files = getattr(getattr(data, "tokenizer", None), "files", None)
        if files is not None:
            checkpoint[TOKENIZER] = files()

    def forward(
        self,
        tokens: Int[Tensor, "batch seq"],
        labels: Int[Tensor, "batch seq"] | None = None,
        label_smoothing: float = 0.0,
        lengths: Int[Tensor, "batch documents"] | None = None,
        *,
        sums: bool = False,
    ) -> Float[Tensor, "batch seq"] | Float[Tensor, "batch seq vocab"] | Float[Tensor, ""]:
        """Return the loss of each token or the sum of losses, or the logits without labels.

        Args:
            tokens: Token ids.
            labels: Id of the token that follows each token, or -100.
            label_smoothing: Probability spread evenly over the vocabulary.
            lengths: Lengths of the documents of each row; None means one document (tokens). Rows of
                several documents may have any length, because the module pads rows that cp or
                sequence parallelism divides.
            sums: Whether to return the sum of the losses of all tokens.
        """
        assert self.model is not None, "configure_model builds the model before its first use"
        if lengths is None:
            return self.model(tokens, labels, label_smoothing, IGNORED, sums=sums)
        # The padding after the last document counts as a document, so it may get longer.
        length = tokens.shape[1]
        extra = -length % length_multiple(self.model.mesh)
        tokens = F.pad(tokens, (0, extra))
        if labels is not None:
            labels = F.pad(labels, (0, extra), value=IGNORED)
        span = AttentionSpan(lengths)
        output = self.model(tokens, labels, label_smoothing, IGNORED, span=span, sums=sums)
        # The loss of appended tokens is 0.
        return output if labels is not None and sums else output[:, :length]

    def predict_step(
        self, batch: Mapping[str, Int[Tensor, "batch _"]], batch_idx: int
    ) -> Float[Tensor, "batch seq"] | Float[Tensor, "batch seq vocab"]:
        """Return the loss of each token, or the logits of a batch without labels."""
        return self(batch["tokens"], batch.get("labels"), lengths=batch.get("lengths"))

    @override
    def mean_loss(
        self,
        batch: Mapping[str, Int[Tensor, "batch _"]],
        num_tokens: Int[Tensor, ""],
        is_trained: bool,
    ) -> Float[Tensor, ""]:
        smoothing = self.label_smoothing if is_trained else 0.0
        total = self(batch["tokens"], batch["labels"], smoothing, batch.get("lengths"), sums=True)
        return total / num_tokens.clamp(min=1)
