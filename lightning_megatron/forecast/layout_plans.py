"""The best layouts of a training with their memory and times, as records and as a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Any

from lightning_megatron.forecast.cluster import Cluster
from lightning_megatron.forecast.search import Choice, Fitting, Search, SearchSpace, TooLarge
from lightning_megatron.forecast.step_time import StepTime, estimate_time, with_transport
from lightning_megatron.forecast.traced_layers import TracedLayers
from lightning_megatron.memory.estimate import estimate_stage
from lightning_megatron.memory.lone_stage import repeated_after
from lightning_megatron.plan.budget import GIB, StageMemory, TrainingShape
from lightning_megatron.plan.columns import align_columns
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.plan.recomputation import WHOLE, Recomputation
from lightning_megatron.plan.schedule import NAMED_SCHEDULES

#: Parts of the published speed that no product reaches, in bfloat16 and in 8 bits.
_MOST_OF_PEAK = 0.85
_MOST_IN_8_BITS = 1.6
#: Part of the time of a layer of which another step of the same layers cannot take less.
_SAFETY = 0.98
#: Part of the activations of a layer on one rank that ranks which divide it keep at least together.
_KEPT_TOGETHER = 0.95
#: Times without a gain that are computed for the same axes.
_PATIENCE = 3
#: Layouts that do not fit, in the table.
_SHOWN = 3

#: Function that estimates the time of a step, as ``estimate_time`` does.
TimeOf = Callable[..., StepTime]


@dataclass(frozen=True)
class LayoutPlan:
    """Layout and options of a training, with what they need.

    Args:
        options: Arguments of ``MegatronStrategy``, as plain values.
        memory: Memory of the fullest stage.
        time: Time of a step.
        remark: Why a step takes longer than that of the best plan; empty for that.
    """

    layout: ParallelLayout
    training: TrainingShape
    options: dict[str, Any]
    memory: StageMemory
    time: StepTime
    remark: str


@dataclass(frozen=True)
class LayoutPlans:
    """Result of a search.

    Args:
        plans: The fastest plan of each of the fastest layouts, the fastest first.
        too_large: Layouts that do not fit, the nearest first.
        capacity: Memory of a device that a job may use (bytes).
        num_choices: Legal layouts with their options.
    """

    plans: tuple[LayoutPlan, ...]
    too_large: tuple[TooLarge, ...]
    capacity: int
    num_choices: int

    @property
    def best(self) -> LayoutPlan:
        """Return the fastest plan."""
        return self.plans[0]

    def table(self) -> str:
        """Return the plans in aligned columns, and the nearest layouts that do not fit."""
        heads = "GiB s/step tokens/s/GPU TFLOP/s/GPU bubble exposed".split()
        rows = [["", "layout", *heads, "why not the first"]]
        for number, plan in enumerate(self.plans, 1):
            time = plan.time
            exposed = sum(time.exposed.values()) / time.seconds
            cells = [
                f"{plan.memory.peak / GIB:.1f}",
                f"{time.seconds:.3g}",
                f"{time.tokens_per_second:,.0f}",
                f"{time.flops_per_second / 1e12:,.3g}",
                f"{time.bubble:.1%}",
                f"{exposed:.1%}",
            ]
            shown = str(Choice(plan.layout, plan.training)) or "dp alone"
            rows.append([str(number), shown, *cells, plan.remark])
        lines = [align_columns(rows)]
        number = len(self.too_large)
        if number:
            lines.append(f"\n{number} layouts need more than {self.capacity / GIB:.1f} GiB:")
            lines += [f"  {one}" for one in self.too_large[:_SHOWN]]
        return "\n".join(lines)


class ForecastCosts:
    """Memory and time of choices, from traces and from measured speeds.

    Args:
        kind: Kind of the devices, "cuda" or "cpu".
        time_of: Function that estimates the time of a step.
    """

    def __init__(
        self, space: SearchSpace, cluster: Cluster, kind: str, time_of: TimeOf = estimate_time
    ) -> None:
        self._space = space
        self._cluster = cluster
        self._kind = kind
        self._time_of = time_of
        config = space.config
        self.layers = TracedLayers(config, kind)
        self._shape = config.memory_shape()
        length = space.training.seq_length
        #: Work of a sample (FLOP).
        self._flops = config.flops_per_token(length) * length
        self._stages: dict[object, tuple[tuple[int, ...], Sequence[float]]] = {}
        self._statics: dict[ParallelLayout, tuple[int, ...]] = {}
        #: Memory of activations in the first stage, if no rank divides layers (bytes).
        self._undivided: dict[object, int] = {}
        #: Time of a layer in all passes of a microbatch, by what decides it (s).
        self._of_layer: dict[object, float] = {}

    def bound(self, choice: Choice) -> float:
        """Return a time that a step of the choice cannot be faster than (s).

        At first all products run at the highest speed. Once the time of a step with the same
        layers is known, theirs is.
        """
        step = choice.training
        layout = choice.layout
        _, costs = self._stages_of(layout, step)
        seconds = self._of_layer.get(_kind_of(choice))
        if seconds is None:
            seconds = self._of_products(choice) / sum(costs)
        seconds *= step.num_microbatches * max(costs)
        named = NAMED_SCHEDULES.get(str(step.schedule))
        if named is not None and not named.splits:
            # The busiest stage runs through the bubble at no more than the speed of the others.
            waits = (layout.pp - 1) / (step.num_microbatches * layout.vpp)
            seconds *= 1 + waits * min(costs) / max(costs)
        return seconds

    def _of_products(self, choice: Choice) -> float:
        """Return the time of a microbatch in all stages, if products take the least (s)."""
        chip = self._cluster.chip
        if chip is None:
            return 0.0
        layout = choice.layout
        share = _MOST_OF_PEAK if choice.training.fp8 is None else _MOST_IN_8_BITS
        again = Recomputation.of(choice.training.recompute).parts[0] in WHOLE
        samples = choice.training.microbatch_size / layout.cp
        work = self._flops * samples / layout.tp
        # Each layer gathers and scatters its tokens four times, and NVLinks are the fastest.
        rows = samples * choice.training.seq_length * self._shape.hidden_size
        sent = 8 * rows * choice.training.activation_bytes * (layout.tp - 1) / layout.tp
        messages = self._shape.num_layers * sent / chip.links
        return work * (4 / 3 if again else 1) / (chip.products * share) + messages

    def _stages_of(
        self, layout: ParallelLayout, step: TrainingShape
    ) -> tuple[tuple[int, ...], Sequence[float]]:
        """Return the layers of each virtual stage, and the work of each stage in layers."""
        key = layout.placement, layout.tp, layout.stage_layers, step.loss_chunk
        if key not in self._stages:
            counts = self._space.config.partition(layout, step.loss_chunk).counts
            costs = self._shape.costs(step.loss_chunk, layout.tp)
            self._stages[key] = counts, costs.of_stages(counts, layout.placement)
        return self._stages[key]

    def static(self, choice: Choice) -> int:
        """Return the memory of parameters, gradients and optimizer of the fullest stage (bytes)."""
        return max(self._static_of(choice))

    def _static_of(self, choice: Choice) -> tuple[int, ...]:
        layout = choice.layout
        if layout not in self._statics:
            self._statics[layout] = self.layers.static(layout, choice.training)
        return self._statics[layout]

    def least(self, choice: Choice) -> int:
        """Return what the first stage needs at least (bytes).

        Ranks that divide layers keep together what one would keep.
        """
        layout = choice.layout
        step = choice.training
        counts, _ = self._stages_of(layout, step)
        alone = ParallelLayout(
            layout.pp, pp=layout.pp, vpp=layout.vpp, shape=layout.shape, stage_layers=counts
        )
        count = repeated_after(step.schedule, layout.pp, step.num_microbatches)
        size = step.microbatch_size
        step = replace(
            step,
            sequence_parallel=False,
            cuda_graphs=None,
            microbatch_size=1,
            num_microbatches=count,
            step_bytes=0,
        )
        key = alone, str(step)
        if key not in self._undivided:
            memory = self.layers.stage(alone, step, 0)
            self._undivided[key] = memory.activations + memory.workspace
        share = _KEPT_TOGETHER * size / (layout.tp * layout.cp)
        return self._static_of(choice)[0] + int(share * self._undivided[key])

    def memory(self, choice: Choice) -> StageMemory:
        """Return the memory of the fullest stage."""
        return self.layers.fullest(choice.layout, self._training_of(choice))

    def _training_of(self, choice: Choice) -> TrainingShape:
        nodes = self._cluster.gpus_per_node
        return with_transport(self._space.config, choice.layout, choice.training, nodes)

    def confirmed(self, choice: Choice, memory: StageMemory) -> StageMemory:
        """Return the memory of the fullest stage from a trace of all its layers."""
        config = self._space.config
        training = self._training_of(choice)
        return estimate_stage(config, choice.layout, training, memory.stage, self._kind)

    def time(self, choice: Choice) -> StepTime:
        """Return the time of a step."""
        time = self._time_of(self._space.config, choice.layout, choice.training, self._cluster)
        _, costs = self._stages_of(choice.layout, choice.training)
        halves = (stage.input_half + stage.weight_half for stage in time.stages)
        seconds = sum(stage.forward for stage in time.stages) + sum(halves)
        kind = _kind_of(choice)
        known = self._of_layer.get(kind, inf)
        self._of_layer[kind] = min(known, _SAFETY * seconds / sum(costs))
        return time


def _kind_of(choice: Choice) -> object:
    """Return what decides the time of a layer: other choices have the same layers elsewhere."""
    layout = choice.layout
    step = choice.training
    axes = layout.tp, layout.cp, layout.ep, layout.etp
    options = str(step.recompute), str(step.cuda_graphs), str(step.fp8)
    return axes, step.microbatch_size, step.sequence_parallel, options


def search_layouts(
    space: SearchSpace,
    cluster: Cluster,
    kind: str = "cuda",
    check: Callable[[Choice], object] = bool,
    most: int = 10,
    time_of: TimeOf = estimate_time,
) -> LayoutPlans:
    """Search a space for the layouts with the fastest steps, each with its fastest options.

    Args:
        kind: Kind of the devices, "cuda" or "cpu".
        check: Function that raises for choices that the caller refuses.
        most: Number of layouts that are returned.
        time_of: Function that estimates the time of a step.

    Raises:
        ParallelPlanError: If no layout is legal for the model and the batch.
        UnsupportedError: If no layout fits; the message names the nearest and what it lacks.
    """
    capacity = int(cluster.usable_memory * GIB)
    costs = ForecastCosts(space, cluster, kind, time_of)
    found = Search(space, costs, capacity, check, most, _PATIENCE).run()
    plans = map(partial(_plan_of, found.fitting[0]), found.fitting)
    return LayoutPlans(tuple(plans), tuple(found.too_large), capacity, found.num_choices)


def _plan_of(best: Fitting, one: Fitting) -> LayoutPlan:
    choice = one.choice
    remark = "" if one is best else remark_on(one, best)
    return LayoutPlan(
        choice.layout, choice.training, choice.options(), one.memory, one.time, remark
    )


def remark_on(one: Fitting, best: Fitting) -> str:
    """Return by how much a step takes longer than the best one, and the largest reason."""
    parts = _parts_of(one)
    of_best = _parts_of(best)
    more = {name: seconds - of_best.get(name, 0.0) for name, seconds in parts.items()}
    reason = max(more, key=lambda name: more[name])
    slower = one.time.seconds / best.time.seconds - 1
    return f"{slower:+.1%}: {more[reason] * 1e3:,.3g} ms more {reason}"


def _parts_of(one: Fitting) -> dict[str, float]:
    """Return the parts of a step by name (s)."""
    time: StepTime = one.time
    bubble = time.bubble * (time.seconds - time.optimizer)
    parts = {"in the bubble": bubble, "in the optimizer": time.optimizer}
    for axis, seconds in time.exposed.items():
        parts[f"waiting for messages of {axis}"] = seconds
    parts["in layers"] = time.seconds - sum(parts.values())
    return parts
