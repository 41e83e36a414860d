"""One-sided transfers with gradients: each is the backward pass of the other."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_megatron.experts.transport.peer_clones import PeerRound
from lightning_megatron.experts.transport.peer_transfer import PeerTransfer
from lightning_megatron.experts.transport.permute import RowMap, permute, permute_both
from lightning_megatron.experts.transport.row_limit import LayerRows, map_within
from lightning_megatron.plan.shards import ShardRange
from lightning_megatron.shapes import Float, Int, Shaped


def to_experts(
    hidden: Float[Tensor, "tokens hidden"],
    probabilities: Float[Tensor, "tokens top_k"],
    experts: Int[Tensor, "tokens top_k"],
    local_experts: ShardRange,
    transfer: PeerTransfer,
    limit: LayerRows | None = None,
    clones: PeerRound | None = None,
) -> tuple[Float[Tensor, "rows hidden"], Float[Tensor, "rows"], RowMap]:
    """Transfer tokens to the ranks of their experts (-1: none), and sort them there by expert.

    The caller has begun the transfer (:meth:`PeerTransfer.begin`). The transfers for clones run in
    the backward pass.

    Returns:
        Rows of the received tokens, their probabilities, and the map from the selections of all
        ranks' tokens to the rows.
    """
    # The weights make the backward pass run, and pass on their gradients, even if no token needs
    # one.
    weights = () if clones is None else clones.leaves
    return _ToExperts.apply(
        hidden, probabilities, experts, local_experts, transfer, limit, clones, *weights
    )


def from_experts(
    outputs: Float[Tensor, "rows hidden"],
    row_map: RowMap,
    experts: Int[Tensor, "tokens top_k"],
    transfer: PeerTransfer,
    clones: PeerRound | None = None,
    tokens: Float[Tensor, "tokens hidden"] | None = None,
) -> Float[Tensor, "tokens hidden"]:
    """Transfer the sum of each token's rows back to the token's rank, and sum over all ranks.

    Args:
        row_map: Map from the selections of all ranks' tokens to the rows.
        experts: Experts selected for this rank's tokens.
        clones: Transfers for clones in the backward pass; None without clones.
        tokens: This rank's tokens, which the backward pass sends again; None if rows were kept.
    """
    return _FromExperts.apply(outputs, row_map, experts, transfer, clones, tokens)


def sort_again(
    transfer: PeerTransfer,
    tokens: Float[Tensor, "tokens hidden"],
    experts: Int[Tensor, "tokens top_k"],
    *map_tensors: Shaped[Tensor, "..."],
) -> Float[Tensor, "rows hidden"]:
    """Sort the tokens that the backward pass of :func:`from_experts` has sent again."""
    return permute(transfer.buffer_again(tokens, experts).rows, RowMap(*map_tensors))


class _ToExperts(torch.autograd.Function):
    """Spread and sort tokens; the backward pass collects their gradients.

    No view of the shared memory leaves these functions, because the next transfer overwrites it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        probabilities: Tensor,
        experts: Tensor,
        local_experts: ShardRange,
        transfer: PeerTransfer,
        limit: LayerRows | None,
        clones: PeerRound | None,
        *weights: Tensor,
    ) -> tuple[Tensor, Tensor, RowMap]:
        buffer = transfer.dispatch(hidden, probabilities, experts)
        assert buffer.scales is not None, "probabilities were sent"
        assert buffer.experts is not None, "selected experts were sent"
        row_map = map_within(limit, buffer.experts, local_experts.start, local_experts.size)
        _keep(ctx, experts, row_map, clones)
        ctx.transfer = transfer
        return *permute_both(buffer.rows, buffer.scales, row_map), row_map

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        experts, row_map, owners, _ = _kept(ctx)
        ctx.transfer.begin()
        grad_weights = [] if ctx.clones is None else ctx.clones.add_gradients(owners)
        gradients = ctx.transfer.collect(grads[0], grads[1], row_map, experts)
        return *gradients, None, None, None, None, None, *grad_weights


class _FromExperts(torch.autograd.Function):
    """Collect sums of rows; the backward pass spreads their gradients to the rows."""

    @staticmethod
    def forward(
        ctx: Any,
        outputs: Tensor,
        row_map: RowMap,
        experts: Tensor,
        transfer: PeerTransfer,
        clones: PeerRound | None,
        tokens: Tensor | None,
    ) -> Tensor:
        _keep(ctx, experts, row_map, clones, tokens)
        ctx.transfer = transfer
        transfer.begin()
        return transfer.collect(outputs, None, row_map, experts)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        experts, row_map, owners, tokens = _kept(ctx)
        ctx.transfer.begin()
        if tokens is not None:
            # The tokens are sent after the first barrier, which every rank reaches after it has
            # sorted the previous tokens.
            ctx.transfer.dispatch_again(tokens, experts)
        if ctx.clones is not None:
            # The weights are put again, because another layer or microbatch has used the places
            # since.
            ctx.clones.put_weights(owners)
        rows = permute(ctx.transfer.dispatch(grads[0], None, experts).rows, row_map)
        return rows, None, None, None, None, None


def _keep(
    ctx: Any,
    experts: Tensor,
    row_map: RowMap,
    clones: PeerRound | None,
    tokens: Tensor | None = None,
) -> None:
    """Keep the tensors that the backward pass needs; a recomputation replaces all of them."""
    ctx.clones = clones
    owners = () if clones is None else (clones.owners,)
    ctx.save_for_backward(experts, tokens, *row_map.tensors, *owners)


def _kept(ctx: Any) -> tuple[Tensor, RowMap, Any, Tensor | None]:
    """Return what :func:`_keep` has kept, tokens last; owners are None if there are no clones."""
    experts, tokens, pairs, rows, ends, needed, *owners = ctx.saved_tensors
    return experts, RowMap(pairs, rows, ends, needed), owners[0] if owners else None, tokens
