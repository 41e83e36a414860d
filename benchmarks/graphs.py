"""Benchmark of training steps with CUDA graphs, eager steps and steps of another program.

    python -m benchmarks.graphs --works tiny:single --peer PROGRAM --peer-path PATHS
    python -m benchmarks.graphs --works tiny_moe:ep2 qwen3_12:ep2:6 --forced-balance --peer PROGRAM
    python -m benchmarks.graphs --works llama8b_half:pp2:8:64 --modes eager segments

A work is ``model:layout:layers:samples``, as in ``benchmarks/train_shapes.py``; the last two are
optional. A mode is eager, segments, full, one of the last two with ``+update`` (the parameter
update is also captured), or a JSON object with the fields of ``cuda_graphs``. Every case is one run
of all ranks: steps after which the host waits for the device, then steps in a row without waits,
then steps whose host time is measured by part, then profiled steps. A case that fails prints its
last error, and the next cases still run. ``--seconds`` limits the time of all cases together.

The peer is a program as in ``benchmarks/data_parallel.py`` that also takes ``--graph IMPLEMENTATION
--scope NAMES`` and prints row_ms, the mean time of a step in a row (ms).
"""

from __future__ import annotations

import argparse
import json
import time
from argparse import ArgumentTypeError
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.graph_tables import Measured, tables
from benchmarks.ranks import run_ranks
from benchmarks.shapes import LAYOUTS, SHAPES, Layout
from lightning_megatron.models.config import GPTConfig

MODES = ("eager", "segments", "full")
#: Suffix of a mode that also captures the parameter update.
_UPDATE = "+update"
#: Graphs of the peer for models without experts (False) and with experts, as
#: ``implementation:scopes``.
PEER_GRAPHS = {
    False: ("full_iteration", "transformer_engine:attn,mlp", "none"),
    True: ("transformer_engine:attn,moe_router,moe_preprocess", "none"),
}
#: Mode of this package that captures as much as an implementation of the peer.
MODE_OF_PEER = {"none": "eager", "transformer_engine": "segments", "full_iteration": "full"}


@dataclass(frozen=True)
class Work:
    """Model and layout that both programs train.

    Args:
        model: Name of a shape.
        layout: Name of a layout.
        layers: Number of layers; 0 means that of the shape.
        samples: Samples per data-parallel rank and step; 0 means that of the layout.
    """

    model: str
    layout: str
    layers: int = 0
    samples: int = 0

    def __str__(self) -> str:
        numbers = [f"{self.layers} layers"] if self.layers else []
        numbers += [f"{self.samples} samples"] if self.samples else []
        return " ".join([self.model, self.layout, *numbers])

    @property
    def sizes(self) -> Layout:
        """Sizes of the layout."""
        return LAYOUTS[self.layout]

    @property
    def config(self) -> GPTConfig:
        """Configuration of the model."""
        config = SHAPES[self.model]
        return GPTConfig(**{**vars(config), "num_layers": self.layers or config.num_layers})

    @property
    def batch(self) -> int:
        """Samples per data-parallel rank and step."""
        return self.samples or self.sizes.batch(self.model)

    @property
    def microbatch(self) -> int:
        """Samples per microbatch."""
        return 1 if self.sizes.pp > 1 else self.batch


@dataclass(frozen=True)
class Case:
    """One run of one program.

    Args:
        work: The work.
        program: ``ours`` or ``peer``.
        graphs: Name of the mode or of the peer's implementation.
        mode: Mode of this package, or the mode most similar to the peer's.
        settings: Arguments of the run: ``cuda_graphs``, or the peer's graph and scopes.
    """

    work: Work
    program: str
    graphs: str
    mode: str
    settings: dict[str, Any] = field(default_factory=dict)

    def file(self, folder: str) -> Path:
        """Return the file of the measurements."""
        words = f"{self.program} {self.work} {self.graphs}"
        name = "".join(
            character if character.isalnum() or character in "_-" else "_" for character in words
        )
        return Path(folder) / f"{name}.json"


