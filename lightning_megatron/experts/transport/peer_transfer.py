"""One-sided transfers of tokens to the ranks of their experts, and of sums of outputs back.

A rank writes a token once into the memory of each rank that has one of its selected experts, at a
row that depends only on the token. Ranks therefore need not exchange counts. In return each rank
writes one sum per token over its experts. Each of the two transfers is the backward pass of the
other.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from types import ModuleType

import torch
from torch import Tensor

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.experts.transport.permute import RowMap, read_selections, unpermute
from lightning_megatron.groups.axis import MeshAxis
from lightning_megatron.groups.collectives import all_gather_sequence, reduce_scatter_sequence
from lightning_megatron.groups.peer_memory import PeerRegion, PeerUse
from lightning_megatron.layers.fused.choose_kernels import choose_kernels, reason_against_puts
from lightning_megatron.plan.experts import TokenBuffer
from lightning_megatron.shapes import Bool, Float, Int, Shaped

#: Size of a count (bytes).
_COUNT = 4


@dataclass(frozen=True)
class TokenBufferViews:
    """Views of shared memory with one row for each token of every rank.

    Args:
        rows: Features of tokens, or sums of rows.
        scales: Probabilities of selections, or their gradients; None if only rows are transferred.
        experts: Experts selected for the tokens; None if only rows are transferred.
    """

    region: PeerRegion
    layout: TokenBuffer
    rows: Float[Tensor, "buffer_rows hidden"]
    scales: Float[Tensor, "buffer_rows top_k"] | None
    experts: Int[Tensor, "buffer_rows top_k"] | None

    @classmethod
    def over(
        cls,
        axis: MeshAxis,
        rows: Float[Tensor, "_ hidden"],
        scales: Shaped[Tensor, "..."] | None,
        experts: Int[Tensor, "tokens top_k"],
        use: PeerUse = "tokens",
    ) -> TokenBufferViews:
        """Return the buffer of an axis for tensors of the given shapes and dtypes."""
        scale = 0 if scales is None else scales.element_size()
        layout = _lay_out(axis.size, *experts.shape, rows.shape[1], rows.element_size(), scale)
        region = axis.peer_memory.reserve(axis.group, layout.num_bytes, rows.device, use)
        features = region.view(0, (layout.count, layout.width), rows.dtype)
        if scales is None:
            return cls(region, layout, features, None, None)
        shape = (layout.count, layout.top_k)
        probabilities = region.view(layout.scales_at, shape, scales.dtype)
        return cls(
            region,
            layout,
            features,
            probabilities,
            region.view(layout.experts_at, shape, experts.dtype),
        )


# A layer runs four transfers in a step, and the number of tokens may differ from step to step.
@lru_cache(1024)
def _lay_out(
    num_ranks: int, num_tokens: int, top_k: int, width: int, element: int, scale: int
) -> TokenBuffer:
    return TokenBuffer(
        num_ranks=num_ranks,
        num_tokens=num_tokens,
        width=width,
        top_k=top_k,
        element=element,
        scale=scale,
    )


@dataclass(frozen=True)
class CloneStack:
    """One matrix of all clones of this rank, weights or gradients, in memory that ranks share.

    Args:
        start: Offset of the matrices in the memory of each rank (bytes).
    """

    region: PeerRegion
    start: int
    matrices: Float[Tensor, "places out_local in_local"]


@dataclass(frozen=True)
class Puts:
    """Transfers by writes into the memory of the other GPUs.

    A barrier precedes each write (:meth:`begin`), because other ranks may still read the data of
    the last transfer. Another barrier follows it, because the writes of other ranks may not have
    arrived yet. A rank reads the received data on the same stream before its next transfer, so only
    one transfer uses the memory at a time. One buffer therefore serves all layers, both directions,
    both passes and replays of a CUDA graph, as long as all ranks run the same transfers in the same
    order.

    Each transfer is :meth:`begin`, and then :meth:`dispatch` or :meth:`collect`. Weights and
    gradients of clones are transferred between the two.
    """

    axis: MeshAxis
    experts_each: int
    kernels: ModuleType

    def begin(self) -> None:
        """Wait until no rank reads the data of the last transfer any more."""
        self.axis.peer_memory.wait()

    def dispatch(
        self,
        hidden: Float[Tensor, "tokens hidden"],
        probabilities: Float[Tensor, "tokens top_k"] | None,
        experts: Int[Tensor, "tokens top_k"],
    ) -> TokenBufferViews:
        """Put each token into a row of its experts' ranks, and its selected experts into all.

        The buffer is valid until the next transfer. Rows of tokens without an expert on this rank
        are undefined.
        """
        buffer = TokenBufferViews.over(self.axis, hidden, probabilities, experts)
        if buffer.layout.count:
            self.axis.note("put_tokens")
            self._put(hidden, probabilities, experts, buffer)
            buffer.region.wait()
        return buffer

    def buffer_again(
        self, hidden: Float[Tensor, "tokens hidden"], experts: Int[Tensor, "tokens top_k"]
    ) -> TokenBufferViews:
        """Return the buffer of :meth:`dispatch_again`, which exists from the first call on."""
        return TokenBufferViews.over(self.axis, hidden, None, experts, "tokens again")

    def dispatch_again(
        self, hidden: Float[Tensor, "tokens hidden"], experts: Int[Tensor, "tokens top_k"]
    ) -> None:
        """Put each token into a row of its experts' ranks, without a barrier.

        They have arrived when the next :meth:`dispatch` returns, and are valid until the next call.
        """
        buffer = self.buffer_again(hidden, experts)
        if buffer.layout.count:
            self.axis.note("put_tokens_again")
            self._put(hidden, None, experts, buffer)

    def _put(
        self,
        hidden: Tensor,
        probabilities: Tensor | None,
        experts: Tensor,
        buffer: TokenBufferViews,
    ) -> None:
        self.kernels.put_tokens(
            hidden,
            probabilities,
            experts,
            buffer.region.pointers,
            self.axis.rank,
            self.experts_each,
            buffer.layout,
        )

    def collect(
        self,
        values: Float[Tensor, "rows hidden"],
        scales: Float[Tensor, "rows"] | None,
        row_map: RowMap,
        experts: Int[Tensor, "tokens top_k"],
    ) -> tuple[Float[Tensor, "tokens hidden"], Float[Tensor, "tokens top_k"] | None]:
        """Put the sum of each token's rows into a row of its rank, and add received sums.

        Args:
            values: Rows sorted by expert; rows past the last end may have any values.
            scales: One number for each row, returned by selection; None if there are none.
            row_map: Map from the selections of all ranks' tokens to the rows.
            experts: Experts selected for this rank's tokens.
        """
        buffer = TokenBufferViews.over(self.axis, values, scales, experts)
        if not buffer.layout.count:
            no_scales = None if buffer.scales is None else torch.empty_like(buffer.scales)
            return torch.empty_like(buffer.rows), no_scales
        self.axis.note("put_sums")
        self.kernels.put_sums(
            values,
            scales,
            row_map.rows,
            row_map.ends,
            row_map.needed,
            buffer.region.pointers,
            self.axis.rank,
            buffer.layout,
        )
        buffer.region.wait()
        return self.kernels.add_buffer_rows(buffer.rows, buffer.scales, experts, self.experts_each)

    def exchange_counts(self, ends: Int[Tensor, "experts"]) -> Int[Tensor, "ranks experts"]:
        """Put the counts of this rank's selections of each expert into the memory of all ranks.

        It takes the place of :meth:`begin`, and waits for all ranks. ``ends`` are those of the
        selections, sorted by expert.
        """
        shape = (self.axis.size, ends.shape[0])
        memory = self.axis.peer_memory
        region = memory.reserve(self.axis.group, prod(shape) * _COUNT, ends.device, "clone counts")
        self.axis.note("put_counts")
        self.kernels.put_counts(ends, region.pointers, self.axis.rank)
        memory.wait()
        return region.view(0, shape, torch.int32)

    def gradient_dtype(self, weights: torch.dtype) -> torch.dtype:
        """Return the dtype of clones' gradients: the kernel reads float32."""
        return torch.float32

    def put_weights(
        self,
        weights: Float[Tensor, "homes out_local in_local"],
        owners: Int[Tensor, "all_places"],
        stack: CloneStack,
    ) -> None:
        """Put the weight of every home with a clone into the place of the clone.

        It has arrived when the next :meth:`dispatch` returns. Other places are undefined.
        """
        self.axis.note("put_weights")
        self.kernels.put_weights(
            weights, owners, stack.region.pointers, self.axis.rank, stack.start
        )

    def add_gradients(
        self,
        owners: Int[Tensor, "all_places"],
        stack: CloneStack,
        sums: Float[Tensor, "homes out_local in_local"],
        scale: float,
    ) -> None:
        """Read the gradients of all clones of every home, and add them in the order of places.

        The clones' ranks have written them before :meth:`begin`.
        """
        self.axis.note("add_clone_gradients")
        self.kernels.add_clone_gradients(
            sums, owners, stack.region.pointers, self.axis.rank, stack.start, scale
        )


