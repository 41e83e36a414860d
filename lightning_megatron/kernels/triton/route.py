"""Fused router: scores, selections, weights and loss statistics from the logits in one pass.

A program keeps the scores of all experts for some tokens in registers. The selections of a token
are the experts with the highest scores. Of experts with equal scores, the one with the lowest
number is selected.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable
from triton import language as tl

from lightning_megatron.kernels.triton.launch import ceil_div, on_device_of, power_of_two
from lightning_megatron.shapes import Float, Shaped

# Scores in one iteration of a program, and the largest number of tokens in it.
_TILE = 256
_MAX_TOKENS = 32
# With one warp, the maximum of the scores needs no shared memory.
_WARPS = 1
# Limits of the registers of a program.
_MAX_EXPERTS = 512
_MAX_SELECTED = 16
# Largest number of scores in the score of a group.
_MAX_BEST_OF_GROUP = 2
# Eight for every multiprocessor of an H200. Each loops over tokens and sums over them, so that few
# partial sums remain.
_PROGRAMS = 1056
# Partial sums and columns in one iteration of the kernel that sums over programs.
_ROWS = 1024
_COLUMNS = 4


@dataclass(frozen=True, kw_only=True)
class RouteSettings:
    """Rules of scoring and selecting experts; see ``plan.experts.ExpertsConfig`` for details.

    Args:
        num_groups: Number of groups of experts; only experts of the best groups are eligible. 1
            makes all eligible.
        top_k_groups: Number of eligible groups.
        best_of_group: Number of a group's best scores that are summed as its own score.
        is_softmax: Whether scores are a softmax of the logits; otherwise they are sigmoids.
        num_sequences: Number of sequences with sums of their own; token t belongs to sequence
            ``t % num_sequences``.
        counts_unbiased: Whether to also count the selections by scores without biases.
    """

    num_experts: int
    top_k: int
    num_groups: int
    top_k_groups: int
    best_of_group: int
    is_softmax: bool
    is_normalized: bool
    scale: float
    num_sequences: int
    counts_unbiased: bool

    def is_served(self) -> bool:
        """Return whether the kernels support these settings.

        A row of scores must fit into registers.
        """
        if self.num_experts > _MAX_EXPERTS or self.top_k > _MAX_SELECTED:
            return False
        if self.num_groups == 1:
            return True
        # Groups are a dimension of a tile, whose sizes are powers of two.
        is_tile = power_of_two(self.num_experts) == self.num_experts
        return is_tile and self.best_of_group <= _MAX_BEST_OF_GROUP

    def constants(self) -> dict[str, Any]:
        """Return the compile-time constants of the forward and backward kernels."""
        block = power_of_two(self.num_experts)
        return {
            "E": self.num_experts, "K": self.top_k, "SOFTMAX": self.is_softmax,
            "NORMALIZE": self.is_normalized, "TOKENS": max(min(_TILE // block, _MAX_TOKENS), 1),
            "BLOCK": block, "num_warps": _WARPS,
        }  # fmt: skip


def route_tokens(
    logits: Float[Tensor, "tokens experts"],
    bias: Float[Tensor, "experts"] | None,
    settings: RouteSettings,
) -> tuple[Shaped[Tensor, "..."], ...]:
    """Score all experts for every token, choose the best, and sum the statistics for the losses.

    The logits, in float32, get gradients from the probabilities, from the sums of shares and from
    the sum of squares. The bias is added to the scores for the selection only.

    Returns:
        Seven tensors: the probabilities of the selected experts ``(tokens, top_k)``; the selected
        experts, best first, ``(tokens, top_k)`` int64; the number of selections of every expert
        ``(sequences, experts)`` int32; the same without biases, if it is counted; the sums over
        tokens of the shares, which are scores divided by their sum, ``(sequences, experts)``; the
        sum over tokens of the squared log-sum-exp of the logits; the sum of the entropies of the
        shares (nats).
    """
    probabilities, experts, loads, *sums = _Route.apply(logits, bias, settings)
    return probabilities, experts, loads[0], loads[-1], *sums


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        bias: Tensor | None,
        settings: RouteSettings,
    ) -> tuple[Tensor, ...]:
        logits = logits.contiguous()
        device = logits.device
        num_tokens, num_experts = logits.shape
        classes = settings.num_sequences
        top_k = settings.top_k
        constants = settings.constants()
        probabilities = torch.empty((num_tokens, top_k), dtype=logits.dtype, device=device)
        experts = torch.empty((num_tokens, top_k), dtype=torch.int64, device=device)
        blocks = ceil_div(ceil_div(num_tokens, classes), constants["TOKENS"])
        programs = min(blocks, max(_PROGRAMS // classes, 1))
        kinds = 2 if settings.counts_unbiased else 1
        shape = (kinds, classes, programs, num_experts)
        loads = torch.empty(shape, dtype=torch.int32, device=device)
        sums = torch.empty((classes, programs, num_experts + 2), dtype=torch.float32, device=device)
        # Without tokens no kernel is launched, so the results must be zeroed.
        make = torch.empty if num_tokens else torch.zeros
        load = make((kinds, classes, num_experts), dtype=torch.int32, device=device)
        total = make((classes, num_experts + 2), dtype=torch.float32, device=device)
        has_groups = settings.top_k_groups < settings.num_groups
        # The kernel does not access a tensor that replaces None.
        bias_read = logits if bias is None else bias
        num_groups = settings.num_groups if has_groups else 1
        if num_tokens:
            with on_device_of(logits):
                _route_forward[(programs, classes)](
                    logits, bias_read, probabilities, experts, loads, sums, num_tokens,
                    settings.scale, HAS_BIAS=bias is not None,
                    COUNTS_UNBIASED=settings.counts_unbiased, GROUPS=num_groups,
                    TOP_GROUPS=settings.top_k_groups, BEST=settings.best_of_group, **constants,
                )  # fmt: skip
                _route_totals[(ceil_div(num_experts + 2, _COLUMNS), classes)](
                    loads, sums, load, total, programs,
                    KINDS=kinds, E=num_experts, ROWS=_ROWS, COLUMNS=_COLUMNS,
                )  # fmt: skip
        ctx.save_for_backward(logits, experts)
        ctx.settings = settings
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(experts, load)
        scalars = total[0, num_experts:] if classes == 1 else total[:, num_experts:].sum(0)
        squares, entropies = scalars.unbind()
        ctx.mark_non_differentiable(entropies)
        return probabilities, experts, load, total[:, :num_experts], squares, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        logits, experts = ctx.saved_tensors
        settings = ctx.settings
        constants = settings.constants()
        grad_probabilities, _, _, grad_shares, grad_squares, _ = grads
        result = torch.empty_like(logits)
        # Without a gradient the pointer of any tensor is passed, which the kernel does not read.
        inputs = [logits if grad is None else grad.contiguous() for grad in (
            grad_probabilities, grad_shares, grad_squares
        )]  # fmt: skip
        blocks = ceil_div(ceil_div(logits.shape[0], settings.num_sequences), constants["TOKENS"])
        if logits.numel():
            with on_device_of(logits):
                _route_backward[(blocks, settings.num_sequences)](
                    logits, experts, *inputs, result, logits.shape[0], settings.scale,
                    HAS_WEIGHTS=grad_probabilities is not None, HAS_SHARES=grad_shares is not None,
                    HAS_SQUARES=grad_squares is not None, **constants,
                )  # fmt: skip
        return result, None, None


@triton.jit
def _ordered(scores: tl.tensor) -> tl.tensor:
    # Map floats to integers of the same order, because a warp has an instruction for the maximum of
    # integers. NaN is the largest, as in torch. Minus infinity is above the lowest integer, which
    # marks experts that cannot be selected.
    bits = scores.to(tl.int32, bitcast=True)
    return tl.where(scores != scores, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def _value(ordered: tl.tensor) -> tl.tensor:
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _first_of_highest(
    keys: tl.tensor,
    numbers: tl.tensor,
    AXIS: tl.constexpr,
    SIZE: tl.constexpr,
) -> tl.tensor:
    highest = tl.max(keys, axis=AXIS, keep_dims=True)
    return tl.min(tl.where(keys == highest, numbers, SIZE), axis=AXIS, keep_dims=True)


@triton.jit
def _best(
    scores: tl.tensor, columns: tl.tensor, E: tl.constexpr, K: tl.constexpr, GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr, BEST: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return the rank of every expert among the selections of a token, or -1."""
    taken = -0x80000000
    keys = tl.where(columns < E, _ordered(scores), taken)
    if GROUPS > 1:
        SIZE: tl.constexpr = BLOCK // GROUPS
        by_group = tl.reshape(keys, (TOKENS, GROUPS, SIZE))
        group_keys = tl.max(by_group, axis=2)
        if BEST == 2:
            members = tl.arange(0, SIZE)[None, None, :]
            is_first = members == _first_of_highest(by_group, members, 2, SIZE)
            second = tl.max(tl.where(is_first, taken, by_group), axis=2)
            group_keys = _ordered(_value(group_keys) + _value(second))
        numbers = tl.arange(0, GROUPS)[None, :]
        is_in = tl.zeros((TOKENS, GROUPS), tl.int32)
        for _ in tl.static_range(TOP_GROUPS):
            is_best = numbers == _first_of_highest(group_keys, numbers, 1, GROUPS)
            is_in = tl.where(is_best, 1, is_in)
            group_keys = tl.where(is_best, taken, group_keys)
        is_in = tl.broadcast_to(is_in[:, :, None], (TOKENS, GROUPS, SIZE))
        is_in = tl.reshape(is_in, (TOKENS, BLOCK))
        excluded = _ordered(tl.full((TOKENS, BLOCK), float("-inf"), tl.float32))
        keys = tl.where(is_in != 0, keys, excluded)
    position = tl.full((TOKENS, BLOCK), -1, tl.int32)
    for selection in tl.static_range(K):
        is_best = columns == _first_of_highest(keys, columns, 1, BLOCK)
        position = tl.where(is_best, selection, position)
        keys = tl.where(is_best, taken, keys)
    return position


