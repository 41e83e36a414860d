"""Tables of the benchmark of CUDA graphs: speed relative to the peer, graphs, memory, host time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from benchmarks.host_time import LOOP, PARTS
from benchmarks.measure import flops_per_token
from lightning_megatron.models.config import GPTConfig

RULE = (
    "TFLOP/s/GPU by the causal-half rule for both programs: per token 3 x (layers x (projections "
    "+ attention + MLP or selected experts + router) + logits), a product 2 x its elements, "
    "attention half of the sequence; embeddings, norms and recomputation count nothing. Pairs are "
    "waited / in a row. Waited: median of {steps} steps after {warmup}, the host waiting for the "
    "device after each. In a row: the {steps} after these, median and mean (the peer prints the "
    "mean); rates and ratios in a row use the mean. Ratio: ours / peer's, to the peer's same kind "
    "of graphs, and in brackets to its fastest."
)
SPEED = (
    "| work | program | graphs | ms waited | ms in a row, median | mean | tokens/s/GPU "
    "| TFLOP/s/GPU | GiB of the fullest GPU | ratio waited | ratio in a row | last loss |"
)
GRAPHS = (
    "| work | graphs | number | slots | capture s (of the steps) | peak GiB, more than eager "
    "| private pools GiB | static inputs MiB | gradient copies MiB |"
)
LAUNCHES = (
    "| work | graphs | cudaGraphLaunch | kernels in them | kernels launched alone | all calls "
    "| busy ms | nothing runs, profiled | nothing runs, in a row |"
)
_GIB = 2**30
_MIB = 2**20
_MOST_NAMES = 12
_LONGEST_NAME = 70
_MOST_NOTES = 4
_LONGEST_NOTE = 500


class WorkLike(Protocol):
    """Model and layout that both programs train."""

    @property
    def config(self) -> GPTConfig:
        """Configuration of the model."""


class CaseLike(Protocol):
    """One run of one program."""

    @property
    def work(self) -> WorkLike:
        """The work."""

    @property
    def program(self) -> str:
        """``ours`` or ``peer``."""

    @property
    def graphs(self) -> str:
        """Name of the graphs."""

    @property
    def mode(self) -> str:
        """Mode of this package's run, or the mode most similar to the peer's."""


@dataclass(frozen=True)
class Measured:
    """Figures of a case.

    Args:
        case: The case.
        figures: Figures that the program wrote; empty if it failed.
        failure: Reason for the failure; empty without one.
        seconds: Time of the whole run (s).
        said: Log messages of this package's program about its graphs.
    """

    case: CaseLike
    figures: dict[str, Any]
    failure: str
    seconds: float
    said: tuple[str, ...] = ()

    @property
    def is_ours(self) -> bool:
        """Return whether this package's program ran, not the peer."""
        return self.case.program == "ours"

    @property
    def waited(self) -> float:
        """Median time of a step after which the host waits for the device (ms)."""
        return float(self.figures["step_ms" if self.is_ours else "ms"])

    @property
    def row_mean(self) -> float | None:
        """Mean time of a step in a row, without waits of the host (ms); None if not measured."""
        return self.figures.get("row_mean_ms" if self.is_ours else "row_ms")

    @property
    def tokens_per_ms(self) -> float:
        """Throughput of steps after which the host waits (tokens per millisecond and GPU)."""
        name = "tokens_per_second_per_rank" if self.is_ours else "tok_s_gpu"
        return float(self.figures[name]) / 1e3

    def part(self, name: str) -> dict[str, Any]:
        """Return the figures of one callback; empty if the callback did not run."""
        return self.figures.get(name) or {}


def tables(results: Sequence[Measured], steps: int, warmup: int) -> str:
    """Return all tables.

    Args:
        results: Figures of all cases.
        steps: Measured steps of each kind (steps).
        warmup: Steps before the measured ones (steps).
    """
    ours = [measured for measured in results if measured.is_ours and not measured.failure]
    rows = [_speed(measured, results) for measured in results]
    blocks = [[SPEED, _rule_of(SPEED), *rows], [RULE.format(steps=steps, warmup=warmup)]]
    if ours:
        host = "| work | graphs | " + " | ".join(["all", LOOP, *PARTS]) + " |"
        blocks += [
            [GRAPHS, _rule_of(GRAPHS), *[_graphs(measured, ours) for measured in ours]],
            [LAUNCHES, _rule_of(LAUNCHES), *map(_launches, ours)],
            ["The host's time of a step on an idle device, ms:"],
            [host, _rule_of(host), *map(_host, ours)],
        ]
    blocks += [block for measured in ours if (block := _names(measured))]
    blocks += [notes for measured in ours if (notes := _notes(measured, warmup))]
    return "\n\n".join("\n".join(block) for block in blocks)


def _rule_of(heading: str) -> str:
    return "|---" * (heading.count("|") - 1) + "|"


