"""Multi-head latent attention whose heads are sharded over the tensor-parallel axis."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from lightning_megatron.groups.collectives import all_gather_sequence, copy_to_axis
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.attention.span import AttentionSpan
from lightning_megatron.layers.fp8.magnitude import Magnitude
from lightning_megatron.layers.linear.linear import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.layers.norm import RMSNorm, add_and_normalise
from lightning_megatron.layers.parameters.init import Initializer
from lightning_megatron.layers.replicated import ReplicatedLinear
from lightning_megatron.layers.rotary import Rotary, apply_rotary
from lightning_megatron.layers.self_attention import Attention
from lightning_megatron.plan.latent_attention import LatentAttentionConfig
from lightning_megatron.plan.shards import even_range
from lightning_megatron.shapes import Float


class LatentAttention(Attention):
    """Self-attention with keys and values from a latent vector of each token.

    Equal to Hugging Face's DeepseekV2Attention and DeepseekV3Attention without a cache.

    Every rank has the full projections to latent vectors, and the projections from latent vectors
    to its heads. Under sequence parallelism a rank computes the latent vectors of its positions,
    and the ranks all-gather these instead of the hidden states, which are several times larger.
    Without sequence parallelism all ranks compute the same latent vectors.

    Communication: under sequence parallelism forward an all-gather over tp of each kind of latent
        vectors (for queries without latent vectors, of the hidden states) and of the rotated keys,
        backward reduce-scatters of their gradients. Otherwise backward an all-reduce of the
        gradient of each of these tensors. The output projection communicates as in SelfAttention.
    Source: DeepSeek-AI 2024 (DeepSeek-V2), section 2.1.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        sizes: LatentAttentionConfig,
        mesh: ParallelMesh,
        *,
        bias: bool = False,
        output_bias: bool = False,
        interleaved: bool = False,
        span: AttentionSpan | None = None,
        dropout: float = 0.0,
        layer: int = 1,
        initializer: Initializer | None = None,
        output_initializer: Initializer | None = None,
    ) -> None:
        local_heads = even_range(
            num_heads, mesh.tp.size, mesh.tp.rank, what="num_attention_heads"
        ).size
        super().__init__(
            mesh,
            heads=local_heads,
            kv_heads=local_heads,
            head_dim=sizes.head_dim,
            value_dim=sizes.value_dim,
            span=span,
            dropout=dropout,
            layer=layer,
        )
        self.sizes = sizes
        self.interleaved = interleaved

        # Under sequence parallelism each rank projects its own positions down only.
        down = partial(
            ReplicatedLinear,
            hidden_size,
            mesh=mesh,
            partial=mesh.sequence_parallel,
            bias=bias,
            initializer=initializer,
        )

        up = partial(ColumnParallelLinear, mesh=mesh, bias=False, initializer=initializer)
        self.query_down: ReplicatedLinear | None = None
        self.query_norm: RMSNorm | None = None
        if sizes.query_rank is not None:
            self.query_down = down(out_features=sizes.query_rank)
            self.query_norm = RMSNorm(sizes.query_rank, mesh, eps=sizes.norm_eps)
        self.query = up(sizes.query_rank or hidden_size, num_heads * sizes.head_dim)
        self.key_value_down = down(out_features=sizes.key_value_rank + sizes.rotary_dim)
        self.key_value_norm = RMSNorm(sizes.key_value_rank, mesh, eps=sizes.norm_eps)
        features = num_heads * (sizes.plain_dim + sizes.value_dim)
        self.key_value = up(sizes.key_value_rank, features)
        self.output = RowParallelLinear(
            num_heads * sizes.value_dim,
            hidden_size,
            mesh,
            bias=output_bias,
            initializer=output_initializer,
        )

    def forward(
        self,
        hidden: Float[Tensor, "seq_local batch hidden"],
        rotary: Rotary,
        span: AttentionSpan | None = None,
    ) -> Float[Tensor, "seq_local batch hidden"]:
        query = self._queries(hidden, rotary)
        key, value = self._keys_and_values(hidden, rotary)
        return self.output(self.mixed(query, key, value, span))

    def _queries(self, hidden: Tensor, rotary: Rotary) -> Tensor:
        extras: dict[str, Magnitude] = {}
        if self.query_down is not None:
            latent = self.query_down(hidden)
            _, hidden, extras = add_and_normalise(self.query_norm, latent, reader=self.query)
        query = self.query(hidden, **extras).unflatten(-1, (-1, self.head_dim))
        plain, rotated = query.split([self.sizes.plain_dim, self.sizes.rotary_dim], -1)
        return torch.cat((plain, apply_rotary(rotated, rotary, self.interleaved)), -1)

    def _keys_and_values(self, hidden: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        sizes = self.sizes
        latent, shared = self.key_value_down(hidden).split(
            [sizes.key_value_rank, sizes.rotary_dim], -1
        )
        _, latent, extras = add_and_normalise(self.key_value_norm, latent, reader=self.key_value)
        heads = self.key_value(latent, **extras)
        plain, value = heads.unflatten(-1, (-1, sizes.plain_dim + sizes.value_dim)).split(
            [sizes.plain_dim, sizes.value_dim], -1
        )
        # The heads of all ranks read these elements, so their gradients are summed over tp.
        tp = self.mesh.tp
        enter = all_gather_sequence if self.mesh.sequence_parallel else copy_to_axis
        shared = apply_rotary(enter(shared, tp).unsqueeze(2), rotary, self.interleaved)
        return torch.cat((plain, shared.expand(-1, -1, plain.shape[2], -1)), -1), value
