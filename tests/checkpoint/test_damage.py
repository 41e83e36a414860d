"""Errors about damaged checkpoints name the file, and the newest undamaged checkpoint is found."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_megatron.checkpoint import (
    find_newest,
    list_checkpoints,
    load_metadata,
    read_full,
    read_header,
    save_checkpoint,
    verify_checkpoint,
)
from lightning_megatron.errors import CheckpointMismatchError, CorruptDataError
from lightning_megatron.groups.mesh import ParallelMesh
from tests.checkpoint.pieces import entries, value_in

MESH = ParallelMesh.single()
FILES = ["__0_0.distcp", ".metadata", "meta.pt", "checkpoint.json"]


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-5])


DAMAGES: dict[str, Callable[[Path], None]] = {"flip": flip, "cut": cut, "remove": Path.unlink}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_verification_finds_every_damage_and_names_the_file(
    tmp_path: Path, name: str, damage: str
) -> None:
    save_checkpoint(tmp_path / "a", entries(size=1000), {"global_step": 1}, {}, MESH)
    verify_checkpoint(tmp_path / "a")
    DAMAGES[damage](tmp_path / "a" / name)
    header_is_removed = name == "checkpoint.json" and damage == "remove"
    with pytest.raises(
        CheckpointMismatchError if header_is_removed else CorruptDataError, match=name
    ):
        verify_checkpoint(tmp_path / "a")
    if damage != "flip" and not header_is_removed:
        with pytest.raises(CorruptDataError, match=name):
            verify_checkpoint(tmp_path / "a", deep=False)


@pytest.mark.parametrize("damage", DAMAGES)
def test_loading_refuses_small_files_that_are_damaged_and_tensor_files_that_are_cut(
    tmp_path: Path, damage: str
) -> None:
    for name, load in (
        ("meta.pt", load_metadata),
        (".metadata", read_full),
        ("__0_0.distcp", read_full),
    ):
        path = tmp_path / name
        save_checkpoint(path, entries(size=1000), {}, {}, MESH)
        DAMAGES[damage](path / name)
        if (name, damage) != ("__0_0.distcp", "flip"):  # only verification finds this
            with pytest.raises(CorruptDataError, match=name):
                load(path)


def test_the_newest_undamaged_checkpoint_is_found_by_step_epoch_and_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert find_newest(tmp_path) is None
    assert find_newest(tmp_path / "absent") is None
    (tmp_path / "logs").mkdir()
    for name, step, epoch in (("z", 5, 0), ("a", 7, 1), ("m", 7, 2), ("k", 9, 2)):
        save_checkpoint(
            tmp_path / name, entries(float(step)), {"global_step": step, "epoch": epoch}, {}, MESH
        )
    assert list_checkpoints(tmp_path) == [str(tmp_path / name) for name in "akmz"]
    assert find_newest(tmp_path) == str(tmp_path / "k")
    assert (read_header(tmp_path / "k").global_step, read_header(tmp_path / "k").epoch) == (9, 2)
    flip(tmp_path / "k" / "__0_0.distcp")
    assert find_newest(tmp_path, whole=False) == str(tmp_path / "k")
    with caplog.at_level(logging.WARNING):
        assert find_newest(tmp_path) == str(tmp_path / "m")
    assert f"{tmp_path / 'k'} is skipped" in caplog.text
    assert "k/__0_0.distcp" in caplog.text
    cut(tmp_path / "m" / "checkpoint.json")
    (tmp_path / "a" / "meta.pt").unlink()
    assert find_newest(tmp_path) == str(tmp_path / "z")
    save_checkpoint(tmp_path / "z2", entries(5.5), {"global_step": 5}, {}, MESH)
    assert value_in(find_newest(tmp_path)) == 5.5
