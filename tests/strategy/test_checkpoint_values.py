"""Values in checkpoints: the order of parameters, the state of a rank, and files of other strategies,
whose damaged or edited values are refused by name.
"""

from __future__ import annotations

import copy
import inspect
import io
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.core import saving
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_megatron.checkpoint.consolidate import consolidate
from lightning_megatron.checkpoint.metadata_checks import check_values
from lightning_megatron.checkpoint.values import read_single_file
from lightning_megatron.errors import CheckpointMismatchError, CorruptDataError, UnsupportedError
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.gpt import GPT
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.plan.placement import PlacementShape
from lightning_megatron.strategy.checkpoints import run_checkpoints
from lightning_megatron.strategy.checkpoints.run_checkpoints import name_damaged_states
from lightning_megatron.strategy.checkpoints.single_process_record import (
    merge_orders,
    named_numbers,
    order_groups,
)
from lightning_megatron.strategy.checkpoints.source import install_directory_check
from lightning_megatron.strategy.process.random_states import random_states, restore_random_states
from tests.fits import GPT2, Job, Report, joined, run_job, trainer_of

CPU = torch.device("cpu")
SMALL = replace(GPT2, num_layers=1)
STEPS = 2

# ---- the order of parameters


#: pp, vpp, layers of each stage, and shape of the placement.
STAGES: list[tuple[int, int, list[int] | None, PlacementShape]] = [
    *((pp, vpp, None, "loop") for pp, vpp in ((1, 1), (2, 1), (2, 4), (8, 1))),
    (2, 1, [8, 0], "loop"),
    (4, 1, [0, 5, 3, 0], "loop"),
    (4, 2, None, "v"),
]


def names_of_stages(
    pp: int, vpp: int, stage_layers: Sequence[int] | None, shape: PlacementShape
) -> tuple[list[str], list[list[str]]]:
    """Return the parameter names of a GPT of eight layers, of the full model and of each stage."""
    sizes = {"vocab_size": 32, "max_seq_length": 8, "num_layers": 8, "hidden_size": 8}
    config = GPTConfig.gpt2(**sizes, num_heads=2)
    with torch.device("meta"):
        names = [f"net.{name}" for name, _ in GPT(config).named_parameters()]
    stages: list[list[str]] = []
    layout = ParallelLayout(pp, pp=pp, vpp=vpp, stage_layers=stage_layers, shape=shape)
    for number, chunks in enumerate(config.partition(layout).by_stage(layout.placement)):
        held = {str(layer) for chunk in chunks for layer in chunk}
        last = number == (0 if shape == "v" else pp - 1)
        parts = {"embedding": number == 0, "final_norm": last, "head": last}
        stages.append(
            [name for name in names if name.split(".")[2] in held or parts.get(name.split(".")[1])]
        )
    return names, stages


def groups_of(names: list[str]) -> list[list[str]]:
    return [[name for name in names if ("norm" in name) is is_norm] for is_norm in (False, True)]


def test_names_of_stages_merge_into_the_order_of_the_full_model_or_are_refused():
    for case in STAGES:
        names, stages = names_of_stages(*case)
        assert sorted(name for stage in stages for name in stage) == sorted(names)
        assert merge_orders(stages) == names
        assert order_groups([groups_of(stage) for stage in stages], names) == groups_of(names)
    # Names before the blocks of the last stage come before all blocks.
    of_user = [["words", "blocks.0"], ["norm", "blocks.1", "head"]]
    assert merge_orders(of_user) == ["words", "norm", "blocks.0", "blocks.1", "head"]
    names, stages = names_of_stages(*STAGES[1])
    # One process may have any order.
    assert order_groups([[names[::-1]]], names) == [names[::-1]]
    with pytest.raises(
        CheckpointMismatchError, match="must be in the model's order to be numbered"
    ):
        order_groups([[stage[::-1]] for stage in stages], names)


def test_saved_parameter_numbers_map_to_saved_names_or_else_to_the_group_names():
    assert named_numbers({"params": [0, 1]}, ["a", "b"]) == ["a", "b"]
    assert named_numbers({"params": [0, 1], "param_names": ["b", "a"]}, ["a", "b"]) == ["b", "a"]
    with pytest.raises(CheckpointMismatchError, match="3 were saved, the group has 2"):
        named_numbers({"params": [0, 1, 2]}, ["a", "b"])


