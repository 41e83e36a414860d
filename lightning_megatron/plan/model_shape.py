"""Sizes of a GPT-like model that count its parameters and the costs of its layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from lightning_megatron.plan.experts import ExpertsConfig
from lightning_megatron.plan.latent_attention import LatentAttentionConfig
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.plan.partition import LayerCosts
from lightning_megatron.plan.settings import Count
from lightning_megatron.plan.shards import attention_ranges, padded_vocab_size

Activation: TypeAlias = Literal[
    "gelu", "gelu_tanh", "relu", "swiglu", "geglu", "geglu_tanh", "clamped_swiglu"
]
"""Activation without a gate (``gelu`` is exact) or with one. ``clamped_swiglu`` is that of gpt-oss.
"""

#: Factor of the gate inside the sigmoid of ``clamped_swiglu``, which makes it close to GELU.
GATE_FACTOR = 1.702
#: Bound of the features of ``clamped_swiglu``: gates have it above only.
FEATURE_LIMIT = 7.0
#: Activations that multiply one half of the features by the other.
GATED: frozenset[Activation] = frozenset(("swiglu", "geglu", "geglu_tanh", "clamped_swiglu"))
#: Tokens of a chunk; ``auto`` divides only large logits, ``forward`` divides all, and computes the
#: gradients of summed losses in the forward pass. None divides none.
LossChunk = Count | Literal["auto", "forward"] | None

#: Largest logits of a microbatch that ``auto`` stores: a fortieth of a GPU with 80 GiB (bytes).
MAX_STORED_BYTES = 2**31
#: Logits of a chunk of ``auto`` and ``forward`` (bytes).
_CHUNK = 2**29
#: Matrix products are fastest with a multiple of this many rows (tokens).
_ROWS = 256
#: Cost of the embedding (lookup, sum of positions, dropout) relative to one layer.
EMBEDDING_COST = 0.1
#: Longest sequence that the costs of layers count. Most trainings use shorter sequences than the
#: longest that their model can take (tokens).
COUNTED_LENGTH = 4096
#: Size of a logit of half type (bytes).
_LOGIT_BYTES = 2


def tokens_of_chunk(
    option: LossChunk, num_tokens: int, vocab_rows: int, element_bytes: int
) -> int | None:
    """Return how many tokens the head and the loss compute at once; None means all, stored.

    Args:
        num_tokens: Tokens of a microbatch on one rank, those of all ranks of tp (tokens).
        vocab_rows: Columns of the logits on one rank (tokens).
        element_bytes: Size of a logit (bytes).
    """
    if option is None or isinstance(option, int):
        return option
    row = vocab_rows * element_bytes
    if option == "auto" and num_tokens * row <= MAX_STORED_BYTES:
        return None
    fitting = max(1, _CHUNK // row)
    return fitting - fitting % _ROWS if fitting > _ROWS else fitting


def window_of_layer(
    window: int | None, window_layers: Sequence[bool] | None, layer: int
) -> int | None:
    """Return the sliding window of a layer; None means no window (tokens).

    Args:
        window: Window of the layers that have one; None means that none has (tokens).
        window_layers: Flag for each layer that is true if it has the window; None means all have
            it.
    """
    return window if window_layers is None or window_layers[layer] else None


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a GPT-like model that count its parameters, and the costs of its layers.

    Args:
        num_layers: Number of transformer blocks.
        hidden_size: Size D of the residual stream.
        ffn_hidden_size: Inner features F of the MLP in a block.
        num_heads: Number of query heads.
        num_kv_heads: Number of key/value heads.
        head_dim: Size of a query or key head.
        vocab_size: Size of the vocabulary, without padding.
        vocab_multiple: The vocabulary is padded to a multiple of this number times tp.
        num_positions: Rows of a learned position table; 0 for other positions.
        max_seq_length: Longest sequence (tokens).
        gated: Whether the MLP has a gate projection in addition to the up projection.
        norm: "layernorm" (with a bias if ``bias``) or "rmsnorm" (without).
        bias: Whether linear layers have biases.
        qkv_bias: Whether the projections to queries, keys and values have biases; None means
            ``bias``.
        output_bias: Whether the attention's output projection has a bias; None means ``bias``.
        mlp_bias: Whether the projections of the MLP have biases; None means ``bias``.
        qk_norm: Whether queries and keys are normed before the rotation.
        qk_norm_over: ``head`` if these norms have the weights of one head, ``layer`` if they have
            those of all heads.
        sinks: Whether each query head has a learned score in the softmax.
        norms_per_layer: Norms of the residual stream in a block.
        tied: Whether the output head shares its weight with the embedding.
        embedding_norm: Whether there is a norm after the embedding.
        final_norm: Whether there is a norm before the head.
        window: Attention window of the layers that have one; they share a mask. None if no layer
            has one (tokens).
        window_layers: Flag for each layer that is true if it has the window; None means all have
            it.
        latent: Latent vectors of which queries, keys and values are computed; None means none.
        experts: Mixture of experts that replaces the MLP of all or some blocks; None means no
            experts.
    """

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    vocab_multiple: int = 128
    num_positions: int = 0
    max_seq_length: int = COUNTED_LENGTH
    gated: bool = False
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    bias: bool = False
    qkv_bias: bool | None = None
    output_bias: bool | None = None
    mlp_bias: bool | None = None
    qk_norm: bool = False
    qk_norm_over: Literal["head", "layer"] = "head"
    sinks: bool = False
    norms_per_layer: int = 2
    tied: bool = False
    embedding_norm: bool = False
    final_norm: bool = True
    window: int | None = None
    window_layers: tuple[bool, ...] | None = None
    latent: LatentAttentionConfig | None = None
    experts: ExpertsConfig | None = None

    def widths(self, tp: int) -> tuple[int, int]:
        """Return the number of query features and of key features on one tensor-parallel rank.

        There are as many value features as key features, without latent attention.
        """
        query, key, _ = attention_ranges(self.num_heads, self.num_kv_heads, self.head_dim, tp, 0)
        return query.size, key.size

    def window_of(self, layer: int) -> int | None:
        """Return the sliding window of a layer; None means no window (tokens)."""
        return window_of_layer(self.window, self.window_layers, layer)

    def cached_features(self, tp: int) -> int:
        """Return the features of a token's key and value on one tensor-parallel rank."""
        if self.latent is not None:
            heads = self.num_heads // tp
            return heads * (self.latent.head_dim + self.latent.value_dim)
        return 2 * self.widths(tp)[1]

    def vocab_rows(self, tp: int) -> int:
        """Return the rows of the padded vocabulary on one tensor-parallel rank."""
        return padded_vocab_size(self.vocab_size, tp, self.vocab_multiple) // tp

    def has_experts_in(self, layer: int) -> bool:
        """Return whether a block has a mixture of experts instead of an MLP."""
        return self.experts is not None and self.experts.is_in(layer)

    def costs(self, loss_chunk: LossChunk = None, tp: int = 1) -> LayerCosts:
        """Return the work of each part of the model (multiplications per token in forward).

        Backward passes have twice the work of forward passes, in all parts. Norms, activations and
        the loss, which are bound by memory bandwidth, take about the same share of the time of a
        layer and of the head. A loss in chunks computes the products of the head once more in
        backward passes, which counts as a third; ``auto`` divides the logits of the longest
        sequence, or none, and ``forward`` computes no product twice.
        """
        query = self.num_heads * self.head_dim
        key = self.num_kv_heads * self.head_dim
        # Mean number of keys of scores and weighted values, because attention is causal.
        keys = min(self.max_seq_length, COUNTED_LENGTH) / 2
        attention = 2 * self.hidden_size * (query + key) + 2 * keys * query
        if self.latent is not None:
            head_width = self.latent.head_dim + self.latent.value_dim
            attention = keys * self.num_heads * head_width
            attention += self.latent.num_weights(self.hidden_size, self.num_heads)
        dense = self._num_matrices * self.hidden_size * self.ffn_hidden_size
        layers = tuple(
            attention + (self._mixture_cost() if self.has_experts_in(layer) else dense)
            for layer in range(self.num_layers)
        )
        embedding = EMBEDDING_COST * sum(layers) / len(layers)
        head = self.vocab_size * self.hidden_size
        chunk = tokens_of_chunk(loss_chunk, self.max_seq_length, self.vocab_rows(tp), _LOGIT_BYTES)
        if loss_chunk != "forward" and chunk is not None:
            return LayerCosts(layers, embedding, head * 4 / 3)
        return LayerCosts(layers, embedding, head)

    def layer_parameters(self, tp: int, has_experts: bool = False) -> int:
        """Count the parameters of one block on one tensor-parallel rank, without experts.

        Args:
            has_experts: Whether the block has experts instead of an MLP; its router and shared MLP
                are counted.
        """
        query, key = self.widths(tp)
        hidden = self.hidden_size
        heads = query + 2 * key
        weights = hidden * (heads + query)
        if self.latent is not None:
            heads = self.latent.down_features
            weights = self.latent.num_weights(hidden, self.num_heads // tp)
            weights += self.latent.norm_features
        biases = [(self.qkv_bias, heads), (self.output_bias, hidden)]
        weights += sum(
            size for has_bias, size in biases if (self.bias if has_bias is None else has_bias)
        )
        network = self._non_expert_parameters(tp) if has_experts else self._network_parameters(tp)
        return (
            weights
            + network
            + self.norms_per_layer * self._norm_parameters
            + self._qk_norm_parameters(query, key)
            + (query // self.head_dim if self.sinks else 0)
        )

    def expert_parameters(self, layout: ParallelLayout) -> int:
        """Count the parameters of the experts on one rank in a block with experts."""
        if self.experts is None:
            return 0
        inner = self.experts.ffn_hidden_size // layout.etp
        expert_size = self._num_matrices * self.hidden_size * inner
        if self.experts.linear_bias:
            expert_size += (self._num_matrices - 1) * inner + self.hidden_size // layout.etp
        return self.experts.num_experts // layout.ep * expert_size

    def stage_parameters(
        self, layout: ParallelLayout, stage: int, num_layers: int, num_expert_layers: int = 0
    ) -> int:
        """Count the parameters of a stage on one tensor-parallel rank, without experts.

        A tied head on another stage than the embedding is a copy and is counted.
        """
        is_first = stage == 0
        is_last = stage == layout.loss_stage
        table = self.vocab_rows(layout.tp) * self.hidden_size
        count = (num_layers - num_expert_layers) * self.layer_parameters(layout.tp)
        count += num_expert_layers * self.layer_parameters(layout.tp, has_experts=True)
        if is_first:
            count += table + self.num_positions * self.hidden_size
            count += self._norm_parameters if self.embedding_norm else 0
        if is_last:
            count += self._norm_parameters if self.final_norm else 0
            count += 0 if self.tied and is_first else table
        return count

    def _network_parameters(self, tp: int) -> int:
        inner = self.ffn_hidden_size // tp
        has_biases = self.bias if self.mlp_bias is None else self.mlp_bias
        biases = (self._num_matrices - 1) * inner + self.hidden_size if has_biases else 0
        return self._num_matrices * self.hidden_size * inner + biases

    def _qk_norm_parameters(self, query: int, key: int) -> int:
        if not self.qk_norm:
            return 0
        return query + key if self.qk_norm_over == "layer" else 2 * self.head_dim

    def _mixture_cost(self) -> float:
        if self.experts is None:
            return 0.0
        active = self.experts.top_k * self.experts.ffn_hidden_size
        active += self.experts.shared_ffn_hidden_size or 0
        return self.hidden_size * (self.experts.num_experts + self._num_matrices * active)

    def _non_expert_parameters(self, tp: int) -> int:
        """Count the parameters of the router, the shared MLP and its gate."""
        if self.experts is None:
            return 0
        shared = (self.experts.shared_ffn_hidden_size or 0) // tp
        columns = (
            self.experts.num_experts + self._num_matrices * shared + int(self.experts.shared_gate)
        )
        return self.hidden_size * columns + self.experts.router_bias * self.experts.num_experts

    @property
    def _num_matrices(self) -> int:
        # The up projection, a gate, the down projection.
        return 3 if self.gated else 2

    @property
    def _norm_parameters(self) -> int:
        return self.hidden_size * (2 if self.norm == "layernorm" and self.bias else 1)


#: Output and input features of each linear layer of a rank, by its name in the block (elements).
LinearSizes = dict[str, tuple[int, int]]


def linear_sizes(model: ModelShape, layer: int, tp: int) -> LinearSizes:
    """Return the sizes of the linear layers of a block, except routers and routed experts.

    Equal to the sizes of the layers that a model builds and cuts over tp.

    Args:
        layer: Index of the block.

    Raises:
        ParallelPlanError: If the heads cannot be divided among the ranks.
    """
    sizes = {f"attention.{name}": size for name, size in _of_attention(model, tp).items()}
    if not model.has_experts_in(layer):
        sizes |= _of_network(model, "mlp", model.ffn_hidden_size, tp)
    elif model.experts is not None and model.experts.shared_ffn_hidden_size:
        sizes |= _of_network(model, "mlp.shared", model.experts.shared_ffn_hidden_size, tp)
    return sizes


def _of_network(model: ModelShape, name: str, inner: int, tp: int) -> LinearSizes:
    up = "gate_up" if model.gated else "up"
    features = 2 * inner if model.gated else inner
    return {
        f"{name}.{up}": (features // tp, model.hidden_size),
        f"{name}.down": (model.hidden_size, inner // tp),
    }


def _of_attention(model: ModelShape, tp: int) -> LinearSizes:
    hidden = model.hidden_size
    if model.latent is None:
        query, key = model.widths(tp)
        return {"qkv": (query + 2 * key, hidden), "output": (hidden, query)}
    latent = model.latent
    heads = model.num_heads // tp
    up = latent.plain_dim + latent.value_dim
    return {
        "query": (heads * latent.head_dim, latent.query_rank or hidden),
        "key_value": (heads * up, latent.key_value_rank),
        "output": (hidden, heads * latent.value_dim),
    }
