"""Table of estimated and measured memory for every pipeline stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.graphs.cuda import private_pools
from lightning_megatron.groups.collectives import merge_objects
from lightning_megatron.plan.budget import GIB, StageMemory
from lightning_megatron.plan.columns import align_columns
from lightning_megatron.plan.settings import Count, coerced_arguments
from lightning_megatron.strategy.megatron_strategy import MegatronStrategy
from lightning_megatron.strategy.memory_estimate import (
    STATIC_PARTS,
    estimate_of,
    graph_settings,
    held_bytes,
)

_PER_STEP = ("activations", "workspace", "communication", "shared", "libraries")


@dataclass(frozen=True)
class StageReport:
    """Estimated and measured memory of one pipeline stage.

    Args:
        stage: Index on the pp axis.
        estimate: Estimate by part; static parts only if the module's step cannot be traced.
        held: Maximum over ranks of measured static memory, by part: ``parameters``, ``gradients``,
            ``main_parameters`` (main parameters) and ``optimizer`` (bytes).
        peak: Maximum over ranks of the allocator's peak, pools of CUDA graphs included (bytes);
            None on CPU.
        graphs: Maximum over ranks of the pools of CUDA graphs (bytes); None without graphs or on
            CPU.
        reason: Why the step has no estimate, or nothing.
    """

    stage: int
    estimate: StageMemory
    held: dict[str, int]
    peak: int | None
    graphs: int | None = None
    reason: str = ""

    @property
    def ratio(self) -> float | None:
        """Return the estimated peak over the measured one."""
        if self.peak is None or not self.estimate.activations:
            return None
        return self.estimate.peak / self.peak

    @property
    def bytes_per_parameter(self) -> float:
        """Return the static memory per parameter of the rank (bytes)."""
        return sum(self.held.values()) / self.estimate.num_parameters

    def table(self) -> str:
        """Format estimate and measurement as a table, in GiB or MiB."""
        estimate = self.estimate
        whole = self.estimate.activations > 0
        unit = "GiB" if max(estimate.peak, self.peak or 0) >= GIB else "MiB"
        scale = GIB if unit == "GiB" else 2**20

        def size(value: int | None) -> str:
            return "n/a" if value is None else f"{value / scale:.3f}"

        static = sum(self.held.values()) + (self.graphs or 0)
        running = None if self.peak is None else self.peak - static
        rows = [(f"stage {self.stage} ({unit} per rank)", "estimate", "held")]
        rows += [
            (name, size(getattr(estimate, name)), size(self.held[name])) for name in STATIC_PARTS
        ]
        rows += [(name, size(getattr(estimate, name) if whole else None), "") for name in _PER_STEP]
        rows.append(
            (
                "  these together",
                size(estimate.peak - estimate.static - estimate.graphs if whole else None),
                size(running),
            )
        )
        if estimate.graphs or self.graphs:
            rows.append(
                ("CUDA graphs", size(estimate.graphs if whole else None), size(self.graphs))
            )
        rows.append(("peak", size(estimate.peak if whole else None), size(self.peak)))
        if estimate.host:
            rows.append(("pinned host memory", size(estimate.host), ""))
        rows.append(("estimate / held", f"{self.ratio:.3f}" if self.ratio else "n/a", ""))
        per_parameter = estimate.static / estimate.num_parameters
        rows.append(
            ("bytes per parameter", f"{per_parameter:.2f}", f"{self.bytes_per_parameter:.2f}")
        )
        peak = f"the peak is in {estimate.moment}, with {estimate.in_flight} microbatches in flight"
        return f"{align_columns(rows)}\n{self.reason or peak}"


class MemoryReport(Callback):
    """Print estimated and measured memory of every stage after the first optimizer steps.

    The report measures parameters, gradients, main parameters and optimizer state. On GPUs it also
    measures the peak of torch's allocator, whose statistics it resets when training starts. For a
    module that is a :class:`GPT` the estimate comes from
    :func:`~lightning_megatron.memory.estimate.estimate_memory`, for others from a trace of their
    own ``training_step`` with the batch. The report says at which line that is impossible.

    With CUDA graphs the report also waits for their eager steps. A row shows the memory of the
    graphs: the allocator uses their pools for nothing else, and keeps the memory of the eager
    steps. The measured peak is therefore the sum of the peak of eager training steps and the size
    of the pools.

    Args:
        after_steps: Optimizer steps before the report; the first creates optimizer state, and one
            captures graphs (steps).

    Raises:
        UnsupportedError: If the strategy is not a :class:`MegatronStrategy`.

    Communication: one gather of numbers over all ranks.
    """

    def __init__(self, after_steps: Count = 2) -> None:
        self.after_steps: int = coerced_arguments(MemoryReport.__init__, locals())["after_steps"]
        #: Printed reports by stage, on every rank.
        self.reports: tuple[StageReport, ...] = ()
        self._first_step = 0
        self._eager_peak: int | None = None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not isinstance(trainer.strategy, MegatronStrategy):
            raise UnsupportedError(
                "MemoryReport needs MegatronStrategy, whose memory it reports: the strategy is "
                f"{type(trainer.strategy).__name__}. Use strategy=MegatronStrategy(...), or leave "
                "the callback out."
            )

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._first_step = trainer.global_step
        self.reports = ()
        self._eager_peak = None
        if trainer.strategy.root_device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(trainer.strategy.root_device)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, MegatronStrategy), "setup has checked the strategy"
        settings = graph_settings(strategy.run)
        num_steps = self.after_steps + (0 if settings is None else settings.warmup_steps)
        if self.reports:
            return
        device = strategy.root_device
        graphs = strategy.run.graphs
        is_eager = graphs is None or not graphs.has_training_graphs
        if is_eager:
            self._eager_peak = peak_of(device)
        if trainer.global_step - self._first_step < num_steps:
            return
        pools = None
        if device.type == "cuda" and graphs is not None and graphs.num_graphs > 0:
            pools = sum(private_pools(device).values())
        held = held_bytes(strategy.run, trainer.optimizers)
        estimate, reason = estimate_of(strategy.run, trainer.optimizers, batch)
        own = StageReport(
            strategy.mesh.pp.rank,
            estimate,
            held,
            None if self._eager_peak is None else self._eager_peak + (pools or 0),
            pools,
            reason,
        )
        self.reports = merge_objects((own,), strategy.mesh.world_cpu, merge_ranks)
        for report in self.reports:
            pl_module.print(report.table())


def peak_of(device: torch.device) -> int | None:
    """Return the allocator's peak (bytes); None on CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def merge_ranks(ranks: Sequence[Sequence[StageReport]]) -> tuple[StageReport, ...]:
    """Merge the reports of all ranks by stage, with the maximum over ranks for each part."""
    stages: dict[int, StageReport] = {}
    for report in chain.from_iterable(ranks):
        before = stages.setdefault(report.stage, report)
        stages[report.stage] = replace(
            before,
            held={name: max(size, before.held[name]) for name, size in report.held.items()},
            peak=_largest(before.peak, report.peak),
            graphs=_largest(before.graphs, report.graphs),
        )
    return tuple(stages[stage] for stage in sorted(stages))


def _largest(*sizes: int | None) -> int | None:
    return max((size for size in sizes if size is not None), default=None)
