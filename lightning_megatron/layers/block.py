"""Transformer blocks: norms before the sublayers, norms after them, or sublayers side by side."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.attention.span import AttentionSpan
from lightning_megatron.layers.fused.dropout import hidden_dropout
from lightning_megatron.layers.norm import add_and_normalise, norm_recomputed
from lightning_megatron.layers.rotary import Rotary
from lightning_megatron.shapes import Float


class Block(nn.Module):
    """Parts of the blocks of all forms: attention, an MLP, and their norms.

    Offload, CUDA graphs and recomputation of a whole block wrap it from outside.

    Args:
        attention: The attention layer, called with (hidden, rotary, span).
        mlp: The MLP, or a mixture of experts.
        attention_norm: Norm of the attention's input, or of its residual sum in a
            :class:`PostNormBlock`; None means no such norm.
        output_norms: Norms of the outputs of both sublayers before their residual additions.
        scale: Factor of the outputs of both sublayers.
    """

    def __init__(
        self,
        attention: nn.Module,
        mlp: nn.Module,
        attention_norm: nn.Module | None,
        mlp_norm: nn.Module | None,
        *,
        mesh: ParallelMesh,
        layer: int,
        output_norms: tuple[nn.Module, nn.Module] | None = None,
        scale: float = 1.0,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.attention_norm = attention_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp
        norms: tuple[nn.Module | None, nn.Module | None] = output_norms or (None, None)
        self.attention_output_norm, self.mlp_output_norm = norms
        self.mesh = mesh
        self.layer = layer
        self.scale = scale
        self.dropout = dropout

    def update_of(
        self, output: Float[Tensor, "seq_local batch hidden"], norm: nn.Module | None = None
    ) -> Float[Tensor, "seq_local batch hidden"]:
        """Return what a sublayer adds to the residual stream: its output, scaled, with dropout."""
        output = output if norm is None else norm(output)
        output = output if self.scale == 1.0 else output * self.scale
        return hidden_dropout(output, self.dropout, self.training, self.mesh)

    @torch.compiler.disable
    def begin(self) -> None:
        """Move the random streams to this layer."""
        # torch.compile would specialise on these numbers and recompile every block in every step.
        self.mesh.random.seek(self.layer)


class PreNormBlock(Block):
    """Block whose norms are before the sublayers: ``x += attention(norm(x)); x += mlp(norm(x))``.

    Equal to torch.nn.TransformerEncoderLayer with ``norm_first=True``. Norms of the sublayers'
    outputs may replace those of their inputs (norm position ``output``), or accompany them
    (``sandwich``).

    Source: Shoeybi et al. 2019, section 5.3, figure 7 (b).
    """

    def forward(
        self,
        hidden: Float[Tensor, "seq_local batch hidden"],
        rotary: Rotary | None = None,
        span: AttentionSpan | None = None,
    ) -> Float[Tensor, "seq_local batch hidden"]:
        """Return the residual stream after this block; rows without a span are one document."""
        self.begin()
        hidden, normed, extras = add_and_normalise(
            self.attention_norm, hidden, reader=self.attention
        )
        with norm_recomputed(self.attention_norm, hidden, normed):
            update = self.attention(normed, rotary, span, **extras)
        update = self.update_of(update, self.attention_output_norm)

        # hidden += update; normed = mlp_norm(hidden), in one kernel.
        hidden, normed, extras = add_and_normalise(self.mlp_norm, hidden, update, reader=self.mlp)
        del update  # The MLP may need its memory.
        with norm_recomputed(self.mlp_norm, hidden, normed):
            update = self.mlp(normed, **extras)
        return hidden + self.update_of(update, self.mlp_output_norm)


class PostNormBlock(Block):
    """Block whose norms are after the additions: ``x = norm(x + attention(x))``, and the MLP alike.

    Equal to torch.nn.TransformerEncoderLayer with ``norm_first=False``.

    Source: Shoeybi et al. 2019, section 5.3, figure 7 (a), the original BERT.
    """

    attention_norm: nn.Module
    mlp_norm: nn.Module

    def forward(
        self,
        hidden: Float[Tensor, "seq_local batch hidden"],
        rotary: Rotary | None = None,
        span: AttentionSpan | None = None,
    ) -> Float[Tensor, "seq_local batch hidden"]:
        self.begin()
        update = self.update_of(self.attention(hidden, rotary, span), self.attention_output_norm)
        hidden = self.attention_norm(hidden, update)  # norm(hidden + update), in one kernel
        update = self.update_of(self.mlp(hidden), self.mlp_output_norm)
        return self.mlp_norm(hidden, update)  # norm(hidden + update)


class ParallelBlock(Block):
    """Block whose sublayers read the same stream: ``x + attention(norm1(x)) + mlp(norm2(x))``.

    Source: Wang and Komatsuzaki 2021.
    """

    attention_norm: nn.Module
    mlp_norm: nn.Module

    def forward(
        self,
        hidden: Float[Tensor, "seq_local batch hidden"],
        rotary: Rotary | None = None,
        span: AttentionSpan | None = None,
    ) -> Float[Tensor, "seq_local batch hidden"]:
        self.begin()
        hidden, normed, extras = add_and_normalise(
            self.attention_norm, hidden, reader=self.attention
        )
        hidden, beside, _ = add_and_normalise(self.mlp_norm, hidden)
        update = self.attention(normed, rotary, span, **extras)
        hidden = hidden + self.update_of(update, self.attention_output_norm)
        return hidden + self.update_of(self.mlp(beside), self.mlp_output_norm)
