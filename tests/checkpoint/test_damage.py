"""Errors about damaged checkpoints name the file, and the newest undamaged checkpoint is found."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from lightning_megatron.checkpoint import (
    find_newest,
    list_checkpoints,
    load_metadata,
    read_full,
    read_header,
    save,
    save_checkpoint,
    verify_checkpoint,
)
from lightning_megatron.checkpoint.header import _sum_of
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


@pytest.mark.parametrize("name", [".metadata", "meta.pt"])
def test_verification_finds_files_that_the_header_does_not_list(tmp_path: Path, name: str) -> None:
    save_checkpoint(tmp_path / "a", entries(size=1000), {"global_step": 1}, {}, MESH)
    header = tmp_path / "a" / "checkpoint.json"
    fields = json.loads(header.read_text())
    del fields["checksum"], fields["files"][name]
    header.write_text(json.dumps({**fields, "checksum": _sum_of(fields)}))
    with pytest.raises(CorruptDataError, match=rf"{name}.*does not list it"):
        verify_checkpoint(tmp_path / "a")


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


def test_the_newest_undamaged_checkpoint_is_the_one_that_was_saved_last(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_newest(tmp_path) is None
    assert find_newest(tmp_path / "absent") is None
    (tmp_path / "logs").mkdir()
    # The clock runs backwards, and the job returns to an earlier step.
    clock = SimpleNamespace(time=iter((9.0, 8.0, 7.0, 6.0, 5.0)).__next__)
    monkeypatch.setattr(save, "time", clock)
    for name, step in (("z", 5), ("a", 7), ("m", 12), ("k", 9)):
        save_checkpoint(tmp_path / name, entries(float(step)), {"global_step": step}, {}, MESH)
    assert list_checkpoints(tmp_path) == [str(tmp_path / name) for name in "akmz"]
    assert find_newest(tmp_path) == str(tmp_path / "k")
    header = read_header(tmp_path / "k")
    assert (header.global_step, header.save_number, header.saved_at) == (9, 4, 6.0)
    flip(tmp_path / "k" / "__0_0.distcp")
    assert find_newest(tmp_path, whole=False) == str(tmp_path / "k")
    with caplog.at_level(logging.WARNING):
        assert find_newest(tmp_path) == str(tmp_path / "m")
    assert f"{tmp_path / 'k'} is skipped" in caplog.text
    assert "k/__0_0.distcp" in caplog.text
    cut(tmp_path / "m" / "checkpoint.json")
    (tmp_path / "a" / "meta.pt").unlink()
    assert find_newest(tmp_path) == str(tmp_path / "z")
    save_checkpoint(tmp_path / "z", entries(5.5), {"global_step": 5}, {}, MESH)
    assert value_in(find_newest(tmp_path)) == 5.5


def test_checkpoints_of_the_older_format_are_ordered_by_time_before_all_others(
    tmp_path: Path,
) -> None:
    for name in "abc":
        save_checkpoint(tmp_path / name, entries(), {}, {}, MESH)
    for name, time in (("b", 2e9), ("c", 1e9)):
        header = tmp_path / name / "checkpoint.json"
        fields = json.loads(header.read_text()) | {"format": 2, "saved_at": time}
        fields = {key: fields[key] for key in fields if key not in ("checksum", "save_number")}
        header.write_text(json.dumps({**fields, "checksum": _sum_of(fields)}))
    order = []
    while (newest := find_newest(tmp_path)) is not None:
        order.append(Path(newest).name)
        shutil.rmtree(newest)
    assert order == ["a", "b", "c"]
