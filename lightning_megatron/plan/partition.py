"""Partition of a model's layers over the virtual stages of a pipeline, by cost or as requested."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise, permutations

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.plan.placement import Placement
from lightning_megatron.plan.settings import require_positive

#: Number of partitions that are remembered.
_REMEMBERED = 256


@dataclass(frozen=True)
class LayerCosts:
    """Costs of the parts of a model, in any unit of time or work.

    Args:
        embedding: Cost of what runs before the layers.
        head: Cost of what runs after the layers: the output layer and the loss.

    Raises:
        ParallelPlanError: If there are no layers, or a cost is negative.
    """

    layers: tuple[float, ...]
    embedding: float = 0.0
    head: float = 0.0

    def __post_init__(self) -> None:
        require_positive("num_layers", len(self.layers))
        for name, cost in {
            "the embedding": self.embedding,
            "the head": self.head,
            "each layer": min(self.layers),
        }.items():
            if cost < 0:
                raise ParallelPlanError(
                    f"the cost of {name} must not be negative: it is {cost}. Use 0 or more."
                )

    @classmethod
    def equal(cls, num_layers: int) -> LayerCosts:
        """Return the costs of layers that cost the same, with nothing before and after them."""
        require_positive("num_layers", num_layers)
        return cls((1.0,) * num_layers)

    @property
    def layer(self) -> float:
        """Return the mean cost of a layer."""
        return sum(self.layers) / len(self.layers) or 1.0

    @property
    def are_equal(self) -> bool:
        """Return whether all layers cost the same."""
        return min(self.layers) == max(self.layers)

    def of_virtual_stages(self, counts: Sequence[int]) -> list[float]:
        """Return the cost of each virtual stage, in mean layers."""
        before = list(accumulate(self.layers, initial=0.0))
        stops = accumulate(counts, initial=0)
        costs = [before[stop] - before[start] for start, stop in pairwise(stops)]
        costs[0] += self.embedding
        costs[-1] += self.head
        return [cost / self.layer for cost in costs]

    def of_stages(self, counts: Sequence[int], placement: Placement) -> list[float]:
        """Return the cost of each stage, over all its chunks, in mean layers."""
        costs = [0.0] * placement.num_stages
        for number, cost in enumerate(self.of_virtual_stages(counts)):
            costs[placement.owner(number)[0]] += cost
        return costs


@dataclass(frozen=True)
class LayerPartition:
    """Number of layers of each virtual stage, in the order in which a microbatch passes them.

    :class:`~lightning_megatron.plan.placement.Placement` says which rank runs which virtual stage.

    Args:
        reason: Reason for the partition, for the log.
    """

    counts: tuple[int, ...]
    reason: str

    def __str__(self) -> str:
        return ", ".join(map(str, self.counts))

    @property
    def ranges(self) -> tuple[range, ...]:
        """Return the global indices of each virtual stage's layers."""
        return tuple(range(*ends) for ends in pairwise(accumulate(self.counts, initial=0)))

    def by_stage(self, placement: Placement) -> tuple[tuple[range, ...], ...]:
        """Return the global indices of the layers, as ``layers[stage][chunk]``."""
        return placement.by_stage(self.ranges)


def partition_of(costs: LayerCosts, layout: ParallelLayout) -> LayerPartition:
    """Return the partition that the layout sets, or else the lightest one.

    Raises:
        ParallelPlanError: If ``stage_layers`` of the layout is for another number of layers, or
            there are fewer layers than virtual stages.
    """
    num_layers = len(costs.layers)
    counts = layout.stage_layers
    if counts is None:
        return lightest_partition(costs, layout.placement)
    if sum(counts) != num_layers:
        example = ""
        if num_layers >= len(counts):
            example = f", such as {list(lightest_partition(costs, layout.placement).counts)}"
        raise ParallelPlanError(
            f"stage_layers must give every layer to one virtual stage: {list(counts)} are "
            f"{sum(counts)} layers, and the model has {num_layers}. Use numbers with the sum "
            f"{num_layers}{example}."
        )
    return LayerPartition(counts, "asked for (stage_layers)")


