"""Test that a replayed graph counts its parts in memory that the host reads meanwhile."""

from __future__ import annotations

import time

import pytest
import torch

from lightning_megatron.graphs.cuda import CudaBackend
from lightning_megatron.groups.device_counter import DeviceCounter, DeviceProgress
from lightning_megatron.groups.journal import Journal

pytestmark = pytest.mark.gpu

#: Duration of the second part on the device, about half a second (cycles).
_CYCLES = 10**9


def test_the_host_reads_which_part_of_a_graph_the_device_runs():
    journal = Journal()
    device = torch.device("cuda", torch.cuda.current_device())
    counter = journal.device = DeviceCounter(device)
    backend = CudaBackend()

    def step() -> None:
        journal.begin_part("first")
        journal.begin_part("second")
        torch.cuda._sleep(_CYCLES)
        journal.begin_part("third")

    with torch.cuda.stream(torch.cuda.Stream()):
        with journal.recording("a step"):
            graph, _ = backend.capture(step, backend.make_pool())
        assert counter.progress is None
        torch.cuda.synchronize()
        for number in (1, 2):
            journal.repeat([], "a step", journal.parts)
            graph.replay()
            inside = DeviceProgress(3 * number - 1, 3 * number, "second")
            limit = time.monotonic() + 5
            while counter.progress != inside and time.monotonic() < limit:
                pass
            assert counter.progress == inside
            torch.cuda.synchronize()
            assert counter.progress == DeviceProgress(3 * number, 3 * number, "third")
        graph.release()
