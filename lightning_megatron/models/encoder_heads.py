"""Heads of encoders: pooler, classifier and masked language model."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import set_shard_spec, shard_spec_of
from lightning_megatron.layers.embedding import vocab_parameter
from lightning_megatron.layers.init import ZEROS, Initializer, sharded_parameter
from lightning_megatron.layers.mlp import gelu_activation
from lightning_megatron.layers.norm import LayerNorm
from lightning_megatron.layers.regions import column_linear
from lightning_megatron.layers.replicated import ReplicatedLinear, first_place
from lightning_megatron.models.encoder_config import EncoderActivation, EncoderConfig
from lightning_megatron.models.layered import WORD_EMBEDDING
from lightning_megatron.plan.shards import padded_vocab_size, vocab_range
from lightning_megatron.shapes import Float


class Pooler(nn.Module):
    """Pooler of the first token of each sequence, computed on all tp ranks.

    Equal to Hugging Face's BertPooler.

    Args:
        config: Configuration of the model.
        mesh: The groups of this rank.
    """

    def __init__(self, config: EncoderConfig, mesh: ParallelMesh) -> None:
        super().__init__()
        self.mesh = mesh
        self.dense = _dense(config, config.hidden_size, mesh, partial=False)

    def forward(
        self, hidden: Float[Tensor, "seq_local batch hidden"]
    ) -> Float[Tensor, "batch hidden"]:
        """Return one vector for each sequence."""
        return torch.tanh(self.dense(first_place(hidden, self.mesh)))


class Classifier(nn.Module):
    """Classifier of sequences by their first token, computed on all tp ranks.

    Equal to the pooler, dropout and classifier of Hugging Face's BertForSequenceClassification;
    with ``config.drops_first`` to its RobertaClassificationHead.

    Args:
        config: Configuration of the model.
        mesh: The groups and random streams of this rank.
    """

    def __init__(self, config: EncoderConfig, mesh: ParallelMesh) -> None:
        super().__init__()
        self.config = config
        self.mesh = mesh
        self.dense = _dense(config, config.hidden_size, mesh, partial=False)
        self.output = _dense(config, config.num_labels, mesh, partial=False)

    def forward(
        self, hidden: Float[Tensor, "seq_local batch hidden"]
    ) -> Float[Tensor, "batch labels"]:
        """Return the logits of each sequence."""
        self.mesh.random.seek(self.config.num_layers + 1)
        first = first_place(hidden, self.mesh)
        if self.config.drops_first:
            first = self._dropped(first)
        return self.output(self._dropped(torch.tanh(self.dense(first))))

    def _dropped(self, vectors: Tensor) -> Tensor:
        probability = self.config.head_dropout
        if not self.training or probability == 0.0:
            return vectors
        with self.mesh.random.fork("replicated"):
            return F.dropout(vectors, probability, training=True)


class MaskedLMHead(nn.Module):
    """Head of a masked language model, which computes this rank's columns of the logits.

    Equal to Hugging Face's BertLMPredictionHead and RobertaLMHead with tied weights.

    Args:
        config: Configuration of the model.
        mesh: The groups of this rank.
        holds_copy: Whether the head has a copy of the token embedding's weight, because the
            embedding is on another stage.

    Communication: that of ``column_linear``.
    """

    def __init__(self, config: EncoderConfig, mesh: ParallelMesh, *, holds_copy: bool) -> None:
        super().__init__()
        self.config = config
        self.mesh = mesh
        self.dense = _dense(config, config.hidden_size, mesh, partial=mesh.sequence_parallel)
        self.norm = LayerNorm(config.hidden_size, mesh, eps=config.norm_eps)
        vocabulary = config.vocab_size
        multiple = config.vocab_multiple
        tp = mesh.tp
        self.bias = sharded_parameter(
            (vocabulary,),
            [vocab_range(vocabulary, tp.size, tp.rank, multiple)],
            ZEROS,
            local_size=padded_vocab_size(vocabulary, tp.size, multiple) // tp.size,
        )
        self.weight: nn.Parameter | None = None
        if holds_copy:
            drawn = Initializer.normal(config.init_std)
            self.weight = vocab_parameter(vocabulary, config.hidden_size, mesh, multiple, drawn)
            set_shard_spec(self.weight, shard_spec_of(self.weight).tied(WORD_EMBEDDING))

    def forward(
        self,
        hidden: Float[Tensor, "seq_local batch hidden"],
        embedding: Float[Tensor, "vocab_local hidden"] | None,
    ) -> Float[Tensor, "seq batch vocab_local"]:
        """Return the logits.

        Args:
            hidden: Output of the last layer.
            embedding: Weight of the token embedding; None if the head has a copy.
        """
        weight = embedding if self.weight is None else self.weight
        assert weight is not None, "a head without a copy is on the embedding's rank"
        hidden = self.norm(activated(self.dense(hidden), self.config.head_activation))
        return column_linear(hidden, weight, self.bias, self.mesh)


def activated(
    hidden: Float[Tensor, "*shape"], activation: EncoderActivation
) -> Float[Tensor, "*shape"]:
    """Apply an activation."""
    return (
        F.relu(hidden)
        if activation == "relu"
        else gelu_activation(hidden, by_tanh=activation == "gelu_tanh")
    )


def _dense(
    config: EncoderConfig, out_features: int, mesh: ParallelMesh, *, partial: bool
) -> ReplicatedLinear:
    drawn = Initializer.normal(config.init_std)
    return ReplicatedLinear(
        config.hidden_size, out_features, mesh, partial=partial, initializer=drawn
    )
