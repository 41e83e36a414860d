"""A resumed training equals an uninterrupted one bit for bit, and takes each sample once."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_megatron import TokenDataModule
from lightning_megatron.data.token_file import TokenFileWriter
from tests.strategy.checkpoint_runs import GPT2, Trained, trainer_of
from tests.world import run_world

NUM_TOKENS, WINDOW, SAVED_AFTER, STEPS = 288, 4, 3, 6
NUM_SAMPLES = (NUM_TOKENS - 1) // WINDOW


class RecordsSamples(Trained):
    """Record the samples of each step, and draw from every generator that a user's step may use."""

    def __init__(self, augments: bool) -> None:
        super().__init__(replace(GPT2, hidden_dropout=0.2, attention_dropout=0.1))
        self.augments = augments
        self.samples: list[list[int]] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.augments:
            loss = loss * (
                1.0 + 0.1 * torch.rand(()) + 0.1 * float(np.random.normal()) + 0.1 * random.random()
            )
        return loss

    def on_train_batch_start(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.samples.append(batch["tokens"][:, 0].tolist())


class SaveAt(pl.Callback):
    """Save a checkpoint after a step; the training continues."""

    def __init__(self, step: int, path: str) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


def fit(
    layout: dict[str, Any],
    folder: str,
    steps: int,
    save: tuple[int, str] | None = None,
    resume: str | None = None,
    augments: bool = False,
    batch_size: int = 2,
) -> RecordsSamples:
    """Train on windows of a token file."""
    callbacks = [SaveAt(*save)] if save is not None else []
    trainer = trainer_of(layout, 4, steps, callbacks=callbacks, precision="32-true", max_epochs=1)
    module = RecordsSamples(augments)
    trainer.fit(module, datamodule=_data(folder, batch_size), ckpt_path=resume)
    return module


def _data(folder: str, batch_size: int) -> TokenDataModule:
    return TokenDataModule(f"{folder}/corpus", seq_length=WINDOW, batch_size=batch_size)


LAYOUTS: dict[str, tuple[dict[str, Any], bool]] = {
    "tp2 dp2": ({"tp": 2}, True),
    "dp4 behind training": ({"async_save": True}, True),
    "tp2 pp2": ({"tp": 2, "pp": 2, "async_save": True}, False),
}


def _interrupted(rank: int, size: int, folder: str) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name, (layout, augments) in LAYOUTS.items():
        path = f"{folder}/{name}"
        uninterrupted = fit(layout, folder, STEPS, save=(SAVED_AFTER, path), augments=augments)
        resumed = fit(layout, folder, STEPS, resume=path, augments=augments)
        results[name] = (
            uninterrupted.losses,
            resumed.losses,
            uninterrupted.samples,
            resumed.samples,
        )
    # Four data ranks take 24 samples, then two take 12, then one takes the remaining samples; batch
    # sizes differ.
    microbatch_of_one: dict[str, Any] = {"microbatch_size": 1}
    first = fit(microbatch_of_one, folder, 3, save=(3, f"{folder}/four"), batch_size=2)
    second = fit(
        {"tp": 2, **microbatch_of_one},
        folder,
        5,
        save=(5, f"{folder}/two"),
        resume=f"{folder}/four",
        batch_size=3,
    )
    third = fit(
        {"tp": 2, "pp": 2, **microbatch_of_one}, folder, -1, resume=f"{folder}/two", batch_size=5
    )
    results["samples"] = (first.samples, second.samples, third.samples)
    results["once"] = fit(
        {"tp": 4, "microbatch_size": NUM_SAMPLES}, folder, -1, batch_size=NUM_SAMPLES
    ).samples
    return results


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the samples and losses of every rank."""
    folder = tmp_path_factory.mktemp("resume")
    with TokenFileWriter(folder / "corpus", dtype="i4") as writer:
        writer.add_document(np.arange(NUM_TOKENS))
    return run_world(_interrupted, 4, str(folder))


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_resumed_run_equals_an_uninterrupted_run_bit_for_bit(
    name: str, ranks: list[dict[str, Any]]
) -> None:
    for results in ranks:
        losses, resumed_losses, samples, resumed_samples = results[name]
        assert len(losses) == STEPS
        assert resumed_losses == losses[SAVED_AFTER:]
        assert resumed_samples == samples[SAVED_AFTER:]


def test_each_sample_is_taken_once_in_order_when_the_number_of_data_ranks_changes(
    ranks: list[dict[str, Any]],
) -> None:
    parts = [results["samples"] for results in ranks]
    # By the order "tp-cp-ep-dp-pp": four data ranks, then ranks 0 and 2, then rank 0 for all.
    taken: list[int] = []
    for number, data_ranks in enumerate(((0, 1, 2, 3), (0, 2), (0,))):
        for step in zip(*(parts[rank][number] for rank in data_ranks), strict=True):
            taken += [sample for batch in step for sample in batch]
    expected = [sample for batch in ranks[0]["once"] for sample in batch]
    assert sorted(expected) == list(range(0, NUM_SAMPLES * WINDOW, WINDOW))
    assert taken == expected
