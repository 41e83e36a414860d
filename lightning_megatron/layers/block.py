"""A Transformer block with norms before or after the residual additions."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.dropout import hidden_dropout
from lightning_megatron.layers.recompute import replayed
from lightning_megatron.plan.activations import Recompute
from lightning_megatron.shapes import Float

NormPosition = Literal["pre", "post"]


class TransformerBlock(nn.Module):
    """Self-attention and an MLP, each with a norm and a residual connection.

    With ``pre`` the norms read the residual stream but never replace it (figure 7 (b) of the
    paper). With ``post`` they replace it (figure 7 (a), the original BERT). Equal to
    torch.nn.TransformerEncoderLayer with ``norm_first`` True or False. A parallel block computes
    ``x + attention(norm1(x)) + mlp(norm2(x))``.

    Args:
        attention: The attention layer, called with (hidden, rotary, recompute_core, mask).
        mlp: The MLP, or a mixture of experts.
        attention_norm: Norm of the attention's input (``pre``) or of the first residual sum
            (``post``).
        mlp_norm: Norm of the MLP's input (``pre``) or of the second residual sum (``post``).
        mesh: Process groups and random streams of this rank.
        layer: Number of the layer in the random streams; 1 is the first block.
        norm_position: Position of the norms, ``pre`` or ``post``.
        dropout: Probability that an element is dropped before each residual addition.
        is_parallel: Whether attention and MLP read the same residual stream; only with ``pre``.

    Source: Shoeybi et al. 2019, section 5.3, figure 7; Wang and Komatsuzaki 2021 (parallel blocks).
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
        self.attention_norm = attention_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp
        self.mesh = mesh
        self.layer = layer
        self.norm_position = norm_position
        self.dropout = dropout
        self.is_parallel = is_parallel

    def forward(
        self,
        hidden: Float[Tensor, "seq_local batch hidden"],
        rotary: tuple[
            Float[Tensor, "seq #batch 1 rotary_dim"], Float[Tensor, "seq #batch 1 rotary_dim"]
        ]
        | None = None,
        recompute: Recompute = "none",
        mask: Float[Tensor, "#batch 1 #seq seq"] | None = None,
    ) -> Float[Tensor, "seq_local batch hidden"]:
        """Return the residual stream after this block.

        Args:
            hidden: The residual stream.
            rotary: Cosines and sines from ``rotary_tables``; None means no rotary embedding.
            recompute: Activations that the backward pass recomputes.
            mask: Tensor that is added to the attention scores; None means no mask.
        """
        if recompute == "full":
            return replayed(self._run, self.mesh.random, self.layer, hidden, rotary, False, mask)
        return self._run(hidden, rotary, recompute == "selective", mask)

    def _run(
        self,
        hidden: Tensor,
        rotary: tuple[Tensor, Tensor] | None,
        recompute_core: bool,
        mask: Tensor | None,
    ) -> Tensor:
        self._begin()
        if self.norm_position == "pre":
            stream, hidden = self.attention_norm(hidden, None, True)
            if self.is_parallel:
                stream, other = self.mlp_norm(stream, None, True)
                stream = stream + self._dropped(
                    self.attention(hidden, rotary, recompute_core, mask),
                )
                return stream + self._dropped(self.mlp(other))
            update = self._dropped(self.attention(hidden, rotary, recompute_core, mask))
            stream, hidden = self.mlp_norm(stream, update, True)
            return stream + self._dropped(self.mlp(hidden))
        hidden = self.attention_norm(
            hidden,
            self._dropped(self.attention(hidden, rotary, recompute_core, mask)),
        )
        return self.mlp_norm(hidden, self._dropped(self.mlp(hidden)))

    @torch.compiler.disable
    def _begin(self) -> None:
        # torch.compile would specialise on these numbers and recompile every block in every step.
        self.mesh.random.seek(self.layer)

    def _dropped(self, update: Tensor) -> Tensor:
        return hidden_dropout(update, self.dropout, self.training, self.mesh)
