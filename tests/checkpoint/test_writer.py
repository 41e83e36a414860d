"""Background saves write the values of the moment of the call, run one at a time, and raise their
failures in training.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from functools import partial

import pytest
import torch

from lightning_megatron.checkpoint import (
    CheckpointWriter,
    Entry,
    load_metadata,
    load_rank_state,
    read_full,
    staging,
)
from lightning_megatron.checkpoint.entries import assign_writers, boxes_to_write
from lightning_megatron.checkpoint.save import CollectiveSave
from lightning_megatron.checkpoint.staging import HostCopies, choose_fitting
from lightning_megatron.errors import CheckpointSaveError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import replicated_spec
from tests.checkpoint.pieces import WEIGHT, entries, entry_of, fill_disk, names_in, value_in

MESH = ParallelMesh.single()


class Unknown:
    """A class that safe unpickling does not know."""


@pytest.fixture
def writer() -> Iterator[CheckpointWriter]:
    writer = CheckpointWriter(MESH)
    yield writer
    writer.close()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Hold every save back until the test opens the gate."""
    opened, run = threading.Event(), CollectiveSave.run

    def wait_then_run(self: CollectiveSave) -> None:
        assert opened.wait(30), "the test never opened the gate"
        run(self)

    monkeypatch.setattr(CollectiveSave, "run", wait_then_run)
    yield opened
    opened.set()


def test_a_background_save_writes_the_values_of_its_start(tmp_path, writer, gate):
    tensors = entries(1.0, size=1000) | {"other": entry_of(torch.arange(12.0).view(3, 4).t())}
    metadata, state = {"global_step": 1, "list": [1]}, {"seen": torch.zeros(2)}
    writer.save(tmp_path / "a", tensors, metadata, state, background=True)
    tensors[WEIGHT].tensor.fill_(7)
    tensors["other"].tensor.zero_()
    metadata["list"].append(2)  # type: ignore[attr-defined]
    state["seen"].fill_(1)
    assert not (tmp_path / "a").exists()
    gate.set()
    writer.wait()
    assert value_in(tmp_path / "a") == 1.0
    assert load_metadata(tmp_path / "a") == {"global_step": 1, "list": [1]}
    assert load_rank_state(tmp_path / "a", MESH).values["seen"].tolist() == [0, 0]


def test_a_second_save_waits_for_the_first_and_reuses_its_memory(tmp_path, writer):
    tensors = entries(1.0)
    for step in range(4):
        tensors[WEIGHT].tensor.fill_(step)
        writer.save(tmp_path / f"step={step}", tensors, {"global_step": step}, {}, background=True)
    writer.wait()
    assert [value_in(tmp_path / f"step={step}") for step in range(4)] == [0, 1, 2, 3]
    assert len(writer._copies._buffers) == 1


def test_a_background_failure_is_raised_once_in_training(tmp_path, monkeypatch):
    writer = CheckpointWriter(MESH)
    save_another = partial(writer.save, tmp_path / "b", entries(), {}, {})
    for call in (writer.poll, writer.wait, save_another, writer.close):
        fill_disk(monkeypatch, ".distcp", 500)
        writer.save(tmp_path / "a", entries(size=1000), {}, {}, background=True)
        assert writer._running is not None
        writer._running.join()
        monkeypatch.undo()
        with pytest.raises(CheckpointSaveError, match=r"No space left.*/\.a\.unfinished/__0_0"):
            call()
        writer.save(tmp_path / "c", entries(3.0), {}, {}, background=True)
        writer.close()
        assert value_in(tmp_path / "c") == 3.0
        assert names_in(tmp_path) == ["c"]


def test_a_value_that_cannot_be_pickled_fails_its_save_and_not_the_next(tmp_path, writer):
    for background in (False, True):
        with pytest.raises(CheckpointSaveError, match="lambda"):  # noqa: PT012
            writer.save(tmp_path / "a", entries(), {"f": lambda: None}, {}, background=background)
            writer.wait()
        assert names_in(tmp_path) == []
    writer.save(tmp_path / "a", entries(), {}, {}, background=True)
    writer.wait()
    assert names_in(tmp_path) == ["a"]


def test_removal_waits_for_the_pending_save(tmp_path, writer, gate):
    gate.set()
    writer.save(tmp_path / "old", entries(), {}, {})
    gate.clear()
    writer.save(tmp_path / "new", entries(2.0), {}, {}, background=True)
    writer.remove(tmp_path / "old")
    assert value_in(tmp_path / "old") == 1.0
    gate.set()
    writer.wait()
    assert names_in(tmp_path) == ["new"]
    (tmp_path / "link").symlink_to(tmp_path / "new")
    writer.remove(tmp_path / "link")
    assert names_in(tmp_path) == ["new"], "only the link is removed"


