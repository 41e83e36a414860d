"""Forward pass over one new token of one row, in seven kernels for each layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.generation.token_sums import TokenSums
from lightning_megatron.groups.collectives import gather_from_axis
from lightning_megatron.half_types import HALF_TYPES
from lightning_megatron.layers.attention.key_value_cache import KeyValueCache
from lightning_megatron.layers.block import PreNormBlock
from lightning_megatron.layers.fused.choose_kernels import fused_kernels
from lightning_megatron.layers.fused.vector_product import is_stored
from lightning_megatron.layers.linear.linear import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.layers.mlp import MLP
from lightning_megatron.layers.norm import RMSNorm
from lightning_megatron.layers.self_attention import SelfAttention
from lightning_megatron.models.gpt import GPT
from lightning_megatron.models.gpt_block import rotary_name
from lightning_megatron.shapes import Float, Int


def reason_against_fused_pass(
    gpt: GPT, num_rows: int, padding: Int[Tensor, " batch"] | None
) -> str | None:
    """Return why the fused pass cannot compute a model's logits; None if it can.

    Args:
        gpt: A model whose passes can be replayed; see ``token_pass.reason_against_replay``.
        padding: Padding before each row; None means none (tokens).
    """
    if num_rows != 1:
        return f"it computes one row, and there are {num_rows}"
    if padding is not None:
        return "it computes rows without padding"
    dtypes = {parameter.dtype for parameter in gpt.parameters()}
    if len(dtypes) != 1 or not dtypes <= set(HALF_TYPES):
        return f"it needs parameters of one half type, and they have {_names(dtypes)}"
    if fused_kernels(next(gpt.parameters())) is None:
        return "the fused kernels do not support the parameters"
    if gpt.hidden_states is not None:
        return "the call collects hidden states"
    if type(gpt.final_norm) is not RMSNorm or gpt.final_norm.offset or gpt.final_norm.uses_engine:
        return "the last norm is not a plain RMSNorm"
    config = gpt.config
    if not all(config.position == "rotary" and config.rotates_in(i) for i in map(int, gpt.layers)):
        return "not all layers have a rotary embedding"
    reasons = (_reason_against_block(block) for block in gpt.layers.values())
    return next((reason for reason in reasons if reason is not None), None)


def _names(dtypes: set[torch.dtype]) -> str:
    return ", ".join(sorted(str(dtype) for dtype in dtypes))


def _reason_against_block(block: Any) -> str | None:
    """Return why a block cannot be computed by the kernels; None if it can."""
    if type(block) is not PreNormBlock:
        return "a layer is not a sequence of norm, attention, norm and MLP"
    if block.scale != 1.0 or block.attention_output_norm or block.mlp_output_norm:
        return "the outputs of a layer are scaled or normalised"
    attention = block.attention
    network = block.mlp
    if type(attention) is not SelfAttention or attention.norm_over_layer:
        return "the attention of a layer is not a plain SelfAttention"
    if type(network) is not MLP or network.activation != "swiglu":
        return "the MLP of a layer is not one with SwiGLU"
    norms = (block.attention_norm, block.mlp_norm)
    head_norms = (attention.query_norm, attention.key_norm)
    if not all(type(norm) is RMSNorm and not norm.offset for norm in norms):
        return "a norm of a layer is not a plain RMSNorm"
    if any(norm is not None and type(norm) is not RMSNorm for norm in head_norms):
        return "a norm of heads is not an RMSNorm"
    if any(norm is not None and norm.uses_engine for norm in norms + head_norms):
        return "Transformer Engine computes a norm"
    columns = (attention.qkv, network.gate_up)
    rows = (attention.output, network.down)
    if not all(type(layer) is ColumnParallelLinear for layer in columns):
        return "a linear layer was replaced"
    if not all(type(layer) is RowParallelLinear for layer in rows):
        return "a linear layer was replaced"
    if any(layer.low_rank is not None for layer in columns + rows):
        return "a linear layer has a low-rank update"
    biases = (network.gate_up.whole_bias, *(layer.bias for layer in rows))
    if any(bias is not None for bias in biases):
        return "a linear layer other than that of queries, keys and values has a bias"
    return _reason_against_weights(block)


def _reason_against_weights(block: PreNormBlock) -> str | None:
    layer = _Layer.of(block)
    weights = (layer.qkv, layer.output, layer.gate_up, layer.down)
    if not all(is_stored(weight) and weight.is_contiguous() for weight in weights):
        return "the parts of a weight are not adjacent in memory"
    kernels = fused_kernels(layer.down)
    assert kernels is not None, "the dtype of the parameters was checked"
    widest = max(weight.shape[1] for weight in weights)
    limit = min(kernels.MAX_PAIRED_WIDTH, kernels.MAX_SUM_WIDTH)
    if widest > limit or layer.down.shape[0] > limit or layer.down.shape[0] % 2:
        return f"vectors have {widest} elements or an odd number of them; the limit is {limit}"
    return None


@dataclass(frozen=True, eq=False)
class _Layer:
    """Tensors and settings of one block."""

    attention_norm: Any
    mlp_norm: Any
    qkv: Tensor
    qkv_bias: Tensor | None
    output: Tensor
    gate_up: Tensor
    down: Tensor
    #: Arguments of the attention kernel that are equal for all tokens.
    attention: dict[str, Any]

    @classmethod
    def of(cls, block: Any) -> _Layer:
        attention = block.attention
        scale = attention.span.scale
        settings: dict[str, Any] = {
            "scale": attention.head_dim**-0.5 if scale is None else scale,
            "interleaved": attention.interleaved,
        }
        if attention.query_norm is not None:
            norms = attention.query_norm, attention.key_norm
            settings |= {"scales": tuple(norm.scale() for norm in norms), "eps": norms[0].eps}
        return cls(
            block.attention_norm,
            block.mlp_norm,
            attention.qkv.whole_weight,
            attention.qkv.whole_bias,
            attention.output.weight,
            block.mlp.gate_up.whole_weight,
            block.mlp.down.weight,
            settings,
        )


class FusedPass:
    """Forward pass over one new token of one row, whose place is a tensor on the device.

    Equals ``GPT.logits_at`` with the tokens of the cache. Each layer runs seven kernels: two sums
    over the ranks with the residual addition and the norm after them, the products of the four
    weights, of which that of the gates includes SwiGLU, and attention with the rotation of the
    heads and the storage of the token.

    Args:
        cache: Cache of the earlier tokens; it must not be empty.

    Communication: two sums of a vector over tp for each layer, one of the embedding, and an
        all-gather of the logits.
    """

    def __init__(self, gpt: GPT, cache: KeyValueCache) -> None:
        self._gpt = gpt
        blocks: Any = gpt.layers.values()
        self._layers = [_Layer.of(block) for block in blocks]
        self._stored = [cache.stored(block.attention.layer) for block in blocks]
        first = self._layers[0]
        kernels = fused_kernels(first.qkv)
        assert kernels is not None, "the kernels support the parameters"
        self._kernels = kernels
        like = first.qkv.new_empty(0)
        places = torch.arange(cache.max_length, device=like.device)[None]
        names = [rotary_name(gpt.config, index) for index in map(int, gpt.layers)]
        tables = {name: gpt.rotary[name](cache.max_length, like, places) for name in set(names)}
        self._tables = [tables[name] for name in names]
        kv_heads = self._stored[0][0].shape[1]
        self._counters = torch.zeros(kv_heads, dtype=torch.int32, device=like.device)
        self._sums = TokenSums(gpt.mesh.tp, kernels, first.qkv.shape[1], like.device)

    def logits(
        self, tokens: Int[Tensor, "1 1"], place: Int[Tensor, "1"]
    ) -> Float[Tensor, "1 vocab"]:
        """Store the keys and values of a new token in the cache, and return the next logits.

        Args:
            place: Its place in the row (tokens).
        """
        gpt = self._gpt
        stream, normed = self._embedded(tokens)
        norms = [layer.attention_norm for layer in self._layers[1:]]
        for layer, tables, stored, next_norm in zip(
            self._layers, self._tables, self._stored, [*norms, gpt.final_norm], strict=True
        ):
            qkv = self._kernels.multiply_vector(normed.view(-1), layer.qkv, layer.qkv_bias)
            attended = self._kernels.attend_rotated_token(
                qkv, tables, *stored, place, self._counters, **layer.attention
            )
            stream, normed = self._sums.add_norm(attended, layer.output, stream, layer.mlp_norm)
            activated = self._kernels.multiply_vector_swiglu(normed.view(-1), layer.gate_up)
            stream, normed = self._sums.add_norm(activated, layer.down, stream, next_norm)
        shard = gpt.logits(normed)[0]
        return gather_from_axis(shard, gpt.mesh.tp, dim=-1)[..., : gpt.config.vocab_size]

    def _embedded(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Begin the pass; return the residual stream of the first layer, and its norm."""
        embedding = self._gpt.embedding
        assert embedding is not None, "the model has one stage"
        norm = self._layers[0].attention_norm
        # The table alone; the whole embedding may also scale and normalise vectors.
        is_table = embedding.scale == 1.0 and embedding.norm is None
        is_sent = is_table and self._sums.are_sent
        self._sums.begin(2 * len(self._layers) + is_sent)
        if is_sent:
            return self._sums.embed(tokens, embedding.word.weight, norm)
        stream = embedding(tokens)
        return stream, norm(stream)
