"""Ranks that must read the same batches end the fit if one of them reads another one."""

from __future__ import annotations

import random
from math import isfinite
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_megatron import MegatronStrategy, RankMismatchError
from tests.strategy.tiny import TinyLM, Words, loader
from tests.world import run_world


class Drawn(Words):
    """Sequences shifted by a number that is drawn when they are read."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        shift = int(16 * random.random())
        return {name: (value + shift) % 32 for name, value in super().__getitem__(index).items()}


class Draws(Callback):
    """Draw a number on rank 0 before some steps."""

    def __init__(self, *numbers: int) -> None:
        self.numbers = numbers

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_rank == 0 and batch_idx + 1 in self.numbers:
            random.random()


class OtherBatch(Words):
    """The same sequences but for one, on one rank."""

    def __init__(self, index: int, is_other: bool) -> None:
        super().__init__(32)
        self.tokens[index] = int(is_other)


def fit(data: Any, validation: Any = None, draws: tuple[int, ...] = (), **options: Any) -> float:
    random.seed(5)
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=MegatronStrategy(**options),
        max_epochs=1,
        callbacks=[Draws(*draws)],
        **dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False),
        enable_model_summary=False,
    )
    trainer.fit(TinyLM(), data, validation)
    return float(trainer.callback_metrics["loss"])


def refused(numbers: str, *args: Any, **options: Any) -> None:
    with pytest.raises(
        RankMismatchError, match=rf"rank 1 has {numbers} of its data-parallel rank="
    ):
        fit(*args, **options)


def _check_batches(rank: int, size: int) -> None:
    drawn = DataLoader(Drawn(), 4)
    assert isfinite(fit(drawn, drawn, tp=2))
    refused("training batch 2", drawn, draws=(1,), pp=2)
    refused("training batches 5 to 6", drawn, draws=(4,), replica_check_interval=3, tp=2)
    # The fit ends between two comparisons.
    refused("training batches 5 to 7", DataLoader(Drawn(28), 4), draws=(4,), tp=2)
    refused("validation batch 1", loader(), DataLoader(OtherBatch(0, rank == 1), 4), pp=2)
    refused("validation batches 5 to 7", loader(4), DataLoader(OtherBatch(20, rank == 1), 5), tp=2)


def test_a_later_training_or_validation_batch_that_differs_ends_the_fit() -> None:
    run_world(_check_batches, 2)
