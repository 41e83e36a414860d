"""Checks of all-reduces by one kernel between processes that write into each other's memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

#: Shapes, dtypes and operations, in the order of the launches: sizes for one program and for
#: several programs alternate, so that the programs differ in their numbers of launches.
CASES = (
    ((1, 2, 37), torch.bfloat16, "sum"),
    ((3, 1000), torch.bfloat16, "sum"),
    ((1, 1), torch.float32, "sum"),
    ((2048,), torch.float32, "sum"),
    ((512,), torch.int32, "max"),
    ((2, 64), torch.float16, "sum"),
    ((5,), torch.int32, "max"),
    ((1025,), torch.float32, "sum"),
)
NAN_BITS = 0x7FC00000


def drawn(rank: int, case: int, device: str | torch.device) -> Tensor:
    """Draw the tensor of a rank."""
    shape, dtype, op = CASES[case]
    generator = torch.Generator().manual_seed(100 * case + rank)
    if op == "max":
        values = torch.randint(0, 2**30, shape, generator=generator, dtype=torch.int32)
        # The bits of NaN are the largest of all magnitudes.
        values[case % len(values)] = NAN_BITS if rank == 1 else 7
    else:
        values = torch.randn(shape, generator=generator).to(dtype)
    return values.to(device)


def reduced(size: int, case: int, device: str | torch.device) -> Tensor:
    """Return the result for all ranks: float32 sums in the order of ranks, rounded once."""
    _, dtype, op = CASES[case]
    first, *peers = (drawn(rank, case, device) for rank in range(size))
    if op == "max":
        for peer in peers:
            first = torch.maximum(first, peer)
        return first
    total = first.float()
    for peer in peers:
        total = total + peer.float()
    return total.to(dtype)


def check_one_shot(
    rank: int, size: int, reduce_: Callable[[Tensor, str], None], device: str | torch.device
) -> None:
    """Reduce the tensors of all cases several times, and compare each result bitwise.

    Args:
        rank: Position of this rank.
        size: Number of ranks.
        reduce_: Reduction in place by an operation.
        device: Device of the tensors.
    """
    for repeat in range(3):
        for case, (_, _, op) in enumerate(CASES):
            actual = drawn(rank, case, device)
            reduce_(actual, op)
            expected = reduced(size, case, device)
            if not torch.equal(actual, expected):
                # Triton's interpreter truncates bfloat16 instead of rounding it.
                torch.testing.assert_close(actual, expected, rtol=2.0**-7, atol=0.0)
                assert device == "cpu", f"repeat {repeat}, case {CASES[case]}"
