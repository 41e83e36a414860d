"""Comparison of the ranks' own times of a step, which names a rank that all others wait for."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median, median_low
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lightning_megatron.errors import ParallelPlanError, SpeedWarning
from lightning_megatron.groups.collectives import broadcast_object, gather_objects
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.plan.settings import Count, Positive, coerced_arguments
from lightning_megatron.strategy.callbacks.step_clock import StepClock
from lightning_megatron.strategy.megatron_strategy import MegatronStrategy

#: Fraction of the compared steps in which a rank must be slow: single pauses name no rank.
_MOST_STEPS = 0.9
#: Advice for each part of a step that may be slow.
_ADVICE = {
    "loading data": "Look at the disk and the processors of that host, or raise num_workers.",
    "computing": (
        "Compare its GPU with others by `lightning-megatron doctor --measure` on that host, and "
        "look for code that runs on this rank alone."
    ),
}


@dataclass(frozen=True)
class RankTimes:
    """Times of one rank in consecutive training steps (seconds).

    Args:
        rank: Global rank.
        stage: Index on the pp axis.
        place: Host and device.
        own: Time of each step without waits for other ranks.
        data: Part of each of them in which the rank loads its batch.
    """

    rank: int
    stage: int
    place: str
    own: tuple[float, ...]
    data: tuple[float, ...]


@dataclass(frozen=True)
class Straggler:
    """Rank that is slower than the others of its stage.

    Args:
        times: Its times.
        usual: Median time of a step on the others, without waits (seconds).
        parts: What is slow: "loading data", "computing" or both.
    """

    times: RankTimes
    usual: float
    parts: tuple[str, ...]

    def report(self, first: int, last: int) -> str:
        """Return the warning about this rank in the steps ``first`` to ``last``."""
        times = self.times
        own = median(times.own)
        advice = " ".join(_ADVICE[part] for part in self.parts)
        return (
            f"all ranks wait for rank {times.rank} ({times.place}), which is slow in "
            f"{' and '.join(self.parts)}: steps {first} to {last} take it {own * 1e3:.1f} ms each "
            f"without waits ({median(times.data) * 1e3:.1f} of them for data), and the other ranks "
            f"of stage {times.stage} {self.usual * 1e3:.1f} ms: {own / self.usual - 1:.0%} more.\n"
            f"{advice}"
        )


def find_stragglers(ranks: Sequence[RankTimes], above: float) -> list[Straggler]:
    """Return the ranks that are slower than the others of their stage in nearly all steps.

    Other stages have other work, so they are not compared.

    Args:
        ranks: Times of all ranks, in the same steps.
        above: Fraction by which a slow rank exceeds the median of its stage.
    """
    found = []
    for stage in sorted({times.stage for times in ranks}):
        peers = [times for times in ranks if times.stage == stage]
        # Of two ranks the lower median is the faster one.
        usual = list(map(median_low, zip(*(peer.own for peer in peers), strict=True)))
        usual_data = median_low([median(peer.data) for peer in peers])
        limit = above * median(usual)
        for times in peers:
            pairs = zip(times.own, usual, strict=True)
            num_slow = sum(own > (1 + above) * other for own, other in pairs)
            excess = median(times.own) - median(usual)
            if num_slow < _MOST_STEPS * len(usual) or excess <= limit:
                continue
            more_data = median(times.data) - usual_data
            # At least one part has more than half of an excess that is above the limit.
            parts = {"loading data": more_data, "computing": excess - more_data}
            slow = tuple(part for part, seconds in parts.items() if seconds > limit / 2)
            found.append(Straggler(times, median(usual), slow))
    return found


class StragglerWatch(Callback):
    """Warn of a rank that is slower than the others, with its host, its GPU and what is slow.

    A step of several ranks takes as long as that of the slowest one. The time that a rank needs for
    itself is its step without the waits in collectives, which are measured: by clocks on CPUs,
    and by events of the compute stream on GPUs. Ranks of one pipeline stage have the same work. One
    that takes longer than the median of its stage in nearly all of the last ``num_steps`` steps is
    named once, until it is as fast as the others again.

    Waits inside CUDA graphs and compiled blocks count as computing, on all ranks alike. A slow rank
    is found there only if others wait for it elsewhere, such as for gradients.

    Args:
        above: Fraction by which a slow rank exceeds the median.
        num_steps: Training batches whose times are compared (batches).
        interval: Training batches from one comparison to the next (batches). The last ``num_steps``
            of them are measured, which costs two clock readings or events for each collective.

    Raises:
        ParallelPlanError: If ``interval`` is below ``num_steps``.

    Communication: one gather of numbers over all ranks in each interval, on the CPU; on a GPU the
        host waits for the device there.
    """

    def __init__(self, above: Positive = 0.1, num_steps: Count = 20, interval: Count = 100) -> None:
        arguments = coerced_arguments(StragglerWatch.__init__, locals())
        self.above: float = arguments["above"]
        self.num_steps: int = arguments["num_steps"]
        self.interval: int = arguments["interval"]
        if self.interval < self.num_steps:
            raise ParallelPlanError(
                f"interval ({interval}) must be at least num_steps ({num_steps}), because the last "
                f"num_steps batches of an interval are compared. Use interval={num_steps}."
            )
        #: The slow ranks of the last comparison, by rank; the same on every rank.
        self.slow: dict[int, Straggler] = {}
        self._undo = ExitStack()
        self._clock: StepClock | None = None
        self._place = ""
        self._num_batches = 0
        self._is_blind = False

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        strategy = trainer.strategy
        self._undo.close()
        self._clock = None
        self.slow = {}
        self._num_batches = 0
        self._is_blind = False
        if trainer.world_size == 1:
            return
        if not isinstance(strategy, MegatronStrategy) or strategy.layout.pp == trainer.world_size:
            rank_zero_info(
                "StragglerWatch compares no ranks: it needs MegatronStrategy, and several ranks of "
                "a pipeline stage, because stages have different work."
            )
            return
        device = strategy.mesh.device
        unit = "CPU" if device.type == "cpu" else f"GPU {device.index}"
        self._place = f"host {socket.gethostname()}, {unit}"
        self._clock = StepClock(strategy.mesh)
        self._clock.observe(trainer, self._is_measured, self._undo)

    def _is_measured(self) -> bool:
        return self._num_batches % self.interval >= self.interval - self.num_steps

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._num_batches += 1
        if self._clock is None:
            return
        self._clock.end_step()
        if self._num_batches % self.interval == 0:
            assert isinstance(trainer.strategy, MegatronStrategy), "others are not compared"
            self._compare(self._clock, trainer.strategy.mesh)

    def _compare(self, clock: StepClock, mesh: ParallelMesh) -> None:
        steps = clock.take_steps()
        own = tuple(one.step - one.waiting for one in steps)
        data = tuple(one.data for one in steps)
        times = RankTimes(mesh.rank, mesh.pp.rank, self._place, own, data)
        ranks = gather_objects(times, mesh.world_cpu)
        num_replayed = max((one.num_replayed for one in steps), default=0)
        if num_replayed and not self._is_blind:
            self._is_blind = True
            rank_zero_info(
                f"StragglerWatch does not see the waits in {num_replayed} collectives of a step, "
                "which CUDA graphs run: they count as computing, on all ranks alike. A slow rank "
                "is found if the others wait for it elsewhere, such as for data or gradients."
            )
        stragglers = find_stragglers(ranks, self.above) if mesh.world_cpu.is_first else []
        found = {one.times.rank: one for one in broadcast_object(stragglers, mesh.world_cpu)}
        last = self._num_batches
        for rank in sorted(found.keys() - self.slow.keys()):
            report = found[rank].report(last - self.num_steps + 1, last)
            rank_zero_warn(report, category=SpeedWarning)
        for rank in sorted(self.slow.keys() - found.keys()):
            rank_zero_info(f"rank {rank} is as fast as the others of its stage again (step {last})")
        self.slow = found

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._undo.close()

    @override
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._undo.close()
