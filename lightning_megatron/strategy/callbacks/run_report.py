"""Report of a fit in the folder of its logger: settings, losses, speed, lost time, checkpoints."""

from __future__ import annotations

import csv
import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lightning_megatron.errors import MissingExtraError
from lightning_megatron.extras import import_extra
from lightning_megatron.plan.settings import coerced_arguments
from lightning_megatron.strategy.callbacks.training_metrics import TrainingMetrics
from lightning_megatron.strategy.megatron_strategy import MegatronStrategy
from lightning_megatron.strategy.private.loops import callbacks_of

Curve = list[tuple[int, float]]


@dataclass(frozen=True)
class _Earlier:
    """Fits before this one, as a checkpoint knows them.

    Args:
        restarts: Number of continuations, or "not known" if the checkpoint has no report.
        seconds: Time of each part.
        saved_at: Time of the save since 1970; None once the training goes on (seconds).
    """

    restarts: int | str = 0
    seconds: dict[str, float] = field(default_factory=dict)
    saved_at: float | None = None

    def continued(self, checkpoint: Any) -> _Earlier:
        """Return what is known when the training goes on; ``checkpoint`` is None at its start."""
        if self.saved_at is None:
            return self if checkpoint is None else _Earlier("not known")
        lost = self.seconds.get("restarts", 0.0) + time.time() - self.saved_at
        restarts = self.restarts if isinstance(self.restarts, str) else self.restarts + 1
        return _Earlier(restarts, {**self.seconds, "restarts": lost})


class RunReport(Callback):
    """Write ``report.md``, ``report.json`` and a plot of the loss into the logger's folder.

    They are written after ``fit``: steps, first, last and best losses, what
    :class:`TrainingMetrics` measured at the last logged step, the time of the fit by training, wait
    for data, validation, saves and restarts, the checkpoints that were written and still exist,
    layout and settings. A report that cannot be written, such as on a full disk, is a warning: the
    result of the training stays. Without a :class:`TrainingMetrics` among the callbacks, speed,
    times and checkpoints are missing; without a ``CSVLogger``, the losses; without matplotlib, the
    plot.

    A fit that continues from a checkpoint adds the times up to that checkpoint. What follows until
    the training goes on is lost to the restart: steps that are trained again, the time without a
    job, and the start, which a checkpoint does not tell apart.

    Args:
        train: Name under which the training loss is logged.
        val: Name under which the validation loss is logged.
        filename: Name of the plot in the folder of the logger.
        unit: Unit of the loss in the label of the vertical axis.
    """

    def __init__(
        self,
        train: str = "train_loss",
        val: str = "val_loss",
        filename: str = "loss.png",
        unit: str = "nats per token",
    ) -> None:
        arguments = coerced_arguments(RunReport.__init__, locals())
        self.train: str = arguments["train"]
        self.val: str = arguments["val"]
        self.filename: str = arguments["filename"]
        self.unit: str = arguments["unit"]
        self._first_step = 0
        self._metrics: TrainingMetrics | None = None
        self._earlier = _Earlier()

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._metrics = None
        self._earlier = _Earlier()

    @override
    def state_dict(self) -> dict[str, Any]:
        return asdict(_Earlier(self._earlier.restarts, self._seconds(), time.time()))

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._earlier = _Earlier(**state_dict)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._first_step = trainer.global_step
        self._metrics = next(iter(callbacks_of(trainer, TrainingMetrics)), None)
        self._earlier = self._earlier.continued(trainer.ckpt_path)

    def _seconds(self) -> dict[str, float]:
        """Return the time of each part, with that of earlier fits."""
        seconds = {**self._earlier.seconds}
        if self._metrics is not None:
            for part, own in self._metrics.clock.totals.items():
                seconds[part] = seconds.get(part, 0.0) + own
        return seconds

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        folder = next((one.log_dir for one in trainer.loggers if one.log_dir is not None), None)
        if folder is None:
            rank_zero_info("No report of the fit: no logger has a folder.")
            return
        try:
            self._write(trainer, Path(folder))
        except OSError as error:
            rank_zero_warn(
                f"The report of the fit could not be written to {folder}: {error}. The training "
                "and its checkpoints are complete."
            )

    def _write(self, trainer: Trainer, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        curves = self._curves(trainer)
        if curves:
            try:
                draw_curves(curves, folder / self.filename, self.unit)
            except MissingExtraError as error:
                rank_zero_info(f"No loss curve: {error}")
        report = self._contents(trainer, curves)
        (folder / "report.json").write_text(json.dumps(report, indent=1, default=str) + "\n")
        picture = self.filename if (folder / self.filename).is_file() else None
        (folder / "report.md").write_text(as_markdown(report, picture))
        rank_zero_info(f"Report of the fit: {folder / 'report.md'}")

    def _curves(self, trainer: Trainer) -> dict[str, Curve]:
        """Return the losses that a ``CSVLogger`` has written, by name."""
        logger = next((one for one in trainer.loggers if isinstance(one, CSVLogger)), None)
        if logger is None:
            rank_zero_info(
                "No loss curve: it is drawn from metrics.csv, and this Trainer has no CSVLogger."
            )
            return {}
        logger.save()
        metrics = Path(logger.log_dir) / logger.experiment.NAME_METRICS_FILE
        if not metrics.is_file():
            return {}
        curves = {name: read_curve(metrics, name) for name in (self.train, self.val)}
        return {name: curve for name, curve in curves.items() if curve}

    def _contents(self, trainer: Trainer, curves: dict[str, Curve]) -> dict[str, Any]:
        report: dict[str, Any] = {
            "steps": {
                "first": self._first_step,
                "last": trainer.global_step,
                "epochs": trainer.current_epoch,
                "restarts": self._earlier.restarts,
            }
        }
        report["losses"] = {
            name: {"first": curve[0][1], "last": curve[-1][1], "lowest": min(curve, key=_value)[1]}
            for name, curve in curves.items()
        }
        if self._metrics is not None:
            report["last logged step"] = self._metrics.values
            report["seconds"] = self._seconds()
            # Remote storage is not asked.
            report["checkpoints"] = [
                path for path in self._metrics.saved if "://" in path or Path(path).exists()
            ]
        if isinstance(trainer.strategy, MegatronStrategy):
            layout = asdict(trainer.strategy.layout)
            settings = trainer.strategy.configuration().items()
            report["layout"] = layout
            report["settings"] = {name: value for name, value in settings if name not in layout}
        return report


def _value(point: tuple[int, float]) -> float:
    return point[1]


def as_markdown(report: dict[str, Any], picture: str | None) -> str:
    """Return a report as a page of Markdown.

    Args:
        report: Sections by title: mappings become tables, lists become lists.
        picture: Name of the plot beside the page; None without one.
    """
    lines = ["# Report of a fit", ""]
    if picture is not None:
        lines += [f"![Losses]({picture})", ""]
    total = sum(report.get("seconds", {}).values())
    for title, section in report.items():
        lines += [f"## {title.capitalize()}", ""]
        if isinstance(section, list):
            lines += [f"- `{item}`" for item in section]
        else:
            lines += ["| | |", "|---|---|"]
            for name, value in section.items():
                if str(value) == "None":
                    continue
                text = _text(value)
                if title == "seconds" and total:
                    text += f" ({value / total:.1%})"
                lines.append(f"| {name} | {text} |")
        lines.append("")
    return "\n".join(lines)


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(one)}" for name, one in value.items())
    text = f"{value:.5g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|")


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
