"""Run the checks of the kernels of experts in Triton's interpreter on the CPU, and print failures
as JSON.

This is a separate program, because Triton decides between interpreter and compiler when a kernel
is defined.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

from lightning_megatron.kernels.triton import (
    clone_plan,
    expert_sort,
    peer_clones,
    peer_rows,
    route,
    route_settings,
    token_rows,
    two_halves,
    weighted_swiglu,
)
from tests.kernels import interpreted  # noqa: F401  mends the interpreter
from tests.kernels.checks import Draw
from tests.kernels.expert_checks import CHECKS, FEW, ONLY_FLOAT32
from tests.kernels.program import report_checks

# Small blocks and few programs, so that each program has several blocks and rows.
expert_sort._BLOCK, expert_sort._EXPERTS, expert_sort._ROWS = 32, 2, 2
route_settings._TILE = 64
route._PROGRAMS, route._ROWS, route._COLUMNS = 3, 2, 4
clone_plan._BLOCK = 32
token_rows._BLOCK = two_halves._BLOCK = peer_rows._BLOCK = 16
peer_rows._PROGRAMS = peer_clones._PROGRAMS = 3
peer_clones._WEIGHTS = peer_clones._GRADIENTS = 16
weighted_swiglu._BLOCK, weighted_swiglu._PROGRAMS = 64, 3


def main(selected: list[str]) -> None:
    """Run the checks whose name has one of the words, or all."""
    checks: dict[str, Callable[[], object]] = {
        f"{name}, {dtype}": lambda check=check, dtype=dtype: check(
            Draw(torch.device("cpu"), dtype), FEW
        )
        for name, check in CHECKS.items()
        for dtype in ((torch.float32,) if name in ONLY_FLOAT32 else (torch.float32, torch.bfloat16))
    }
    report_checks(
        {
            name: check
            for name, check in checks.items()
            if not selected or any(w in name for w in selected)
        }
    )


if __name__ == "__main__":
    main(sys.argv[1:])
