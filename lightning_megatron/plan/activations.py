"""How many bytes the layers keep for their backward pass, and how many they need beside that while they run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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

    def widths(self, tp: int) -> tuple[int, int]:
        """Return the features of the queries, and of keys or values, that one tensor-parallel rank holds."""
        query, key, _ = attention_ranges(self.num_heads, self.num_kv_heads, self.head_dim, tp, 0)
        return query.size, key.size

    def vocab_rows(self, tp: int) -> int:
        """Return the rows of the padded vocabulary that one tensor-parallel rank holds."""
        return padded_vocab_size(self.vocab_size, tp, self.vocab_multiple) // tp

    def layer_parameters(self, tp: int) -> int:
        """Count the parameters of one block on one tensor-parallel rank."""
        query, key = self.widths(tp)
        hidden, inner = self.hidden_size, self.ffn_hidden_size // tp
        heads, first = query + 2 * key, (2 if self.gated else 1) * inner
        weights = hidden * (heads + query + first + inner)
        biases = [(self.qkv_bias, heads), (self.output_bias, hidden), (self.mlp_bias, first + hidden)]
        weights += sum(size for has_bias, size in biases if (self.bias if has_bias is None else has_bias))
        return weights + 2 * self._norm_parameters + (2 * self.head_dim if self.qk_norm else 0)

    def stage_parameters(self, layout: ParallelLayout, stage: int, num_layers: int) -> int:
        """Count the parameters of a stage on one tensor-parallel rank; a tied head on another stage is a copy.

        Args:
            layout: sizes of the axes.
            stage: position on the pp axis.
            num_layers: blocks of the stage, over all its chunks.
        """
        is_first, is_last = stage == 0, stage == layout.pp - 1
        table = self.vocab_rows(layout.tp) * self.hidden_size
        count = num_layers * self.layer_parameters(layout.tp)
        if is_first:
            count += table + self.num_positions * self.hidden_size
        if is_last:
            count += self._norm_parameters if self.final_norm else 0
            count += 0 if self.tied and is_first else table
        return count

    @property
    def _norm_parameters(self) -> int:
        return self.hidden_size * (2 if self.norm == "layernorm" and self.bias else 1)


@dataclass(frozen=True, kw_only=True)
class KeptActivations:
    """Say what the layers keep from forward to backward: the table that a measurement may correct.

    Copies are tensors in the activations' type. Attention runs in a fused kernel, which keeps queries, keys, values,
    its output (which the output projection keeps as its input) and a float32 number for each row of the scores.

    Args:
        hidden_copies: tensors of D features a block keeps: the inputs of both norms, and their outputs as inputs of the
            projections. Sequence parallelism cuts them.
        norm_bytes: bytes a token and norm: float32 statistics.
        rotated_copies: tensors of the queries' and keys' features kept beside the projection's output: rotated ones,
            unless they are rotated in place.
        expanded_copies: 1 where the attention kernel needs keys and values repeated for every query head.
        ffn_copies: tensors of F features: what the activation keeps, and the input of the second projection.
        ffn_backward: tensors of F features that backward of the activation adds to what is kept.
        loss_kept: bytes a logit from forward to backward.
        loss_forward: bytes a logit beside those, while the loss is computed.
        loss_backward: bytes a logit beside those kept, while its gradient is computed.
    """

    hidden_copies: int = 4
    norm_bytes: int = 8
    rotated_copies: int = 0
    expanded_copies: int = 0
    ffn_copies: int = 2
    ffn_backward: int = 1
    loss_kept: int = 4
    loss_forward: int = 6
    loss_backward: int = 6


def eager_activations(model: ModelShape, activation_bytes: int = 2) -> KeptActivations:
    """Describe the layers in plain torch operations.

    The gate, its activation, the up projection and their product are kept. The loss is computed in float32 beside the
    logits: their copy and its exponentials in forward, probabilities and their gradient in backward.

    Args:
        model: the model.
        activation_bytes: size of an activation's element.
    """
    wide = max(4, activation_bytes)
    narrow = activation_bytes if activation_bytes < wide else 0  # logits, or their gradient, beside the wide ones
    return KeptActivations(
        hidden_copies=_hidden_copies(model),
        norm_bytes=8 if model.norm == "layernorm" else 4,
        rotated_copies=1 if model.qk_norm or not model.num_positions else 0,
        ffn_copies=4 if model.gated else 1 if model.activation == "relu" else 2,
        ffn_backward=2 if model.gated else 1,
        loss_kept=wide,
        loss_forward=wide + narrow,
        loss_backward=wide + narrow,
    )


def fused_activations(model: ModelShape, activation_bytes: int = 2) -> KeptActivations:
    """Describe the layers in fused kernels, as they run in half types on a GPU.

    Queries and keys are rotated in place, unless they are normed or rotated in part; swiglu keeps its input alone; the
    gradient of the logits overwrites them. What has no fused kernel runs in plain operations.

    Args:
        model: the model.
        activation_bytes: size of an activation's element.
    """
    eager = eager_activations(model, activation_bytes)
    return KeptActivations(
        hidden_copies=eager.hidden_copies,
        rotated_copies=1 if model.qk_norm or model.partly_rotated else 0,
        ffn_copies=3 if model.gated and model.activation == "swiglu" else eager.ffn_copies,
        ffn_backward=eager.ffn_backward,
        loss_kept=activation_bytes,
        loss_forward=0,
        loss_backward=0,
    )


def _hidden_copies(model: ModelShape) -> int:
    # In parallel both norms read the same tensor.
    return 3 if model.parallel else 4


@dataclass(frozen=True)
class ActivationCosts:
    """Hold the bytes of one microbatch on one rank.

    Args:
        boundary: the residual stream between two blocks.
        layer: what a block keeps, its input included, before recomputation is chosen.
        kept: what it keeps under the recomputation that was chosen.
        masks: what the blocks of a chunk keep together.
        layer_forward: what a block's forward needs beside what it keeps.
        layer_backward: what a block's backward needs beside what it keeps.
        head: what the final norm and the head keep.
        head_backward: what the head's backward needs beside that.
        loss_kept: what the loss keeps.
        loss_forward: what the loss needs beside that in forward.
        loss_backward: what it needs beside that in backward.
    """

    boundary: int
    layer: int
    kept: int
    masks: int
    layer_forward: int
    layer_backward: int
    head: int
    head_backward: int
    loss_kept: int
    loss_forward: int
    loss_backward: int


def activation_costs(
    model: ModelShape,
    table: KeptActivations,
    *,
    num_tokens: int,
    seq_length: int = 0,
    tp: int = 1,
    sequence_parallel: bool = False,
    activation_bytes: int = 2,
    recompute: Literal["none", "selective", "experts", "full"] = "none",
) -> ActivationCosts:
    """Compute the bytes that one microbatch needs on one rank.

    Args:
        model: the model.
        table: what its layers keep.
        num_tokens: tokens of a microbatch on one rank of tp: sequence length / cp x samples.
        seq_length: length of the sequences, where there may be masks (tokens).
        tp: tensor-parallel size.
        sequence_parallel: whether the residual stream is cut along the sequence over tp.
        activation_bytes: size of an activation's element.
        recompute: "none", "selective" (the attention core runs again) or "full" (whole blocks do).
    """
    query, key = model.widths(tp)
    inner, element = model.ffn_hidden_size // tp, num_tokens * activation_bytes
    whole = element * model.hidden_size
    boundary = whole // tp if sequence_parallel else whole
    statistics = num_tokens * table.norm_bytes // (tp if sequence_parallel else 1)
    # Attention: the projection's output (values are a view of it), rotated or repeated ones, the output of the core.
    features = 2 * query + 2 * key + table.rotated_copies * (query + key) + table.expanded_copies * 2 * query
    row_sums = num_tokens * 4 * (query // model.head_dim)
    masks = 2 * boundary // activation_bytes if model.dropout else 0
    ffn = element * inner
    norms = table.hidden_copies * boundary + 2 * statistics
    layer = norms + element * features + row_sums + table.ffn_copies * ffn + masks
    gathered = whole if sequence_parallel else 0
    # Backward of the network: its second projection (gradients gathered), its activation, its first projection (inputs
    # gathered, gradients not yet scattered; more than one tensor of F features has been given up by then).
    network = max(ffn + gathered, table.ffn_backward * ffn, 2 * gathered - ffn)
    # When attention runs backward, the block's network is done: what it kept pays for the gradients of Q, K and V
    # (half, joined, and float32 sums for Q).
    attention = element * (3 * query + 4 * key) + 4 * num_tokens * query - table.ffn_copies * ffn - norms // 2
    logits = num_tokens * model.vocab_rows(tp)
    return ActivationCosts(
        boundary=boundary,
        layer=layer,
        kept={"none": layer, "selective": layer - row_sums, "experts": layer, "full": boundary}[recompute],
        # Rows alike share one mask, which fills whole rows of scores.
        masks=seq_length**2 * activation_bytes if model.window is not None and seq_length > model.window else 0,
        # Blocks that are recomputed keep nothing inside, but their features exist while they run.
        layer_forward=gathered + whole + (table.ffn_copies * ffn if recompute == "full" else 0),
        layer_backward=max(network, attention + 2 * gathered) + 2 * boundary,
        head=(2 if model.final_norm else 1) * boundary + statistics,
        head_backward=whole + gathered,
        loss_kept=table.loss_kept * logits,
        loss_forward=table.loss_forward * logits,
        loss_backward=table.loss_backward * logits,
    )
