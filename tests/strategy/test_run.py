"""A run exists from ``setup`` to ``teardown``, and restores the Trainer."""

from __future__ import annotations

from typing import Any

import pytest
from lightning import Trainer

from lightning_megatron import MegatronStrategy
from lightning_megatron.layers.gradient_slot import slot_of
from lightning_megatron.strategy.run import Run
from tests.strategy.tiny import TinyLM, loader


def trainer_of(**options: Any) -> Trainer:
    return Trainer(
        accelerator="cpu",
        devices=1,
        strategy=MegatronStrategy(),
        max_steps=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


class SlotRecorder(TinyLM):
    """Record at each batch whether all trained parameters have a gradient slot."""

    def __init__(self) -> None:
        super().__init__()
        self.has_slots: list[bool] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        slots = [slot_of(parameter) for parameter in self.parameters()]
        self.has_slots.append(all(slot is not None for slot in slots))


def test_run_is_not_available_before_setup() -> None:
    strategy = trainer_of().strategy
    assert isinstance(strategy, MegatronStrategy)
    with pytest.raises(
        RuntimeError, match="from the `setup` hook on, which no run of this strategy"
    ):
        strategy.run  # noqa: B018
    assert strategy.expert_statistics is None


def test_fit_restores_the_replaced_methods_of_the_trainer() -> None:
    trainer = trainer_of()
    trainer.fit(TinyLM(), loader())
    owners = (
        trainer.fit_loop,
        trainer.fit_loop.epoch_loop,
        trainer._signal_connector,
        trainer._data_connector,
    )
    replaced = {
        *("advance", "_broadcast_sigterm_tensor", "_sigterm_notifier_fn", "on_advance_end"),
        *("_slurm_sigusr_handler_fn", "_requires_distributed_sampler"),
    }
    assert all(replaced.isdisjoint(vars(owner)) for owner in owners)


def test_failed_setup_restores_the_replaced_methods_of_the_trainer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("no steps")

    monkeypatch.setattr(Run, "_patch_fit", fail)
    trainer = trainer_of()
    with pytest.raises(ValueError, match="no steps"):
        trainer.fit(TinyLM(), loader())
    assert "_requires_distributed_sampler" not in vars(trainer._data_connector)
    assert "on_advance_end" not in vars(trainer.fit_loop)


def test_second_fit_has_gradient_slots_and_removes_them_at_its_end() -> None:
    trainer, module = trainer_of(), SlotRecorder()
    trainer.fit(module, loader())
    trainer.fit_loop.epoch_loop.max_steps = 4
    trainer.fit(module, loader())
    assert module.has_slots == [True] * 4
    assert slot_of(next(module.parameters())) is None
