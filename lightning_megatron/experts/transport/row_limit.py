"""Limit on the rows of experts' buffers, and the rows that the passes of a step have needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_megatron.experts.transport.permute import RowMap, map_rows
from lightning_megatron.experts.transport.row_excess import RowExcess
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.plan.experts import limited_rows
from lightning_megatron.shapes import Int


@dataclass(frozen=True)
class RowNeed:
    """Largest number of rows that a layer needed on this rank in a pass of a step.

    ``share`` is what a rank would have had in this pass if all ranks had got equally many rows.
    """

    layer: int
    share: int
    rows: int


class MeasuredRows:
    """Largest number of rows that this rank needed, by layer and even share."""

    def __init__(self) -> None:
        self._max_rows: dict[tuple[int, int], Tensor] = {}

    def add(self, layer: int, share: int, needed: Int[Tensor, "1"]) -> None:
        """Add the rows that a pass of a layer needs, without a copy to the host."""
        before = self._max_rows.get((layer, share))
        larger = needed.clone() if before is None else torch.maximum(before, needed)
        self._max_rows[layer, share] = larger

    def needs(self) -> list[RowNeed]:
        """Copy the needed rows to the host."""
        if not self._max_rows:
            return []
        rows = torch.cat(list(self._max_rows.values())).tolist()
        return [RowNeed(*key, number) for key, number in zip(self._max_rows, rows, strict=True)]


class RowLimit:
    """Limit on the rows of experts' buffers, shared by all layers of a run.

    It applies only inside :meth:`limit_rows`. Elsewhere nothing checks whether it was large enough,
    so buffers have the rows of the worst routing. ``factor`` is the rows of a buffer over an even
    share, at least 1.
    """

    def __init__(self, factor: float, mesh: ParallelMesh) -> None:
        self._factor = factor
        self._excess = RowExcess(mesh.device, mesh.world)
        self._holds = False
        self._measured: MeasuredRows | None = None

    @property
    def factor(self) -> float:
        """Return the rows of a buffer over an even share; the same on all ranks."""
        return self._factor

    def grow(self, factor: float) -> None:
        """Set another factor; graphs that were captured with the old one must not run again."""
        self._factor = factor
        self._excess.forget_limit()

    @contextmanager
    def limit_rows(self) -> Iterator[None]:
        """Limit the rows of all buffers inside the block, and reset the counts of needed rows."""
        self._excess.clear()
        self._holds = True
        try:
            yield
        finally:
            self._holds = False

    @contextmanager
    def measure_rows(self) -> Iterator[MeasuredRows]:
        """Measure the rows that each layer needs inside the block, without a limit."""
        self._measured = MeasuredRows()
        try:
            yield self._measured
        finally:
            self._measured = None

    def rows_for(self, share: int) -> int | None:
        """Return the limit on the rows of a buffer; None outside of :meth:`limit_rows`.

        ``share`` are the rows of a rank if all ranks get equally many.
        """
        return limited_rows(self._factor, share) if self._holds else None

    def note(self, layer: int, share: int, needed: Int[Tensor, "1"]) -> None:
        """Record the rows that a pass of a layer needs, without a copy to the host."""
        most = self.rows_for(share)
        if most is not None:
            self._excess.add(needed, most)
        elif self._measured is not None:
            self._measured.add(layer, share, needed)

    def start_read(self) -> Callable[[], None] | None:
        """Start to copy to the host whether the passes of the block have had enough rows so far.

        Returns:
            Function to call when the last pass has been started; None outside of
            :meth:`limit_rows`, where nothing is copied.

        Communication: that of :meth:`RowExcess.start`.
        """
        return self._excess.start() if self._holds else None

    def was_too_small(self) -> bool:
        """Wait for :meth:`start_read`; return whether any rank lacked rows, the same on all."""
        return self._excess.wait() > 0


@dataclass(frozen=True)
class LayerRows:
    """Limit on the rows of one layer, whose experts ``num_ranks`` ranks share."""

    limit: RowLimit
    layer: int
    num_ranks: int

    def map(self, experts: Int[Tensor, "tokens top_k"], first: int, num_experts: int) -> RowMap:
        """Sort the selections of all ranks' tokens by expert, as :func:`map_rows` does.

        If the limit applies, selections beyond it have no row, as if they were dropped.
        """
        share = experts.numel() // self.num_ranks
        most = self.limit.rows_for(share)
        row_map = map_rows(experts, first, num_experts, most)
        self.limit.note(self.layer, share, row_map.needed)
        return row_map


def map_within(
    limit: LayerRows | None, experts: Int[Tensor, "tokens top_k"], first: int, num_experts: int
) -> RowMap:
    """Sort the selections of tokens by expert, within a limit if there is one."""
    if limit is None:
        return map_rows(experts, first, num_experts)
    return limit.map(experts, first, num_experts)
