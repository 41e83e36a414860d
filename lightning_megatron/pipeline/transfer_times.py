"""Measurement of the time of a transfer between two stages, with messages as large as in steps."""

from __future__ import annotations

import statistics

import torch
from torch import Tensor

from lightning_megatron.groups.collectives import all_gather_objects
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.p2p import start_transfers
from lightning_megatron.pipeline.device_clock import DeviceClock
from lightning_megatron.plan.placement import Placement

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
        mesh: The groups of this rank.

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
