"""BERT and RoBERTa encoders with tensor, pipeline and context parallelism, and their inputs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.collectives import gather_from_axis
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.attention.choose_core import choose_core
from lightning_megatron.layers.attention.core import prepared
from lightning_megatron.layers.attention.span import AttentionSpan
from lightning_megatron.layers.context_parallel.attend_across import transport_of
from lightning_megatron.layers.context_parallel.position_wise import foreign_parts
from lightning_megatron.layers.context_parallel.sequence_order import (
    join_parts,
    of_first_rank,
    own_part,
)
from lightning_megatron.layers.linear.regions import dtype_of_products
from lightning_megatron.layers.norm import LayerNorm
from lightning_megatron.models.config_checks import NORM_POSITIONS, check_length
from lightning_megatron.models.encoder_config import EncoderConfig
from lightning_megatron.models.encoder_parts import build_block, build_embedding, build_head
from lightning_megatron.models.gpt_block import context_choice
from lightning_megatron.models.gpt_losses import Targets
from lightning_megatron.models.layered import LayeredModule, LayerInputs, either_input
from lightning_megatron.models.remote_tensor import RemoteTensor, check_present
from lightning_megatron.shapes import Bool, Float, Int

#: Transport over cp that gives each rank whole rows of some heads.
_WHOLE = "all_to_all"


@dataclass(frozen=True, eq=False)
class EncoderInput:
    """Inputs of an encoder: either tokens or vectors, and optional masks and indices.

    Padding, to which no token attends, is described by ``valid`` anywhere in a row, or by
    ``lengths`` on the right of each row. On GPUs, attention in half types is faster with
    ``lengths``: it reads no mask and skips the padding.

    Args:
        tokens: Token ids; None if vectors are given.
        vectors: Vectors that replace the token embeddings.
        valid: Mask that is False at padding; None means no padding, or that of ``lengths``.
        positions: Position of each token; None means the default of the configuration.
        token_types: Type of each token; None means 0.
        lengths: Number of tokens before the padding of each row; None means no padding, or that of
            ``valid``. The host does not read it (tokens).

    Raises:
        UnsupportedError: If both descriptions of padding are given, or ``lengths`` has another
            shape.
    """

    tokens: Int[Tensor, "batch seq"] | None = None
    vectors: Float[Tensor, "batch seq hidden"] | None = None
    valid: Bool[Tensor, "batch seq"] | None = None
    positions: Int[Tensor, "batch seq"] | None = None
    token_types: Int[Tensor, "batch seq"] | None = None
    lengths: Int[Tensor, " _"] | None = None

    def __post_init__(self) -> None:
        if self.lengths is None:
            return
        if self.valid is not None:
            raise UnsupportedError(
                "an encoder takes either valid or lengths, because both describe the padding of "
                "the rows: both were given. Pass lengths if all padding is on the right, and valid "
                "otherwise."
            )
        given = self.vectors if self.tokens is None else self.tokens
        if given is not None and self.lengths.shape != given.shape[:1]:
            raise UnsupportedError(
                f"lengths must have a number for each of the {given.shape[0]} rows: its shape is "
                f"{tuple(self.lengths.shape)}. Pass the number of tokens before the padding of "
                "each row."
            )

    @property
    def tokens_or_vectors(self) -> Int[Tensor, "batch seq"] | Float[Tensor, "batch seq hidden"]:
        """Return the tokens or the vectors.

        Raises:
            UnsupportedError: If neither or both are given.
        """
        return either_input("an encoder takes either tokens or vectors", self.tokens, self.vectors)

    @property
    def not_padding(self) -> Bool[Tensor, "batch seq"] | None:
        """Return a mask that is False at padding; None without padding."""
        if self.lengths is None:
            return None if self.valid is None else self.valid.bool()
        index = torch.arange(self.tokens_or_vectors.shape[1], device=self.lengths.device)
        return index < self.lengths[:, None]

    def joined(self, positions: Int[Tensor, "batch seq"]) -> EncoderInput:
        """Return the inputs as one row, without a description of padding."""
        given = (self.tokens, self.vectors, positions, self.token_types)
        tokens, vectors, places, types = (
            None if tensor is None else tensor.flatten(0, 1)[None] for tensor in given
        )
        return EncoderInput(tokens, vectors, positions=places, token_types=types)


@dataclass(frozen=True, eq=False)
class EncoderResult:
    """Outputs of an encoder. Outputs that its head does not compute are None.

    Args:
        hidden: Output of the last layer, or this rank's part of it.
        pooled: Output of the pooler.
        logits: Logits of a classifier, or of the start and end of an answer at every token, or of a
            masked language model. In the last case they are this rank's shard over the vocabulary,
            for this rank's tokens over cp.
        losses: Losses of a masked language model if labels are given; 0 for ignored labels.
        order_logits: Logits of the order of two segments by the head ``pretraining``, equal on all
            ranks of tp and cp.
    """

    hidden: Float[Tensor, "seq_local batch hidden"] | None = None
    pooled: Float[Tensor, "batch hidden"] | None = None
    logits: (
        Float[Tensor, "batch labels"]
        | Float[Tensor, "batch seq 2"]
        | Float[Tensor, "seq_part batch vocab_local"]
        | None
    ) = None
    losses: Float[Tensor, "batch seq"] | None = None
    order_logits: Float[Tensor, "batch 2"] | None = None


@dataclass(frozen=True, eq=False)
class EncoderCall:
    """Inputs of one call of an encoder, which are the same on all stages.

    Args:
        labels: Target tokens of a masked language model, or ``ignore_index``, whose loss is zero.
        num_joined: Number of rows that the layers process as one; None means that they do not.
    """

    rows: EncoderInput
    labels: Int[Tensor, "batch seq"] | None
    ignore_index: int
    num_joined: int | None


class Encoder(LayeredModule):
    """Bidirectional encoder. Each rank has only its shards of the layers of its stages.

    In every layout it equals Hugging Face's BertModel and RobertaModel, and their models for masked
    language modeling and sequence classification, with the same weights. With the head
    ``pretraining`` it equals BertForPreTraining, or MegatronBertForPreTraining if norms precede
    attention and MLP.

    Args:
        config: Configuration of the model.
        mesh: The groups of this rank; None means a single process with the whole model.
        seed: Seed of the initial weights, equal on all ranks; None means ``torch.initial_seed()``.

    Raises:
        ParallelPlanError: If the model cannot be divided over the layout.

    Source: Shoeybi et al. 2019, section 5.3 and figure 7.
    """

    config: EncoderConfig

    def __init__(
        self, config: EncoderConfig, mesh: ParallelMesh | None = None, seed: int | None = None
    ) -> None:
        super().__init__(config, mesh, seed)
        #: Transport of attention over cp in all layers.
        self.context = context_choice(config, self.mesh)

    def _build(self) -> None:
        config = self.config
        mesh = self.mesh
        self.embedding = build_embedding(config, mesh) if self.is_first_stage() else None
        indices = [index for layers in self.layers_of_chunk for index in layers]
        self.layers = nn.ModuleDict(
            {str(index): build_block(config, mesh, index) for index in indices}
        )
        self.final_norm = None
        self.head: nn.Module | None = None
        if self.is_last_stage():
            if NORM_POSITIONS[config.norm_position].has_final_norm:
                self.final_norm = LayerNorm(config.hidden_size, mesh, eps=config.norm_eps)
            self.head = build_head(config, mesh, holds_copy=not self.is_first_stage())

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
            ParallelPlanError: If the sequence is too long, or does not divide over the ranks that
                share it.
            UnsupportedError: If neither or both of tokens and vectors are given.
            IndexError: If an id is outside its table (on CPU; a CUDA kernel asserts).
            StageDone: On pipeline stages that do not compute the result.

        Communication: that of the layers; over cp gathers of the losses and of the outputs that the
            head computes from the first token.
        """
        given = rows.tokens_or_vectors
        check_present(
            rows.tokens, rows.vectors, rows.valid, rows.lengths, rows.positions, rows.token_types
        )
        self.check_has_all_stages()
        # A row may be longer than the position table if its positions are given or skip padding.
        has_row_positions = rows.positions is None and (
            self.config.positions == "row" or rows.tokens is None
        )
        longest = self.config.max_seq_length if has_row_positions else given.shape[1]
        shards = self.mesh.tp.size if self.mesh.sequence_parallel else 1
        check_length(given.shape[1], longest, shards, self.mesh.cp.size)
        self._advance_own_streams(given.device)
        dtype = self.dtype
        if rows.vectors is not None:
            dtype = torch.promote_types(dtype, rows.vectors.dtype)
        stream_like = given.new_empty(0, dtype=dtype)
        num_joined = self._num_joined(rows, dtype_of_products(stream_like))
        inputs = rows if num_joined is None else rows.joined(self._positions(rows))
        call = EncoderCall(inputs, labels, ignore_index, num_joined)

        def run(chunk: int, hidden: Tensor | None) -> Any:
            span = self._span(rows, dtype_of_products(stream_like if hidden is None else hidden))
            layers = dict.fromkeys(self.layers_of_chunk[chunk], LayerInputs(None, span))
            return self.run_chunk(chunk, hidden, call, layers)

        result: EncoderResult = self.run_stage(
            run,
            lambda: self.boundary(inputs.tokens_or_vectors),
            lambda: self._placeholders(given.shape[0], given.shape[1], labels is not None),
        )
        return result

    def _placeholders(self, num_sequences: int, length: int, has_losses: bool) -> EncoderResult:
        """Return the result with placeholders instead of tensors."""
        config = self.config
        dtype = self.dtype
        part = length // self.mesh.cp.size
        if config.tie_embeddings:
            wide = torch.promote_types(dtype, torch.float32)
            tokens = self.absent((part, num_sequences, config.vocab_size), dtype, "the logits")
            losses = self.absent((num_sequences, length), wide, "the losses")
            order = None
            if config.head == "pretraining":
                order = self.absent((num_sequences, 2), dtype, "the logits of the order")
            return EncoderResult(
                logits=tokens, losses=losses if has_losses else None, order_logits=order
            )
        shards = self.mesh.tp.size if self.mesh.sequence_parallel else 1
        shape = part // shards, num_sequences, config.hidden_size
        shapes = {"classifier": (config.num_labels,), "span": (length, 2)}
        logits: Tensor | None = None
        if config.head in shapes:
            logits = self.absent((num_sequences, *shapes[config.head]), dtype, "the logits")
        pooled = self.absent((num_sequences, config.hidden_size), dtype, "the pooled output")
        return EncoderResult(
            self.absent(shape, dtype, "the hidden states"),
            pooled if config.head == "pooler" else None,
            logits,
        )

    def gather_hidden(
        self, hidden: Float[Tensor, "seq_local batch hidden"]
    ) -> Float[Tensor, "batch seq hidden"]:
        """Return the output of the last layer for all tokens, on every rank of tp and cp.

        All ranks of tp must compute the same function of the result.

        Args:
            hidden: This rank's part of the output.

        Communication: under sequence parallelism an all-gather over tp in the forward pass and none
            in the backward pass; over cp an all-gather in the forward pass and a reduce-scatter in
            the backward pass.
        """
        mesh = self.mesh
        parts = mesh.cp.size * (mesh.tp.size if mesh.sequence_parallel else 1)
        if isinstance(hidden, RemoteTensor) and parts > 1:
            shape = hidden.shape[1], hidden.shape[0] * parts, hidden.shape[2]
            return self.absent(shape, hidden.dtype, "the hidden states")
        part = gather_from_axis(hidden, mesh.tp, dim=0) if mesh.sequence_parallel else hidden
        return join_parts(part, mesh.cp).transpose(0, 1)

    def gather_logits(
        self, logits: Float[Tensor, "seq_part batch vocab_local"]
    ) -> Float[Tensor, "batch seq vocab"]:
        """Return the logits of a masked language model for all tokens, on every rank of tp and cp.

        Args:
            logits: Logits of this rank in :class:`EncoderResult`.

        Communication: an all-gather over tp in the forward pass and none in the backward pass; over
            cp an all-gather in the forward pass and a reduce-scatter in the backward pass.
        """
        cp = self.mesh.cp
        vocabulary = self.config.vocab_size
        if isinstance(logits, RemoteTensor):
            # A placeholder has all columns, and no values to gather.
            if cp.size == 1:
                return logits.transpose(0, 1)
            shape = logits.shape[1], logits.shape[0] * cp.size, vocabulary
            return self.absent(shape, logits.dtype, "the logits")
        columns = gather_from_axis(logits, self.mesh.tp, dim=-1)[..., :vocabulary]
        return join_parts(columns, cp).transpose(0, 1)

    @override
    def embed(self, call: EncoderCall) -> Float[Tensor, "seq_local batch hidden"]:
        rows = call.rows
        assert self.embedding is not None, "the first virtual stage holds the embedding"
        positions = self._positions(rows)
        types = torch.zeros_like(positions) if rows.token_types is None else rows.token_types
        parts = (
            None if tensor is None else own_part(tensor, self.mesh.cp, 1)
            for tensor in (rows.tokens, positions, types, rows.vectors)
        )
        hidden: Tensor = self.embedding(*parts)
        return hidden

    def _positions(self, rows: EncoderInput) -> Tensor:
        """Return the position of each token, which rows may give."""
        if rows.positions is not None:
            return rows.positions
        if self.config.positions == "tokens" and rows.tokens is not None:
            padding = self.config.padding_id
            assert padding is not None, "a configuration with token positions has a padding token"
            counted = (rows.tokens != padding).long()
            return counted.cumsum(1) * counted + padding
        first = self.config.first_position
        given = rows.tokens_or_vectors
        num_sequences, length = given.shape[:2]
        return torch.arange(first, first + length, device=given.device).expand(
            num_sequences, length
        )

    def _span(self, rows: EncoderInput, dtype: torch.dtype) -> AttentionSpan | None:
        """Return the span of layers that compute in a dtype; None without padding."""
        if rows.lengths is not None and self._reads_lengths(rows, dtype):
            return AttentionSpan.padded(rows.lengths, rows.tokens_or_vectors.shape[1])
        mask = rows.not_padding
        if mask is None:
            return None
        span = AttentionSpan(causal=False, mask=mask[:, None, None, :])
        cp = self.mesh.cp
        if cp.size > 1 and transport_of(span, self.mesh, self.context) != _WHOLE:
            # Each rank has parts of rows, and applies the mask to its keys itself.
            return span
        return prepared(span, *mask.shape, dtype=dtype, device=rows.tokens_or_vectors.device)

    def _reads_lengths(self, rows: EncoderInput, dtype: torch.dtype) -> bool:
        """Return whether a kernel takes the lengths of rows; otherwise it needs a mask of keys."""
        if rows.lengths is None or (self.mesh.cp.size > 1 and self.context.transport != _WHOLE):
            # With parts of rows, each rank skips its own padding keys by their mask.
            return False
        # The kernel depends on the kind of the span alone.
        borders = torch.empty(0, dtype=torch.int32)
        like = AttentionSpan(causal=False, borders=borders, key_borders=borders)
        choice = choose_core(
            rows.tokens_or_vectors.device,
            dtype,
            like,
            dropout=self.config.attention_dropout if self.training else 0.0,
            head_dim=self.config.head_size,
        )
        return choice.core == "flash"

    def _num_joined(self, rows: EncoderInput, dtype: torch.dtype) -> int | None:
        """Return the number of rows if the layers process them as one row; None if they do not.

        Kernels that read lengths take the tokens of one row after the other. With several rows in
        a batch every layer would copy its queries, keys, values and outputs to this order and back.
        """
        is_cut = self.mesh.cp.size > 1 or self.mesh.sequence_parallel
        if is_cut or not self._reads_lengths(rows, dtype) or self._may_mix_positions:
            return None
        return rows.tokens_or_vectors.shape[0]

    @cached_property
    def _may_mix_positions(self) -> bool:
        """Whether modules that are not of this package may mix the positions of a row."""
        return any(True for _ in foreign_parts(self))

    @override
    def _finish(self, hidden: Tensor, call: EncoderCall) -> EncoderResult:
        # A call of its own, whose arguments a graph can name: graphs begin or end at it.
        return self.result(hidden, call.labels, call.ignore_index, call.num_joined)

    def result(
        self,
        hidden: Float[Tensor, "_ _ hidden"],
        labels: Int[Tensor, "batch seq"] | None,
        ignore_index: int,
        num_joined: int | None,
    ) -> EncoderResult:
        """Return the outputs of the head; ``num_joined`` is that of :class:`EncoderCall`."""
        head: Any = self.head
        if num_joined is not None:
            hidden = hidden.view(num_joined, -1, hidden.shape[-1]).transpose(0, 1).contiguous()
        cp = self.mesh.cp
        # Each rank of cp reads the first token of its part; the first rank has that of the row.
        if self.config.head == "classifier":
            return EncoderResult(hidden, logits=of_first_rank(head(hidden), cp))
        if self.config.head == "span":
            return EncoderResult(hidden, logits=join_parts(head(hidden), cp, dim=1))
        if self.config.head == "pooler":
            return EncoderResult(hidden, pooled=of_first_rank(head(hidden), cp))
        if self.config.head == "none":
            return EncoderResult(hidden)
        logits = head(hidden, None if self.embedding is None else self.embedding.word.weight)
        order = None
        if self.config.head == "pretraining":
            order = of_first_rank(head.order_logits(hidden), cp)
        if labels is None:
            return EncoderResult(logits=logits, order_logits=order)
        targets = Targets(labels, 0.0, ignore_index)
        losses = targets.losses(logits, self.mesh, self.config.vocab_size)
        return EncoderResult(logits=logits, losses=losses, order_logits=order)
