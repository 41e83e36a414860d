"""Benchmark of the bundled grouped GEMM against torch, a loop of products and Transformer Engine.

    lightning-megatron kernels build
    python -m benchmarks.grouped_gemm --rounds 10

A time is the median of single calls, each after an idle period of the GPU. The variants alternate,
so that all run at the same temperature. TFLOP/s count 2 x rows x n x k for each product, without
additional work of a kernel. Operands are random normal. ``weight grad +=`` accumulates in float32:
the bundled kernels add to the sum themselves, torch's grouped product returns a bfloat16 gradient
that is added afterwards, and the loop calls ``torch.addmm`` with a float32 result for each group.
Transformer Engine is timed if it is installed.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from statistics import geometric_mean

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.measure import burst, heading, option_parser
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
PASSES = {
    Pass.FORWARD: "forward",
    Pass.DATA_GRAD: "input grad",
    Pass.WEIGHT_GRAD_BF16: "weight grad",
    Pass.WEIGHT_GRAD_ADD: "weight grad +=",
}


@dataclass(frozen=True)
class Problem:
    """Operands of all passes of one shape.

    Args:
        rows: Input ``(R, K)``.
        grad: Gradient of the output ``(R, N)``.
        weights: Weights ``(E, N, K)``.
        sums: Float32 gradients of the weights ``(E, N, K)``.
        sizes: Number of rows in each group.
    """

    rows: Tensor
    grad: Tensor
    weights: Tensor
    sums: Tensor
    sizes: Sequence[int]
    ends: Tensor = field(init=False)

    def __post_init__(self) -> None:
        ends = torch.tensor(self.sizes).cumsum(0).int().to(self.rows.device)
        object.__setattr__(self, "ends", ends)

    @property
    def groups(self) -> list[slice]:
        """Rows of each group."""
        bounds = [0, *torch.tensor(self.sizes).cumsum(0).tolist()]
        return [slice(start, stop) for start, stop in pairwise(bounds)]

    @property
    def flops(self) -> int:
        """FLOPs of one pass."""
        return 2 * self.rows.shape[0] * self.weights.shape[1] * self.weights.shape[2]


def draw(num_groups: int, k: int, n: int, sizes: Sequence[int], device: str = "cuda") -> Problem:
    """Return random operands of a shape."""
    num_rows = sum(sizes)
    rows, grad, weights = (
        torch.randn(shape, device=device, dtype=torch.bfloat16)
        for shape in ((num_rows, k), (num_rows, n), (num_groups, n, k))
    )
    return Problem(
        rows, grad, weights.mul_(0.02), torch.zeros(num_groups, n, k, device=device), sizes
    )


def group_sizes(
    num_rows: int, num_groups: int, skewed: bool, generator: torch.Generator
) -> list[int]:
    """Return equal group sizes, or skewed ones like those of an unbalanced router.

    Skewed sizes are proportional to the squares of uniform random numbers.
    """
    if not skewed:
        return [num_rows // num_groups] * num_groups
    shares = torch.rand(num_groups, generator=generator).square() + 0.02
    sizes = (shares / shares.sum() * num_rows).long().tolist()
    sizes[0] += num_rows - sum(sizes)
    return sizes


def relative_error(problem: Problem, which: Pass, call: Callable[[], Tensor]) -> float:
    """Return the distance from the float64 result, relative to its norm."""
    problem.sums.fill_(1.0)
    result = call()
    distance = size = 0.0
    for number, group in enumerate(problem.groups):
        rows, grad, weight = (
            tensor.double()
            for tensor in (problem.rows[group], problem.grad[group], problem.weights[number])
        )
        if which is Pass.FORWARD:
            expected = rows @ weight.t()
            actual = result[group]
        elif which is Pass.DATA_GRAD:
            expected = grad @ weight
            actual = result[group]
        else:
            expected = grad.t() @ rows + (1.0 if which is Pass.WEIGHT_GRAD_ADD else 0.0)
            actual = result[number]
        distance += float((actual.double() - expected).square().sum())
        size += float(expected.square().sum())
    return (distance / size) ** 0.5


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
    """Measurements of one pass of a shape."""

    shape: str
    skewed: bool
    which: Pass
    rates: Mapping[str, float]
    variant: str
    errors: tuple[float, float]

    @property
    def ratio(self) -> float:
        """Rate of our product relative to torch's grouped product."""
        return self.rates[OURS] / self.rates[TORCH]

    def line(self, columns: Sequence[str]) -> str:
        """Return the row of the table."""
        rates = [f"{self.rates[name]:.0f}" if name in self.rates else "" for name in columns]
        groups = "skewed" if self.skewed else "equal"
        errors = ", ".join(f"{error:.1e}" for error in self.errors)
        cells = [f"{self.shape} {SHAPES[self.shape]}", groups, PASSES[self.which], *rates]
        return f"| {' | '.join(cells)} | {self.ratio:.2f} | {self.variant} | {errors} |"


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
        chosen = choose_variant(which, num_rows, num_groups, n, k).variant
        name = chosen.removeprefix(f"{which}_")
        rows.append(Row(shape, skewed, which, rates, name, (ours, theirs)))
        del variants
    return rows


def table(rows: Sequence[Row]) -> list[str]:
    """Return the lines of the table and of the geometric means."""
    measured = {name for row in rows for name in row.rates}
    columns = [name for name in (OURS, TORCH, LOOP, ENGINE) if name in measured]
    titles = ["shape (groups, k, n, rows)", "groups", "pass", *columns, "ours / grouped_mm"]
    titles += ["variant", "error ours, grouped_mm"]
    lines = [*heading(*titles), *(row.line(columns) for row in rows), ""]
    lines += heading("ours / grouped_mm, geometric mean", "equal", "skewed")
    for which, name in PASSES.items():
        ratios: dict[bool, list[float]] = {False: [], True: []}
        for row in rows:
            if row.which is which:
                ratios[row.skewed].append(row.ratio)
        means = [f"{geometric_mean(values):.2f}" for values in ratios.values()]
        lines.append(f"| {name} | {' | '.join(means)} |")
    return lines


def main() -> None:
    """Measure all shapes and print the table."""
    parser = option_parser(__doc__)
    add = parser.add_argument
    add("--rounds", type=int, default=10, help="calls of each variant")
    add("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    options = parser.parse_args()
    choice = choose_backend(torch.device("cuda", 0), torch.bfloat16, 8, 64, 64)
    if choice.backend != "bundled":
        parser.error(f"the bundled kernels cannot be used: {choice.reason}")
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    rows: list[Row] = []
    for shape in options.shapes:
        for skewed in (False, True):
            rows += measure(shape, skewed, options.rounds, generator)
            print(f"measured {shape}, {'skewed' if skewed else 'equal'} groups", flush=True)
            torch.cuda.empty_cache()
    head = f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}, TFLOP/s (2 rows n k)"
    print("\n".join([head, "", *table(rows)]))


if __name__ == "__main__":
    main()
