"""The trial of the first batch works over pipeline stages and data ranks, and with dropout."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import pytest
import torch
from lightning import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_megatron import MegatronStrategy, UnsupportedError
from tests.world import run_world

BATCH, LENGTH, WORDS = 8, 5, 11


class Encoder(LightningModule):
    """An encoder with dropout whose loss depends on ``case``."""

    def __init__(self, case: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.case, self.calls = case, 0
        self.words = nn.Embedding(WORDS, 8)
        self.blocks = nn.Sequential(
            *(nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True) for _ in range(2))
        )
        self.head = nn.Linear(8, WORDS)

    def loss_of(self, tokens: Tensor, labels: Tensor) -> Tensor:
        hidden = self.blocks(self.words(tokens))
        if self.case == "contrast":
            pooled = hidden.mean(1)
            return F.cross_entropy(pooled @ pooled.T, torch.arange(len(pooled)))
        if self.case == "counts":
            self.calls += 1
        if self.case == "ragged" or (self.case == "ragged validation" and not self.training):
            labels = labels.masked_fill(torch.arange(LENGTH) > labels[:, :1] % LENGTH, -100)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss_of(*batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss_of(*batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def make_loader() -> DataLoader:
    generator = torch.Generator().manual_seed(0)
    tokens, labels = (
        torch.randint(WORDS, (2 * BATCH, LENGTH), generator=generator) for _ in range(2)
    )
    return DataLoader(TensorDataset(tokens, labels), batch_size=BATCH)


def fit(case: str, strategy: Any, devices: int, **options: Any) -> dict[str, float]:
    trainer = Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, max_epochs=1, precision="64-true", logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, **options,
    )  # fmt: skip
    trainer.fit(
        Encoder(case),
        make_loader(),
        make_loader() if case in ("mean", "ragged validation") else None,
    )
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


REFUSED = {
    "contrast": "the loss of two microbatches is",
    "ragged": "Return num_tokens beside the loss",
    "ragged validation": "validation_step must give the same .* log 'val_loss' of (two|three) microbatches",
    "counts": "self.calls changes at every call",
}


def run_two_ranks(rank: int, size: int) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    stages: dict[str, Any] = {"pp": 2, "pipeline_plan": {"blocks": "blocks"}}
    results: dict[str, Any] = {}
    for layout, options in {"pp2": stages, "dp2": {"microbatch_size": 2}}.items():
        for case, words in REFUSED.items():
            with pytest.raises(UnsupportedError, match=f"(?s){words}.*microbatch_size='batch'"):
                fit(case, MegatronStrategy(**options), size)
        checked = fit("mean", MegatronStrategy(**options), size)
        results[layout] = (
            checked,
            fit("mean", MegatronStrategy(**options, check_microbatches=False), size),
        )
    metrics = fit("contrast", MegatronStrategy(**stages, microbatch_size="batch"), size)
    return {**results, "whole": metrics}


@pytest.fixture(scope="module")
def results_of_ranks() -> list[dict[str, Any]]:
    return run_world(run_two_ranks, 2)


@pytest.mark.parametrize("layout", ["pp2", "dp2"])
def test_mean_loss_with_dropout_is_accepted_and_unchanged_by_the_trial(
    results_of_ranks: Any, layout: str
) -> None:
    for results in results_of_ranks:
        checked, unchecked = results[layout]
        assert checked == unchecked
        assert 0 < checked["loss"] < 5


def test_complete_batches_over_pipeline_stages_may_couple_samples(results_of_ranks: Any) -> None:
    assert results_of_ranks[0]["whole"] == results_of_ranks[1]["whole"]
    assert results_of_ranks[0]["whole"]["loss"] > 0.5
