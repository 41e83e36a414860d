"""Transformer layers and encoders of torch.nn, cut over the tensor-parallel axis."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.fused.dropout import hidden_dropout
from lightning_megatron.layers.linear.linear import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.swap.blocks.attention import HeadParallelAttention
from lightning_megatron.swap.blocks.cut_modules import TensorDropout


class _ParallelLayer(nn.Module):
    """Sublayers of a Transformer layer with their norms, dropouts and residual sums.

    Args:
        source: Layer of torch.nn, whose norms, activation and probabilities this layer has.
        attentions: Attentions by their names in the layer.
        layer: Number of the layer for random streams.
    """

    self_attn: HeadParallelAttention
    multihead_attn: HeadParallelAttention

    def __init__(
        self,
        source: Any,
        attentions: Mapping[str, HeadParallelAttention],
        linear1: ColumnParallelLinear,
        linear2: RowParallelLinear,
        mesh: ParallelMesh,
        layer: int,
    ) -> None:
        super().__init__()
        for name, attention in attentions.items():
            self.add_module(name, attention)
        self.linear1 = linear1
        self.linear2 = linear2
        numbers = range(1, len(attentions) + 2)
        for number in numbers:
            self.add_module(f"norm{number}", getattr(source, f"norm{number}"))
        self.activation = source.activation
        self.norm_first = source.norm_first
        self.dropout = TensorDropout(source.dropout.p, mesh)
        self.dropouts = [getattr(source, f"dropout{number}").p for number in numbers]
        self.batch_first = source.self_attn.batch_first
        self.mesh = mesh
        self.layer = layer
        inner = [source.dropout.p, *(attention.dropout for attention in attentions.values())]
        self.draws = any(p > 0.0 for p in (*inner, *self.dropouts))

    def _run(self, hidden: Tensor, *attend: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the layer's output.

        Args:
            attend: Attentions, as functions of the first sequence.
        """
        if self.training and self.draws:
            # From here on, dropout masks depend only on the layer, so that recomputation draws the
            # same masks.
            self.mesh.random.seek(self.layer)
        for number, part in enumerate((*attend, self._feed)):
            norm = self.get_submodule(f"norm{number + 1}")
            update = part(norm(hidden) if self.norm_first else hidden)
            hidden = hidden + hidden_dropout(
                update,
                self.dropouts[number],
                self.training,
                self.mesh,
                batch_first=self.batch_first,
            )
            hidden = hidden if self.norm_first else norm(hidden)
        return hidden

    def _feed(self, x: Tensor) -> Tensor:
        output: Tensor = self.linear2(self.dropout(self.activation(self.linear1(x))))
        return output


class ParallelEncoderLayer(_ParallelLayer):
    """Encoder layer with heads and inner features cut over tp.

    Equal to torch.nn.TransformerEncoderLayer in training and evaluation, with the same parameter
    names.

    Shapes: ``(S, B, D)``, or ``(B, S, D)`` with ``batch_first``; output the same.

    Communication: two all-reduces over tp forward, two backward.
    Source: Shoeybi et al. 2019, section 3.
    """

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """Return the layer's output."""
        return self._run(
            src,
            lambda x: _attended(self.self_attn, x, x, src_mask, src_key_padding_mask, is_causal),
        )


class ParallelDecoderLayer(_ParallelLayer):
    """Decoder layer with heads and inner features cut over tp.

    Equal to torch.nn.TransformerDecoderLayer in training and evaluation, with the same parameter
    names.

    Shapes: ``(T, B, D)`` and memory ``(S, B, D)``, or batch first with ``batch_first``; output like
    the first input.

    Communication: three all-reduces over tp forward, five backward.
    Source: Shoeybi et al. 2019, section 3.
    """

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
        return self._run(
            tgt,
            lambda x: _attended(
                self.self_attn, x, x, tgt_mask, tgt_key_padding_mask, tgt_is_causal
            ),
            lambda x: _attended(
                self.multihead_attn,
                x,
                memory,
                memory_mask,
                memory_key_padding_mask,
                memory_is_causal,
            ),
        )


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
