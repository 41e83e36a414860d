"""Losses of GPT-2 small on the speeches in bfloat16 and with products in 8 bits.

    python -m benchmarks.fp8_losses --out FOLDER
    python -m benchmarks.fp8_losses --out FOLDER --train PREFIX --val PREFIX --recipes bf16 rowwise
    torchrun --nproc-per-node 4 -m benchmarks.fp8_losses --out FOLDER \\
        --strategy '{"tp": 2, "pp": 2, "microbatch_size": 2, "cuda_graphs": "segments"}'

Every recipe trains the same model on the same samples, one after the other and without dropout, on
one GPU or under the layout of ``--strategy``. FOLDER gets a JSON file for each recipe and a picture
of the held-out losses.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from benchmarks.measure import QUIET, heading, option_parser
from lightning_megatron import CausalLM, GPTConfig, MegatronStrategy, TokenDataModule

PLAIN = "bf16"
RECIPES = (PLAIN, "tensorwise", "delayed", "rowwise", "blockwise")
SMALL = {
    "vocab_size": 50257,
    "num_layers": 12,
    "hidden_size": 768,
    "num_heads": 12,
    "max_seq_length": 1024,
}
#: Number of equal parts of a training for which the table prints mean losses.
NUM_PARTS = 8


@dataclass(frozen=True)
class Losses:
    """Losses of one training."""

    recipe: str
    train: list[float]
    held_out: list[tuple[int, float]]


class Recorder(L.Callback):
    """Record the losses of a training."""

    def __init__(self, recipe: str, path: Path | None = None) -> None:
        self.recipe = recipe
        self.path = path
        self.train: list[Tensor] = []
        self.held_out: list[tuple[int, float]] = []

    @property
    def losses(self) -> Losses:
        """Return the losses so far."""
        train = torch.stack(self.train).float().tolist()
        return Losses(self.recipe, train, list(self.held_out))

    def on_train_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, *batch_arguments: Any
    ) -> None:
        """Record the loss of a step, on the device."""
        self.train.append(trainer.callback_metrics["train_loss"].detach().clone())

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Record the held-out loss."""
        if not trainer.sanity_checking:
            loss = float(trainer.callback_metrics["val_loss"])
            self.held_out.append((trainer.global_step, loss))
            if self.path is not None and trainer.is_global_zero:
                self.path.write_text(json.dumps(asdict(self.losses)))


def train(
    recipe: str,
    steps: int,
    data: TokenDataModule,
    sizes: Mapping[str, Any],
    options: Mapping[str, Any],
    layout: Mapping[str, Any] | None = None,
    path: Path | None = None,
) -> Losses:
    """Train with one recipe.

    Args:
        recipe: Recipe, or ``"bf16"``.
        steps: Number of steps.
        data: Samples, in batches of eight.
        sizes: Fields of the model's configuration.
        options: Further arguments of the Trainer.
        layout: Arguments of the strategy; None means one GPU and one microbatch.
        path: File that gets the losses so far after each validation; None writes no file.
    """
    L.seed_everything(1234)
    recorder = Recorder(recipe, path)
    fp8: dict[str, Any] = {} if recipe == PLAIN else {"fp8": recipe}
    layout = {"microbatch_size": 8, **(layout or {})}
    config = GPTConfig(hidden_dropout=0.0, attention_dropout=0.0, **sizes)
    trainer = L.Trainer(
        devices=layout.get("tp", 1) * layout.get("pp", 1),
        precision="bf16-mixed",
        strategy=MegatronStrategy(**layout, **fp8),
        max_steps=steps,
        val_check_interval=max(steps // NUM_PARTS, 1),
        check_val_every_n_epoch=None,
        limit_val_batches=24,
        gradient_clip_val=1.0,
        callbacks=[recorder],
        **QUIET,
        **options,
    )
    model = CausalLM(config, learning_rate=6e-4, warmup_steps=100, max_steps=steps)
    trainer.fit(model, data)
    return recorder.losses


def table(results: Sequence[Losses]) -> list[str]:
    """Return a table of held-out and mean training losses, compared with the first recipe."""
    lines = heading(
        "recipe", "steps", "held-out loss", "of the first", "training loss", "of the first"
    )
    first = _parts(results[0])
    for losses in results:
        for (steps, held_out, loss), (_, first_held_out, first_loss) in zip(
            _parts(losses), first, strict=True
        ):
            lines.append(
                f"| {losses.recipe} | {steps} | {held_out:.4f} "
                f"| {held_out / first_held_out - 1:+.2%} "
                f"| {loss:.4f} | {loss / first_loss - 1:+.2%} |"
            )
    return lines


def _parts(losses: Losses) -> list[tuple[int, float, float]]:
    """Return the number of steps, the held-out loss and the mean training loss of each part."""
    ends = [0, *(steps for steps, _ in losses.held_out)]
    return [
        (steps, held_out, mean(losses.train[begin:steps]))
        for begin, (steps, held_out) in zip(ends, losses.held_out, strict=False)
    ]


def draw(results: Sequence[Losses], path: Path) -> None:
    """Draw the held-out losses over the steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for losses in results:
        axes.plot(
            *zip(*losses.held_out, strict=True), marker="o", markersize=3, label=losses.recipe
        )
    axes.set(xlabel="step", ylabel="held-out loss (nats per token)")
    axes.legend()
    figure.savefig(path, dpi=120)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train with each recipe, and print and draw the losses."""
    parser = option_parser(__doc__)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder of the results")
    add("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    add("--steps", type=int, default=2000)
    add("--train", help="prefix of a token file (default: the bundled corpus)")
    add("--val", help="prefix of a token file of held-out text")
    add("--strategy", type=json.loads, default={}, help="arguments of the strategy, as JSON")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    results = []
    for recipe in options.recipes:
        length = SMALL["max_seq_length"]
        bundled = {"corpus": "speeches", "tokenizer": "gpt2", "data_dir": str(options.out / "data")}
        files = {
            "train": options.train,
            "val": options.val,
            "cache_dir": str(options.out / "cache"),
        }
        sources: dict[str, Any] = files if options.train else bundled
        data = TokenDataModule(seq_length=length, batch_size=8, **sources)
        trainer_options = {"accelerator": "gpu"}
        path = options.out / f"{recipe}.json"
        results.append(
            train(recipe, options.steps, data, SMALL, trainer_options, options.strategy, path)
        )
    if getattr(rank_zero_only, "rank", 0) == 0:
        print("\n".join(table(results)), flush=True)
        draw(results, options.out / "fp8_losses.png")


if __name__ == "__main__":
    main()
