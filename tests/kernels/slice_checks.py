"""Checks of casts of slices of weights to 8 bits, and of transposes of bytes, on any device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lightning_megatron.kernels.triton import SliceCastKernel, cast_by_one_scale, padded_transpose
from lightning_megatron.layers.fp8 import torch_casts
from tests.layers.noted_casts import spread

FORMAT = torch.float8_e4m3fn


def check_slices(
    slices: Sequence[tuple[int, int, int, int]],
    dtype: torch.dtype,
    strange: float,
    device: str = "cpu",
) -> None:
    """Compare bytes with the kernel for full matrices, and magnitudes with those of torch.

    Args:
        slices: Start in the numbers, start in the bytes, size (elements), and weight of each slice.
        dtype: Type of the numbers.
        strange: One of the numbers.
        device: Where the kernels run.
    """
    numbers = max((start + size for start, _, size, _ in slices), default=0) + 128
    num_bytes = max((place + size for _, place, size, _ in slices), default=0) + 128
    main = spread(numbers, seed=3, dtype=dtype).to(device)
    main[100] = strange
    target = torch.full((num_bytes,), 7, dtype=torch.uint8, device=device)
    magnitudes, expected = (torch.full((4,), 7, dtype=torch.int32, device=device) for _ in range(2))
    casts = SliceCastKernel(main, target, list(slices))
    casts.find(magnitudes)
    casts.cast(magnitudes, FORMAT)
    torch_casts.SliceCasts(main, target.clone(), list(slices)).find(expected)
    # NaN has several bit patterns. Weights without slices on this rank have a magnitude of 0.
    torch.testing.assert_close(
        magnitudes.view(torch.float32), expected.view(torch.float32), rtol=0, atol=0, equal_nan=True
    )
    written = torch.zeros(num_bytes, dtype=torch.bool, device=device)
    for start, place, size, weight in slices:
        matrix, parts = main[start : start + size].view(1, size), magnitudes[weight : weight + 1]
        rows, _ = cast_by_one_scale(matrix, parts, FORMAT, rows=True, columns=False, multiple=16)
        assert rows is not None
        actual = target[place : place + size]
        assert torch.equal(rows[0].view(torch.uint8)[0], actual), f"slice at {start}"
        written[place : place + size] = True
    assert bool((target[~written] == 7).all()), "bytes outside of the slices were written"


def check_transposes(sizes: Sequence[tuple[int, int]], device: str = "cpu") -> None:
    """Compare padded transposes with those of torch."""
    generator = torch.Generator().manual_seed(5)
    for size in sizes:
        matrix = torch.randint(0, 256, size, generator=generator, dtype=torch.uint8).to(device)
        for multiple in (16, 128):
            actual = padded_transpose(matrix, multiple)
            assert torch.equal(actual, torch_casts.padded_transpose(matrix, multiple)), size
