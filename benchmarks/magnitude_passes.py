"""Benchmark of norms and SwiGLU that also compute magnitudes for casts to 8 bits, on one GPU.

    python -m benchmarks.magnitude_passes --out magnitudes.md

A cast with one scale needs the largest magnitude of the matrix. Either the kernel that computes the
matrix also computes the magnitude, or a second pass over the matrix does. The program measures
times as ``benchmarks.device_time`` describes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.block_kernels import DTYPE, GPT2, LLAMA, drawn
from benchmarks.device_time import median_times
from lightning_megatron.kernels import triton as kernels
from lightning_megatron.layers.fp8.magnitude import no_magnitude
from lightning_megatron.models.config import GPTConfig


@dataclass(frozen=True)
class Passes:
    """Operator whose result is cast to 8 bits with one scale.

    Args:
        name: Label of the row in the table.
        alone: Operator without magnitudes; returns the matrix.
        measured: Operator that also computes magnitudes; returns the matrix and partial
            magnitudes, as bit patterns.
        dtype: Format of the cast.
    """

    name: str
    alone: Callable[[], Tensor]
    measured: Callable[[], tuple[Tensor, Tensor]]
    dtype: torch.dtype = torch.float8_e4m3fn

    @property
    def apart(self) -> Callable[[], tuple[Tensor, Tensor]]:
        """Return a function that runs the operator and a second pass for magnitudes."""

        def run() -> tuple[Tensor, Tensor]:
            matrix = self.alone()
            return matrix, kernels.magnitude_parts(matrix)

        return run

    def cast_after(self, run: Callable[[], tuple[Tensor, Tensor]]) -> Callable[[], Any]:
        """Return a function that runs ``run`` and casts its matrix and the transposed matrix."""

        def cast() -> Any:
            matrix, parts = run()
            settings: dict[str, Any] = {"rows": True, "columns": True, "multiple": 16}
            return kernels.cast_by_one_scale(matrix, parts, self.dtype, **settings)

        return cast


def norm_passes(config: GPTConfig, tokens: int) -> Passes:
    """Return the case of a norm before a linear layer, with the addition of a residual update.

    Args:
        config: Model that gives the kind of norm and its width.
        tokens: Rows of the matrix (tokens).
    """
    width = config.hidden_size
    is_rms = config.norm == "rmsnorm"
    hidden, update, weight, bias = (
        drawn(*shape).detach() for shape in ((tokens, width), (tokens, width), (width,), (width,))
    )
    norm = partial(kernels.add_norm, hidden, update, weight, None if is_rms else bias, 1e-5, is_rms)

    def measured() -> tuple[Tensor, Tensor]:
        bits = no_magnitude(hidden)
        return norm(magnitudes=bits)[1], bits

    name = f"{'RMSNorm' if is_rms else 'LayerNorm'}, {tokens} x {width}"
    return Passes(name, lambda: norm()[1], measured)


def swiglu_passes(tokens: int, features: int) -> tuple[Passes, Passes]:
    """Return the cases of the forward and the backward pass of SwiGLU, between two linear layers.

    Args:
        tokens: Rows of the matrices (tokens).
        features: Columns of the output (elements).
    """
    gate_up = drawn(tokens, 2 * features)
    grad = drawn(tokens, features).detach()
    results: list[tuple[Tensor, Tensor]] = []
    output = kernels.apply_swiglu(gate_up)
    measured_output = kernels.apply_swiglu(gate_up, None, lambda *result: results.append(result))

    def forward() -> tuple[Tensor, Tensor]:
        bits = no_magnitude(gate_up)
        return kernels.apply_swiglu(gate_up, bits).detach(), bits

    def backward() -> tuple[Tensor, Tensor]:
        torch.autograd.grad(measured_output, gate_up, grad, retain_graph=True)
        return results.pop()

    def plain() -> Tensor:
        return torch.autograd.grad(output, gate_up, grad, retain_graph=True)[0]

    size = f"{tokens} x {features}"
    return (
        Passes(f"SwiGLU, {size}", lambda: kernels.apply_swiglu(gate_up).detach(), forward),
        Passes(f"backward of SwiGLU, {size}", plain, backward, torch.float8_e5m2),
    )


def measure_passes(case: Passes, rounds: int) -> str:
    """Time an operator and its magnitudes in one pass and in two; return a row of the table."""
    calls: dict[str, Callable[[], Any]] = {
        "alone": case.alone,
        "one pass": case.measured,
        "two passes": case.apart,
        "one pass and cast": case.cast_after(case.measured),
        "two passes and cast": case.cast_after(case.apart),
    }
    cells = [f"{time:.0f}" for time in median_times(calls, rounds).values()]
    return f"| {case.name} | " + " | ".join(cells) + " |"


def report_passes(rounds: int) -> list[str]:
    """Time norms and SwiGLU with magnitudes of their results, and return the table."""
    tokens = 2 * LLAMA.max_seq_length
    lines = [
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {DTYPE}: microseconds\n",
        "| operator | alone | one pass | two passes | one pass and cast | two passes and cast |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    print("\n".join(lines), flush=True)
    cases = (
        norm_passes(LLAMA, tokens),
        norm_passes(GPT2, tokens),
        *swiglu_passes(tokens, LLAMA.ffn_size),
        # Number of features of a rank with tp=4.
        *swiglu_passes(tokens, LLAMA.ffn_size // 4),
    )
    for case in cases:
        lines.append(measure_passes(case, rounds))
        print(lines[-1], flush=True)
    return lines


def main() -> None:
    """Measure all cases and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15, help="timed calls of each variant")
    parser.add_argument("--out", type=Path, help="also write the table to this file")
    options = parser.parse_args()
    lines = report_passes(options.rounds)
    if options.out:
        options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