def _row(*cells: object) -> str:
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def _speed(measured: Measured, results: Sequence[Measured]) -> str:
    case = measured.case
    if measured.failure:
        return _row(case.work, case.program, case.graphs, f"failed: {measured.failure}", *[""] * 8)
    figures = measured.figures
    flops = flops_per_token(case.work.config, case.work.config.max_seq_length)
    tokens = measured.tokens_per_ms * measured.waited
    times = [measured.waited] + ([measured.row_mean] if measured.row_mean else [])
    rates = [tokens / time * 1e3 for time in times]
    losses = figures.get("losses") or [figures.get("loss", "")]
    flop_rates = " / ".join(f"{rate * flops / 1e12:.1f}" for rate in rates)
    return _row(
        case.work,
        case.program,
        case.graphs,
        measured.waited,
        figures.get("row_ms", "") if measured.is_ours else "",
        measured.row_mean or "",
        " / ".join(f"{rate:,.0f}" for rate in rates),
        flop_rates,
        figures["peak_gib"] if measured.is_ours else figures["mem_gib"],
        _ratio(measured, results, lambda peer: peer.waited),
        _ratio(measured, results, lambda peer: peer.row_mean),
        losses[-1] if isinstance(losses[-1], str) else f"{losses[-1]:.4f}",
    )


def _ratio(
    measured: Measured, results: Sequence[Measured], time_of: Callable[[Measured], float | None]
) -> str:
    """Return this package's time relative to the peer's in the same mode, and to its fastest."""
    time = time_of(measured)
    peers = [
        (peer_time, peer.case.mode)
        for peer in results
        if peer.case.work == measured.case.work and not peer.is_ours and not peer.failure
        if (peer_time := time_of(peer))
    ]
    if not measured.is_ours or not peers or time is None:
        return ""
    same_mode = [peer_time for peer_time, mode in peers if mode == measured.case.mode]
    fastest = f"({time / min(peers)[0]:.3f})"
    return f"{time / min(same_mode):.3f} {fastest}" if same_mode else fastest


def _graphs(measured: Measured, ours: Sequence[Measured]) -> str:
    figures = measured.part("GraphFigures")
    eager = [
        run.figures["peak_gib"]
        for run in ours
        if run.case.mode == "eager" and run.case.work == measured.case.work
    ]
    peak = measured.figures["peak_gib"]
    peak_cell = f"{peak}, {peak - eager[0]:+.2f}" if eager else str(peak)
    return _row(
        measured.case.work,
        measured.case.graphs,
        figures["graphs"],
        figures["slots"],
        f"{figures['capture_seconds']:.2f} ({figures['capturing_steps_seconds']:.2f})",
        peak_cell,
        f"{figures['pool_bytes'] / _GIB:.2f} in {figures['pools']}",
        f"{figures['static_inputs'] / _MIB:.1f}",
        f"{figures['gradient_copies'] / _MIB:.1f}",
    )


def _launches(measured: Measured) -> str:
    case = measured.case
    profile = measured.part("Profile")
    if not profile.get("kernels"):
        return _row(case.work, case.graphs, "not profiled", *[""] * 6)
    launches = profile["launches"]
    busy = profile["step_ms"] - profile["idle_ms"]
    idle_in_row = f"{max(0.0, 1 - busy / measured.row_mean):.1%}" if measured.row_mean else ""
    calls = ", ".join(f"{name} {number:g}" for name, number in launches["calls"].items())
    return _row(
        case.work,
        case.graphs,
        f"{launches['graphs']:g}",
        f"{launches['in_graphs']:g}",
        f"{launches['kernels']:g}",
        calls,
        f"{busy:.2f}",
        f"{profile['idle_ms'] / profile['step_ms']:.1%}",
        idle_in_row,
    )


def _host(measured: Measured) -> str:
    times = measured.part("HostTime")
    cells = [f"{times[name]:.2f}" for name in ("all", LOOP, *PARTS)] if times else ["not timed"]
    return _row(measured.case.work, measured.case.graphs, *cells)


def _names(measured: Measured) -> list[str]:
    """Return the kernels that a step with graphs still launches one by one, by name."""
    names = measured.part("Profile").get("launches", {}).get("names", {})
    if measured.case.mode == "eager" or not names:
        return []
    lines = [f"{measured.case.work}, {measured.case.graphs}: kernels launched alone in a step:"]
    shown = list(names.items())[:_MOST_NAMES]
    lines += [f"- {number:g} x `{name[:_LONGEST_NAME]}`" for name, number in shown]
    num_others = sum(names.values()) - sum(number for _, number in shown)
    return [*lines, f"- {num_others:g} others"] if num_others > 0 else lines


def _notes(measured: Measured, warmup: int) -> list[str]:
    """Return notes on a case with graphs: log messages, late captures and missing graphs."""
    if measured.case.mode == "eager":
        return []
    figures = measured.part("GraphFigures")
    notes = list(measured.said[:_MOST_NOTES])
    late = [step for step in figures["capturing_steps"] if step > warmup]
    if late:
        notes.append(
            f"Steps {', '.join(map(str, late))} captured graphs after the warm-up, so the times "
            "include captures. Use a larger --warmup."
        )
    if not figures["graphs"]:
        notes.append("No graphs exist at the end: the steps were eager.")
    heading = f"{measured.case.work}, {measured.case.graphs}:"
    return [heading, *[f"- {note[:_LONGEST_NOTE]}" for note in notes]] if notes else []
