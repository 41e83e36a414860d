"""Edits of a checkpoint file of another strategy are refused with a reason, or change nothing."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron.errors import CheckpointMismatchError, CorruptDataError, UnsupportedError
from tests.strategy.checkpoint_runs import train

HALF, STEPS = 1, 2
REFUSALS = (CheckpointMismatchError, CorruptDataError, UnsupportedError)
WRONG: tuple[Any, ...] = (None, "x", -1, 1.5, [], {}, b"b", True)


@pytest.fixture(scope="module")
def saved_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plain") / "plain.ckpt"
    train(None, 1, HALF, save=path)
    return path


def paths_in(values: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the keys that lead to every value of a nest of dictionaries and lists."""
    if path:
        yield path
    if isinstance(values, dict):
        for key, value in values.items():
            yield from paths_in(value, (*path, key))
    if isinstance(values, list):
        for number, value in enumerate(values):
            yield from paths_in(value, (*path, number))


def holder_of(values: Any, path: tuple[Any, ...]) -> Any:
    for key in path[:-1]:
        values = values[key]
    return values


def other_forms(tensor: Tensor) -> list[Tensor]:
    """Return tensors of other shapes or dtypes."""
    forms = [tensor[None], torch.zeros(0), tensor.to(torch.complex128)]
    return [*forms, *([tensor.flatten()[:-1], torch.tensor(1.0)] if tensor.dim() > 1 else [])]


def edit_randomly(values: dict[str, Any], draw: random.Random) -> str:
    """Delete a value, or replace it by one of another kind or shape; return its path.

    States of parameters and of schedulers stay, as Lightning itself allows them to be missing.
    """
    may_be_missing = [("optimizer_states", 0, "state"), ("lr_schedulers",)]
    paths = [path for path in paths_in(values) if path[:-1] not in may_be_missing]
    top = draw.choice(sorted({path[0] for path in paths}))
    path = draw.choice([path for path in paths if path[0] == top])
    holder, key = holder_of(values, path), path[-1]
    if isinstance(holder[key], Tensor):
        holder[key] = draw.choice(other_forms(holder[key]))
    elif draw.random() < 0.5:
        del holder[key]
    else:
        is_number = isinstance(holder[key], (int, float))
        # Another number of the same type may be a valid value.
        holder[key] = draw.choice(WRONG[:2] + WRONG[4:] if is_number else WRONG)
    return str(path)


def test_random_edits_are_refused_or_change_nothing(saved_path: Path, tmp_path: Path) -> None:
    expected = train({}, 1, STEPS, resume=saved_path)
    values, path, num_refused = (
        torch.load(saved_path, weights_only=True),
        tmp_path / "edited.ckpt",
        0,
    )
    for seed in range(24):
        edited_values = copy.deepcopy(values)
        case = f"seed {seed}: {edit_randomly(edited_values, random.Random(seed))}"
        torch.save(edited_values, path)
        actual = None
        try:
            actual = train({}, 1, STEPS, resume=path)
        except REFUSALS:
            num_refused += 1
        if actual is not None:
            assert actual.losses == expected.losses, case
            assert actual.rates == expected.rates, case
    assert num_refused > 8


def optimizer_of(values: dict[str, Any]) -> dict[str, Any]:
    return values["optimizer_states"][0]


def first_matrix(values: dict[str, Any]) -> dict[str, Any]:
    states = optimizer_of(values)["state"].values()
    return next(state for state in states if state["exp_avg"].dim() == 2)


def replace_moment(values: dict[str, Any], function: Any) -> None:
    state = first_matrix(values)
    state["exp_avg"] = function(state["exp_avg"])


def all_moments(values: dict[str, Any], function: Any) -> None:
    for state in optimizer_of(values)["state"].values():
        state["exp_avg_sq"] = function(state["exp_avg_sq"])


EDITS: dict[str, tuple[Any, str]] = {
    "a moment is missing": (
        lambda values: first_matrix(values).pop("exp_avg_sq"),
        "'exp_avg_sq' of 'model",
    ),
    "a moment is a number": (
        lambda values: replace_moment(values, lambda moment: moment.sum()),
        "'exp_avg' of 'model.*other parameter",
    ),
    "a moment is flat": (
        lambda values: replace_moment(values, torch.flatten),
        "'exp_avg' of 'model.*other parameter",
    ),
    "a moment is of integers": (
        lambda values: replace_moment(values, Tensor.long),
        "'exp_avg' of 'model.*other parameter",
    ),
    "all moments are flat": (
        lambda values: all_moments(values, lambda moment: moment.flatten()[None]),
        "must be (like|shaped like) its parameter",
    ),
    "a second optimizer": (
        lambda values: values["optimizer_states"].append(copy.deepcopy(optimizer_of(values))),
        "2 were saved, configure_optimizers returns 1",
    ),
    "no base rates": (
        lambda values: values["lr_schedulers"][0].update(base_lrs=[]),
        "base_lrs is .* must be a list of 2 rates",
    ),
    "no count of steps": (
        lambda values: values["lr_schedulers"][0].pop("last_epoch"),
        "last_epoch is None and must be a whole number",
    ),
    "no factors of rates": (
        lambda values: values["lr_schedulers"][0].pop("lr_lambdas"),
        "lr_lambdas is None and must be a list",
    ),
    "no version": (
        lambda values: values.pop("pytorch-lightning_version"),
        "edited.ckpt pytorch-lightning_version is None",
    ),
    "no loops": (lambda values: values.pop("loops"), "loops is None and must be"),
    "no schedules": (lambda values: values.pop("lr_schedulers"), "lr_schedulers is missing"),
    "no loop": (
        lambda values: values["loops"].pop("fit_loop"),
        "loops.fit_loop has no complete counts",
    ),
    "no counts of batches": (
        lambda values: values["loops"]["fit_loop"].pop("epoch_loop.batch_progress"),
        "no complete counts 'epoch_loop.batch_progress'",
    ),
    "half of the counts": (
        lambda values: values["loops"]["fit_loop"]["epoch_progress"]["current"].pop("completed"),
        "no complete counts 'epoch_progress'",
    ),
}


@pytest.mark.parametrize("name", EDITS)
def test_edit_is_refused_by_name(name: str, saved_path: Path, tmp_path: Path) -> None:
    values, (edit, words) = torch.load(saved_path, weights_only=True), EDITS[name]
    edit(values)
    torch.save(values, tmp_path / "edited.ckpt")
    with pytest.raises(REFUSALS, match=words):
        train({}, 1, STEPS, resume=tmp_path / "edited.ckpt")
