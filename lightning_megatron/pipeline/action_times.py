"""Times of the actions and transfers of a stage, and activation memory, as measured in steps."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.groups.collectives import all_gather_objects
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.pending import start_transfers
from lightning_megatron.plan.actions import Action, Kind
from lightning_megatron.plan.placement import Placement
from lightning_megatron.plan.simulate import StageCosts


class DeviceClock:
    """Clock that marks moments on a device.

    A mark on a GPU is an event of the current stream; on a CPU it is the time itself.

    Args:
        device: Device whose work is timed.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> Any:
        """Return a mark of the moment when the device reaches this point."""
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def finish(self) -> None:
        """Wait until the device has reached all marks."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def seconds(self, start: Any, stop: Any) -> float:
        """Return the time between two marks that the device has reached (seconds)."""
        if self._device.type != "cuda":
            return float(stop - start)
        return float(start.elapsed_time(stop)) / 1e3


_TICKS_PER_SECOND = 1_000_000
_KINDS: tuple[Kind, ...] = ("F", "I", "W")


@dataclass(frozen=True)
class ActionMedians:
    """Medians of one chunk over all microbatches of the measured steps.

    Args:
        seconds: Time of a forward pass (F), an input half (I) and a weight half (W) (seconds).
        kept: Memory that a forward pass leaves allocated for the backward pass (bytes).
        waiting: Part of ``kept`` that stays allocated from the input half to the weight half
            (bytes).
    """

    seconds: dict[Kind, float]
    kept: int
    waiting: float


@dataclass(frozen=True)
class MeasuredStages:
    """Measurements of all virtual stages, equal on all ranks.

    Args:
        costs: Times in microseconds: those of the slowest rank of each stage, and of the slowest
            transfer between two stages.
        kept: Memory that a forward pass leaves allocated, for each virtual stage (bytes).
        weight_half_share: Largest fraction of ``kept`` that stays allocated from the input half to
            the weight half.
        free: Memory for kept activations on the rank that has the least; None if unknown (bytes).
    """

    costs: StageCosts
    kept: tuple[int, ...]
    weight_half_share: float
    free: int | None

    def as_dict(self) -> dict[str, Any]:
        """Return the content of a costs file for ``lightning-megatron schedule --costs``."""
        costs: dict[str, Any] = {
            "forward": list(self.costs.forward),
            "input_half": list(self.costs.input_half),
            "weight_half": list(self.costs.weight_half),
            "transfer": self.costs.transfer,
        }
        # A costs file needs positive sizes, which are unknown on CPUs.
        if all(self.kept):
            costs |= {"kept": list(self.kept), "weight_half_share": self.weight_half_share}
        return costs


class ActionTimes:
    """Recorder of the actions of this stage.

    Times on a GPU are those of the compute stream, and recording does not make the host wait. Call
    :meth:`measure` only after the stream waits for the tensors that the action receives; otherwise
    the time of the action includes the wait.

    Args:
        device: Device of the stage.
        measures_memory: Whether to record the growth of memory, too, which takes the host longer.
    """

    def __init__(self, device: torch.device, measures_memory: bool = True) -> None:
        self._device = device
        self._measures_memory = measures_memory and device.type == "cuda"
        self._clock = DeviceClock(device)
        self._origin = self._clock.mark()
        self._begun: Any = None
        self._records: list[tuple[Action, Any, Any, int]] = []
        self._messages: list[int] = []

    def begin_run(self) -> None:
        """Mark the beginning of a run of a schedule, before it waits for tensors."""
        if self._begun is None:
            self._begun = self._clock.mark()

    @contextmanager
    def measure(self, action: Action) -> Iterator[None]:
        """Record the time and the growth of allocated memory of the block."""
        before = self._allocated()
        start = self._clock.mark()
        yield
        self._records.append((action, start, self._clock.mark(), self._allocated() - before))

    def record_message(self, num_bytes: int) -> None:
        """Record the size of the tensors that this stage receives for a microbatch (bytes)."""
        self._messages.append(num_bytes)

    @property
    def message_bytes(self) -> int:
        """Return the median of the recorded sizes; 0 without any (bytes)."""
        return int(statistics.median(self._messages)) if self._messages else 0

    def spans(self) -> list[tuple[Action, float, float]]:
        """Return the start and end of all actions, in seconds since the recorder was created.

        The host waits for the device.
        """
        self._clock.finish()
        since = self._clock.seconds
        return [
            (action, since(self._origin, start), since(self._origin, stop))
            for action, start, stop, _ in self._records
        ]

    def length_and_busy(self) -> tuple[float, float]:
        """Return the time from the first run's beginning to the last action's end, and that of all
        actions in it; 0 without actions. The host waits for the device (seconds).
        """
        if not self._records:
            return 0.0, 0.0
        spans = self.spans()
        begin = self._clock.seconds(self._origin, self._begun)
        return spans[-1][2] - begin, sum(stop - start for _, start, stop in spans)

    def medians(self, num_chunks: int) -> tuple[ActionMedians, ...]:
        """Return the medians of every chunk, after a wait for the device.

        Args:
            num_chunks: Chunks of this stage.

        Raises:
            StatisticsError: If a forward pass or a half of a backward pass was not recorded for a
                chunk.
        """
        spans = self.spans()
        return tuple(self._medians_of(chunk, spans) for chunk in range(num_chunks))

    def _medians_of(
        self, chunk: int, spans: Sequence[tuple[Action, float, float]]
    ) -> ActionMedians:
        seconds: dict[Kind, float] = {}
        growth: dict[Kind, float] = {}
        for kind in _KINDS:
            chosen = [
                (stop - start, record[3])
                for (action, start, stop), record in zip(spans, self._records, strict=True)
                if (action.kind, action.chunk) == (kind, chunk)
            ]
            seconds[kind] = statistics.median(duration for duration, _ in chosen)
            growth[kind] = statistics.median(grown for _, grown in chosen)
        kept = max(int(growth["F"]), 0)
        waiting = 0.0
        if kept:
            waiting = min(max(-growth["W"] / kept, 0.0), 1.0)
        return ActionMedians(seconds, kept, waiting)

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated(self._device) if self._measures_memory else 0


def gather_measurements(
    medians: Sequence[ActionMedians],
    mesh: ParallelMesh,
    placement: Placement,
    free: int | None,
    transfer: float = 0.0,
) -> MeasuredStages:
    """Gather the measurements of all ranks.

    Args:
        medians: Medians of this rank's chunks.
        placement: Placement of the virtual stages.
        free: Memory of this rank for kept activations; None if unknown (bytes).
        transfer: Time of a transfer between this stage and its neighbours (seconds).

    Communication: one gather over the world, on the CPU.
    """
    measured = (mesh.pp.rank, tuple(medians), free, transfer)
    ranks = all_gather_objects(measured, mesh.world_cpu)
    ticks: dict[Kind, list[int]] = {kind: [] for kind in _KINDS}
    kept = []
    for virtual in range(placement.num_virtual_stages):
        stage, chunk = placement.owner(virtual)
        replicas = [chunks[chunk] for rank, chunks, *_ in ranks if rank == stage]
        for kind in _KINDS:
            slowest = max(replica.seconds[kind] for replica in replicas)
            ticks[kind].append(max(round(slowest * _TICKS_PER_SECOND), 1))
        kept.append(max(replica.kept for replica in replicas))
    shares = [chunk_medians.waiting for _, chunks, *_ in ranks for chunk_medians in chunks]
    limits = [limit for _, _, limit, _ in ranks if limit is not None]
    slowest = round(max(seconds for *_, seconds in ranks) * _TICKS_PER_SECOND)
    costs = StageCosts(tuple(ticks["F"]), tuple(ticks["I"]), tuple(ticks["W"]), slowest)
    return MeasuredStages(costs, tuple(kept), max(shares), min(limits, default=None))


_WARMUP_ROUNDS = 2
"""First round trips, which wait for the other stage and open connections."""
_ROUNDS = 7
"""Round trips after them, which are measured."""


def measure_transfer(num_bytes: int, mesh: ParallelMesh) -> float:
    """Measure how long a message takes from a stage to the next one.

    One stage of each pair of neighbours sends a message, and the other one returns it at once. The
    time of a message is half of that of a round trip, so the clocks of two stages are not compared.

    Args:
        num_bytes: Size of this stage's messages; the measurement uses the largest size of all
            stages (bytes).

    Returns:
        The median time of a message of the slowest pair in which this rank sends first; 0 if there
        is none (seconds).

    Communication: one gather over pp on the CPU, and nine round trips of a message between all
    neighbours on pp.
    """
    largest = max(all_gather_objects(num_bytes, mesh.pp_cpu))
    message = torch.zeros(largest, dtype=torch.uint8, device=mesh.device)
    slowest = 0.0
    for begins, answers in neighbours(mesh.layout.placement):
        if mesh.pp.rank == begins:
            slowest = max(slowest, _round_trip(message, answers, mesh) / 2)
        elif mesh.pp.rank == answers:
            for _ in range(_WARMUP_ROUNDS + _ROUNDS):
                start_transfers([], [(message, begins)], mesh.pp).wait()
                start_transfers([(message, begins)], [], mesh.pp).wait()
    return slowest


def neighbours(placement: Placement) -> list[tuple[int, int]]:
    """List the pairs of stages between which microbatches pass, each once.

    If every stage processes its pairs in this order, pairs without a common stage run at the same
    time.

    Args:
        placement: Placement of the virtual stages.
    """
    owners = [placement.owner(virtual)[0] for virtual in range(placement.num_virtual_stages)]
    pairs = {
        (min(pair), max(pair)) for pair in zip(owners, owners[1:], strict=False) if len({*pair}) > 1
    }
    return sorted(pairs, key=lambda pair: (pair[0] % 2, pair))


def _round_trip(message: Tensor, peer: int, mesh: ParallelMesh) -> float:
    """Return the median time in which a message goes to a peer and back (seconds)."""
    clock = DeviceClock(mesh.device)
    marks = []
    for _ in range(_WARMUP_ROUNDS + _ROUNDS):
        start = clock.mark()
        start_transfers([(message, peer)], [], mesh.pp).wait()
        start_transfers([], [(message, peer)], mesh.pp).wait()
        marks.append((start, clock.mark()))
    clock.finish()
    return statistics.median(clock.seconds(*pair) for pair in marks[_WARMUP_ROUNDS:])
