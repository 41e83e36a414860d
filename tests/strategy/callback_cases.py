"""Fits of a small model with callbacks, loggers and settings of Lightning, and their results."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    Callback,
    DeviceStatsMonitor,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateFinder,
    ModelPruning,
    ModelSummary,
    OnExceptionCheckpoint,
    RichProgressBar,
    StochasticWeightAveraging,
    ThroughputMonitor,
    Timer,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities.model_summary import summarize
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Block(nn.Module):
    """Add the output of two layers to their input."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(torch.tanh(self.up(hidden)))


class Net(LightningModule):
    """Fit a sum by layers that the constructor makes, as in most modules."""

    def __init__(self, lr: float = 0.05, batch_size: int = 4) -> None:
        super().__init__()
        self.lr, self.batch_size = lr, batch_size
        torch.manual_seed(4)
        self.backbone = nn.Linear(4, 8)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(8, 1)
        self.example_input_array = torch.ones(2, 4)
        self.place, self.notes = (0, 1), dict[str, Any]()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.backbone(x)))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self(x), y)
        self.log("loss", loss, sync_dist=True, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", nn.functional.mse_loss(self(x), y), sync_dist=True)
        self.notes["inference"] = torch.is_inference_mode_enabled()

    def configure_optimizers(self) -> Any:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.SGD(trained, lr=self.lr, momentum=0.5)

    def make_loader(self) -> DataLoader:
        rank, size = self.place
        x = torch.randn(16, 4, generator=torch.Generator().manual_seed(2))
        order = torch.arange(16).view(-1, size, self.batch_size // size)[:, rank].flatten()
        return DataLoader(
            TensorDataset(x[order], x[order].sum(1, keepdim=True)), self.batch_size // size
        )

    def train_dataloader(self) -> DataLoader:
        return self.make_loader()

    def val_dataloader(self) -> DataLoader:
        return self.make_loader()


class WithNorm(Net):
    """Net with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), nn.BatchNorm1d(8))


class FailsAtStepFive(Callback):
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == 5:
            raise RuntimeError("as asked")


Run = Callable[["Bench"], dict[str, Any]]


class Bench:
    """Make trainers under one strategy.

    Args:
        strategy: Function that makes the strategy.
        devices: Number of processes.
        place: Data rank of this process, and number of data ranks.
        folder: Folder of the files that a fit writes.
    """

    def __init__(
        self, strategy: Callable[[], Any], devices: int, place: tuple[int, int], folder: Path
    ) -> None:
        self.strategy, self.devices, self.place, self.folder = strategy, devices, place, folder

    def trainer(self, **options: Any) -> Trainer:
        seed_everything(1, verbose=False)
        quiet: dict[str, Any] = {
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
        }
        quiet |= {"enable_checkpointing": False, "accelerator": "cpu", "max_epochs": 4}
        quiet |= {
            "use_distributed_sampler": False,
            "log_every_n_steps": 1,
            "default_root_dir": self.folder,
        }
        return Trainer(**{**quiet, **options}, devices=self.devices, strategy=self.strategy())

    def fit(self, module: Net | None = None, **options: Any) -> tuple[Trainer, Net]:
        module = module or Net()
        module.place = self.place
        trainer = self.trainer(**options)
        trainer.fit(module)
        return trainer, module


def weights(module: Net) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def metrics(trainer: Trainer) -> dict[str, float]:
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def averaged(kind: type[Net] = Net) -> Run:
    def run(bench: Bench) -> dict[str, Any]:
        averaging = StochasticWeightAveraging(swa_lrs=0.02, swa_epoch_start=2, annealing_epochs=2)
        trainer, module = bench.fit(kind(), callbacks=[averaging])
        return {
            "weights": weights(module),
            "epochs": trainer.current_epoch,
            "metrics": metrics(trainer),
            "with averages": trainer.validate(module, verbose=False)[0],
        }

    return run


def pruned(bench: Bench) -> dict[str, Any]:
    pruning = ModelPruning("l1_unstructured", amount=0.3, use_lottery_ticket_hypothesis=False)
    _, module = bench.fit(callbacks=[pruning])
    return {
        "weights": weights(module),
        "zeros": sum(int((p == 0).sum()) for p in module.parameters()),
    }


def with_callback(*factories: Callable[[], Callback], **options: Any) -> Run:
    def run(bench: Bench) -> dict[str, Any]:
        trainer, module = bench.fit(callbacks=[factory() for factory in factories], **options)
        return {"weights": weights(module), "metrics": metrics(trainer), "notes": module.notes}

    return run


def setting(**options: Any) -> Run:
    return with_callback(**options)


def lambdas(bench: Bench) -> dict[str, Any]:
    calls: list[Any] = []

    def halve(trainer: Trainer, module: Net, *args: Any) -> None:
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(0.5)

    def note(trainer: Trainer, module: Net, loss: Tensor) -> None:
        calls.append(loss.item())

    trainer, module = bench.fit(
        callbacks=[LambdaCallback(on_train_batch_end=halve, on_before_backward=note)]
    )
    return {"weights": weights(module), "metrics": metrics(trainer), "calls": len(calls)}


def finetuned(bench: Bench) -> dict[str, Any]:
    finetuning = BackboneFinetuning(
        unfreeze_backbone_at_epoch=2, backbone_initial_lr=0.01, verbose=False
    )
    trainer, module = bench.fit(callbacks=[finetuning])
    rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
    # Under ddp, parameters that are unfrozen later stay unsynchronised.
    result = {} if bench.place[1] > 1 else {"weights": weights(module), "metrics": metrics(trainer)}
    return {**result, "rates": rates}


def summarized(bench: Bench) -> dict[str, Any]:
    class NotesSummary(ModelSummary):
        def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            summary = summarize(pl_module, 2)
            rows = zip(summary.layer_names, summary.in_sizes, summary.out_sizes, strict=True)
            pl_module.notes["rows"] = list(rows)

    return with_callback(lambda: NotesSummary(2))(bench)


def graphed(bench: Bench) -> dict[str, Any]:
    class Graphs(CSVLogger):
        """Run the module's forward pass on rank 0, as TensorBoard's logger does to draw its graph."""

        _log_graph = True

        @rank_zero_only
        def log_graph(self, model: LightningModule, input_array: Any = None) -> None:
            with torch.no_grad():
                model.notes["output"] = model(model.example_input_array).flatten().tolist()

    trainer, module = bench.fit(logger=Graphs(bench.folder), max_epochs=1)
    return {"weights": weights(module), "metrics": metrics(trainer), "notes": module.notes}


def logged(*factories: Callable[[], Callback]) -> Run:
    def run(bench: Bench) -> dict[str, Any]:
        logger = CSVLogger(bench.folder, "csv", version=0)
        trainer, module = bench.fit(
            logger=logger, callbacks=[factory() for factory in factories], max_epochs=1
        )
        result = {"weights": weights(module), "metrics": metrics(trainer)}
        of_rank = trainer.logged_metrics.get("train/device/samples_per_sec", 1.0)
        result["replicas"] = trainer.logged_metrics.get("train/samples_per_sec", of_rank) / of_rank
        if not trainer.is_global_zero:
            return result
        rows = (bench.folder / "csv" / "version_0" / "metrics.csv").read_text().splitlines()
        # Which metrics per second exist depends on the number of ranks.
        names = {name for name in rows[0].split(",") if "per_sec" not in name}
        return {**result, "names": sorted(names), "rows": len(rows)}

    return run


def excepted(bench: Bench) -> dict[str, Any]:
    saver = OnExceptionCheckpoint(bench.folder, "failed")
    try:
        bench.fit(callbacks=[saver, FailsAtStepFive()], enable_checkpointing=True)
    except RuntimeError as error:
        message = str(error)
    module = Net()
    module.place = bench.place
    trainer = bench.trainer()
    trainer.fit(module, ckpt_path=bench.folder / "failed.ckpt")
    return {
        "weights": weights(module),
        "message": message,
        "steps": trainer.global_step,
        "metrics": metrics(trainer),
    }


def found_rate(bench: Bench) -> dict[str, Any]:
    module = Net()
    module.place = bench.place
    trainer = bench.trainer()
    finder = Tuner(trainer).lr_find(
        module, num_training=12, min_lr=1e-4, max_lr=0.5, update_attr=True
    )
    assert finder is not None
    trainer.fit(module)
    return {"weights": weights(module), "losses": finder.results["loss"][:8], "lr": module.lr}


def found_rate_in_fit(bench: Bench) -> dict[str, Any]:
    trainer, module = bench.fit(callbacks=[LearningRateFinder(1e-4, 0.3, num_training_steps=10)])
    return {"weights": weights(module), "lr": module.lr, "metrics": metrics(trainer)}


def fitted_twice(bench: Bench) -> dict[str, Any]:
    trainer, module = bench.fit(max_epochs=1)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module)
    results = [trainer.validate(module, verbose=False)]
    return {"weights": weights(module), "results": results, "steps": trainer.global_step}


CASES: dict[str, Run] = {
    "averaged": averaged(),
    "averaged with statistics": averaged(WithNorm),
    "pruned": pruned,
    "lambdas": lambdas,
    "finetuned": finetuned,
    "summarized": summarized,
    "graphed": graphed,
    "device statistics": logged(DeviceStatsMonitor),
    "throughput": logged(lambda: ThroughputMonitor(lambda batch: len(batch[0]), window_size=2)),
    "excepted": excepted,
    "rate found": found_rate,
    "fitted twice": fitted_twice,
    "rate found in the fit": found_rate_in_fit,
    "accumulated by a schedule": with_callback(lambda: GradientAccumulationScheduler({0: 1, 1: 2, 2: 3})),
    "timer": with_callback(lambda: Timer("00:01:00:00")),
    "no inference mode": setting(inference_mode=False),
    "anomalies": setting(detect_anomaly=True),
    "clipped by value": setting(gradient_clip_val=0.01, gradient_clip_algorithm="value"),
    "barebones": lambda bench: setting(
        barebones=True, logger=None, enable_checkpointing=None, enable_progress_bar=None, enable_model_summary=None,
        log_every_n_steps=None,
    )(bench),
    "profiled": setting(profiler="pytorch", max_epochs=2),
    "profiled simply": setting(profiler="simple"),
    "profiled at length": setting(profiler="advanced"),
    "bar": setting(enable_progress_bar=True),
    "rich bar": with_callback(RichProgressBar, enable_progress_bar=True),
    "summary": setting(enable_model_summary=True),
}  # fmt: skip
