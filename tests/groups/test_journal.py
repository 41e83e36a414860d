"""The journal records collectives of a captured computation once and counts them at every replay."""

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


def _world(rank: int, size: int) -> dict[str, Any]:
    mesh = ParallelMesh.create(ParallelLayout(size, tp=size))
    journal = mesh.journal
    communicate(mesh)
    once = dict(journal.counts)
    last = journal.last
    with journal.recording() as calls:
        communicate(mesh)
    results = {"once": once, "recorded": calls, "unmoved": (dict(journal.counts), journal.last)}
    assert results["unmoved"] == (once, last)
    journal.repeat(calls, LABEL)
    results |= {"counts": dict(journal.counts), "last": journal.last}
    communicate(mesh)
    results["later"] = journal.last
    mesh.destroy()
    return results


def test_a_repeated_recording_counts_like_the_recorded_computation() -> None:
    for results in run_world(_world, 2):
        assert results["once"] == {"tp": 2}
        assert results["recorded"] == [
            RecordedCall("all_gather", "tp", (0, 1)),
            RecordedCall("all_reduce", "tp", (0, 1)),
        ]
        assert results["counts"] == {"tp": 4}
        assert results["last"] == Call(LABEL, "tp", 4, (0, 1))
        # A later wait still names the collective that it waits for.
        assert results["later"] == Call("all_gather", "tp", 5, (0, 1))


def test_counts_of_a_replaying_rank_equal_eager_counts_after_repeat() -> None:
    eager, replayed = Journal(), Journal()
    for journal in (eager, replayed):
        journal.note("all_reduce", "dp", (0, 1))
    eager.note("all_gather", "tp", (0, 1))
    with replayed.recording() as calls:
        replayed.note("all_gather", "tp", (0, 1))
    assert eager.counts != replayed.counts
    replayed.repeat(calls, LABEL)
    assert eager.counts == replayed.counts


def test_a_replay_without_collectives_keeps_the_last_call() -> None:
    journal = Journal()
    journal.repeat([], LABEL)
    assert journal.last is None
    first = journal.note("all_reduce", "dp", (0, 1))
    journal.repeat([], LABEL)
    assert journal.last == Call(*first)


def test_a_replay_of_an_exchange_is_reported_as_an_exchange() -> None:
    journal = Journal()
    with journal.recording() as calls:
        journal.note("exchange", "pp neighbours", (1,))
    journal.repeat(calls, LABEL)
    assert journal.last is not None
    assert journal.last.is_exchange
    assert not Call(LABEL, "tp", 1, (0, 1)).is_exchange


def test_nested_recordings_raise_and_leave_the_journal_usable() -> None:
    journal = Journal()
    with (
        pytest.raises(RuntimeError, match="must not be nested"),
        journal.recording(),
        journal.recording(),
    ):
        pass
    journal.note("all_reduce", "dp", (0, 1))
    assert journal.counts == {"dp": 1}


def test_a_replay_after_the_run_is_refused() -> None:
    journal = Journal()
    with journal.recording() as calls:
        journal.note("all_reduce", "dp", (0, 1))
    journal.end(["dp"])
    with pytest.raises(UnsupportedError, match="after the run"):
        journal.repeat(calls, LABEL)
