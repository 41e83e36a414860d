"""Run the checks of Adam's kernel in Triton's interpreter on the CPU, and print failures as JSON.

This is a separate program, because Triton decides between interpreter and compiler when a kernel
is defined.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from lightning_megatron.kernels.triton import adamw
from tests.kernels.adam import (
    CASES,
    check_case,
    check_narrow_moments,
    check_narrow_steps,
    check_new_addresses,
)
from tests.kernels.program import report_checks

SIZES = (1, 15, 256, 900)
# Small programs, so that a slice has several programs.
adamw._CHUNK, adamw._BLOCK = 256, 128


def main() -> None:
    """Run all checks."""
    checks: dict[str, Callable[[], None]] = {
        # The interpreter truncates bfloat16 instead of rounding it.
        case.name: lambda case=case: check_case(
            case, SIZES, "cpu", 2.0**-7 if case.half == torch.bfloat16 else None
        )
        for case in CASES
    }
    checks["narrow moments"] = lambda: check_narrow_moments((1, 700, 1000), "cpu")
    checks["narrow steps"] = lambda: check_narrow_steps((700, 500), "cpu")
    checks["new addresses"] = lambda: check_new_addresses("cpu")
    report_checks(checks)


if __name__ == "__main__":
    main()
