"""GPT: decoders of many families, cut over tensor and pipeline axes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.collectives import gather_from_axis
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.attention_span import AttentionSpan, attention_mask
from lightning_megatron.layers.embedding import (
    InputEmbedding,
    PositionEmbedding,
    VocabParallelEmbedding,
    VocabParallelHead,
    vocab_logits,
)
from lightning_megatron.layers.init import Initializer, initialize_
from lightning_megatron.layers.loss import vocab_parallel_cross_entropy
from lightning_megatron.layers.recompute import Recompute, check_recompute
from lightning_megatron.layers.rotary import RotaryTables
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.gpt_block import build_block, build_norm
from lightning_megatron.models.stage import PipelinedModule

_WORD_EMBEDDING = "embedding.word.weight"


class GPT(PipelinedModule):
    """Predict the next token; hold only this rank's shards of this rank's layers.

    Equal to Hugging Face's models of the families that its settings describe (GPT-2, Llama, Mistral, Qwen, Gemma,
    Phi-3, GPT-NeoX) with the same weights, under every layout. Built on the
    meta device, then initialised one tensor at a time on the mesh's device, so no rank ever holds the full model; under
    an ambient meta device it stays there, and ``layers.init.initialize_`` fills it later. Layers are named by their
    index in the whole model, so names do not depend on the layout.

    Args:
        config: Shape of the model.
        mesh: The groups of this rank; None means one process that holds everything.
        seed: Seed of the initial weights, equal on all ranks; None means ``torch.initial_seed()``.

    Raises:
        ParallelPlanError: If the layout cannot hold the model.
    """

    def __init__(self, config: GPTConfig, mesh: ParallelMesh | None = None, seed: int | None = None) -> None:
        seed = torch.initial_seed() if seed is None else seed
        super().__init__(mesh or single_mesh(seed))
        config.check_layout(self.mesh.layout, self.mesh.sequence_parallel)
        self.config = config
        self.recompute: Recompute = "none"
        self._owns_mesh, self._num_calls = mesh is None, 0
        self._rotary = RotaryTables(config.rotary_size, config.rotary_base, config.rotary_scaling)
        self._dtype = torch.get_default_dtype()
        self._layers_of_chunk = config.stage_layers(self.mesh.layout)[self.mesh.pp.rank]
        with torch.device("meta"):
            self._build()
        if not torch.empty(0).is_meta:
            initialize_(self, self.mesh.device, seed)

    def _build(self) -> None:
        config, mesh = self.config, self.mesh
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
                position = PositionEmbedding(config.max_seq_length, config.hidden_size, mesh, initializer=drawn)
            self.embedding = InputEmbedding(
                word, position, mesh=mesh, dropout=config.hidden_dropout, scale=config.embedding_scale
            )
        indices = [index for layers in self._layers_of_chunk for index in layers]
        self.layers = nn.ModuleDict({str(index): build_block(config, mesh, index) for index in indices})
        if self.is_last_stage():
            self.final_norm = build_norm(config, mesh) if config.norm_position == "pre" else None
            # With both ends on one rank, a tied head has no weight of its own: it reads the embedding's.
            if not (config.tie_embeddings and mesh.pp.size == 1):
                tied_to = _WORD_EMBEDDING if config.tie_embeddings else None
                self.head = VocabParallelHead(config.vocab_size, config.hidden_size, mesh, tied_to=tied_to, **padding)

    def forward(
        self,
        tokens: Tensor | None,
        labels: Tensor | None = None,
        label_smoothing: float = 0.0,
        ignore_index: int = -100,
        *,
        span: AttentionSpan | None = None,
        embeddings: Tensor | None = None,
    ) -> Tensor:
        """Return the loss of every token, or the logits when there are no labels.

        Shapes: tokens and labels ``(B, S)``; embeddings ``(B, S, D)``; losses ``(B, S)``; logits ``(B, S, V)``.

        Args:
            tokens: Token ids; None where embeddings are given.
            labels: The id that follows each token, or ``ignore_index``.
            label_smoothing: Probability spread evenly over the vocabulary.
            ignore_index: Label whose loss is zero.
            span: Padding, positions and documents of the rows, equal on every stage; None means rows of one document
                without padding.
            embeddings: Vectors in place of those of the tokens, not scaled; whole on every rank.

        Returns:
            Losses in float32 (float64 for a float64 model), or logits in the model's dtype.

        Raises:
            ParallelPlanError: If the sequence is too long, or does not divide by tp under sequence parallelism.
            UnsupportedError: If there are neither tokens nor embeddings, or both.
            StageDone: On pipeline stages that do not compute the result.

        Communication: that of the layers; without labels an all-gather of the logits over tp.
        """
        given = _one_of(tokens, embeddings)
        self.check_callable_whole()
        check_recompute(self.recompute)
        self.config.check_seq_length(given.shape[1], self.mesh.tp.size if self.mesh.sequence_parallel else 1)
        if span is not None:
            span.check_shape(*given.shape[:2])
        self._advance_own_streams(given.device)

        return self.run_stage(
            lambda: self._embed(tokens, span, embeddings),
            lambda hidden, chunk: self._run_layers(hidden, chunk, given.shape[1], span),
            lambda hidden: self._result(self._logits(hidden), labels, label_smoothing, ignore_index),
            lambda: self.boundary(given),
        )

    def boundary(self, tokens: Tensor) -> tuple[torch.Size, torch.dtype]:
        """Return shape and dtype of the hidden between stages.

        Shapes: tokens ``(B, S)``, or embeddings ``(B, S, D)``; the hidden is ``(S, B, D)``, or ``(S/tp, B, D)`` under
        sequence parallelism.
        """
        num_sequences, seq_length = tokens.shape[:2]
        shards = self.mesh.tp.size if self.mesh.sequence_parallel else 1
        first = next(self.parameters(), None)
        dtype = self._dtype if first is None else first.dtype
        return torch.Size((seq_length // shards, num_sequences, self.config.hidden_size)), dtype

    @override
    def chunk_of(self, name: str) -> int | None:
        kind, _, rest = name.partition(".")
        if kind == "layers":
            index = int(rest.partition(".")[0])
            return next(chunk for chunk, layers in enumerate(self._layers_of_chunk) if index in layers)
        return 0 if kind == "embedding" else self.num_chunks - 1

    def _embed(self, tokens: Tensor | None, span: AttentionSpan | None, embeddings: Tensor | None) -> Tensor:
        assert self.embedding is not None, "the first virtual stage holds the embedding"
        return self.embedding(tokens, positions=None if span is None else span.positions, vectors=embeddings)

    def _run_layers(self, hidden: Tensor, chunk: int, seq_length: int, span: AttentionSpan | None) -> Tensor:
        positions = None if span is None else span.positions
        rotary = self._rotary(seq_length, hidden, positions) if self.config.position == "rotary" else None
        # All layers that see equally far share a mask.
        masks: dict[int | None, Tensor | None] = {}
        for index in self._layers_of_chunk[chunk]:
            window = self.config.window_of(index)
            if window not in masks:
                masks[window] = attention_mask(
                    span, window, seq_length, dtype=_dtype_of_products(hidden), device=hidden.device
                )
            hidden = self.layers[str(index)](hidden, rotary, self.recompute, masks[window])
        return hidden

    def _logits(self, hidden: Tensor) -> Tensor:
        if self.final_norm is not None:
            hidden = self.final_norm(hidden)
        if self.head is not None:
            return self.head(hidden)
        assert self.embedding is not None, "a tied head without its own weight is on the embedding's rank"
        return vocab_logits(hidden, self.embedding.word.weight, self.mesh)

    def _result(self, logits: Tensor, labels: Tensor | None, label_smoothing: float, ignore_index: int) -> Tensor:
        vocab_size = self.config.vocab_size
        if labels is None:
            return gather_from_axis(logits, self.mesh.tp, dim=-1)[..., :vocab_size].transpose(0, 1)
        losses = vocab_parallel_cross_entropy(
            logits, labels.t(), self.mesh, vocab_size, label_smoothing, ignore_index, overwrite_logits=True
        )
        return losses.t().contiguous()

    def _advance_own_streams(self, device: torch.device) -> None:
        # Without a strategy nobody else moves the random streams on, and every step would drop the same elements. The
        # user may also have moved the model since it was built.
        if self._owns_mesh and self.training:
            self.mesh.random.device = device
            self.mesh.random.begin_microbatch(self._num_calls, 0)
            self._num_calls += 1


def _one_of(tokens: Tensor | None, embeddings: Tensor | None) -> Tensor:
    given = embeddings if tokens is None else tokens
    if given is None or (tokens is not None and embeddings is not None):
        raise UnsupportedError(
            f"GPT takes tokens or embeddings: {'neither' if given is None else 'both'} were given. One stands for the "
            "other. Give one of them."
        )
    return given


def _dtype_of_products(hidden: Tensor) -> torch.dtype:
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype


def single_mesh(seed: int) -> ParallelMesh:
    """Return the mesh of one process on the ambient default device, or on the CPU where that is meta.

    Args:
        seed: Seed of the random streams.
    """
    ambient = torch.empty(0).device
    return ParallelMesh.single("cpu" if ambient.type == "meta" else ambient, seed=seed)
