"""The state of a rank in a checkpoint is checked before use, and damaged values are named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_megatron import MegatronStrategy
from lightning_megatron.errors import CorruptDataError
from lightning_megatron.groups.random import RandomStreams
from lightning_megatron.strategy.checkpoints.rank_state_checks import (
    check_rank_state,
    name_damaged_states,
)
from lightning_megatron.strategy.checkpoints.run_checkpoints import RunCheckpoints
from lightning_megatron.strategy.process.random_states import random_states, restore_random_states
from tests.strategy.test_user_code import Net, fit

CPU = torch.device("cpu")


def intact_state() -> dict[str, Any]:
    return {
        "random": RandomStreams(3).state_dict(),
        "generators": random_states(CPU),
        "dataloaders": [None],
    }


def setter_of(value: Any, *keys: str) -> Callable[[dict[str, Any]], Any]:
    def edit(values: dict[str, Any]) -> None:
        for key in keys[:-1]:
            values = values[key]
        values[keys[-1]] = value

    return edit


RANDOM = "random must be a seed and a position of whole numbers: it is"
STATES = "generators must be states of the generators of torch, NumPy and Python: it is"
EDITS: tuple[tuple[Callable[[dict[str, Any]], Any], str], ...] = (
    (lambda values: values.pop("random"), "random is missing"),
    (lambda values: values.pop("generators"), "generators is missing"),
    (lambda values: values.pop("dataloaders"), "dataloaders is missing"),
    (setter_of({}, "dataloaders"), "dataloaders must be a list: it is"),
    (setter_of(7, "random"), RANDOM),
    (setter_of("7", "random", "seed"), RANDOM),
    (setter_of(True, "random", "seed"), RANDOM),
    (setter_of({"step": 0.5}, "random", "position"), RANDOM),
    (setter_of({"place": 1}, "random", "position"), RANDOM),
    (setter_of(-1, "random", "position", "step"), RANDOM),
    (setter_of([], "generators"), STATES),
    (setter_of({}, "generators"), STATES),
    (setter_of(torch.zeros(4), "generators", "torch"), STATES),
    (setter_of(None, "generators", "numpy"), STATES),
    (setter_of(torch.full((624,), -1), "generators", "numpy", "keys"), STATES),
    (setter_of(torch.zeros(3), "generators", "numpy", "keys"), STATES),
    (setter_of(10**30, "generators", "numpy", "position"), STATES),
    (setter_of(float("nan"), "generators", "numpy", "gauss"), STATES),
    (setter_of("2", "generators", "python", "version"), STATES),
    (setter_of(torch.full((625,), 999), "generators", "python", "internal"), STATES),
)


def test_damaged_values_of_a_rank_state_are_refused_by_name() -> None:
    for edit, message in EDITS:
        values = intact_state()
        check_rank_state(values, "rank 0 in a")
        edit(values)
        with pytest.raises(
            CorruptDataError,
            match=f"that of rank 0 in a is damaged: {message}.*Use another checkpoint",
        ):
            check_rank_state(values, "rank 0 in a")


@pytest.mark.parametrize("name", ["generators", "random", "dataloaders"])
def test_fit_does_not_resume_from_a_rank_state_with_missing_values(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_writer = RunCheckpoints._writer_on

    def writer_on(*args: Any) -> Any:
        writer = make_writer(*args)
        save = writer.save
        writer.save = lambda path, tensors, values, state, *others: save(
            path,
            tensors,
            values,
            {key: value for key, value in state.items() if key != name},
            *others,
        )
        return writer

    monkeypatch.setattr(RunCheckpoints, "_writer_on", writer_on)
    fit(Net(), MegatronStrategy(), ModelCheckpoint(tmp_path, "saved"), epochs=1)
    monkeypatch.undo()
    with pytest.raises(
        CorruptDataError, match=f"rank 0 in .*saved.ckpt is damaged: {name} is missing"
    ):
        fit(Net(), MegatronStrategy(), resume_from=tmp_path / "saved.ckpt")


def test_invalid_generator_states_are_refused_and_change_no_generator() -> None:
    before = torch.get_rng_state()
    for state in (torch.zeros(3, dtype=torch.uint8), torch.full_like(before, 255)):
        values = {**intact_state()["generators"], "torch": state}
        message = "rank 0 in a is damaged: a random generator does not accept its state"
        with pytest.raises(CorruptDataError, match=message), name_damaged_states("rank 0 in a"):
            restore_random_states(values, CPU)
    assert torch.equal(torch.get_rng_state(), before)
