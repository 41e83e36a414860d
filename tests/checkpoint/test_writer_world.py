"""When several ranks save, all raise a failure in the same call, and a failing rank leaves no other
rank waiting.
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
    """Return a tensor whose tensor-parallel rows are divided into flat slices of the data ranks,
    and a tensor that all ranks hold.
    """
    spec = ShardSpec(SHAPE, (even_range(SHAPE[0], mesh.tp.size, mesh.tp.rank),))
    local = (SHAPE[0] // mesh.tp.size, SHAPE[1])
    size, part = local[0] * local[1], mesh.data.rank
    start, stop = size * part // mesh.data.size, size * (part + 1) // mesh.data.size
    flat = FlatSlice(spec, local, start, stop)
    values = torch.empty(stop - start)
    flat.copy_from_full(values, full_tensor(value))
    shared = torch.full((30_000,), value)
    return {
        "sliced": Entry(values, flat, True),
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
    """Poll as training does, and return the number of the call that raised and its message."""
    for call in range(CALLS):
        try:
            writer.poll()
        except CheckpointSaveError as error:
            return call, str(error)
        if writer.pending is None:
            return call, "no error"
        time.sleep(delay)
    return CALLS, "never over"


def background_saves(rank: int, mesh: ParallelMesh, folder: Path) -> dict[str, Any]:
    """Save in the background with ranks of different speeds, then with a full disk on one rank."""
    writer, outcomes = CheckpointWriter(mesh), {}
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
        outcomes[f"good {number}"] = call_that_raises(writer, delay)
    barrier(mesh.world_cpu)
    outcomes["good"] = is_right(folder / "good", 1.0)
    outcomes["state"] = load_rank_state(folder / "good", mesh).values["rank"]
    for number in range(3):
        with pytest.MonkeyPatch.context() as patch:
            if rank == 2:
                fill_disk(patch, ".distcp", 300)
            writer.save(folder / "good", sliced(mesh, 2.0), {}, {}, background=True)
            outcomes[f"full disk {number}"] = call_that_raises(
                writer, 0.001 + 0.003 * rank * number
            )
    barrier(mesh.world_cpu)
    outcomes["still good"] = is_right(folder / "good", 1.0)
    outcomes["names"] = names_in(folder)
    writer.close()
    return outcomes


def failing_saves(rank: int, mesh: ParallelMesh, folder: Path) -> dict[str, Any]:
    """Let one rank fail in every step of a save, with errors that do not come from a disk, in the
    foreground and in the background.
    """
    folder.mkdir(exist_ok=True)
    outcomes: dict[str, Any] = {}
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
                outcomes[f"{step} {background}"] = outcome_of(attempt)
            barrier(mesh.world_cpu)
            outcomes[f"left {step} {background}"] = names_in(folder)
            barrier(mesh.world_cpu)
        writer.close()
    return outcomes


def raising(kind: type) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise kind("out of order")

    return fail


def save_and_wait(
    writer: CheckpointWriter, folder: Path, mesh: ParallelMesh, background: bool
) -> None:
    writer.save(folder / "never", sliced(mesh, 2.0), {}, {}, background=background)
    writer.wait()


def remote_saves(rank: int, mesh: ParallelMesh, folder: Path) -> dict[str, Any]:
    """Save behind a URL, replace that checkpoint, and save again with a rank that fails."""
    url, outcomes = f"file://{folder}/remote", {}
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
        outcomes[f"saved {value}"] = is_right(url, value)
        barrier(mesh.world_cpu)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr("lightning_megatron.checkpoint.tensor_files._alone", raising(MemoryError))
        outcomes["failed"] = outcome_of(lambda: writer.save(url, sliced(mesh, 3.0), {}, {}))
    barrier(mesh.world_cpu)
    outcomes["names"] = [name.split("-")[0] for name in names_in(folder / "remote")]
    outcomes["kept"] = is_right(url, 2.0)
    outcomes["newest"] = find_newest(f"file://{folder}", mesh=mesh)
    outcomes["state"] = load_rank_state(url, mesh).values["rank"]
    data_mesh = ParallelMesh.create(ParallelLayout(mesh.world.size))
    target = {"sliced": Entry(torch.zeros(SHAPE), replicated_spec(torch.zeros(SHAPE)))}
    load_tensors(url, target, data_mesh, strict=False)
    outcomes["read"] = torch.equal(target["sliced"].tensor, full_tensor(2.0))
    data_mesh.destroy()
    barrier(mesh.world_cpu)
    writer.remove(url)
    barrier(mesh.world_cpu)
    outcomes["removed"] = os.path.exists(folder / "remote")
    return outcomes


def damaged_files(rank: int, mesh: ParallelMesh, folder: Path) -> dict[str, Any]:
    """Verify on all ranks a checkpoint with a damaged file that only one rank reads."""
    for step in (1, 2, 3):
        save_checkpoint(
            folder / f"step={step}", sliced(mesh, step), {"global_step": step}, {}, mesh
        )
    verify_checkpoint(folder / "step=3", mesh=mesh)
    outcomes: dict[str, Any] = {"newest": find_newest(folder, mesh=mesh)}
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
            outcomes[name] = "no error"
        except CorruptDataError as error:
            outcomes[name] = str(error)
        outcomes[f"newest but {name}"] = find_newest(folder, mesh=mesh)
        barrier(mesh.world_cpu)
        if rank == 0:
            file.write_bytes(content)
    outcomes["files"] = names
    return outcomes


def repeated_saves(rank: int, mesh: ParallelMesh, folder: Path) -> dict[str, Any]:
    """Save several times under the same name, while some ranks are slow to read their own files."""
    writer, finish = CheckpointWriter(mesh), CollectiveSave._finish

    def sleep_then_finish(self: CollectiveSave, *arguments: Any) -> Any:
        time.sleep(0.05 * rank)
        return finish(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CollectiveSave, "_finish", sleep_then_finish)
        for step in range(4):
            writer.save(
                folder / "last", sliced(mesh, step), {"global_step": step}, {}, background=True
            )
            if step % 2:
                writer.poll()
        writer.close()
    states = all_gather_objects((is_right(folder / "last", 3), names_in(folder)), mesh.world_cpu)
    return {"seen": states, "step": load_metadata(folder / "last")["global_step"]}


PARTS = {
    "training": background_saves,
    "failures": failing_saves,
    "remote": remote_saves,
    "damage": damaged_files,
    "replacing": repeated_saves,
}


def world(rank: int, size: int, folder: Path) -> dict[str, dict[str, Any]]:
    outcomes = {}
    mesh = ParallelMesh.create(ParallelLayout(size, tp=2))
    for name, part in PARTS.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        outcomes[name] = part(rank, mesh, folder / name)
        barrier(mesh.world_cpu)
    mesh.destroy()
    return outcomes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("writer")


@pytest.fixture(scope="module")
def results(folder: Path) -> list[dict[str, Any]]:
    return run_world(world, 4, folder)


def test_all_ranks_see_the_end_of_a_save_in_the_same_call(results: list[dict[str, Any]]) -> None:
    for number in range(3):
        for case in ("good", "full disk"):
            ends = {result["training"][f"{case} {number}"] for result in results}
            assert len(ends) == 1, ends
            call, text = ends.pop()
            assert 0 < call < CALLS
            assert (text == "no error") == (case == "good")


def test_background_saves_write_the_slices_of_their_start(
    results: list[dict[str, Any]], folder: Path
) -> None:
    for rank, result in enumerate(results):
        assert result["training"]["good"]
        assert result["training"]["state"] == rank
    header = read_header(folder / "training" / "good")
    assert (header.global_step, header.epoch, header.layout.tp) == (7, 2, 2)
    assert is_sharded_checkpoint(folder / "training" / "good")


def test_all_ranks_report_a_full_disk_of_one_rank_and_the_last_checkpoint_stays(
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
def test_a_rank_that_fails_in_any_step_leaves_no_rank_waiting_and_no_files(
    results: list[dict[str, Any]], step: str, reason: str, background: bool
) -> None:
    for result in results:
        assert reason in result["failures"][f"{step} {background}"]
        assert result["failures"][f"left {step} {background}"] == []


def test_a_remote_checkpoint_is_replaced_only_by_a_complete_save(
    results: list[dict[str, Any]], folder: Path
) -> None:
    for rank, result in enumerate(results):
        outcomes = result["remote"]
        assert outcomes["saved 1.0"]
        assert outcomes["saved 2.0"]
        assert "rank 1: MemoryError" in outcomes["failed"]
        assert outcomes["names"] == ["checkpoint.json", "save"]
        assert outcomes["kept"]
        assert outcomes["read"]
        assert outcomes["newest"] == f"file://{folder}/remote/remote"
        assert outcomes["state"] == rank
        assert not outcomes["removed"]


def test_damage_that_one_rank_finds_is_refused_by_all_ranks(
    results: list[dict[str, Any]], folder: Path
) -> None:
    for result in results:
        outcomes = result["damage"]
        assert outcomes["newest"] == str(folder / "damage" / "step=3")
        assert len(outcomes["files"]) == 6
        for name in outcomes["files"]:
            assert f"step=3/{name}" in outcomes[name]
            assert outcomes[f"newest but {name}"] == str(folder / "damage" / "step=2")


def test_repeated_saves_replace_the_checkpoint_of_the_same_name(
    results: list[dict[str, Any]],
) -> None:
    for result in results:
        assert result["replacing"]["seen"] == [(True, ["last"])] * 4
        assert result["replacing"]["step"] == 3
