"""Transformer decoder layer of torch.nn, cut over the tensor-parallel axis."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.fused.dropout import hidden_dropout
from lightning_megatron.layers.linear.linear import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.swap.blocks.attention import HeadParallelAttention
from lightning_megatron.swap.blocks.sharded_features import TensorDropout


class ParallelDecoderLayer(nn.Module):
    """Decoder layer with heads and inner features cut over tp.

    Equal to torch.nn.TransformerDecoderLayer in training and evaluation, with the same parameter
    names.

    Shapes: ``(T, B, D)`` and memory ``(S, B, D)``, or batch first if the attention has
    ``batch_first``; output like the first input.

    Args:
        norm_first: Whether norms precede their sublayers; otherwise they follow the residual sums.
        dropouts: Dropout probabilities of the outputs of the three sublayers.

    Communication: three all-reduces over tp forward, five backward.
    Source: Shoeybi et al. 2019, section 3.
    """

    def __init__(
        self,
        self_attn: HeadParallelAttention,
        multihead_attn: HeadParallelAttention,
        linear1: ColumnParallelLinear,
        linear2: RowParallelLinear,
        norms: tuple[nn.Module, nn.Module, nn.Module],
        activation: Callable[[Tensor], Tensor],
        *,
        mesh: ParallelMesh,
        layer: int,
        norm_first: bool,
        dropout: float,
        dropouts: tuple[float, float, float],
    ) -> None:
        super().__init__()
        self.self_attn = self_attn
        self.multihead_attn = multihead_attn
        self.linear1 = linear1
        self.linear2 = linear2
        self.activation = activation
        self.norm1, self.norm2, self.norm3 = norms
        self.dropout = TensorDropout(dropout, mesh)
        self.dropouts = dropouts
        self.mesh = mesh
        self.layer = layer
        self.norm_first = norm_first
        self.draws = any(
            p > 0.0 for p in (self_attn.dropout, multihead_attn.dropout, dropout, *dropouts)
        )

    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool = False,
        memory_is_causal: bool = False,
    ) -> Tensor:
        """Return the layer's output."""
        if self.training and self.draws:
            # From here on, dropout masks depend only on the layer, so that recomputation draws the
            # same masks.
            self.mesh.random.seek(self.layer)
        parts: tuple[tuple[nn.Module, Callable[[Tensor], Tensor]], ...] = (
            (
                self.norm1,
                lambda x: self._to_itself(x, tgt_mask, tgt_key_padding_mask, tgt_is_causal),
            ),
            (
                self.norm2,
                lambda x: self._to(
                    memory, x, memory_mask, memory_key_padding_mask, memory_is_causal
                ),
            ),
            (self.norm3, lambda x: self.linear2(self.dropout(self.activation(self.linear1(x))))),
        )
        hidden = tgt
        for (norm, part), dropout in zip(parts, self.dropouts, strict=True):
            update = part(norm(hidden) if self.norm_first else hidden)
            batch_first = self.self_attn.batch_first
            hidden = hidden + hidden_dropout(
                update, dropout, self.training, self.mesh, batch_first=batch_first
            )
            hidden = hidden if self.norm_first else norm(hidden)
        return hidden

    def _to_itself(
        self, x: Tensor, mask: Tensor | None, padding: Tensor | None, is_causal: bool
    ) -> Tensor:
        attended, _ = self.self_attn(
            x,
            x,
            x,
            attn_mask=mask,
            key_padding_mask=padding,
            need_weights=False,
            is_causal=is_causal,
        )
        return attended

    def _to(
        self,
        memory: Tensor,
        x: Tensor,
        mask: Tensor | None,
        padding: Tensor | None,
        is_causal: bool,
    ) -> Tensor:
        attended, _ = self.multihead_attn(
            x,
            memory,
            memory,
            attn_mask=mask,
            key_padding_mask=padding,
            need_weights=False,
            is_causal=is_causal,
        )
        return attended
