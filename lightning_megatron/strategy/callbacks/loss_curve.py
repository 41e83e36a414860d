"""Plot of the loss from the metrics of ``CSVLogger``, saved next to them."""

from __future__ import annotations

import csv
from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_megatron.errors import MissingExtraError
from lightning_megatron.extras import import_extra
from lightning_megatron.plan.settings import coerced_arguments

Curve = list[tuple[int, float]]


class LossCurve(Callback):
    """Plot training and validation loss into the ``CSVLogger``'s folder after ``fit``.

    The callback prints a message and saves no plot if the Trainer has no ``CSVLogger`` or
    matplotlib is not installed.

    Args:
        train: Name under which the training loss is logged.
        val: Name under which the validation loss is logged.
        filename: Name of the plot in the folder of ``metrics.csv``.
        unit: Unit of the loss in the label of the vertical axis.
    """

    def __init__(
        self,
        train: str = "train_loss",
        val: str = "val_loss",
        filename: str = "loss.png",
        unit: str = "nats per token",
    ) -> None:
        arguments = coerced_arguments(LossCurve.__init__, locals())
        self.train: str = arguments["train"]
        self.val: str = arguments["val"]
        self.filename: str = arguments["filename"]
        self.unit: str = arguments["unit"]

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        logger = next((logger for logger in trainer.loggers if isinstance(logger, CSVLogger)), None)
        if logger is None:
            rank_zero_info(
                "No loss curve: it is drawn from metrics.csv, and this Trainer has no CSVLogger."
            )
            return
        logger.save()
        folder = Path(logger.log_dir)
        metrics = folder / logger.experiment.NAME_METRICS_FILE
        curves = (
            {name: read_curve(metrics, name) for name in (self.train, self.val)}
            if metrics.is_file()
            else {}
        )
        try:
            draw_curves(
                {name: curve for name, curve in curves.items() if curve},
                folder / self.filename,
                self.unit,
            )
        except MissingExtraError as error:
            rank_zero_info(f"No loss curve: {error}")
        else:
            rank_zero_info(f"Loss curve: {folder / self.filename}")


def read_curve(metrics: Path, name: str) -> Curve:
    """Read the (step, value) pairs of one metric, logged by step, by epoch or by both.

    Args:
        metrics: Path of the ``metrics.csv`` that Lightning's ``CSVLogger`` writes.
        name: Name of the metric in ``self.log``.

    Returns:
        The pairs, sorted by step.
    """
    curve = []
    with metrics.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            value = row.get(name) or row.get(f"{name}_step")
            if value:
                curve.append((int(row["step"]), float(value)))
    return sorted(curve)


def draw_curves(curves: dict[str, Curve], picture: Path, unit: str) -> None:
    """Plot curves over the optimizer steps, each labelled with its last value.

    Args:
        curves: The (step, value) pairs of each curve, by the name that labels it.
        picture: Path of the plot; the file extension selects the format.
        unit: Unit of the values in the label of the vertical axis.

    Raises:
        MissingExtraError: If matplotlib is not installed.
    """
    figure = import_extra("matplotlib.figure", "plot").Figure(
        figsize=(7, 4.2), layout="constrained"
    )
    axes = figure.subplots()
    for name, curve in curves.items():
        steps, values = zip(*curve, strict=True)
        few = len(curve) <= 40
        axes.plot(
            steps,
            values,
            label=f"{name} (last {values[-1]:.3f})",
            linewidth=1.5,
            marker="o" if few else None,
        )
    axes.set_xlabel("optimizer step")
    axes.set_ylabel(f"loss ({unit})")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    if curves:
        axes.legend(frameon=False)
    figure.savefig(picture, dpi=150)
