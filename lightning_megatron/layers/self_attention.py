"""Self-attention whose heads are sharded over the tensor axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.attention.cached_attention import attend_with_cache
from lightning_megatron.layers.attention.core import attend, with_wide_values
from lightning_megatron.layers.attention.engine_core import attend_by_engine
from lightning_megatron.layers.attention.span import AttentionSpan
from lightning_megatron.layers.context_parallel.attend_across import (
    attend_across,
    attend_to_held,
    store_first,
)
from lightning_megatron.layers.fp8.magnitude import Magnitude
from lightning_megatron.layers.fused.dropout import WeightDropout, tensor_region_stream
from lightning_megatron.layers.linear.linear import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.layers.norm import RMSNorm, ShardedRMSNorm
from lightning_megatron.layers.parameters.init import Initializer, sharded_parameter
from lightning_megatron.layers.recompute import replayed
from lightning_megatron.layers.rotary import Rotary, split_heads
from lightning_megatron.plan.context_transport import choose_context_transport
from lightning_megatron.plan.shards import ShardRange, attention_ranges, even_range
from lightning_megatron.shapes import Float


class Attention(nn.Module):
    """Attention of this rank's heads; subclasses project to queries, keys and values.

    Args:
        heads: Query heads of this rank (heads).
        kv_heads: Key/value heads of this rank (heads).
        value_dim: Size of a value head, at most ``head_dim``; None means ``head_dim`` (elements).
        span: Attention of the layer over whole rows; None means causal attention. Calls give the
            documents, prefix or mask of the rows, if they have any.
    """

    def __init__(
        self,
        mesh: ParallelMesh,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        span: AttentionSpan | None = None,
        dropout: float = 0.0,
        layer: int = 1,
    ) -> None:
        super().__init__()
        self.mesh = mesh
        self.head_dim = head_dim
        self.value_dim = value_dim or head_dim
        self.dropout = dropout
        #: Attention of the layer over whole rows.
        self.span = span or AttentionSpan()
        self.layer = layer
        #: Whether the backward pass recomputes the attention core, whose activations are then not
        #: kept.
        self.recomputes_core = False
        #: Whether Transformer Engine computes the core, except with a cache of earlier tokens.
        self.uses_engine = False
        #: Dropout of weights where torch's kernels do not drop them.
        self.weight_dropout = WeightDropout(mesh, mesh.tp.rank * heads)
        #: Transport of attention over cp; without context parallelism nothing is exchanged.
        self.context = choose_context_transport(
            mesh.context, mesh.cp.size, heads, kv_heads, dropout
        )

    def mixed(
        self,
        query: Float[Tensor, "seq_part batch heads head_dim"],
        key: Float[Tensor, "seq_part batch kv_heads head_dim"],
        value: Float[Tensor, "seq_part batch kv_heads value_dim"],
        span: AttentionSpan | None = None,
        sinks: Float[Tensor, " heads"] | None = None,
    ) -> Float[Tensor, "seq_part batch heads*value_dim"]:
        """Return the attention output of every query, before the output projection."""
        if self.recomputes_core:
            replayed_core: Tensor = replayed(
                self._core, self.mesh.random, self.layer, query, key, value, span, sinks
            )
            return replayed_core
        return self._core(query, key, value, span, sinks)

    def _core(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        span: AttentionSpan | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        drops: dict[str, Any] = {"dropout": dropout, "drop": self.weight_dropout}
        with tensor_region_stream(self.dropout, self.training, self.mesh):
            span = self.span.over(span)
            if sinks is not None:
                span = replace(span, sinks=sinks)
            cp = self.mesh.cp
            past = span.past
            if past is not None and cp.size == 1:
                return attend_with_cache(query, key, value, span, self.layer, **drops)
            if self.uses_engine and cp.size == 1:
                return attend_by_engine(query, key, value, span, dropout=dropout)
            if cp.size == 1:
                return attend(query, key, value, span, **drops)
            if past is not None and past.cache.length > 0:
                return attend_to_held(query, key, value, span, self.layer, cp)
            if past is not None:
                store_first(key, value, span, self.layer, cp)
                span = replace(span, past=None)

            def across(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
                return attend_across(query, key, value, span, self.mesh, self.context, **drops)

            return with_wide_values(across, query, key, value)


class SelfAttention(Attention):
    """Self-attention over the sequence, with the heads sharded over tp.

    There may be fewer key/value heads than query heads (grouped-query attention). If tp exceeds the
    number of key/value heads, each of these is copied to several ranks.

    Equal to torch.nn.MultiheadAttention (causal or not) if ``num_kv_heads == num_heads`` and no
    rotary tables are given. Equal to Hugging Face's LlamaAttention if rotary tables are given.

    Args:
        num_kv_heads: Key/value heads of the full layer; None means as many as query heads (heads).
        head_dim: Size of a head; None means ``hidden_size / num_heads`` (elements).
        output_bias: Whether the output projection adds a bias; None means the same as ``bias``.
        span: Attention of the layer over whole rows, with the ALiBi slopes of all heads; None means
            causal attention.
        norm_eps: Epsilon of the RMSNorm that is applied to every query and key head before the
            rotary embedding; None means no such norm.
        norm_offset: Number that these norms add to their weight.
        norm_over_layer: Whether these norms divide by the root mean square of all heads of a layer;
            otherwise they divide by that of each head.
        interleaved: Whether the rotary embedding pairs neighbouring elements of a head.
        sinks: Whether each query head has an attention sink: a learned score that takes part in the
            softmax and has no value.

    Communication: one all-reduce over tp forward, one backward; see ``layers.linear.regions`` for
        sequence parallelism.
    Source: Shoeybi et al. 2019, section 3, figure 3b.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        mesh: ParallelMesh,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = True,
        output_bias: bool | None = None,
        span: AttentionSpan | None = None,
        dropout: float = 0.0,
        norm_eps: float | None = None,
        norm_offset: float = 0.0,
        norm_over_layer: bool = False,
        interleaved: bool = False,
        sinks: bool = False,
        layer: int = 1,
        initializer: Initializer | None = None,
        output_initializer: Initializer | None = None,
    ) -> None:
        num_kv_heads = num_kv_heads or num_heads
        head_dim = head_dim or hidden_size // num_heads
        ranges = attention_ranges(num_heads, num_kv_heads, head_dim, mesh.tp.size, mesh.tp.rank)
        widths = [piece.size for piece in ranges]
        super().__init__(
            mesh,
            heads=widths[0] // head_dim,
            kv_heads=widths[1] // head_dim,
            head_dim=head_dim,
            span=_of_heads(span or AttentionSpan(), ranges[0], head_dim),
            dropout=dropout,
            layer=layer,
        )
        self.widths = widths
        self.qkv = ColumnParallelLinear(
            hidden_size,
            (num_heads + 2 * num_kv_heads) * self.head_dim,
            mesh,
            bias=bias,
            ranges=ranges,
            # The copies of a key/value head serve different query heads. The gradients of the
            # copies must be summed.
            partial=mesh.tp.size > num_kv_heads,
            initializer=initializer,
        )
        self.norm_over_layer = norm_over_layer
        self.interleaved = interleaved
        self.query_norm, self.key_norm = self._norms(
            (num_heads, num_kv_heads), ranges, norm_eps, norm_offset
        )
        self.sinks = _sinks(num_heads, mesh, initializer) if sinks else None
        self.output = RowParallelLinear(
            num_heads * self.head_dim,
            hidden_size,
            mesh,
            bias=bias if output_bias is None else output_bias,
            initializer=output_initializer,
        )

    @property
    def reads_magnitude(self) -> bool:
        """Return whether :meth:`forward` uses the magnitude of its input."""
        return self.qkv.reads_magnitude

    def forward(
        self,
        hidden: Float[Tensor, "seq_local batch hidden"],
        rotary: Rotary | None = None,
        span: AttentionSpan | None = None,
        magnitude: Magnitude | None = None,
    ) -> Float[Tensor, "seq_local batch hidden"]:
        norms = None
        if self.query_norm is not None and self.key_norm is not None:
            norms = (self.query_norm, self.key_norm)
        query, key, value = split_heads(
            self.qkv(hidden, magnitude=magnitude),
            self.widths,
            self.head_dim,
            rotary,
            norms,
            norms_layer=self.norm_over_layer,
            interleaved=self.interleaved,
        )
        return self.output(self.mixed(query, key, value, span, sinks=self.sinks))

    def _norms(
        self,
        numbers: tuple[int, int],
        ranges: Sequence[ShardRange],
        eps: float | None,
        offset: float,
    ) -> tuple[nn.Module | None, nn.Module | None]:
        """Build the norms of the queries and of the keys; without an epsilon there are none.

        Args:
            numbers: Number of query heads and of key heads of the full layer (heads).
            ranges: Features of this rank in the fused projection (elements).
        """
        if eps is None:
            return None, None
        if not self.norm_over_layer:
            # Each rank normalises its own heads only. The gradients of these weights must be summed
            # over tp.
            sums = self.mesh.tp.size > 1
            build = partial(RMSNorm, self.head_dim, self.mesh, eps=eps, offset=offset, partial=sums)
            return build(), build()
        sizes = [number * self.head_dim for number in numbers]
        # The features of the keys follow those of the queries in the fused projection.
        key = replace(ranges[1], start=ranges[1].start - sizes[0], stop=ranges[1].stop - sizes[0])
        return (
            ShardedRMSNorm(sizes[0], ranges[0], self.mesh, eps=eps, offset=offset),
            ShardedRMSNorm(sizes[1], key, self.mesh, eps=eps, offset=offset),
        )


def _of_heads(span: AttentionSpan, features: ShardRange, head_dim: int) -> AttentionSpan:
    """Return the span of this rank's query heads, given the range of their features."""
    if span.slopes is None:
        return span
    own_heads = range(features.start // head_dim, features.stop // head_dim)
    return replace(span, slopes=span.slopes.of(own_heads))


def _sinks(num_heads: int, mesh: ParallelMesh, initializer: Initializer | None) -> nn.Parameter:
    """Return the scores of the sinks of this rank's heads."""
    heads = even_range(num_heads, mesh.tp.size, mesh.tp.rank, what="num_heads")
    return sharded_parameter((num_heads,), [heads], initializer or Initializer.normal())
