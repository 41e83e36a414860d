"""Modules of torch and of users that plans cut over ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Classifier(nn.Module):
    """Classify token sequences, like a model inside a user's LightningModule."""

    def __init__(self, num_tokens: int = 21, num_labels: int = 7, **layer: Any) -> None:
        super().__init__()
        settings = {"nhead": 4, "dim_feedforward": 24, "dropout": 0.0, "batch_first": True} | layer
        self.embedding = nn.Embedding(num_tokens, 16, padding_idx=0)
        encoder_layer = nn.TransformerEncoderLayer(16, **settings)
        nested = bool(settings["batch_first"]) and not settings.get("norm_first", False)
        nested = nested and settings.get("bias", True)
        self.encoder = nn.TransformerEncoder(
            encoder_layer, 2, nn.LayerNorm(16), enable_nested_tensor=nested
        )
        self.head = nn.Sequential(nn.Linear(16, 20), nn.Tanh(), nn.Linear(20, num_labels))
        self.batch_first = settings["batch_first"]

    def forward(self, tokens: Tensor, **masks: Any) -> Tensor:
        hidden = self.embedding(tokens)
        hidden = hidden if self.batch_first else hidden.transpose(0, 1)
        hidden = self.encoder(hidden, **masks)
        return self.head(hidden.mean(1 if self.batch_first else 0))


class TiedDecoder(nn.Module):
    """Predict tokens with a decoder that shares the embedding's weight."""

    def __init__(self, num_tokens: int = 21) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_tokens, 8)
        self.body = nn.Linear(8, 8)
        self.decoder = nn.Linear(8, num_tokens)
        self.decoder.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.decoder(torch.tanh(self.body(self.embedding(tokens))))


class Translator(nn.Module):
    """Hold a torch.nn.Transformer, whose decoder layers have self-attention and cross-attention."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        options = {"batch_first": True, "dropout": 0.0, **settings}
        self.transformer = nn.Transformer(16, 4, 1, 2, 24, **options)
        # torch initializes all decoder layers with the same values.
        for parameter in self.transformer.decoder.parameters():
            nn.init.normal_(parameter, std=0.3)

    def forward(self, source: Tensor, target: Tensor, **masks: Tensor) -> Tensor:
        length = target.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, dtype=target.dtype)
        if not self.transformer.batch_first:
            source, target = source.transpose(0, 1), target.transpose(0, 1)
            return self.transformer(source, target, tgt_mask=mask, **masks).transpose(0, 1)
        return self.transformer(source, target, tgt_mask=mask, tgt_is_causal=True, **masks)


class AttentionOnly(nn.Module):
    """Hold a single attention module."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4, **settings)

    def forward(self, *inputs: Tensor, **masks: Any) -> Tensor:
        output, weights = self.attention(*inputs, **masks)
        # Both results are returned, so that gradients also flow back through the attention weights.
        return output if weights is None else torch.cat([output.flatten(), weights.flatten()])


def build_in_float64(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """Build a float64 module from a seed, with weights of usual size."""
    torch.manual_seed(seed)
    module = build().double()
    with torch.no_grad():
        for parameter in module.parameters():
            # torch starts biases and norms at constants, which would hide a wrong cut.
            parameter.add_(0.1 * torch.randn_like(parameter))
    return module


def mlp() -> nn.Module:
    """Build a stack of linear layers that uses every way to cut one."""
    return nn.Sequential(
        nn.Linear(12, 16),
        nn.GELU(),
        nn.Linear(16, 12),
        nn.Linear(12, 8),
        nn.ReLU(),
        nn.Linear(8, 5),
        nn.LayerNorm(5),
    )


MLP_PLAN = {"0": "column", "2": "row", "3": "column_gather", "5": "vocab"}
CLASSIFIER_PLAN = {"embedding": "vocab", "encoder": "auto", "head.0": "column", "head.2": "row"}
