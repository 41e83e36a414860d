"""GPT: the GPT-2 and Llama families, cut over tensor and pipeline axes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.collectives import gather_from_axis
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.attention import SelfAttention
from lightning_megatron.layers.block import TransformerBlock
from lightning_megatron.layers.embedding import (
    InputEmbedding,
    PositionEmbedding,
    VocabParallelEmbedding,
    VocabParallelHead,
    vocab_logits,
)
from lightning_megatron.layers.init import Initializer, initialize_
from lightning_megatron.layers.loss import vocab_parallel_cross_entropy
from lightning_megatron.layers.mlp import MLP
from lightning_megatron.layers.norm import LayerNorm, RMSNorm
from lightning_megatron.layers.recompute import Recompute, check_recompute
from lightning_megatron.layers.rotary import RotaryTables
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.stage import PipelinedModule

_WORD_EMBEDDING = "embedding.word.weight"
#: What each setting must be as long as nothing else is computed for it.
_FIXED: Mapping[str, object] = {
    "rotary_dim": None,
    "rotary_scaling": None,
    "qkv_bias": None,
    "output_bias": None,
    "mlp_bias": None,
    "qk_norm": False,
    "norm_offset": 0.0,
    "embedding_scale": 1.0,
    "attention_scale": None,
    "sliding_window": None,
    "parallel_residual": False,
}


class GPT(PipelinedModule):
    """Predict the next token; hold only this rank's shards of this rank's layers.

    Equal to Hugging Face's GPT2LMHeadModel and LlamaForCausalLM with the same weights, under every layout. Built on the
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
        _check_available(config)
        config.check_layout(self.mesh.layout, self.mesh.sequence_parallel)
        self.config = config
        self.recompute: Recompute = "none"
        self._owns_mesh, self._num_calls = mesh is None, 0
        self._rotary = RotaryTables(config.head_size, config.rotary_base)
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
            word = VocabParallelEmbedding(config.vocab_size, config.hidden_size, mesh, **padding)
            position = None
            if config.position == "learned":
                position = PositionEmbedding(config.max_seq_length, config.hidden_size, mesh, initializer=drawn)
            self.embedding = InputEmbedding(word, position, mesh=mesh, dropout=config.hidden_dropout)
        indices = [index for layers in self._layers_of_chunk for index in layers]
        self.layers = nn.ModuleDict({str(index): _block(config, mesh, index) for index in indices})
        if self.is_last_stage():
            self.final_norm = _norm(config, mesh) if config.norm_position == "pre" else None
            # With both ends on one rank, a tied head has no weight of its own: it reads the embedding's.
            if not (config.tie_embeddings and mesh.pp.size == 1):
                tied_to = _WORD_EMBEDDING if config.tie_embeddings else None
                self.head = VocabParallelHead(config.vocab_size, config.hidden_size, mesh, tied_to=tied_to, **padding)

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        label_smoothing: float = 0.0,
        ignore_index: int = -100,
    ) -> Tensor:
        """Return the loss of every token, or the logits when there are no labels.

        Shapes: tokens and labels ``(B, S)``; losses ``(B, S)``; logits ``(B, S, V)``.

        Args:
            tokens: Token ids.
            labels: The id that follows each token, or ``ignore_index``.
            label_smoothing: Probability spread evenly over the vocabulary.
            ignore_index: Label whose loss is zero.

        Returns:
            Losses in float32 (float64 for a float64 model), or logits in the model's dtype.

        Raises:
            ParallelPlanError: If the sequence is too long, or does not divide by tp under sequence parallelism.
            StageDone: On pipeline stages that do not compute the result.

        Communication: that of the layers; without labels an all-gather of the logits over tp.
        """
        self.check_callable_whole()
        check_recompute(self.recompute)
        self.config.check_seq_length(tokens.shape[1], self.mesh.tp.size if self.mesh.sequence_parallel else 1)
        self._advance_own_streams(tokens.device)

        return self.run_stage(
            lambda: self._embed(tokens),
            lambda hidden, chunk: self._run_layers(hidden, chunk, tokens.shape[1]),
            lambda hidden: self._result(self._logits(hidden), labels, label_smoothing, ignore_index),
            lambda: self.boundary(tokens),
        )

    def boundary(self, tokens: Tensor) -> tuple[torch.Size, torch.dtype]:
        """Return shape and dtype of the hidden between stages.

        Shapes: tokens ``(B, S)``; the hidden is ``(S, B, D)``, or ``(S/tp, B, D)`` under sequence parallelism.
        """
        num_sequences, seq_length = tokens.shape
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

    def _embed(self, tokens: Tensor) -> Tensor:
        assert self.embedding is not None, "the first virtual stage holds the embedding"
        return self.embedding(tokens)

    def _run_layers(self, hidden: Tensor, chunk: int, seq_length: int) -> Tensor:
        rotary = self._rotary(seq_length, hidden) if self.config.position == "rotary" else None
        for index in self._layers_of_chunk[chunk]:
            hidden = self.layers[str(index)](hidden, rotary, self.recompute)
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


def single_mesh(seed: int) -> ParallelMesh:
    """Return the mesh of one process on the ambient default device, or on the CPU where that is meta.

    Args:
        seed: Seed of the random streams.
    """
    ambient = torch.empty(0).device
    return ParallelMesh.single("cpu" if ambient.type == "meta" else ambient, seed=seed)


def _check_available(config: GPTConfig) -> None:
    for name, value in _FIXED.items():
        if getattr(config, name) != value:
            raise UnsupportedError(
                f"GPT does not compute {name} ({getattr(config, name)}) yet. Leave it at its default, {value}."
            )
    if config.activation in ("relu", "geglu", "geglu_tanh"):
        raise UnsupportedError(
            f"GPT does not compute activation ({config.activation}) yet. Use gelu, gelu_tanh or swiglu."
        )


def _norm(config: GPTConfig, mesh: ParallelMesh) -> nn.Module:
    if config.norm == "rmsnorm":
        return RMSNorm(config.hidden_size, mesh, eps=config.norm_eps)
    return LayerNorm(config.hidden_size, mesh, eps=config.norm_eps, bias=config.bias)


def _block(config: GPTConfig, mesh: ParallelMesh, index: int) -> TransformerBlock:
    drawn = Initializer.normal(config.init_std)
    residual = Initializer.residual(config.init_std, config.num_layers)
    attention = SelfAttention(
        config.hidden_size,
        config.num_heads,
        mesh,
        num_kv_heads=config.kv_heads,
        head_dim=config.head_size,
        bias=config.bias,
        dropout=config.attention_dropout,
        layer=index + 1,
        initializer=drawn,
        output_initializer=residual,
    )
    mlp = MLP(
        config.hidden_size,
        config.ffn_size,
        mesh,
        activation=cast(Any, config.activation),
        bias=config.bias,
        initializer=drawn,
        output_initializer=residual,
    )
    return TransformerBlock(
        attention,
        mlp,
        _norm(config, mesh),
        _norm(config, mesh),
        mesh=mesh,
        layer=index + 1,
        norm_position=config.norm_position,
        dropout=config.hidden_dropout,
    )
