"""Benchmark of the bundled grouped GEMM against torch, a loop of products and Transformer Engine.

    lightning-megatron kernels build
    python -m benchmarks.grouped_gemm --out grouped_gemm.md

A time is the median of single calls, each after an idle period of the GPU. The variants alternate,
so that all run at the same temperature. TFLOP/s count 2 x rows x n x k for each product, without
additional work of a kernel. Operands are random normal. ``weight grad +=`` accumulates in float32:
the bundled kernels add to the sum themselves, torch's grouped product returns a bfloat16 gradient
that is added afterwards, and the loop calls ``torch.addmm`` with a float32 result for each group.
Transformer Engine is timed if it is installed.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from math import prod
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.device_time import burst
from benchmarks.grouped_problem import PASSES, Problem, draw, group_sizes, relative_error
from lightning_megatron.experts.compute.backends import BACKENDS
from lightning_megatron.experts.compute.choose_backend import choose_backend
from lightning_megatron.layers.parameters.gradient_slot import GradientSlot
from lightning_megatron.plan.grouped_gemm import Pass, choose_variant

#: Groups, k, n and rows of the expert products of some models, on one expert-parallel rank.
SHAPES = {
    "Qwen3-30B-A3B gate+up": (32, 2048, 1536, 32768),
    "Qwen3-30B-A3B down": (32, 768, 2048, 32768),
    "Qwen3-30B-A3B gate+up, 128 rows": (32, 2048, 1536, 4096),
    "DeepSeek-V3 gate+up": (32, 7168, 4096, 16384),
    "DeepSeek-V3 down": (32, 2048, 7168, 16384),
    "Mixtral-8x7B gate+up": (8, 4096, 28672, 16384),
    "Mixtral-8x7B down": (8, 14336, 4096, 16384),
}
OURS = "ours"
TORCH = "grouped_mm"
LOOP = "loop"
ENGINE = "TE"


def calls(problem: Problem, which: Pass, ours: str = "bundled") -> dict[str, Callable[[], Tensor]]:
    """Return the variants of a pass as functions that return the result."""
    rows = problem.rows
    grad = problem.grad
    ends = problem.ends
    sums = problem.sums
    weights = problem.weights.unbind()
    products = {OURS: BACKENDS[ours], TORCH: BACKENDS["grouped_mm"]}  # type: ignore[index]
    if which is Pass.FORWARD:
        variants = {
            name: lambda product=product: product.output(rows, weights, ends)
            for name, product in products.items()
        }
        return {
            **variants,
            **_engine_calls(problem),
            LOOP: lambda: loop_over_groups(problem, which),
        }
    if which is Pass.DATA_GRAD:
        variants = {
            name: lambda product=product: product.input_gradient(grad, weights, ends)
            for name, product in products.items()
        }
        return {**variants, LOOP: lambda: loop_over_groups(problem, which)}
    if which is Pass.WEIGHT_GRAD_BF16:
        return {
            OURS: lambda: BACKENDS[ours].weight_gradients(grad, rows, ends),  # type: ignore[index]
            TORCH: lambda: F.grouped_mm(grad.t(), rows, offs=ends),
            LOOP: lambda: loop_over_groups(problem, which),
        }
    slots = [GradientSlot(part, lambda: None) for part in sums]

    def add() -> Tensor:
        for slot in slots:
            slot.is_empty = False
        BACKENDS[ours].add_weight_gradients(grad, rows, ends, slots)  # type: ignore[index]
        return sums

    return {
        OURS: add,
        TORCH: lambda: sums.add_(F.grouped_mm(grad.t(), rows, offs=ends)),
        LOOP: lambda: loop_over_groups(problem, which),
    }


def loop_over_groups(problem: Problem, which: Pass) -> Tensor:
    """Compute one product for each group, with group sizes that the host already knows."""
    rows = problem.rows
    grad = problem.grad
    result = {
        Pass.FORWARD: torch.empty_like(grad),
        Pass.DATA_GRAD: torch.empty_like(rows),
        Pass.WEIGHT_GRAD_BF16: torch.empty_like(problem.weights),
    }.get(which, problem.sums)
    for number, group in enumerate(problem.groups):
        if which is Pass.FORWARD:
            torch.mm(rows[group], problem.weights[number].t(), out=result[group])
        elif which is Pass.DATA_GRAD:
            torch.mm(grad[group], problem.weights[number], out=result[group])
        elif which is Pass.WEIGHT_GRAD_BF16:
            torch.mm(grad[group].t(), rows[group], out=result[number])
        elif rows.is_cuda:
            transposed_grad = grad[group].t()
            torch.addmm(
                result[number],
                transposed_grad,
                rows[group],
                out_dtype=torch.float32,
                out=result[number],
            )
        else:
            result[number] += grad[group].t() @ rows[group]
    return result


def _engine_calls(problem: Problem) -> dict[str, Callable[[], Tensor]]:
    if find_spec("transformer_engine") is None or not problem.rows.is_cuda:
        return {}
    num_groups, n, k = problem.weights.shape
    engine = import_module("transformer_engine.pytorch")
    layer = engine.GroupedLinear(
        num_groups, k, n, bias=False, params_dtype=torch.bfloat16, device="cuda"
    )
    with torch.no_grad():
        for number, weight in enumerate(problem.weights):
            layer.get_parameter(f"weight{number}").copy_(weight)
    sizes = list(problem.sizes)

    def forward() -> Tensor:
        with torch.no_grad():
            return layer(problem.rows, sizes)

    return {ENGINE: forward}


@dataclass(frozen=True)
class Row:
    """Row of the table.

    Args:
        shape: Name of the shape.
        skewed: Whether the groups have different sizes.
        which: Pass of the product.
        rates: TFLOP/s of each variant.
        variant: Selected kernel variant.
        errors: Relative errors of our product and torch's.
        spread: Relative difference of torch's median between the two halves of its calls.
    """

    shape: str
    skewed: bool
    which: Pass
    rates: Mapping[str, float]
    variant: str
    errors: tuple[float, float]
    spread: float

    @property
    def ratio(self) -> float:
        """Rate of our product relative to torch's grouped product."""
        return self.rates[OURS] / self.rates[TORCH]


