"""GPT: decoders of many families with tensor, pipeline and expert parallelism."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_megatron.groups.collectives import gather_from_axis
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.attention_core import prepared
from lightning_megatron.layers.attention_span import AttentionSpan
from lightning_megatron.layers.chunked_loss import LogitForm
from lightning_megatron.layers.context_parallel.sequence_order import joined_parts, own_part
from lightning_megatron.layers.document_cut import DocumentCut
from lightning_megatron.layers.embedding import (
    InputEmbedding,
    PositionEmbedding,
    VocabParallelEmbedding,
    VocabParallelHead,
    vocab_logits,
)
from lightning_megatron.layers.init import Initializer
from lightning_megatron.layers.segments import Segment
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.gpt_block import (
    attention_kind,
    build_block,
    build_norm,
    build_rotary,
    context_choice,
    rotary_name,
)
from lightning_megatron.models.gpt_inputs import laid_out, one_of
from lightning_megatron.models.gpt_losses import Targets
from lightning_megatron.models.layered import WORD_EMBEDDING, LayeredModule, dtype_of_products
from lightning_megatron.models.layered import single_mesh as single_mesh
from lightning_megatron.models.remote_tensor import check_present
from lightning_megatron.plan.loss_chunks import LossChunk, tokens_of_chunk
from lightning_megatron.plan.shards import padded_vocab_size
from lightning_megatron.shapes import Float, Int


class GPT(LayeredModule):
    """Decoder that predicts the next token. Each rank has only its shards of its stages' layers.

    Equal to Hugging Face's models of the supported families with the same weights, under every
    layout; ``docs/hugging_face.md`` lists them.

    The model is built on the meta device and then initialised one tensor at a time on the mesh's
    device, so that no rank ever holds the full model. Under an ambient meta device it stays on meta
    until ``layers.init.initialize_`` fills it. Layers are named by their index in the whole model,
    so names do not depend on the layout.

    Args:
        config: Configuration of the model.
        mesh: The groups of this rank; None means a single process with the whole model.
        seed: Seed of the initial weights, equal on all ranks; None means ``torch.initial_seed()``.

    Raises:
        ParallelPlanError: If the model cannot be divided over the layout.
    """

    config: GPTConfig

    def __init__(
        self, config: GPTConfig, mesh: ParallelMesh | None = None, seed: int | None = None
    ) -> None:
        super().__init__(config, mesh, seed)
        self._rotary = build_rotary(config, self.mesh)
        #: Transport of attention over cp in all layers.
        self.context = context_choice(config, self.mesh)
        #: List to which a call appends the input of each layer and the output of the last norm, or
        #: None.
        self.hidden_states: list[Tensor] | None = None
        #: Tokens whose logits exist at once where losses are computed; None stores those of all.
        self.loss_chunk: LossChunk = None

    def _build(self) -> None:
        config = self.config
        mesh = self.mesh
        drawn = Initializer.normal(config.init_std)
        padding: dict[str, Any] = {"multiple": config.vocab_multiple, "initializer": drawn}
        self.embedding: InputEmbedding | None = None
        self.final_norm: nn.Module | None = None
        self.head: VocabParallelHead | None = None
        if self.is_first_stage():
            word = VocabParallelEmbedding(
                config.vocab_size, config.hidden_size, mesh, padding_id=config.padding_id, **padding
            )
            position = None
            if config.position == "learned":
                position = PositionEmbedding(
                    config.max_seq_length, config.hidden_size, mesh, initializer=drawn
                )
            self.embedding = InputEmbedding(
                word,
                position,
                mesh=mesh,
                dropout=config.hidden_dropout,
                scale=config.embedding_scale,
                scales_vectors=config.scales_vectors,
                norm=build_norm(config, mesh) if config.embedding_norm else None,
            )
        indices = [index for layers in self._layers_of_chunk for index in layers]
        self.layers = nn.ModuleDict(
            {str(index): build_block(config, mesh, index) for index in indices}
        )
        if self.is_last_stage():
            self.final_norm = build_norm(config, mesh) if config.norm_position != "post" else None
            # On the embedding's rank a tied head has no parameter: it reads the embedding's weight.
            if not (config.tie_embeddings and self.is_first_stage()):
                tied_to = WORD_EMBEDDING if config.tie_embeddings else None
                self.head = VocabParallelHead(
                    config.vocab_size, config.hidden_size, mesh, tied_to=tied_to, **padding
                )

    def forward(
        self,
        tokens: Int[Tensor, "batch seq"] | None,
        labels: Int[Tensor, "batch seq"] | None = None,
        label_smoothing: float = 0.0,
        ignore_index: int = -100,
        *,
        span: AttentionSpan | None = None,
        embeddings: Float[Tensor, "batch seq hidden"] | None = None,
    ) -> Float[Tensor, "batch seq"] | Float[Tensor, "batch seq vocab"]:
        """Return the loss of each token, or the logits if there are no labels.

        Args:
            tokens: Token ids; None if embeddings are given.
            labels: Id of the token that follows each token, or ``ignore_index``.
            label_smoothing: Probability spread evenly over the vocabulary.
            ignore_index: Label whose loss is zero.
            span: Documents, padding and positions of the rows, equal on every stage; None means
                rows of one document without padding. The layers say whether attention is causal,
                and have their windows, soft caps and scales.
            embeddings: Vectors that replace the token embeddings, complete on every rank. They are
                scaled only if ``config.scales_vectors`` is true.

        Returns:
            Losses in float32 (float64 for a float64 model), or logits in the model's dtype.

        Raises:
            ParallelPlanError: If the sequence is too long, or does not divide by tp under sequence
                parallelism.
            UnsupportedError: If neither or both of tokens and embeddings are given.
            StageDone: On pipeline stages that do not compute the result.

        Communication: that of the layers; without labels an all-gather of the logits over tp, and
            one of losses or logits over cp.
        """
        return self._run(tokens, labels, label_smoothing, ignore_index, span, embeddings)

    def _run(
        self,
        tokens: Tensor | None,
        labels: Tensor | None,
        label_smoothing: float,
        ignore_index: int,
        span: AttentionSpan | None,
        embeddings: Tensor | None,
    ) -> Any:
        """Return what :meth:`_leave` makes of the last layer's output; see :meth:`forward`."""
        given = one_of(tokens, embeddings)
        check_present(tokens, embeddings)
        self.check_callable_whole()
        self.config.check_seq_length(
            given.shape[1],
            self.mesh.tp.size if self.mesh.sequence_parallel else 1,
            self.mesh.cp.size,
        )
        span = laid_out(span, given, self.mesh, self.context)
        self._advance_own_streams(given.device)
        if self.cursor is None or not self.cursor.probe:
            self._check_tokens(given.shape[0] * given.shape[1])

        rows = span or AttentionSpan()

        def run(chunk: int, hidden: Tensor | None) -> Any:
            like = self._stream_like(given, embeddings) if hidden is None else hidden
            values = {
                "tokens": tokens,
                "positions": rows.positions,
                "cut": rows.cut,
                "vectors": embeddings,
                "hidden": hidden,
                "labels": labels,
                "label_smoothing": label_smoothing,
                "ignore_index": ignore_index,
            }
            return self._run_chunk(chunk, values | self._tables(chunk, like, given.shape[:2], span))

        return self.run_stage(
            run,
            lambda: self.boundary(given),
            lambda: self._unknown(given.shape[0], given.shape[1], labels is not None),
        )

    def _unknown(self, num_sequences: int, length: int, has_losses: bool) -> Any:
        """Return a placeholder without values for the losses or logits."""
        if has_losses:
            return self.absent(
                (num_sequences, length),
                torch.promote_types(self.dtype, torch.float32),
                "the losses",
            )
        return self.absent(
            (num_sequences, length, self.config.vocab_size), self.dtype, "the logits"
        )

    def _stream_like(self, given: Tensor, embeddings: Tensor | None) -> Tensor:
        """Return an empty tensor with the dtype and on the device of the embedding's output."""
        assert self.embedding is not None, "the first virtual stage holds the embedding"
        dtype = self.embedding.word.weight.dtype if embeddings is None else embeddings.dtype
        if self.embedding.position is not None:
            dtype = torch.promote_types(dtype, self.embedding.position.weight.dtype)
        return given.new_empty(0, dtype=dtype)

    def _tables(
        self, chunk: int, like: Tensor, shape: torch.Size, span: AttentionSpan | None
    ) -> dict[str, Any]:
        """Return the rotary tables and the spans of a chunk's layers by name."""
        rows = span or AttentionSpan()
        places = rows.positions, rows.cut
        found: dict[str, Any] = {}
        # Layers with the same angles share tables, and those with the same window share a span.
        for index in self._layers_of_chunk[chunk]:
            name = rotary_name(self.config, index)
            if name not in found:
                tables = self._rotary.get(name)
                found[name] = None if tables is None else tables(shape[1], like, *places)
            name = _rows_of(self.config.window_of(index))
            if span is None and self.mesh.cp.size > 1:
                # Ranks that see parts of rows need no mask of whole ones.
                found[name] = None
            elif span is not None and span.cut is not None:
                found[name] = replace(span, positions=None)
            elif name not in found:
                found[name] = prepared(
                    attention_kind(self.config, index).over(span),
                    *shape,
                    dtype=dtype_of_products(like),
                    device=like.device,
                    dropout=self.config.attention_dropout if self.training else 0.0,
                    head_dim=self.config.head_size,
                )
        return found

    @property
    @override
    def watches_layers(self) -> bool:
        """Return whether the call collects the states of its layers."""
        return self.hidden_states is not None

    @override
    def _first_segment(self) -> Segment:
        assert self.embedding is not None, "the first virtual stage holds the embedding"
        return Segment(
            "embedding",
            self._embed,
            ("tokens", "positions", "vectors", "cut"),
            ("hidden",),
            scopes=("embedding",),
            modules=(self.embedding,),
        )

    @override
    def _inputs_of_layer(self, index: int) -> tuple[str, str]:
        return rotary_name(self.config, index), _rows_of(self.config.window_of(index))

    @override
    def _last_segment(self) -> Segment:
        head: nn.Module | None = self.head
        if head is None and self.embedding is not None:
            head = self.embedding.word
        return Segment(
            "head",
            self._leave,
            ("hidden", "labels", "label_smoothing", "ignore_index", "cut"),
            ("result",),
            scopes=("head",),
            modules=tuple(part for part in (self.final_norm, head) if part is not None),
        )

    def _embed(
        self,
        tokens: Tensor | None,
        positions: Tensor | None,
        vectors: Tensor | None,
        cut: DocumentCut | None,
    ) -> Tensor:
        assert self.embedding is not None, "the first virtual stage holds the embedding"
        cp = self.mesh.cp
        if cp.size > 1:
            given = tokens if vectors is None else vectors
            assert given is not None, "there are tokens where there are no vectors"
            if positions is None and self.embedding.position is not None:
                index = torch.arange(given.shape[1], device=given.device)
                positions = index.expand(given.shape[:2])
            tokens, positions, vectors = (
                None if one is None else own_part(one, cp, 1, cut)
                for one in (tokens, positions, vectors)
            )
        return self.embedding(tokens, positions=positions, vectors=vectors)

    @override
    def _run_layer(
        self,
        name: str,
        hidden: Tensor,
        rotary: tuple[Tensor, Tensor] | None,
        rows: AttentionSpan | None,
    ) -> Tensor:
        self._keep(hidden)
        return super()._run_layer(name, hidden, rotary, rows)

    def _leave(
        self,
        hidden: Tensor,
        labels: Tensor | None,
        label_smoothing: float,
        ignore_index: int,
        cut: DocumentCut | None,
    ) -> Any:
        if self.final_norm is not None:
            hidden = self.final_norm(hidden)
        self._keep(hidden)
        if labels is None:
            return self._result(self.logits(hidden), None, cut)
        targets = Targets(labels, label_smoothing, ignore_index, cut)
        chunk = self.tokens_at_once(labels.numel() // self.mesh.cp.size)
        if chunk is None:
            return self._result(self.logits(hidden), targets, cut)
        return self._chunked_result(hidden, targets, chunk)

    def tokens_at_once(self, num_tokens: int) -> int | None:
        """Return how many tokens the head and the loss compute at once; None means all, stored.

        The result is the same on all stages.

        Args:
            num_tokens: Tokens of a microbatch on one rank, those of all ranks of tp (tokens).
        """
        config = self.config
        tp = self.mesh.tp.size
        vocab_rows = padded_vocab_size(config.vocab_size, tp, config.vocab_multiple) // tp
        return tokens_of_chunk(self.loss_chunk, num_tokens, vocab_rows, self.dtype.itemsize)

    def _keep(self, hidden: Tensor) -> None:
        if self.hidden_states is not None:
            self.hidden_states.append(hidden)

    def logits(
        self, hidden: Float[Tensor, "seq_local batch hidden"]
    ) -> Float[Tensor, "seq batch vocab_local"]:
        """Return this rank's columns of the logits, on the last virtual stage.

        Args:
            hidden: Output of the last norm.
        """
        return self._form.applied(vocab_logits(hidden, self._head_weight, self.mesh))

    @property
    def _head_weight(self) -> Tensor:
        if self.head is not None:
            return self.head.weight
        assert self.embedding is not None, (
            "a tied head without its own weight is on the embedding's rank"
        )
        return self.embedding.word.weight

    @property
    def _form(self) -> LogitForm:
        return LogitForm(self.config.logit_scale, self.config.logit_soft_cap)

    def _result(self, logits: Tensor, targets: Targets | None, cut: DocumentCut | None) -> Any:
        vocab_size = self.config.vocab_size
        if targets is None:
            full = gather_from_axis(logits, self.mesh.tp, dim=-1)[..., :vocab_size]
            return joined_parts(full, self.mesh.cp, cut=cut).transpose(0, 1)
        return targets.losses(logits, self.mesh, vocab_size)

    def _chunked_result(self, hidden: Tensor, targets: Targets, chunk: int) -> Any:
        """Return what :meth:`_result` does, from the output of the last norm."""
        how = self.config.vocab_size, chunk, self._form
        return targets.chunked_losses(hidden, self._head_weight, self.mesh, *how)


def _rows_of(window: int | None) -> str:
    """Return the name of the span of layers with a window."""
    return "rows" if window is None else f"rows.{window}"
