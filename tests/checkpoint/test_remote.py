"""One process saves, replaces, cleans and removes checkpoints behind URLs, which are visible only
when their header is written.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

import fsspec
import pytest

from lightning_megatron.checkpoint import (
    CheckpointWriter,
    clean_unfinished,
    is_sharded_checkpoint,
    list_checkpoints,
    load_metadata,
    load_rank_state,
    save_checkpoint,
    verify_checkpoint,
)
from lightning_megatron.checkpoint.directory import RemoteCheckpointPath
from lightning_megatron.checkpoint.header import HEADER
from lightning_megatron.checkpoint.storage import RemoteFolder
from lightning_megatron.errors import CheckpointSaveError, CorruptDataError, UnsupportedError
from lightning_megatron.groups.mesh import ParallelMesh
from tests.checkpoint.pieces import entries, value_in

MESH = ParallelMesh.single()
ROOT = "memory://run/checkpoints"


@pytest.fixture
def memory() -> Iterator[Any]:
    fs = fsspec.filesystem("memory")
    yield fs
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]


def file_names(fs: Any) -> list[str]:
    return sorted(path.rsplit("/", 1)[-1] for path in fs.find("/"))


def test_a_remote_checkpoint_changes_only_when_its_header_is_written(memory, monkeypatch):
    values_before = []
    publish = RemoteCheckpointPath.publish

    def record_then_publish(self: RemoteCheckpointPath, *arguments: Any) -> None:
        values_before.append(value_in(f"{ROOT}/a") if is_sharded_checkpoint(f"{ROOT}/a") else None)
        publish(self, *arguments)

    monkeypatch.setattr(RemoteCheckpointPath, "publish", record_then_publish)
    for value in (1.0, 2.0, 3.0):
        save_checkpoint(f"{ROOT}/a/", entries(value), {"step": 7}, {"seen": 5}, MESH)
        assert value_in(f"{ROOT}/a") == value
        assert load_metadata(f"{ROOT}/a") == {"step": 7}
        assert load_rank_state(f"{ROOT}/a", MESH).values == {"seen": 5}
        assert len(file_names(memory)) == 4
    assert values_before == [None, 1.0, 2.0]


@pytest.mark.parametrize("name", [".distcp", "checkpoint.json.new"])
def test_a_failed_remote_save_leaves_only_the_old_checkpoint(memory, monkeypatch, name):
    create = RemoteFolder.create

    @contextmanager
    def create_or_fail(self: RemoteFolder, file_name: str) -> Iterator[IO[bytes]]:
        if name in file_name:
            raise PermissionError(13, "Access denied", f"{self.url}/{file_name}")
        with create(self, file_name) as file:
            yield file

    save_checkpoint(f"{ROOT}/a", entries(1.0), {}, {}, MESH)
    monkeypatch.setattr(RemoteFolder, "create", create_or_fail)
    for path in ("a", "b"):
        with pytest.raises(CheckpointSaveError, match=rf"Access denied.*memory://run/.*/{path}/"):
            save_checkpoint(f"{ROOT}/{path}", entries(2.0), {}, {}, MESH)
    assert value_in(f"{ROOT}/a") == 1.0
    assert len(file_names(memory)) == 4
    assert not is_sharded_checkpoint(f"{ROOT}/b")


def test_cleaning_removes_only_files_of_interrupted_remote_saves(memory):
    save_checkpoint(f"{ROOT}/a", entries(1.0), {}, {}, MESH)
    unfinished = "save-0123456789abcdef"
    for path in (f"a/{unfinished}/x", f"b/{unfinished}/y", "b/save-me/z", "c/other", "save-0/w"):
        memory.pipe_file(f"/run/checkpoints/{path}", b"x")
    assert list_checkpoints(ROOT) == [f"{ROOT}/a"]
    clean_unfinished(ROOT)
    assert [name for name in file_names(memory) if len(name) == 1] == ["w", "z"]
    assert value_in(f"{ROOT}/a") == 1.0
    memory.pipe_file("/run/checkpoints/a/save-0123456789abcdef/x", b"x")
    save_checkpoint(f"{ROOT}/a", entries(2.0), {}, {}, MESH)
    assert not memory.exists("/run/checkpoints/a/save-0123456789abcdef")


def test_damage_is_named_and_skipped_and_cleaning_keeps_the_damaged_files(memory):
    for step in (1, 2):
        save_checkpoint(f"{ROOT}/step={step}", entries(), {"global_step": step}, {}, MESH)
    files = memory.find("/run/checkpoints/step=2")
    for name, damaged in (("meta.pt", r"save-[0-9a-f]+/meta\.pt"), (HEADER, HEADER)):
        path = next(path for path in files if path.endswith(name))
        memory.pipe_file(path, memory.cat_file(path)[:-9])
        with pytest.raises(CorruptDataError, match=rf"step=2/{damaged}"):
            verify_checkpoint(f"{ROOT}/step=2")
    clean_unfinished(ROOT)
    assert memory.find("/run/checkpoints/step=2") == files
    save_checkpoint(f"{ROOT}/step=2", entries(2.0), {}, {}, MESH)
    assert value_in(f"{ROOT}/step=2") == 2.0
    assert len(memory.find("/run/checkpoints/step=2")) == 4


def test_a_writer_saves_in_the_background_and_removes_remote_checkpoints(memory):
    writer = CheckpointWriter(MESH)
    tensors = entries(1.0)
    writer.save(f"{ROOT}/a", tensors, {}, {}, background=True)
    tensors["state_dict.weight"].tensor.fill_(9)
    writer.save(f"{ROOT}/b", tensors, {}, {}, background=True)
    writer.remove(f"{ROOT}/a")
    writer.close()
    assert list_checkpoints(ROOT) == [f"{ROOT}/b"]
    writer.remove(f"{ROOT}/b")
    assert file_names(memory) == []


def test_a_url_of_an_unknown_protocol_is_refused():
    with pytest.raises(UnsupportedError, match="nosuch://run.*Protocol not known"):
        list_checkpoints("nosuch://run")
