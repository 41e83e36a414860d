"""Run the casts of weight slices in Triton's interpreter on the CPU, and print failures as JSON.

This is a separate program, because Triton decides between interpreter and compiler when a kernel
is defined.
"""

from __future__ import annotations

from functools import partial

import torch

from lightning_megatron.kernels.triton import cast_by_one_scale, weight_slices
from lightning_megatron.layers.fp8 import torch_casts
from tests.kernels import interpreted  # noqa: F401  mends the interpreter
from tests.kernels.program import report_checks

FORMAT = torch.float8_e4m3fn
#: Start in the numbers, start in the bytes, size (elements), and weight of each slice.
SLICES = [(64, 0, 2000, 1), (2064, 3000, 900, 0), (3000, 2048, 5, 1), (3100, 5000, 800, 3)]
#: Slices at multiples of 16, of which the kernels read and write several elements at once.
ALIGNED = [(64, 0, 2000, 1), (2064, 3008, 912, 0), (3008, 2048, 16, 1), (3104, 5008, 800, 3)]
# Small programs, so that a slice has several programs.
weight_slices._BLOCK = 256


def check_slices(
    slices: list[tuple[int, int, int, int]], dtype: torch.dtype, strange: float
) -> None:
    """Compare bytes with the kernel for full matrices, and magnitudes with those of torch."""
    generator = torch.Generator().manual_seed(3)
    main = torch.randn(4000, generator=generator).to(dtype)
    main[100] = strange
    target = torch.full((6000,), 7, dtype=torch.uint8)
    magnitudes = torch.full((4,), 7, dtype=torch.int32)
    expected = torch.full((4,), 7, dtype=torch.int32)
    casts = weight_slices.SliceCastKernel(main, target, slices)
    casts.find(magnitudes)
    casts.cast(magnitudes, FORMAT)
    torch_casts.SliceCasts(main, target.clone(), slices).find(expected)
    assert torch.equal(magnitudes, expected), (magnitudes, expected)
    written = torch.zeros(6000, dtype=torch.bool)
    for start, place, size, weight in slices:
        matrix = main[start : start + size].view(1, size)
        parts = magnitudes[weight : weight + 1]
        expected_rows, _ = cast_by_one_scale(
            matrix, parts, FORMAT, rows=True, columns=False, multiple=16
        )
        assert expected_rows is not None
        actual = target[place : place + size]
        assert torch.equal(expected_rows[0].view(torch.uint8)[0], actual), f"slice at {start}"
        written[place : place + size] = True
    assert bool((target[~written] == 7).all()), "bytes outside of the slices were written"


def check_transposes() -> None:
    """Compare padded transposes with those of torch."""
    generator = torch.Generator().manual_seed(5)
    for sizes in ((100, 130), (129, 128), (1, 16), (256, 48)):
        matrix = torch.randint(0, 256, sizes, generator=generator, dtype=torch.uint8)
        for multiple in (16, 128):
            actual = weight_slices.padded_transpose(matrix, multiple)
            expected = torch_casts.padded_transpose(matrix, multiple)
            assert torch.equal(actual, expected), (sizes, multiple)


def main() -> None:
    """Run all checks."""
    report_checks(
        {
            f"{slices[1]}, {dtype}, {strange}": partial(check_slices, slices, dtype, strange)
            for slices in (SLICES, ALIGNED)
            for dtype in (torch.float32, torch.bfloat16)
            for strange in (1.0, float("inf"), float("nan"))
        }
        | {"transposes": check_transposes}
    )


if __name__ == "__main__":
    main()