@dataclass(frozen=True)
class Collectives:
    """Transfers with the results of :class:`Puts`, by collectives, for ranks without peer access.

    Rows that :class:`Puts` would leave unwritten are NaN here, so that a wrong read becomes
    visible.
    """

    axis: MeshAxis
    experts_each: int

    def begin(self) -> None:
        """Do nothing: collectives wait for each other."""

    def dispatch(
        self,
        hidden: Float[Tensor, "tokens hidden"],
        probabilities: Float[Tensor, "tokens top_k"] | None,
        experts: Int[Tensor, "tokens top_k"],
    ) -> TokenBufferViews:
        """All-gather the tokens and their selected experts."""
        buffer = TokenBufferViews.over(self.axis, hidden, probabilities, experts)
        selected = self._gather(hidden, experts, buffer)
        if probabilities is not None and buffer.scales is not None and buffer.experts is not None:
            buffer.scales.copy_(all_gather_sequence(probabilities, self.axis))
            buffer.experts.copy_(selected)
        return buffer

    def buffer_again(
        self, hidden: Float[Tensor, "tokens hidden"], experts: Int[Tensor, "tokens top_k"]
    ) -> TokenBufferViews:
        """Return the buffer of tokens that are gathered a second time."""
        return TokenBufferViews.over(self.axis, hidden, None, experts, "tokens again")

    def dispatch_again(
        self, hidden: Float[Tensor, "tokens hidden"], experts: Int[Tensor, "tokens top_k"]
    ) -> None:
        """All-gather the tokens a second time."""
        self._gather(hidden, experts, self.buffer_again(hidden, experts))

    def _gather(self, hidden: Tensor, experts: Tensor, buffer: TokenBufferViews) -> Tensor:
        """Gather tokens into a buffer, and return the selected experts of all ranks' tokens."""
        selected = all_gather_sequence(experts, self.axis)
        local = selected - self.axis.rank * self.experts_each
        is_here = ((local >= 0) & (local < self.experts_each)).any(1, keepdim=True)
        buffer.rows.copy_(torch.where(is_here, all_gather_sequence(hidden, self.axis), torch.nan))
        return selected

    def collect(
        self,
        values: Float[Tensor, "rows hidden"],
        scales: Float[Tensor, "rows"] | None,
        row_map: RowMap,
        experts: Int[Tensor, "tokens top_k"],
    ) -> tuple[Float[Tensor, "tokens hidden"], Float[Tensor, "tokens top_k"] | None]:
        """Reduce-scatter the sums of each token's rows."""
        result = reduce_scatter_sequence(unpermute(values, row_map), self.axis)
        if scales is None:
            return result, None
        return result, reduce_scatter_sequence(
            read_selections(scales, row_map).view(row_map.rows.shape), self.axis
        )

    def exchange_counts(self, ends: Int[Tensor, "experts"]) -> Int[Tensor, "ranks experts"]:
        """All-gather the counts."""
        counts = ends.diff(prepend=ends.new_zeros(1))
        return all_gather_sequence(counts.unsqueeze(0), self.axis)

    def gradient_dtype(self, weights: torch.dtype) -> torch.dtype:
        """Return the dtype of gradient sums."""
        return torch.promote_types(weights, torch.float32)

    def put_weights(
        self,
        weights: Float[Tensor, "homes out_local in_local"],
        owners: Int[Tensor, "all_places"],
        stack: CloneStack,
    ) -> None:
        """Reduce-scatter the weights of all places, which are zeros except at their homes."""
        local, is_home = self._homes(owners, weights.shape[0])
        stack.matrices.copy_(
            reduce_scatter_sequence(torch.where(is_home, weights[local], 0), self.axis)
        )

    def add_gradients(
        self,
        owners: Int[Tensor, "all_places"],
        stack: CloneStack,
        sums: Float[Tensor, "homes out_local in_local"],
        scale: float,
    ) -> None:
        """All-gather the gradients of all places, and add those of this rank's experts."""
        local, is_home = self._homes(owners, sums.shape[0])
        gradients = torch.where(is_home, all_gather_sequence(stack.matrices, self.axis), 0)
        for place, gradient in enumerate((gradients * scale).to(sums.dtype).split(1)):
            # An expert may have several clones, and one index may occur only once in a sum with a
            # defined order.
            sums.index_add_(0, local[place : place + 1], gradient)

    def _homes(
        self, owners: Int[Tensor, "all_places"], homes: int
    ) -> tuple[Int[Tensor, "all_places"], Bool[Tensor, "all_places 1 1"]]:
        """Return the local index of every place's owner, and whether it is at home on this rank."""
        local = owners - self.axis.rank * homes
        is_home = (owners >= 0) & (local >= 0) & (local < homes)
        return local.clamp(0, homes - 1), is_home.view(-1, 1, 1)


#: Transfers of tokens to their experts and of sums back, without autograd.
PeerTransfer = Puts | Collectives


def transfer_over(axis: MeshAxis, experts_each: int, device: torch.device) -> PeerTransfer:
    """Return the transfer for an axis: puts between GPUs, collectives between CPUs.

    Communication: that of :func:`reason_against_puts`.
    """
    if device.type != "cuda":
        return Collectives(axis, experts_each)
    reason = reason_against_puts(axis, device)
    if reason is not None:
        raise UnsupportedError(
            "experts.transport ('one_sided') needs GPUs that write into each other's memory: "
            f"{reason}. Use 'all_gather', 'all_to_all' or 'auto'."
        )
    kernels = choose_kernels(device).kernels
    assert kernels is not None, "there would be a reason against puts"
    return Puts(axis, experts_each, kernels)
