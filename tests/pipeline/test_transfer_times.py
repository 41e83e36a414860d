"""Transfers are timed between all neighbours, with messages of the size that steps send."""

from __future__ import annotations

import pytest

from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.pipeline import transfer_times
from lightning_megatron.pipeline.transfer_times import measure_transfer, neighbours
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.plan.placement import Placement
from tests.world import run_world


@pytest.mark.parametrize(
    ("shape", "stages", "chunks", "pairs"),
    [
        ("loop", 1, 1, []),
        ("loop", 2, 2, [(0, 1)]),
        ("loop", 4, 1, [(0, 1), (2, 3), (1, 2)]),
        ("loop", 3, 2, [(0, 1), (0, 2), (1, 2)]),
        ("v", 4, 2, [(0, 1), (2, 3), (1, 2)]),
    ],
)
def test_neighbours_are_the_stages_between_which_microbatches_pass(
    shape: str, stages: int, chunks: int, pairs: list[tuple[int, int]]
) -> None:
    assert neighbours(Placement(shape, stages, chunks)) == pairs  # type: ignore[arg-type]


def _measure(rank: int, size: int) -> tuple[list[float], list[int]]:
    mesh = ParallelMesh.create(ParallelLayout(size, pp=3, vpp=2))
    sizes = []
    start = transfer_times.start_transfers

    def record_sizes(sends, receives, axis):  # type: ignore[no-untyped-def]
        sizes.extend(tensor.nbytes for tensor, _ in (*sends, *receives))
        return start(sends, receives, axis)

    transfer_times.start_transfers = record_sizes
    times = [measure_transfer(num_bytes + rank, mesh) for num_bytes in (8, 2**24)]
    mesh.destroy()
    return times, sizes


def test_larger_messages_take_longer_and_all_stages_send_the_largest_size() -> None:
    ranks = run_world(_measure, 3)
    # Stage 0 starts the transfers with both neighbours, stage 1 with the last stage, and the last
    # stage with none.
    for times, sizes in ranks:
        assert set(sizes) == {8 + 2, 2**24 + 2}
        assert len(sizes) == 2 * 2 * 2 * 9, "two sizes, two pairs, there and back, nine rounds"
        assert times == [0.0, 0.0] or 0 < times[0] < times[1]
    assert [times == [0.0, 0.0] for times, _ in ranks] == [False, False, True]