def work_of(text: str) -> Work:
    """Return the work that ``model:layout:layers:samples`` names.

    Raises:
        ArgumentTypeError: If the model or the layout is unknown, or a number is not valid.
    """
    model, _, layout_and_numbers = text.partition(":")
    layout, *numbers = (layout_and_numbers or "single").split(":")
    if model not in SHAPES or layout not in LAYOUTS:
        raise ArgumentTypeError(
            f"a work must have a known model and layout: {text!r}. Models: {', '.join(SHAPES)}. "
            f"Layouts: {', '.join(LAYOUTS)}."
        )
    if len(numbers) > 2 or not all(number.isdecimal() for number in numbers):
        raise ArgumentTypeError(
            f"layers and samples of a work must be numbers: {text!r}. Use qwen3_12:ep2:6:2."
        )
    return Work(model, layout, *[int(number) for number in numbers])


def mode_of(text: str) -> tuple[str, str, Any]:
    """Parse a mode into its name, the mode of the graphs and the value of ``cuda_graphs``.

    Raises:
        ArgumentTypeError: If the text is neither a known mode nor a JSON object with a known mode.
    """
    settings: Any = text
    if text.startswith("{"):
        try:
            settings = json.loads(text)
        except json.JSONDecodeError as error:
            raise ArgumentTypeError(f"a mode must be valid JSON: {text!r}: {error}.") from None
    elif text.endswith(_UPDATE) and text != f"eager{_UPDATE}":
        settings = {"mode": text.removesuffix(_UPDATE), "optimizer": True}
    mode = settings.get("mode") if isinstance(settings, dict) else settings
    if mode not in MODES:
        raise ArgumentTypeError(
            f"a mode must be one of {', '.join(MODES)}, one of the last two with {_UPDATE}, or a "
            f"JSON object with one: {text!r}."
        )
    if mode == "eager":
        return "eager", "eager", None
    if not text.startswith("{"):
        return text, mode, settings
    fields = [f"{name} {value}" for name, value in settings.items() if name != "mode"]
    return " ".join([mode, *fields]), mode, settings


def cases_of(args: argparse.Namespace) -> list[Case]:
    """Return the cases in order: for each work, this package's modes and then the peer's."""
    cases = []
    for work in args.works:
        for name, mode, settings in args.modes:
            value = {} if settings is None else {"cuda_graphs": settings}
            cases.append(Case(work, "ours", name, mode, value))
        if not args.peer:
            continue
        for text in args.peer_graphs or PEER_GRAPHS[work.config.experts is not None]:
            graph, _, scope = text.partition(":")
            mode = MODE_OF_PEER.get(graph, graph)
            name = "eager" if graph == "none" else text
            cases.append(Case(work, "peer", name, mode, {"graph": graph, "scope": scope}))
    return cases


def run_case(case: Case, args: argparse.Namespace, timeout: float) -> Measured:
    """Run one case and return its figures, or the reason for its failure."""
    path = case.file(args.out)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    log = path.with_suffix(".log")
    devices = case.work.sizes.devices
    if case.program == "peer":
        variables = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTHONPATH": args.peer_path}
        outcome = run_ranks(peer_line(case, args), devices, log, timeout, variables)
        results = [text[7:] for text in outcome.output.splitlines() if text.startswith("RESULT ")]
        if results:
            path.write_text(results[-1])
    else:
        outcome = run_ranks(our_line(case, args, path), devices, log, timeout)
    failure = outcome.failure
    if path.exists():
        # The peer's result is valid even if its processes fail after they print it.
        failure = failure if case.program == "ours" else ""
    else:
        failure = failure or "no figures were written"
    figures: dict[str, Any] = {} if failure else json.loads(path.read_text())
    return Measured(case, figures, failure, outcome.seconds, said_of_graphs(outcome.output))


def said_of_graphs(output: str) -> tuple[str, ...]:
    """Return the log messages of a training about its graphs, without duplicates."""
    messages = [message.strip() for message in output.splitlines() if "CUDA graphs" in message]
    return tuple(dict.fromkeys(message[message.index("CUDA graphs") :] for message in messages))


