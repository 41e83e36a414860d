"""Tensor names of multi-head latent attention."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_megatron.models.config import GPTConfig
from lightning_megatron.swap.tensors.mapping import Source, TensorMap


@dataclass(frozen=True)
class LatentNames:
    """Tensor names of latent attention, with ``{}`` for the layer.

    Args:
        query_down: Projection to latent vectors of queries.
        query_norm: Norm of the latent vectors of queries.
        query_up: Projection of the latent vectors to query heads.
        query: Projection of the hidden states to query heads, without latent vectors.
        key_value_down: Projection to latent vectors of keys and values, and to the keys' elements
            that all heads share.
        key_value_norm: Norm of these latent vectors.
        key_value: Projection of these latent vectors to the keys and values of one head after the
            other.
    """

    query_down: str
    query_norm: str
    query_up: str
    query: str
    key_value_down: str
    key_value_norm: str
    key_value: str

    def layer(self, config: GPTConfig, layer: int) -> list[TensorMap]:
        """List the sources of the full tensors of one layer, without the output projection."""
        sizes = config.latent_attention
        assert sizes is not None, "only families with latent attention have such names"
        prefix = f"layers.{layer}.attention"
        width = config.hidden_size
        heads = config.num_heads
        rank = sizes.query_rank

        def linear(target: str, name: str, shape: tuple[int, ...], bias: bool) -> list[TensorMap]:
            kinds = {"weight": shape} | ({"bias": shape[:1]} if bias else {})
            source = name.format(layer)
            return [
                TensorMap(f"{prefix}.{target}.{kind}", size, (Source(f"{source}.{kind}", size[0]),))
                for kind, size in kinds.items()
            ]

        has_bias = config.has_qkv_bias
        tensors = []
        if rank is not None:
            tensors += linear("query_down", self.query_down, (rank, width), has_bias)
            tensors += linear("query_norm", self.query_norm, (rank,), False)
        query = self.query if rank is None else self.query_up
        tensors += linear("query", query, (heads * sizes.head_dim, rank or width), False)
        down = (sizes.key_value_rank + sizes.rotary_dim, width)
        up = (heads * (sizes.plain_dim + sizes.value_dim), sizes.key_value_rank)
        tensors += linear("key_value_down", self.key_value_down, down, has_bias)
        tensors += linear("key_value_norm", self.key_value_norm, (sizes.key_value_rank,), False)
        return tensors + linear("key_value", self.key_value, up, False)
