"""Dropout whose mask is a function of the numbers of an element; one pass, no stored mask."""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton import language as tl

from lightning_megatron.kernels.triton.launch import as_rows, ceil_div, on_device_of, power_of_two
from lightning_megatron.plan.mask_numbers import MaskNumbers
from lightning_megatron.shapes import Float, Int

#: Features of a row that one program computes at most; 32 counters have the numbers of 128.
_BLOCK = 2048
#: Features for each warp, so that each thread loads 16 bytes at once.
_FEATURES_OF_WARP = 1024


def drop_elements(
    values: Float[Tensor, "... features"],
    key: Int[Tensor, "4"],
    numbers: MaskNumbers,
    threshold: int,
    scale: float,
) -> Float[Tensor, "... features"]:
    """Drop elements and scale the others.

    Equal to ``torch.where(keep_mask(...), values * scale, 0)`` with ``layers.fused.dropout``,
    bit for bit.

    Args:
        key: Key of the mask, on the CPU or on the device of the values.
        threshold: Elements with a smaller 31-bit number are dropped.
    """
    rows = as_rows(values)
    output = torch.empty(values.shape, dtype=values.dtype, device=values.device)
    features = rows.shape[1]
    if not output.numel():
        return output
    first = numbers.first_feature
    near = None
    values_of_key = [0, 0, 0, 1]
    if key.device == rows.device:
        near = key
    else:
        values_of_key = key.tolist()
    block = min(_BLOCK, max(power_of_two(first % 128 + features), 128))
    cut = numbers.cut
    with on_device_of(rows):
        _drop[(rows.shape[0], ceil_div(first % 128 + features, block))](
            rows,
            output,
            near,
            *values_of_key,
            rows.stride(0),
            features,
            first,
            *numbers.samples,
            *numbers.places,
            *numbers.heads,
            numbers.first_head,
            cut.offset,
            cut.piece,
            cut.early,
            cut.late,
            threshold,
            scale,
            GROUPS=block // 128,
            num_warps=max(block // _FEATURES_OF_WARP, 1),
        )
    return output


@triton.jit(do_not_specialize=["seed", "first_sample"])
def _drop(
    values: tl.tensor,
    output: tl.tensor,
    key: tl.tensor,
    seed: tl.tensor,
    first_sample: tl.tensor,
    sample_stride: tl.tensor,
    rows_of_sample: tl.tensor,
    row_stride: tl.tensor,
    features: tl.tensor,
    first_feature: tl.tensor,
    sample_divisor: tl.tensor,
    num_samples: tl.tensor,
    place_divisor: tl.tensor,
    num_places: tl.tensor,
    head_divisor: tl.tensor,
    num_heads: tl.tensor,
    first_head: tl.tensor,
    offset: tl.tensor,
    piece: tl.tensor,
    early: tl.tensor,
    late: tl.tensor,
    threshold: tl.tensor,
    scale: tl.tensor,
    GROUPS: tl.constexpr,
) -> None:
    if key is not None:
        seed = tl.load(key)
        first_sample = tl.load(key + 1)
        sample_stride = tl.load(key + 2)
        rows_of_sample = tl.load(key + 3)
    row = tl.program_id(0)
    index = row // sample_divisor % num_samples
    sample = first_sample + sample_stride * (index // rows_of_sample)
    place = offset + row // place_divisor % num_places
    place = tl.where(place < piece, early + place, late + place - piece)
    head = first_head + row // head_divisor % num_heads
    part = head + index % rows_of_sample * 65536
    # Counter 32 i + j has the numbers of the features 128 i + j + (0, 32, 64, 96).
    group = first_feature // 128 + tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)[:, None]
    lane = tl.arange(0, 32)[None, :]
    zeros = tl.zeros((GROUPS, 32), tl.uint32)
    first, second, third, fourth = tl.philox(
        seed.to(tl.int64),
        (group * 32 + lane).to(tl.uint32),
        zeros + place.to(tl.uint32),
        zeros + sample.to(tl.uint32),
        zeros + part.to(tl.uint32),
    )
    column = group * 128 + lane - first_feature
    source = values + row.to(tl.int64) * row_stride
    target = output + row.to(tl.int64) * features
    _drop_part(source, target, column, features, first, threshold, scale)
    _drop_part(source, target, column + 32, features, second, threshold, scale)
    _drop_part(source, target, column + 64, features, third, threshold, scale)
    _drop_part(source, target, column + 96, features, fourth, threshold, scale)


@triton.jit
def _drop_part(
    source: tl.tensor,
    target: tl.tensor,
    column: tl.tensor,
    features: tl.tensor,
    number: tl.tensor,
    threshold: tl.tensor,
    scale: tl.tensor,
) -> None:
    inside = (column >= 0) & (column < features)
    element = tl.load(source + column, mask=inside, other=0.0).to(tl.float32)
    is_kept = (number >> 1).to(tl.int32) >= threshold
    result = tl.where(is_kept, element * scale, 0.0)
    tl.store(target + column, result.to(target.dtype.element_ty), mask=inside)
