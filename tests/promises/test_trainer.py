"""README: Lightning's training loop, callbacks and loggers work under every layout as in one process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor

from tests.fits import GPT2, Job, Language, Report, Tokens, run_job, run_jobs_on

#: Layouts of two processes, beside Lightning's own strategy.
LAYOUTS: dict[str, Any] = {"ddp": "ddp", "dp2": {}, "tp2": {"tp": 2}, "pp2": {"pp": 2}}


class Logs(Language):
    """Log in every way, and record what callbacks and hooks see."""

    def __init__(self, schedule: str = "step") -> None:
        super().__init__(GPT2)
        self.schedule = schedule
        self.calls: Counter[str] = Counter()
        self.validations: list[int] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        size = float(len(batch["tokens"]))
        self.log("samples", size, on_epoch=True, on_step=False, reduce_fx="sum", sync_dist=True)
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.calls["optimizer step"] += 1

    def on_after_backward(self) -> None:
        self.calls["backward pass"] += 1

    def on_train_epoch_end(self) -> None:
        self.calls["epoch"] += 1

    def on_validation_end(self) -> None:
        self.validations.append(self.trainer.global_step)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3)
        if self.schedule == "plateau":
            schedule: Any = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
            return [optimizer], [{"scheduler": schedule, "monitor": "val_loss"}]
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
        return [optimizer], [{"scheduler": schedule, "interval": self.schedule}]

    def on_fit_end(self) -> None:
        trainer = self.trainer
        self.outcomes = {
            "steps": trainer.global_step,
            "epoch": trainer.current_epoch,
            "rate": trainer.optimizers[0].param_groups[0]["lr"],
            "validations": self.validations,
            "calls": dict(self.calls),
        }
        for callback in trainer.callbacks:
            if isinstance(callback, EarlyStopping):
                self.outcomes["stopped"] = callback.stopped_epoch
            if isinstance(callback, ModelCheckpoint):
                self.outcomes["best"] = float(callback.best_model_score)
                self.outcomes["files"] = sorted(path.name for path in _folder(callback).iterdir())
        if isinstance(trainer.logger, CSVLogger):
            trainer.logger.save()
            written = Path(trainer.logger.log_dir) / "metrics.csv"
            self.outcomes["rows"] = written.read_text().count("\n") if written.exists() else 0


def _folder(callback: ModelCheckpoint) -> Path:
    return Path(str(callback.dirpath))


def stopping(folder: Path) -> Sequence[Callback]:
    """Stop when the loss falls slowly, and keep the two best checkpoints."""
    saver = ModelCheckpoint(
        folder, "{step}-{val_loss:.6f}", monitor="val_loss", save_top_k=2, save_last=True
    )
    return [saver, EarlyStopping("val_loss", patience=0, min_delta=0.4)]


#: Options of the Trainer by feature, and the schedule of the learning rate.
FEATURES: dict[str, tuple[dict[str, Any], str]] = {
    "limits": ({"limit_train_batches": 2, "limit_val_batches": 1, "max_epochs": 2}, "epoch"),
    "validation within epochs": ({"val_check_interval": 2, "num_sanity_val_steps": 0}, "step"),
    "accumulated batches": ({"accumulate_grad_batches": 2, "max_epochs": 2}, "step"),
    "values of gradients clipped": (
        {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"},
        "plateau",
    ),
    "early stopping and best checkpoints": (
        {"enable_checkpointing": True, "max_epochs": 6, "log_every_n_steps": 1},
        "step",
    ),
}


def job_of(feature: str, layout: Any, folder: Path) -> Job:
    options, schedule = FEATURES[feature]
    own = folder / f"{feature} {layout}"
    stops = "early" in feature
    trainer = {"max_epochs": 1, **options}
    if stops:
        trainer["logger"] = partial(CSVLogger, own, name="", version="")
    callbacks: Callable[[], Sequence[Callback]] = (
        partial(stopping, own / "best") if stops else tuple
    )
    return Job(
        partial(Logs, schedule),
        layout,
        steps=-1,
        trainer=trainer,
        data=partial(Tokens, 24),
        validation=partial(Tokens, 16),
        callbacks=callbacks,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fits")


@pytest.fixture(scope="module")
def reports(folder: Path) -> dict[tuple[str, str], list[Report]]:
    jobs = {
        (feature, name): job_of(feature, layout, folder)
        for feature in FEATURES
        for name, layout in LAYOUTS.items()
    }
    return run_jobs_on(2, jobs)


@pytest.mark.parametrize("feature", FEATURES)
def test_a_feature_of_the_trainer_gives_the_results_of_one_process(feature, reports, folder):
    twin = run_job(job_of(feature, None, folder))
    rows = twin.outcomes.pop("rows", None)
    for name in LAYOUTS:
        first, *others = reports[feature, name]
        if rows is not None:
            assert first.outcomes.pop("rows") == rows, "rank 0 writes the log"
        for report in (first, *others):
            report.outcomes.pop("rows", None)
            torch.testing.assert_close(report.losses, twin.losses, rtol=0.0, atol=1e-10)
            torch.testing.assert_close(report.metrics, twin.metrics, rtol=0.0, atol=1e-9)
            torch.testing.assert_close(_numbers(report), _numbers(twin), rtol=0.0, atol=1e-9)
            assert _texts(report) == _texts(twin), name


def _numbers(report: Report) -> dict[str, Any]:
    return {name: value for name, value in report.outcomes.items() if name != "files"}


def _texts(report: Report) -> Any:
    return report.outcomes.get("files")
