"""Ranks that verify or look for a checkpoint together all have the result of the rank that reads it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_megatron.checkpoint.collective_steps import run_on_first, verify_together
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.strategy.checkpoints.source import CheckpointSource
from tests.world import run_world

#: Error of a check, and what all ranks raise.
ERRORS: dict[str, tuple[BaseException, str]] = {
    "OSError": (OSError(5, "disk"), "OSError: [Errno 5] disk"),
    "KeyError": (KeyError("k"), "CorruptDataError: "),
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
    for name, (error, _) in ERRORS.items():
        for place in range(size):
            note(f"{name} of {place}", partial(verify_together, failing(rank, place, error), axis))
    stop = failing(rank, 0, KeyboardInterrupt("stop"))
    note("interrupted", partial(verify_together, stop, axis))
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
    folder, (first, second) = ranks
    assert first.pop("interrupted") == "KeyboardInterrupt: stop"
    assert "another rank was interrupted: KeyboardInterrupt: stop" in second.pop("interrupted")
    assert first == second
    for name in ("whole", "whole, allowed", "plain, allowed", "absent, allowed"):
        assert first[name] == "None", name
    for name in ("plain", "cut", "cut, allowed", "absent"):
        assert first[name].startswith("CorruptDataError: "), name
        assert str(folder / name.partition(",")[0]) in first[name], name
    for name, (_, text) in ERRORS.items():
        for place in range(2):
            assert text in first[f"{name} of {place}"]
    source = CheckpointSource(f"{folder}/rank0/full.ckpt", is_single_file=True)
    assert first["found"] == repr(source)
    assert first["not found"].startswith("CheckpointMismatchError: ")
    assert first["optimizers"] == "True"
    assert first["no optimizers"].startswith("CorruptDataError: ")
    assert first["listed"] == "7"
    assert first["not listed"] == "PermissionError: [Errno 13] no"
