"""Collectives of captured computations: recorded once, and counted again at every replay."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.collectives import all_reduce_
from lightning_megatron.groups.journal import Call, Journal, RecordedCall
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.pending import start_all_gather
from lightning_megatron.plan.layout import ParallelLayout
from tests.world import run_world

LABEL = "replay of layers 3..4, backward, 2 collectives"


def communicate(mesh: ParallelMesh) -> None:
    """Start and complete two collectives."""
    x = torch.ones(2)
    pending = start_all_gather(torch.empty(4), x, mesh.tp)
    all_reduce_(x, mesh.tp)
    pending.wait()


def world(rank: int, size: int) -> dict[str, Any]:
    mesh = ParallelMesh.create(ParallelLayout(size, tp=size))
    journal = mesh.journal
    communicate(mesh)
    once = dict(journal.counts)
    last = journal.last
    with journal.recording() as calls:
        communicate(mesh)
    found = {"once": once, "recorded": calls, "unmoved": (dict(journal.counts), journal.last)}
    assert found["unmoved"] == (once, last)
    journal.repeat(calls, LABEL)
    found |= {"counts": dict(journal.counts), "last": journal.last}
    communicate(mesh)
    found["later"] = journal.last
    mesh.destroy()
    return found


def test_a_repeated_recording_counts_like_the_computation_itself() -> None:
    for found in run_world(world, 2):
        assert found["once"] == {"tp": 2}
        assert found["recorded"] == [
            RecordedCall("all_gather", "tp", (0, 1)),
            RecordedCall("all_reduce", "tp", (0, 1)),
        ]
        assert found["counts"] == {"tp": 4}
        assert found["last"] == Call(LABEL, "tp", 4, (0, 1))
        # A later wait names the collective that it waits for, as ever.
        assert found["later"] == Call("all_gather", "tp", 5, (0, 1))


def test_a_rank_that_does_not_repeat_looks_late() -> None:
    eager, replayed = Journal(), Journal()
    for journal in (eager, replayed):
        journal.note("all_reduce", "dp", (0, 1))
    eager.note("all_gather", "tp", (0, 1))
    with replayed.recording() as calls:
        replayed.note("all_gather", "tp", (0, 1))
    assert eager.counts != replayed.counts
    replayed.repeat(calls, LABEL)
    assert eager.counts == replayed.counts


def test_a_replay_without_collectives_leaves_the_last_one() -> None:
    journal = Journal()
    journal.repeat([], LABEL)
    assert journal.last is None
    first = journal.note("all_reduce", "dp", (0, 1))
    journal.repeat([], LABEL)
    assert journal.last == Call(*first)


def test_exchanges_in_a_replay_are_still_distinguished_from_collectives() -> None:
    journal = Journal()
    with journal.recording() as calls:
        journal.note("exchange", "pp neighbours", (1,))
    journal.repeat(calls, LABEL)
    assert journal.last is not None
    assert journal.last.is_exchange
    assert not Call(LABEL, "tp", 1, (0, 1)).is_exchange


def test_recordings_are_not_nested_and_end_with_an_error() -> None:
    journal = Journal()
    with (
        pytest.raises(RuntimeError, match="must not be nested"),
        journal.recording(),
        journal.recording(),
    ):
        pass
    journal.note("all_reduce", "dp", (0, 1))
    assert journal.counts == {"dp": 1}


def test_a_replay_after_the_run_is_refused_like_its_collectives() -> None:
    journal = Journal()
    with journal.recording() as calls:
        journal.note("all_reduce", "dp", (0, 1))
    journal.end(["dp"])
    with pytest.raises(UnsupportedError, match="after the run"):
        journal.repeat(calls, LABEL)
