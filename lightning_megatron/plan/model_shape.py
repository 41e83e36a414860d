"""What the memory of a GPT-like model depends on, and how many parameters a rank of it has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_megatron.plan.experts import ExpertsConfig
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.plan.shards import attention_ranges, padded_vocab_size


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Describe a GPT-like model by what its memory depends on.

    Args:
        num_layers: Transformer blocks.
        hidden_size: size D of the residual stream.
        ffn_hidden_size: inner features F of the network in a block.
        num_heads: query heads.
        num_kv_heads: key/value heads.
        head_dim: size of a head.
        vocab_size: true vocabulary.
        vocab_multiple: the vocabulary is padded to a multiple of it times tp.
        num_positions: rows of a learned position table; 0 for rotary positions.
        gated: whether the first projection has a gate beside it.
        activation: where it matters: "relu" keeps its result alone; of those with a gate, "swiglu" has a fused kernel
            and "geglu" has none.
        norm: "layernorm" (a bias if `bias`) or "rmsnorm" (none).
        bias: whether linear layers have biases.
        qkv_bias: whether the projections to queries, keys and values have; None means `bias`.
        output_bias: whether the attention's output projection has; None means `bias`.
        mlp_bias: whether both projections of the network have; None means `bias`.
        qk_norm: whether queries and keys are normed before they are rotated.
        partly_rotated: whether only some elements of a head are rotated.
        parallel: whether attention and network read the same residual stream.
        tied: whether the output head is the embedding.
        final_norm: whether a norm comes before the head.
        dropout: whether elements of the residual stream are dropped.
        window: how many positions one sees in some layers, if that is not all; these layers share a mask (tokens).
        experts: the mixture in the place of the network of all or some blocks; None means there is none.
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
    gated: bool = False
    activation: Literal["gelu", "relu", "swiglu", "geglu"] = "swiglu"
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    bias: bool = False
    qkv_bias: bool | None = None
    output_bias: bool | None = None
    mlp_bias: bool | None = None
    qk_norm: bool = False
    partly_rotated: bool = False
    parallel: bool = False
    tied: bool = False
    final_norm: bool = True
    dropout: bool = False
    window: int | None = None
    experts: ExpertsConfig | None = None

    def widths(self, tp: int) -> tuple[int, int]:
        """Return the features of the queries, and of keys or values, that one tensor-parallel rank holds."""
        query, key, _ = attention_ranges(self.num_heads, self.num_kv_heads, self.head_dim, tp, 0)
        return query.size, key.size

    def vocab_rows(self, tp: int) -> int:
        """Return the rows of the padded vocabulary that one tensor-parallel rank holds."""
        return padded_vocab_size(self.vocab_size, tp, self.vocab_multiple) // tp

    def has_experts_in(self, layer: int) -> bool:
        """Tell whether a block has a mixture of experts in the place of its network."""
        return self.experts is not None and self.experts.is_in(layer)

    def layer_parameters(self, tp: int, has_experts: bool = False) -> int:
        """Count the parameters of one block on one tensor-parallel rank, experts left out.

        Args:
            tp: tensor-parallel size.
            has_experts: whether the block has a router, and what else is beside experts, in the place of its network.
        """
        query, key = self.widths(tp)
        hidden, heads = self.hidden_size, query + 2 * key
        weights = hidden * (heads + query)
        biases = [(self.qkv_bias, heads), (self.output_bias, hidden)]
        weights += sum(size for has_bias, size in biases if (self.bias if has_bias is None else has_bias))
        network = self._beside_experts(tp) if has_experts else self._network_parameters(tp)
        return weights + network + 2 * self._norm_parameters + (2 * self.head_dim if self.qk_norm else 0)

    def expert_parameters(self, layout: ParallelLayout) -> int:
        """Count the parameters of the experts that one rank has in a block with experts.

        Args:
            layout: sizes of the axes; experts are dealt out over ep, the inner features of each over etp.
        """
        if self.experts is None:
            return 0
        one = self._num_matrices * self.hidden_size * (self.experts.ffn_hidden_size // layout.etp)
        return self.experts.num_experts // layout.ep * one

    def stage_parameters(self, layout: ParallelLayout, stage: int, num_layers: int, num_expert_layers: int = 0) -> int:
        """Count the parameters of a stage on one tensor-parallel rank, experts left out.

        A tied head on another stage is a copy.

        Args:
            layout: sizes of the axes.
            stage: position on the pp axis.
            num_layers: blocks of the stage, over all its chunks.
            num_expert_layers: those of them that have experts.
        """
        is_first, is_last = stage == 0, stage == layout.pp - 1
        table = self.vocab_rows(layout.tp) * self.hidden_size
        count = (num_layers - num_expert_layers) * self.layer_parameters(layout.tp)
        count += num_expert_layers * self.layer_parameters(layout.tp, has_experts=True)
        if is_first:
            count += table + self.num_positions * self.hidden_size
        if is_last:
            count += self._norm_parameters if self.final_norm else 0
            count += 0 if self.tied and is_first else table
        return count

    def _network_parameters(self, tp: int) -> int:
        inner = self.ffn_hidden_size // tp
        has_biases = self.bias if self.mlp_bias is None else self.mlp_bias
        biases = (self._num_matrices - 1) * inner + self.hidden_size if has_biases else 0
        return self._num_matrices * self.hidden_size * inner + biases

    def _beside_experts(self, tp: int) -> int:
        """Count the router, and the network that every token goes through with its gate."""
        if self.experts is None:
            return 0
        shared = (self.experts.shared_ffn_hidden_size or 0) // tp
        columns = self.experts.num_experts + self._num_matrices * shared + int(self.experts.shared_gate)
        return self.hidden_size * columns

    @property
    def _num_matrices(self) -> int:
        # The up projection, a gate, the down projection.
        return 3 if self.gated else 2

    @property
    def _norm_parameters(self) -> int:
        return self.hidden_size * (2 if self.norm == "layernorm" and self.bias else 1)
