"""Rotary position embedding of queries and keys in the memory of the fused projection."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from triton import language as tl

from lightning_megatron.kernels.triton.launch import (
    ceil_div,
    early_start,
    on_device_of,
    power_of_two,
    wait_early,
)
from lightning_megatron.shapes import Float

# Elements of the half heads of a program: 128 threads with 8 elements each, one access of 16 bytes.
_TILE = 1024


def rotate_qkv(
    qkv: Float[Tensor, "seq batch qkv_local"],
    tables: tuple[Float[Tensor, "seq 1 1 head_dim"], Float[Tensor, "seq 1 1 head_dim"]],
    num_heads: int,
    num_kv_heads: int,
) -> tuple[
    Float[Tensor, "seq batch {num_heads} head_dim"],
    Float[Tensor, "seq batch {num_kv_heads} head_dim"],
    Float[Tensor, "seq batch {num_kv_heads} head_dim"],
]:
    """Split a fused projection into heads and rotate queries and keys.

    Equal to ``apply_rotary`` of the queries and keys, the first ``num_heads + num_kv_heads`` heads,
    computed in float32 and rounded once. Values do not change. The results share the memory of
    ``qkv``, which is overwritten; the caller must not use it afterwards. The backward pass writes
    one gradient in the layout of ``qkv``, without a concatenation.

    Args:
        tables: Cosines and sines from ``position_tables``.
    """
    return _RotateQKV.apply(qkv, *tables, num_heads, num_kv_heads)


class _RotateQKV(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        cosines: Tensor,
        sines: Tensor,
        num_heads: int,
        num_kv_heads: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        qkv = qkv.contiguous()
        cosines = cosines.contiguous()
        sines = sines.contiguous()
        seq_length, num_sequences, width = qkv.shape
        head_dim = cosines.shape[-1]
        lanes, heads = _tile(head_dim)
        num_rotated = num_heads + num_kv_heads
        if qkv.numel():
            with on_device_of(qkv):
                _rotate_in_place[(seq_length * num_sequences, ceil_div(num_rotated, heads))](
                    qkv,
                    cosines,
                    sines,
                    num_sequences,
                    width,
                    num_rotated,
                    head_dim // 2,
                    HEADS=heads,
                    LANES=lanes,
                    **early_start(seq_length),
                )
        ctx.save_for_backward(cosines, sines)
        ctx.sizes = num_heads, num_kv_heads, width
        # The results are new tensors that share the memory, instead of views: autograd does not
        # allow in-place functions on several views that one function returned. Here they are safe,
        # because nothing else reads qkv.
        parts = []
        first = 0
        for count in (num_heads, num_kv_heads, num_kv_heads):
            strides = (num_sequences * width, width, head_dim, 1)
            part = torch.empty(0, dtype=qkv.dtype, device=qkv.device)
            offset = qkv.storage_offset() + first * head_dim
            parts.append(
                part.set_(
                    qkv.untyped_storage(),
                    offset,
                    (seq_length, num_sequences, count, head_dim),
                    strides,
                )
            )
            first += count
        return parts[0], parts[1], parts[2]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cosines, sines = ctx.saved_tensors
        num_heads, num_kv_heads, width = ctx.sizes
        grads = tuple(grad if grad.stride(-1) == 1 else grad.contiguous() for grad in grads)
        seq_length, num_sequences, _, head_dim = grads[0].shape
        result = grads[0].new_empty((seq_length, num_sequences, width))
        lanes, heads = _tile(head_dim)
        query_blocks = ceil_div(num_heads, heads)
        kv_blocks = ceil_div(num_kv_heads, heads)
        if result.numel():
            strides = [stride for grad in grads for stride in grad.stride()[:3]]
            with on_device_of(result):
                _gather_gradients[(seq_length * num_sequences, query_blocks + 2 * kv_blocks)](
                    result,
                    *grads,
                    cosines,
                    sines,
                    *strides,
                    num_sequences,
                    width,
                    num_heads,
                    num_kv_heads,
                    query_blocks,
                    kv_blocks,
                    head_dim // 2,
                    HEADS=heads,
                    LANES=lanes,
                )
        return result, None, None, None, None


def _tile(head_dim: int) -> tuple[int, int]:
    """Return the lanes (elements of a half head) and the number of heads of a program."""
    lanes = power_of_two(head_dim // 2)
    return lanes, max(_TILE // lanes, 1)


@triton.jit
def _rotate_in_place(
    qkv: tl.tensor,
    cosines: tl.tensor,
    sines: tl.tensor,
    num_sequences: tl.tensor,
    width: tl.tensor,
    num_heads: tl.tensor,
    half: tl.tensor,
    HEADS: tl.constexpr,
    LANES: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    wait_early(EARLY)
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    lanes = tl.arange(0, LANES)[None, :]
    inside = (heads < num_heads) & (lanes < half)
    low = qkv + token * width + heads * (2 * half) + lanes
    first = tl.load(low, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(low + half, mask=inside, other=0.0).to(tl.float32)
    table = token // num_sequences * (2 * half) + lanes
    in_half = lanes < half
    cosine1 = tl.load(cosines + table, mask=in_half, other=0.0).to(tl.float32)
    cosine2 = tl.load(cosines + table + half, mask=in_half, other=0.0).to(tl.float32)
    sine1 = tl.load(sines + table, mask=in_half, other=0.0).to(tl.float32)
    sine2 = tl.load(sines + table + half, mask=in_half, other=0.0).to(tl.float32)
    tl.store(low, (first * cosine1 - second * sine1).to(qkv.dtype.element_ty), mask=inside)
    tl.store(low + half, (second * cosine2 + first * sine2).to(qkv.dtype.element_ty), mask=inside)


@triton.jit
def _gather_part(
    result: tl.tensor,
    grad: tl.tensor,
    cosines: tl.tensor,
    sines: tl.tensor,
    position_stride: tl.tensor,
    sequence_stride: tl.tensor,
    head_stride: tl.tensor,
    token: tl.tensor,
    num_sequences: tl.tensor,
    width: tl.tensor,
    block: tl.tensor,
    first_head: tl.tensor,
    num_heads: tl.tensor,
    half: tl.tensor,
    ROTATED: tl.constexpr,
    HEADS: tl.constexpr,
    LANES: tl.constexpr,
) -> None:
    heads = block * HEADS + tl.arange(0, HEADS)[:, None]
    lanes = tl.arange(0, LANES)[None, :]
    inside = (heads < num_heads) & (lanes < half)
    position = token // num_sequences
    sequence = token % num_sequences
    row = grad + position * position_stride + sequence * sequence_stride
    low = row + heads * head_stride + lanes
    first = tl.load(low, mask=inside, other=0.0)
    second = tl.load(low + half, mask=inside, other=0.0)
    if ROTATED:
        # The gradient is rotated back: the transpose of a rotation is its inverse.
        table = position * (2 * half) + lanes
        in_half = lanes < half
        cosine1 = tl.load(cosines + table, mask=in_half, other=0.0).to(tl.float32)
        cosine2 = tl.load(cosines + table + half, mask=in_half, other=0.0).to(tl.float32)
        sine1 = tl.load(sines + table, mask=in_half, other=0.0).to(tl.float32)
        sine2 = tl.load(sines + table + half, mask=in_half, other=0.0).to(tl.float32)
        wide1 = first.to(tl.float32)
        wide2 = second.to(tl.float32)
        first = (wide1 * cosine1 + wide2 * sine2).to(result.dtype.element_ty)
        second = (wide2 * cosine2 - wide1 * sine1).to(result.dtype.element_ty)
    target = result + token * width + (first_head + heads) * (2 * half) + lanes
    tl.store(target, first, mask=inside)
    tl.store(target + half, second, mask=inside)


@triton.jit
def _gather_gradients(
    result: tl.tensor,
    grad_query: tl.tensor,
    grad_key: tl.tensor,
    grad_value: tl.tensor,
    cosines: tl.tensor,
    sines: tl.tensor,
    query_position: tl.tensor,
    query_sequence: tl.tensor,
    query_head: tl.tensor,
    key_position: tl.tensor,
    key_sequence: tl.tensor,
    key_head: tl.tensor,
    value_position: tl.tensor,
    value_sequence: tl.tensor,
    value_head: tl.tensor,
    num_sequences: tl.tensor,
    width: tl.tensor,
    num_heads: tl.tensor,
    num_kv_heads: tl.tensor,
    query_blocks: tl.tensor,
    kv_blocks: tl.tensor,
    half: tl.tensor,
    HEADS: tl.constexpr,
    LANES: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    if block < query_blocks:
        _gather_part(
            result, grad_query, cosines, sines, query_position, query_sequence, query_head, token,
            num_sequences, width, block, 0, num_heads, half, True, HEADS, LANES,
        )  # fmt: skip
    elif block < query_blocks + kv_blocks:
        _gather_part(
            result, grad_key, cosines, sines, key_position, key_sequence, key_head, token,
            num_sequences, width, block - query_blocks, num_heads, num_kv_heads, half, True, HEADS,
            LANES,
        )  # fmt: skip
    else:
        _gather_part(
            result, grad_value, cosines, sines, value_position, value_sequence, value_head, token,
            num_sequences, width, block - query_blocks - kv_blocks, num_heads + num_kv_heads,
            num_kv_heads, half, False, HEADS, LANES,
        )  # fmt: skip
