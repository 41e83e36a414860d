"""The subcommand ``scaling-study``: weak and strong scaling as in the paper on Megatron-LM."""

from __future__ import annotations

import argparse
import inspect
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from lightning_megatron.cli.arguments import at_least_one
from lightning_megatron.errors import MissingExtraError, UnsupportedError
from lightning_megatron.extras import import_extra
from lightning_megatron.models.model_flops import FLOP_RULE
from lightning_megatron.strategy.megatron_strategy import MegatronStrategy
from lightning_megatron.strict_json import parse_object
from lightning_megatron.tasks.scaling import (
    PAPER_REPLICAS,
    SIZES,
    STUDIES,
    ScalingCase,
    ScalingRow,
    Study,
    cases_of,
    check_replicas,
    measure_job,
    records_of,
    table_of,
    write_files,
)

_WEAK = {"model": "model parallel", "model+data": "model and data parallel"}
_COLOURS = ("#4477aa", "#228833")


def draw_scaling(records: Sequence[Mapping[str, Any]], picture: Path) -> None:
    """Draw weak scaling as bars, like figure 5 of the paper, and strong scaling as a line.

    Args:
        records: Records of the rows; rows without a result are left out.
        picture: File to write; its extension selects the format.
    """
    figure = import_extra("matplotlib.figure", "plot").Figure(
        figsize=(9, 3.8), layout="constrained"
    )
    weak, strong = figure.subplots(1, 2)
    done = [record for record in records if record["efficiency"] is not None]
    bars = [(name, record) for name in _WEAK for record in done if record["study"] == name]
    for place, (name, record) in enumerate(bars):
        height = 100 * record["efficiency"]
        weak.bar(place, height, color=_COLOURS[list(_WEAK).index(name)])
        weak.text(place, height, f"{height:.0f} %", ha="center", va="bottom")
    weak.set_xticks(range(len(bars)), [str(record["devices"]) for _, record in bars])
    weak.set_xlabel("devices: " + ", then ".join(_WEAK.values()))
    weak.set_ylabel("efficiency of weak scaling (%)")
    points = [record for record in done if record["study"] == "strong"]
    devices = [record["devices"] for record in points]
    strong.plot(devices, [record["speedup"] for record in points], "o-", color=_COLOURS[0])
    strong.plot(devices, devices, ":", color="#616e7c", label="linear")
    strong.set_xlabel("devices")
    strong.set_ylabel("speed-up of strong scaling")
    strong.legend(frameon=False)
    figure.savefig(picture, dpi=150)


EXAMPLE = """examples:
  lightning-megatron scaling-study --output scaling
  lightning-megatron scaling-study --size tiny --devices 2 --studies model strong --output tiny"""

_JOB = "lightning_megatron.tasks.scaling.scaling_job"
#: Options of the strategy that a study sets itself.
_SET_BY_STUDY = {"tp", "recompute"}