def test_tensors_that_fit_into_spare_memory_are_chosen_in_order():
    assert choose_fitting([5, 3, 4, 1, 1], 9) == [True, True, False, True, False]


def test_a_checkpoint_stays_when_the_save_of_its_replacement_fails(
    tmp_path, writer, gate, monkeypatch, caplog
):
    gate.set()
    writer.save(tmp_path / "old", entries(), {}, {})
    gate.clear()
    fill_disk(monkeypatch, "meta.pt", 10)
    writer.save(tmp_path / "new", entries(2.0), {}, {}, background=True)
    writer.remove(tmp_path / "old")
    gate.set()
    assert writer._running is not None
    writer._running.join()
    # The save has failed, but training has not raised the error yet.
    writer.remove(tmp_path / "old")
    with pytest.raises(CheckpointSaveError, match=r"meta\.pt"):
        writer.wait()
    assert names_in(tmp_path) == ["old"]
    assert value_in(tmp_path / "old") == 1.0
    assert caplog.text.count("is kept, because the save of") == 2


def test_values_that_loading_would_refuse_are_logged_once_when_they_are_saved(
    tmp_path, writer, caplog
):
    metadata = {"fine": 1, "callbacks": {"Mine": {"best": Unknown(), "count": 2}}}
    with caplog.at_level(logging.WARNING):
        for name in ("a", "b"):
            writer.save(tmp_path / name, entries(), metadata, {"path": tmp_path}, background=True)
            writer.wait()
    assert caplog.text.count("['Mine']['best'] (tests.checkpoint.test_writer.Unknown)") == 1
    assert caplog.text.count("path (pathlib.PosixPath)") == 1
    assert "fine" not in caplog.text


def test_host_copies_share_one_buffer_and_have_storages_of_their_own_size(tmp_path):
    copies = HostCopies(torch.device("cpu"))
    tensors = [torch.arange(5, dtype=torch.int8), torch.ones(3, 3).t()[1:], torch.empty(0)]
    named = {str(number): entry_of(tensor) for number, tensor in enumerate(tensors)}
    pieces = boxes_to_write(named, MESH)
    for _ in range(2):
        copied = copies.copy(pieces)
        assert len(copies._buffers) == 1
        for piece, copy in zip(pieces, copied, strict=True):
            assert torch.equal(piece.view, copy.view)
            assert copy.view.data_ptr() != piece.view.data_ptr()
            assert copy.view.untyped_storage().size() == copy.view.nbytes


def test_a_save_uses_the_reserved_memory(tmp_path, writer):
    tensors = {str(n): entry_of(torch.full((1000 * n,), float(n))) for n in range(1, 5)}
    writer.reserve(tensors)
    (buffer,) = writer._copies._buffers
    assert 40_000 <= buffer.memory.nbytes < 80_000
    writer.save(tmp_path / "a", tensors, {}, {}, background=True)
    writer.wait()
    assert writer._copies._buffers == [buffer]
    assert read_full(tmp_path / "a")["4"].tolist() == [4.0] * 4000


def test_data_parallel_ranks_divide_the_writing():
    assert assign_writers([10 * 65536, 100, 10 * 65536, 200], 2) == [1, 0, 0, 0]


@pytest.mark.gpu
@pytest.mark.parametrize("room", [0, 100 << 20, 10 << 30])
def test_a_gpu_copies_while_it_computes_and_updates_wait_for_the_copies(
    room, tmp_path, monkeypatch
):
    monkeypatch.setattr(staging, "spare_memory", lambda device: room)
    device = torch.device("cuda", 0)
    writer = CheckpointWriter(ParallelMesh.single(device), defer_copies=True)
    tensor = torch.ones(64 << 20, device=device)
    statistics = torch.ones(4, device=device)
    tensors = {
        WEIGHT: entry_of(tensor),
        "step": entry_of(torch.tensor(3.0)),
        "slow": entry_of(tensor.view(8192, -1).t()),
        "statistics": Entry(statistics, replicated_spec(statistics), changes_in_forward=True),
    }
    for value in (1.0, 2.0):
        tensor.fill_(value)
        statistics.fill_(value)
        writer.save(tmp_path / "a", tensors, {}, {}, background=True)
        statistics.fill_(99)  # as a forward pass may
        busy = torch.randn(2048, 2048, device=device)
        for _ in range(20):
            busy = busy @ busy
        writer.wait_for_snapshot()
        tensor.fill_(99)
        writer.wait()
        assert value_in(tmp_path / "a") == value
        assert all(buffer.memory.is_pinned() for buffer in writer._copies._buffers)
        assert set(read_full(tmp_path / "a")["statistics"].tolist()) == {value}
        assert bool((read_full(tmp_path / "a")["slow"] == value).all())
    writer.close()
