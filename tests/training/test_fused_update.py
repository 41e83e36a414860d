"""Fits that clip, update and round in one kernel equal those on torch's own steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

from lightning_megatron import MegatronStrategy
from lightning_megatron.errors import UnsupportedError
from tests.strategy.tiny import TinyLM, loader
from tests.training.fused_fits import FIND, FITS, Fit, FusedLM, PlainKernel, check_equal, run


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> type[PlainKernel]:
    monkeypatch.setattr(PlainKernel, "num_calls", 0)
    monkeypatch.setattr(FIND, lambda device: (PlainKernel, ""))
    return PlainKernel


@pytest.mark.parametrize("name", FITS)
def test_losses_weights_and_states_equal_those_of_torch(
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
def test_other_optimizers_step_by_themselves(make: Any, kernel: type[PlainKernel]) -> None:
    module, _ = run(Fit(make=make))
    assert kernel.num_calls == 0
    assert module.losses[-1] < module.losses[0]


def test_moments_of_another_type_need_the_kernel() -> None:
    strategy = MegatronStrategy(moments_dtype="bfloat16")
    trainer = Trainer(
        accelerator="cpu", devices=1, strategy=strategy, max_epochs=1, logger=False, barebones=True
    )
    with pytest.raises(UnsupportedError, match="moments_dtype .bfloat16. needs the fused kernel"):
        trainer.fit(TinyLM(), loader())


def test_moments_are_kept_in_their_type(kernel: type[PlainKernel]) -> None:
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
