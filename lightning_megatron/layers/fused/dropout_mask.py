"""Masks whose elements depend on their numbers in the whole batch, by Philox counters."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_megatron.plan.mask_numbers import MaskNumbers
from lightning_megatron.shapes import Bool, Int

_WORD = 0xFFFFFFFF
_FACTORS = 0xD2511F53, 0xCD9E8D57
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85
_NUM_ROUNDS = 10
#: Counters with neighbouring features; each of them has the numbers of four features.
_LANES = 32


def keep_mask(
    key: Int[Tensor, "4"],
    shape: tuple[int, int],
    numbers: MaskNumbers,
    threshold: int,
    device: torch.device,
) -> Bool[Tensor, "rows features"]:
    """Return which elements are kept.

    The random number of an element is a function of the key, of its feature and head in the whole
    layer, of its position in the whole row, and of its sample in the batch of all data ranks. It
    does not depend on the ranks that share these, or on the microbatch.

    Args:
        key: Seed of the mask, number of the first sample, distance between the numbers of
            neighbouring samples, and rows of each sample, as ``RandomStreams.mask_key`` returns.
        threshold: Elements with a smaller 31-bit number are dropped.

    Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3" (Philox).
    """
    num_rows, features = shape
    seed, first_sample, stride, rows_of_sample = key.to(device).unbind()
    rows = torch.arange(num_rows, device=device)[:, None]
    index, place, head = (
        rows // divisor % size for divisor, size in (numbers.samples, numbers.places, numbers.heads)
    )
    cut = numbers.cut
    place = place + cut.offset
    place = torch.where(place < cut.piece, place + cut.early, place + (cut.late - cut.piece))
    sample = first_sample + stride * (index // rows_of_sample)
    part = head + numbers.first_head + index % rows_of_sample * 65536
    # Counter 32 i + j has the numbers of the features 128 i + j + (0, 32, 64, 96).
    width = 4 * _LANES
    start = numbers.first_feature // width
    stop = -(-(numbers.first_feature + features) // width)
    lanes = torch.arange(start * _LANES, stop * _LANES, device=device)[None]
    words = philox((lanes, place, sample, part), (seed & _WORD, seed >> 32 & _WORD))
    by_feature = torch.stack([word.unflatten(1, (-1, _LANES)) for word in words], 2).flatten(1)
    first = numbers.first_feature - start * width
    return by_feature[:, first : first + features] >> 1 >= threshold


def philox(
    counter: tuple[Int[Tensor, "..."], Int[Tensor, "..."], Int[Tensor, "..."], Int[Tensor, "..."]],
    key: tuple[Int[Tensor, "..."], Int[Tensor, "..."]],
) -> tuple[Int[Tensor, "..."], Int[Tensor, "..."], Int[Tensor, "..."], Int[Tensor, "..."]]:
    """Return four random 32-bit words for each counter, by Philox 4x32 of ten rounds.

    All words are integers of 64 bits; those of the counters broadcast.
    """
    first, second, third, fourth = (word & _WORD for word in counter)
    low, high = key
    for _ in range(_NUM_ROUNDS):
        # The products wrap around at 64 bits; their halves are those of unsigned numbers.
        of_first = first * _FACTORS[0]
        of_third = third * _FACTORS[1]
        first = of_third >> 32 & _WORD ^ second ^ low
        third = of_first >> 32 & _WORD ^ fourth ^ high
        second = of_third & _WORD
        fourth = of_first & _WORD
        low = low + _KEY_STEPS[0] & _WORD
        high = high + _KEY_STEPS[1] & _WORD
    return first, second, third, fourth
