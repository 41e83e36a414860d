"""Fits of the modules under layouts, and the same training of transformers' models in a plain loop."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from lightning_megatron import (
    BERTClassifier,
    BERTMultipleChoice,
    BERTQuestionAnswering,
    GlueDataModule,
    MegatronStrategy,
    RaceDataModule,
    SquadDataModule,
)
from lightning_megatron.checkpoint.open_checkpoint import OpenCheckpoint
from tests.fit_report import Record, Report

STEPS, BATCH, LENGTH = 4, 8, 16
RATE, DECAY = 0.01, 0.01
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2, "sequence_parallel": False},
    "tp2 +sp": {"tp": 2, "sequence_parallel": True},
    "dp2": {},
    "pp2": {"pp": 2},
    "pp2 recomputed": {"pp": 2, "recompute": "full", "microbatch_size": 4},
}


def module_and_data(kind: str, folder: str, **batches: Any) -> tuple[Any, Any]:
    """Return the module and the data of a kind of task, from the files of a test's folder.

    Args:
        kind: Kind of the task.
        folder: Folder of the test.
        batches: Arguments of the data module that replace its defaults.
    """
    model = os.path.join(folder, kind)
    options: dict[str, Any] = {
        "learning_rate": RATE, "schedule": "linear", "min_lr_ratio": 0.0, "max_steps": STEPS + 1,
        "weight_decay": DECAY, "betas": (0.9, 0.999), "warmup_share": 0.4,
    }  # fmt: skip
    data: dict[str, Any] = {
        "folder": os.path.join(folder, f"{kind}_files"), "tokenizer": model, "seq_length": LENGTH,
        "global_batch_size": BATCH, "seed": 7, **batches,
    }  # fmt: skip
    if kind == "classes":
        return BERTClassifier(model, 3, **options), GlueDataModule("mnli", **data)
    if kind == "options":
        return BERTMultipleChoice(model, **options), RaceDataModule(**data, question_length=9)
    short = {"doc_stride": 2, "question_length": 5, "num_best": 4, "answer_length": 3}
    return BERTQuestionAnswering(model, **options), SquadDataModule("2.0", **data, **short)


def trainer_of(layout: dict[str, Any], size: int, **options: Any) -> pl.Trainer:
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")
    warnings.filterwarnings("ignore", message="Rows of .*")
    defaults = {
        "accelerator": "cpu", "devices": size, "precision": "64-true", "max_steps": STEPS,
        "strategy": MegatronStrategy(**{"microbatch_size": 2, **layout}), "logger": False,
        "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
        "gradient_clip_val": 1.0, "num_sanity_val_steps": 0,
    }  # fmt: skip
    return pl.Trainer(**(defaults | options))


def train(kind: str, layout: dict[str, Any], size: int, folder: str, name: str) -> Report:
    pl.seed_everything(1234, verbose=False)
    record = Record()
    trainer = trainer_of(layout, size, callbacks=[record], limit_val_batches=0)
    module, data = module_and_data(kind, folder)
    trainer.fit(module, datamodule=data)
    checkpoint = os.path.join(folder, f"{kind} {name}")
    trainer.save_checkpoint(checkpoint)
    trainer.strategy.barrier()
    validator = trainer_of(layout, size)
    [validated] = validator.validate(module, datamodule=data, verbose=False)
    record.report.results = dict(validated)
    saved = OpenCheckpoint.open(checkpoint)
    names = [key for key in saved.tensors if key.startswith("state_dict.")]
    record.report.weights = {
        key.removeprefix("state_dict.model."): tensor
        for key, tensor in saved.read_full(names).items()
    }
    return record.report


def layouts_of(kind: str) -> dict[str, dict[str, Any]]:
    """Return the layouts of a kind; heads differ only where sequence or batch are divided."""
    names = LAYOUTS if kind == "classes" else ("tp2 +sp", "dp2", "pp2")
    return {name: LAYOUTS[name] for name in names}


def train_all(rank: int, size: int, folder: str, kind: str) -> dict[str, Report]:
    return {
        name: train(kind, layout, size, folder, name) for name, layout in layouts_of(kind).items()
    }


def transformers_model(kind: str, folder: str) -> Any:
    """Return transformers' model of a folder in float64."""
    import transformers

    names = {
        "classes": "AutoModelForSequenceClassification",
        "options": "AutoModelForMultipleChoice",
        "spans": "AutoModelForQuestionAnswering",
    }
    model = getattr(transformers, names[kind]).from_pretrained(
        Path(folder, kind), attn_implementation="eager"
    )
    return model.double().eval()


def loss_of(kind: str, model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the loss that transformers computes, and its scores."""
    labels = batch["labels"]
    targets = (
        {"start_positions": labels[:, 0], "end_positions": labels[:, 1]}
        if kind == "spans"
        else {"labels": labels}
    )
    result = model(
        input_ids=batch["tokens"], attention_mask=batch["valid"].long(),
        token_type_ids=batch["token_types"], **targets,
    )  # fmt: skip
    scores = (
        torch.stack([result.start_logits, result.end_logits], -1)
        if kind == "spans"
        else result.logits
    )
    return result.loss, scores


def train_reference(
    kind: str, folder: str, sizes: Sequence[int] = (BATCH,) * STEPS
) -> tuple[Report, Tensor]:
    """Train transformers' model in a plain loop; return also its scores of the validation rows.

    Args:
        kind: Kind of the task.
        folder: Folder of the test.
        sizes: Rows of the batch of each step.
    """
    model = transformers_model(kind, folder)
    _, data = module_and_data(kind, folder)
    data.setup("fit")
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    not_decayed = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": DECAY}, {"params": not_decayed, "weight_decay": 0.0}],
        lr=RATE, betas=(0.9, 0.999),
    )  # fmt: skip
    report = Report()
    samples = data.training_samples(sum(sizes))
    batches = data.loader_of(samples, None).batches
    for step, size in enumerate(sizes):
        start = sum(sizes[:step])
        batch = batches[list(range(start, start + size))]
        rate = RATE * ((step + 1) / 3 if step < 2 else (STEPS + 1 - step) / (STEPS + 1 - 2))
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss, _ = loss_of(kind, model, batch)
        model.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        report.losses.append(float(loss.detach()))
        report.norms.append(float(norm.detach()))
    rows = data.encoded("val")
    val_batch = data.val_dataloader().batches[list(range(len(rows)))]
    with torch.no_grad():
        loss, scores = loss_of(kind, model, val_batch)
    report.results = {"val_loss": float(loss)}
    report.weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return report, scores
