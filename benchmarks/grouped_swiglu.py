"""Time the product of experts with SwiGLU in its launch beside the two one after the other, and print one table.

    lightning-megatron kernels build
    python -m benchmarks.grouped_swiglu --out grouped_swiglu.md

A figure is the median of single calls with the chip idle before each; the variants take turns. `kept`: the product is
stored as well, for the backward pass. `not stored`: it is not, as without gradients and in the first forward pass of
recomputed experts. Both are compared with the bundled product and the Triton kernel of SwiGLU behind it, which needs
the product in memory in either case.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from benchmarks.grouped_gemm import burst, draw, group_sizes, publish, read_options
from lightning_megatron.experts.grouped_mlp import weighted_activation
from lightning_megatron.experts.products import Bundled
from lightning_megatron.plan.grouped_gemm import Pass, choose_variant, why_apart

#: Groups, k, n and rows.
SHAPES = {
    "Qwen3-30B-A3B": (32, 2048, 1536, 32768),
    "Qwen3-30B-A3B, 128 rows": (32, 2048, 1536, 4096),
    "Qwen3-30B-A3B, 64 experts": (64, 2048, 1536, 32768),
    "DeepSeek-V3": (32, 7168, 4096, 16384),
    "Mixtral-8x7B": (8, 4096, 28672, 16384),
}
PRODUCT, BOTH, KEPT, ALONE = "product", "product, then SwiGLU", "one launch, kept", "one launch, not stored"
NAMES = (PRODUCT, BOTH, KEPT, ALONE)


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Args:
        shape: Name of the shape.
        skewed: Whether its groups are of unequal size.
        times: Microseconds by name.
        chosen: The variant, and why SwiGLU would be apart if it would.
    """

    shape: str
    skewed: bool
    times: dict[str, float]
    chosen: str

    def ratio(self, name: str) -> float:
        """How many times as fast as the two one after the other."""
        return self.times[BOTH] / self.times[name]


def calls(rows: Tensor, weights: Tensor, probabilities: Tensor, ends: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Return what to time; each call but the product's returns the result."""
    parts = weights.unbind()
    operands = (rows, parts, probabilities, ends)
    return {
        PRODUCT: lambda: Bundled.output(rows, parts, ends),
        BOTH: lambda: weighted_activation(Bundled.output(rows, parts, ends), probabilities, ends, "swiglu"),
        KEPT: lambda: Bundled.swiglu(*operands, keep=True)[0],
        ALONE: lambda: Bundled.swiglu(*operands, keep=False)[0],
    }


@torch.no_grad()
def measure(shape: str, skewed: bool, rounds: int, generator: torch.Generator) -> Row:
    """Measure one shape."""
    num_groups, k, n, num_rows = SHAPES[shape]
    problem = draw(num_groups, k, n, group_sizes(num_rows, num_groups, skewed, generator))
    probabilities = torch.rand(num_rows, device=problem.rows.device)
    times = burst(calls(problem.rows, problem.weights, probabilities, problem.ends), problem.flops / 6e11, rounds)
    variant = choose_variant(Pass.FORWARD_SWIGLU, num_rows, num_groups, n, k).variant
    chosen = variant.removeprefix(f"{Pass.FORWARD_SWIGLU}_") + (", not chosen" if why_apart(n, k) else "")
    return Row(shape, skewed, {name: 1e3 * statistics.median(found) for name, found in times.items()}, chosen)


def table(rows: Sequence[Row]) -> str:
    """Return the table and the geometric means."""
    head = ["shape (groups, k, n, rows)", "groups", *NAMES, "kept", "not stored", "variant"]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for row in rows:
        times = " | ".join(f"{row.times[name]:.0f}" for name in NAMES)
        shape = f"{row.shape} {SHAPES[row.shape]}"
        ratios = f"{row.ratio(KEPT):.2f} | {row.ratio(ALONE):.2f}"
        lines.append(f"| {shape} | {'skewed' if row.skewed else 'equal'} | {times} | {ratios} | {row.chosen} |")
    means = [prod(row.ratio(name) for row in rows) ** (1 / len(rows)) for name in (KEPT, ALONE)]
    return "\n".join([*lines, "", f"Geometric means: {means[0]:.2f} kept, {means[1]:.2f} not stored."])


def main() -> None:
    """Measure and print."""
    options = read_options(__doc__, list(SHAPES))
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    rows = [measure(shape, skewed, options.rounds, generator) for shape in options.shapes for skewed in (False, True)]
    publish(table(rows), "microseconds", options.out)


if __name__ == "__main__":
    main()
