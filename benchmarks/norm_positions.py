"""Figure 7 of the Megatron-LM paper on a small scale: a deep BERT with both orders of norms.

The program trains the model on the corpus "speeches" with norms after the residual sums (a, the
original BERT) and before attention and MLP (b), with the same seed and data, and draws both losses:

    python -m benchmarks.norm_positions --picture docs/bert_norms.png

Sizes and number of steps have defaults from ``PRESETS``: for a GPU if there is one, else for CPUs.
``--learning-rate`` accepts several values, and the program trains both orders with each.
``--devices`` divides the batch among GPUs or CPU processes. ``--orders`` selects one of the orders,
and ``--draw`` only draws the losses of such runs together:

    python -m benchmarks.norm_positions --orders post --losses post.json
    python -m benchmarks.norm_positions --orders pre --losses pre.json
    python -m benchmarks.norm_positions --draw post.json pre.json --picture docs/bert_norms.png
"""

from __future__ import annotations

import argparse
import json
import math
import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lightning_megatron import BERTDataModule, BERTPretraining, EncoderConfig, MegatronStrategy
from lightning_megatron.errors import NonFiniteError

ORDERS = {"post": "(a) norms after residual sums", "pre": "(b) norms before attention and MLP"}
#: Defaults of options, by kind of machine.
PRESETS: dict[str, dict[str, Any]] = {
    "cpu": {
        "layers": 24, "hidden": 64, "heads": 4, "seq_length": 64, "batch": 8, "steps": 300,
        "warmup": 20, "learning_rate": [2e-3], "precision": "32-true", "workers": 0,
        "init_std": 0.02, "scaled_init": True,
    },
    "gpu": {
        "layers": 24, "hidden": 256, "heads": 4, "seq_length": 128, "batch": 128, "steps": 2500,
        "warmup": 100, "learning_rate": [1e-3], "precision": "bf16-mixed", "workers": 8,
        # With this init_std, outputs of layers are as large as with 0.02 and hidden size 2,500.
        "init_std": 0.0625, "scaled_init": False,
    },
}  # fmt: skip
#: Steps over which losses are averaged.
SPAN = 20


class Curve(NamedTuple):
    """Losses of one training.

    Args:
        order: Name of the order of norms.
        learning_rate: Peak of the learning rate.
        losses: Loss of each step before the first one that is not finite (nats).
        seconds: Duration of the training (seconds).
    """

    order: str
    learning_rate: float
    losses: list[float]
    seconds: float


class Losses(Callback):
    """Record the loss of every step."""

    def __init__(self, every: int) -> None:
        self.every = every
        self._losses: list[Tensor] = []

    @property
    def values(self) -> list[float]:
        """Return the losses before the first one that is not finite (nats)."""
        losses = torch.stack(self._losses).tolist() if self._losses else []
        non_finite = [step for step, loss in enumerate(losses) if not math.isfinite(loss)]
        return losses[: non_finite[0]] if non_finite else losses

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        # Copy the loss on the device, so that the host does not wait.
        self._losses.append(trainer.callback_metrics["train_loss"].detach().clone())
        if len(self._losses) % self.every == 0 and trainer.is_global_zero:
            last = self.values[-self.every :]
            print(f"step {len(self._losses)}: {mean(last):.3f} nats", flush=True)


def train(order: str, learning_rate: float, options: argparse.Namespace) -> tuple[Curve, bool]:
    """Train one order of norms; return its losses, and whether this is the first rank."""
    pl.seed_everything(options.seed, verbose=False)
    config = EncoderConfig.bert(
        norm_position=order,
        vocab_size=4096,
        num_positions=options.seq_length,
        num_layers=options.layers,
        hidden_size=options.hidden,
        num_heads=options.heads,
        hidden_dropout=options.dropout,
        attention_dropout=options.dropout,
        init_std=options.init_std,
        scaled_init=options.scaled_init,
    )
    module = BERTPretraining(
        config,
        learning_rate=learning_rate,
        warmup_steps=options.warmup,
        max_steps=options.steps,
        schedule="linear",
        min_lr_ratio=0.0,
        weight_decay=0.01,
        betas=(0.9, 0.999),
    )
    data = BERTDataModule(
        corpus="speeches",
        tokenizer="speeches-wordpiece",
        seq_length=options.seq_length,
        global_batch_size=options.batch,
        num_workers=options.workers,
        data_dir=options.data_dir,
    )
    losses = Losses(options.every)
    trainer = pl.Trainer(
        accelerator=options.accelerator,
        devices=options.devices,
        precision=options.precision,
        strategy=MegatronStrategy(),
        max_steps=options.steps,
        gradient_clip_val=1.0,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[losses],
    )
    start = time.perf_counter()
    try:
        trainer.fit(module, data)
    except NonFiniteError as error:
        # The training has diverged, so its curve ends here.
        print(error, flush=True)
    values = losses.values
    return Curve(order, learning_rate, values, time.perf_counter() - start), trainer.is_global_zero


