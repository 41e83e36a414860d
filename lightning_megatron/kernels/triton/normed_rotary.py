"""Norm and rotary embedding of query and key heads, from the fused projection to new tensors."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from triton import language as tl

from lightning_megatron.kernels.triton.launch import ceil_div, on_device_of, power_of_two
from lightning_megatron.shapes import Float

# Elements of the heads of a program.
_TILE = 2048
# Most programs of the backward pass: each has one row of partial gradients of both weights.
_PROGRAMS = 1024


def norm_and_rotate_qkv(
    qkv: Float[Tensor, "seq batch qkv_local"],
    tables: tuple[
        Float[Tensor, "seq #batch 1 rotary_dim"], Float[Tensor, "seq #batch 1 rotary_dim"]
    ],
    sizes: tuple[int, int, int],
    scales: tuple[Float[Tensor, "head_dim"], Float[Tensor, "head_dim"]] | None = None,
    eps: float = 0.0,
    interleaved: bool = False,
) -> tuple[
    Float[Tensor, "seq batch _ head_dim"],
    Float[Tensor, "seq batch kv_heads head_dim"],
    Float[Tensor, "seq batch kv_heads head_dim"],
]:
    """Split a fused projection into heads, normalise and rotate queries and keys.

    Equal to ``rms_norm`` of each query and key head and then ``apply_rotary``, computed in float32
    and rounded once. The values share the memory of ``qkv``, which does not change. The backward
    pass writes one gradient in the layout of ``qkv`` and reads the projection again, so that no
    normalised head is kept.

    Args:
        tables: Cosines and sines of the first elements of a head; the others are not rotated.
        sizes: This rank's query heads, its key/value heads, and the size of a head (heads, heads,
            elements).
        scales: Factors of the normalised queries and keys; None means no norm.
    """
    query_scale, key_scale = scales or (None, None)
    outputs: tuple[Tensor, Tensor, Tensor] = _NormAndRotate.apply(
        qkv, *tables, query_scale, key_scale, sizes, eps, interleaved
    )
    return outputs


class _NormAndRotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        cosines: Tensor,
        sines: Tensor,
        query_scale: Tensor | None,
        key_scale: Tensor | None,
        sizes: tuple[int, int, int],
        eps: float,
        interleaved: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        qkv, cosines, sines = (tensor.contiguous() for tensor in (qkv, cosines, sines))
        num_heads, num_kv_heads, head_dim = sizes
        seq_length, num_sequences, width = qkv.shape
        num_turned = num_heads + num_kv_heads
        turned = qkv.new_empty((seq_length, num_sequences, num_turned, head_dim))
        num_rows = seq_length * num_sequences * num_turned
        lanes, rows = _tile(head_dim)
        if num_rows:
            with on_device_of(qkv):
                _forward[(ceil_div(num_rows, rows),)](
                    qkv, turned, cosines, sines, query_scale, key_scale, num_rows, num_sequences,
                    cosines.shape[1], width, num_heads, num_turned, head_dim, cosines.shape[-1],
                    eps, HAS_NORM=query_scale is not None, INTERLEAVED=interleaved, ROWS=rows,
                    LANES=lanes,
                )  # fmt: skip
        kept = qkv if query_scale is not None else None
        ctx.save_for_backward(kept, cosines, sines, query_scale, key_scale)
        ctx.sizes = sizes
        ctx.eps = eps
        ctx.interleaved = interleaved
        value = qkv[..., num_turned * head_dim :].unflatten(-1, (-1, head_dim))
        # The results are separate tensors that share memory, so that autograd sees no views of one
        # output.
        query, key = (part.view_as(part) for part in turned.split([num_heads, num_kv_heads], 2))
        return query, key, value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        qkv, cosines, sines, query_scale, key_scale = ctx.saved_tensors
        num_heads, num_kv_heads, head_dim = ctx.sizes
        grads = tuple(grad if grad.stride(-1) == 1 else grad.contiguous() for grad in grads)
        seq_length, num_sequences = grads[0].shape[:2]
        num_all = num_heads + 2 * num_kv_heads
        result = grads[0].new_empty((seq_length, num_sequences, num_all * head_dim))
        num_rows = seq_length * num_sequences * num_all
        lanes, rows = _tile(head_dim)
        num_programs = min(ceil_div(num_rows, rows), _PROGRAMS)
        has_norm = query_scale is not None
        sums = result.new_zeros((2, num_programs, head_dim), dtype=torch.float32)
        if num_rows:
            strides = [stride for grad in grads for stride in grad.stride()[:3]]
            with on_device_of(result):
                _backward[(num_programs,)](
                    result, qkv if has_norm else result, *grads, cosines, sines, query_scale,
                    key_scale, sums, *strides, num_rows, num_sequences, cosines.shape[1], num_heads,
                    num_kv_heads, head_dim, cosines.shape[-1], ctx.eps, num_programs,
                    HAS_NORM=has_norm, INTERLEAVED=ctx.interleaved, ROWS=rows, LANES=lanes,
                )  # fmt: skip
        scales = [None, None]
        if has_norm:
            scales = [
                part.sum(0).to(scale.dtype)
                for part, scale in zip(sums, (query_scale, key_scale), strict=True)
            ]
        return result, None, None, *scales, None, None, None


def _tile(head_dim: int) -> tuple[int, int]:
    """Return the lanes (elements of a head) and the number of heads of a program."""
    lanes = power_of_two(head_dim)
    return lanes, max(_TILE // lanes, 1)


@triton.jit
def rotation_partners(lanes: tl.tensor, rotated: tl.tensor, INTERLEAVED: tl.constexpr) -> tl.tensor:
    """Return the other element of each element's pair; elements that are not rotated have none."""
    if INTERLEAVED:
        partners = lanes ^ 1
    else:
        partners = tl.where(lanes < rotated // 2, lanes + rotated // 2, lanes - rotated // 2)
    return tl.where(lanes < rotated, partners, lanes)


@triton.jit
def rotation_angles(
    table: tl.tensor,
    row: tl.tensor,
    lanes: tl.tensor,
    rotated: tl.tensor,
    inside: tl.tensor,
    beyond: tl.constexpr,
    INTERLEAVED: tl.constexpr,
) -> tl.tensor:
    """Return the cosine or sine of each element, or ``beyond`` where none is rotated."""
    # The second half of a table repeats the angles of the first, so that a sine of an element and
    # one of its partner differ only by rounding.
    place = lanes // 2 if INTERLEAVED else lanes
    values = tl.load(table + row * rotated + place, mask=inside & (lanes < rotated), other=beyond)
    return values.to(tl.float32)


@triton.jit
def _read(places: tl.tensor, mask: tl.tensor) -> tl.tensor:
    """Return values in float32, and zeros where the mask is false."""
    return tl.load(places, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _norm_factor(values: tl.tensor, head_dim: tl.tensor, eps: tl.tensor) -> tl.tensor:
    """Return one over the root mean square of each row."""
    return 1.0 / tl.sqrt(tl.sum(values * values, 1)[:, None] / head_dim + eps)


@triton.jit
def _forward(
    qkv: tl.tensor,
    turned: tl.tensor,
    cosines: tl.tensor,
    sines: tl.tensor,
    query_scale: tl.tensor,
    key_scale: tl.tensor,
    num_rows: tl.tensor,
    num_sequences: tl.tensor,
    table_sequences: tl.tensor,
    width: tl.tensor,
    num_heads: tl.tensor,
    num_turned: tl.tensor,
    head_dim: tl.tensor,
    rotated: tl.tensor,
    eps: tl.tensor,
    HAS_NORM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    lanes = tl.arange(0, LANES)[None, :]
    inside = (row < num_rows) & (lanes < head_dim)
    token = row // num_turned
    head = row % num_turned
    partners = rotation_partners(lanes, rotated, INTERLEAVED)
    source = qkv + token * width + head * head_dim
    values = _read(source + lanes, inside)
    partner = _read(source + partners, inside)
    if HAS_NORM:
        factor = _norm_factor(values, head_dim, eps)
        of_query = inside & (head < num_heads)
        of_key = inside & (head >= num_heads)
        scale = _read(query_scale + lanes, of_query) + _read(key_scale + lanes, of_key)
        across = _read(query_scale + partners, of_query) + _read(key_scale + partners, of_key)
        values *= factor * scale
        partner *= factor * across
    angle = token // num_sequences * table_sequences + token % num_sequences % table_sequences
    cosine = rotation_angles(cosines, angle, lanes, rotated, inside, 1.0, INTERLEAVED)
    sine = rotation_angles(sines, angle, lanes, rotated, inside, 0.0, INTERLEAVED)
    result = values * cosine + tl.where(partners > lanes, -partner, partner) * sine
    target = turned + row * head_dim + lanes
    tl.store(target, result.to(turned.dtype.element_ty), mask=inside)


@triton.jit
def _rows(
    grad: tl.tensor,
    position: tl.tensor,
    sequence: tl.tensor,
    head: tl.tensor,
    position_stride: tl.tensor,
    sequence_stride: tl.tensor,
    head_stride: tl.tensor,
) -> tl.tensor:
    return grad + position * position_stride + sequence * sequence_stride + head * head_stride


@triton.jit
def _norm_gradients(
    values: tl.tensor, scale: tl.tensor, grad: tl.tensor, head_dim: tl.tensor, eps: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """Return the gradients of a norm's scale, of each row, and of its input."""
    factor = _norm_factor(values, head_dim, eps)
    unit = values * factor
    scaled = grad * scale
    mean = tl.sum(scaled * unit, 1)[:, None] / head_dim
    return grad * unit, (scaled - unit * mean) * factor


# fmt: off
@triton.jit
def _backward(
    result: tl.tensor, qkv: tl.tensor, grad_query: tl.tensor, grad_key: tl.tensor,
    grad_value: tl.tensor, cosines: tl.tensor, sines: tl.tensor, query_scale: tl.tensor,
    key_scale: tl.tensor, sums: tl.tensor, query_position: tl.tensor, query_sequence: tl.tensor,
    query_head: tl.tensor, key_position: tl.tensor, key_sequence: tl.tensor, key_head: tl.tensor,
    value_position: tl.tensor, value_sequence: tl.tensor, value_head: tl.tensor,
    num_rows: tl.tensor, num_sequences: tl.tensor, table_sequences: tl.tensor,
    num_heads: tl.tensor, num_kv_heads: tl.tensor, head_dim: tl.tensor, rotated: tl.tensor,
    eps: tl.tensor, num_programs: tl.tensor, HAS_NORM: tl.constexpr, INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr, LANES: tl.constexpr,
) -> None:
    # fmt: on
    program = tl.program_id(0)
    lanes = tl.arange(0, LANES)[None, :]
    partners = rotation_partners(lanes, rotated, INTERLEAVED)
    num_turned = num_heads + num_kv_heads
    num_all = num_turned + num_kv_heads
    query_sum = tl.zeros((LANES,), dtype=tl.float32)
    key_sum = tl.zeros((LANES,), dtype=tl.float32)
    for first in range(program * ROWS, num_rows, num_programs * ROWS):
        row = tl.cast(first, tl.int64) + tl.arange(0, ROWS)[:, None]
        inside = (row < num_rows) & (lanes < head_dim)
        token = row // num_all
        head = row % num_all
        position = token // num_sequences
        sequence = token % num_sequences
        of_query = inside & (head < num_heads)
        of_key = inside & (head >= num_heads) & (head < num_turned)
        of_value = inside & (head >= num_turned)
        query_row = _rows(
            grad_query, position, sequence, head, query_position, query_sequence, query_head
        )
        key_row = _rows(
            grad_key, position, sequence, head - num_heads, key_position, key_sequence, key_head
        )
        value_row = _rows(
            grad_value, position, sequence, head - num_turned, value_position, value_sequence,
            value_head,
        )  # fmt: skip
        output_grad = _read(query_row + lanes, of_query) + _read(key_row + lanes, of_key)
        output_grad += _read(value_row + lanes, of_value)
        partner = _read(query_row + partners, of_query) + _read(key_row + partners, of_key)
        angle = position * table_sequences + sequence % table_sequences
        is_turned = of_query | of_key
        cosine = rotation_angles(cosines, angle, lanes, rotated, is_turned, 1.0, INTERLEAVED)
        sine = rotation_angles(sines, angle, partners, rotated, is_turned, 0.0, INTERLEAVED)
        grad = output_grad * cosine + tl.where(partners > lanes, partner, -partner) * sine
        if HAS_NORM:
            value = _read(qkv + (token * num_all + head) * head_dim + lanes, is_turned)
            scale = _read(query_scale + lanes, of_query) + _read(key_scale + lanes, of_key)
            of_scale, of_input = _norm_gradients(value, scale, grad, head_dim, eps)
            query_sum += tl.sum(tl.where(of_query, of_scale, 0.0), 0)
            key_sum += tl.sum(tl.where(of_key, of_scale, 0.0), 0)
            grad = tl.where(of_value, output_grad, of_input)
        tl.store(result + row * head_dim + lanes, grad.to(result.dtype.element_ty), mask=inside)
    if HAS_NORM:
        inner = tl.arange(0, LANES)
        place = sums + program * head_dim + inner
        tl.store(place, query_sum, mask=inner < head_dim)
        tl.store(place + num_programs * head_dim, key_sum, mask=inner < head_dim)
