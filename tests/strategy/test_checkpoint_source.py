"""Ranks that verify a checkpoint together all raise if a check fails on any of them."""

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


def outcome_of(action: Callable[[], Any]) -> str:
    """Return the result of an action, or the type and message of its error."""
    try:
        return repr(action())
    except (Exception, KeyboardInterrupt) as error:
        return f"{type(error).__name__}: {error}"


def failing_check(rank: int, failing: int, error: BaseException) -> Callable[[], None]:
    def check() -> None:
        if rank == failing:
            raise error

    return check


def _verify_files(rank: int, size: int, folder: str) -> dict[str, str]:
    mesh = ParallelMesh.create(ParallelLayout(size))
    results = {}
    for name in ("whole", "plain", "cut", "absent"):
        source = CheckpointSource(f"{folder}/{name}.ckpt", is_single_file=True)
        results[name] = outcome_of(partial(source.verify, mesh))
        results[f"{name}, allowed"] = outcome_of(partial(source.verify, mesh, allow_unchecked=True))
    return results


def test_a_file_that_the_first_rank_cannot_read_is_refused_on_all_ranks(tmp_path: Path) -> None:
    torch.save({"state_dict": {"weight": torch.ones(300)}}, tmp_path / "whole.ckpt")
    torch.save({"state_dict": {}}, tmp_path / "plain.ckpt", _use_new_zipfile_serialization=False)
    content = bytearray((tmp_path / "whole.ckpt").read_bytes())
    content[content.index(torch.ones(4).numpy().tobytes())] ^= 1
    (tmp_path / "cut.ckpt").write_bytes(content)
    ranks = run_world(_verify_files, 2, str(tmp_path))
    assert ranks[0] == ranks[1]
    results = ranks[0]
    for name in ("whole", "whole, allowed", "plain, allowed", "absent, allowed"):
        assert results[name] == "None", name
    for name in ("plain", "cut", "cut, allowed", "absent"):
        assert results[name].startswith("CorruptDataError: "), name
        assert str(tmp_path / name.partition(",")[0]) in results[name], name
    assert "must be readable: FileNotFoundError: " in results["absent"]


def _fail_on_one_rank(rank: int, size: int) -> dict[str, str]:
    axis = ParallelMesh.create(ParallelLayout(size)).world_cpu
    return {
        f"{type(error).__name__} of {failing}": outcome_of(
            partial(verify_together, failing_check(rank, failing, error), axis)
        )
        for failing in range(size)
        for error in (UnsupportedError("no"), OSError(5, "disk"), KeyError("k"))
    }


def test_an_error_of_a_check_on_one_rank_is_raised_on_all_ranks() -> None:
    first, second = run_world(_fail_on_one_rank, 2)
    for failing in range(2):
        for name in ("UnsupportedError", "OSError", "KeyError"):
            assert first[f"{name} of {failing}"] == second[f"{name} of {failing}"]
        assert first[f"UnsupportedError of {failing}"] == "UnsupportedError: no"
        assert "OSError: [Errno 5] disk" in first[f"OSError of {failing}"]
        assert first[f"KeyError of {failing}"].startswith("CorruptDataError: ")


def _interrupt_one_rank(rank: int, size: int) -> str:
    axis = ParallelMesh.create(ParallelLayout(size)).world_cpu
    return outcome_of(
        lambda: verify_together(failing_check(rank, 0, KeyboardInterrupt("stop")), axis)
    )


def test_an_interrupt_of_a_check_on_one_rank_ends_the_check_on_all_ranks() -> None:
    first, second = run_world(_interrupt_one_rank, 2)
    assert first == "KeyboardInterrupt: stop"
    assert second == "KeyboardInterrupt: another rank was interrupted: KeyboardInterrupt: stop"


def _list_on_first(rank: int, size: int) -> list[str]:
    axis = ParallelMesh.create(ParallelLayout(size)).world_cpu
    return [
        outcome_of(lambda: run_on_first(lambda: rank + 7, axis)),
        outcome_of(lambda: run_on_first(failing_check(rank, 0, PermissionError(13, "no")), axis)),
    ]


def test_the_result_or_error_of_the_first_rank_reaches_all_ranks() -> None:
    ranks = run_world(_list_on_first, 2)
    assert ranks == [["7", "PermissionError: [Errno 13] no"]] * 2


def _find_different_files(rank: int, size: int, folder: str) -> list[str]:
    mesh = ParallelMesh.create(ParallelLayout(size))
    rank_folder = f"{folder}/rank{rank}"
    full = CheckpointSource(f"{rank_folder}/full.ckpt", is_single_file=True)
    return [
        outcome_of(lambda: CheckpointSource.find(f"{rank_folder}/full.ckpt", mesh)),
        outcome_of(lambda: CheckpointSource.find(f"{rank_folder}/absent.ckpt", mesh)),
        outcome_of(lambda: full.has_optimizers(None, mesh)),
        outcome_of(
            lambda: replace(full, path=f"{rank_folder}/cut.ckpt").has_optimizers(None, mesh)
        ),
    ]


def test_all_ranks_use_the_checkpoint_that_the_first_rank_finds(tmp_path: Path) -> None:
    first = tmp_path / "rank0"
    second = tmp_path / "rank1"
    first.mkdir()
    (second / "full.ckpt").mkdir(parents=True)
    torch.save({"state_dict": {}, "optimizer_states": []}, first / "full.ckpt")
    torch.save({"state_dict": {}}, second / "absent.ckpt")
    (first / "cut.ckpt").write_bytes((first / "full.ckpt").read_bytes()[:100])
    torch.save({"state_dict": {}, "optimizer_states": []}, second / "cut.ckpt")
    ranks = run_world(_find_different_files, 2, str(tmp_path))
    assert ranks[0] == ranks[1]
    source, absent, has_optimizers, cut = ranks[0]
    assert source == repr(CheckpointSource(f"{first}/full.ckpt", is_single_file=True))
    assert absent.startswith("CheckpointMismatchError: ")
    assert has_optimizers == "True"
    assert cut.startswith("CorruptDataError: ")


def test_the_error_in_one_process_names_the_unreadable_file(tmp_path: Path) -> None:
    source = CheckpointSource(str(tmp_path / "absent.ckpt"), is_single_file=True)
    with pytest.raises(CorruptDataError, match=r"must be readable: FileNotFoundError: .*absent"):
        source.verify(ParallelMesh.single())
