"""Training with clipping, update and rounding in one kernel matches torch's own optimizer steps."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

from lightning_megatron import MegatronStrategy
from lightning_megatron.errors import UnsupportedError
from lightning_megatron.training.group_numbers import GroupNumbers, numbers_of
from tests.strategy.tiny import TinyLM, loader
from tests.training.fused_fits import FIND, FITS, Fit, FusedLM, PlainKernel, check_equal, run


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> type[PlainKernel]:
    monkeypatch.setattr(PlainKernel, "num_calls", 0)
    monkeypatch.setattr(FIND, lambda device: (PlainKernel, ""))
    return PlainKernel


@pytest.mark.parametrize("name", FITS)
def test_fused_kernel_gives_losses_weights_and_states_of_torch(
    name: str, kernel: type[PlainKernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_equal(FITS[name], monkeypatch, "cpu", 1e-3 if FITS[name].precision != "32-true" else 1e-6)
    assert kernel.num_calls > 0


@pytest.mark.parametrize(
    "make",
    [
        lambda groups, fused, **options: torch.optim.AdamW(groups, **options),
        lambda groups, **options: torch.optim.AdamW(groups, amsgrad=True, **options),
        lambda groups, fused, eps, lr, **options: torch.optim.SGD(groups, lr=1.0, **options),
    ],
    ids=["not fused", "amsgrad", "SGD"],
)
def test_optimizers_without_fused_kernel_use_their_own_step(
    make: Any, kernel: type[PlainKernel]
) -> None:
    module, _ = run(Fit(make=make))
    assert kernel.num_calls == 0
    assert module.losses[-1] < module.losses[0]


def test_moments_dtype_without_fused_kernel_is_refused() -> None:
    strategy = MegatronStrategy(moments_dtype="bfloat16")
    trainer = Trainer(
        accelerator="cpu", devices=1, strategy=strategy, max_epochs=1, logger=False, barebones=True
    )
    with pytest.raises(UnsupportedError, match="moments_dtype .bfloat16. needs the fused kernel"):
        trainer.fit(TinyLM(), loader())


def test_moments_are_stored_in_moments_dtype(kernel: type[PlainKernel]) -> None:
    strategy = MegatronStrategy(moments_dtype="bfloat16")
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        precision="bf16-mixed",
        max_epochs=1,
        barebones=True,
    )
    module = FusedLM()
    trainer.fit(module, loader())
    states = trainer.optimizers[0].state.values()
    assert {state[name].dtype for state in states for name in ("exp_avg", "exp_avg_sq")} == {
        torch.bfloat16
    }
    assert module.losses[-1] < module.losses[0]


GROUP = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def test_numbers_of_a_group_hold_every_hyperparameter() -> None:
    lr, high1, low1, high2, low2, *later_numbers = numbers_of(GROUP, is_decoupled=True)
    assert lr == 0.01
    assert [high1 + low1, high2 + low2] == [math.log(0.9), math.log(0.95)]
    assert high1 == float(torch.tensor(high1)) != math.log(0.9)
    assert later_numbers == [0.9, 1 - 0.9, 0.95, 1 - 0.95, 1e-8, 0.01 * 0.1, 0.0]
    assert numbers_of(GROUP, is_decoupled=False)[10] == 0.1
    assert math.exp(numbers_of(GROUP | {"betas": (0.0, 0.9)}, True)[1]) == 0.0


def test_the_table_is_written_in_place_if_a_number_has_changed() -> None:
    numbers = GroupNumbers(torch.device("cpu"))
    groups: list[dict[str, Any]] = [dict(GROUP), GROUP | {"lr": 0.5}]
    numbers.fill(groups, [True, False])
    first, second = numbers.rows
    expected = [numbers_of(groups[0], True), numbers_of(groups[1], False)]
    assert torch.equal(torch.stack((first, second)), torch.tensor(expected))
    groups[1]["lr"] = 0.25
    numbers.fill(groups, [True, False])
    assert second[0] == 0.25, "the row is still that of the table"
    second.zero_()
    numbers.fill(groups, [True, False])
    assert not second.any(), "nothing is copied if no number has changed"
    numbers.fill([*groups, groups[0]], [True, False, True])
    assert len(numbers.rows) == 3
    assert numbers.rows[1][0] == 0.25
