"""A damaged checkpoint file of another strategy is refused by name or gives the same training."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_megatron.checkpoint.metadata_checks import check_values
from lightning_megatron.checkpoint.single_file import read_single_file
from lightning_megatron.errors import CorruptDataError
from tests.strategy.checkpoint_runs import train

HALF, STEPS = 1, 2


@pytest.fixture(scope="module")
def saved_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plain") / "plain.ckpt"
    train(None, 1, HALF, save=path)
    return path


def with_random_damage(content: bytes, draw: random.Random) -> bytes:
    start = draw.randrange(len(content))
    variants = [
        content[:start] + bytes([content[start] ^ (1 << draw.randrange(8))]) + content[start + 1 :],
        content[:start] + bytes(64) + content[start + 64 :],
        content[:start] + content[start + 8 :],
        content[:start],
    ]
    return draw.choice(variants)


def test_damaged_file_is_refused_or_gives_the_same_training(
    saved_path: Path, tmp_path: Path
) -> None:
    expected = train({}, 1, STEPS, resume=saved_path).losses
    path, content, num_refused = tmp_path / "damaged.ckpt", saved_path.read_bytes(), 0
    for seed in range(8):
        path.write_bytes(with_random_damage(content, random.Random(seed)))
        refusal = None
        try:
            losses = train({}, 1, STEPS, resume=path).losses
        except CorruptDataError as error:
            refusal = str(error)
        if refusal is None:
            assert losses == expected, f"seed {seed}"
        else:
            assert str(path) in refusal, f"seed {seed}: {refusal}"
            num_refused += 1
    assert num_refused > 4


def fit_loop_of(values: dict[str, Any]) -> dict[str, Any]:
    loop: dict[str, Any] = values["loops"]["fit_loop"]
    return loop


def first_state(values: dict[str, Any]) -> dict[str, Any]:
    state: dict[str, Any] = values["optimizer_states"][0]["state"][0]
    return state


EDITS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "callbacks": (lambda values: values.update(callbacks=b"x"), "callbacks must be a mapping"),
    "schedules": (lambda values: values.update(lr_schedulers=1), "lr_schedulers must be a list"),
    "epoch": (lambda values: values.update(epoch=-1), "epoch must be a whole number"),
    "optimizers": (
        lambda values: values.update(optimizer_states=[-1]),
        "optimizer_states must be a list of torch optimizer states",
    ),
    "state": (lambda values: first_state(values).update(exp_avg=1.5), "optimizer_states must be"),
    "step": (lambda values: first_state(values).update(step=None), "optimizer_states must be"),
    "numbers": (
        lambda values: values["optimizer_states"][0]["param_groups"][0]["params"].append(0),
        "unique parameter numbers",
    ),
    "count": (
        lambda values: fit_loop_of(values)["epoch_progress"]["total"].update(completed="x"),
        "loops must be",
    ),
    "current": (
        lambda values: fit_loop_of(values)["epoch_progress"].pop("current"),
        "loops must be",
    ),
    "optimizer of a loop": (
        lambda values: fit_loop_of(values)[
            "epoch_loop.automatic_optimization.optim_progress"
        ].update(optimizer=None),
        "loops must be",
    ),
}


@pytest.mark.parametrize("name", EDITS)
def test_edited_value_is_refused_by_name(name: str, saved_path: Path, tmp_path: Path) -> None:
    values = copy.deepcopy(torch.load(saved_path, weights_only=True))
    check_values(values, "sound")
    edit, words = EDITS[name]
    edit(values)
    torch.save(values, tmp_path / "edited.ckpt")
    with pytest.raises(CorruptDataError, match=rf"edited.ckpt is not: .*{words}"):
        read_single_file(tmp_path / "edited.ckpt")
