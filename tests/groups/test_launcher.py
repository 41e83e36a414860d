"""A recorder gets every collective as a function that it can run again on new values."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_megatron.groups.collectives import (
    all_gather_sequence,
    all_reduce_,
    all_to_all_rows,
    broadcast_,
    reduce_scatter_sequence,
)
from lightning_megatron.groups.launcher import Work
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.p2p import start_transfers
from lightning_megatron.groups.pending import (
    start_all_gather,
    start_all_reduce,
    start_all_to_all,
    start_reduce_scatter,
)
from lightning_megatron.plan.layout import ParallelLayout
from tests.world import run_world


class StoringRecorder:
    """Recorder that stores functions which repeat the collectives."""

    def __init__(self) -> None:
        self.entries: list[tuple[Callable[[], object], Tensor]] = []

    def run(self, collective: Callable[[], object], written: Sequence[Tensor]) -> None:
        collective()
        self.entries.append((collective, *written))

    def start(self, collective: Callable[[], Work], written: Sequence[Tensor]) -> Work:
        self.entries.append((lambda: collective().wait(), *written))
        return collective()


def _run_again(rank: int, size: int) -> None:
    mesh = ParallelMesh.create(ParallelLayout(size, tp=size))
    tp = mesh.tp
    assert tp.launcher is mesh.launcher is mesh.on_cpu("tp").launcher

    def all_gather(x: Tensor) -> Tensor:
        out = x.new_empty(size * len(x))
        start_all_gather(out, x, tp).wait()
        return out

    def reduce_scatter(x: Tensor) -> Tensor:
        out = x.new_empty(len(x) // size)
        start_reduce_scatter(out, x, tp).wait()
        return out

    def all_reduce(x: Tensor) -> Tensor:
        start_all_reduce(x, tp).wait()
        return x

    def all_to_all(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        start_all_to_all(out, x, (2, 2), (2, 2), tp).wait()
        return out

    def exchange(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        start_transfers([(x, 1 - rank)], [(out, 1 - rank)], tp).wait()
        return out

    collectives: list[Callable[[Tensor], Tensor]] = [
        *(all_gather, reduce_scatter, all_reduce, all_to_all, exchange),
        lambda x: all_reduce_(x, tp),
        lambda x: broadcast_(x, tp),
        lambda x: all_gather_sequence(x, tp),
        lambda x: reduce_scatter_sequence(x, tp),
        lambda x: all_to_all_rows(x, (2, 2), (2, 2), tp),
    ]
    for collective in collectives:
        x = torch.arange(4.0) + 10 * rank
        values = torch.arange(4.0) ** 2 - rank
        recorder = mesh.launcher.recorder = StoringRecorder()
        collective(x)
        mesh.launcher.recorder = None
        x.copy_(values)
        ((repeat, written),) = recorder.entries
        repeat()
        assert torch.equal(written, collective(values)), "the collective read the new values"
    mesh.destroy()


def test_a_recorder_can_run_every_collective_again_on_new_values() -> None:
    run_world(_run_again, 2)
