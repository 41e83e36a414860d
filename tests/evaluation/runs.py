"""Evaluations of one model on several tasks, under several layouts of one world."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from torch import Tensor
from torchmetrics import Metric

from lightning_megatron import HuggingFaceCausalLM, MegatronStrategy
from lightning_megatron.evaluation import (
    ClozeAccuracy,
    EvaluatedLM,
    LambadaData,
    WikiTextData,
    WordPerplexity,
)
from lightning_megatron.evaluation.datamodules import EvaluationData
from lightning_megatron.models.token_module import TokenModule
from tests.evaluation.oracle import STRIDE, WINDOW


class Words(list):
    """Rows of given tokens with a length that no layout divides."""

    window: int


class GivenWords(EvaluationData):
    """Rows of tokens and labels that a test has drawn."""

    needs_hits = True
    batch_size = 2

    def __init__(self, tokens: Tensor, labels: Tensor) -> None:
        super().__init__("bytes")
        self.given = Words(
            {"tokens": row, "labels": label} for row, label in zip(tokens, labels, strict=True)
        )
        self.given.window = tokens.shape[1]

    def read(self) -> Words:
        return self.given

    def sizes(self) -> dict[str, int]:
        return {}

    def metrics(self) -> dict[str, Metric]:
        return {"accuracy": ClozeAccuracy(), "perplexity": WordPerplexity(len(self.given))}


def evaluate(
    source: TokenModule, folder: Path, tokens: Tensor, labels: Tensor, **options: Any
) -> list[dict[str, float]]:
    """Return the results of all tasks."""
    quiet: Any = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(accelerator="cpu", precision="64-true", **quiet, **options)
    tokenizer = str(folder)
    tasks = (
        WikiTextData(str(folder / "wiki.test.tokens"), tokenizer, WINDOW, STRIDE, batch_size=3),
        LambadaData(str(folder / "lambada.jsonl"), tokenizer, batch_size=2),
        GivenWords(tokens, labels),
    )
    results = []
    for data in tasks:
        trainer.test(EvaluatedLM(source), data, verbose=False)
        results.append({name: float(value) for name, value in trainer.callback_metrics.items()})
    return results


def evaluate_layouts(
    rank: int, size: int, folder: Path, tokens: Tensor, labels: Tensor, layouts: dict[str, Any]
) -> dict[str, Any]:
    """Return the results under several layouts of this world, by layout."""
    return {
        name: evaluate(
            HuggingFaceCausalLM(str(folder)),
            folder,
            tokens,
            labels,
            strategy=MegatronStrategy(**sizes),
            devices=size,
        )
        for name, sizes in layouts.items()
    }