@triton.jit
def _softmax(
    rows: tl.tensor, columns: tl.tensor, inside: tl.tensor, E: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return the logits of rows of tokens, the logsumexp of each row, and the softmax."""
    x = tl.load(rows + columns, mask=inside, other=0.0).to(tl.float32)
    x = tl.where(columns < E, x, float("-inf"))
    peak = tl.max(x, axis=1)
    powers = tl.exp(x - peak[:, None])
    total = tl.sum(powers, axis=1)
    return x, peak + tl.log(total), powers / total[:, None]


@triton.jit
def _weights(
    x: tl.tensor,
    scores: tl.tensor,
    is_selected: tl.tensor,
    SOFTMAX: tl.constexpr,
    NORMALIZE: tl.constexpr,
) -> tl.tensor:
    """Return the weights of the selected experts, with a sum of 1 if they are normalised."""
    weights = scores
    if NORMALIZE:
        if SOFTMAX:
            selected = tl.where(is_selected, x, float("-inf"))
            weights = tl.exp(selected - tl.max(selected, axis=1)[:, None])
            weights /= tl.sum(weights, axis=1)[:, None]
        else:
            weights /= tl.sum(tl.where(is_selected, scores, 0.0), axis=1)[:, None] + 1e-20
    return weights


@triton.jit
def _route_forward(
    logits: tl.tensor, bias: tl.tensor, probabilities: tl.tensor, experts: tl.tensor,
    loads: tl.tensor, sums: tl.tensor, num_tokens: tl.tensor, scale: tl.tensor,
    HAS_BIAS: tl.constexpr, COUNTS_UNBIASED: tl.constexpr, GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr, BEST: tl.constexpr, E: tl.constexpr, K: tl.constexpr,
    SOFTMAX: tl.constexpr, NORMALIZE: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    sequence = tl.program_id(1)
    num_sequences = tl.num_programs(1)
    columns = tl.arange(0, BLOCK)[None, :]
    is_expert = columns < E
    load = tl.zeros((TOKENS, BLOCK), tl.int32)
    unbiased_load = tl.zeros((TOKENS, BLOCK), tl.int32)
    share_sum = tl.zeros((TOKENS, BLOCK), tl.float32)
    entropy_sum = tl.zeros((TOKENS,), tl.float32)
    square_sum = tl.zeros((TOKENS,), tl.float32)
    num_here = tl.cdiv(num_tokens - sequence, num_sequences)
    for start in range(tl.program_id(0) * TOKENS, num_here, tl.num_programs(0) * TOKENS):
        number = start + tl.arange(0, TOKENS)
        token = number.to(tl.int64) * num_sequences + sequence
        inside = (number < num_here)[:, None] & is_expert
        x, normaliser, softmax = _softmax(logits + token[:, None] * E, columns, inside, E)
        square_sum += tl.where(number < num_here, normaliser * normaliser, 0.0)
        scores = softmax
        shares = softmax
        if not SOFTMAX:
            scores = 1.0 / (1.0 + tl.exp(-x))
            shares = scores / (tl.sum(scores, axis=1)[:, None] + 1e-20)
        share_sum += tl.where(inside, shares, 0.0)
        products = tl.where(inside & (shares != 0.0), shares * tl.log(shares), 0.0)
        entropy_sum -= tl.sum(products, axis=1)
        biased = scores
        if HAS_BIAS:
            biased += tl.load(bias + columns, mask=is_expert, other=0.0)
        if COUNTS_UNBIASED:
            unbiased = _best(scores, columns, E, K, GROUPS, TOP_GROUPS, BEST, TOKENS, BLOCK)
            unbiased_load += tl.where(inside & (unbiased >= 0), 1, 0)
        position = _best(biased, columns, E, K, GROUPS, TOP_GROUPS, BEST, TOKENS, BLOCK)
        is_selected = position >= 0
        load += tl.where(inside & is_selected, 1, 0)
        weights = _weights(x, scores, is_selected, SOFTMAX, NORMALIZE)
        at = token[:, None] * K + position
        tl.store(probabilities + at, weights * scale, mask=inside & is_selected)
        expert = tl.broadcast_to(columns, (TOKENS, BLOCK)).to(tl.int64)
        tl.store(experts + at, expert, mask=inside & is_selected)
    row = sequence * tl.num_programs(0) + tl.program_id(0)
    numbers = tl.arange(0, BLOCK)
    tl.store(loads + row * E + numbers, tl.sum(load, axis=0), mask=numbers < E)
    if COUNTS_UNBIASED:
        at = loads + (row + tl.num_programs(0) * num_sequences) * E + numbers
        tl.store(at, tl.sum(unbiased_load, axis=0), mask=numbers < E)
    target = sums + row * (E + 2)
    tl.store(target + numbers, tl.sum(share_sum, axis=0), mask=numbers < E)
    tl.store(target + E, tl.sum(square_sum, axis=0))
    tl.store(target + E + 1, tl.sum(entropy_sum, axis=0))


@triton.jit
def _route_totals(
    loads: tl.tensor, sums: tl.tensor, load: tl.tensor, total: tl.tensor, num_parts: tl.tensor,
    KINDS: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    """Sum the partial sums of the programs, in their order."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    sequence = tl.program_id(1)
    num_sequences = tl.num_programs(1)
    column_sums = tl.zeros((COLUMNS,), tl.float32)
    for start in range(0, num_parts, ROWS):
        part = start + tl.arange(0, ROWS)
        at = sums + (sequence * num_parts + part)[:, None] * (E + 2) + columns[None, :]
        inside = (part < num_parts)[:, None] & (columns < E + 2)[None, :]
        column_sums += tl.sum(tl.load(at, mask=inside, other=0.0), axis=0)
    tl.store(total + sequence * (E + 2) + columns, column_sums, mask=columns < E + 2)
    for kind in tl.static_range(KINDS):
        row = kind * num_sequences + sequence
        count = tl.zeros((COLUMNS,), tl.int32)
        for start in range(0, num_parts, ROWS):
            part = start + tl.arange(0, ROWS)
            at = loads + (row * num_parts + part)[:, None] * E + columns[None, :]
            inside = (part < num_parts)[:, None] & (columns < E)[None, :]
            count += tl.sum(tl.load(at, mask=inside, other=0), axis=0)
        tl.store(load + row * E + columns, count, mask=columns < E)


@triton.jit
def _route_backward(
    logits: tl.tensor, experts: tl.tensor, grad_probabilities: tl.tensor, grad_shares: tl.tensor,
    grad_squares: tl.tensor, result: tl.tensor, num_tokens: tl.tensor, scale: tl.tensor,
    HAS_WEIGHTS: tl.constexpr, HAS_SHARES: tl.constexpr, HAS_SQUARES: tl.constexpr, E: tl.constexpr,
    K: tl.constexpr, SOFTMAX: tl.constexpr, NORMALIZE: tl.constexpr, TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    sequence = tl.program_id(1)
    num_sequences = tl.num_programs(1)
    columns = tl.arange(0, BLOCK)[None, :]
    is_expert = columns < E
    number = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    token = number.to(tl.int64) * num_sequences + sequence
    is_token = token < num_tokens
    inside = is_token[:, None] & is_expert
    x, normaliser, softmax = _softmax(logits + token[:, None] * E, columns, inside, E)
    scores = softmax
    if not SOFTMAX:
        scores = 1.0 / (1.0 + tl.exp(-x))
    change = tl.zeros((TOKENS, BLOCK), tl.float32)
    grad_scores = tl.zeros((TOKENS, BLOCK), tl.float32)
    if HAS_WEIGHTS:
        is_selected = tl.zeros((TOKENS, BLOCK), tl.int32)
        outer = tl.zeros((TOKENS, BLOCK), tl.float32)
        for selection in tl.static_range(K):
            expert = tl.load(experts + token * K + selection, mask=is_token, other=-1)
            grad = tl.load(grad_probabilities + token * K + selection, mask=is_token, other=0.0)
            grad *= scale
            hit = columns == expert[:, None]
            is_selected = tl.where(hit, 1, is_selected)
            outer = tl.where(hit, grad[:, None], outer)
        if NORMALIZE and SOFTMAX:
            selected = tl.where((is_selected != 0) & is_token[:, None], x, float("-inf"))
            top = tl.where(is_token, tl.max(selected, axis=1), 0.0)
            weights = tl.exp(selected - top[:, None])
            weights /= tl.where(is_token, tl.sum(weights, axis=1), 1.0)[:, None]
            change = weights * (outer - tl.sum(outer * weights, axis=1)[:, None])
        elif NORMALIZE:
            mass = (tl.sum(tl.where(is_selected != 0, scores, 0.0), axis=1) + 1e-20)[:, None]
            mean = tl.sum(outer * scores / mass, axis=1)[:, None]
            grad_scores = tl.where(is_selected != 0, (outer - mean) / mass, 0.0)
        else:
            grad_scores = outer
    if HAS_SHARES:
        share_grad = tl.load(grad_shares + sequence * E + columns, mask=is_expert, other=0.0)
        if not SOFTMAX:
            mass = (tl.sum(scores, axis=1) + 1e-20)[:, None]
            share_grad = (share_grad - tl.sum(share_grad * scores / mass, axis=1)[:, None]) / mass
        grad_scores += share_grad
    if SOFTMAX:
        change += scores * (grad_scores - tl.sum(grad_scores * scores, axis=1)[:, None])
    else:
        change += grad_scores * scores * (1.0 - scores)
    if HAS_SQUARES:
        change += tl.load(grad_squares) * 2.0 * normaliser[:, None] * softmax
    tl.store(result + token[:, None] * E + columns, change, mask=inside)