def mean(values: list[float]) -> float:
    """Return the mean of values; NaN without values."""
    return sum(values) / len(values) if values else math.nan


def smoothed(values: list[float], span: int) -> list[float]:
    """Return the mean of each value and up to ``span - 1`` values before it."""
    return [mean(values[max(0, index - span + 1) : index + 1]) for index in range(len(values))]


def draw(curves: list[Curve], title: str, path: Path) -> None:
    """Draw the losses of both orders, with another line style for each learning rate."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    rates = sorted({curve.learning_rate for curve in curves})
    for curve in curves:
        label = ORDERS[curve.order]
        if len(rates) > 1:
            label += f", rate {curve.learning_rate:g}"
        color = f"C{list(ORDERS).index(curve.order)}"
        style = ("-", "--", ":", "-.")[rates.index(curve.learning_rate) % 4]
        axes.plot(smoothed(curve.losses, SPAN), style, color=color, label=label)
    axes.set(xlabel="step", ylabel=f"training loss (nats, mean of {SPAN} steps)", title=title)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def arguments() -> argparse.Namespace:
    """Parse the options; options that are not given take the preset of the machine."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--accelerator", choices=sorted(PRESETS), help="default: gpu if there is one")
    add("--devices", type=int, default=1, help="data-parallel ranks")
    for name in ("layers", "hidden", "heads", "seq-length", "batch", "steps", "warmup"):
        add(f"--{name}", type=int)
    add("--learning-rate", type=float, nargs="+", help="peaks of the learning rate")
    add("--precision")
    add("--dropout", type=float, default=0.1)
    add("--init-std", type=float, help="standard deviation of initial weights")
    add("--scaled-init", action=argparse.BooleanOptionalAction)
    add("--workers", type=int, help="processes of a rank that prefetch batches")
    add("--seed", type=int, default=1234)
    add("--orders", nargs="+", choices=list(ORDERS), default=list(ORDERS))
    add("--draw", type=Path, nargs="+", metavar="FILE", help="files of --losses to draw together")
    add("--every", type=int, default=20, help="steps between two printed losses")
    add("--data-dir", default="runs/data")
    add("--losses", type=Path, default=Path("norm_positions.json"))
    add("--picture", type=Path, default=Path("norm_positions.png"))
    options = parser.parse_args()
    options.accelerator = options.accelerator or ("gpu" if torch.cuda.is_available() else "cpu")
    for name, value in PRESETS[options.accelerator].items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


def save(curves: list[Curve], options: argparse.Namespace) -> None:
    """Write the losses with the options of the training."""
    settings = {
        name: value
        for name, value in vars(options).items()
        if name not in ("draw", "losses", "picture")
    }
    content = {"settings": settings, "curves": [curve._asdict() for curve in curves]}
    options.losses.write_text(json.dumps(content))


def read(files: list[Path]) -> tuple[list[Curve], dict[str, Any]]:
    """Return the curves of all files, and the options of the first one."""
    contents = [json.loads(file.read_text()) for file in files]
    curves = [Curve(**curve) for content in contents for curve in content["curves"]]
    return curves, contents[0]["settings"]


def report(curves: list[Curve], layers: int, hidden: int, picture: Path) -> None:
    """Draw the curves, and print their last losses."""
    rates = sorted({curve.learning_rate for curve in curves})
    listed = ", ".join(f"{rate:g}" for rate in rates)
    draw(curves, f"{layers} layers of {hidden}, learning rate {listed}", picture)
    for curve in curves:
        last = curve.losses[-SPAN:]
        print(
            f"{ORDERS[curve.order]}, rate {curve.learning_rate:g}: {len(curve.losses)} steps in "
            f"{curve.seconds:.0f} s, last {len(last)} steps {mean(last):.3f} nats"
        )


def main() -> None:
    """Train the orders, write their losses and draw them; or draw losses of earlier runs."""
    options = arguments()
    if options.draw:
        curves, settings = read(options.draw)
        report(curves, settings["layers"], settings["hidden"], options.picture)
        return
    warnings.filterwarnings("ignore")
    curves = []
    for rate in options.learning_rate:
        for order in options.orders:
            curve, is_first = train(order, rate, options)
            curves.append(curve)
            if is_first:
                # Write the file after each training, so that an interruption loses no finished
                # training.
                save(curves, options)
    if is_first:
        report(curves, options.layers, options.hidden, options.picture)


if __name__ == "__main__":
    main()
