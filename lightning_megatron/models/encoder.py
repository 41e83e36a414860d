"""BERT and RoBERTa encoders with tensor and pipeline parallelism."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.collectives import gather_from_axis
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.attention import SelfAttention
from lightning_megatron.layers.attention_core import prepared
from lightning_megatron.layers.attention_span import AttentionSpan
from lightning_megatron.layers.block import TransformerBlock
from lightning_megatron.layers.embedding import VocabParallelEmbedding
from lightning_megatron.layers.encoder_embedding import EncoderEmbedding
from lightning_megatron.layers.init import Initializer
from lightning_megatron.layers.loss import vocab_parallel_cross_entropy
from lightning_megatron.layers.mlp import MLP
from lightning_megatron.layers.norm import LayerNorm
from lightning_megatron.layers.replicated import TableEmbedding
from lightning_megatron.layers.segments import Segment
from lightning_megatron.models.config_checks import check_length
from lightning_megatron.models.encoder_config import EncoderConfig
from lightning_megatron.models.encoder_heads import Classifier, MaskedLMHead, Pooler
from lightning_megatron.models.layered import LayeredModule, dtype_of_products
from lightning_megatron.models.remote_tensor import RemoteTensor, check_present
from lightning_megatron.shapes import Bool, Float, Int


@dataclass(frozen=True, eq=False)
class EncoderResult:
    """Outputs of an encoder. Outputs that its head does not compute are None.

    Args:
        hidden: Output of the last layer, or this rank's part of it.
        pooled: Output of the pooler.
        logits: Logits of a classifier, or this rank's columns of the logits of a masked language
            model.
        losses: Losses of a masked language model with labels, 0 for ignored labels.
    """

    hidden: Float[Tensor, "seq_local batch hidden"] | None = None
    pooled: Float[Tensor, "batch hidden"] | None = None
    logits: Float[Tensor, "batch labels"] | Float[Tensor, "seq batch vocab_local"] | None = None
    losses: Float[Tensor, "batch seq"] | None = None


@dataclass(frozen=True, eq=False)
class EncoderInput:
    """Inputs of an encoder: either tokens or vectors, and optional masks and indices.

    Args:
        tokens: Token ids; None if vectors are given.
        vectors: Vectors that replace the token embeddings.
        valid: Mask that is false at padding, which no token attends to; None means no padding.
        positions: Position of each token; None means the default of the configuration.
        token_types: Type of each token; None means 0.
    """

    tokens: Int[Tensor, "batch seq"] | None = None
    vectors: Float[Tensor, "batch seq hidden"] | None = None
    valid: Bool[Tensor, "batch seq"] | None = None
    positions: Int[Tensor, "batch seq"] | None = None
    token_types: Int[Tensor, "batch seq"] | None = None

    @property
    def given(self) -> Int[Tensor, "batch seq"] | Float[Tensor, "batch seq hidden"]:
        """Return the tokens or the vectors.

        Raises:
            UnsupportedError: If neither or both are given.
        """
        found = self.vectors if self.tokens is None else self.tokens
        if found is None or (self.tokens is not None and self.vectors is not None):
            raise UnsupportedError(
                "an encoder takes either tokens or vectors: "
                f"{'neither' if found is None else 'both'} were given. Both describe the same "
                "input. Pass one of them."
            )
        return found


class Encoder(LayeredModule):
    """Bidirectional encoder. Each rank has only its shards of the layers of its stages.

    Equal to Hugging Face's BertModel and RobertaModel, and to their models for masked language
    modeling and sequence classification, with the same weights, under every layout.

    Args:
        config: Configuration of the model.
        mesh: The groups of this rank; None means a single process with the whole model.
        seed: Seed of the initial weights, equal on all ranks; None means ``torch.initial_seed()``.

    Raises:
        ParallelPlanError: If the model cannot be divided over the layout.
    """

    config: EncoderConfig

    def __init__(
        self, config: EncoderConfig, mesh: ParallelMesh | None = None, seed: int | None = None
    ) -> None:
        super().__init__(config, mesh, seed)

    def _build(self) -> None:
        config = self.config
        mesh = self.mesh
        self.embedding = _embedding(config, mesh) if self.is_first_stage() else None
        indices = [index for layers in self._layers_of_chunk for index in layers]
        self.layers = nn.ModuleDict({str(index): _block(config, mesh, index) for index in indices})
        self.head: nn.Module | None = None
        if self.is_last_stage():
            if config.head == "pooler":
                self.head = Pooler(config, mesh)
            elif config.head == "classifier":
                self.head = Classifier(config, mesh)
            elif config.head == "masked_lm":
                self.head = MaskedLMHead(config, mesh, holds_copy=not self.is_first_stage())

    def forward(
        self,
        rows: EncoderInput,
        labels: Int[Tensor, "batch seq"] | None = None,
        ignore_index: int = -100,
    ) -> EncoderResult:
        """Return the outputs of the layers and the head.

        Args:
            rows: Inputs, equal on every stage.
            labels: Target tokens of a masked language model, or ``ignore_index``.
            ignore_index: Label whose loss is zero.

        Raises:
            ParallelPlanError: If the sequence is too long, or does not divide by tp under sequence
                parallelism.
            UnsupportedError: If neither or both of tokens and vectors are given.
            IndexError: If an id is outside its table (on CPU; a CUDA kernel asserts).
            StageDone: On pipeline stages that do not compute the result.

        Communication: that of the layers.
        """
        given = rows.given
        check_present(rows.tokens, rows.vectors, rows.valid, rows.positions, rows.token_types)
        self.check_callable_whole()
        # A row may be longer than the position table if its positions are given or skip padding.
        is_counted = rows.positions is None and (
            self.config.positions == "row" or rows.tokens is None
        )
        longest = self.config.max_seq_length if is_counted else given.shape[1]
        check_length(
            given.shape[1], longest, self.mesh.tp.size if self.mesh.sequence_parallel else 1
        )
        self._advance_own_streams(given.device)

        def run(chunk: int, hidden: Tensor | None) -> Any:
            like = self._stream_like(rows) if hidden is None else hidden
            return self._run_chunk(
                chunk,
                {
                    "rows": rows,
                    "hidden": hidden,
                    "rotary": None,
                    "span": self._span(rows, like),
                    "labels": labels,
                    "ignore_index": ignore_index,
                },
            )

        result: EncoderResult = self.run_stage(
            run,
            lambda: self.boundary(given),
            lambda: self._unknown(given.shape[0], given.shape[1], labels is not None),
        )
        return result

    def _unknown(self, num_sequences: int, length: int, has_losses: bool) -> EncoderResult:
        """Return a result of placeholders without values."""
        size = self.config.hidden_size
        wide = torch.promote_types(self.dtype, torch.float32)
        shards = self.mesh.tp.size if self.mesh.sequence_parallel else 1
        hidden = self.absent(
            (length // shards, num_sequences, size), self.dtype, "the hidden states"
        )
        if self.config.head == "classifier":
            shape = num_sequences, self.config.num_labels
            return EncoderResult(hidden, logits=self.absent(shape, self.dtype, "the logits"))
        if self.config.head == "pooler":
            return EncoderResult(
                hidden, pooled=self.absent((num_sequences, size), self.dtype, "the pooled output")
            )
        if self.config.head == "none":
            return EncoderResult(hidden)
        logits = self.absent(
            (length, num_sequences, self.config.vocab_size), self.dtype, "the logits"
        )
        losses = self.absent((num_sequences, length), wide, "the losses") if has_losses else None
        return EncoderResult(logits=logits, losses=losses)

    def whole(
        self, hidden: Float[Tensor, "seq_local batch hidden"]
    ) -> Float[Tensor, "batch seq hidden"]:
        """Return the last layer's whole output on every tp rank, for computation that all repeat.

        Communication: under sequence parallelism an all-gather over tp forward, none backward.
        """
        if isinstance(hidden, RemoteTensor) and self.mesh.sequence_parallel:
            shape = hidden.shape[1], hidden.shape[0] * self.mesh.tp.size, hidden.shape[2]
            return self.absent(shape, hidden.dtype, "the hidden states")
        full = (
            gather_from_axis(hidden, self.mesh.tp, dim=0) if self.mesh.sequence_parallel else hidden
        )
        return full.transpose(0, 1)

    def _embed(self, rows: EncoderInput) -> Tensor:
        assert self.embedding is not None, "the first virtual stage holds the embedding"
        given = rows.given
        positions = self._positions(rows, given) if rows.positions is None else rows.positions
        kinds = torch.zeros_like(positions) if rows.token_types is None else rows.token_types
        hidden: Tensor = self.embedding(rows.tokens, positions, kinds, rows.vectors)
        return hidden

    def _positions(self, rows: EncoderInput, given: Tensor) -> Tensor:
        if self.config.positions == "tokens" and rows.tokens is not None:
            padding = self.config.padding_id
            assert padding is not None, "a configuration that counts tokens names their padding"
            counted = (rows.tokens != padding).long()
            return counted.cumsum(1) * counted + padding
        first = self.config.first_position
        num_sequences, length = given.shape[:2]
        return torch.arange(first, first + length, device=given.device).expand(
            num_sequences, length
        )

    def _stream_like(self, rows: EncoderInput) -> Tensor:
        """Return an empty tensor with the dtype and on the device of the embedding's output."""
        assert self.embedding is not None, "the first virtual stage holds the embedding"
        dtype = self.embedding.word.weight.dtype
        if rows.vectors is not None:
            dtype = torch.promote_types(dtype, rows.vectors.dtype)
        return rows.given.new_empty(0, dtype=dtype)

    def _span(self, rows: EncoderInput, like: Tensor) -> AttentionSpan | None:
        """Return the span of the layers; None without padding."""
        if rows.valid is None:
            return None
        return prepared(
            AttentionSpan(causal=False, mask=rows.valid[:, None, None, :].bool()),
            *rows.valid.shape,
            dtype=dtype_of_products(like),
            device=like.device,
        )

    @override
    def _first_segment(self) -> Segment:
        assert self.embedding is not None, "the first virtual stage holds the embedding"
        return Segment(
            "embedding",
            self._embed,
            ("rows",),
            ("hidden",),
            scopes=("embedding",),
            modules=(self.embedding,),
        )

    @override
    def _inputs_of_layer(self, index: int) -> tuple[str, str]:
        return "rotary", "span"

    @override
    def _last_segment(self) -> Segment:
        # The head of a masked language model reads the embedding's weight, or has a copy.
        reads_embedding = self.config.head == "masked_lm" and self.embedding is not None
        word = self.embedding.word if self.embedding is not None and reads_embedding else None
        return Segment(
            "head",
            self._result,
            ("hidden", "labels", "ignore_index"),
            ("result",),
            scopes=("head",),
            modules=tuple(part for part in (self.head, word) if part is not None),
        )

    def _result(self, hidden: Tensor, labels: Tensor | None, ignore_index: int) -> EncoderResult:
        head: Any = self.head
        if self.config.head == "classifier":
            return EncoderResult(hidden, logits=head(hidden))
        if self.config.head == "pooler":
            return EncoderResult(hidden, pooled=head(hidden))
        if self.config.head == "none":
            return EncoderResult(hidden)
        logits = head(hidden, None if self.embedding is None else self.embedding.word.weight)
        if labels is None:
            return EncoderResult(logits=logits)
        losses = vocab_parallel_cross_entropy(
            logits,
            labels.t(),
            self.mesh,
            self.config.vocab_size,
            ignore_index=ignore_index,
            overwrite_logits=True,
        )
        return EncoderResult(logits=logits, losses=losses.t().contiguous())


