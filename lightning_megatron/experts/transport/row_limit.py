"""Limit on the rows of experts' buffers, and the rows that the passes of a step have needed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_megatron.experts.transport.permute import RowMap, map_rows
from lightning_megatron.plan.row_limit import limited_rows
from lightning_megatron.shapes import Int


@dataclass(frozen=True)
class RowNeed:
    """Most rows that a layer needed on this rank in one pass.

    Args:
        layer: Index of the layer in the model.
        share: Rows of a rank in this pass if all ranks got equally many (rows).
        rows: Rows that the routing needed (rows).
    """

    layer: int
    share: int
    rows: int


class RowLimit:
    """Limit on the rows of experts' buffers, shared by all layers of a run.

    It holds inside :meth:`limiting` only. Elsewhere nobody looks whether it was large enough, so
    buffers have the rows of the worst routing.

    Args:
        factor: Rows of a buffer over an even share, at least 1.
    """

    def __init__(self, factor: float) -> None:
        #: Rows of a buffer over an even share; the same on all ranks.
        self.factor = factor
        self._holds = False
        self._needed: dict[tuple[int, int], Tensor] = {}

    @contextmanager
    def limiting(self) -> Iterator[None]:
        """Limit the rows of all buffers inside the block, and forget what was needed before it."""
        self._needed.clear()
        self._holds = True
        try:
            yield
        finally:
            self._holds = False

    def rows_for(self, share: int) -> int | None:
        """Return the limit on the rows of a buffer; None where no limit holds.

        Args:
            share: Rows of a rank if all ranks get equally many (rows).
        """
        return limited_rows(self.factor, share) if self._holds else None

    def note(self, layer: int, share: int, needed: Int[Tensor, "1"]) -> None:
        """Note what a pass of a layer needs, without a copy to the host.

        Args:
            layer: Index of the layer in the model.
            share: Rows of a rank in this pass if all ranks get equally many (rows).
            needed: Rows that the routing needs on this rank, on the device.
        """
        most = self._needed.get((layer, share))
        if most is None:
            self._needed[layer, share] = needed.clone()
        else:
            torch.maximum(most, needed, out=most)

    def start_read(self) -> NeedsInFlight:
        """Start to copy to the host what the passes of the block have needed so far."""
        keys = tuple(self._needed)
        if not keys:
            return NeedsInFlight(keys, torch.empty(0, dtype=torch.int32), None)
        needed = torch.cat(list(self._needed.values()))
        if needed.device.type != "cuda":
            return NeedsInFlight(keys, needed, None)
        on_host = torch.empty(needed.shape, dtype=needed.dtype, pin_memory=True)
        on_host.copy_(needed, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return NeedsInFlight(keys, on_host, event)


@dataclass(frozen=True)
class NeedsInFlight:
    """What the passes of a step have needed, on its way to the host.

    Args:
        keys: Layer and even share of each number.
        on_host: Numbers of rows, complete after the event.
        event: Event at the end of the copy; None if the numbers are there already.
    """

    keys: tuple[tuple[int, int], ...]
    on_host: Int[Tensor, "passes"]
    event: torch.cuda.Event | None

    def wait(self) -> list[RowNeed]:
        """Wait for the numbers, and return them."""
        if self.event is not None:
            self.event.synchronize()
        pairs = zip(self.keys, self.on_host.tolist(), strict=True)
        return [RowNeed(layer, share, rows) for (layer, share), rows in pairs]


@dataclass(frozen=True)
class LayerRows:
    """Limit on the rows of one layer.

    Args:
        limit: Limit of all layers.
        layer: Index of the layer in the model.
        num_ranks: Ranks that share the layer's experts (ranks).
    """

    limit: RowLimit
    layer: int
    num_ranks: int

    def map(self, experts: Int[Tensor, "tokens top_k"], first: int, num_experts: int) -> RowMap:
        """Sort the selections of all ranks' tokens by expert, as :func:`map_rows` does.

        Where the limit holds, selections beyond it have no row, as if they were dropped.

        Args:
            experts: Experts selected for the tokens of all ranks.
            first: Index of the first local expert.
            num_experts: Number of local experts.
        """
        share = experts.numel() // self.num_ranks
        most = self.limit.rows_for(share)
        row_map = map_rows(experts, first, num_experts, most)
        if most is not None:
            self.limit.note(self.layer, share, row_map.needed)
        return row_map


def map_within(
    limit: LayerRows | None, experts: Int[Tensor, "tokens top_k"], first: int, num_experts: int
) -> RowMap:
    """Sort the selections of tokens by expert, within a limit if there is one."""
    if limit is None:
        return map_rows(experts, first, num_experts)
    return limit.map(experts, first, num_experts)