@lru_cache(_REMEMBERED)
def lightest_partition(costs: LayerCosts, placement: Placement) -> LayerPartition:
    """Return the partition whose busiest stage costs least.

    Every virtual stage has a layer, except the last one if a head follows the layers. If several
    stages could take one more layer at the same cost, middle stages take it before the one with the
    head, and the one with the embedding is last, because it keeps the most activations. For layers
    with different costs the result is the best one if every stage has one chunk. With several
    chunks, single layers move between virtual stages as long as that lowers the costs of the
    busiest stages, and a better partition may exist.

    Raises:
        ParallelPlanError: If there are fewer layers than virtual stages.
    """
    if placement.num_virtual_stages > len(costs.layers):
        raise ParallelPlanError(
            f"num_layers ({len(costs.layers)}) must be at least pp x vpp ({placement.num_stages} x "
            f"{placement.num_chunks} = {placement.num_virtual_stages}), because every virtual "
            "stage holds at least one layer. Use pp x vpp of at most "
            f"{len(costs.layers)}."
        )
    least = [1] * placement.num_virtual_stages
    if costs.head:
        least[-1] = 0
    counts = _filled(costs, placement, least)
    if not costs.are_equal:
        # With several chunks, even virtual stages need not make even stages.
        start = _lightest_virtual_stages(costs, least) if placement.num_chunks == 1 else counts
        counts = _move_layers(start, costs, placement, least)
    weights = "layers count alike"
    if costs.embedding or costs.head:
        weights = (
            f"the embedding counts as {costs.embedding / costs.layer:.1f} layers, the head as "
            f"{costs.head / costs.layer:.1f}"
        )
    busiest = max(costs.of_stages(counts, placement))
    return LayerPartition(
        tuple(counts), f"least work of the busiest stage, {busiest:.1f} layers; {weights}"
    )


def _filled(costs: LayerCosts, placement: Placement, minimum: Sequence[int]) -> list[int]:
    """Divide layers of mean cost among the stages, and those of a stage among its chunks."""
    counts = [0] * placement.num_virtual_stages
    extras = costs.of_virtual_stages(counts)
    chunks = placement.by_stage(range(placement.num_virtual_stages))
    last = placement.num_virtual_stages - 1

    def tie_break(numbers: Sequence[int]) -> int:
        return 2 if 0 in numbers else int(last in numbers)

    stages = [
        (sum(extra), tie_break(numbers))
        for extra, numbers in zip(placement.by_stage(extras), chunks, strict=True)
    ]
    totals = _fill(len(costs.layers), list(map(sum, placement.by_stage(minimum))), stages)
    for numbers, total in zip(chunks, totals, strict=True):
        parts = [(extras[number], tie_break([number])) for number in numbers]
        filled = _fill(total, [minimum[number] for number in numbers], parts)
        for number, count in zip(numbers, filled, strict=True):
            counts[number] = count
    return counts


def _fill(total: int, minimum: Sequence[int], parts: Sequence[tuple[float, int]]) -> list[int]:
    # Giving each layer in turn to the cheapest part is optimal: all layers cost the same, so that
    # moving one of them to another part can only raise the maximum. A part is a pair: its cost
    # without layers, and a tie break, of which the lower one wins at equal cost.
    counts = list(minimum)

    def cost_with(part: int) -> tuple[float, int, int]:
        cost, tie_break = parts[part]
        # If both are equal, later stages come first, because they keep fewer activations.
        return round(cost + counts[part], 9), tie_break, -part

    for _ in range(total - sum(minimum)):
        counts[min(range(len(parts)), key=cost_with)] += 1
    return counts


def _lightest_virtual_stages(costs: LayerCosts, minimum: Sequence[int]) -> list[int]:
    """Divide the layers so that the busiest virtual stage costs as little as possible.

    Dynamic programming: ``best[stop]`` is the best division of the first ``stop`` layers among the
    virtual stages up to the present one, as the cost of its busiest virtual stage and its counts.
    """
    before = list(accumulate((cost / costs.layer for cost in costs.layers), initial=0.0))
    extras = costs.of_virtual_stages([0] * len(minimum))
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for extra, least in zip(extras, minimum, strict=True):
        previous = best
        best = {}
        for stop in range(len(before)):
            divisions = [
                (max(cost, extra + before[stop] - before[start]), (*counts, stop - start))
                for start, (cost, counts) in previous.items()
                if start <= stop - least
            ]
            if divisions:
                best[stop] = min(divisions)
    _, counts = best[len(costs.layers)]
    return list(counts)


def _move_layers(
    counts: Sequence[int], costs: LayerCosts, placement: Placement, minimum: Sequence[int]
) -> list[int]:
    """Move single layers between virtual stages while that makes the stages more even.

    All virtual stages between the two shift by one layer.
    """
    best = list(counts)
    while True:
        moved = []
        for giver, taker in permutations(range(len(best)), 2):
            if best[giver] > minimum[giver]:
                moved.append(list(best))
                moved[-1][giver] -= 1
                moved[-1][taker] += 1
        lightest = min(
            moved, key=lambda counts: _sorted_costs(counts, costs, placement), default=best
        )
        if _sorted_costs(lightest, costs, placement) >= _sorted_costs(best, costs, placement):
            return best
        best = lightest


def _sorted_costs(
    counts: Sequence[int], costs: LayerCosts, placement: Placement
) -> list[list[float]]:
    """Return the costs of the stages and of the virtual stages, the highest first."""
    stages = [round(cost, 9) for cost in costs.of_stages(counts, placement)]
    virtual_stages = [round(cost, 9) for cost in costs.of_virtual_stages(counts)]
    return [sorted(stages, reverse=True), sorted(virtual_stages, reverse=True)]
