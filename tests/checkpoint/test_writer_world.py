"""Saving from several ranks: all learn of a failure, in the same call, and a rank that fails leaves
none waiting.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_megatron.checkpoint import (
    CheckpointWriter,
    Entry,
    find_newest,
    is_sharded_checkpoint,
    load_metadata,
    load_rank_state,
    load_tensors,
    read_full,
    read_header,
    save_checkpoint,
    verify_checkpoint,
)
from lightning_megatron.checkpoint.save import CollectiveSave
from lightning_megatron.errors import CheckpointSaveError, CorruptDataError
from lightning_megatron.groups.collectives import all_gather_objects, barrier
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import FlatSlice, ShardSpec, replicated_spec
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.plan.shards import even_range
from tests.checkpoint.pieces import fill_disk, names_in
from tests.world import run_world

SHAPE = (6, 5)
CALLS = 5000


def sliced(mesh: ParallelMesh, value: float) -> dict[str, Entry]:
    """Return a tensor of which every data rank has a flat slice of its tensor-parallel rows, and
    one that all have.
    """
    spec = ShardSpec(SHAPE, (even_range(SHAPE[0], mesh.tp.size, mesh.tp.rank),))
    local = (SHAPE[0] // mesh.tp.size, SHAPE[1])
    size, part = local[0] * local[1], mesh.data.rank
    start, stop = size * part // mesh.data.size, size * (part + 1) // mesh.data.size
    flat = FlatSlice(spec, local, start, stop)
    own = torch.empty(stop - start)
    flat.copy_from_full(own, full_tensor(value))
    shared = torch.full((30_000,), value)
    return {
        "sliced": Entry(own, flat, True),
        "shared": Entry(shared, replicated_spec(shared, mesh.tp.rank)),
    }


def full_tensor(value: float) -> torch.Tensor:
    return value * torch.arange(30.0).view(SHAPE)


def is_right(path: object, value: float) -> bool:
    full = read_full(str(path))
    return torch.equal(full["sliced"], full_tensor(value)) and set(full["shared"].tolist()) == {
        value
    }


def outcome_of(action: Callable[[], object]) -> str:
    try:
        action()
    except CheckpointSaveError as error:
        return str(error)
    return "no error"


def call_that_raises(writer: CheckpointWriter, delay: float) -> tuple[int, str]:
    """Poll as training does, and return in which call the failure came, and what it was."""
    for call in range(CALLS):
        try:
            writer.poll()
        except CheckpointSaveError as error:
            return call, str(error)
        if writer.pending is None:
            return call, "no error"
        time.sleep(delay)
    return CALLS, "never over"


def in_training(rank: int, mesh: ParallelMesh, folder: Path) -> dict[str, Any]:
    """Save in the background, well and not, with ranks that are not equally fast."""
    writer, found = CheckpointWriter(mesh), {}
    for number, delay in enumerate((0.001 + 0.001 * rank, 0.004 * (mesh.world.size - rank), 0.002)):
        tensors = sliced(mesh, 1.0)
        writer.save(
            folder / "good",
            tensors,
            {"global_step": 7, "epoch": 2},
            {"rank": rank},
            background=True,
        )
        for entry in tensors.values():
            entry.tensor.fill_(-1)
        found[f"good {number}"] = call_that_raises(writer, delay)
    barrier(mesh.world_cpu)
    found["good"] = is_right(folder / "good", 1.0)
    found["state"] = load_rank_state(folder / "good", mesh).values["rank"]
    for number in range(3):
        with pytest.MonkeyPatch.context() as patch:
            if rank == 2:
                fill_disk(patch, ".distcp", 300)
            writer.save(folder / "good", sliced(mesh, 2.0), {}, {}, background=True)
            found[f"full disk {number}"] = call_that_raises(writer, 0.001 + 0.003 * rank * number)
    barrier(mesh.world_cpu)
    found["still good"] = is_right(folder / "good", 1.0)
    found["names"] = names_in(folder)
    writer.close()
    return found


def failures(rank: int, mesh: ParallelMesh, folder: Path) -> dict[str, Any]:
    """Let one rank fail in every step of a save, with errors that no disk makes, at once and in the
    background.
    """
    folder.mkdir(exist_ok=True)
    found: dict[str, Any] = {}
    steps: dict[str, tuple[int, str, type]] = {
        "begin": (
            0,
            "lightning_megatron.checkpoint.directory.LocalCheckpointPath.begin",
            ZeroDivisionError,
        ),
        "collect": (3, "lightning_megatron.checkpoint.save.boxes_to_write", MemoryError),
        "plan": (
            1,
            "lightning_megatron.checkpoint.planners.ShardSavePlanner.create_local_plan",
            KeyError,
        ),
        "merge": (
            0,
            "lightning_megatron.checkpoint.planners.ShardSavePlanner.create_global_plan",
            IndexError,
        ),
        "write": (2, "lightning_megatron.checkpoint.tensor_files._alone", MemoryError),
        "index": (0, "lightning_megatron.checkpoint.tensor_files.write_index", AttributeError),
        "verify": (3, "lightning_megatron.checkpoint.save.read_record", ValueError),
        "header": (0, "lightning_megatron.checkpoint.header.Header.write", TypeError),
    }
    for background in (False, True):
        writer = CheckpointWriter(mesh)
        for step, (failing, target, kind) in steps.items():
            with pytest.MonkeyPatch.context() as patch:
                if rank == failing:
                    patch.setattr(target, raising(kind))
                attempt = partial(save_and_wait, writer, folder, mesh, background)
                found[f"{step} {background}"] = outcome_of(attempt)
            barrier(mesh.world_cpu)
            found[f"left {step} {background}"] = names_in(folder)
            barrier(mesh.world_cpu)
        writer.close()
    return found


def raising(kind: type) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise kind("out of order")

    return fail


def save_and_wait(
    writer: CheckpointWriter, folder: Path, mesh: ParallelMesh, background: bool
) -> None:
    writer.save(folder / "never", sliced(mesh, 2.0), {}, {}, background=background)
    writer.wait()


def elsewhere(rank: int, mesh: ParallelMesh, folder: Path) -> dict[str, Any]:
    """Save behind a URL, over a checkpoint that is there, and again with a rank that fails."""
    url, found = f"file://{folder}/remote", {}
    writer = CheckpointWriter(mesh)
    for value in (1.0, 2.0):
        writer.save(
            url,
            sliced(mesh, value),
            {"global_step": int(value)},
            {"rank": rank},
            background=value == 2.0,
        )
        writer.wait()
        found[f"saved {value}"] = is_right(url, value)
        barrier(mesh.world_cpu)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr("lightning_megatron.checkpoint.tensor_files._alone", raising(MemoryError))
        found["failed"] = outcome_of(lambda: writer.save(url, sliced(mesh, 3.0), {}, {}))
    barrier(mesh.world_cpu)
    found["names"] = [name.split("-")[0] for name in names_in(folder / "remote")]
    found["kept"] = is_right(url, 2.0)
    found["newest"] = find_newest(f"file://{folder}", mesh=mesh)
    found["state"] = load_rank_state(url, mesh).values["rank"]
    other = ParallelMesh.create(ParallelLayout(mesh.world.size))
    target = {"sliced": Entry(torch.zeros(SHAPE), replicated_spec(torch.zeros(SHAPE)))}
    load_tensors(url, target, other, strict=False)
    found["read"] = torch.equal(target["sliced"].tensor, full_tensor(2.0))
    other.destroy()
    barrier(mesh.world_cpu)
    writer.remove(url)
    barrier(mesh.world_cpu)
    found["removed"] = os.path.exists(folder / "remote")
    return found


def damage(rank: int, mesh: ParallelMesh, folder: Path) -> dict[str, Any]:
    """Verify together, what only one rank reads being damaged."""
    for step in (1, 2, 3):
        save_checkpoint(
            folder / f"step={step}", sliced(mesh, step), {"global_step": step}, {}, mesh
        )
    verify_checkpoint(folder / "step=3", mesh=mesh)
    found: dict[str, Any] = {"newest": find_newest(folder, mesh=mesh)}
    names = sorted(read_header(folder / "step=3").files)
    for name in names:
        barrier(mesh.world_cpu)
        file = folder / "step=3" / name
        content = file.read_bytes()
        barrier(mesh.world_cpu)
        if rank == 0:
            file.write_bytes(content[:-9] + b"_" + content[-8:])
        barrier(mesh.world_cpu)
        try:
            verify_checkpoint(folder / "step=3", mesh=mesh)
            found[name] = "no error"
        except CorruptDataError as error:
            found[name] = str(error)
        found[f"newest but {name}"] = find_newest(folder, mesh=mesh)
        barrier(mesh.world_cpu)
        if rank == 0:
            file.write_bytes(content)
    found["files"] = names
    return found


def replacing(rank: int, mesh: ParallelMesh, folder: Path) -> dict[str, Any]:
    """Save the same name again and again, while a rank is slow to read its own files."""
    writer, read = CheckpointWriter(mesh), CollectiveSave._finish

    def slow(self: CollectiveSave, *arguments: Any) -> Any:
        time.sleep(0.05 * rank)
        return read(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CollectiveSave, "_finish", slow)
        for step in range(4):
            writer.save(
                folder / "last", sliced(mesh, step), {"global_step": step}, {}, background=True
            )
            if step % 2:
                writer.poll()
        writer.close()
    seen = all_gather_objects((is_right(folder / "last", 3), names_in(folder)), mesh.world_cpu)
    return {"seen": seen, "step": load_metadata(folder / "last")["global_step"]}


PARTS = {
    "training": in_training,
    "failures": failures,
    "remote": elsewhere,
    "damage": damage,
    "replacing": replacing,
}


def world(rank: int, size: int, folder: Path) -> dict[str, dict[str, Any]]:
    found = {}
    mesh = ParallelMesh.create(ParallelLayout(size, tp=2))
    for name, part in PARTS.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        found[name] = part(rank, mesh, folder / name)
        barrier(mesh.world_cpu)
    mesh.destroy()
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("writer")


@pytest.fixture(scope="module")
def results(folder: Path) -> list[dict[str, Any]]:
    return run_world(world, 4, folder)


def test_all_ranks_see_the_end_of_a_save_in_the_same_call(results: list[dict[str, Any]]) -> None:
    for number in range(3):
        for what in ("good", "full disk"):
            ends = {result["training"][f"{what} {number}"] for result in results}
            assert len(ends) == 1, ends
            call, text = ends.pop()
            assert 0 < call < CALLS
            assert (text == "no error") == (what == "good")


def test_slices_saved_in_the_background_are_what_they_were(
    results: list[dict[str, Any]], folder: Path
) -> None:
    for rank, result in enumerate(results):
        assert result["training"]["good"]
        assert result["training"]["state"] == rank
    header = read_header(folder / "training" / "good")
    assert (header.global_step, header.epoch, header.layout.tp) == (7, 2, 2)
    assert is_sharded_checkpoint(folder / "training" / "good")


def test_a_full_disk_of_one_rank_is_named_on_all_and_the_last_checkpoint_stays(
    results: list[dict[str, Any]],
) -> None:
    for result in results:
        _, text = result["training"]["full disk 0"]
        assert (
            "failed on 1 of 4 rank(s): rank 2: OSError: [Errno 28] No space left on device: "
            in text
        )
        assert ".good.unfinished/__2_0.distcp" in text
        assert result["training"]["still good"]
        assert result["training"]["names"] == ["good"]


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize(
    ("step", "reason"),
    [
        ("begin", "rank 0: ZeroDivisionError: out of order"),
        ("collect", "rank 3: MemoryError: out of order"),
        ("plan", "rank 1: KeyError: 'out of order'"),
        ("merge", "rank 0: IndexError: out of order"),
        ("write", "rank 2: MemoryError: out of order"),
        ("index", "rank 0: AttributeError: out of order"),
        ("verify", "rank 3: ValueError: out of order"),
        ("header", "rank 0: TypeError: out of order"),
    ],
)
def test_a_rank_that_fails_anywhere_leaves_none_waiting_and_nothing_behind(
    results: list[dict[str, Any]], step: str, reason: str, background: bool
) -> None:
    for result in results:
        assert reason in result["failures"][f"{step} {background}"]
        assert result["failures"][f"left {step} {background}"] == []


def test_a_checkpoint_behind_a_url_is_replaced_when_the_new_one_is_complete(
    results: list[dict[str, Any]], folder: Path
) -> None:
    for rank, result in enumerate(results):
        found = result["remote"]
        assert found["saved 1.0"]
        assert found["saved 2.0"]
        assert "rank 1: MemoryError" in found["failed"]
        assert found["names"] == ["checkpoint.json", "save"]
        assert found["kept"]
        assert found["read"]
        assert found["newest"] == f"file://{folder}/remote/remote"
        assert found["state"] == rank
        assert not found["removed"]


def test_what_one_rank_finds_damaged_is_refused_by_all(
    results: list[dict[str, Any]], folder: Path
) -> None:
    for result in results:
        found = result["damage"]
        assert found["newest"] == str(folder / "damage" / "step=3")
        assert len(found["files"]) == 6
        for name in found["files"]:
            assert f"step=3/{name}" in found[name]
            assert found[f"newest but {name}"] == str(folder / "damage" / "step=2")


def test_a_name_is_replaced_again_and_again(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["replacing"]["seen"] == [(True, ["last"])] * 4
        assert result["replacing"]["step"] == 3
