"""Limit on the rows of experts' buffers, and the rows that the passes of a step have needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import sleep

import torch
from torch import Tensor

from lightning_megatron.experts.transport.permute import RowMap, map_rows
from lightning_megatron.groups.axis import MeshAxis
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.pending import start_all_reduce
from lightning_megatron.plan.experts import limited_rows
from lightning_megatron.shapes import Int

#: Value of the host's copy before the device has written it; no number of rows is so small.
_NOT_WRITTEN = torch.iinfo(torch.int32).min
#: Interval between reads of the host's copy (seconds).
_PAUSE = 20e-6


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


class RowExcess:
    """Largest number of rows beyond a limit, over the passes of a run and over all ranks.

    All tensors keep their addresses, so that a CUDA graph may hold :meth:`add` and :meth:`start`.
    The device writes the result into pinned memory, which the host reads without waiting for an
    event: an event of a replay could still be that of the previous replay.
    """

    def __init__(self, device: torch.device, world: MeshAxis) -> None:
        is_cuda = device.type == "cuda"
        # Validation may come first, and graphs cannot write tensors of its inference mode later.
        with torch.inference_mode(False):
            self._max_rows = torch.zeros(1, dtype=torch.int32, device=device)
            self._excess = torch.zeros_like(self._max_rows)
            self._on_host = torch.zeros(1, dtype=torch.int32, pin_memory=is_cuda)
        self._world = world
        self._stream = torch.cuda.Stream(device) if is_cuda else None
        self._reference: int | None = None

    def clear(self) -> None:
        """Reset before the next run; the host must have waited for the last result."""
        self._max_rows.zero_()
        self._on_host.fill_(_NOT_WRITTEN)

    def forget_limit(self) -> None:
        """Allow another limit from the next pass on; no captured graph may be replayed again."""
        self._reference = None

    @torch.no_grad()
    def add(self, needed: Int[Tensor, "1"], limit: int) -> None:
        """Add the rows that this rank needs in a pass of ``limit`` rows; the host reads nothing."""
        if self._reference is None:
            self._reference = limit
        # The rows are counted as if all passes had the limit of the first one, so that one number
        # is enough for all shapes, and one launch for the usual case of one shape.
        shift = self._reference - limit
        torch.maximum(self._max_rows, needed + shift if shift else needed, out=self._max_rows)

    @torch.no_grad()
    def start(self) -> Callable[[], None]:
        """Start the maximum over all ranks and its copy to the host, concurrently with later work.

        Returns:
            Function to call on the same stream when the run ends, so that a capture joins all work
            that it started.

        Communication: one all-reduce of a number over the world on the device.
        """
        torch.sub(self._max_rows, self._reference or 0, out=self._excess)
        pending = start_all_reduce(self._excess, self._world, "max")
        stream = self._stream
        if stream is None:

            def finish() -> None:
                pending.wait()
                self._on_host.copy_(self._excess)

            return finish
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            pending.wait()
            self._on_host.copy_(self._excess, non_blocking=True)
        return lambda: torch.cuda.current_stream().wait_stream(stream)

    def wait(self) -> int:
        """Wait for the result of the device, and return it; above 0, rows were missing."""
        while (excess := int(self._on_host)) == _NOT_WRITTEN:
            # The query raises the errors of the device, after which the result would never come.
            torch.cuda.current_stream().query()
            sleep(_PAUSE)
        return excess


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