def draws() -> list[Any]:
    of_numpy = np.random.standard_normal(3).tolist()
    of_python = [random.gauss(0, 1) for _ in range(3)]
    return [torch.rand(4).tolist(), of_numpy, of_python]


def test_random_generators_continue_from_states_that_load_with_weights_only():
    draws()  # The generators now hold the second number of a pair of normal numbers.
    file = io.BytesIO()
    torch.save(random_states(CPU), file)
    expected = draws()
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(9)
    file.seek(0)
    restore_random_states(torch.load(file, weights_only=True), CPU)
    assert draws() == expected


# ---- the state of a rank


def test_a_fit_does_not_resume_from_a_rank_state_with_missing_values(tmp_path, monkeypatch):
    job = Job(SMALL, {}, steps=1, save=str(tmp_path / "saved.ckpt"))
    with monkeypatch.context() as patch:
        patch.setattr(run_checkpoints, "random_states", lambda device: None)
        run_job(job)
    words = "rank 0 in .*saved.ckpt is damaged: random or dataloader states are missing or invalid"
    with pytest.raises(CorruptDataError, match=words):
        run_job(replace(job, steps=STEPS, resume=job.save, save=None))


def test_invalid_generator_states_are_refused_and_change_no_generator():
    before = torch.get_rng_state()
    bytes_of_torch = (torch.zeros(3, dtype=torch.uint8), torch.full_like(before, 255))
    changes: list[dict[str, Any]] = [{"torch": state} for state in bytes_of_torch]
    changes += [{"python": {"version": 3, "internal": torch.full((625,), 999), "next_gauss": None}}]
    for change in changes:
        values = random_states(CPU) | change
        message = "rank 0 in a is damaged: random or dataloader states are missing or invalid"
        with pytest.raises(CorruptDataError, match=message), name_damaged_states("rank 0 in a"):
            restore_random_states(values, CPU)
    assert torch.equal(torch.get_rng_state(), before)


# ---- files of other strategies


@pytest.fixture(scope="module")
def saved_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("plain") / "plain.ckpt"
    run_job(Job(SMALL, steps=1, save=str(path)))
    return path


def resumed(path: Path) -> Report:
    return run_job(Job(SMALL, {}, steps=STEPS, resume=str(path)))


REFUSALS = (CheckpointMismatchError, CorruptDataError, UnsupportedError)


def assert_equal_reports(actual: Report, expected: Report, case: str) -> None:
    assert actual.losses == expected.losses, case
    for name, weight in joined([expected]).items():
        assert torch.equal(joined([actual])[name], weight), case


def with_random_damage(content: bytes, draw: random.Random) -> bytes:
    start = draw.randrange(len(content))
    variants = [
        content[:start] + bytes([content[start] ^ (1 << draw.randrange(8))]) + content[start + 1 :],
        content[:start] + bytes(64) + content[start + 64 :],
        content[:start] + content[start + 8 :],
        content[:start],
    ]
    return draw.choice(variants)


def test_a_damaged_file_is_refused_by_name_or_gives_the_same_training(saved_path, tmp_path):
    expected, path, num_refused = resumed(saved_path), tmp_path / "damaged.ckpt", 0
    for seed in range(8):
        path.write_bytes(with_random_damage(saved_path.read_bytes(), random.Random(seed)))
        refusal = ""
        try:
            assert_equal_reports(resumed(path), expected, f"seed {seed}")
        except CorruptDataError as error:
            refusal, num_refused = str(error), num_refused + 1
        assert not refusal or str(path) in refusal, f"seed {seed}: {refusal}"
    assert num_refused > 4


def fit_loop_of(values: Any) -> Any:
    return values["loops"]["fit_loop"]


def optimizer_of(values: Any) -> Any:
    return values["optimizer_states"][0]


