"""Figure 7 of the Megatron-LM paper, small: the same deep BERT with both orders of norms.

Trains the model on the corpus "speeches" with norms after the residual sums (a, the original BERT)
and before attention and MLP (b), from the same seed and data, and draws both losses:

    python -m benchmarks.norm_positions --picture docs/bert_norms.png
"""

from __future__ import annotations

import argparse
import csv
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from lightning_megatron import BERTDataModule, BERTPretraining, EncoderConfig, MegatronStrategy

ORDERS = {"post": "(a) norms after residual sums", "pre": "(b) norms before attention and MLP"}


class Losses(Callback):
    """Record the loss of every step."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.values.append(float(trainer.callback_metrics["train_loss"]))
        if len(self.values) % 20 == 0:
            print(f"step {len(self.values)}: {sum(self.values[-20:]) / 20:.3f} nats", flush=True)


def train(order: str, given: argparse.Namespace) -> list[float]:
    """Return the training losses of one order of norms."""
    pl.seed_everything(given.seed, verbose=False)
    config = EncoderConfig.bert(
        norm_position=order,
        vocab_size=4096,
        num_positions=given.seq_length,
        num_layers=given.layers,
        hidden_size=given.hidden,
        num_heads=4,
        hidden_dropout=given.dropout,
        attention_dropout=given.dropout,
    )
    module = BERTPretraining(
        config,
        learning_rate=given.learning_rate,
        warmup_steps=given.warmup,
        max_steps=given.steps,
        schedule="linear",
        min_lr_ratio=0.0,
        weight_decay=0.01,
        betas=(0.9, 0.999),
    )
    data = BERTDataModule(
        corpus="speeches",
        tokenizer="speeches-wordpiece",
        seq_length=given.seq_length,
        batch_size=given.batch,
        data_dir=given.data_dir,
    )
    losses = Losses()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=MegatronStrategy(),
        max_steps=given.steps,
        gradient_clip_val=1.0,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[losses],
    )
    trainer.fit(module, data)
    return losses.values


def smoothed(values: list[float], span: int) -> list[float]:
    """Return the means of each value and those before it."""
    starts = [max(0, at - span + 1) for at in range(len(values))]
    return [sum(values[start : at + 1]) / (at + 1 - start) for at, start in enumerate(starts)]


def draw(curves: dict[str, list[float]], title: str, path: Path) -> None:
    """Draw the losses of both orders."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for order, values in curves.items():
        axes.plot(smoothed(values, 20), label=ORDERS[order])
    axes.set(xlabel="step", ylabel="training loss (nats, mean of 20 steps)", title=title)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Train both orders, write their losses and draw them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--seq-length", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--warmup", type=int, default=20)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--data-dir", default="runs/data")
    parser.add_argument("--losses", type=Path, default=Path("norm_positions.csv"))
    parser.add_argument("--picture", type=Path, default=Path("norm_positions.png"))
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    curves = {order: train(order, given) for order in ORDERS}
    with given.losses.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", *curves])
        writer.writerows(zip(range(given.steps), *curves.values(), strict=True))
    title = f"{given.layers} layers of {given.hidden}, learning rate {given.learning_rate:g}"
    draw(curves, title, given.picture)
    for order, values in curves.items():
        print(f"{ORDERS[order]}: last 20 steps {sum(values[-20:]) / 20:.3f} nats")


if __name__ == "__main__":
    main()
