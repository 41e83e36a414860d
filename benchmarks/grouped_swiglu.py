"""Benchmark of the expert product with fused SwiGLU against the product followed by SwiGLU.

    lightning-megatron kernels build
    python -m benchmarks.grouped_swiglu --out grouped_swiglu.md

A time is the median of single calls, each after an idle period of the GPU; the variants alternate.
``kept`` also stores the product for the backward pass. ``not stored`` does not store it, as in
calls without gradients and in the first forward pass of recomputed experts. Both are compared with
the bundled product followed by the Triton kernel of SwiGLU, which always stores the product."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import geometric_mean

import torch
from torch import Tensor

from benchmarks.device_time import burst
from benchmarks.grouped_gemm import publish, read_options
from benchmarks.grouped_problem import draw, group_sizes
from lightning_megatron.experts.compute.backends import Bundled
from lightning_megatron.experts.compute.grouped_linear import weighted_activation
from lightning_megatron.plan.grouped_gemm import Pass, choose_variant, reason_against_fusion

#: Groups, k, n and rows.
SHAPES = {
    "Qwen3-30B-A3B": (32, 2048, 1536, 32768),
    "Qwen3-30B-A3B, 128 rows": (32, 2048, 1536, 4096),
    "Qwen3-30B-A3B, 64 experts": (64, 2048, 1536, 32768),
    "DeepSeek-V3": (32, 7168, 4096, 16384),
    "Mixtral-8x7B": (8, 4096, 28672, 16384),
}
PRODUCT = "product"
BOTH = "product, then SwiGLU"
KEPT = "one launch, kept"
ALONE = "one launch, not stored"
NAMES = (PRODUCT, BOTH, KEPT, ALONE)


@dataclass(frozen=True)
class Row:
    """Row of the table.

    Args:
        shape: Name of the shape.
        skewed: Whether the groups have different sizes.
        times: Time by name of the variant (µs).
        chosen: Kernel variant, with a note if it is not selected for this shape.
    """

    shape: str
    skewed: bool
    times: dict[str, float]
    chosen: str

    def ratio(self, name: str) -> float:
        """Return the speed relative to the product followed by SwiGLU."""
        return self.times[BOTH] / self.times[name]


def calls(
    rows: Tensor, weights: Tensor, probabilities: Tensor, ends: Tensor
) -> dict[str, Callable[[], Tensor]]:
    """Return the variants as functions; all but the plain product return the result of SwiGLU."""
    matrices = weights.unbind()
    return {
        PRODUCT: lambda: Bundled.output(rows, matrices, ends),
        BOTH: lambda: weighted_activation(
            Bundled.output(rows, matrices, ends), probabilities, ends, "swiglu"
        )[0],
        KEPT: lambda: Bundled.swiglu(rows, matrices, probabilities, ends, keep=True)[0],
        ALONE: lambda: Bundled.swiglu(rows, matrices, probabilities, ends, keep=False)[0],
    }


@torch.no_grad()
def measure(shape: str, skewed: bool, rounds: int, generator: torch.Generator) -> Row:
    """Measure one shape."""
    num_groups, k, n, num_rows = SHAPES[shape]
    problem = draw(num_groups, k, n, group_sizes(num_rows, num_groups, skewed, generator))
    probabilities = torch.rand(num_rows, device=problem.rows.device)
    times = burst(
        calls(problem.rows, problem.weights, probabilities, problem.ends),
        problem.flops / 6e11,
        rounds,
    )
    variant = choose_variant(Pass.FORWARD_SWIGLU, num_rows, num_groups, n, k).variant
    chosen = variant.removeprefix(f"{Pass.FORWARD_SWIGLU}_") + (
        ", not chosen" if reason_against_fusion(n, k) else ""
    )
    return Row(
        shape,
        skewed,
        {name: 1e3 * statistics.median(milliseconds) for name, milliseconds in times.items()},
        chosen,
    )


def table(rows: Sequence[Row]) -> str:
    """Return the table and the geometric means."""
    titles = ["shape (groups, k, n, rows)", "groups", *NAMES, "kept", "not stored", "variant"]
    lines = [f"| {' | '.join(titles)} |", f"|{'---|' * len(titles)}"]
    for row in rows:
        times = " | ".join(f"{row.times[name]:.0f}" for name in NAMES)
        shape = f"{row.shape} {SHAPES[row.shape]}"
        ratios = f"{row.ratio(KEPT):.2f} | {row.ratio(ALONE):.2f}"
        lines.append(
            f"| {shape} | {'skewed' if row.skewed else 'equal'} | {times} | {ratios} | "
            f"{row.chosen} |"
        )
    kept = geometric_mean(row.ratio(KEPT) for row in rows)
    alone = geometric_mean(row.ratio(ALONE) for row in rows)
    return "\n".join([*lines, "", f"Geometric means: {kept:.2f} kept, {alone:.2f} not stored."])


def main() -> None:
    """Measure all shapes and print the table."""
    options = read_options(__doc__, list(SHAPES))
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    rows = [
        measure(shape, skewed, options.rounds, generator)
        for shape in options.shapes
        for skewed in (False, True)
    ]
    publish(table(rows), "microseconds", options.out)


if __name__ == "__main__":
    main()
