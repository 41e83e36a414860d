"""Captured parts count themselves on the device, and the host reports the last part that began."""

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


def test_the_host_reports_the_last_part_that_the_device_has_begun() -> None:
    counter = DeviceCounter(CPU)
    assert counter.progress is None
    counter.launch(["first", "second"])
    counter.launch(["third"])
    assert counter.progress == DeviceProgress(0, 3, "")
    for number, part in enumerate(("first", "second", "third"), start=1):
        counter.advance()
        assert counter.progress == DeviceProgress(number, 3, part)
    assert str(counter.progress) == "the device has begun 3 of 3 captured parts, last third"


def test_parts_are_recorded_only_for_a_device_counter() -> None:
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
    """The device stops."""


def stopped(rank: int, size: int) -> tuple[str, RankStatus]:
    """Return the report and status of a device whose second collective in a graph never starts."""
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


def test_a_hang_report_names_the_last_part_of_a_stopped_device() -> None:
    for text, status in run_world(stopped, 2):
        assert status.device == DeviceProgress(5, 6, "F of microbatch 1 in chunk 0")
        assert (
            "over tp (number 6 there, ranks 0, 1); the device has begun 5 of 6 captured parts, "
            "last F of microbatch 1 in chunk 0" in text
        )


class Places(Callback):
    """Record the progress of the device after each step."""

    def __init__(self) -> None:
        self.progress: list[DeviceProgress | None] = []

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        counter = strategy_of(trainer).mesh.journal.device
        assert counter is not None
        self.progress.append(counter.progress)


def fits(rank: int, size: int) -> list[list[DeviceProgress | None]]:
    outcomes = []
    for graphs, layout in ((FULL, {"pp": 2}), (SEGMENTS, {"tp": 2}), (SEGMENTS, {"pp": 2})):
        places = Places()
        with_graphs = fit(graphs, size, layout, callbacks=(places,))
        assert with_graphs.differences_from(fit(None, size, layout)) == []
        outcomes.append(places.progress)
    return outcomes


def test_fits_with_graphs_report_the_last_captured_part_of_each_step() -> None:
    for stage, (full_graph, segments, segments_of_stages) in enumerate(run_world(fits, 2)):
        # Two eager steps come first. Then each step has two forward and two backward passes. The
        # last stage first receives.
        assert full_graph[:2] == [None, None]
        num_parts = 4 + stage
        assert [progress and progress[:2] for progress in full_graph[2:]] == [
            (n * num_parts, n * num_parts) for n in (1, 2, 3)
        ]
        assert all(
            progress is not None and progress.part == "B of microbatch 1 in chunk 0"
            for progress in full_graph[2:]
        )
        assert segments[:2] == [None, None]
        for place in segments[2:]:
            assert place is not None
            assert place.begun == place.launched
            assert place.part.startswith("embedding, layers 0..1, head, backward, slot 0")
        # Transfers between stages lie outside of the pieces, so that no piece can hang.
        assert segments_of_stages == [None] * 5
