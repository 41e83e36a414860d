"""GPT decoders of many families with tensor, pipeline, context and expert parallelism."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from lightning_megatron.groups.collectives import gather_from_axis
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.attention.document_cut import TokenOrder
from lightning_megatron.layers.attention.span import AttentionSpan
from lightning_megatron.layers.context_parallel.sequence_order import at_place, join_parts, own_part
from lightning_megatron.layers.embedding import (
    InputEmbedding,
    VocabParallelEmbedding,
    VocabParallelHead,
    vocab_logits,
)
from lightning_megatron.layers.loss.chunked_loss import LogitForm
from lightning_megatron.layers.parameters.init import Initializer
from lightning_megatron.layers.replicated import TableEmbedding
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.config_checks import NORM_POSITIONS
from lightning_megatron.models.gpt_block import (
    build_block,
    build_norm,
    build_rotary,
    context_choice,
)
from lightning_megatron.models.gpt_losses import Targets
from lightning_megatron.models.layer_inputs import GPTCall, continues_cache, laid_out, layer_inputs
from lightning_megatron.models.layered import WORD_EMBEDDING, LayeredModule, either_input
from lightning_megatron.models.layered import single_mesh as single_mesh
from lightning_megatron.models.remote_tensor import check_present
from lightning_megatron.plan.model_shape import LossChunk, tokens_of_chunk
from lightning_megatron.plan.shards import padded_vocab_size
from lightning_megatron.shapes import Float, Int


class GPT(LayeredModule):
    """Decoder that predicts the next token. Each rank has only its shards of its stages' layers.

    In every layout it equals Hugging Face's models of the supported families with the same weights;
    ``docs/hugging_face.md`` lists these families.

    The model is built on the meta device and then initialised one tensor at a time on the mesh's
    device, so that no rank ever holds the full model. Inside ``torch.device("meta")`` it stays on
    the meta device until ``layers.parameters.init.initialize_`` fills it. Layers are named by their
    index in the whole model, so names do not depend on the layout.

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
        #: Rotary tables of the layers, by name.
        self.rotary = build_rotary(config, self.mesh)
        #: Transport of attention over cp in all layers.
        self.context = context_choice(config, self.mesh)
        #: Number of tokens whose logits exist at once for the loss; None stores all logits.
        self.loss_chunk: LossChunk = None

    def _build(self) -> None:
        config = self.config
        mesh = self.mesh
        drawn = Initializer.normal(config.init_std)
        padding: dict[str, Any] = {"multiple": config.vocab_multiple, "initializer": drawn}
        self.embedding: InputEmbedding | None = None
        self.final_norm = None
        self.head: VocabParallelHead | None = None
        if self.is_first_stage():
            word = VocabParallelEmbedding(
                config.vocab_size, config.hidden_size, mesh, padding_id=config.padding_id, **padding
            )
            position = None
            if config.position == "learned":
                position = TableEmbedding(
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
        indices = [index for layers in self.layers_of_chunk for index in layers]
        self.layers = nn.ModuleDict(
            {str(index): build_block(config, mesh, index) for index in indices}
        )
        if self.is_last_stage():
            has_norm = NORM_POSITIONS[config.norm_position].has_final_norm
            self.final_norm = build_norm(config, mesh) if has_norm else None
            # On the rank of the embedding, a tied head has no parameter: it reads the embedding.
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
        sums: bool = False,
    ) -> Float[Tensor, "batch seq"] | Float[Tensor, "batch seq vocab"] | Float[Tensor, ""]:
        """Return the loss of each token or the sum of losses, or the logits without labels.

        Args:
            tokens: Token ids; None if embeddings are given.
            labels: Id of the token that follows each token, or ``ignore_index``.
            label_smoothing: Probability spread evenly over the vocabulary.
            ignore_index: Label whose loss is zero.
            span: Documents, padding and positions of the rows, equal on every stage; None means
                rows of one document without padding. The configuration of the layers determines
                causality, windows, soft caps and scales.
            embeddings: Vectors that replace the token embeddings, with all elements on every rank.
                They are scaled only if ``config.scales_vectors`` is True.
            sums: Whether to return the sum of the losses of all tokens.

        Returns:
            Losses in float32 (float64 for a float64 model), or logits in the model's dtype.

        Raises:
            ParallelPlanError: If the sequence is too long, or does not divide by tp under sequence
                parallelism.
            UnsupportedError: If neither or both of tokens and embeddings are given.
            StageDone: On pipeline stages that do not compute the result.

        Communication: that of the layers; without labels an all-gather of the logits over tp; an
            all-gather of the losses or logits over cp.
        """
        return self._run(tokens, labels, label_smoothing, ignore_index, span, embeddings, sums)

    def logits_at(
        self, tokens: Int[Tensor, "batch seq"], place: int, span: AttentionSpan | None = None
    ) -> Float[Tensor, "batch vocab"]:
        """Return the logits of one position of each row, and compute no other logits.

        Args:
            tokens: Token ids.
            place: Index of the position.
            span: Documents, padding and positions of the rows, and the cache that they continue;
                None means rows of one document without padding or cache.

        Raises:
            StageDone: On pipeline stages that do not compute the result.

        Communication: that of the layers, an all-gather of the logits over tp, and an all-reduce of
            one hidden state over cp.
        """
        logits: Tensor = self._run(tokens, None, 0.0, -100, span, None, False, place)
        return logits

    def _run(
        self,
        tokens: Tensor | None,
        labels: Tensor | None,
        label_smoothing: float,
        ignore_index: int,
        span: AttentionSpan | None,
        embeddings: Tensor | None,
        sums: bool,
        place: int | None = None,
    ) -> Any:
        """Check the inputs, and run the stages of this rank; see :meth:`forward`."""
        inputs = either_input("GPT takes either tokens or embeddings", tokens, embeddings)
        check_present(tokens, embeddings)
        self.check_has_all_stages()
        parts = 1 if continues_cache(span) else self.mesh.cp.size
        shards = self.mesh.tp.size if self.mesh.sequence_parallel else 1
        self.config.check_seq_length(inputs.shape[1], shards, parts)
        span = laid_out(span, inputs, self.mesh, self.context)
        self._advance_own_streams(inputs.device)
        if self.cursor is None or not self.cursor.probe:
            self._check_tokens(inputs.shape[0] * inputs.shape[1])
        rows = span or AttentionSpan()
        targets = None
        if labels is not None:
            targets = Targets(labels, label_smoothing, ignore_index, rows.order, sums)
        call = GPTCall(
            tokens, embeddings, rows.positions, rows.order, targets, place, rows.past is not None
        )

        def run(chunk: int, hidden: Tensor | None) -> Any:
            like = self._stream_like(inputs, embeddings) if hidden is None else hidden
            layers = layer_inputs(
                self.config,
                self.layers_of_chunk[chunk],
                self.rotary,
                self.mesh,
                like,
                inputs.shape[:2],
                span,
                dropout=self.config.attention_dropout if self.training else 0.0,
            )
            return self.run_chunk(chunk, hidden, call, layers, call.continues)

        return self.run_stage(
            run,
            lambda: self.boundary(inputs, parts),
            lambda: self._placeholder(inputs.shape[:2], labels is not None, sums),
        )

    def _placeholder(self, shape: torch.Size, has_losses: bool, sums: bool) -> Any:
        """Return a placeholder for the losses, their sum or the logits."""
        if has_losses:
            wide = torch.promote_types(self.dtype, torch.float32)
            return self.absent(() if sums else shape, wide, "the losses")
        return self.absent((*shape, self.config.vocab_size), self.dtype, "the logits")

    def _stream_like(self, inputs: Tensor, embeddings: Tensor | None) -> Tensor:
        """Return an empty tensor with the dtype and on the device of the embedding's output."""
        assert self.embedding is not None, "the first virtual stage holds the embedding"
        dtype = self.embedding.word.weight.dtype if embeddings is None else embeddings.dtype
        if self.embedding.position is not None:
            dtype = torch.promote_types(dtype, self.embedding.position.weight.dtype)
        return inputs.new_empty(0, dtype=dtype)

    @override
    def embed(self, call: GPTCall) -> Float[Tensor, "seq_local batch hidden"]:
        assert self.embedding is not None, "the first virtual stage holds the embedding"
        tokens = call.tokens
        vectors = call.vectors
        positions = call.positions
        cp = self.mesh.cp
        if cp.size > 1:
            inputs = tokens if vectors is None else vectors
            assert inputs is not None, "a call without vectors has tokens"
            if positions is None and self.embedding.position is not None:
                index = torch.arange(inputs.shape[1], device=inputs.device)
                positions = index.expand(inputs.shape[:2])
            tokens, positions, vectors = (
                None if tensor is None else own_part(tensor, cp, 1, call.order)
                for tensor in (tokens, positions, vectors)
            )
        return self.embedding(tokens, positions=positions, vectors=vectors)

    @override
    def _finish(self, hidden: Tensor, call: GPTCall) -> Any:
        # A call of its own, whose arguments a graph can name: graphs begin or end at it.
        return self.result(hidden, call.targets, call.order, call.place)

    def result(
        self,
        hidden: Float[Tensor, "seq_local batch hidden"],
        targets: Targets | None,
        order: TokenOrder | None,
        place: int | None,
    ) -> Any:
        """Return the losses or their sum, the logits, or the logits at one position.

        ``hidden`` is the output of the last norm; the other arguments are those of
        :class:`GPTCall`.
        """
        if place is not None:
            return self._logits_at_place(hidden, place, order)
        chunk = None
        if targets is not None:
            chunk = self.tokens_at_once(targets.labels.numel() // self.mesh.cp.size)
        if targets is None or chunk is None:
            return self._of_logits(self.logits(hidden), targets, order)
        return self._in_chunks(hidden, targets, chunk)

    def _of_logits(self, logits: Tensor, targets: Targets | None, order: TokenOrder | None) -> Any:
        """Return the losses of logits, or the logits of all ranks without targets."""
        vocab_size = self.config.vocab_size
        if targets is not None:
            return targets.losses(logits, self.mesh, vocab_size)
        full = gather_from_axis(logits, self.mesh.tp, dim=-1)[..., :vocab_size]
        return join_parts(full, self.mesh.cp, cut=order).transpose(0, 1)

    def _in_chunks(self, hidden: Tensor, targets: Targets, chunk: int) -> Any:
        """Return the losses, with the logits of some tokens at a time."""
        options: dict[str, Any] = {"mesh": self.mesh, "vocab": self.config.vocab_size}
        options |= {"form": self._form, "early_gradients": self.loss_chunk == "forward"}
        return self._read_head(hidden, partial(targets.chunked_losses, chunk=chunk, **options))

    def tokens_at_once(self, num_tokens: int) -> int | None:
        """Return the number of tokens of which the head and the loss compute the logits at once.

        The result is the same on all stages; None means that all logits are stored. ``num_tokens``
        counts a microbatch in the part of the rows on one rank of cp.
        """
        config = self.config
        tp = self.mesh.tp.size
        vocab_rows = padded_vocab_size(config.vocab_size, tp, config.vocab_multiple) // tp
        return tokens_of_chunk(self.loss_chunk, num_tokens, vocab_rows, self.dtype.itemsize)

    def logits(
        self, hidden: Float[Tensor, "seq_local batch hidden"]
    ) -> Float[Tensor, "seq batch vocab_local"]:
        """Return this rank's shard of the logits; only the last virtual stage can compute it."""
        return self._form.applied(self._read_head(hidden, partial(vocab_logits, mesh=self.mesh)))

    def _logits_at_place(self, hidden: Tensor, place: int, order: TokenOrder | None) -> Tensor:
        part = gather_from_axis(hidden, self.mesh.tp, 0) if self.mesh.sequence_parallel else hidden
        selected = at_place(part, place, self.mesh.cp, order)
        shard = self._form.applied(self._read_head(selected, F.linear))
        return gather_from_axis(shard, self.mesh.tp, dim=-1)[..., : self.config.vocab_size]

    def _read_head(self, hidden: Tensor, compute: Callable[[Tensor, Tensor], Any]) -> Any:
        """Return the result of a function of hidden states and of the weight of the head."""
        if self.head is not None:
            return self.head(hidden, compute)
        assert self.embedding is not None, "a tied head without a weight is on the first stage"
        return compute(hidden, self.embedding.word.weight)

    @property
    def _form(self) -> LogitForm:
        return LogitForm(self.config.logit_scale, self.config.logit_soft_cap)
