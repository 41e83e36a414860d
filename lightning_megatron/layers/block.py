"""A Transformer block with its norms before or after the residual sums."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.dropout import hidden_dropout
from lightning_megatron.layers.recompute import Recompute, replayed

NormPosition = Literal["pre", "post"]


class TransformerBlock(nn.Module):
    """Add self-attention and a position-wise network to the residual stream.

    ``pre`` is the rearranged block of the paper's figure 7 (b): the residual stream is never normalised itself.
    ``post`` is figure 7 (a), the original BERT. Equal to torch.nn.TransformerEncoderLayer with ``norm_first`` True or
    False. In parallel the network reads the same residual stream as the attention: ``x + attention(norm1(x)) +
    mlp(norm2(x))``.

    Shapes: ``(S, B, D)`` or, under sequence parallelism, ``(S/tp, B, D)``; output the same.

    Args:
        attention: The attention layer, called with (hidden, rotary, recompute_core, mask).
        mlp: The position-wise network.
        attention_norm: Norm of the attention's input (pre) or of the first residual sum (post).
        mlp_norm: Norm of the network's input (pre) or of the second residual sum (post).
        mesh: The groups and random streams of this rank.
        layer: Number of the layer for random streams, 1 for the first block.
        norm_position: ``pre`` or ``post``.
        dropout: Probability that an element is dropped before each residual sum.
        is_parallel: Whether attention and network read the same residual stream; only with ``pre``.

    Source: Shoeybi et al. 2019, section 5.3, figure 7; Wang and Komatsuzaki 2021 (in parallel).
    """

    def __init__(
        self,
        attention: nn.Module,
        mlp: nn.Module,
        attention_norm: nn.Module,
        mlp_norm: nn.Module,
        *,
        mesh: ParallelMesh,
        layer: int,
        norm_position: NormPosition = "pre",
        dropout: float = 0.0,
        is_parallel: bool = False,
    ) -> None:
        super().__init__()
        self.attention_norm, self.attention = attention_norm, attention
        self.mlp_norm, self.mlp = mlp_norm, mlp
        self.mesh, self.layer, self.norm_position, self.dropout = mesh, layer, norm_position, dropout
        self.is_parallel = is_parallel

    def forward(
        self,
        hidden: Tensor,
        rotary: tuple[Tensor, Tensor] | None = None,
        recompute: Recompute = "none",
        mask: Tensor | None = None,
    ) -> Tensor:
        """Return the residual stream after this block.

        Args:
            hidden: The residual stream.
            rotary: Tables of ``rotary_tables``, or None.
            recompute: What the backward pass computes again.
            mask: Added to the attention's scores; None means nothing is.
        """
        if recompute == "full":
            return replayed(self._run, self.mesh.random, self.layer, hidden, rotary, False, mask)
        return self._run(hidden, rotary, recompute == "selective", mask)

    def _run(
        self, hidden: Tensor, rotary: tuple[Tensor, Tensor] | None, recompute_core: bool, mask: Tensor | None
    ) -> Tensor:
        self._begin()
        if self.norm_position == "pre":
            stream, hidden = self.attention_norm(hidden, None, True)
            if self.is_parallel:
                stream, other = self.mlp_norm(stream, None, True)
                stream = stream + self._dropped(self.attention(hidden, rotary, recompute_core, mask))
                return stream + self._dropped(self.mlp(other))
            update = self._dropped(self.attention(hidden, rotary, recompute_core, mask))
            stream, hidden = self.mlp_norm(stream, update, True)
            return stream + self._dropped(self.mlp(hidden))
        hidden = self.attention_norm(hidden, self._dropped(self.attention(hidden, rotary, recompute_core, mask)))
        return self.mlp_norm(hidden, self._dropped(self.mlp(hidden)))

    @torch.compiler.disable
    def _begin(self) -> None:
        # A compiler that saw these numbers would compile every block anew, in every step.
        self.mesh.random.seek(self.layer)

    def _dropped(self, update: Tensor) -> Tensor:
        return hidden_dropout(update, self.dropout, self.training, self.mesh)
