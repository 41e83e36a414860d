"""Assignment of layers to pipeline stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.plan.legal_values import join_or, require_positive
from lightning_megatron.plan.placement import Placement, PlacementShape


def split_layers(
    num_layers: int,
    num_stages: int,
    num_chunks: int = 1,
    embedding_cost: float = 0.0,
    loss_cost: float = 0.0,
    shape: PlacementShape = "loop",
) -> tuple[tuple[range, ...], ...]:
    """Divide the layers into contiguous virtual stages that minimize the cost of the busiest stage.

    The virtual stages follow each other as :class:`~lightning_megatron.plan.placement.Placement`
    says. Every virtual stage has at least one layer. The cost of the embedding is added to the
    first virtual stage, that of the loss to the last. If several stages could take one more layer
    at the same cost, middle stages take it before the last one, and the first one is last, because
    it keeps the most activations.

    Args:
        num_layers: Number of transformer layers of the model.
        num_stages: Pipeline-parallel size.
        num_chunks: Chunks per stage (vpp).
        embedding_cost: Time of the embedding, relative to one layer's time.
        loss_cost: Time of the output layer and the loss, relative to one layer's time.
        shape: Placement of the virtual stages, a property of the schedule. In a V with an even
            number of chunks, the first stage has both the embedding and the loss.

    Returns:
        Global indices of the layers, as ``layers[stage][chunk]``.

    Raises:
        ParallelPlanError: If there are fewer layers than virtual stages, or a cost is negative.
    """
    for name, size in {"num_layers": num_layers, "pp": num_stages, "vpp": num_chunks}.items():
        require_positive(name, size)
    for name, cost in {"embedding_cost": embedding_cost, "loss_cost": loss_cost}.items():
        if cost < 0:
            raise ParallelPlanError(
                f"{name} must not be negative: it is {cost} layers. Use 0 or more."
            )
    _check_enough_layers(num_layers, num_stages, num_chunks)
    placement = Placement(shape, num_stages, num_chunks)
    first = placement.owner(0)
    last = placement.owner(placement.num_virtual_stages - 1)
    ends = _Ends(embedding_cost, loss_cost)
    counts = []
    for stage, total in enumerate(
        _fill(num_layers, num_chunks, ends.parts(num_stages, first[0], last[0]))
    ):
        embedding = first[1] if stage == first[0] else None
        loss = last[1] if stage == last[0] else None
        counts.append(_fill(total, 1, ends.parts(num_chunks, embedding, loss)))
    return _ranges(counts, placement)


@dataclass(frozen=True)
class _Ends:
    """Costs in addition to layers at both ends of the model."""

    embedding_cost: float
    loss_cost: float

    def parts(
        self, num_parts: int, embedding: int | None, loss: int | None
    ) -> list[tuple[float, int]]:
        """List pairs of a cost in addition to layers and a reluctance.

        Of two parts at equal cost the one with lower reluctance takes the next layer.
        """
        costs = [0.0] * num_parts
        reluctances = [0] * num_parts
        if loss is not None:
            costs[loss] = self.loss_cost
            reluctances[loss] = 1
        if embedding is not None:
            costs[embedding] += self.embedding_cost
            reluctances[embedding] = 2
        return list(zip(costs, reluctances, strict=True))


def _fill(total: int, least: int, parts: Sequence[tuple[float, int]]) -> list[int]:
    # Giving each layer in turn to the cheapest part is optimal: all layers cost the same, so that
    # moving one of them to another part can only raise the maximum.
    counts = [least] * len(parts)

    def price(part: int) -> tuple[float, int, int]:
        cost, reluctance = parts[part]
        # At equal cost and reluctance later stages come first, because they keep fewer activations.
        return round(cost + counts[part], 9), reluctance, -part

    for _ in range(total - least * len(parts)):
        counts[min(range(len(parts)), key=price)] += 1
    return counts


def _ranges(counts: Sequence[Sequence[int]], placement: Placement) -> tuple[tuple[range, ...], ...]:
    layers: list[list[range]] = [[] for _ in counts]
    start = 0
    # A stage's chunks come in order, because virtual stages are counted chunk by chunk.
    for virtual_stage in range(placement.num_virtual_stages):
        stage, chunk = placement.owner(virtual_stage)
        stop = start + counts[stage][chunk]
        layers[stage].append(range(start, stop))
        start = stop
    return tuple(tuple(chunks) for chunks in layers)


def _check_enough_layers(num_layers: int, num_stages: int, num_chunks: int) -> None:
    if num_stages * num_chunks <= num_layers:
        return
    legal = []
    if num_layers >= num_chunks:
        legal.append(f"pp of {join_or(_up_to(num_layers // num_chunks))} with vpp {num_chunks}")
    if num_chunks > 1 and num_layers >= num_stages:
        legal.append(f"vpp of {join_or(_up_to(num_layers // num_stages))} with pp {num_stages}")
    if not legal:
        legal = [f"pp of {join_or(_up_to(num_layers))} with vpp 1"]
    raise ParallelPlanError(
        f"num_layers ({num_layers}) must be at least pp x vpp ({num_stages} x {num_chunks} = "
        f"{num_stages * num_chunks}), because every virtual stage holds at least one layer. Use "
        f"{', or '.join(legal)}."
    )


def _up_to(largest: int) -> list[object]:
    return list(range(1, largest + 1)) if largest <= 4 else [f"1 to {largest}"]
