"""The command ``doctor``: what this machine has, what it reaches, and what to fix."""

from __future__ import annotations

import json as json_format
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict

import torch
from jsonargparse.typing import PositiveInt

from lightning_megatron.cli.calibration import calibrate as measure_for_forecasts
from lightning_megatron.cli.machine import Gpu, Machine, read_machine
from lightning_megatron.cli.machine_problems import (
    Problem,
    problems_of,
    problems_of_speed,
    size_text,
)
from lightning_megatron.cli.machine_speed import (
    MachineSpeed,
    SpeedRow,
    measure_machine,
    speed_rows,
)
from lightning_megatron.plan.columns import align_columns
from lightning_megatron.version import __version__

EXAMPLES = """examples:
  lightning-megatron doctor
  lightning-megatron doctor --measure             speeds of GPUs and links, too
  lightning-megatron doctor --measure --json      for programs
  lightning-megatron doctor --calibrate FILE      times of operators, for forecasts"""
#: Exit status if something must be fixed.
_MUST_FIX = 1


def doctor(
    measure: bool = False,
    limit: PositiveInt = 60,
    json: bool = False,
    calibrate: str | None = None,
) -> None:
    """Check this machine: packages, GPUs, links, kernels, memory, folders, network, variables.

    What to fix comes last, with a remedy. The exit status is 1 if something must be fixed, and 0 if
    jobs run, perhaps slower than they could. Run it on every kind of host that a job uses.

    Args:
        measure: Measure GPUs and their links, or the cores of a machine without GPUs. Running jobs
            disturb the figures, and are slowed down.
        limit: Longest time of the measurement (seconds).
        json: Print one JSON object for programs, with speeds in FLOP/s and bytes/s.
        calibrate: Check nothing, but measure operators, layers and collectives of this machine
            for forecasts of step times, and write them to this file. It takes some minutes; under
            torchrun all ranks measure together, which several nodes need.
    """
    if calibrate is not None:
        failure = measure_for_forecasts(calibrate, torch.cuda.device_count(), os.environ)
        sys.exit(f"nothing was measured, or not all: {failure}" if failure else 0)
    machine = read_machine(os.environ)
    problems = problems_of(machine)
    speed = None
    if measure:
        print(f"measuring, for at most {limit} seconds", file=sys.stderr)
        speed = measure_machine(len(machine.gpus), limit)
        problems += problems_of_speed(machine.gpus, speed)
    problems.sort(key=lambda one: one.severity)
    if json:
        content = {
            "version": __version__,
            "machine": asdict(machine),
            "speed": speed and asdict(speed),
            "problems": [asdict(problem) for problem in problems],
        }
        print(json_format.dumps(content, indent=2, default=str))
    else:
        print("\n".join(report(machine, speed, problems)))
    if any(problem.severity == "must" for problem in problems):
        sys.exit(_MUST_FIX)


COMMAND = doctor


def report(
    machine: Machine, speed: MachineSpeed | None, problems: Sequence[Problem]
) -> Iterator[str]:
    """Yield the report's lines."""
    yield f"lightning-megatron {__version__}, Python {machine.python}, {machine.system}"
    kernels = {"fused": machine.fused} | dict(machine.kernels if machine.gpus else {})
    folders = [
        (str(one.path), use, "writable" if one.is_writable else "read-only", size_text(one.free))
        for use, one in machine.folders.items()
    ]
    sections = {
        "packages": _packages(machine),
        "GPUs": _gpus(machine),
        "kernels": _two_columns(kernels),
        "host": _two_columns(_host(machine)),
        "folders": _table([("", "use", "", "free"), *folders]),
        "variables": _two_columns(machine.variables) or ["none that matter"],
    }
    if speed is not None:
        sections["measured"] = _speeds(speed_rows(machine.gpus, speed)) or [speed.failure]
    lines = [f"{one.severity:<8}{one.symptom}. Remedy: {one.remedy}" for one in problems]
    for title, texts in (sections | {"to fix": lines or ["nothing"]}).items():
        yield f"\n{title}"
        yield from (f"  {text}".rstrip() for text in texts)
    if speed is None:
        yield "\nSpeeds of GPUs and links: lightning-megatron doctor --measure"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    return align_columns(rows).split("\n")


def _two_columns(texts: Mapping[str, str]) -> list[str]:
    width = max(map(len, texts), default=0)
    return [f"{name:<{width}}  {text}" for name, text in texts.items()]


def _packages(machine: Machine) -> list[str]:
    found = [(p.name, p.version, p.needed, p.extra) for p in machine.packages if p.version]
    missing = [f"{p.name} ({p.extra or 'needed'})" for p in machine.packages if not p.version]
    rows = [("", "installed", "needed", "extra"), *found]
    return [*_table(rows), f"not installed: {', '.join(missing) or 'none'}"]


def _gpus(machine: Machine) -> list[str]:
    cuda = machine.cuda
    software = {"torch's CUDA": cuda.version, "driver": cuda.driver, "NCCL": cuda.nccl}
    lines = [", ".join(f"{name} {version or 'none'}" for name, version in software.items())]
    if not machine.gpus:
        use = "Trainer(accelerator='cpu', devices=2)"
        return [*lines, f"torch sees no GPU: jobs train on CPUs, {use}"]
    numbers = [f"to {index}" for index in range(len(machine.gpus))]
    rows = [["", "compute", "memory", "used", "power", "PCIe", *numbers]]
    for index, gpu in enumerate(machine.gpus):
        state = gpu.state
        used = None if state.used is None else state.used / 1024
        rows.append(
            [
                f"{index} {gpu.name}",
                ".".join(map(str, gpu.capability)),
                size_text(gpu.memory),
                _known(used, "{:.1f} GiB"),
                _known(state.power, "{:.0f} W"),
                _known(state.lanes, "x{:.0f}"),
                *_links(index, gpu),
            ]
        )
    return [*lines, *_table(rows)]


def _known(value: float | None, form: str) -> str:
    return "?" if value is None else form.format(value)


def _links(index: int, gpu: Gpu) -> list[str]:
    names = gpu.links or ("access",) * len(gpu.reaches)
    texts = [
        name if is_reached else f"{name}, no access"
        for name, is_reached in zip(names, gpu.reaches, strict=True)
    ]
    texts[index] = "-"
    return texts


def _host(machine: Machine) -> dict[str, str]:
    host = machine.host
    return {
        "cores": str(host.cores),
        "memory": size_text(host.memory),
        "/dev/shm": f"{size_text(host.shared)}, {size_text(host.shared_free)} free",
        "open files": _limit(str(host.open_files)),
        "locked memory": _limit(size_text(host.locked_memory)),
        "interfaces": ", ".join(host.interfaces),
        "InfiniBand": ", ".join(map(" ".join, host.fabric.items())) or "none",
        "gloo": machine.gloo_error or "two ranks of this machine communicate",
    }


def _limit(text: str) -> str:
    return "unlimited" if text.startswith("-") else text


def _speeds(rows: Sequence[SpeedRow]) -> list[str]:
    if not rows:
        return []
    cells = [["", "measured", "normal from", "data sheet"]]
    for row in rows:
        speeds = (row.speed, row.normal, row.published)
        texts = ["?" if one is None else _scaled(one, row.unit) for one in speeds]
        cells.append([row.name, *texts])
    return _table(cells)


def _scaled(speed: float, unit: str) -> str:
    if speed < 1e12:
        return f"{speed / 1e9:.0f} G{unit}"
    return f"{speed / 1e12:.{0 if speed >= 1e14 else 2}f} T{unit}"
