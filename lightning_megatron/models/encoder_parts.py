"""Parts of encoders: the embedding, the layers, and the heads (pooler, classifier, answer spans,
masked language model and pre-training).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_megatron.groups.collectives import gather_from_axis
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import set_shard_spec, shard_spec_of
from lightning_megatron.layers.block import Block
from lightning_megatron.layers.embedding import (
    InputEmbedding,
    VocabParallelEmbedding,
    vocab_parameter,
)
from lightning_megatron.layers.fused.dropout import hidden_dropout
from lightning_megatron.layers.linear.regions import column_linear
from lightning_megatron.layers.mlp import activate
from lightning_megatron.layers.norm import LayerNorm
from lightning_megatron.layers.parameters.init import ZEROS, Initializer, sharded_parameter
from lightning_megatron.layers.replicated import ReplicatedLinear, TableEmbedding, first_place
from lightning_megatron.models import gpt_block
from lightning_megatron.models.encoder_config import EncoderConfig
from lightning_megatron.models.layered import WORD_EMBEDDING
from lightning_megatron.plan.shards import padded_vocab_size, vocab_range
from lightning_megatron.shapes import Float


def build_embedding(config: EncoderConfig, mesh: ParallelMesh) -> InputEmbedding:
    """Build the embedding of an encoder, which ends with a norm unless layers begin with norms."""
    drawn = Initializer.normal(config.init_std)
    size = config.hidden_size
    untrained = config.padding_id if config.positions == "tokens" else None
    return InputEmbedding(
        VocabParallelEmbedding(
            config.vocab_size,
            size,
            mesh,
            multiple=config.vocab_multiple,
            initializer=drawn,
            padding_id=config.padding_id,
        ),
        TableEmbedding(config.num_positions, size, mesh, untrained=untrained, initializer=drawn),
        TableEmbedding(config.num_token_types, size, mesh, initializer=drawn),
        mesh=mesh,
        norm=LayerNorm(size, mesh, eps=config.norm_eps) if config.norm_position == "post" else None,
        dropout=config.hidden_dropout,
    )


def build_block(config: EncoderConfig, mesh: ParallelMesh, index: int) -> Block:
    """Build this rank's part of a layer of an encoder: a block of a GPT that is not causal."""
    output = None if config.scaled_init else Initializer.normal(config.init_std)
    return gpt_block.build_block(config.of_layers(), mesh, index, output)


class Pooler(nn.Module):
    """Pooler of first tokens, computed on all tp ranks. Equal to Hugging Face's BertPooler."""

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

    Equal to the pooler, dropout and classifier of Hugging Face's BertForSequenceClassification, or
    with ``config.drops_first`` its RobertaClassificationHead.
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
        return hidden_dropout(vectors, self.config.head_dropout, self.training, self.mesh)


class SpanHead(nn.Module):
    """Head that scores every token as the start and as the end of an answer.

    Equal to ``qa_outputs`` of Hugging Face's BertForQuestionAnswering.

    Communication: under sequence parallelism an all-gather of the scores over tp in the forward
        pass, none in the backward pass.
    """

    def __init__(self, config: EncoderConfig, mesh: ParallelMesh) -> None:
        super().__init__()
        self.mesh = mesh
        self.output = _dense(config, 2, mesh, partial=mesh.sequence_parallel)

    def forward(
        self, hidden: Float[Tensor, "seq_local batch hidden"]
    ) -> Float[Tensor, "batch seq 2"]:
        """Return the logits of starts and ends, on all tp ranks."""
        scores: Tensor = self.output(hidden)
        if self.mesh.sequence_parallel:
            scores = gather_from_axis(scores, self.mesh.tp, dim=0)
        return scores.transpose(0, 1)


class MaskedLMHead(nn.Module):
    """Head of a masked language model, which computes this rank's shard of the logits.

    Equal to Hugging Face's BertLMPredictionHead and RobertaLMHead with tied weights. It holds a
    copy of the token embedding's weight if the embedding is on another stage.

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
        """Return the logits; no ``embedding`` is needed if the head has a copy of that weight."""
        weight = embedding if self.weight is None else self.weight
        assert weight is not None, "a head without a copy is on the rank of the embedding"
        hidden = self.norm(activate(self.dense(hidden), self.config.head_activation))
        return column_linear(hidden, weight, self.bias, self.mesh)


class PretrainingHead(MaskedLMHead):
    """Head for pre-training BERT: a masked language model and the order of two segments.

    Equal to Hugging Face's BertPooler and BertPreTrainingHeads with tied weights.

    Source: Lan et al. 2019 (ALBERT), section 3.1, for the order of segments.
    """

    def __init__(self, config: EncoderConfig, mesh: ParallelMesh, *, holds_copy: bool) -> None:
        super().__init__(config, mesh, holds_copy=holds_copy)
        self.pooler = Pooler(config, mesh)
        self.order = _dense(config, 2, mesh, partial=False)

    def order_logits(
        self, hidden: Float[Tensor, "seq_local batch hidden"]
    ) -> Float[Tensor, "batch 2"]:
        """Return the logits of "in order" and "swapped" for each pair of segments."""
        logits: Tensor = self.order(self.pooler(hidden))
        return logits


def build_head(config: EncoderConfig, mesh: ParallelMesh, *, holds_copy: bool) -> nn.Module | None:
    """Build the head that a configuration names; None for ``none``."""
    if config.tie_embeddings:
        kind = PretrainingHead if config.head == "pretraining" else MaskedLMHead
        return kind(config, mesh, holds_copy=holds_copy)
    kinds: dict[str, type[nn.Module]] = {
        "pooler": Pooler,
        "classifier": Classifier,
        "span": SpanHead,
    }
    return kinds[config.head](config, mesh) if config.head in kinds else None


def _dense(
    config: EncoderConfig, out_features: int, mesh: ParallelMesh, *, partial: bool
) -> ReplicatedLinear:
    drawn = Initializer.normal(config.init_std)
    return ReplicatedLinear(
        config.hidden_size, out_features, mesh, partial=partial, initializer=drawn
    )
