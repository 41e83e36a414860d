"""Saves that fail or die half-way raise a clear error, leave no files and keep the last good
checkpoint.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest

from lightning_megatron.checkpoint import (
    CheckpointWriter,
    clean_unfinished,
    find_newest,
    is_sharded_checkpoint,
    save_checkpoint,
    verify_checkpoint,
)
from lightning_megatron.checkpoint.directory import unfinished_path
from lightning_megatron.checkpoint.storage import LocalFolder
from lightning_megatron.errors import CheckpointSaveError
from lightning_megatron.groups.mesh import ParallelMesh
from tests.checkpoint.pieces import entries, fill_disk, names_in, value_in

MESH = ParallelMesh.single()
ROOT = Path(__file__).parents[2]

# Saves over a good checkpoint, and dies or reaches a limit at the moment that a test names.
SCRIPT = """
import os, resource, sys
from pathlib import Path
from lightning_megatron.checkpoint import save_checkpoint
from lightning_megatron.checkpoint import directory
from lightning_megatron.groups.mesh import ParallelMesh
from tests.checkpoint.pieces import entries
folder, moment = Path(sys.argv[1]), sys.argv[2]
mesh = ParallelMesh.single()
save_checkpoint(folder / "a", entries(1.0), {"global_step": 1}, {}, mesh)
if moment == "limit":
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
elif moment == "before the header":
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


def run_script(folder: Path, moment: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", SCRIPT, str(folder), moment]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def test_a_full_disk_is_reported_and_the_last_good_checkpoint_stays(tmp_path: Path) -> None:
    path = tmp_path / "a"
    save_checkpoint(path, entries(1.0), {}, {}, MESH)
    for name, number in (
        (".distcp", errno.ENOSPC),
        (".metadata", errno.EDQUOT),
        ("meta.pt", errno.ENOSPC),
        ("checkpoint.json", errno.ENOSPC),
    ):
        with pytest.MonkeyPatch.context() as patch:
            fill_disk(patch, name, 100, number)
            with pytest.raises(CheckpointSaveError) as caught:
                save_checkpoint(path, entries(2.0, size=10_000), {}, {}, MESH)
        assert f"[Errno {number}] No space left on device" in str(caught.value)
        assert str(unfinished_path(path)) in str(caught.value)
        assert f"saving {path} failed on 1 of 1 rank(s)" in str(caught.value)
        assert names_in(tmp_path) == ["a"]
        assert value_in(path) == 1.0
        verify_checkpoint(path)
    save_checkpoint(path, entries(3.0), {}, {}, MESH)
    assert value_in(path) == 3.0


def test_the_error_names_a_folder_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path, *arguments: object, **options: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(self))

    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(CheckpointSaveError, match=r"NotADirectoryError.*file/\.a\.unfinished"):
        save_checkpoint(tmp_path / "file" / "a", entries(), {}, {}, MESH)
    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(CheckpointSaveError, match=r"OSError: .*Read-only .*: '.*\.b\.unfinished'"):
        save_checkpoint(tmp_path / "b", entries(), {}, {}, MESH)
    assert names_in(tmp_path) == ["file"]


def test_a_file_whose_bytes_differ_from_those_written_fails_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = LocalFolder.create

    @contextmanager
    def create_and_damage(self: LocalFolder, name: str) -> Iterator[IO[bytes]]:
        with create(self, name) as file:
            yield file
        if name.endswith(".distcp"):
            with open(self.path / name, "r+b") as file:
                file.seek(700)
                file.write(b"x")

    monkeypatch.setattr(LocalFolder, "create", create_and_damage)
    with pytest.raises(CheckpointSaveError, match=r"__0_0\.distcp has \d+ bytes with checksum"):
        save_checkpoint(tmp_path / "a", entries(size=1000), {}, {}, MESH)
    assert names_in(tmp_path) == []


def test_errors_of_any_kind_are_raised_as_save_errors_but_not_interrupts(tmp_path: Path) -> None:
    name = "lightning_megatron.checkpoint.directory.clean_unfinished"
    for error, expected in (
        (ZeroDivisionError("a bug"), CheckpointSaveError),
        (KeyboardInterrupt("a bug"), KeyboardInterrupt),
    ):
        with pytest.MonkeyPatch.context() as patch:

            def fail(path: object, error: BaseException = error) -> None:
                raise error

            patch.setattr(name, fail)
            with pytest.raises(expected, match="a bug"):
                save_checkpoint(tmp_path / "a", entries(), {}, {}, MESH)


@pytest.mark.parametrize(
    ("moment", "value"),
    [
        ("before the header", 1.0),
        ("before the renames", 1.0),
        ("between the renames", 1.0),
        ("after the renames", 2.0),
    ],
)
def test_a_process_that_dies_while_saving_leaves_a_complete_checkpoint(
    tmp_path: Path, moment: str, value: float
) -> None:
    result = run_script(tmp_path, moment)
    assert result.returncode == 9, result.stderr
    assert is_sharded_checkpoint(tmp_path / "a")
    verify_checkpoint(tmp_path / "a")
    assert value_in(tmp_path / "a") == value
    assert find_newest(tmp_path) == str(tmp_path / "a")
    clean_unfinished(tmp_path)
    assert names_in(tmp_path) == ["a"]
    assert value_in(tmp_path / "a") == value
    save_checkpoint(tmp_path / "b", entries(5.0), {"global_step": 3}, {}, MESH)
    assert find_newest(tmp_path) == str(tmp_path / "b")


def test_a_limit_on_file_sizes_raises_a_save_error(tmp_path: Path) -> None:
    result = run_script(tmp_path, "limit")
    assert "CheckpointSaveError" in result.stderr
    assert "File too large" in result.stderr
    assert names_in(tmp_path) == ["a"]
    assert value_in(tmp_path / "a") == 1.0


def test_a_full_and_a_read_only_tmpfs_are_reported(tmp_path: Path) -> None:
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
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    background: bool,
) -> None:
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


def test_cleaning_removes_only_leftovers_of_saves_and_restores_a_replaced_checkpoint(
    tmp_path: Path,
) -> None:
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
