"""Ranks that verify or look for a checkpoint together all have the result of the rank that reads it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_megatron.checkpoint.collective_steps import run_on_first
from lightning_megatron.checkpoint.verify import verify_together
from lightning_megatron.errors import CorruptDataError, UnsupportedError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.strategy.checkpoints.source import CheckpointSource
from tests.world import run_world

ERRORS: dict[str, BaseException] = {
    "UnsupportedError": UnsupportedError("no"),
    "OSError": OSError(5, "disk"),
    "KeyError": KeyError("k"),
    "KeyboardInterrupt": KeyboardInterrupt("stop"),
}


def outcome_of(action: Callable[[], Any]) -> str:
    """Return the result of an action, or the type and message of its error."""
    try:
        return repr(action())
    except (Exception, KeyboardInterrupt) as error:
        return f"{type(error).__name__}: {error}"


def failing(rank: int, place: int, error: BaseException) -> Callable[[], None]:
    def check() -> None:
        if rank == place:
            raise error

    return check


def two_ranks(rank: int, size: int, folder: Path) -> dict[str, str]:
    mesh = ParallelMesh.create(ParallelLayout(size))
    axis, results = mesh.world_cpu, dict[str, str]()

    def note(name: str, action: Callable[[], Any]) -> None:
        results[name] = outcome_of(action)

    for name in ("whole", "plain", "cut", "absent"):
        source = CheckpointSource(f"{folder}/{name}.ckpt", is_single_file=True)
        note(name, partial(source.verify, mesh))
        note(f"{name}, allowed", partial(source.verify, mesh, allow_unchecked=True))
    for name, error in ERRORS.items():
        for place in range(size):
            note(f"{name} of {place}", partial(verify_together, failing(rank, place, error), axis))
    note("listed", lambda: run_on_first(lambda: rank + 7, axis))
    note("not listed", lambda: run_on_first(failing(rank, 0, PermissionError(13, "no")), axis))
    own = f"{folder}/rank{rank}"
    full = CheckpointSource(f"{own}/full.ckpt", is_single_file=True)
    note("found", lambda: CheckpointSource.find(f"{own}/full.ckpt", mesh))
    note("not found", lambda: CheckpointSource.find(f"{own}/absent.ckpt", mesh))
    note("optimizers", lambda: full.has_optimizers(None, mesh))
    broken = replace(full, path=f"{own}/cut.ckpt")
    note("no optimizers", lambda: broken.has_optimizers(None, mesh))
    return results


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, str]]]:
    folder = tmp_path_factory.mktemp("source")
    torch.save({"state_dict": {"weight": torch.ones(300)}}, folder / "whole.ckpt")
    torch.save({"state_dict": {}}, folder / "plain.ckpt", _use_new_zipfile_serialization=False)
    content = bytearray((folder / "whole.ckpt").read_bytes())
    content[content.index(torch.ones(4).numpy().tobytes())] ^= 1
    (folder / "cut.ckpt").write_bytes(content)
    first, second = folder / "rank0", folder / "rank1"
    first.mkdir()
    (second / "full.ckpt").mkdir(parents=True)
    with_optimizers = {"state_dict": {}, "optimizer_states": []}
    torch.save(with_optimizers, first / "full.ckpt")
    torch.save({"state_dict": {}}, second / "absent.ckpt")
    (first / "cut.ckpt").write_bytes((first / "full.ckpt").read_bytes()[:100])
    torch.save(with_optimizers, second / "cut.ckpt")
    return folder, run_world(two_ranks, 2, folder)


def test_all_ranks_have_the_same_outcome_unless_one_of_them_is_interrupted(ranks: Any) -> None:
    first, second = ranks[1]
    for name, outcome in first.items():
        if not name.startswith("KeyboardInterrupt"):
            assert second[name] == outcome, name
    assert first["KeyboardInterrupt of 0"] == "KeyboardInterrupt: stop"
    assert second["KeyboardInterrupt of 0"].endswith(
        "another rank was interrupted: KeyboardInterrupt: stop"
    )


def test_a_file_that_the_first_rank_cannot_read_is_refused(ranks: Any) -> None:
    folder, (results, _) = ranks
    for name in ("whole", "whole, allowed", "plain, allowed", "absent, allowed"):
        assert results[name] == "None", name
    for name in ("plain", "cut", "cut, allowed", "absent"):
        assert results[name].startswith("CorruptDataError: "), name
        assert str(folder / name.partition(",")[0]) in results[name], name
    assert "must be readable: FileNotFoundError: " in results["absent"]


def test_an_error_of_a_check_on_one_rank_is_raised_on_all_ranks(ranks: Any) -> None:
    results = ranks[1][0]
    for place in range(2):
        assert results[f"UnsupportedError of {place}"] == "UnsupportedError: no"
        assert "OSError: [Errno 5] disk" in results[f"OSError of {place}"]
        assert results[f"KeyError of {place}"].startswith("CorruptDataError: ")


def test_all_ranks_use_what_the_first_rank_finds(ranks: Any) -> None:
    folder, (results, _) = ranks
    source = CheckpointSource(f"{folder}/rank0/full.ckpt", is_single_file=True)
    assert results["found"] == repr(source)
    assert results["not found"].startswith("CheckpointMismatchError: ")
    assert results["optimizers"] == "True"
    assert results["no optimizers"].startswith("CorruptDataError: ")
    assert results["listed"] == "7"
    assert results["not listed"] == "PermissionError: [Errno 13] no"


def test_the_error_in_one_process_names_the_unreadable_file(tmp_path: Path) -> None:
    source = CheckpointSource(str(tmp_path / "absent.ckpt"), is_single_file=True)
    with pytest.raises(CorruptDataError, match=r"must be readable: FileNotFoundError: .*absent"):
        source.verify(ParallelMesh.single())
