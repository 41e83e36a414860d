"""Checks of CUDA graphs on one GPU, with one row of a table for each requirement.

    python -m benchmarks.graph_checks
    python -m benchmarks.graph_checks --checks waits launches

* ``bits``: 500 steps of ``tiny`` with a validation every 100 steps, saved and loaded after half of
  them. Steps by graphs must equal eager steps bit by bit wherever two eager trainings agree, and
  memory must not grow.
* ``waits``: in steps by graphs, the host must not wait for the device.
* ``launches``: number of launches in a step, and names of kernels outside graphs.
* ``memory``: 64 microbatches may need at most 5 % more memory than 8 in mode segments.
* ``capture``: time of the captures for the shapes of Qwen3, with as many layers as fit.

All checks run in one process, in about five minutes. The exit status is the number of failed rows.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.graph_figures import CaptureTimes
from benchmarks.graph_runs import Bits, NoWaits, Peak, SaveAt, be_quiet, train
from benchmarks.launches import count_launches, launches_of
from benchmarks.shapes import SHAPES
from benchmarks.step_timeline import StepTimeline, steps_between_waits
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.plan.budget import TrainingShape, estimate_memory
from lightning_megatron.plan.cuda_graphs import CudaGraphs
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.strategy.callbacks.memory_report import MemoryReport

_MIB = 2**20
_GIB = 2**30
#: Number of steps before the measured steps; graphs are captured in them.
_WARMUP = 8
_MOST_NAMES = 6
#: Fraction of the free memory that the estimate of a training may reach.
_SHARE = 0.92


@dataclass(frozen=True)
class Row:
    """Row of the table: a result and its requirement.

    Args:
        check: Name of the check.
        setting: Model and mode.
        result: Result of the check.
        demand: Requirement; empty for a figure without a requirement.
        is_met: Whether the result meets the requirement.
    """

    check: str
    setting: str
    result: str
    demand: str = ""
    is_met: bool = True

    def line(self) -> str:
        """Format the row in Markdown."""
        word = ("yes" if self.is_met else "NO") if self.demand else ""
        cells = (self.check, self.setting, self.result, self.demand, word)
        return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"


def check_bits(args: argparse.Namespace) -> Iterator[Row]:
    """Compare long trainings by graphs with an eager training."""
    eager = _long_training("eager", args)
    repeated = _long_training("eager", args).differences_from(eager)
    yield Row("bits", f"{args.model} eager again", _words(repeated, args.steps))
    demand = f"equal but for {', '.join(repeated)}" if repeated else "equal"
    for mode in args.modes:
        bits = _long_training(mode, args)
        differences = bits.differences_from(eager)
        words = f"{_words(differences, args.steps)}, {bits.num_graphs} graphs"
        # Values that differ between two eager trainings may also differ here.
        is_met = bits.num_graphs > 0 and differences.keys() <= repeated.keys()
        yield Row("bits", f"{args.model} {mode}", words, demand, is_met)
        yield from _growth(f"{args.model} {mode}", bits)


def _words(differences: Mapping[str, int], steps: int) -> str:
    phrases = [f"{name} differ from number {first} on" for name, first in differences.items()]
    return "; ".join(phrases) or f"equal in all bits of {steps} steps"


def _long_training(mode: str, args: argparse.Namespace) -> Bits:
    half = args.steps // 2
    bits = Bits(args.steps)
    config = SHAPES[args.model]
    with tempfile.TemporaryDirectory(dir=args.folder or None) as folder:
        path = Path(folder) / "half.ckpt"
        options = {"epoch": half, "validates_every": args.steps // 5}
        train(config, mode, [bits, SaveAt(half, path)], half, args.accelerator, **options)
        train(config, mode, [bits], args.steps, args.accelerator, checkpoint=path, **options)
    return bits


def _growth(setting: str, bits: Bits) -> Iterator[Row]:
    """Compare the memory of the first and the last of the last three validations."""
    last_steps = sorted(bits.in_use)[-3:]
    if len(last_steps) < 3:
        return
    growth = [sizes[last_steps[-1]] - sizes[last_steps[0]] for sizes in (bits.in_use, bits.taken)]
    words = f"{growth[0] / _MIB:.2f} MiB in use, {growth[1] / _MIB:.2f} of the device"
    demand = f"below 1 and 8 MiB, steps {last_steps[0]} to {last_steps[-1]}"
    is_met = growth[0] < _MIB and growth[1] < 8 * _MIB
    yield Row("growth", setting, words, demand, is_met)


def check_waits(args: argparse.Namespace) -> Iterator[Row]:
    """Check that the host does not wait for the device in steps by graphs."""
    for model in (args.model, args.mixture):
        for mode in args.modes:
            watch = NoWaits(_WARMUP)
            try:
                train(SHAPES[model], mode, [watch], _WARMUP + 8, args.accelerator)
                result = f"none in {watch.num_steps} steps"
            except RuntimeError as error:
                result = str(error).splitlines()[0][:200]
            is_met = watch.num_steps == 8
            yield Row("waits", f"{model} {mode}", result, "none", is_met)


def check_launches(args: argparse.Namespace) -> Iterator[Row]:
    """Count the launches of a step."""
    num_microbatches = 4
    for mode in args.modes:
        timeline, bits = StepTimeline(_WARMUP), Bits(_WARMUP + 9)
        train(
            SHAPES[args.model],
            mode,
            [timeline, bits],
            timeline.last,
            args.accelerator,
            batch=num_microbatches,
        )
        steps = steps_between_waits(timeline.events)
        counts = count_launches(launches_of(timeline.events), steps)
        captures_update = mode.endswith("+update")
        if mode.startswith("full"):
            max_graphs = 1 + captures_update
            demand, is_met = f"{max_graphs} graphs", counts["graphs"] == max_graphs
        else:
            # A slot has three graphs for each segment: forward, first backward and later backward.
            max_graphs = 2 * (bits.num_graphs // 3) * num_microbatches + 5
            demand, is_met = f"at most {max_graphs} graphs", 0 < counts["graphs"] <= max_graphs
        calls = ", ".join(f"{number:g} {name}" for name, number in counts["calls"].items())
        yield Row("launches", f"{args.model} {mode}", calls, demand, is_met)
        names = Counter(counts["names"]).most_common(_MOST_NAMES)
        listed = ", ".join(f"{number:g} {name.split('<')[0][:60]}" for name, number in names)
        yield Row("launches", f"{args.model} {mode}", f"kernels alone: {listed or 'none'}")


def check_memory(args: argparse.Namespace) -> Iterator[Row]:
    """Compare the memory of few and many microbatches."""
    peaks = []
    for num_microbatches in (8, 64):
        peak = Peak()
        train(SHAPES[args.model], "segments", [peak], 6, args.accelerator, batch=num_microbatches)
        peaks.append(peak)
        words = (
            f"in use {peak.in_use / _GIB:.3f} GiB, reserved {peak.reserved / _GIB:.3f}, pools "
            f"{peak.pools / _GIB:.3f}"
        )
        yield Row("memory", f"{args.model} segments, {num_microbatches} microbatches", words)
    few, many = peaks
    if not few.in_use:
        return
    increases = [many.in_use / few.in_use - 1, many.reserved / few.reserved - 1]
    words = f"{increases[0]:+.1%} in use, {increases[1]:+.1%} reserved"
    is_met = max(increases) <= 0.05
    yield Row("memory", f"{args.model} segments, 64 against 8", words, "at most +5 %", is_met)


def check_capture(args: argparse.Namespace) -> Iterator[Row]:
    """Time the captures of a large model, and compare its memory with the estimate."""
    config = SHAPES[args.large]
    for mode in ("segments", "full"):
        layers = args.layers or layers_that_fit(config, CudaGraphs(mode))
        sized = GPTConfig(**{**vars(config), "num_layers": layers})
        times, report = CaptureTimes(), MemoryReport(after_steps=4)
        times.install()
        try:
            train(sized, mode, [report], _WARMUP, args.accelerator, batch=2)
        finally:
            times.remove()
        setting = f"{args.large} {mode}, {layers} layers, 2 microbatches"
        all_layers = times.seconds / layers * config.num_layers
        words = (
            f"{times.seconds:.2f} s for {times.num_captures} captures, {all_layers:.2f} s for "
            f"{config.num_layers} layers"
        )
        yield Row("capture", setting, words, "below 20 s", 0 < all_layers < 20)
        stage = report.reports[0]
        if stage.graphs:
            words = (
                f"pools {stage.graphs / _GIB:.3f} GiB, estimated {stage.estimate.graphs / _GIB:.3f}"
            )
            is_met = abs(stage.estimate.graphs / stage.graphs - 1) <= 0.1
            yield Row("capture", setting, words, "estimate within 10 %", is_met)


def layers_that_fit(config: GPTConfig, graphs: CudaGraphs) -> int:
    """Return the largest number of layers whose training fits into the free memory of the GPU.

    Args:
        config: Configuration of the model.
        graphs: Settings of the graphs.
    """
    free = torch.cuda.mem_get_info()[0] * _SHARE
    training = TrainingShape(
        seq_length=config.max_seq_length, num_microbatches=2, cuda_graphs=graphs
    )

    def peak(layers: int) -> int:
        sized = GPTConfig(**{**vars(config), "num_layers": layers})
        return estimate_memory(sized.memory_shape(), ParallelLayout(world_size=1), training)[0].peak

    fitting = [number for number in range(1, config.num_layers + 1) if peak(number) <= free]
    return max(fitting, default=1)


CHECKS: dict[str, Callable[[argparse.Namespace], Iterator[Row]]] = {
    "launches": check_launches,
    "waits": check_waits,
    "memory": check_memory,
    "bits": check_bits,
    "capture": check_capture,
}


def run(args: argparse.Namespace) -> list[Row]:
    """Run the chosen checks, and print each row as soon as it is known."""
    rows = []
    start = time.perf_counter()
    for name in args.checks:
        try:
            for row in CHECKS[name](args):
                rows.append(row)
                print(f"{time.perf_counter() - start:6.1f} s {row.line()}", flush=True)
        except Exception as error:
            # Continue with the other checks, because time on a GPU is limited.
            words = f"{type(error).__name__}: {str(error).splitlines()[0][:300]}"
            rows.append(Row(name, args.model, words, "no error", is_met=False))
            print(rows[-1].line(), flush=True)
    return rows


def table(rows: Sequence[Row]) -> str:
    """Return the rows as a table in Markdown."""
    heading = ["| check | setting | result | demand | met |", "|---|---|---|---|---|"]
    return "\n".join([*heading, *[row.line() for row in rows]])


def parser() -> argparse.ArgumentParser:
    """Build the parser of the options."""
    result = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument("--checks", nargs="+", default=list(CHECKS), choices=list(CHECKS))
    result.add_argument("--modes", nargs="+", default=["segments", "full", "full+update"])
    result.add_argument("--model", default="tiny", choices=list(SHAPES))
    result.add_argument("--mixture", default="tiny_moe", choices=list(SHAPES))
    result.add_argument("--large", default="qwen3_12", choices=list(SHAPES))
    result.add_argument(
        "--layers",
        type=int,
        default=0,
        help="layers of the large model (0: as many as fit into memory)",
    )
    result.add_argument("--steps", type=int, default=500, help="steps of the long trainings")
    result.add_argument("--folder", default="", help="folder for checkpoints (default: temporary)")
    result.add_argument("--accelerator", default="cuda", choices=["cuda", "cpu"])
    result.add_argument("--out", default="runs/graph_checks.md", help="file of the table")
    return result


def main() -> int:
    """Run the checks, print the table, and return the number of requirements that are not met."""
    args = parser().parse_args()
    be_quiet()
    rows = run(args)
    path = Path(args.out)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(table(rows) + "\n")
    print(table(rows), flush=True)
    return sum(not row.is_met for row in rows)


if __name__ == "__main__":
    sys.exit(main())
