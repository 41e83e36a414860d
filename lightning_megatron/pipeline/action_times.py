"""Times and activation memory of the actions on a stage, measured in training steps."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from lightning_megatron.groups.collectives import all_gather_objects
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.pipeline.device_clock import DeviceClock
from lightning_megatron.plan.actions import Action, Kind
from lightning_megatron.plan.placement import Placement
from lightning_megatron.plan.stage_costs import StageCosts

_TICKS_PER_SECOND = 1_000_000


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
        if not all(self.kept):
            return costs
        return {
            **costs,
            "kept": list(self.kept),
            "weight_half_share": self.weight_half_share,
        }


class ActionTimes:
    """Recorder of the actions of this stage.

    Times on a GPU are those of the compute stream, and recording does not make the host wait. Call
    :meth:`measure` only after the stream waits for the tensors that the action receives; otherwise
    the time of the action includes the wait.

    Args:
        device: Device of this rank.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._clock = DeviceClock(device)
        self._origin = self._clock.mark()
        self._records: list[tuple[Action, Any, Any, int]] = []
        self._messages: list[int] = []

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
        kinds: tuple[Kind, ...] = ("F", "I", "W")
        for kind in kinds:
            indices = [
                index
                for index, (action, *_) in enumerate(spans)
                if (action.kind, action.chunk) == (kind, chunk)
            ]
            seconds[kind] = statistics.median(
                spans[index][2] - spans[index][1] for index in indices
            )
            growth[kind] = statistics.median(self._records[index][3] for index in indices)
        kept = max(int(growth["F"]), 0)
        waiting = 0.0
        if kept:
            waiting = min(max(-growth["W"] / kept, 0.0), 1.0)
        return ActionMedians(seconds, kept, waiting)

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated(self._device) if self._device.type == "cuda" else 0


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
        mesh: The groups of this rank.
        placement: Placement of the virtual stages.
        free: Memory of this rank for kept activations; None if unknown (bytes).
        transfer: Time of a transfer between this stage and its neighbours (seconds).

    Communication: one gather over the world, on the CPU.
    """
    measured = (mesh.pp.rank, tuple(medians), free, transfer)
    ranks = all_gather_objects(measured, mesh.world_cpu)
    kinds: tuple[Kind, ...] = ("F", "I", "W")
    ticks: dict[Kind, list[int]] = {kind: [] for kind in kinds}
    kept = []
    for virtual in range(placement.num_virtual_stages):
        stage, chunk = placement.owner(virtual)
        replicas = [chunks[chunk] for rank, chunks, *_ in ranks if rank == stage]
        for kind in kinds:
            slowest = max(replica.seconds[kind] for replica in replicas)
            ticks[kind].append(max(round(slowest * _TICKS_PER_SECOND), 1))
        kept.append(max(replica.kept for replica in replicas))
    shares = [chunk_medians.waiting for _, chunks, *_ in ranks for chunk_medians in chunks]
    limits = [limit for _, _, limit, _ in ranks if limit is not None]
    slowest = round(max(seconds for *_, seconds in ranks) * _TICKS_PER_SECOND)
    costs = StageCosts(tuple(ticks["F"]), tuple(ticks["I"]), tuple(ticks["W"]), slowest)
    return MeasuredStages(costs, tuple(kept), max(shares), min(limits, default=None))
