"""Lightning's averages of weights are trained, saved, validated and continued as under its own
strategies.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, WeightAveraging
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from lightning_megatron import MegatronStrategy
from lightning_megatron.checkpoint import read_full
from lightning_megatron.checkpoint.consolidate import CURRENT, MODEL, consolidate
from lightning_megatron.errors import UnsupportedError
from tests.proof.training import Tokens
from tests.strategy.checkpoint_runs import Trained, trainer_of
from tests.world import run_world

State = dict[str, Any]


class Validated(Trained):
    """Validate once an epoch and keep what the weights were then."""

    def __init__(self) -> None:
        super().__init__()
        self.at_validation: list[Tensor] = []

    def on_validation_epoch_start(self) -> None:
        self.at_validation.append(flat(self))

    def validation_step(self, batch: State, batch_idx: int) -> None:
        pass


STEPS, BETWEEN = 8, 5


def flat(module: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().double().flatten() for parameter in module.parameters()])


def fit(
    layout: State | None,
    size: int,
    steps: int,
    folder: str | Path,
    resume: Any = None,
    every: int = BETWEEN,
    **options: Any,
) -> tuple[Validated, EMAWeightAveraging]:
    """Train two steps an epoch, validate after each, save every few steps."""
    averaging = EMAWeightAveraging(decay=0.5)
    saver = ModelCheckpoint(folder, "{step}", every_n_train_steps=every, save_top_k=-1)
    trainer = trainer_of(
        layout, size, steps, callbacks=[averaging, saver], num_sanity_val_steps=0, **options
    )
    module, data = Validated(), Tokens()
    sampler = DistributedSampler(data, size, trainer.global_rank, shuffle=False)
    loader = DataLoader(data, batch_size=8 // size, sampler=sampler)
    trainer.fit(module, loader, DataLoader(data, batch_size=8), ckpt_path=resume)
    return module, averaging


def validated(path: str | Path, layout: State | None, size: int) -> Tensor:
    """Return the weights that a checkpoint is validated with."""
    module = Validated()
    trainer_of(layout, size, 1).validate(
        module, DataLoader(Tokens(), batch_size=8), ckpt_path=path, verbose=False
    )
    return module.at_validation[0]


def saved(path: str | Path, prefix: str) -> dict[str, Tensor]:
    found = read_full(path)
    return {
        name.removeprefix(prefix): one.double()
        for name, one in found.items()
        if name.startswith(prefix)
    }


def test_averages_equal_those_of_lightning_and_continue_from_a_checkpoint(tmp_path: Path) -> None:
    plain, _ = fit(None, 1, STEPS, tmp_path / "plain")
    ours, _ = fit({}, 1, STEPS, tmp_path / "ours")
    close: State = {"rtol": 0, "atol": 1e-12}
    torch.testing.assert_close(flat(ours), flat(plain), **close)
    assert len(ours.at_validation) == len(plain.at_validation) > 1
    torch.testing.assert_close(
        torch.stack(ours.at_validation), torch.stack(plain.at_validation), **close
    )
    rest, _ = fit(
        {}, 1, STEPS, tmp_path / "rest", resume=tmp_path / "ours" / f"step={BETWEEN}.ckpt"
    )
    assert torch.equal(flat(rest), flat(ours))
    assert rest.losses == ours.losses[BETWEEN:]
    for path, layout in (("plain", None), ("ours", {})):
        weights = validated(tmp_path / path / f"step={BETWEEN}.ckpt", layout, 1)
        expected = torch.load(tmp_path / "plain" / f"step={BETWEEN}.ckpt")["state_dict"]
        torch.testing.assert_close(
            weights, torch.cat([one.double().flatten() for one in expected.values()]), **close
        )


def test_averages_continue_between_single_files_and_directories(tmp_path: Path) -> None:
    plain, _ = fit(None, 1, STEPS, tmp_path / "plain")
    fit({}, 1, BETWEEN, tmp_path / "ours")
    consolidate(tmp_path / "ours" / f"step={BETWEEN}.ckpt", tmp_path / "file.ckpt")
    consolidate(
        tmp_path / "ours" / f"step={BETWEEN}.ckpt", tmp_path / "weights.ckpt", weights_only=True
    )
    assert (
        not {"current_model_state", "averaging_state"}
        & torch.load(tmp_path / "weights.ckpt").keys()
    )
    close: State = {"rtol": 0, "atol": 1e-12}
    # Lightning itself rounds double precision when it goes on with such a module.
    expected, _ = fit(
        None, 1, STEPS, tmp_path / "again", resume=tmp_path / "plain" / f"step={BETWEEN}.ckpt"
    )
    there, _ = fit(None, 1, STEPS, tmp_path / "there", resume=tmp_path / "file.ckpt")
    torch.testing.assert_close(flat(there), flat(expected), rtol=0, atol=1e-9)
    here, _ = fit(
        {}, 1, STEPS, tmp_path / "here", resume=tmp_path / "plain" / f"step={BETWEEN}.ckpt"
    )
    torch.testing.assert_close(flat(here), flat(plain), **close)
    assert here.losses == pytest.approx(plain.losses[BETWEEN:], abs=1e-12)


def test_a_checkpoint_without_averages_begins_them(tmp_path: Path) -> None:
    trainer, module = trainer_of({}, 1, 2, precision="32-true"), Trained()
    trainer.fit(module, DataLoader(Tokens(), batch_size=8))
    trainer.save_checkpoint(tmp_path / "start")
    found = [fit({}, 1, 4, tmp_path / "a", resume=tmp_path / "start", precision="32-true")[0]]
    consolidate(tmp_path / "start", tmp_path / "start.ckpt")
    found.append(
        fit(None, 1, 4, tmp_path / "b", resume=tmp_path / "start.ckpt", precision="32-true")[0]
    )
    torch.testing.assert_close(flat(found[0]), flat(found[1]), rtol=0, atol=1e-6)


def _assert_averages(folder: str | Path, steps: int) -> None:
    """Compare the averages of checkpoints with those of the weights in them, in full precision."""
    average: dict[str, Tensor] = {}
    for step in range(1, steps + 1):
        current = saved(f"{folder}/step={step}.ckpt", CURRENT)
        average = {
            name: (average[name] + one) / 2 if average else one for name, one in current.items()
        }
        found = saved(f"{folder}/step={step}.ckpt", MODEL)
        assert found.keys() == current.keys()
        for name, one in found.items():
            torch.testing.assert_close(one, average[name], rtol=0, atol=1e-6)


def test_mixed_precision_averages_in_full_precision(tmp_path: Path) -> None:
    ours, averaging = fit({}, 1, STEPS, tmp_path / "ours", every=1, precision="bf16-mixed")
    assert "_swap_models" not in vars(averaging), "the callback is as it was after the run"
    _assert_averages(tmp_path / "ours", STEPS)
    last = saved(tmp_path / "ours" / f"step={STEPS}.ckpt", MODEL)
    assert any(not torch.equal(one, one.bfloat16().double()) for one in last.values())
    rest, _ = fit(
        {},
        1,
        STEPS,
        tmp_path / "r",
        tmp_path / "ours" / f"step={BETWEEN}.ckpt",
        every=1,
        precision="bf16-mixed",
    )
    assert rest.losses == ours.losses[BETWEEN:]
    again = saved(tmp_path / "r" / f"step={STEPS}.ckpt", MODEL)
    assert all(torch.equal(again[name], one) for name, one in last.items())


LAYOUTS: dict[str, State] = {
    "parts": {"zero": 1},
    "whole": {"zero": 0},
    "whole parameters": {"optimizer_slices": "parameters"},
}


def _on_ranks(rank: int, size: int, folder: str) -> State:
    found: State = {}
    for name, layout in LAYOUTS.items():
        module, _ = fit(layout, size, STEPS, f"{folder}/{name}")
        rest, _ = fit(
            layout, size, STEPS, f"{folder}/rest", resume=f"{folder}/{name}/step={BETWEEN}.ckpt"
        )
        found[name] = (flat(module), torch.equal(flat(rest), flat(module)))
        fit(layout, size, 4, f"{folder}/half {name}", every=1, precision="bf16-mixed")
    return found


def test_data_parallel_ranks_average_alike(tmp_path: Path) -> None:
    plain, _ = fit(None, 1, STEPS, tmp_path / "plain")
    for found in run_world(_on_ranks, 2, str(tmp_path)):
        for weights, goes_on_equally in found.values():
            torch.testing.assert_close(weights, flat(plain), rtol=0, atol=1e-9)
            assert goes_on_equally
    for name in LAYOUTS:
        _assert_averages(tmp_path / f"half {name}", 4)


def test_models_in_parts_are_refused_before_any_process_starts() -> None:
    trainer = trainer_of({"tp": 2, "async_save": True}, 2, 1, callbacks=[WeightAveraging()])
    assert isinstance(trainer.strategy, MegatronStrategy)
    with pytest.raises(
        UnsupportedError, match=r"WeightAveraging needs the whole model.*tp is 2.*Use tp=1"
    ):
        trainer.fit(Trained(), DataLoader(Tokens(), batch_size=8))
    assert "LOCAL_RANK" not in os.environ
