"""Search for the fastest layouts and options that fit into the memory of a cluster."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from math import inf
from typing import Any, Protocol

from lightning_megatron.errors import ParallelPlanError, UnsupportedError
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.fp8_layers import check_fp8_config
from lightning_megatron.plan.budget import GIB, StageMemory, TrainingShape
from lightning_megatron.plan.cuda_graphs import CudaGraphs
from lightning_megatron.plan.custom_schedule import OrderOfPasses, shape_of_order
from lightning_megatron.plan.fp8 import FP8, check_fp8_products
from lightning_megatron.plan.global_batch import GlobalBatch
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.plan.microbatches import MicrobatchRule
from lightning_megatron.plan.recomputation import Recomputation
from lightning_megatron.plan.schedule import NAMED_SCHEDULES, SCHEDULE_NAMES, check_chunks
from lightning_megatron.plan.settings import divisors

#: What can be recomputed, from the least additional work to the most.
_RECOMPUTE: tuple[tuple[str, ...], ...] = (
    ("none",),
    ("selective",),
    ("activations", "norms"),
    ("full",),
)
#: More chunks of a stage send more, and hardly shorten the bubble.
_MOST_CHUNKS = 8
#: With fewer tokens of a sample, a rank sends longer than it computes (tokens).
_LEAST_TOKENS = 1024
_REFUSED = (ParallelPlanError, UnsupportedError)


@dataclass(frozen=True)
class Choice:
    """Layout and options of a training.

    Args:
        training: Settings of a step of the data-parallel ranks; dtypes are those of the search.
    """

    layout: ParallelLayout
    training: TrainingShape

    @property
    def axes(self) -> tuple[int, ...]:
        """Return the sizes tp, pp, vpp, cp, ep and etp."""
        layout = self.layout
        return layout.tp, layout.pp, layout.vpp, layout.cp, layout.ep, layout.etp

    def options(self) -> dict[str, Any]:
        """Return the arguments of ``MegatronStrategy`` that the choice needs, as plain values."""
        layout = self.layout
        step = self.training
        options: dict[str, Any] = {
            name: getattr(layout, name)
            for name in ("tp", "pp", "vpp", "cp", "ep")
            if getattr(layout, name) > 1
        }
        if layout.etp != layout.tp:
            options["etp"] = layout.etp
        if layout.tp > 1 and not step.sequence_parallel:
            options["sequence_parallel"] = False
        if step.schedule != ("interleaved" if layout.vpp > 1 else "1f1b"):
            options["schedule"] = step.schedule
        options["microbatch_size"] = step.microbatch_size
        parts = Recomputation.of(step.recompute).parts
        if parts != ("none",):
            options["recompute"] = parts[0] if len(parts) == 1 else {"parts": list(parts)}
        if step.cuda_graphs is not None:
            options["cuda_graphs"] = step.cuda_graphs.mode
        if step.fp8 is not None:
            options["fp8"] = step.fp8.recipe
        return options

    def __str__(self) -> str:
        """Return the sizes and options as text."""
        shown = {name: _shown(value) for name, value in self.options().items()}
        return ", ".join(f"{name} {value}" for name, value in shown.items())


def _shown(value: Any) -> str:
    return "+".join(value["parts"]) if isinstance(value, dict) else str(value)


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """What a training may choose from.

    Args:
        config: Configuration of the model.
        num_ranks: Number of devices (ranks).
        ranks_per_node: Devices of a node, which bound tp (ranks).
        batch: Global batch.
        training: Dtypes and settings that do not change, with the tokens of a sample.
        given: Values of options of ``MegatronStrategy`` that the search must keep, by name.
        allows_fp8: Whether products may be in 8 bits.
        allows_graphs: Whether steps may be captured as CUDA graphs.
    """

    config: GPTConfig
    num_ranks: int
    ranks_per_node: int
    batch: GlobalBatch
    training: TrainingShape
    given: Mapping[str, Any] = field(default_factory=dict)
    allows_fp8: bool = False
    allows_graphs: bool = True

    def values(self, name: str, candidates: Iterable[Any]) -> list[Any]:
        """Return the values of an option that may be chosen."""
        return [self.given[name]] if name in self.given else list(candidates)


class LegalChoices:
    """Choices of a space that the package's own checks accept, and what they refuse.

    Args:
        check: Further check of a layout, which raises.
    """

    def __init__(self, space: SearchSpace) -> None:
        self._space = space
        mixture = (("experts",),) if space.config.experts is not None else ()
        parts = (*_RECOMPUTE[:2], *mixture, *_RECOMPUTE[2:])
        self._recompute = space.values("recompute", map(Recomputation, parts))
        graphs = CudaGraphs("segments") if space.allows_graphs else None
        self._graphs = space.values("cuda_graphs", dict.fromkeys((None, graphs)))
        products = FP8("tensorwise") if space.allows_fp8 else None
        self._products = space.values("fp8", dict.fromkeys((None, products)))
        self._legal_products: dict[int, list[FP8 | None]] = {}
        #: How often each refusal was met.
        self.refusals: Counter[str] = Counter()

    def layouts(self) -> Iterator[ParallelLayout]:
        """Yield the layouts that the model and the batch can be divided over, without chunks."""
        space = self._space
        ranks = divisors(space.num_ranks)
        experts = ranks if space.config.experts is not None else [1]
        most = max(1, space.training.seq_length // _LEAST_TOKENS)
        sizes = product(
            space.values("tp", divisors(space.ranks_per_node)),
            space.values("pp", ranks),
            space.values("cp", [cp for cp in ranks if cp <= most]),
            space.values("ep", experts),
        )
        for tp, pp, cp, ep in sizes:
            if space.num_ranks % (tp * pp * cp):
                continue
            for etp in space.values("etp", {tp, 1} if ep > 1 else {tp}):
                layout = self._legal(self._layout, tp, pp, cp, ep, etp)
                if layout is not None:
                    yield layout

    def variants(self, sizes: Choice) -> Iterator[Choice]:
        """Yield the choices of some chunks, schedule and microbatches: their other options."""
        products = self._products_of(sizes.layout)
        for recompute, graphs, fp8 in product(self._recompute, self._graphs, products):
            step = replace(sizes.training, recompute=recompute, cuda_graphs=graphs, fp8=fp8)
            yield Choice(sizes.layout, step)

    def num_variants(self, sizes: Choice) -> int:
        """Return the number of choices of some chunks, schedule and microbatches."""
        return len(self._recompute) * len(self._graphs) * len(self._products_of(sizes.layout))

    def sizes(self, layout: ParallelLayout) -> Iterator[Choice]:
        """Yield chunks, schedules and microbatches of a layout, with the fastest other options."""
        space = self._space
        per_stage = -(-space.config.num_layers // layout.pp)
        chunks = [vpp for vpp in divisors(per_stage) if vpp <= _MOST_CHUNKS]
        for vpp in space.values("vpp", chunks if layout.pp > 1 else [1]):
            for order in space.values("schedule", _orders(layout.pp, vpp)):
                chunked = self._legal(self._chunked, layout, vpp, order)
                if chunked is not None:
                    yield from self._steps(chunked, order)

    def _steps(self, layout: ParallelLayout, order: OrderOfPasses) -> Iterator[Choice]:
        space = self._space
        samples = space.batch.size // layout.dp
        products = self._products_of(layout)
        if not products:
            return
        fastest = replace(
            space.training,
            schedule=order,
            sequence_parallel=self._shards_sequence(layout),
            recompute=self._recompute[0],
            cuda_graphs=self._graphs[0],
            fp8=products[-1],
        )
        # Larger microbatches launch less, and their products are faster.
        for size in space.values("microbatch_size", reversed(divisors(samples))):
            size = samples if size == "batch" else size
            if self._legal(self._check_microbatches, layout, order, size) is not None:
                step = replace(fastest, microbatch_size=size, num_microbatches=samples // size)
                yield Choice(layout, step)

    def _products_of(self, layout: ParallelLayout) -> list[FP8 | None]:
        """Return the formats of products that a layout may have, the fastest last."""
        if layout.tp not in self._legal_products:
            self._legal_products[layout.tp] = [
                fp8
                for fp8 in self._products
                if self._legal(self._check_products, layout.tp, fp8) is not None
            ]
        return self._legal_products[layout.tp]

    def _layout(self, tp: int, pp: int, cp: int, ep: int, etp: int) -> ParallelLayout:
        space = self._space
        layout = ParallelLayout(space.num_ranks, tp, pp, cp, ep, etp, **self._fixed())
        space.config.check_layout(layout)
        length = space.training.seq_length
        space.config.check_seq_length(length, self._shards_sequence(layout) and tp or 1, cp)
        space.batch.check(layout.dp)
        return layout

    def _fixed(self) -> dict[str, Any]:
        return {name: self._space.given[name] for name in ("order",) if name in self._space.given}

    def _chunked(self, layout: ParallelLayout, vpp: int, order: OrderOfPasses) -> ParallelLayout:
        """Return the layout with the chunks of a schedule."""
        if isinstance(order, str):
            check_chunks(order, layout.pp, vpp, self._space.given.get("microbatch_group_size"))
        layers = self._space.given.get("stage_layers")
        chunked = replace(layout, vpp=vpp, shape=shape_of_order(order), stage_layers=layers)
        self._space.config.partition(chunked)
        return chunked

    def _shards_sequence(self, layout: ParallelLayout) -> bool:
        """Return whether activations are divided along the sequence, which only saves."""
        given = self._space.given.get("sequence_parallel")
        if given is not None or layout.tp == 1:
            return bool(given)
        length = self._space.training.seq_length
        check = self._space.config.check_seq_length
        return self._legal(check, length, layout.tp, layout.cp, default=True) is not None

    def _check_microbatches(self, layout: ParallelLayout, order: OrderOfPasses, size: int) -> bool:
        space = self._space
        space.batch.check(layout.dp, size)
        group = space.training.microbatch_group_size
        rule = MicrobatchRule(size, order, layout.pp, layout.vpp, group)
        for samples in space.batch.sizes:
            rule.check(samples // layout.dp)
        return True

    def _check_products(self, tp: int, fp8: FP8 | None) -> bool:
        if fp8 is not None:
            check_fp8_products(fp8, overlap_tensor_parallel=False)
            check_fp8_config(self._space.config, fp8, tp)
        return True

    def _legal(self, check: Callable[..., Any], *arguments: Any, default: Any = None) -> Any:
        """Return the result of a check, or the default for none; None if it refuses."""
        try:
            result = check(*arguments)
        except _REFUSED as error:
            self.refusals[str(error)] += 1
            return None
        return default if result is None else result


def _orders(pp: int, vpp: int) -> list[OrderOfPasses]:
    """Return the schedules of some stages and chunks that may be the fastest.

    One that keeps all microbatches is not faster than the others.
    """
    if pp == 1:
        return ["1f1b"]
    chunks = {None: vpp > 1, vpp: True}
    named = {name: NAMED_SCHEDULES[name] for name in SCHEDULE_NAMES}
    return [name for name, one in named.items() if chunks.get(one.chunks) and not one.keeps_all]


class StepSeconds(Protocol):
    """Time of a step, as a search reads it."""

    @property
    def seconds(self) -> float:
        """Return the time of a step (s)."""


class ChoiceCosts(Protocol):
    """What choices cost."""

    def bound(self, choice: Choice) -> float:
        """Return a time that a step of the choice cannot be faster than, at once (s).

        It may rise after the times of other choices were computed.
        """

    def static(self, choice: Choice) -> int:
        """Return the memory of parameters, gradients and optimizer of the fullest stage (bytes)."""

    def least(self, choice: Choice) -> int:
        """Return a memory that a stage of the choice needs at least, at once (bytes)."""

    def memory(self, choice: Choice) -> StageMemory:
        """Return the memory of the fullest stage."""

    def confirmed(self, choice: Choice, memory: StageMemory) -> StageMemory:
        """Return the memory of the fullest stage, exactly and slowly."""

    def time(self, choice: Choice) -> StepSeconds:
        """Return the time of a step."""


@dataclass(frozen=True)
class Fitting:
    """Choice that fits, with what it costs."""

    choice: Choice
    memory: StageMemory
    time: Any


@dataclass(frozen=True)
class TooLarge:
    """Layout of which no choice fits, with the one that lacks least.

    Args:
        lacks: Missing memory of the fullest stage (bytes).
        is_static: Whether parameters, gradients and optimizer alone do not fit.
    """

    choice: Choice
    lacks: int
    is_static: bool

    def __str__(self) -> str:
        what = "parameters, gradients and optimizer alone lack" if self.is_static else "lacks"
        return f"{self.choice}: {what} {self.lacks / GIB:.1f} GiB"


@dataclass
class Found:
    """Result of a search.

    Args:
        fitting: The fastest choice of each of the fastest layouts, the fastest first.
        too_large: Layouts that do not fit, the nearest first.
        num_choices: Choices of the space.
        num_timed: Choices whose time was computed; of the others the bound said enough.
    """

    fitting: list[Fitting]
    too_large: list[TooLarge]
    num_choices: int
    num_timed: int


@dataclass
class Search:
    """Search of the choices of a space in the order of their bounds.

    A choice that fits replaces a slower one of the same axes. The search ends when the next bound
    is above the times of as many layouts as it shall find, so that its result is that of trying
    all choices, if bounds are true and patience has no end.

    Args:
        capacity: Memory of a device (bytes).
        check: Raises for choices that the caller refuses.
        most: Number of layouts that are found.
        patience: Computed times without a gain after which sizes of axes are left; after four
            times as many the search ends.
    """

    space: SearchSpace
    costs: ChoiceCosts
    capacity: int
    check: Callable[[Choice], object] = bool
    most: int = 10
    patience: float = inf
    legal: LegalChoices = field(init=False)
    _best: dict[tuple[int, ...], Fitting] = field(default_factory=dict, init=False)
    _lacks: dict[tuple[int, ...], TooLarge] = field(default_factory=dict, init=False)
    #: Computed times without a gain: for all axes under (), and for each.
    _vain: Counter[tuple[int, ...]] = field(default_factory=Counter, init=False)
    #: Smallest microbatch that does not fit, by everything else.
    _full: dict[object, int] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.legal = LegalChoices(self.space)

    def run(self) -> Found:
        """Search.

        Raises:
            ParallelPlanError: If no choice is legal.
            UnsupportedError: If no choice fits.
        """
        queue: list[tuple[float, tuple[int, ...], Choice]] = [
            (self.costs.bound(sizes), (number,), sizes)
            for number, sizes in enumerate(self._sizes())
        ]
        num_choices = sum(self.legal.num_variants(sizes) for _, _, sizes in queue)
        if not queue and not self._lacks:
            raise self._no_legal()
        heapq.heapify(queue)
        num_timed = 0
        while queue and queue[0][0] < self._limit() and self._vain[()] < 4 * self.patience:
            bound, number, choice = heapq.heappop(queue)
            if len(number) == 1:
                for place, one in enumerate(self.legal.variants(choice)):
                    heapq.heappush(queue, (self.costs.bound(one), (*number, place), one))
                continue
            again = self.costs.bound(choice)
            if again > bound:
                heapq.heappush(queue, (again, number, choice))
                continue
            known = self._best.get(choice.axes)
            is_open = self._vain[choice.axes] < self.patience
            if is_open and (known is None or bound < known.time.seconds):
                num_timed += self._try(choice)
        self._confirm()
        fitting = sorted(self._best.values(), key=lambda one: one.time.seconds)[: self.most]
        may_fit = {choice.axes for _, _, choice in queue} | set(self._best)
        nearest = [one for axes, one in self._lacks.items() if axes not in may_fit]
        nearest.sort(key=lambda one: one.lacks)
        if not fitting:
            raise self._none_fits(nearest) if nearest else self._no_legal()
        return Found(fitting, nearest, num_choices, num_timed)

    def _sizes(self) -> Iterator[Choice]:
        """Yield the sizes of the layouts whose static memory fits."""
        for layout in self.legal.layouts():
            choices = self.legal.sizes(layout)
            first = next(choices, None)
            if first is not None and self._fits(first, self.costs.static(first), is_static=True):
                yield first
                yield from choices

    def _limit(self) -> float:
        """Return the time that a further choice must be faster than (s)."""
        times = sorted(one.time.seconds for one in self._best.values())
        return times[self.most - 1] if len(times) >= self.most else inf

    def _try(self, choice: Choice) -> bool:
        """Compute the costs of a choice; return whether its time was needed."""
        try:
            self.check(choice)
        except _REFUSED as error:
            self.legal.refusals[str(error)] += 1
            return False
        step = choice.training
        rest = choice.axes, step.schedule, str((step.recompute, step.cuda_graphs, step.fp8))
        # A larger microbatch needs no less than a smaller one.
        if step.microbatch_size > self._full.get(rest, step.microbatch_size):
            return False
        if not self._fits(choice, self.costs.least(choice)):
            self._full[rest] = step.microbatch_size
            return False
        memory = self.costs.memory(choice)
        if not self._fits(choice, memory.peak):
            self._full[rest] = step.microbatch_size
            return False
        limit = self._limit()
        time = self.costs.time(choice)
        known = self._best.get(choice.axes)
        is_gain = known is None or time.seconds < known.time.seconds
        if is_gain:
            self._best[choice.axes] = Fitting(choice, memory, time)
        for axes in ((), choice.axes):
            self._vain[axes] = 0 if is_gain and time.seconds < limit else self._vain[axes] + 1
        return True

    def _fits(self, choice: Choice, size: int, *, is_static: bool = False) -> bool:
        known = self._lacks.get(choice.axes)
        lacks = size - self.capacity
        if lacks > 0 and (known is None or lacks < known.lacks):
            self._lacks[choice.axes] = TooLarge(choice, lacks, is_static)
        return lacks <= 0

    def _confirm(self) -> None:
        """Compute the memory of the fastest choice exactly, until one is confirmed to fit."""
        while self._best:
            axes, best = min(self._best.items(), key=lambda item: item[1].time.seconds)
            memory = self.costs.confirmed(best.choice, best.memory)
            if self._fits(best.choice, memory.peak):
                self._best[axes] = replace(best, memory=memory)
                return
            del self._best[axes]

    def _no_legal(self) -> ParallelPlanError:
        common = [text for text, _ in self.legal.refusals.most_common(1)]
        return ParallelPlanError(
            f"no layout of {self.space.num_ranks} devices can train this model with a global batch "
            f"of {self.space.batch.size} samples of {self.space.training.seq_length} tokens. Most "
            f"are refused for this reason: {' '.join(common) or 'options contradict each other.'}"
        )

    def _none_fits(self, nearest: list[TooLarge]) -> UnsupportedError:
        return UnsupportedError(
            f"no layout of {self.space.num_ranks} devices fits into {self.capacity / GIB:.1f} GiB "
            f"of each. The nearest is {nearest[0]}.\nUse more devices, a shorter sequence, or "
            "optimizer options with smaller states (optimizer.gradient_dtype, "
            "optimizer.moments_dtype)."
        )
