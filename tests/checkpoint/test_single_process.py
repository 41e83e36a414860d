"""Checkpoints without process groups: precision, buffers, interrupted saves and refused input."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_megatron.checkpoint import (
    copy_full_tensors,
    is_sharded_checkpoint,
    load_metadata,
    load_model,
    load_optimizer,
    load_rank_state,
    load_tensors,
    model_tensors,
    optimizer_metadata,
    optimizer_tensors,
    read_full,
    save_checkpoint,
    verify_checkpoint,
)
from lightning_megatron.checkpoint.consolidate import ONE_PROCESS, consolidate
from lightning_megatron.checkpoint.directory import unfinished_path
from lightning_megatron.checkpoint.header import HEADER
from lightning_megatron.errors import CheckpointMismatchError, CorruptDataError, UnsupportedError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import ShardSpec, set_shard_spec
from lightning_megatron.plan.shards import ShardRange
from lightning_megatron.training import MainParameters
from tests.checkpoint.pieces import entries, entry_of, names_in
from tests.training.runs import Run, plain_sgd, single

MESH = ParallelMesh.single()


class WithBuffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("nothing", torch.empty(0))
        self.register_buffer("scratch", torch.ones(2), persistent=False)


def test_values_tensors_and_rank_state_come_back(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "checkpoint"
    save_checkpoint(
        path, entries(), {"step": 7, "nested": {"lr": [0.1]}}, {"seen": torch.tensor(5)}, MESH
    )
    assert is_sharded_checkpoint(path)
    assert load_metadata(path, weights_only=True) == {"step": 7, "nested": {"lr": [0.1]}}
    state = load_rank_state(path, MESH)
    assert state.values == {"seen": torch.tensor(5)}
    assert state.same_data
    assert read_full(path)["state_dict.weight"].tolist() == [1.0] * 3
    assert [file.name for file in tmp_path.joinpath("deep").iterdir()] == ["checkpoint"]


def run_of(
    module: nn.Module, dtype: torch.dtype | None = None, build: Callable[..., Any] = plain_sgd
) -> Run:
    return single(dict(module.named_parameters()), dtype, make=build)


def test_main_parameters_are_saved_in_float32_and_load_into_both_precisions(tmp_path: Path) -> None:
    torch.manual_seed(0)
    half, full, half_loaded = WithBuffers().bfloat16(), WithBuffers(), WithBuffers().bfloat16()
    half_main = run_of(half, torch.float32).main
    with torch.no_grad():
        half_main.main("linear.weight").copy_(torch.tensor([[1.0001, 2.0], [3.0, 4.0]]))
    half_main.publish()
    half.count.fill_(9)
    save_checkpoint(tmp_path / "a", model_tensors(half, half_main), {}, {}, MESH)
    assert set(read_full(tmp_path / "a")) == {
        f"state_dict.{n}" for n in ("linear.weight", "linear.bias", "count")
    }

    full_main = MainParameters(dict(full.named_parameters()), MESH)
    load_model(tmp_path / "a", full, full_main, MESH)
    assert torch.equal(full.linear.weight, half_main.main("linear.weight"))
    assert full.count.item() == 9

    save_checkpoint(tmp_path / "b", model_tensors(full, full_main), {}, {}, MESH)
    half_loaded_main = run_of(half_loaded, torch.float32).main
    load_model(tmp_path / "b", half_loaded, half_loaded_main, MESH)
    assert torch.equal(half_loaded_main.main("linear.weight"), half_main.main("linear.weight"))
    assert torch.equal(half_loaded.linear.weight, half.linear.weight)


OPTIMIZERS: tuple[Callable[..., Any], ...] = (
    lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    lambda p: torch.optim.NAdam(p, lr=0.1),
    lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.9, centered=True),
    lambda p: torch.optim.Adafactor(p, lr=0.1),
)


@pytest.mark.parametrize("build", OPTIMIZERS, ids=["amsgrad", "NAdam", "RMSprop", "Adafactor"])
def test_a_fresh_optimizer_loads_the_state_and_takes_the_same_steps(
    tmp_path: Path, build: Callable[..., Any]
) -> None:
    def start() -> tuple[nn.Module, Run]:
        torch.manual_seed(0)
        module = nn.Linear(3, 2).bfloat16()
        return module, run_of(module, torch.float32, build)

    def step(module: nn.Module, run: Run) -> None:
        module(torch.ones(1, 3, dtype=torch.bfloat16)).square().sum().backward()
        run.finish()
        run.step()
        run.zero_grad()

    (module, trained), (fresh_module, fresh) = start(), start()
    step(module, trained)
    tensors = model_tensors(module, trained.main) | optimizer_tensors(
        2, trained.optimizer, trained.main
    )
    save_checkpoint(
        tmp_path / "c", tensors, optimizer_metadata(trained.optimizer, trained.main, MESH), {}, MESH
    )
    load_model(tmp_path / "c", fresh_module, fresh.main, MESH)
    load_optimizer(
        tmp_path / "c", 2, fresh.optimizer, fresh.main, MESH, load_metadata(tmp_path / "c")
    )
    for _ in range(2):
        step(module, trained)
        step(fresh_module, fresh)
    for name in trained.main.names:
        assert torch.equal(fresh.main.main(name), trained.main.main(name))


def test_plain_values_in_an_optimizer_state_come_back(tmp_path: Path) -> None:
    run, fresh = (
        single({"weight": nn.Parameter(torch.ones(2))}),
        single({"weight": nn.Parameter(torch.ones(2))}),
    )
    run.optimizer.state[run.main.main("weight")]["calls"] = 3
    fresh.optimizer.param_groups[0]["lr"] = 0.5
    metadata = optimizer_metadata(run.optimizer, run.main, MESH)
    save_checkpoint(tmp_path / "c", optimizer_tensors(0, run.optimizer, run.main), {}, {}, MESH)
    load_optimizer(tmp_path / "c", 0, fresh.optimizer, fresh.main, MESH, metadata)
    assert fresh.optimizer.state[fresh.main.main("weight")] == {"calls": 3}
    assert fresh.optimizer.param_groups[0]["lr"] == 0.1


def test_hyperparameters_of_other_types_are_refused(tmp_path: Path) -> None:
    run = single({"weight": nn.Parameter(torch.ones(2))})
    metadata = optimizer_metadata(run.optimizer, run.main, MESH)
    save_checkpoint(tmp_path / "c", optimizer_tensors(0, run.optimizer, run.main), {}, {}, MESH)
    before, group = dict(run.optimizer.param_groups[0]), metadata["groups"][0]
    known = dict(group["hyperparameters"])

    def load(changes: dict[str, Any]) -> None:
        group["hyperparameters"] = {**known, **changes}
        load_optimizer(tmp_path / "c", 0, run.optimizer, run.main, MESH, metadata)

    wrong: list[tuple[str, Any]] = [
        ("lr", value) for value in (torch.tensor(0.1), True, None, [0.1])
    ]
    wrong += [("maximize", 7), ("nesterov", "yes"), ("momentum", "0.9"), ("weight_decay", {})]
    for key, value in wrong:
        message = f"'{key}' of group 0 of optimizer 0 is .*{type(value).__name__}"
        with pytest.raises(CheckpointMismatchError, match=message):
            load({key: value})
        assert run.optimizer.param_groups[0] == before
    for valid in ({"lr": 1}, {"momentum": 0}, {"maximize": True}, {"of another version": "x"}):
        load(valid)
        assert run.optimizer.param_groups[0].items() >= valid.items()


def test_an_optimizer_that_never_stepped_stays_without_state(tmp_path: Path) -> None:
    run = single({"weight": nn.Parameter(torch.ones(2))}, make=torch.optim.AdamW)
    metadata = optimizer_metadata(run.optimizer, run.main, MESH)
    save_checkpoint(tmp_path / "c", optimizer_tensors(0, run.optimizer, run.main), {}, {}, MESH)
    load_optimizer(tmp_path / "c", 0, run.optimizer, run.main, MESH, metadata)
    assert not run.optimizer.state


def test_state_of_another_shape_than_its_sharded_parameter_is_refused() -> None:
    weight = set_shard_spec(nn.Parameter(torch.ones(2, 4)), ShardSpec((4, 4), (ShardRange(0, 2),)))
    run = single({"weight": weight})
    run.optimizer.state[run.main.main("weight")]["row"] = torch.ones(2, 1)
    with pytest.raises(UnsupportedError, match=r"'row' of 'weight' has shape \(2, 1\)"):
        optimizer_tensors(0, run.optimizer, run.main)


def test_an_interrupted_save_is_ignored_and_does_not_hinder_the_next(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    unfinished_path(path).mkdir()
    (unfinished_path(path) / "__0_0.distcp").write_bytes(b"half")
    assert not is_sharded_checkpoint(path)
    with pytest.raises(CheckpointMismatchError, match="An interrupted save leaves"):
        load_metadata(path)
    save_checkpoint(path, entries(), {}, {}, MESH)
    assert [file.name for file in tmp_path.iterdir()] == ["checkpoint"]


def test_a_checkpoint_replaces_a_file_or_a_broken_link_of_its_name(tmp_path: Path) -> None:
    (tmp_path / "last").symlink_to(tmp_path / "removed", target_is_directory=True)
    (tmp_path / "last.ckpt").write_bytes(b"a checkpoint of one process")
    for name in ("last", "last.ckpt"):
        save_checkpoint(tmp_path / name, entries(), {"a": 1}, {}, MESH)
        assert load_metadata(tmp_path / name) == {"a": 1}
    assert names_in(tmp_path) == ["last", "last.ckpt"]


def test_full_tensors_in_memory_fill_a_model(tmp_path: Path) -> None:
    target = entries(0.0)
    copy_full_tensors({"state_dict.weight": torch.arange(3.0)}, target, MESH)
    assert target["state_dict.weight"].tensor.tolist() == [0, 1, 2]
    with pytest.raises(
        CheckpointMismatchError, match="missing in the checkpoint: state_dict.weight"
    ):
        copy_full_tensors({}, target, MESH)


def test_names_that_do_not_fit_are_listed(tmp_path: Path) -> None:
    extra, target = {"optimizer.0.x": entry_of(torch.ones(1))}, entries(0.0)
    save_checkpoint(tmp_path / "c", entries() | extra, {}, {}, MESH)
    many = {f"layer.{index:02}": entry_of(torch.ones(1)) for index in range(25)}
    with pytest.raises(CheckpointMismatchError, match=r"layer\.09 and 15 more"):
        load_tensors(tmp_path / "c", many, MESH)
    # Names outside the prefix are not unexpected.
    report = load_tensors(tmp_path / "c", target, MESH, prefix="state_dict.")
    assert report.unexpected == ()
    assert target["state_dict.weight"].tensor.tolist() == [1.0] * 3
    with pytest.raises(CheckpointMismatchError, match="absent are not in"):
        read_full(tmp_path / "c", ["absent"])


def test_another_format_and_a_damaged_header_are_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "c", entries(), {}, {}, MESH)
    header = json.loads((tmp_path / "c" / HEADER).read_text())
    for number, remedy in ((99, "Upgrade"), (1, "version that saved it")):
        (tmp_path / "c" / HEADER).write_text(json.dumps(header | {"format": number}))
        with pytest.raises(UnsupportedError, match=remedy):
            load_rank_state(tmp_path / "c", MESH)
    for damage in (
        "{",
        json.dumps(header | {"global_step": 5}),
        json.dumps(header | {"checksum": 1}),
        "[]",
    ):
        (tmp_path / "c" / HEADER).write_text(damage)
        with pytest.raises(CorruptDataError, match=HEADER):
            load_rank_state(tmp_path / "c", MESH)


def test_a_single_file_or_an_empty_directory_is_not_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "file.ckpt").write_bytes(b"")
    assert not is_sharded_checkpoint(tmp_path / "file.ckpt")
    assert not is_sharded_checkpoint(tmp_path)
    assert not is_sharded_checkpoint(tmp_path / "absent")


def test_consolidation_does_not_replace_a_directory_by_a_file(tmp_path: Path) -> None:
    path = tmp_path / "sharded"
    nothing: dict[str, Any] = {"order": [], "aliases": {}, "padded_rows": {}, "numbering": []}
    save_checkpoint(path, {}, {ONE_PROCESS: nothing}, {}, MESH)
    with pytest.raises(CheckpointMismatchError, match=f"{path} is a directory"):
        consolidate(path, path)
    verify_checkpoint(path)
    assert [file.name for file in tmp_path.iterdir()] == ["sharded"]
