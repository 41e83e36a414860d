"""Figures of workloads of experts that one training runs through, one after the other.

Each workload has steps that do not count, measured steps in a row, and profiled steps. Times of
plan, weights, gradients and barriers are those of rank 0 in a profiled step: of their kernels on a
GPU, and of ranges around the calls on a CPU, where transfers are collectives. Barriers include the
wait for other ranks.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from statistics import fmean
from time import perf_counter
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.measure import mark_on_device, seconds_between, strategy_of
from lightning_megatron.experts.transport import peer_clones
from lightning_megatron.experts.transport.rank_rows import gather_rows
from lightning_megatron.groups.mesh import ParallelMesh

#: Profiled steps of a workload: as many as from one burst to the next (steps).
_PROFILED = 4
#: Parts of the cost of clones, with texts in the names of their kernels or ranges.
COSTS: Mapping[str, tuple[str, ...]] = {
    "plan": ("_put_counts", "_assign_places", "_divide_over_ranks", "_write_physical", "clones: p"),
    "weights": ("_put_weights", "clones: weights"),
    "gradients": ("_add_clone_gradients", "clones: gradients"),
    "barriers": ("barrier_kernel", "clones: barrier"),
}
#: Owner, name of a function, and name of the range around its calls.
_RANGES: Sequence[tuple[Any, str, str]] = (
    (peer_clones, "place_clones", "clones: place"),
    (peer_clones, "to_physical", "clones: physical"),
    (peer_clones.PeerRound, "put_weights", "clones: weights"),
    (peer_clones.PeerRound, "add_gradients", "clones: gradients"),
)


def steps_each(args: argparse.Namespace) -> int:
    """Return the steps of a workload."""
    return int(args.warmup) + int(args.steps) + _PROFILED


def busiest_rows(rows: Mapping[int, Tensor], mesh: ParallelMesh) -> dict[str, float]:
    """Return the rows of a layer's busiest rank in a microbatch, as means over layers.

    Args:
        rows: Counts of this rank by the number of a layer, as ``RankRows.counted`` returns them.

    Communication: that of ``gather_rows``.
    """
    figures = []
    for one in gather_rows(rows, mesh).values():
        sums = [one.before.max(), one.after.max(), one.after.mean()]
        per_microbatch = torch.stack(sums) / one.num_microbatches
        figures.append([*per_microbatch.tolist(), float(one.clones)])
    names = ("before", "after", "mean", "clones")
    return dict(zip(names, map(fmean, zip(*figures, strict=True)), strict=True))


@contextmanager
def _ranges() -> Iterator[None]:
    """Open ranges around what clones cost inside the block, where no kernels have names."""
    with ExitStack() as stack:
        for owner, name, what in _RANGES:
            original = getattr(owner, name)
            stack.callback(setattr, owner, name, original)
            setattr(owner, name, _in_range(original, what))
        yield


def _in_range(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with record_function(name):
            return function(*args, **kwargs)

    return run


class WorkloadFigures(Callback):
    """Callback that measures each workload of a training.

    Args:
        names: Names of the workloads, in order.
        warmup: First steps of a workload, which do not count (steps).
        steps: Measured steps of a workload (steps).
    """

    #: This callback does not read gradients, so the strategy need not reduce them for its hooks.
    reads_gradients = False

    def __init__(self, names: Sequence[str], warmup: int, steps: int) -> None:
        self.names = names
        self.warmup = warmup
        self.steps = steps
        #: Figures of the workloads, by name.
        self.result: dict[str, dict[str, float]] = {}
        self._num_done = 0
        self._marks: list[Any] = []
        self._rows: list[dict[int, Tensor]] = []
        self._profile = ExitStack()
        self._profiler: Any = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let all layers count their rows."""
        strategy_of(trainer).run.layers.count_rows()

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Note the end of a measured step, and start or end the profile of a workload."""
        number, step = divmod(self._num_done, self.warmup + self.steps + _PROFILED)
        self._num_done += 1
        first, last = self.warmup - 1, self.warmup + self.steps - 1
        strategy = strategy_of(trainer)
        is_cuda = strategy.root_device.type == "cuda"
        if first <= step <= last:
            self._marks.append(mark_on_device() if is_cuda else perf_counter())
        if first < step <= last:
            found = strategy.expert_statistics or {}
            counts = {layer: one.rows for layer, one in found.items() if one.rows is not None}
            self._rows.append(counts)
        if step == last:
            self.result[self.names[number]] = self._measured(strategy)
            kind = ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU
            if not is_cuda:
                self._profile.enter_context(_ranges())
            self._profiler = self._profile.enter_context(profile(activities=[kind]))
        if step == last + _PROFILED:
            if is_cuda:
                torch.cuda.synchronize()
            self._profile.close()
            self.result[self.names[number]] |= self._costs(is_cuda)

    def _measured(self, strategy: Any) -> dict[str, float]:
        """Return times and rows of the measured steps, and forget them.

        Communication: an exchange of rows for every measured step.
        """
        marks = self._marks
        times = [seconds_between(*pair) * 1e3 for pair in zip(marks, marks[1:], strict=False)]
        rows = [busiest_rows(counts, strategy.mesh) for counts in self._rows]
        busiest = max(rows, key=lambda one: one["before"])
        self._marks, self._rows = [], []
        figures = {"mean_ms": fmean(times), "longest_ms": max(times)} | busiest
        figures["limit"] = strategy.run.layers.expert_rows or 0.0
        return figures

    def _costs(self, is_cuda: bool) -> dict[str, float]:
        """Return the times of the parts of clones in a profiled step (ms)."""
        times = dict.fromkeys(COSTS, 0.0)
        for one in self._profiler.key_averages():
            time = one.self_device_time_total if is_cuda else one.cpu_time_total
            for part, texts in COSTS.items():
                is_part = any(text in one.key for text in texts)
                times[part] += is_part * time / 1e3 / _PROFILED
        return times
