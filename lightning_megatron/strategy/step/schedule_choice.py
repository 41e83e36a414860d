"""Choice of a pipeline schedule from the times that the first steps of a fit measure."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.pipeline.action_times import (
    ActionMedians,
    ActionTimes,
    MeasuredStages,
    gather_measurements,
    measure_transfer,
)
from lightning_megatron.pipeline.executor import PipelineExecutor
from lightning_megatron.plan.automatic_schedule import (
    Candidate,
    fastest,
    in_halves,
    simulate_named,
)
from lightning_megatron.plan.live_microbatches import peak_activations, stage_peaks
from lightning_megatron.plan.schedule import Schedule, ScheduleName, build_schedule

WARMUP_STEPS = 2
"""First steps, which allocate memory and compile kernels, and are not measured."""
MEASURED_STEPS = 3
"""Steps after them whose actions are measured."""
_USABLE_MEMORY_SHARE = 0.95
_GIB = 2**30


class ScheduleChoice:
    """Choice of the fastest named schedule that fits in memory, for ``schedule="auto"``.

    The first steps run a named schedule with every backward pass split into halves. Every rank then
    simulates the named schedules with the measured times and memory of all stages and the measured
    time of a transfer between stages, so that all ranks choose the same one. Without a known memory
    limit (on CPUs), a stage may keep nearly twice as much as under the first schedule.
    """

    def __init__(self, mesh: ParallelMesh, executor: PipelineExecutor, name: ScheduleName) -> None:
        self._mesh = mesh
        self._executor = executor
        self._name = name
        self._placement = mesh.layout.placement
        self._num_steps = 0
        self._times = ActionTimes(mesh.device)
        #: Measurements of the first steps; None before the choice.
        self.measured: MeasuredStages | None = None
        self._schedules: dict[int, Schedule] = {}
        executor.use_schedule(self._schedule)

    def end_step(self, num_microbatches: int) -> None:
        """Count a training step; after the last measured one, choose the schedule.

        Communication: after the last measured step, that of :func:`measure_transfer`, and one
            gather over the world on the CPU.
        """
        if self.measured is not None:
            return
        self._num_steps += 1
        if self._num_steps == WARMUP_STEPS:
            self._executor.times.append(self._times)
        elif self._num_steps == WARMUP_STEPS + MEASURED_STEPS:
            self._executor.times.remove(self._times)
            medians = self._times.medians(self._placement.num_chunks)
            free = self._free(medians, num_microbatches)
            transfer = measure_transfer(self._times.message_bytes, self._mesh)
            self.measured = gather_measurements(
                medians, self._mesh, self._placement, free, transfer
            )
            self._executor.use_schedule(self._schedule)

    def _schedule(self, num_microbatches: int, forward_only: bool) -> Schedule:
        base = self._base(num_microbatches, forward_only)
        if forward_only:
            return base
        if self.measured is None:
            return in_halves(base)
        if num_microbatches not in self._schedules:
            self._schedules[num_microbatches] = self._choose(self.measured, base)
        return self._schedules[num_microbatches]

    def _base(self, num_microbatches: int, forward_only: bool) -> Schedule:
        """Return the schedule that runs while times are measured."""
        return build_schedule(
            self._name,
            self._placement.num_stages,
            num_microbatches,
            self._placement.num_chunks,
            forward_only=forward_only,
        )

    def _choose(self, measured: MeasuredStages, base: Schedule) -> Schedule:
        # On CPUs the kept memory is unknown; all forward passes then count as equal.
        kept = [float(size) for size in measured.kept]
        if not any(kept):
            kept = [1.0] * len(kept)
        share = measured.weight_half_share
        own_peak = max(stage_peaks(base, base.placement.by_stage(kept), share))
        limit = own_peak * (2 - 1 / base.num_stages)
        if measured.free is not None:
            limit = max(float(measured.free), own_peak)
        # The base is one of the candidates and within the limit.
        candidates = simulate_named(
            self._placement, base.num_microbatches, measured.costs, kept, limit, share
        )
        is_known = measured.free is not None
        rank_zero_info(_described(candidates, limit, is_known, measured.costs.transfer))
        return fastest(candidates).timeline.schedule

    def _free(self, medians: Sequence[ActionMedians], num_microbatches: int) -> int | None:
        """Return the memory of this rank that is free for activations; None on a CPU (bytes)."""
        device = self._mesh.device
        if device.type != "cuda":
            return None
        kept = [float(chunk.kept) for chunk in medians]
        share = max(chunk.waiting for chunk in medians)
        schedule = in_halves(self._base(num_microbatches, False))
        used = peak_activations(schedule, self._mesh.pp.rank, kept, share)
        total = torch.cuda.get_device_properties(device).total_memory
        other_memory = torch.cuda.max_memory_allocated(device) - used
        return int(_USABLE_MEMORY_SHARE * total - other_memory)


def _described(candidates: Sequence[Candidate], limit: float, is_known: bool, transfer: int) -> str:
    """Return the log message about a choice, with times in milliseconds."""

    def described(candidate: Candidate) -> str:
        timeline = candidate.timeline
        text = f"{timeline.schedule.name} {timeline.length / 1e3:.1f} ms"
        if is_known:
            text += f" with {candidate.peak / _GIB:.1f} GiB"
        return text if candidate.fits else f"{text}, which does not fit"

    memory = ""
    if is_known:
        memory = f" Activations may take {limit / _GIB:.1f} GiB on each stage."
    simulated = "; ".join(map(described, candidates))
    chosen = fastest(candidates)
    timeline = chosen.timeline
    return (
        f"schedule='auto' chose {described(chosen)} for {timeline.schedule.num_microbatches} "
        f"microbatches, with {timeline.bubble:.1%} of the stages' time idle, from the times of "
        f"steps {WARMUP_STEPS + 1} to {WARMUP_STEPS + MEASURED_STEPS} and "
        f"{transfer / 1e3:.3g} ms for a transfer between stages. Simulated: {simulated}.{memory}"
    )
