"""Modules and data of the tasks, and the same training of transformers' models in a plain loop."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.tasks.finetuning import (
    BERTClassifier,
    BERTMultipleChoice,
    BERTQuestionAnswering,
    GlueDataModule,
    RaceDataModule,
    SquadDataModule,
)
from tests.fits import Report

STEPS, BATCH, LENGTH = 4, 8, 16
RATE, DECAY = 0.01, 0.01


def module_of(kind: str, folder: str) -> Any:
    """Return the module of a kind of task: ``classes``, ``options`` or ``spans``."""
    options: dict[str, Any] = {
        "learning_rate": RATE, "schedule": "linear", "min_lr_ratio": 0.0, "max_steps": STEPS + 1,
        "weight_decay": DECAY, "betas": (0.9, 0.999), "warmup_share": 0.4,
    }  # fmt: skip
    model = os.path.join(folder, kind)
    if kind == "classes":
        return BERTClassifier(model, 3, **options)
    return (BERTMultipleChoice if kind == "options" else BERTQuestionAnswering)(model, **options)


def data_of(kind: str, folder: str, **changes: Any) -> Any:
    """Return the data of a kind of task, from the files of a test's folder."""
    data: dict[str, Any] = {
        "folder": os.path.join(folder, f"{kind}_files"), "tokenizer": os.path.join(folder, kind),
        "seq_length": LENGTH, "global_batch_size": BATCH, "seed": 7, **changes,
    }  # fmt: skip
    if kind == "classes":
        return GlueDataModule("mnli", **data)
    if kind == "options":
        return RaceDataModule(**data, question_length=9)
    short = {"doc_stride": 2, "question_length": 5, "num_best": 4, "answer_length": 3}
    return SquadDataModule("2.0", **data, **short)


def transformers_model(kind: str, folder: str) -> Any:
    """Return transformers' model of a folder in float64."""
    import transformers

    names = {
        "classes": "AutoModelForSequenceClassification",
        "options": "AutoModelForMultipleChoice",
        "spans": "AutoModelForQuestionAnswering",
    }
    auto = getattr(transformers, names[kind])
    return auto.from_pretrained(Path(folder, kind), attn_implementation="eager").double().eval()


def loss_of(kind: str, model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the loss that transformers computes, and its scores."""
    labels, is_span = batch["labels"], kind == "spans"
    spans = {"start_positions": labels[..., 0], "end_positions": labels[..., -1]}
    result = model(
        input_ids=batch["tokens"], attention_mask=batch["valid"].long(),
        token_type_ids=batch["token_types"], **(spans if is_span else {"labels": labels}),
    )  # fmt: skip
    if is_span:
        return result.loss, torch.stack([result.start_logits, result.end_logits], -1)
    return result.loss, result.logits


def train_reference(
    kind: str, folder: str, sizes: Sequence[int] = (BATCH,) * STEPS
) -> tuple[Report, dict[str, Tensor]]:
    """Train transformers' model in a plain loop, with batches of some sizes.

    Returns:
        Losses, norms and results, and the trained weights.
    """
    model, data = transformers_model(kind, folder), data_of(kind, folder)
    data.setup("fit")
    groups = [
        {
            "params": [p for p in model.parameters() if (p.dim() > 1) == decays],
            "weight_decay": decay,
        }
        for decays, decay in ((True, DECAY), (False, 0.0))
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.999))
    report = Report()
    batches = data.loader_of(data.training_samples(sum(sizes)), None).batches
    for step, size in enumerate(sizes):
        start = sum(sizes[:step])
        loss, _ = loss_of(kind, model, batches[list(range(start, start + size))])
        for group in optimizer.param_groups:
            group["lr"] = RATE * ((step + 1) / 3 if step < 2 else (STEPS + 1 - step) / 3)
        model.zero_grad()
        loss.backward()
        report.norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        report.losses.append(float(loss.detach()))
    rows = data.encoded("val")
    with torch.no_grad():
        loss, scores = loss_of(kind, model, data.val_dataloader().batches[list(range(len(rows)))])
    results = data.scores("val").results(scores, torch.ones(len(scores), dtype=torch.bool))
    report.metrics = {f"val_{name}": value for name, value in results.items()}
    report.metrics["val_loss"] = float(loss)
    return report, {name: parameter.detach() for name, parameter in model.named_parameters()}
