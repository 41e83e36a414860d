"""A value that is not finite ends the run where values are logged, and is named with rank, batch
and parameter.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from lightning import Trainer, seed_everything
from torch import Tensor

from lightning_megatron import MegatronStrategy, NonFiniteError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.strategy.optimization.finite_watch import (
    FiniteWatch,
    NonFiniteValue,
    checks_of,
    describe,
)
from lightning_megatron.strategy.private.loops import LRSearch
from tests.strategy.tiny import TinyLM, loader
from tests.world import run_world

NAME = "net.final_norm.weight"


class Spoiled(TinyLM):
    """Have a loss, gradient or weight that is not finite on one rank.

    Args:
        kind: ``loss``, ``gradient`` or ``weight``.
        rank: Rank with the value that is not finite.
        batch: Number of the training batch with this value (batches).
    """

    def __init__(self, kind: str, rank: int, batch: int) -> None:
        super().__init__(schedule=None)
        self.kind, self.spoiled_rank, self.spoiled_batch = kind, rank, batch

    def spoils(self, kind: str, batch_idx: int) -> bool:
        return (kind, torch.distributed.get_rank(), batch_idx) == (
            self.kind,
            self.spoiled_rank,
            self.spoiled_batch,
        )

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.spoils("weight", batch_idx):
            with torch.no_grad():
                self.get_parameter(NAME)[1] = torch.nan

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        loss = self(batch)
        if self.spoils("loss", batch_idx):
            loss = loss * torch.inf
        if self.spoils("gradient", batch_idx):
            self.get_parameter(NAME).register_hook(lambda gradient: gradient * torch.nan)
        return loss


def error_of(case: tuple[dict[str, Any], str, int, int, dict[str, Any]]) -> str:
    """Train, and return the number of steps and the text of the error."""
    sizes, kind, rank, batch, options = case
    seed_everything(3, verbose=False)
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=MegatronStrategy(**sizes),
        max_steps=6,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"log_every_n_steps": 1, **options},
    )
    try:
        trainer.fit(Spoiled(kind, rank, batch), loader(32, 2))
    except NonFiniteError as error:
        return f"{trainer.global_step}: {error}"
    return f"{trainer.global_step}: no error"


def errors_of(
    rank: int, size: int, cases: list[tuple[dict[str, Any], str, int, int, dict[str, Any]]]
) -> list[str]:
    warnings.simplefilter("ignore")
    return [error_of(case) for case in cases]


CASES: dict[str, tuple[tuple[dict[str, Any], str, int, int, dict[str, Any]], str]] = {
    "loss, dp2": (
        ({}, "loss", 1, 3, {}),
        "3: .*at training batch 3 the loss of rank 1 (inf) was not",
    ),
    "loss, first batch": (
        ({}, "loss", 1, 0, {}),
        "0: .*at training batch 0 the loss of rank 1 (inf) was not",
    ),
    "loss, pp2": (
        ({"pp": 2}, "loss", 1, 3, {}),
        "3: .*at training batch 3 the loss of rank 0 (inf), the loss of rank 1 (inf) were not",
    ),
    "gradient, dp2": (
        ({}, "gradient", 1, 3, {}),
        f"3: .*at training batch 3 the gradient {NAME} of rank 1 (nan) was",
    ),
    "gradient, clipped": (
        ({"overlap_gradients": False}, "gradient", 0, 3, {"gradient_clip_val": 1.0}),
        f"3: .*at training batch 3 the gradient {NAME} of rank 0 (nan) was",
    ),
    "gradient, pp2": (
        ({"pp": 2}, "gradient", 1, 3, {}),
        f"3: .*at training batch 3 the gradient {NAME} of rank 1 (nan) was",
    ),
    "weight, tp2": (
        ({"tp": 2}, "weight", 1, 3, {}),
        f"3: .*at training batch 3 the weight {NAME} of rank 1 (nan) was",
    ),
    "weight, first batch": (
        ({}, "weight", 1, 0, {}),
        f"0: .*at training batch 0 the weight {NAME} of rank 1 (nan) was",
    ),
    "loss, logged at the fourth batch": (
        ({}, "loss", 1, 2, {"log_every_n_steps": 4}),
        "3: .*at training batch 2 the loss of rank 1 (inf) was not, before any other value. At batch 3 so were",
    ),
    "loss, logged never": (
        ({}, "loss", 1, 2, {"log_every_n_steps": 50}),
        "6: .*at training batch 2 the loss of rank 1 (inf) was not",
    ),
    "not looked at": (({"check_gradients": False}, "loss", 1, 2, {}), "6: no error"),
}


@pytest.fixture(scope="module")
def messages_by_rank() -> list[list[str]]:
    return run_world(errors_of, 2, [case for case, _ in CASES.values()])


@pytest.mark.parametrize("name", CASES)
def test_every_rank_names_the_rank_the_batch_and_the_value_that_is_not_finite(
    messages_by_rank: list[list[str]], name: str
) -> None:
    begin, _, words = CASES[name][1].rpartition(".*")
    for texts in messages_by_rank:
        text = texts[list(CASES).index(name)]
        assert text.startswith(begin)
        assert words in text


def test_checks_are_off_by_default_with_loss_scales_and_learning_rate_searches() -> None:
    plain, search = Trainer(logger=False), Trainer(logger=False, callbacks=[LRSearch(4)])
    assert checks_of(None, False, plain) is None
    assert checks_of(None, True, plain) is False
    assert checks_of(None, False, search) is False
    assert checks_of(True, True, search) is True


def test_the_first_value_that_is_not_finite_is_named_before_later_values() -> None:
    text = describe(
        [
            NonFiniteValue(7, "gradient", 0, "a", "nan"),
            NonFiniteValue(7, "loss", 3, "", "nan"),
            *(NonFiniteValue(9, "weight", 0, f"w{number}", "inf") for number in range(7)),
        ]
    )
    assert "at training batch 7 the loss of rank 3 (nan) was not, before any other value." in text
    assert (
        "At batch 9 so were the gradient a of rank 0 (nan), the weight w0 of rank 0 (inf)" in text
    )
    assert "and 3 more" in text
    assert "the batch that rank 3 had read" in text


def test_many_steps_are_summed_and_a_nan_among_them_raises() -> None:
    watch = FiniteWatch(ParallelMesh.single())
    for step in range(3000):
        watch.begin(step, looks=False)
        watch.note("loss", torch.tensor(1.0 if step != 100 else torch.nan))
    assert len(watch._recorded) < 1100
    with pytest.raises(NonFiniteError, match="at training batch 0 the loss of rank 0"):
        watch.check()
    watch.check()
