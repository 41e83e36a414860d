"""LightningModule that trains a BERT on masked tokens and the order of segments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.models.encoder import Encoder, EncoderInput, EncoderResult
from lightning_megatron.models.encoder_config import EncoderConfig
from lightning_megatron.models.token_module import IGNORED, TokenModule
from lightning_megatron.plan.settings import coerced_arguments
from lightning_megatron.shapes import Bool, Float, Int, Shaped


class BERTPretraining(TokenModule):
    """Train, validate and test a BERT on masked tokens and the order of two segments.

    The loss is the sum of two means over all masked tokens of a step, on all ranks and in all
    microbatches: the mean of the token losses, and the mean of the order losses, where each masked
    token has the order loss of its pair. The weight of a pair is therefore its number of masked
    tokens, which makes the loss independent of the layout. If all pairs have the same number, the
    loss equals that of Hugging Face's BertForPreTraining. With the head ``masked_lm`` the second
    mean is left out.

    The module logs ``train_loss``, ``val_loss`` and ``test_loss``, and the two means as
    ``..._lm_loss`` and ``..._order_loss`` (nats).

    Shapes:
        A batch is {"tokens": (B, S), "labels": (B, S), "token_types": (B, S), "valid": (B, S),
        "lengths": (B,), "order": (B,)}. Labels are the original tokens at masked positions, and
        -100 elsewhere. ``valid`` is False at padding. ``lengths``, the number of tokens before the
        padding of each row, is optional: it replaces ``valid`` if all padding is on the right, and
        is faster on GPUs. ``order`` is 1 if the segments are swapped, else 0.

    Args:
        config: Configuration of the model, with the head ``pretraining`` or ``masked_lm``.
        training: Arguments of ``TokenModule``: ``learning_rate``, ``weight_decay``, ``betas``,
            ``warmup_steps``, ``max_steps``, ``schedule``, ``min_lr_ratio``, ``token_weighted``,
            ``lr_schedule``, ``weight_decay_schedule``.

    Raises:
        ParallelPlanError: If a value has a wrong type or is out of range.
        UnsupportedError: If the head does not predict masked tokens.

    Source: Shoeybi et al. 2019, section 4.2; Devlin et al. 2018; Lan et al. 2019.
    """

    weights_of_means = (("loss", "tokens"), ("lm_loss", "tokens"), ("order_loss", "tokens"))

    def __init__(self, config: EncoderConfig, **training: Any) -> None:
        arguments = coerced_arguments(BERTPretraining.__init__, locals())
        super().__init__(**training)
        # `arguments` has an EncoderConfig, also if a checkpoint passed a mapping.
        self.config: EncoderConfig = arguments["config"]
        if not self.config.tie_embeddings:
            raise UnsupportedError(
                "BERTPretraining needs a head that predicts masked tokens: head is "
                f"{self.config.head!r}. Use 'pretraining', or 'masked_lm' for training without the "
                "order of segments."
            )
        self.save_hyperparameters({"config": asdict(self.config)})
        self.model: Encoder | None = None

    @property
    @override
    def vocab_size(self) -> int:
        return self.config.vocab_size

    def configure_model(self) -> None:
        """Build this rank's part of the model, unless it exists."""
        if self.model is None:
            self.model = Encoder(self.config, mesh=self.parallel_mesh(), seed=torch.initial_seed())

    def forward(
        self,
        tokens: Int[Tensor, "batch seq"],
        labels: Int[Tensor, "batch seq"] | None = None,
        token_types: Int[Tensor, "batch seq"] | None = None,
        valid: Bool[Tensor, "batch seq"] | None = None,
        lengths: Int[Tensor, " batch"] | None = None,
    ) -> EncoderResult:
        """Return the losses of tokens, or their logits without labels, and the order logits.

        Args:
            tokens: Token ids.
            labels: Original tokens at masked positions, and -100 elsewhere.
            token_types: Segment of each token; None means 0.
            valid: Mask that is False at padding; None means no padding.
            lengths: Number of tokens before the padding of each row, in place of ``valid``; None
                means that ``valid`` describes padding (tokens).
        """
        assert self.model is not None, "configure_model builds the model before its first use"
        mask = valid if lengths is None else None
        rows = EncoderInput(tokens, valid=mask, token_types=token_types, lengths=lengths)
        result: EncoderResult = self.model(rows, labels, IGNORED)
        return result

    def predict_step(
        self, batch: Mapping[str, Shaped[Tensor, "batch *_"]], batch_idx: int
    ) -> EncoderResult:
        """Return the losses of masked tokens and the order logits."""
        result: EncoderResult = self._result(batch)
        return result

    def _result(self, batch: Mapping[str, Tensor]) -> Any:
        names = ("labels", "token_types", "valid", "lengths")
        return self(batch["tokens"], *map(batch.get, names))

    @override
    def mean_loss(
        self,
        batch: Mapping[str, Shaped[Tensor, "batch *_"]],
        num_tokens: Int[Tensor, ""],
        is_trained: bool,
    ) -> Float[Tensor, ""]:
        return self._means(batch, num_tokens, "train")["loss"]

    @override
    def _means(
        self, batch: Mapping[str, Tensor], num_tokens: Tensor, set_name: str
    ) -> dict[str, Tensor]:
        """Return the loss and, if it is a sum of two means over masked tokens, both means."""
        labels = batch["labels"]
        result = self._result(batch)
        count = num_tokens.clamp(min=1)
        tokens = result.losses.sum() / count
        if result.order_logits is None:
            return {"loss": tokens}
        logits = result.order_logits.to(result.losses.dtype)
        losses = F.cross_entropy(logits, batch["order"], ignore_index=IGNORED, reduction="none")
        order = (losses * (labels != IGNORED).sum(1)).sum() / count
        return {"loss": tokens + order, "lm_loss": tokens, "order_loss": order}
