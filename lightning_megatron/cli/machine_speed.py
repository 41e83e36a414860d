"""Measured speeds of a machine: products, copies, links between GPUs and an all-reduce, each in one
process for each GPU; on a machine without GPUs, in two processes on its cores.
"""

from __future__ import annotations

import pickle
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any

import torch
from torch import multiprocessing
from torch.multiprocessing.spawn import ProcessException

from lightning_megatron.cli.machine import Gpu
from lightning_megatron.groups.loopback import Timer, all_reduce_speed
from lightning_megatron.plan.chips import Chip, NormalShare, known_chip, link_speed

_CPU_RANKS = 2


@dataclass(frozen=True)
class MeasuredSizes:
    """Sizes of what is measured, and how often.

    Args:
        dtype: Type of the products.
        width: Rows and columns of the matrices.
        num_bytes: Size of the copied and summed tensors (bytes).
        calls: Measured calls of each.
    """

    dtype: torch.dtype
    width: int
    num_bytes: int
    calls: int


_ON_GPU = MeasuredSizes(torch.bfloat16, width=8192, num_bytes=1 << 29, calls=40)
_ON_CPU = MeasuredSizes(torch.float32, width=512, num_bytes=1 << 24, calls=5)


@dataclass(frozen=True)
class DeviceSpeed:
    """Speeds of one device.

    Args:
        products: Products of matrices: bfloat16 on GPUs, float32 on CPUs (FLOP/s).
        copies: Copies in its memory, reads and writes (bytes/s).
        repeats: Whether the same product had the same bits twice.
    """

    products: float
    copies: float
    repeats: bool


@dataclass(frozen=True)
class PairSpeed:
    """Speed of copies from one GPU to another (bytes/s), and whether the data arrived unchanged."""

    source: int
    target: int
    speed: float
    is_right: bool


@dataclass(frozen=True)
class MachineSpeed:
    """All measured speeds of a machine.

    Args:
        devices: Speeds of each GPU, or of each process on CPUs; empty after a failure.
        pairs: Speeds of ordered pairs of GPUs.
        all_reduce: All-reduce over all devices, counted as NCCL's tests do (bytes/s); None for one.
        sums_are_right: Whether its sums were right.
        failure: Why nothing was measured; empty if it was.
    """

    devices: tuple[DeviceSpeed, ...] = ()
    pairs: tuple[PairSpeed, ...] = ()
    all_reduce: float | None = None
    sums_are_right: bool = True
    failure: str = ""


@dataclass(frozen=True)
class SpeedRow:
    """A measured speed beside what is known of it.

    Args:
        unit: Unit of the three speeds.
        normal: Least speed of a machine in order; None if it is not known.
        published: Figure of the data sheet; None if it is not known.
    """

    name: str
    speed: float
    unit: str
    published: float | None
    normal: float | None

    @property
    def is_slow(self) -> bool:
        """Return whether a machine in order would be faster."""
        return self.normal is not None and self.speed < self.normal


def measure_machine(num_gpus: int, limit: float) -> MachineSpeed:
    """Measure this machine in new processes.

    Args:
        num_gpus: GPUs to measure, the first ones; 0 measures processes on CPUs.
        limit: Time after which the processes are killed (s).
    """
    size = num_gpus or _CPU_RANKS
    with tempfile.TemporaryDirectory() as folder:
        failure = run_ranks(measure_rank, size, (size, num_gpus > 0, folder), limit)
        if failure:
            return MachineSpeed(failure=failure)
        results = [pickle.loads(_result(folder, rank).read_bytes()) for rank in range(size)]
    devices, (pairs, *_), (all_reduce, *_), are_right = zip(*results, strict=True)
    return MachineSpeed(devices, pairs, all_reduce, all(are_right))


def run_ranks(
    function: Callable[..., object], size: int, arguments: Sequence[Any], limit: float
) -> str:
    """Call ``function(rank, *arguments)`` in new processes; return why it failed, or nothing.

    Args:
        limit: Time after which the processes are killed (s).
    """
    end = time.monotonic() + limit
    ranks = multiprocessing.start_processes(
        function, tuple(arguments), size, join=False, daemon=True, start_method="spawn"
    )
    try:
        while not ranks.join(max(0.0, end - time.monotonic())):
            if time.monotonic() >= end:
                return f"it did not end within {limit:.0f} seconds"
    except ProcessException as error:
        return str(error).strip().splitlines()[-1]
    finally:
        for process in ranks.processes:
            process.kill()
    return ""


