"""What a fit goes on from beside the tensors is checked before it is used, and refused by name."""

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


def sound() -> dict[str, Any]:
    return {
        "random": RandomStreams(3).state_dict(),
        "generators": random_states(CPU),
        "dataloaders": [None],
    }


def put(value: Any, *keys: str) -> Callable[[dict[str, Any]], Any]:
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
    (put({}, "dataloaders"), "dataloaders must be a list: it is"),
    (put(7, "random"), RANDOM),
    (put("7", "random", "seed"), RANDOM),
    (put(True, "random", "seed"), RANDOM),
    (put({"step": 0.5}, "random", "position"), RANDOM),
    (put({"place": 1}, "random", "position"), RANDOM),
    (put(-1, "random", "position", "step"), RANDOM),
    (put([], "generators"), STATES),
    (put({}, "generators"), STATES),
    (put(torch.zeros(4), "generators", "torch"), STATES),
    (put(None, "generators", "numpy"), STATES),
    (put(torch.full((624,), -1), "generators", "numpy", "keys"), STATES),
    (put(torch.zeros(3), "generators", "numpy", "keys"), STATES),
    (put(10**30, "generators", "numpy", "position"), STATES),
    (put(float("nan"), "generators", "numpy", "gauss"), STATES),
    (put("2", "generators", "python", "version"), STATES),
    (put(torch.full((625,), 999), "generators", "python", "internal"), STATES),
)


def test_edited_values_of_a_rank_are_refused_by_name() -> None:
    for edit, message in EDITS:
        values = sound()
        check_rank_state(values, "rank 0 in a")
        edit(values)
        with pytest.raises(
            CorruptDataError,
            match=f"that of rank 0 in a is damaged: {message}.*Use another checkpoint",
        ):
            check_rank_state(values, "rank 0 in a")


@pytest.mark.parametrize("name", ["generators", "random", "dataloaders"])
def test_a_fit_does_not_continue_from_edited_values(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = RunCheckpoints._writer_on

    def writer_on(*args: Any) -> Any:
        writer = before(*args)
        save = writer.save
        writer.save = lambda path, tensors, values, state, **options: save(
            path,
            tensors,
            values,
            {key: value for key, value in state.items() if key != name},
            **options,
        )
        return writer

    monkeypatch.setattr(RunCheckpoints, "_writer_on", writer_on)
    fit(Net(), MegatronStrategy(), ModelCheckpoint(tmp_path, "saved"), epochs=1)
    monkeypatch.undo()
    with pytest.raises(
        CorruptDataError, match=f"rank 0 in .*saved.ckpt is damaged: {name} is missing"
    ):
        fit(Net(), MegatronStrategy(), resume_from=tmp_path / "saved.ckpt")


def test_bytes_that_no_generator_has_are_refused_by_name() -> None:
    before = torch.get_rng_state()
    for state in (torch.zeros(3, dtype=torch.uint8), torch.full_like(before, 255)):
        values = {**sound()["generators"], "torch": state}
        message = "rank 0 in a is damaged: a random generator does not accept its state"
        with pytest.raises(CorruptDataError, match=message), name_damaged_states("rank 0 in a"):
            restore_random_states(values, CPU)
    assert torch.equal(torch.get_rng_state(), before)