def our_line(case: Case, args: argparse.Namespace, path: Path) -> list[str]:
    """Return the Python arguments of this package's training."""
    work = case.work
    options = {**json.loads(args.options), **case.settings}
    line = ["-m", "benchmarks.train_shapes", "--model", work.model, "--layout", work.layout]
    line += ["--layers", str(work.layers), "--batch", str(work.samples), "--out", str(path)]
    line += ["--steps", str(args.steps), "--warmup", str(args.warmup)]
    line += ["--row-steps", str(args.steps), "--time-host", "--accelerator", args.accelerator]
    line += ["--profile", str(path.with_suffix(".trace.json.gz"))] if args.profile else []
    line += ["--forced-balance"] if args.forced_balance else []
    return [*line, "--options", json.dumps(options)]


def peer_line(case: Case, args: argparse.Namespace) -> list[str]:
    """Return the Python arguments of the peer."""
    work = case.work
    sizes = work.sizes
    line = [args.peer, "--model", work.model, "--tp", str(sizes.tp), "--ep", str(sizes.ep)]
    line += ["--mbs", str(work.microbatch), "--steps", str(args.steps)]
    line += ["--warmup", str(args.warmup), "--graph", case.settings["graph"]]
    line += ["--scope", case.settings["scope"]] if case.settings["scope"] else []
    if sizes.pp > 1:
        line += ["--pp", str(sizes.pp), "--gbs", str(work.batch * sizes.data_ranks)]
    line += ["--layers", str(work.layers)] if work.layers else []
    return [*line, "--force-balance"] if args.forced_balance else line


def run_cases(cases: Sequence[Case], args: argparse.Namespace) -> list[Measured]:
    """Run all cases, print one line after each, and return their figures."""
    end = time.perf_counter() + args.seconds
    results = []
    for case in cases:
        seconds_left = min(args.timeout, end - time.perf_counter())
        if seconds_left < args.least:
            measured = Measured(case, {}, f"not run: {args.seconds:.0f} s were over", 0.0)
        else:
            measured = run_case(case, args, seconds_left)
        results.append(measured)
        status = f"failed: {measured.failure}" if measured.failure else "measured"
        print(
            f"{case.program} {case.work} {case.graphs}: {status}, {measured.seconds:.1f} s",
            flush=True,
        )
    return results


def parser() -> argparse.ArgumentParser:
    """Build the parser of the options."""
    result = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument("--works", nargs="+", type=work_of, default=[Work("tiny", "single")])
    result.add_argument(
        "--modes",
        nargs="*",
        type=mode_of,
        default=[mode_of(name) for name in (*MODES, f"full{_UPDATE}")],
    )
    result.add_argument("--peer", default="", help="program to compare with")
    result.add_argument("--peer-path", default="", help="folders that only the peer imports from")
    result.add_argument(
        "--peer-graphs", nargs="*", default=[], help="the peer's graphs, as IMPLEMENTATION:SCOPES"
    )
    result.add_argument("--steps", type=int, default=20, help="measured steps of each kind")
    result.add_argument("--warmup", type=int, default=8, help="steps before the measured steps")
    result.add_argument("--forced-balance", action="store_true", help="route tokens in turn")
    result.add_argument(
        "--no-profile", dest="profile", action="store_false", help="profile no steps"
    )
    result.add_argument("--options", default="{}", help="more arguments of the strategy, as JSON")
    result.add_argument("--accelerator", default="cuda", choices=["cuda", "cpu"])
    result.add_argument("--timeout", type=float, default=60.0, help="seconds for each case")
    result.add_argument("--seconds", type=float, default=580.0, help="seconds for all cases")
    result.add_argument(
        "--least", type=float, default=12.0, help="start a case only if this many seconds are left"
    )
    result.add_argument("--out", default="runs/graphs", help="folder of the measurements")
    return result


def main() -> None:
    """Run all cases and print the tables."""
    args = parser().parse_args()
    results = run_cases(cases_of(args), args)
    text = tables(results, args.steps, args.warmup)
    (Path(args.out) / "tables.md").write_text(text + "\n")
    print(text, flush=True)


if __name__ == "__main__":
    main()