def measure(shape: str, skewed: bool, rounds: int, generator: torch.Generator) -> list[Row]:
    """Measure all passes of a shape."""
    num_groups, k, n, num_rows = SHAPES[shape]
    problem = draw(num_groups, k, n, group_sizes(num_rows, num_groups, skewed, generator))
    rows = []
    for which in PASSES:
        variants = calls(problem, which)
        ours, theirs = (relative_error(problem, which, variants[name]) for name in (OURS, TORCH))
        problem.sums.zero_()
        times = burst(variants, problem.flops / 6e11, rounds)
        rates = {
            name: problem.flops / statistics.median(milliseconds) / 1e9
            for name, milliseconds in times.items()
        }
        halves = [statistics.median(times[TORCH][half::2]) for half in range(2)]
        variant = choose_variant(which, num_rows, num_groups, n, k).variant.removeprefix(
            f"{which}_"
        )
        rows.append(
            Row(
                shape, skewed, which, rates, variant, (ours, theirs), abs(halves[0] / halves[1] - 1)
            )
        )
        del variants
    return rows


def table(rows: Sequence[Row]) -> str:
    """Return the table and the geometric means."""
    measured = {name for row in rows for name in row.rates}
    columns = [name for name in (OURS, TORCH, LOOP, ENGINE) if name in measured]
    titles = [
        "shape (groups, k, n, rows)",
        "groups",
        "pass",
        *columns,
        "ours / grouped_mm",
        "variant",
        "error ours, grouped_mm",
    ]
    lines = [f"| {' | '.join(titles)} |", f"|{'---|' * len(titles)}"]
    for row in rows:
        rates = " | ".join(
            f"{row.rates[name]:.0f}" if name in row.rates else "" for name in columns
        )
        shape = f"{row.shape} {SHAPES[row.shape]}"
        lines.append(
            f"| {shape} | {'skewed' if row.skewed else 'equal'} | {PASSES[row.which]} | {rates} "
            f"| {row.ratio:.2f} "
            f"| {row.variant} | {row.errors[0]:.1e}, {row.errors[1]:.1e} |"
        )
    return "\n".join([*lines, "", *means(rows)])


def means(rows: Sequence[Row]) -> list[str]:
    """Return the geometric means of the ratios by pass, for equal, skewed and all groups."""
    lines = ["| ours / grouped_mm, geometric mean | equal | skewed | both |", "|---|---|---|---|"]
    parts = {name: {which} for which, name in PASSES.items()} | {
        "forward and input grad": {Pass.FORWARD, Pass.DATA_GRAD}
    }
    for name, passes in parts.items():
        cells = []
        for skews in ({False}, {True}, {False, True}):
            ratios = [row.ratio for row in rows if row.which in passes and row.skewed in skews]
            cells.append(f"{prod(ratios) ** (1 / len(ratios)):.2f}" if ratios else "")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    spread = max(row.spread for row in rows)
    return [
        *lines,
        "",
        f"grouped_mm's own figures differ by at most {spread:.1%} between the halves of its calls.",
    ]


def read_options(description: str, shapes: Sequence[str]) -> argparse.Namespace:
    """Parse the command line; exit with the reason if the bundled kernels cannot run.

    Args:
        description: Description of the benchmark.
        shapes: Names of its shapes.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="also write the table to this file")
    parser.add_argument(
        "--rounds", type=int, default=10, metavar="N", help="calls of each variant (default: 10)"
    )
    parser.add_argument(
        "--shapes",
        nargs="+",
        choices=shapes,
        default=list(shapes),
        help="measure only these shapes",
    )
    options = parser.parse_args()
    choice = choose_backend(torch.device("cuda", 0), torch.bfloat16, 8, 64, 64)
    if choice.backend != "bundled":
        parser.error(f"the bundled kernels cannot be used: {choice.reason}")
    return options


def publish(table: str, unit: str, out: Path | None) -> None:
    """Print a table with the name of the GPU, and write it to ``out`` unless that is None."""
    text = f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}, {unit}\n\n{table}"
    print(text)
    if out is not None:
        out.write_text(text + "\n", encoding="utf-8")


def main() -> None:
    """Measure all shapes and print the table."""
    options = read_options(__doc__, list(SHAPES))
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    rows: list[Row] = []
    for shape in options.shapes:
        for skewed in (False, True):
            rows += measure(shape, skewed, options.rounds, generator)
            print(
                *table(rows[-len(PASSES) :]).splitlines()[2 : 2 + len(PASSES)], sep="\n", flush=True
            )
            torch.cuda.empty_cache()
    print()
    publish(table(rows), "TFLOP/s", options.out)


if __name__ == "__main__":
    main()
