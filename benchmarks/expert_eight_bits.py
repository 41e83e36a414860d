"""Benchmark of the products of experts in 8 bits against bfloat16, with and without casts.

    lightning-megatron kernels build
    python -m benchmarks.expert_eight_bits --out expert_eight_bits.md

This package has no experts in 8 bits; the figures show the speed that they could have. ``bf16`` is
this package's grouped product, with the bundled kernels if they are built. ``8 bits`` is
``torch._scaled_grouped_mm`` with e4m3 operands and rowwise scales, as ``eight_bit_products.py``
describes. ``with casts`` adds the casts of tokens that the pass needs: rows of inputs for outputs,
rows of gradients for input gradients, columns of both for weight gradients. Weights are cast once
per step, for any number of microbatches, so their cast has a separate column. ``weight grad +=``
adds to float32 sums: the bundled kernels add inside the product, and the variant in 8 bits adds its
result after the product.

A time is the median of single calls, each after an idle period of the GPU; the variants alternate.
TFLOP/s count 2 x rows x n x k for each product. Errors are distances from the float64 result,
relative to its norm, with random normal operands. The last table of a shape has all products of one
layer, forward and backward, without the activation: outputs, input gradients and ``weight grad +=``
of both weights, where one cast of inputs or gradients serves two passes. Skewed groups have
multiples of 16 tokens, which weight gradients in 8 bits need; the groups of a router do not satisfy
this by themselves.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.device_time import burst
from benchmarks.eight_bit_products import MULTIPLE, EightBits, cast_kernels
from benchmarks.grouped_gemm import OURS, calls
from benchmarks.grouped_problem import PASSES, Problem, draw, group_sizes, relative_error
from lightning_megatron.experts.compute.choose_backend import BackendName, choose_backend
from lightning_megatron.plan.grouped_gemm import Pass

BF16 = "bf16"
ALONE = "8 bits"
CASTS = "8 bits with casts"
WEIGHTS = "cast of weights"
#: Variants of the products of one layer: which operands are cast, and how sums accumulate.
LAYER_KINDS = (
    BF16,
    "8 bits, products alone",
    "8 bits, casts of tokens",
    "8 bits, casts of tokens and weights",
    "8 bits, casts of tokens, exact sums in the backward pass",
)
#: Passes of one weight in a training step.
STEP = (Pass.FORWARD, Pass.DATA_GRAD, Pass.WEIGHT_GRAD_ADD)
Calls = Mapping[str, Callable[[], object]]
Timer = Callable[[Calls, float, int], Mapping[str, Sequence[float]]]


@dataclass(frozen=True)
class ExpertShape:
    """Experts of one layer on one rank.

    Args:
        experts: Experts on the rank.
        hidden: Size of a token (features).
        width: Size between the two products (features).
        rows: Number of token rows of all experts; a token counts once for each of its experts.
    """

    experts: int
    hidden: int
    width: int
    rows: int

    @property
    def products(self) -> dict[str, tuple[int, int]]:
        """Sizes k and n of both products."""
        return {"gate+up": (self.hidden, 2 * self.width), "down": (self.width, self.hidden)}

    def flops(self, name: str) -> int:
        """Return the FLOPs of one pass of a product."""
        k, n = self.products[name]
        return 2 * self.rows * n * k

    @property
    def layer_flops(self) -> int:
        """FLOPs of both products, forward and backward."""
        return len(STEP) * sum(map(self.flops, self.products))


#: Rows: 4,096 tokens with 8 experts each (Qwen3), 8,192 tokens with 2 experts each (Mixtral).
SHAPES = {
    "Qwen3-30B-A3B, 32 experts": ExpertShape(32, 2048, 768, 32768),
    "Qwen3-30B-A3B, 128 experts": ExpertShape(128, 2048, 768, 32768),
    "Mixtral-8x7B": ExpertShape(8, 4096, 14336, 16384),
}


def padded_sizes(shape: ExpertShape, skewed: bool, generator: torch.Generator) -> list[int]:
    """Return the tokens of each expert, positive multiples of 16."""
    units = group_sizes(shape.rows // MULTIPLE, shape.experts, skewed, generator)
    units = [max(1, count) for count in units]
    units[units.index(max(units))] -= sum(units) - shape.rows // MULTIPLE
    return [MULTIPLE * count for count in units]


@dataclass(frozen=True)
class Measured:
    """Times of the variants of a pass or of a layer.

    Args:
        name: Name of the pass; empty for a layer.
        flops: FLOPs of one call.
        times: Median time of each variant that ran (ms).
        failures: First line of the error of each variant that failed.
        errors: Relative errors of variants.
    """

    name: str
    flops: int
    times: Mapping[str, float]
    failures: Mapping[str, str]
    errors: Mapping[str, float] = field(default_factory=dict)

    def time(self, variant: str) -> str:
        """Return a time and its rate as two cells of the table, or the error."""
        if variant in self.failures:
            return f"failed: {self.failures[variant]} | "
        if variant not in self.times:
            return " | "
        return f"{self.times[variant]:.3f} | {self.flops / self.times[variant] / 1e9:.0f}"

    def speed(self, variant: str) -> str:
        """Return the speed of a variant relative to bfloat16."""
        if not {BF16, variant} <= self.times.keys():
            return ""
        return f"{self.times[BF16] / self.times[variant]:.2f}"


def why_it_fails(call: Callable[[], object]) -> str | None:
    """Call once and return the first line of the error; None if there is none."""
    try:
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except Exception as error:  # The row of the table shows any error.
        lines = str(error).strip().splitlines() or [""]
        return f"{type(error).__name__}: {lines[0][:100]}".replace("|", "/")
    return None


def gpu_is_lost() -> bool:
    """Return whether an earlier error, such as a device assertion, made the GPU unusable."""
    return torch.cuda.is_available() and why_it_fails(torch.cuda.synchronize) is not None


def measure(name: str, flops: int, variants: Calls, rounds: int, timer: Timer) -> Measured:
    """Measure the variants that run, and record the errors of the other variants."""
    failures = {
        variant: error
        for variant, call in variants.items()
        if (error := why_it_fails(call)) is not None
    }
    running = {variant: call for variant, call in variants.items() if variant not in failures}
    if not running or gpu_is_lost():
        return Measured(name, flops, {}, failures)
    times: dict[str, float] = {}

    def time_all() -> None:
        for variant, samples in timer(running, flops / 6e11, rounds).items():
            times[variant] = statistics.median(samples)

    error = why_it_fails(time_all)
    if error is not None:
        failures |= dict.fromkeys(running, error)
        times.clear()
    return Measured(name, flops, times, failures)


def measure_pass(
    problem: Problem, which: Pass, backend: BackendName, rounds: int, timer: Timer = burst
) -> Measured:
    """Measure one pass of one product, with accumulation in reduced precision."""
    bits = EightBits(problem)
    products: dict[str, Callable[[], Tensor]] = {
        BF16: calls(problem, which, ours=backend)[OURS],
        ALONE: lambda: bits.product(which),
    }
    variants: dict[str, Callable[[], object]] = {
        **products,
        CASTS: lambda: bits.product_with_casts(which),
    }
    weight_cast = bits.weight_cast(which)
    if weight_cast is not None:
        variants[WEIGHTS] = weight_cast
    measured = measure(PASSES[which], problem.flops, variants, rounds, timer)
    errors = {
        variant: relative_error(problem, which, call)
        for variant, call in products.items()
        if variant in measured.times
    }
    return Measured(measured.name, measured.flops, measured.times, measured.failures, errors)


def layer_calls(problems: Sequence[Problem], backend: BackendName) -> Calls:
    """Return the variants of all products of a layer, forward and backward.

    Args:
        problems: Operands of the products in the order of the forward pass.
        backend: Backend of the products in bfloat16.
    """
    passes = [(problem, Pass.FORWARD) for problem in problems]
    passes += [(problem, which) for problem in reversed(problems) for which in STEP[1:]]
    in_bf16 = [calls(problem, which, ours=backend)[OURS] for problem, which in passes]
    in_8_bits = {id(problem): EightBits(problem) for problem in problems}

    def run_bf16() -> None:
        for call in in_bf16:
            call()

    def run(casts_tokens: bool, casts_weights: bool, fast_backward: bool = True) -> None:
        for bits in in_8_bits.values():
            if casts_tokens:
                bits.drop_tokens()
            if casts_weights:
                bits.drop_weights()
        for problem, which in passes:
            fast = fast_backward or which is Pass.FORWARD
            in_8_bits[id(problem)].product(which, fast=fast)

    return {
        LAYER_KINDS[0]: run_bf16,
        LAYER_KINDS[1]: lambda: run(False, False),
        LAYER_KINDS[2]: lambda: run(True, False),
        LAYER_KINDS[3]: lambda: run(True, True),
        LAYER_KINDS[4]: lambda: run(True, False, fast_backward=False),
    }


def measure_layer(
    shape: ExpertShape,
    problems: Sequence[Problem],
    backend: BackendName,
    rounds: int,
    timer: Timer = burst,
) -> Measured:
    """Measure all products of a layer."""
    return measure("", shape.layer_flops, layer_calls(problems, backend), rounds, timer)


def pass_table(rows: Sequence[tuple[str, Measured]]) -> str:
    """Return the table of single passes.

    Args:
        rows: Name of the product, and its measured pass.
    """
    head = ["product (n, k)", "pass"]
    for variant in (BF16, ALONE, CASTS):
        head += [f"{variant}, ms", "TFLOP/s"]
    head += [f"speed {ALONE} / {BF16}", f"speed {CASTS} / {BF16}", f"{WEIGHTS}, ms"]
    head += [f"error {BF16}", f"error {ALONE}"]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for name, row in rows:
        cells = [name, row.name, *(row.time(variant) for variant in (BF16, ALONE, CASTS))]
        cells += [row.speed(ALONE), row.speed(CASTS), row.time(WEIGHTS).split(" | ")[0]]
        cells += [
            f"{row.errors[variant]:.1e}" if variant in row.errors else ""
            for variant in (BF16, ALONE)
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def layer_table(layer: Measured) -> str:
    """Return the table of a layer."""
    lines = [
        "| one layer, forward and backward | ms | TFLOP/s | speed / bf16 |",
        "|---|---|---|---|",
    ]
    for variant in LAYER_KINDS:
        lines.append(f"| {variant} | {layer.time(variant)} | {layer.speed(variant)} |")
    return "\n".join(lines)


def run_case(
    name: str, skewed: bool, rounds: int, device: str = "cuda", timer: Timer = burst
) -> str:
    """Measure one shape and return its tables as text."""
    torch.manual_seed(0)
    shape = SHAPES[name]
    sizes = padded_sizes(shape, skewed, torch.Generator().manual_seed(0))
    problems = {
        product_name: draw(shape.experts, k, n, sizes, device)
        for product_name, (k, n) in shape.products.items()
    }
    torch_device = torch.device(device, 0) if device == "cuda" else torch.device(device)
    rows: list[tuple[str, Measured]] = []
    lines = [
        f"## {name}: {shape.experts} experts, {shape.rows:,} rows, "
        f"{'skewed' if skewed else 'equal'} groups of {min(sizes)} to {max(sizes)}",
        "",
    ]
    backend: BackendName = "loop"
    for product_name, (k, n) in shape.products.items():
        choice = choose_backend(torch_device, torch.bfloat16, shape.experts, k, n)
        backend = choice.backend
        lines.append(f"{BF16} {product_name}: {backend}, {choice.reason}")
        for which in PASSES:
            measured = measure_pass(problems[product_name], which, backend, rounds, timer)
            rows.append((f"{product_name} ({n}, {k})", measured))
    layer = measure_layer(shape, list(problems.values()), backend, rounds, timer)
    return "\n".join([*lines, "", pass_table(rows), "", layer_table(layer), ""])


def parser() -> argparse.ArgumentParser:
    """Build the parser of the options."""
    result = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument("--out", type=Path, help="also write the tables to this file")
    result.add_argument("--rounds", type=int, default=10, help="calls of each variant")
    result.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    result.add_argument(
        "--groups", nargs="+", choices=["equal", "skewed"], default=["equal", "skewed"]
    )
    result.add_argument("--first", type=int, default=0, help="number of cases to skip")
    return result


def publish(text: str, out: Path | None) -> None:
    """Print a part of the result, and append it to a file if ``out`` is not None."""
    print(text, flush=True)
    if out is not None:
        with out.open("a", encoding="utf-8") as file:
            file.write(text + "\n")


def main() -> None:
    """Measure all cases and print their tables."""
    options = parser().parse_args()
    if not options.first:
        if options.out is not None:
            options.out.write_text("", encoding="utf-8")
        kernels = cast_kernels(torch.empty(16, 16, dtype=torch.bfloat16, device="cuda"))
        publish(
            f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}, casts by "
            f"{kernels.__name__}\n",
            options.out,
        )
    cases = list(product(options.groups, options.shapes))
    for number, (groups, name) in enumerate(cases):
        if number < options.first:
            continue
        publish(run_case(name, groups == "skewed", options.rounds), options.out)
        torch.cuda.empty_cache()
        if gpu_is_lost():
            # Only a new process can use the GPU again.
            line = [sys.executable, "-m", "benchmarks.expert_eight_bits"]
            line += ["--rounds", str(options.rounds), "--first", str(number + 1)]
            line += ["--shapes", *options.shapes, "--groups", *options.groups]
            line += ["--out", str(options.out)] if options.out is not None else []
            raise SystemExit(subprocess.call(line))


if __name__ == "__main__":
    main()