def measure_rank(rank: int, size: int, on_gpu: bool, folder: str) -> None:
    """Measure one device and, with the other ranks, the links; write a file of the results.

    Communication: all ranks.
    """
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    sizes = _ON_GPU if on_gpu else _ON_CPU
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, torch.get_num_threads() // size))
    timer = partial(_seconds_of_call, calls=sizes.calls)
    speed = _device_speed(device, sizes, timer)
    all_reduce = None
    is_right = True
    if size > 1:
        store = Path(folder) / "store"
        all_reduce, is_right = all_reduce_speed(rank, size, device, store, sizes.num_bytes, timer)
    # One process copies between all GPUs, when the others are done. Eight have 56 pairs, which may
    # be joined by the host alone: the copies are smaller.
    gpus = [torch.device("cuda", index) for index in range(size)]
    pairs = pair_speeds(gpus, sizes.num_bytes // 8, timer) if on_gpu and rank == 0 else ()
    _result(folder, rank).write_bytes(pickle.dumps((speed, pairs, all_reduce, is_right)))


def pair_speeds(
    devices: Sequence[torch.device], num_bytes: int, timer: Timer
) -> tuple[PairSpeed, ...]:
    """Copy a tensor of so many bytes between all ordered pairs of devices."""
    content = torch.arange(num_bytes // 4, dtype=torch.int32)
    pairs = []
    for source, target in permutations(range(len(devices)), 2):
        sent = content.to(devices[source])
        # Memory that was freed may hold an earlier copy.
        copy = torch.zeros_like(sent, device=devices[target])
        seconds = timer(partial(copy.copy_, sent))
        is_right = torch.equal(copy.cpu(), content)
        pairs.append(PairSpeed(source, target, num_bytes / seconds, is_right))
    return tuple(pairs)


def speed_rows(gpus: Sequence[Gpu], speed: MachineSpeed) -> list[SpeedRow]:
    """Return all speeds beside published ones, of pairs the slowest from each GPU.

    Args:
        gpus: The measured GPUs; none for processes on CPUs.
    """
    share = NormalShare()
    rows = []
    chips = [known_chip(gpu.name) for gpu in gpus] or [None] * len(speed.devices)
    for index, (one, chip) in enumerate(zip(speed.devices, chips, strict=False)):
        name, kind = ("GPU", "bfloat16") if gpus else ("CPU process", "float32")
        name = f"{name} {index}:"
        usual = chip or Chip(0, 0, 0)
        rows += [
            _row(f"{name} {kind} products", one.products, "FLOP/s", usual.products, share.products),
            _row(f"{name} copies", one.copies, "B/s", usual.memory, share.copies),
        ]
    for index, gpu in enumerate(gpus):
        own = [pair for pair in speed.pairs if pair.source == index]
        if own:
            slowest = min(own, key=lambda pair: pair.speed)
            link = gpu.links[slowest.target] if gpu.links else ""
            name = f"GPU {index} to GPU {slowest.target}: copies"
            rows.append(_row(name, slowest.speed, "B/s", link_speed(link), share.pairs))
    if speed.all_reduce:
        links = [link_speed(link) for gpu in gpus for link in gpu.links if link != "X"]
        # Between other links than NVLinks nothing is known.
        linked = chips[0].links if chips[0] and links and all(links) else 0
        name = "all ranks: all-reduce"
        rows.append(_row(name, speed.all_reduce, "B/s", linked, share.all_reduce))
    return rows


def _row(name: str, speed: float, unit: str, published: float, share: float) -> SpeedRow:
    return SpeedRow(name, speed, unit, published or None, share * published or None)


def _result(folder: str, rank: int) -> Path:
    return Path(folder) / f"{rank}.json"


def _device_speed(device: torch.device, sizes: MeasuredSizes, timer: Timer) -> DeviceSpeed:
    # Random: products of equal numbers draw less power, and are faster.
    left, right = torch.randn(2, sizes.width, sizes.width, device=device).to(sizes.dtype)
    repeats = torch.equal(left @ right, left @ right)
    products = 2 * sizes.width**3 / timer(lambda: left @ right)
    source = torch.zeros(sizes.num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copies = 2 * sizes.num_bytes / timer(lambda: target.copy_(source))
    return DeviceSpeed(products, copies, repeats)


def _seconds_of_call(function: Callable[[], object], calls: int) -> float:
    """Return the mean time of a call (s), after some that warm up."""
    for _ in range(calls // 4 + 1):
        function()
    _wait()
    start = time.perf_counter()
    for _ in range(calls):
        function()
    _wait()
    return (time.perf_counter() - start) / calls


def _wait() -> None:
    for index in range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0):
        torch.cuda.synchronize(index)
