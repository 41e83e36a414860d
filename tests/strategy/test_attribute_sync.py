"""Hooks of every pipeline stage see the same state of the module as in one process."""

from __future__ import annotations

import warnings
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
)

from lightning_megatron import MegatronStrategy
from tests.strategy.tiny import VOCABULARY, TinyLM, Words
from tests.world import run_world

STAGES = ("train", "val", "test")


class Meter:
    """Average values as in many training scripts."""

    def __init__(self) -> None:
        self.sum, self.count = 0.0, 0

    def add(self, value: float, count: int) -> None:
        self.sum, self.count = self.sum + value * count, self.count + count


class KeepsState(TinyLM):
    """Keep values in every usual way in every kind of step, and log them when the epoch ends."""

    def __init__(self) -> None:
        super().__init__(num_layers=4)
        for stage in STAGES:
            both = MetricCollection([MulticlassAccuracy(VOCABULARY), MulticlassF1Score(VOCABULARY)])
            self.keep(stage, "acc", MulticlassAccuracy(VOCABULARY, average="micro"))
            self.keep(stage, "both", both)
            self.keep(stage, "confusion", MulticlassConfusionMatrix(VOCABULARY))
            self.keep(stage, "outputs", [])
            # In training, buffers are those of the first data rank, as under ddp.
            histogram = torch.zeros(VOCABULARY)
            if stage == "train":
                self.keep(stage, "histogram", histogram)
            else:
                self.register_buffer(f"{stage}_histogram", histogram)
            self.keep(stage, "array", np.zeros(VOCABULARY))
            self.forget(stage)
        self.predictions: list[Tensor] = []
        self.by_class: defaultdict[str, list[float]] = defaultdict(list)
        self.counter: Counter[str] = Counter()
        self.logged_acc = MulticlassAccuracy(VOCABULARY, average="micro")
        self.logged_train = MeanMetric().set_dtype(torch.float64)
        self.returned: list[Tensor] = []
        self.seen: dict[str, Any] = {}

    def keep(self, stage: str, name: str, value: Any) -> None:
        setattr(self, f"{stage}_{name}", value)

    def kept(self, stage: str, name: str) -> Any:
        return getattr(self, f"{stage}_{name}")

    def forget(self, stage: str) -> None:
        for name in ("acc", "both", "confusion"):
            self.kept(stage, name).reset()
        self.kept(stage, "outputs").clear()
        self.kept(stage, "histogram").zero_()
        self.kept(stage, "array")[:] = 0
        for name, value in (("total", 0.0), ("begun", 0), ("meter", Meter())):
            self.keep(stage, name, value)

    def step(self, batch: dict[str, Tensor], stage: str) -> dict[str, Tensor]:
        assert self.net is not None, "configure_model has run"
        self.keep(stage, "begun", self.kept(stage, "begun") + len(batch["tokens"]))
        loss = self.net(batch["tokens"], batch["labels"])
        labels = batch["labels"].reshape(-1)
        # A token with a small loss counts as a correct prediction.
        classes = torch.where(loss.detach().reshape(-1) < 3.3, labels, (labels + 1) % VOCABULARY)
        for name in ("acc", "both", "confusion"):
            self.kept(stage, name).update(classes, labels)
        value, size = loss.mean(), len(labels)
        self.kept(stage, "outputs").append(loss.detach())
        self.by_class[stage].append(float(value) * size)
        self.keep(stage, "total", self.kept(stage, "total") + float(value) * size)
        self.counter[stage] += size
        self.kept(stage, "meter").add(float(value), size)
        self.kept(stage, "histogram").add_(torch.bincount(labels, minlength=VOCABULARY))
        self.kept(stage, "array")[labels.numpy()] = 1
        if stage == "val":
            self.logged_acc(classes, labels)
            self.log("logged_acc", self.logged_acc, on_step=True, on_epoch=True)
        if stage == "train":
            self.logged_train(value.detach())
            self.log("logged_train", self.logged_train, on_step=False, on_epoch=True)
        return {"loss": value, "classes": classes.reshape(-1, loss.shape[-1])}

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        return self.step(batch, "train")

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        return self.step(batch, "val")

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        return self.step(batch, "test")

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        result = super().predict_step(batch, batch_idx)
        self.predictions.append(result)
        return result

    def finish(self, stage: str) -> None:
        count, meter = self.counter.pop(stage), self.kept(stage, "meter")
        values = {
            "acc": self.kept(stage, "acc").compute(),
            "mean": torch.cat(self.kept(stage, "outputs")).mean(),
            "by_class": sum(self.by_class.pop(stage)) / count,
            "total": self.kept(stage, "total") / count,
            "meter": meter.sum / meter.count,
            "hits": self.kept(stage, "confusion").compute().diagonal().sum().double(),
            **self.kept(stage, "both").compute(),
        }
        doubles = {
            f"{stage}_{name}": torch.as_tensor(value, dtype=torch.float64)
            for name, value in values.items()
        }
        self.log_dict(doubles, sync_dist=True)
        summed = {
            "histogram": self.kept(stage, "histogram")[3] + 0.0,
            "begun": float(self.kept(stage, "begun")),
        }
        for name, value in summed.items():
            self.log(f"{stage}_{name}", value, sync_dist=True, reduce_fx="sum")
        self.seen[stage] = (
            count,
            len(self.kept(stage, "outputs")),
            self.kept(stage, "array").tolist(),
        )
        self.forget(stage)

    def on_train_epoch_end(self) -> None:
        self.finish("train")

    def on_validation_epoch_end(self) -> None:
        self.finish("val")

    def on_test_epoch_end(self) -> None:
        self.finish("test")

    def on_predict_epoch_end(self) -> None:
        self.seen["predict"] = (len(self.predictions), int(torch.cat(self.predictions).sum()))

    def on_validation_batch_end(
        self, outputs: STEP_OUTPUT, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        assert isinstance(outputs, dict), "the step returns a mapping"
        self.returned.append(outputs["classes"])
        self.seen["within"] = (self.val_begun, len(self.val_outputs), len(self.returned))


class CollectOutputs(Callback):
    """Record the sums of the classes that training steps return."""

    def __init__(self) -> None:
        self.sums: list[int] = []

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.sums.append(int(outputs["classes"].sum()))


def run(devices: int, strategy: dict[str, Any] | None, folder: Path) -> dict[str, Any]:
    """Train, validate, test and predict; return the metrics and the values that hooks have seen."""
    seed_everything(3, verbose=False)
    sizes = strategy or {}
    data = devices // (sizes.get("tp", 1) * sizes.get("pp", 1))
    stopping = EarlyStopping("val_mean", patience=1, min_delta=0.2)
    saver = ModelCheckpoint(
        folder, "{epoch}-{val_acc:.3f}", monitor="val_acc", mode="max", save_top_k=1
    )
    collector = CollectOutputs()
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=MegatronStrategy(**sizes) if strategy is not None else "auto",
        precision="64-true",
        max_epochs=3,
        num_sanity_val_steps=1,
        use_distributed_sampler=False,
        callbacks=[stopping, saver, collector],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    part = getattr(trainer.strategy, "data_parallel_rank", 0)
    train, val = (
        DataLoader(Words(count, seed), 4 // data, sampler=range(part, count, data))
        for count, seed in ((16, 1), (8, 2))
    )
    module = KeepsState()
    trainer.fit(module, train, val)
    fitted = {name: float(value) for name, value in trainer.callback_metrics.items()}
    tested = trainer.test(module, val, verbose=False)
    trainer.predict(module, val)
    return {
        "fitted": fitted,
        "tested": tested,
        "stopped": (stopping.stopped_epoch, trainer.current_epoch),
        "best": float(saver.best_model_score or 0),
        "seen": module.seen,
        "returned": [tuple(output.shape) for output in module.returned],
        "sums": collector.sums,
    }


def run_layouts(
    rank: int, size: int, folder: Path, layouts: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    return {name: run(size, layout, folder / name) for name, layout in layouts.items()}


LAYOUTS = {
    "tp2 pp2": {"tp": 2, "pp": 2, "microbatch_size": 4},
    "pp2 vpp2 dp2": {"pp": 2, "vpp": 2, "microbatch_size": 1},
    "pp2 zb-v dp2": {"pp": 2, "vpp": 2, "schedule": "zb-v", "microbatch_size": 1},
}


@pytest.fixture(scope="module")
def results_by_layout(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("kept")
    warnings.simplefilter("ignore")
    return run(1, None, folder / "one"), run_world(run_layouts, 4, folder, LAYOUTS)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_state_kept_by_steps_reaches_hooks_loggers_and_monitors_on_every_rank(
    results_by_layout: tuple[dict[str, Any], list[dict[str, Any]]], layout: str
) -> None:
    one_process, ranks = results_by_layout
    for rank, layouts in enumerate(ranks):
        result = layouts[layout]
        expected = dict(one_process["fitted"])
        if "dp2" in layout:
            # Before every batch, a buffer becomes that of the first data rank, as under ddp.
            expected.pop("train_histogram")
            result["fitted"].pop("train_histogram")
        assert result["fitted"] == pytest.approx(expected, rel=1e-9), rank
        assert result["tested"][0] == pytest.approx(one_process["tested"][0], rel=1e-9), rank
        assert result["stopped"] == one_process["stopped"]
        assert result["best"] == pytest.approx(one_process["best"])
        assert 0.1 < result["best"] < 0.9
        assert result["returned"] == ranks[-1][layout]["returned"]
        if layout == "tp2 pp2":
            assert result["seen"] == one_process["seen"]
            assert result["sums"] == one_process["sums"]