#: Edits that reading refuses, and what the error says.
READ_EDITS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "callbacks": (lambda values: values.update(callbacks=b"x"), "callbacks must be a mapping"),
    "schedules": (lambda values: values.update(lr_schedulers=1), "lr_schedulers must be a list"),
    "epoch": (lambda values: values.update(epoch=-1), "epoch must be a whole number"),
    "optimizers": (lambda values: values.update(optimizer_states=[-1]), r"optimizer_states\[0\] must be"),
    "named": (
        lambda values: optimizer_of(values)["param_groups"][0].update(params=["weight"]), "FSDP.*Save with ddp",
    ),
}  # fmt: skip


def all_moments(values: dict[str, Any], function: Any) -> None:
    for state in optimizer_of(values)["state"].values():
        state["exp_avg_sq"] = function(state["exp_avg_sq"])


#: Edits that resuming refuses.
RESUME_EDITS: dict[str, tuple[Any, str]] = {
    "all moments are flat": (
        lambda values: all_moments(values, lambda moment: moment.flatten()[None]), "must be (like|shaped like) its",
    ),
    "a second optimizer": (
        lambda values: values["optimizer_states"].append(copy.deepcopy(optimizer_of(values))), "2 were saved, ",
    ),
    "no base rates": (lambda values: values["lr_schedulers"][0].update(base_lrs=[]), r"base_lrs of LambdaLR is \[\] in"),
    "no count of steps": (lambda values: values["lr_schedulers"][0].pop("last_epoch"), "last_epoch of LambdaLR is None in"),
    "no factors of rates": (lambda values: values["lr_schedulers"][0].pop("lr_lambdas"), "lr_lambdas of LambdaLR is None in"),
    "a weight is missing": (lambda values: values["state_dict"].pop("model.final_norm.weight"), "final_norm"),
    "a weight is flat": (
        lambda values: values["state_dict"].update({"model.final_norm.weight": torch.ones(1)}), "final_norm",
    ),
    "no version": (lambda values: values.pop("pytorch-lightning_version"), "pytorch-lightning_version must be text that begins with a digit"),
    "no loops": (lambda values: values.pop("loops"), "loops must be a mapping with fit_loop: it is None"),
    "no schedules": (lambda values: values.pop("lr_schedulers"), "lr_schedulers must be a list"),
    "no loop": (lambda values: values["loops"].pop("fit_loop"), "loops must have fit_loop"),
}  # fmt: skip


def test_edited_values_are_refused_by_name(saved_path, tmp_path):
    path = tmp_path / "edited.ckpt"
    check_values(torch.load(saved_path, weights_only=True), "sound")
    reads: Any = (read_single_file, READ_EDITS), (resumed, RESUME_EDITS)
    for read, edits in reads:
        for name, (edit, words) in edits.items():
            values = torch.load(saved_path, weights_only=True)
            edit(values)
            torch.save(values, path)
            with pytest.raises(REFUSALS) as refusal:
                read(path)
            assert re.search(words, str(refusal.value)), f"{name}: {refusal.value}"


# ---- load_from_checkpoint


class SmallNet(pl.LightningModule):
    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(width, 1)

    def training_step(self, batch: Tensor) -> Tensor:
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_loading_a_directory_is_refused_with_a_command_that_makes_it_loadable(tmp_path):
    trainer, module = trainer_of(Job(strategy={}, precision="32-true", steps=1)), SmallNet()
    trainer.fit(module, DataLoader(torch.randn(4, 3), batch_size=2))
    best, plain = tmp_path / "best.ckpt", tmp_path / "plain.ckpt"
    trainer.save_checkpoint(best)
    words = (
        f"(?s)that MegatronStrategy saved.*checkpoint consolidate {best} plain.ckpt --weights_only"
    )
    for path in (str(best), best):
        with pytest.raises(CheckpointMismatchError, match=words):
            SmallNet.load_from_checkpoint(path)
    consolidate(best, plain, weights_only=True)
    assert torch.equal(SmallNet.load_from_checkpoint(plain).layer.weight, module.layer.weight)
    for other, error in ((tmp_path / "missing.ckpt", OSError), (tmp_path, IsADirectoryError)):
        with pytest.raises(error):
            SmallNet.load_from_checkpoint(other)


def test_lightning_loads_by_the_replaced_function_which_is_replaced_once():
    source = inspect.getsource(saving._load_from_checkpoint)
    assert "checkpoint = pl_load(checkpoint_path, " in source
    reader = saving.pl_load
    install_directory_check()
    assert saving.pl_load is reader
