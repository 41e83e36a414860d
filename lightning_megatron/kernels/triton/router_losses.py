"""Fused router losses and statistics: one launch for their values, one for their gradients."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable
from triton import language as tl

from lightning_megatron.kernels.triton.launch import on_device_of, power_of_two
from lightning_megatron.plan.experts import RoutingSum
from lightning_megatron.shapes import Float, Int, Shaped

# Kernels can read global constants of type tl.constexpr only.
_DROPPED = tl.constexpr(RoutingSum.DROPPED)
_ENTROPY = tl.constexpr(RoutingSum.ENTROPY)
_BALANCE_LOSS = tl.constexpr(RoutingSum.BALANCE_LOSS)
_Z_LOSS = tl.constexpr(RoutingSum.Z_LOSS)
_NUM_MICROBATCHES = tl.constexpr(RoutingSum.NUM_MICROBATCHES)
_LOAD = tl.constexpr(RoutingSum.LOAD)


def add_routing(
    sums: Float[Tensor, "sums"],
    load: Int[Tensor, "experts"],
    entropy_sum: Float[Tensor, ""],
    dropped: Int[Tensor, ""] | None,
    share_sums: Float[Tensor, "sequences experts"],
    load_factors: Shaped[Tensor, "sequences experts"] | Shaped[Tensor, "experts"] | None,
    coefficient: float,
    square_sum: Float[Tensor, ""],
    square_coefficient: float,
) -> None:
    """Add the routing statistics of a microbatch to the sums of a step, in place.

    Equal to the additions of ``RouterStatistics`` with operators of torch; losses are computed in
    float32.

    Shapes: there are ``5 + experts`` sums, in float64.

    Args:
        sums: Sums of the step, in the layout of ``RouterStatistics``.
        entropy_sum: Sum of the tokens' entropies (nats).
        share_sums: Sums of the tokens' shares of scores, in float32.
        load_factors: Factors of the share sums in the balance loss, computed from the load; None
            means no such loss.
        square_sum: Sum of the squared log-sum-exp of the logits, for the z-loss.
        square_coefficient: Coefficient of the z-loss; 0 means no such loss.
    """
    num_experts = load.shape[0]
    factors = load if load_factors is None else load_factors
    with on_device_of(sums):
        _add_routing[(1,)](
            sums, load, entropy_sum, load if dropped is None else dropped, share_sums, factors,
            square_sum, coefficient, square_coefficient, share_sums.stride(0), _row_stride(factors),
            share_sums.shape[0], HAS_DROPPED=dropped is not None,
            HAS_BALANCE=load_factors is not None, HAS_SQUARES=square_coefficient != 0.0,
            E=num_experts, BLOCK=power_of_two(num_experts),
        )  # fmt: skip


def attach_losses(
    x: Float[Tensor, "*shape"],
    share_sums: Float[Tensor, "sequences experts"],
    load_factors: Shaped[Tensor, "sequences experts"] | Shaped[Tensor, "experts"] | None,
    coefficient: float,
    square_sum: Float[Tensor, ""],
    square_coefficient: float,
    scale: float | Float[Tensor, ""],
) -> Float[Tensor, "*shape"]:
    """Return ``x`` unchanged; its backward pass also computes the gradients of the router losses.

    Equal to ``attach_loss`` of
    ``(share_sums * load_factors).sum() * coefficient + square_sum * square_coefficient``.

    Args:
        x: Tensor that the main loss depends on.
        load_factors: Factors of the share sums in the balance loss, without a gradient; None means
            no such loss.
        square_coefficient: Coefficient of the z-loss; 0 means no such loss.
        scale: Factor of both losses; a tensor is read in the backward pass only.
    """
    return _Attached.apply(
        x,
        share_sums,
        square_sum,
        load_factors,
        coefficient,
        square_coefficient,
        scale,
    )


class _Attached(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        share_sums: Tensor,
        square_sum: Tensor,
        load_factors: Tensor | None,
        coefficient: float,
        square_coefficient: float,
        scale: float | Tensor,
    ) -> Tensor:
        ctx.save_for_backward(load_factors)
        ctx.shape = share_sums.shape
        ctx.coefficient = coefficient
        ctx.square_coefficient = square_coefficient
        # The tensor is not saved with save_for_backward, because it may be filled between forward
        # and backward, which autograd refuses for saved tensors.
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (load_factors,) = ctx.saved_tensors
        (grad,) = grads
        num_classes, num_experts = ctx.shape
        has_balance = load_factors is not None
        has_squares = ctx.square_coefficient != 0.0
        grad_shares = torch.empty(ctx.shape, dtype=torch.float32, device=grad.device)
        grad_squares = grad_shares.new_empty(()) if has_squares else grad_shares
        factors = load_factors if has_balance else grad_shares
        is_tensor = isinstance(ctx.scale, Tensor)
        # A tensor is read on the device; the kernel does not access one that replaces None.
        scale = ctx.scale if is_tensor else grad_shares
        weight = 1.0 if is_tensor else ctx.scale
        with on_device_of(grad):
            _loss_gradients[(num_classes,)](
                scale, factors, grad_shares, grad_squares, weight, ctx.coefficient,
                ctx.square_coefficient,
                _row_stride(factors), HAS_SCALE=is_tensor, HAS_BALANCE=has_balance,
                HAS_SQUARES=has_squares, E=num_experts, BLOCK=power_of_two(num_experts),
            )  # fmt: skip
        share_result = grad_shares if has_balance else None
        square_result = grad_squares if has_squares else None
        return grad, share_result, square_result, *[None] * 4


def _row_stride(load_factors: Tensor) -> int:
    return load_factors.stride(0) if load_factors.dim() == 2 else 0


@triton.jit
def _add_routing(
    sums: tl.tensor, load: tl.tensor, entropy: tl.tensor, dropped: tl.tensor, shares: tl.tensor,
    load_factors: tl.tensor, squares: tl.tensor, coefficient: tl.tensor,
    square_coefficient: tl.tensor, share_stride: tl.tensor, load_stride: tl.tensor,
    num_classes: tl.tensor, HAS_DROPPED: tl.constexpr, HAS_BALANCE: tl.constexpr,
    HAS_SQUARES: tl.constexpr, E: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    columns = tl.arange(0, BLOCK)
    inside = columns < E
    counts = sums + _LOAD + columns
    step_load = tl.load(load + columns, mask=inside, other=0).to(tl.float64)
    tl.store(counts, tl.load(counts, mask=inside, other=0.0) + step_load, mask=inside)
    tl.store(sums + _ENTROPY, tl.load(sums + _ENTROPY) + tl.load(entropy).to(tl.float64))
    tl.store(sums + _NUM_MICROBATCHES, tl.load(sums + _NUM_MICROBATCHES) + 1.0)
    if HAS_DROPPED:
        tl.store(sums + _DROPPED, tl.load(sums + _DROPPED) + tl.load(dropped).to(tl.float64))
    if HAS_BALANCE:
        products = tl.zeros((BLOCK,), tl.float32)
        for row in range(0, num_classes):
            share = tl.load(shares + row * share_stride + columns, mask=inside, other=0.0)
            load_factor = tl.load(load_factors + row * load_stride + columns, mask=inside, other=0)
            products += share * load_factor.to(tl.float32)
        balance = tl.sum(products, axis=0) * coefficient
        tl.store(sums + _BALANCE_LOSS, tl.load(sums + _BALANCE_LOSS) + balance.to(tl.float64))
    if HAS_SQUARES:
        square = tl.load(squares) * square_coefficient
        tl.store(sums + _Z_LOSS, tl.load(sums + _Z_LOSS) + square.to(tl.float64))


@triton.jit
def _loss_gradients(
    scale: tl.tensor, load_factors: tl.tensor, grad_shares: tl.tensor, grad_squares: tl.tensor,
    factor: tl.tensor, coefficient: tl.tensor, square_coefficient: tl.tensor,
    load_stride: tl.tensor, HAS_SCALE: tl.constexpr, HAS_BALANCE: tl.constexpr,
    HAS_SQUARES: tl.constexpr, E: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < E
    weight = factor
    if HAS_SCALE:
        weight = tl.load(scale).to(tl.float32)
    if HAS_BALANCE:
        load_factor = tl.load(load_factors + row * load_stride + columns, mask=inside, other=0).to(
            tl.float32,
        )
        tl.store(grad_shares + row * E + columns, load_factor * (coefficient * weight), mask=inside)
    if HAS_SQUARES:
        tl.store(grad_squares, square_coefficient * weight, mask=row == 0)
