"""Checkpoints without process groups: precision, buffers, interrupted saves and refused input."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from lightning_megatron.checkpoint import (
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
from lightning_megatron.checkpoint.header import HEADER
from lightning_megatron.errors import CheckpointMismatchError, CorruptDataError, UnsupportedError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import ShardSpec, set_shard_spec
from lightning_megatron.optimizer import MainParameters
from lightning_megatron.plan.shards import ShardRange
from tests.checkpoint.pieces import entries, entry_of
from tests.optimizer.runs import Run, plain_sgd, single

MESH = ParallelMesh.single()


class WithBuffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("nothing", torch.empty(0))
        self.register_buffer("scratch", torch.ones(2), persistent=False)


def run_of(
    module: nn.Module, dtype: torch.dtype | None = None, build: Callable[..., Any] = plain_sgd
) -> Run:
    return single(dict(module.named_parameters()), dtype, make=build)


def test_main_parameters_are_saved_in_float32_and_load_into_both_precisions(tmp_path):
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
    partial(torch.optim.AdamW, lr=0.1, amsgrad=True),
    partial(torch.optim.NAdam, lr=0.1),
    partial(torch.optim.RMSprop, lr=0.1, momentum=0.9, centered=True),
    partial(torch.optim.Adafactor, lr=0.1),
)


@pytest.mark.parametrize("build", OPTIMIZERS)
def test_a_fresh_optimizer_loads_the_state_and_takes_the_same_steps(tmp_path, build):
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
    path, optimizer = tmp_path / "c", trained.optimizer
    tensors = model_tensors(module, trained.main) | optimizer_tensors(2, optimizer, trained.main)
    save_checkpoint(path, tensors, optimizer_metadata(optimizer, trained.main, MESH), {}, MESH)
    load_model(path, fresh_module, fresh.main, MESH)
    load_optimizer(path, 2, fresh.optimizer, fresh.main, MESH, load_metadata(path))
    for _ in range(2):
        step(module, trained)
        step(fresh_module, fresh)
    for name in trained.main.names:
        assert torch.equal(fresh.main.main(name), trained.main.main(name))


def test_plain_values_in_an_optimizer_state_come_back(tmp_path):
    run, fresh = (single({"weight": nn.Parameter(torch.ones(2))}) for _ in range(2))
    run.optimizer.state[run.main.main("weight")]["calls"] = 3
    fresh.optimizer.param_groups[0]["lr"] = 0.5
    metadata = optimizer_metadata(run.optimizer, run.main, MESH)
    save_checkpoint(tmp_path / "c", optimizer_tensors(0, run.optimizer, run.main), {}, {}, MESH)
    load_optimizer(tmp_path / "c", 0, fresh.optimizer, fresh.main, MESH, metadata)
    assert fresh.optimizer.state[fresh.main.main("weight")] == {"calls": 3}
    assert fresh.optimizer.param_groups[0]["lr"] == 0.1


def test_hyperparameters_of_other_types_are_refused(tmp_path):
    run = single({"weight": nn.Parameter(torch.ones(2))})
    metadata = optimizer_metadata(run.optimizer, run.main, MESH)
    save_checkpoint(tmp_path / "c", optimizer_tensors(0, run.optimizer, run.main), {}, {}, MESH)
    before, group = dict(run.optimizer.param_groups[0]), metadata["groups"][0]
    known = dict(group["hyperparameters"])

    def load(changes: dict[str, Any]) -> None:
        group["hyperparameters"] = {**known, **changes}
        load_optimizer(tmp_path / "c", 0, run.optimizer, run.main, MESH, metadata)

    for key, value in (
        ("lr", True),
        ("lr", [0.1]),
        ("lr", torch.tensor(0.1)),
        ("maximize", 7),
        ("momentum", "0.9"),
    ):
        message = f"'{key}' of group 0 of optimizer 0 is .*{type(value).__name__}"
        with pytest.raises(CheckpointMismatchError, match=message):
            load({key: value})
        assert run.optimizer.param_groups[0] == before
    for valid in ({"lr": 1}, {"momentum": 0}, {"maximize": True}, {"of another version": "x"}):
        load(valid)
        assert run.optimizer.param_groups[0].items() >= valid.items()


def test_state_of_another_shape_than_its_sharded_parameter_is_refused():
    weight = set_shard_spec(nn.Parameter(torch.ones(2, 4)), ShardSpec((4, 4), (ShardRange(0, 2),)))
    run = single({"weight": weight})
    run.optimizer.state[run.main.main("weight")]["row"] = torch.ones(2, 1)
    with pytest.raises(UnsupportedError, match=r"'row' of 'weight' has shape \(2, 1\)"):
        optimizer_tensors(0, run.optimizer, run.main)


def test_names_that_do_not_fit_are_listed(tmp_path):
    save_checkpoint(tmp_path / "c", entries(), {}, {}, MESH)
    many = {f"layer.{index:02}": entry_of(torch.ones(1)) for index in range(25)}
    with pytest.raises(CheckpointMismatchError, match=r"layer\.09 and 15 more"):
        load_tensors(tmp_path / "c", many, MESH)
    with pytest.raises(CheckpointMismatchError, match="absent are not in"):
        read_full(tmp_path / "c", ["absent"])


def test_another_format_and_a_damaged_header_are_refused(tmp_path):
    save_checkpoint(tmp_path / "c", entries(), {}, {}, MESH)
    header = json.loads((tmp_path / "c" / HEADER).read_text())
    for number, remedy in ((99, "Upgrade"), (1, "version that saved it")):
        (tmp_path / "c" / HEADER).write_text(json.dumps(header | {"format": number}))
        with pytest.raises(UnsupportedError, match=remedy):
            load_rank_state(tmp_path / "c", MESH)
    for damage in ("{", json.dumps(header | {"global_step": 5}), "[]"):
        (tmp_path / "c" / HEADER).write_text(damage)
        with pytest.raises(CorruptDataError, match=HEADER):
            load_rank_state(tmp_path / "c", MESH)


def test_consolidation_does_not_replace_a_directory_by_a_file(tmp_path):
    path = tmp_path / "sharded"
    nothing: dict[str, Any] = {"order": [], "aliases": {}, "padded_rows": {}, "numbering": []}
    save_checkpoint(path, {}, {ONE_PROCESS: nothing}, {}, MESH)
    with pytest.raises(CheckpointMismatchError, match=f"{path} is a directory"):
        consolidate(path, path)
    verify_checkpoint(path)
    assert [file.name for file in tmp_path.iterdir()] == ["sharded"]
