"""Transformer layers and encoders of torch.nn, cut over the tensor-parallel axis."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.fused.dropout import hidden_dropout
from lightning_megatron.layers.linear.linear import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.swap.blocks.attention import HeadParallelAttention
from lightning_megatron.swap.blocks.cut_modules import TensorDropout


class ParallelEncoderLayer(nn.Module):
    """Encoder layer with heads and inner features cut over tp.

    Equal to torch.nn.TransformerEncoderLayer in training and evaluation, with the same parameter
    names.

    Shapes: ``(S, B, D)``, or ``(B, S, D)`` with ``attention.batch_first``; output the same.

    Communication: two all-reduces over tp forward, two backward.
    Source: Shoeybi et al. 2019, section 3.
    """

    def __init__(
        self,
        attention: HeadParallelAttention,
        linear1: ColumnParallelLinear,
        linear2: RowParallelLinear,
        norm1: nn.Module,
        norm2: nn.Module,
        activation: Callable[[Tensor], Tensor],
        *,
        mesh: ParallelMesh,
        layer: int,
        norm_first: bool = False,
        dropout: float = 0.0,
        dropout1: float = 0.0,
        dropout2: float = 0.0,
    ) -> None:
        super().__init__()
        self.self_attn = attention
        self.linear1 = linear1
        self.linear2 = linear2
        self.norm1 = norm1
        self.norm2 = norm2
        self.activation = activation
        self.dropout = TensorDropout(dropout, mesh)
        self.dropout1 = dropout1
        self.dropout2 = dropout2
        self.mesh = mesh
        self.layer = layer
        self.norm_first = norm_first
        self.draws = any(p > 0.0 for p in (attention.dropout, dropout, dropout1, dropout2))

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """Return the layer's output."""
        if self.training and self.draws:
            # From here on, dropout masks depend only on the layer, so that recomputation draws the
            # same masks.
            self.mesh.random.seek(self.layer)
        if self.norm_first:
            hidden = src + self._attend(self.norm1(src), src_mask, src_key_padding_mask, is_causal)
            return hidden + self._feed(self.norm2(hidden))
        hidden = self.norm1(src + self._attend(src, src_mask, src_key_padding_mask, is_causal))
        return self.norm2(hidden + self._feed(hidden))

    def _attend(
        self, x: Tensor, mask: Tensor | None, padding: Tensor | None, is_causal: bool
    ) -> Tensor:
        attended = _attended(self.self_attn, x, x, mask, padding, is_causal)
        return self._dropped(attended, self.dropout1)

    def _feed(self, x: Tensor) -> Tensor:
        output = self.linear2(self.dropout(self.activation(self.linear1(x))))
        return self._dropped(output, self.dropout2)

    def _dropped(self, x: Tensor, probability: float) -> Tensor:
        batch_first = self.self_attn.batch_first
        return hidden_dropout(x, probability, self.training, self.mesh, batch_first=batch_first)


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
                lambda x: _attended(
                    self.self_attn, x, x, tgt_mask, tgt_key_padding_mask, tgt_is_causal
                ),
            ),
            (
                self.norm2,
                lambda x: _attended(
                    self.multihead_attn,
                    x,
                    memory,
                    memory_mask,
                    memory_key_padding_mask,
                    memory_is_causal,
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


def _attended(
    attention: HeadParallelAttention,
    x: Tensor,
    memory: Tensor,
    mask: Tensor | None,
    padding: Tensor | None,
    is_causal: bool,
) -> Tensor:
    output, _ = attention(
        x,
        memory,
        memory,
        attn_mask=mask,
        key_padding_mask=padding,
        need_weights=False,
        is_causal=is_causal,
    )
    return output


class ParallelEncoder(nn.Module):
    """Stack of encoder layers without torch's nested tensors.

    Equal to torch.nn.TransformerEncoder. In evaluation torch may pack padded batches into nested
    tensors, which sharded layers do not support. This class keeps one side effect of the packing:
    zeros at padded positions before the last norm.
    """

    def __init__(self, source: nn.TransformerEncoder) -> None:
        super().__init__()
        self.layers = source.layers
        self.norm = source.norm
        self.num_layers = source.num_layers
        self.packs_padding = bool(getattr(source, "use_nested_tensor", False))
        self.mask_check = bool(getattr(source, "mask_check", True))

    def forward(
        self,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        """Return the output of the last layer, normalized if the encoder has a norm."""
        padding = src_key_padding_mask
        output = src
        for layer in self.layers:
            output = layer(
                output, src_mask=mask, src_key_padding_mask=padding, is_causal=bool(is_causal)
            )
        if padding is not None and self._would_pack(src, mask, padding):
            output = output.masked_fill(_is_padding(padding).unsqueeze(-1), 0.0)
        return output if self.norm is None else self.norm(output)

    def _would_pack(self, src: Tensor, mask: Tensor | None, padding: Tensor) -> bool:
        """Return whether torch.nn.TransformerEncoder would use nested tensors for this input."""
        first = self.layers[0]
        possible = (
            self.packs_padding
            and torch.backends.mha.get_fastpath_enabled()
            and not torch.is_autocast_enabled()
        )
        if not possible or first.training or src.dim() != 3 or mask is not None:
            return False
        if torch.is_grad_enabled() and (
            src.requires_grad or any(p.requires_grad for p in first.parameters())
        ):
            return False
        # True before False along a row means that padding comes first.
        return not self.mask_check or bool(
            (_is_padding(padding).to(torch.int8).diff(dim=1) >= 0).all()
        )


def _is_padding(padding: Tensor) -> Tensor:
    # torch converts a boolean mask to numbers and packs the positions where the number is zero.
    return padding if padding.dtype == torch.bool else padding != 0
