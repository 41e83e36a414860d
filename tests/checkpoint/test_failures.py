"""Saves that fail or die half-way raise a clear error, leave no files and keep the last good
checkpoint.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from lightning_megatron.checkpoint import (
    CheckpointWriter,
    clean_unfinished,
    list_checkpoints,
    save_checkpoint,
    verify_checkpoint,
)
from lightning_megatron.checkpoint.directory import unfinished_path
from lightning_megatron.errors import CheckpointSaveError
from lightning_megatron.groups.mesh import ParallelMesh
from tests.checkpoint.pieces import entries, fill_disk, names_in, value_in

MESH = ParallelMesh.single()

# Saves over a good checkpoint, and dies at the moment that a test names.
SCRIPT = """
import os, sys
from pathlib import Path
from lightning_megatron.checkpoint import save_checkpoint
from lightning_megatron.checkpoint import directory
from lightning_megatron.groups.mesh import ParallelMesh
from tests.checkpoint.pieces import entries
folder, moment = Path(sys.argv[1]), sys.argv[2]
mesh = ParallelMesh.single()
save_checkpoint(folder / "a", entries(1.0), {"global_step": 1}, {}, mesh)
if moment == "before the header":
    directory.Header.write = lambda *arguments: os._exit(9)
elif moment == "before the renames":
    os.path.lexists = lambda path: os._exit(9)
elif moment == "between the renames":
    rename = Path.rename
    def die_at_the_second_rename(path, target):
        rename(path, target) if "unfinished" not in path.name else os._exit(9)
    Path.rename = die_at_the_second_rename
elif moment == "after the renames":
    directory.sync_folder = lambda path: None if "unfinished" in path.name else os._exit(9)
save_checkpoint(folder / "a", entries(2.0, size=100_000), {"global_step": 2}, {}, mesh)
"""

MOMENTS = ("before the header", "before the renames", "between the renames", "after the renames")


def test_a_full_disk_is_reported_and_the_last_good_checkpoint_stays(tmp_path):
    path = tmp_path / "a"
    save_checkpoint(path, entries(1.0), {}, {}, MESH)
    for name in (".distcp", ".metadata", "meta.pt", "checkpoint.json"):
        with pytest.MonkeyPatch.context() as patch:
            fill_disk(patch, name, 100)
            with pytest.raises(CheckpointSaveError) as caught:
                save_checkpoint(path, entries(2.0, size=10_000), {}, {}, MESH)
        assert "No space left on device" in str(caught.value)
        assert str(unfinished_path(path)) in str(caught.value)
        assert names_in(tmp_path) == ["a"]
        assert value_in(path) == 1.0
        verify_checkpoint(path)
    save_checkpoint(path, entries(3.0), {}, {}, MESH)
    assert value_in(path) == 3.0


def test_the_error_names_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(CheckpointSaveError, match=r"NotADirectoryError.*file/\.a\.unfinished"):
        save_checkpoint(tmp_path / "file" / "a", entries(), {}, {}, MESH)


def test_errors_of_any_kind_are_raised_as_save_errors_but_not_interrupts(tmp_path, monkeypatch):
    for error, expected in (
        (ZeroDivisionError("a bug"), CheckpointSaveError),
        (KeyboardInterrupt("a bug"), KeyboardInterrupt),
    ):
        cleaning = Mock(side_effect=error)
        monkeypatch.setattr("lightning_megatron.checkpoint.directory.clean_unfinished", cleaning)
        with pytest.raises(expected, match="a bug"):
            save_checkpoint(tmp_path / "a", entries(), {}, {}, MESH)


def test_a_process_that_dies_while_saving_leaves_a_complete_checkpoint(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    for number, moment in enumerate(MOMENTS):
        folder = tmp_path / str(number)
        folder.mkdir()
        command = [sys.executable, "-c", SCRIPT, str(folder), moment]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert ended.returncode == 9, ended.stderr
        verify_checkpoint(folder / "a")
        assert list_checkpoints(folder) == [str(folder / "a")]
        clean_unfinished(folder)
        assert names_in(folder) == ["a"]
        assert value_in(folder / "a") == (2.0 if moment == "after the renames" else 1.0), moment


def test_a_full_and_a_read_only_tmpfs_are_reported(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", disk], capture_output=True
    ).returncode:
        pytest.skip("mounting a small disk is not permitted here")
    try:
        save_checkpoint(disk / "a", entries(1.0), {}, {}, MESH)
        with pytest.raises(
            CheckpointSaveError, match=r"No space left on device: '.*\.b\.unfinished/__0_0\.distcp'"
        ):
            save_checkpoint(disk / "b", entries(2.0, size=100_000), {}, {}, MESH)
        assert names_in(disk) == ["a"]
        verify_checkpoint(disk / "a")
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        with pytest.raises(CheckpointSaveError, match="Read-only file system"):
            save_checkpoint(disk / "a", entries(2.0), {}, {}, MESH)
        assert value_in(disk / "a") == 1.0
    finally:
        subprocess.run(["umount", disk], check=True)


@pytest.mark.parametrize("background", [False, True])
def test_folders_that_cannot_be_removed_are_left_to_the_next_save_with_a_warning(
    tmp_path, monkeypatch, caplog, background
):
    def refuse(path: Path) -> None:
        raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))

    writer = CheckpointWriter(MESH)
    writer.save(tmp_path / "a", entries(1.0), {}, {})
    writer.save(tmp_path / "b", entries(2.0), {}, {})
    # This happens when another machine reads the old files over NFS.
    monkeypatch.setattr("shutil.rmtree", refuse)
    writer.save(tmp_path / "b", entries(3.0), {"global_step": 2}, {}, background=background)
    writer.remove(tmp_path / "a")
    writer.wait()
    assert names_in(tmp_path) == [".a.removed", ".b.replaced", "b"]
    assert value_in(tmp_path / "b") == 3.0
    writer.save(tmp_path / "c", entries(4.0), {}, {}, background=background)
    writer.wait()
    assert caplog.text.count("could not be removed") == 4
    monkeypatch.undo()
    writer.save(tmp_path / "d", entries(5.0), {}, {})
    assert names_in(tmp_path) == ["b", "c", "d"]
    writer.close()


def test_cleaning_removes_only_leftovers_of_saves_and_restores_a_replaced_checkpoint(tmp_path):
    save_checkpoint(tmp_path / "a", entries(1.0), {}, {}, MESH)
    save_checkpoint(tmp_path / "b", entries(2.0), {}, {}, MESH)
    for name in (".a.unfinished", ".a.replaced", ".c.removed", ".unfinished", "d.unfinished", ".d"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_bytes(b"x")
    (tmp_path / ".file.unfinished").write_bytes(b"")
    (tmp_path / "b").rename(tmp_path / ".b.replaced")
    clean_unfinished(tmp_path)
    assert names_in(tmp_path) == [".d", ".file.unfinished", ".unfinished", "a", "b", "d.unfinished"]
    assert value_in(tmp_path / "b") == 2.0
    clean_unfinished(tmp_path / "absent")
