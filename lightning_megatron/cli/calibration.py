"""Calibration: all measurements of a chip and its links, written into a file for forecasts."""

from __future__ import annotations

import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lightning_megatron.cli.machine_speed import run_ranks
from lightning_megatron.forecast import measured_calls, measured_links
from lightning_megatron.forecast.measured_calls import CallTimes
from lightning_megatron.forecast.measured_layers import LayerTimes
from lightning_megatron.forecast.measured_links import LinkTimes
from lightning_megatron.groups.loopback import trial_group
from lightning_megatron.version import __version__

_CPU_RANKS = 2
#: Time after which the processes are killed (s).
_LIMIT = 900
#: What operators raise that a machine does not have.
_FAILURES = (RuntimeError, ImportError, ValueError, TypeError, AttributeError, AssertionError)


def calibrate(file: str, num_gpus: int, environment: Mapping[str, str]) -> str:
    """Measure this machine, and write a file of all times.

    Under torchrun all its ranks measure together. Otherwise new processes do, one for each GPU, or
    two on the cores of a machine without GPUs.

    Args:
        environment: Variables, in which torchrun numbers the ranks.

    Returns:
        Why nothing was measured; empty if it was.
    """
    path = str(Path(file).absolute())
    on_gpu = num_gpus > 0
    if "TORCHELASTIC_RUN_ID" in environment:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        place = RankPlace(*(int(environment[name]) for name in names))
        calibrate_rank(place, on_gpu, "env://", path)
        return ""
    size = num_gpus or _CPU_RANKS
    with tempfile.TemporaryDirectory() as folder:
        arguments = size, on_gpu, f"file://{folder}/store", path
        return run_ranks(_calibrate_local, size, arguments, _LIMIT)


def _calibrate_local(rank: int, size: int, on_gpu: bool, where: str, path: str) -> None:
    calibrate_rank(RankPlace(rank, size, rank, size), on_gpu, where, path)


@dataclass(frozen=True)
class RankPlace:
    """Rank of a process among all, with their number, and among those of its node."""

    rank: int
    size: int
    local_rank: int
    per_node: int


def calibrate_rank(place: RankPlace, on_gpu: bool, where: str, path: str) -> None:
    """Measure one device, and its links together with the other ranks; rank 0 writes the file.

    Communication: all ranks.

    Args:
        where: Method of the rendezvous.
    """
    device = torch.device("cuda", place.local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, torch.get_num_threads() // place.per_node))
    gpu = torch.cuda.get_device_name(device) if on_gpu else "cpu"
    record = Record(path if place.rank == 0 else None, {"gpu": gpu, "torch": torch.__version__})
    calls = measured_calls.ON_GPU if on_gpu else measured_calls.ON_CPU
    links = measured_links.ON_GPU if on_gpu else measured_links.ON_CPU
    record.take("calls", CallTimes(device, calls).parts())
    record.take("models", LayerTimes(device).parts())
    if place.size == 1:
        return
    with trial_group(place.rank, place.size, device, where, place.per_node) as groups:
        record.take("links", LinkTimes(device, links, groups).parts())


class Record:
    """File of measurements, which is written after each part.

    Args:
        path: File; None measures without a record.
        head: What was measured, and by which software.
    """

    def __init__(self, path: str | None, head: Mapping[str, str]) -> None:
        self._path = path
        self._content: dict[str, Any] = {"format": 1, **head, "program": __version__}
        self._content["failures"] = {}

    def take(self, title: str, parts: Mapping[str, Callable[[], Any]]) -> None:
        """Measure some parts; one that fails is named and left out."""
        times = self._content.setdefault(title, {})
        for name, measure in parts.items():
            start = time.perf_counter()
            result = "failed"
            try:
                times[name] = measure()
                result = "measured"
            except _FAILURES as error:
                symptom = f"{type(error).__name__}: {error}".splitlines()[0]
                self._content["failures"][f"{title}: {name}"] = symptom
                result = f"left out: {symptom}"
            gc.collect()
            if self._path is not None:
                seconds = time.perf_counter() - start
                print(f"{title}: {name}: {result} ({seconds:.1f} s)", file=sys.stderr, flush=True)
                text = json.dumps(self._content, separators=(",", ":"))
                Path(self._path).write_text(text, encoding="utf-8")