def _embedding(config: EncoderConfig, mesh: ParallelMesh) -> EncoderEmbedding:
    drawn = Initializer.normal(config.init_std)
    size = config.hidden_size
    untrained = config.padding_id if config.positions == "tokens" else None
    return EncoderEmbedding(
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
        LayerNorm(size, mesh, eps=config.norm_eps),
        mesh=mesh,
        dropout=config.hidden_dropout,
    )


def _block(config: EncoderConfig, mesh: ParallelMesh, index: int) -> TransformerBlock:
    size = config.hidden_size
    drawn = Initializer.normal(config.init_std)
    layer = index + 1
    attention = SelfAttention(
        size,
        config.num_heads,
        mesh,
        causal=False,
        dropout=config.attention_dropout,
        layer=layer,
        initializer=drawn,
        output_initializer=drawn,
    )
    mlp = MLP(
        size,
        config.ffn_hidden_size,
        mesh,
        activation=config.activation,
        initializer=drawn,
        output_initializer=drawn,
    )
    norms = (LayerNorm(size, mesh, eps=config.norm_eps), LayerNorm(size, mesh, eps=config.norm_eps))
    return TransformerBlock(
        attention,
        mlp,
        *norms,
        mesh=mesh,
        layer=layer,
        norm_position="post",
        dropout=config.hidden_dropout,
    )
