"""Captured parts count themselves on the device, and the host says at which of them it stands."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer

from lightning_megatron.graphs.effects import EffectObservers
from lightning_megatron.graphs.tape import TapeBackend
from lightning_megatron.groups.collectives import all_reduce_
from lightning_megatron.groups.device_counter import DeviceCounter, DeviceProgress
from lightning_megatron.groups.generators import GeneratorPool
from lightning_megatron.groups.journal import Journal
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.strategy.process.rank_status import RankStatus, hang_report
from tests.strategy.graph_fits import FULL, SEGMENTS, fit, strategy_of
from tests.world import run_world

CPU = torch.device("cpu")


def test_the_host_names_the_part_that_the_device_has_begun_last() -> None:
    word = DeviceCounter(CPU)
    assert word.progress is None
    word.launch(["first", "second"])
    word.launch(["third"])
    assert word.progress == DeviceProgress(0, 3, "")
    for number, part in enumerate(("first", "second", "third"), start=1):
        word.advance()
        assert word.progress == DeviceProgress(number, 3, part)
    assert str(word.progress) == "the device has begun 3 of 3 captured parts, last third"


def test_parts_are_marked_only_in_recordings_for_a_word() -> None:
    journal = Journal()
    with journal.recording("a piece"):
        journal.note("all_reduce", "dp", (0, 1))
    assert journal.parts == []
    journal.device = DeviceCounter(CPU)
    journal.begin_part("eager")
    with journal.recording("a piece"):
        journal.note("all_reduce", "dp", (0, 1))
    assert journal.parts == ["a piece"]
    with journal.recording("a piece"):
        journal.begin_part("F of microbatch 0 in chunk 0")
        journal.note("all_reduce", "dp", (0, 1))
        journal.note("all_reduce", "dp", (0, 1))
    assert journal.parts == ["F of microbatch 0 in chunk 0"]


class Stop(RuntimeError):
    """The device gets no further."""


def stopped(rank: int, size: int) -> tuple[str, RankStatus]:
    """Return where a device stands whose second collective in a graph never starts."""
    mesh = ParallelMesh.create(ParallelLayout(size, tp=2))
    journal = mesh.journal
    journal.device = DeviceCounter(CPU)
    observers = EffectObservers(mesh.random, journal)
    value = torch.ones(2)
    has_stopped = False

    def step() -> torch.Tensor:
        for number in range(3):
            journal.begin_part(f"F of microbatch {number} in chunk 0")
            if number == 1:
                mesh.launcher.run(stop)
            all_reduce_(value, mesh.tp)
        return value

    def stop() -> None:
        if has_stopped:
            raise Stop

    with observers.recording("the whole step", GeneratorPool(CPU)) as recorder:
        graph, _ = TapeBackend(mesh.launcher).capture(step, TapeBackend().make_pool())
    effects = recorder.effects
    with observers.repeat(effects):
        graph.replay()
    assert journal.device.progress == DeviceProgress(3, 3, "F of microbatch 2 in chunk 0")
    has_stopped = True
    with pytest.raises(Stop), observers.repeat(effects):
        graph.replay()
    status = RankStatus.observe(rank, 1, "train, global_step 5", journal)
    assert RankStatus.from_text(status.to_text()) == status
    return hang_report({rank: status}, [rank], {}), status


def test_a_report_says_which_part_a_stopped_device_has_reached() -> None:
    for text, status in run_world(stopped, 2):
        assert status.device == DeviceProgress(5, 6, "F of microbatch 1 in chunk 0")
        assert (
            "over tp (number 6 there, ranks 0, 1); the device has begun 5 of 6 captured parts, "
            "last F of microbatch 1 in chunk 0" in text
        )


class Places(Callback):
    """Note where the device stands after each step."""

    def __init__(self) -> None:
        self.found: list[DeviceProgress | None] = []

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        word = strategy_of(trainer).mesh.journal.device
        assert word is not None
        self.found.append(word.progress)


def fits(rank: int, size: int) -> list[list[DeviceProgress | None]]:
    found = []
    for graphs, layout in ((FULL, {"pp": 2}), (SEGMENTS, {"tp": 2}), (SEGMENTS, {"pp": 2})):
        places = Places()
        by_graphs = fit(graphs, size, layout, callbacks=(places,))
        assert by_graphs.differences_from(fit(None, size, layout)) == []
        found.append(places.found)
    return found


def test_the_parts_of_a_fit() -> None:
    for stage, (whole, pieces, without) in enumerate(run_world(fits, 2)):
        # Two eager steps come first. Then two microbatches pass forward and backward in a step. The
        # last stage first receives.
        assert whole[:2] == [None, None]
        each = 4 + stage
        assert [one and one[:2] for one in whole[2:]] == [(n * each, n * each) for n in (1, 2, 3)]
        assert all(
            one is not None and one.part == "B of microbatch 1 in chunk 0" for one in whole[2:]
        )
        assert pieces[:2] == [None, None]
        for place in pieces[2:]:
            assert place is not None
            assert place.begun == place.launched
            assert place.part.startswith("embedding, layers 0..1, head, backward, slot 0")
        # Transfers between stages lie outside of the pieces, in which nothing can hang.
        assert without == [None] * 5
