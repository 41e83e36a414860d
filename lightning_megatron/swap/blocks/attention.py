"""Multi-head attention of torch.nn with heads cut over the tensor-parallel axis."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.collectives import copy_to_axis, gather_from_axis, reduce_from_axis
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.fused.dropout import tensor_region_stream
from lightning_megatron.layers.linear.linear import RowParallelLinear
from lightning_megatron.layers.parameters.init import ZEROS, Initializer, sharded_parameter
from lightning_megatron.plan.shards import attention_ranges


class HeadParallelAttention(nn.Module):
    """Multi-head attention with some of the heads on each tensor-parallel rank.

    Equal to torch.nn.MultiheadAttention(embed_dim, num_heads, dropout, bias,
    batch_first=batch_first), with the same parameter names, masks and attention weights.

    Shapes: ``(S, B, D)``, or ``(B, S, D)`` with ``batch_first``, or ``(S, D)``; output the same.

    Args:
        layer: Number of the layer for random streams; None inside a block that selects the streams
            itself.

    Communication: one all-reduce over tp forward, one backward (three for cross-attention);
    attention weights need an additional all-reduce, or an all-gather if they are not averaged.
    Source: Shoeybi et al. 2019, section 3, figure 3b.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        mesh: ParallelMesh,
        *,
        dropout: float = 0.0,
        bias: bool = True,
        batch_first: bool = False,
        layer: int | None = None,
    ) -> None:
        super().__init__()
        self.embed_dim = self.kdim = self.vdim = embed_dim
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.mesh = mesh
        self.dropout = dropout
        self.batch_first = batch_first
        self.layer = layer
        ranges = attention_ranges(num_heads, num_heads, self.head_dim, mesh.tp.size, mesh.tp.rank)
        self.in_proj_weight = sharded_parameter(
            (3 * embed_dim, embed_dim), ranges, Initializer.normal()
        )
        self.in_proj_bias = sharded_parameter((3 * embed_dim,), ranges, ZEROS) if bias else None
        self.out_proj = RowParallelLinear(embed_dim, embed_dim, mesh, bias=bias)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the attention output and, if requested, the attention weights.

        Args:
            key_padding_mask: Keys to ignore ``(B, S)``: True, or a number added to the scores.
            attn_mask: Pairs to ignore ``(L, S)`` or ``(B H, L, S)``: True, or a number added to the
                scores.
        """
        if query.is_nested or key.is_nested or value.is_nested:
            raise UnsupportedError(
                "attention cut over tp takes no nested tensors, because their rows have no common "
                "length. Pass padded tensors and a padding mask."
            )
        if is_causal and attn_mask is None:
            raise UnsupportedError(
                "is_causal=True needs attn_mask, because torch.nn.MultiheadAttention takes it as a "
                "hint about that mask. Pass "
                "nn.Transformer.generate_square_subsequent_mask(seq_length) too."
            )
        if self.layer is not None and self.training and self.dropout > 0.0:
            self.mesh.random.seek(self.layer)
        batched = query.dim() == 3
        parts = self._projections(query, key, value)
        q, k, v = (self._heads(part, batched) for part in parts)
        if key_padding_mask is not None and not batched:
            key_padding_mask = key_padding_mask.unsqueeze(0)
        if need_weights:
            mask = self._mask(attn_mask, key_padding_mask, query.dtype)
            mixed, weights = self._explicit(q, k, v, mask)
        else:
            causal = is_causal and key_padding_mask is None
            mask = None if causal else self._mask(attn_mask, key_padding_mask, query.dtype)
            mixed = self._fused(q, k, v, mask, causal)
            weights = None
        output = self.out_proj(mixed.transpose(1, 2).flatten(2))
        if weights is not None:
            weights = self._shared(weights, average_attn_weights)
            weights = weights if batched else weights.squeeze(0)
        if not batched:
            return output.squeeze(0), weights
        return (output if self.batch_first else output.transpose(0, 1)), weights

    def _projections(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        tp = self.mesh.tp
        if query is key and key is value:
            return F.linear(copy_to_axis(query, tp), self.in_proj_weight, self.in_proj_bias).chunk(
                3, dim=-1
            )
        weights = self.in_proj_weight.chunk(3)
        biases = (None, None, None) if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        return tuple(
            F.linear(copy_to_axis(x, tp), weight, bias)
            for x, weight, bias in zip((query, key, value), weights, biases, strict=True)
        )

    def _heads(self, part: Tensor, batched: bool) -> Tensor:
        """Return one projection as ``(B, H/tp, S, K)``."""
        if not batched:
            part = part.unsqueeze(0)
        elif not self.batch_first:
            part = part.transpose(0, 1)
        return part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def _mask(
        self, attn_mask: Tensor | None, key_padding_mask: Tensor | None, dtype: torch.dtype
    ) -> Tensor | None:
        """Return the sum of both masks for this rank's heads; None without masks.

        Shapes: broadcastable to ``(B, H/tp, L, S)``.
        """
        masks = []
        if attn_mask is not None:
            mask = _additive(attn_mask, dtype)
            if mask.dim() == 3:
                num_local = self.num_heads // self.mesh.tp.size
                mask = mask.unflatten(0, (-1, self.num_heads)).narrow(
                    1, self.mesh.tp.rank * num_local, num_local
                )
            masks.append(mask)
        if key_padding_mask is not None:
            masks.append(_additive(key_padding_mask, dtype)[:, None, None, :])
        if not masks:
            return None
        return masks[0] if len(masks) == 1 else masks[0] + masks[1]

    def _fused(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool
    ) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        with tensor_region_stream(self.dropout, self.training, self.mesh):
            return F.scaled_dot_product_attention(query, key, value, mask, dropout, causal)

    def _explicit(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        scores = query * (1.0 / math.sqrt(self.head_dim)) @ key.transpose(-2, -1)
        weights = (scores if mask is None else scores + mask).softmax(dim=-1)
        with tensor_region_stream(self.dropout, self.training, self.mesh):
            weights = F.dropout(weights, self.dropout, self.training)
        return weights @ value, weights

    def _shared(self, weights: Tensor, average: bool) -> Tensor:
        """Gather the attention weights of all heads, or average them, on every rank."""
        if average:
            return reduce_from_axis(weights.sum(dim=1) / self.num_heads, self.mesh.tp)
        return gather_from_axis(weights, self.mesh.tp, dim=1)

    @override
    def extra_repr(self) -> str:
        return (
            f"{self.embed_dim}, {self.num_heads} heads ({self.num_heads // self.mesh.tp.size} here)"
        )


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -torch.inf)
