"""The command ``scaling-study``: weak and strong scaling as in the paper on Megatron-LM."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from jsonargparse.typing import NonNegativeInt, PositiveInt

from lightning_megatron.errors import MissingExtraError, UnsupportedError
from lightning_megatron.extras import import_extra
from lightning_megatron.models.config import FLOP_RULE
from lightning_megatron.strategy.megatron_strategy import MegatronStrategy
from lightning_megatron.strict_json import parse_object
from lightning_megatron.tasks.scaling import (
    PAPER_REPLICAS,
    STUDIES,
    ScalingCase,
    ScalingJob,
    ScalingRow,
    Size,
    Study,
    cases_of,
    check_replicas,
    measure_job,
    records_of,
    table_of,
    write_files,
)

#: Studies of weak scaling: their words and colours in the picture.
_WEAK = {
    "model": ("model parallel", "#4477aa"),
    "model+data": ("model and data parallel", "#228833"),
}


def draw_scaling(records: Sequence[Mapping[str, Any]], picture: Path) -> None:
    """Draw weak scaling as bars, like figure 5 of the paper, and strong scaling as a line.

    Args:
        records: Records of the rows; rows without a result are left out.
        picture: File to write; its extension selects the format.
    """
    figures = import_extra("matplotlib.figure", "plot")
    figure = figures.Figure(figsize=(9, 3.8), layout="constrained")
    weak, strong = figure.subplots(1, 2)
    done = [record for record in records if record["efficiency"] is not None]
    bars = [(name, record) for name in _WEAK for record in done if record["study"] == name]
    for place, (name, record) in enumerate(bars):
        height = 100 * record["efficiency"]
        weak.bar(place, height, color=_WEAK[name][1])
        weak.text(place, height, f"{height:.0f} %", ha="center", va="bottom")
    weak.set_xticks(range(len(bars)), [str(record["devices"]) for _, record in bars])
    weak.set_xlabel("devices: " + ", then ".join(words for words, _ in _WEAK.values()))
    weak.set_ylabel("efficiency of weak scaling (%)")
    points = [record for record in done if record["study"] == "strong"]
    devices = [record["devices"] for record in points]
    strong.plot(devices, [record["speedup"] for record in points], "o-", color="#4477aa")
    strong.plot(devices, devices, ":", color="#616e7c", label="linear")
    strong.set_xlabel("devices")
    strong.set_ylabel("speed-up of strong scaling")
    strong.legend(frameon=False)
    figure.savefig(picture, dpi=150)


EXAMPLES = """examples:
  lightning-megatron scaling-study --output scaling
  lightning-megatron scaling-study --size tiny --devices 2 --studies model strong --output tiny"""

#: Options of the strategy that a study sets itself.
_SET_BY_STUDY = {"tp", "recompute"}


@dataclass(frozen=True)
class StudyOptions:
    """Size, devices and training of a scaling study.

    Args:
        size: small divides widths by 2 and layers by 4; tiny, for CPUs, by 16 and 20.
        devices: Maximum number of GPUs or CPU processes; by default all GPUs, or 2 processes.
        replicas: Replicas in the study model+data; by default devices / 8, from 2 to 64 as
            published.
        batch_size: Samples of a replica per step.
        steps: Measured steps.
        warmup: Steps before the measured ones.
        precision: Precision of the Trainer; by default bf16-mixed, on CPUs 32-true.
        recompute: Activations that are recomputed; full as published.
        timeout: Seconds after which a job is ended.
    """

    size: Size = "paper"
    devices: PositiveInt | None = None
    replicas: NonNegativeInt | None = None
    batch_size: PositiveInt = 8
    steps: PositiveInt = 20
    warmup: PositiveInt = 5
    precision: str | None = None
    recompute: Literal["selective", "full"] | None = None
    timeout: PositiveInt = 1800

    @property
    def num_devices(self) -> int:
        """Number of devices that the study may use."""
        return self.devices or (torch.cuda.device_count() if torch.cuda.is_available() else 2)

    @property
    def used_precision(self) -> str:
        """Precision in which the models are trained."""
        return self.precision or ("bf16-mixed" if torch.cuda.is_available() else "32-true")


def scaling_study(
    options: StudyOptions,
    output: Path = Path("runs/scaling"),
    studies: tuple[Study, ...] = (),
    strategy: str = "{}",
) -> None:
    """Train the models of the paper on Megatron-LM (tables 1, 7, 8 and figure 5), each alone.

    It compares tokens/s and TFLOP/s. One node; a model that fails is a row with the reason.

    Args:
        output: Folder of study.json, .csv and .png.
        studies: Studies to run; by default all.
        strategy: Further options of MegatronStrategy as JSON, such as
            {"cuda_graphs": "segments"}.
    """
    # A replica of the largest model needs eight GPUs.
    replicas = options.replicas
    if replicas is None:
        replicas = min(PAPER_REPLICAS, max(2, options.num_devices // 8))
    check_replicas(replicas)
    settings = strategy_options(strategy)
    (output / "logs").mkdir(parents=True, exist_ok=True)
    print(f"TFLOP/s: {FLOP_RULE}", flush=True)
    ran: dict[ScalingCase, dict[str, Any]] = {}
    rows = []
    for study in studies or STUDIES:
        for case in cases_of(study, options.size, replicas, options.batch_size):
            # A configuration that several studies share runs once.
            if case not in ran:
                ran[case] = _run(case, options, settings, output / "logs")
            measured: Any = ran[case]
            names = ("seconds_per_step", "peak_gib", "loss", "failure")
            rows.append(ScalingRow(study, case, **{name: measured.get(name) for name in names}))
    _report(rows, ran, options, settings, output)


COMMAND = scaling_study


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


def _run(
    case: ScalingCase, options: StudyOptions, strategy: dict[str, Any], logs: Path
) -> dict[str, Any]:
    """Run a configuration as a separate job; return its result or the reason for its failure."""
    if case.devices > options.num_devices:
        return {"failure": f"needs {case.devices} devices: there are {options.num_devices}"}
    result = logs / f"{case.label}.json"
    strategy = {**strategy, "tp": case.tp, "recompute": options.recompute}
    precision = options.used_precision
    job = ScalingJob(case, str(result), options.steps, options.warmup, precision, strategy)
    measured = measure_job(job.command, logs / f"{case.label}.txt", result, options.timeout)
    outcome = measured["failure"] or f"{measured['seconds_per_step']:.4g} s a step"
    print(f"{case.label}: {outcome}", file=sys.stderr, flush=True)
    return measured


def _report(
    rows: Sequence[ScalingRow],
    ran: dict[ScalingCase, dict[str, Any]],
    options: StudyOptions,
    strategy: dict[str, Any],
    folder: Path,
) -> None:
    records = records_of(rows)
    device = next((result["device"] for result in ran.values() if "device" in result), None)
    settings = {
        **asdict(options),
        "devices": options.num_devices,
        "precision": options.used_precision,
        "device": device,
        "strategy": strategy,
        "torch": torch.__version__,
        "flop_rule": FLOP_RULE,
    }
    write_files(folder, settings, records)
    print(f"\n{table_of(records)}\n\n{folder / 'study.json'} and study.csv have all numbers.")
    try:
        draw_scaling(records, folder / "study.png")
    except MissingExtraError as error:
        print(f"No picture: {error}")