def main(args: Sequence[str]) -> None:
    """Run the subcommand."""
    options = study_parser().parse_args(args)
    on_gpu = torch.cuda.is_available()
    options.devices = options.devices or (torch.cuda.device_count() if on_gpu else 2)
    # A replica of the largest model needs eight GPUs.
    options.replicas = options.replicas or min(PAPER_REPLICAS, max(2, options.devices // 8))
    check_replicas(options.replicas)
    options.strategy = strategy_options(options.strategy)
    options.precision = options.precision or ("bf16-mixed" if on_gpu else "32-true")
    options.accelerator = "cuda" if on_gpu else "cpu"
    folder = Path(options.output)
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    print(f"TFLOP/s: {FLOP_RULE}", flush=True)
    ran: dict[ScalingCase, dict[str, Any]] = {}
    rows = []
    for study in options.studies:
        for case in cases_of(study, options.size, options.replicas, options.batch_size):
            # A configuration that several studies share runs once.
            if case not in ran:
                ran[case] = _run(case, options, folder)
            rows.append(_row(study, case, ran[case]))
    _report(rows, ran, options, folder)


def study_parser() -> argparse.ArgumentParser:
    """Build the parser of the subcommand's options."""
    parser = argparse.ArgumentParser(
        prog="lightning-megatron scaling-study",
        description="Train the models of the paper on Megatron-LM (tables 1, 7, 8 and figure 5), "
        "each in a job of its own, and compare tokens/s and TFLOP/s. One node; a model that fails "
        "is a row with the reason.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--output", required=True, metavar="FOLDER", help="folder of study.json, .csv and .png")
    add(
        "--size",
        choices=SIZES,
        default="paper",
        help="small divides widths by 2 and layers by 4; tiny, for CPUs, by 16 and 20",
    )
    add(
        "--studies",
        nargs="+",
        choices=STUDIES,
        default=list(STUDIES),
        help="studies to run (default: all)",
    )
    add(
        "--devices",
        type=at_least_one,
        metavar="N",
        help="maximum number of GPUs or CPU processes (default: all GPUs, or 2 processes)",
    )
    add(
        "--replicas",
        type=int,
        metavar="N",
        help="replicas in the study model+data (default: devices / 8, from 2 to 64 as published)",
    )
    add(
        "--batch-size",
        type=at_least_one,
        default=8,
        metavar="N",
        help="samples of a replica per step",
    )
    _add_training_options(parser)
    return parser


def _add_training_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--steps", type=at_least_one, default=20, metavar="N", help="measured steps (default: 20)")
    add(
        "--warmup",
        type=at_least_one,
        default=5,
        metavar="N",
        help="steps before the measured ones (default: 5)",
    )
    add("--precision", help="precision of the Trainer (default: bf16-mixed, on CPUs 32-true)")
    add(
        "--recompute",
        choices=("selective", "full"),
        help="activations that are recomputed; full as published (default: none)",
    )
    add(
        "--strategy",
        default="{}",
        metavar="JSON",
        help='further options of MegatronStrategy, for example {"cuda_graphs": "segments"}',
    )
    add(
        "--timeout",
        type=at_least_one,
        default=1800,
        metavar="S",
        help="seconds after which a job is ended (default: 1800)",
    )


def strategy_options(text: str) -> dict[str, Any]:
    """Return the options of ``MegatronStrategy`` that a JSON text gives."""
    options = parse_object(text.encode(), "--strategy", 'Pass {"cuda_graphs": "segments"}.')
    legal = set(inspect.signature(MegatronStrategy).parameters) - _SET_BY_STUDY
    if unknown := sorted(options.keys() - legal):
        raise UnsupportedError(
            f"--strategy must hold options of MegatronStrategy that the study does not set: got "
            f"{unknown}. Use some of {sorted(legal)}."
        )
    return options


def _run(case: ScalingCase, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run a configuration as a separate job; return its result or the reason for its failure."""
    if case.devices > options.devices:
        return {"failure": f"needs {case.devices} devices: there are {options.devices}"}
    result, log = (folder / "logs" / f"{case.label}{end}" for end in (".json", ".txt"))
    command = [sys.executable, "-m", _JOB, "--case", json.dumps(asdict(case))]
    command += ["--result", str(result), "--steps", str(options.steps)]
    command += ["--warmup", str(options.warmup), "--precision", options.precision]
    command += ["--accelerator", options.accelerator]
    command += ["--strategy", json.dumps(options.strategy)]
    command += ["--recompute", options.recompute] if options.recompute else []
    measured = measure_job(command, log, result, options.timeout)
    outcome = measured["failure"] or f"{measured['seconds_per_step']:.4g} s a step"
    print(f"{case.label}: {outcome}", file=sys.stderr, flush=True)
    return measured


def _row(study: Study, case: ScalingCase, measured: dict[str, Any]) -> ScalingRow:
    return ScalingRow(
        study,
        case,
        measured.get("seconds_per_step"),
        measured.get("peak_gib"),
        measured.get("loss"),
        measured["failure"],
    )


def _report(
    rows: Sequence[ScalingRow],
    ran: dict[ScalingCase, dict[str, Any]],
    options: argparse.Namespace,
    folder: Path,
) -> None:
    records = records_of(rows)
    device = next((result["device"] for result in ran.values() if "device" in result), None)
    settings = {
        "size": options.size,
        "device": device,
        "devices": options.devices,
        "precision": options.precision,
        "recompute": options.recompute,
        "strategy": options.strategy,
        "steps": options.steps,
        "warmup": options.warmup,
        "torch": torch.__version__,
        "flop_rule": FLOP_RULE,
    }
    write_files(folder, settings, records)
    print(f"\n{table_of(records)}\n\n{folder / 'study.json'} and study.csv have all numbers.")
    try:
        draw_scaling(records, folder / "study.png")
    except MissingExtraError as error:
        print(f"No picture: {error}")
