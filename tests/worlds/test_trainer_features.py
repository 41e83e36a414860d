"""What Lightning's Trainer offers does under every layout what it does in one process, and every
rank reads the samples that it reads under ``ddp``.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    Checkpoint,
    DeviceStatsMonitor,
    EarlyStopping,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateFinder,
    ModelCheckpoint,
    ModelPruning,
    ModelSummary,
    OnExceptionCheckpoint,
    RichProgressBar,
    StochasticWeightAveraging,
    ThroughputMonitor,
    Timer,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.model_summary import summarize
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    SequentialSampler,
    TensorDataset,
)

from lightning_megatron import UnsupportedError
from tests.fits import Job, Module, Record, Report, joined, loader_of, run_job, trainer_of
from tests.world import run_world

LAYOUTS: dict[str, Any] = {
    "ddp": "ddp",
    "dp2": {},
    "tp2": {"tp": 2, "tensor_parallel_plan": {"*.up": "column", "*.down": "row"}},
    "pp2": {"pp": 2, "pipeline_plan": {"blocks": "blocks"}},
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(torch.tanh(self.up(hidden)))


class Net(Module):
    """Fit a sum; the learning rate has a schedule by ``step`` or ``epoch``, a ``plateau`` or none."""

    def __init__(self, schedule: str | None = None, with_norm: bool = False) -> None:
        super().__init__()
        self.lr, self.schedule, self.outcomes = 0.05, schedule, dict[str, Any]()
        torch.manual_seed(4)
        self.backbone = nn.Linear(4, 8)
        self.blocks = nn.Sequential(Block(), nn.BatchNorm1d(8) if with_norm else Block())
        self.head = nn.Linear(8, 1)
        self.example_input_array = torch.ones(2, 4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.backbone(x)))

    def loss(self, batch: list[Tensor]) -> Tensor:
        return F.mse_loss(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.outcomes["inference mode"] = torch.is_inference_mode_enabled()

    def test_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.log_dict({"test_loss": loss, "test_half": loss / 2}, sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=self.lr, momentum=0.5)
        if self.schedule is None:
            return optimizer
        schedulers = torch.optim.lr_scheduler
        if self.schedule == "plateau":
            plateau = schedulers.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=10)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"},
            }
        rates = {
            "scheduler": schedulers.StepLR(optimizer, 1, 0.8),
            "interval": self.schedule,
        }
        return {"optimizer": optimizer, "lr_scheduler": rates}


class Watch(pl.Callback):
    """Keep the steps of validations, the rates of batches, and where the fit ended."""

    def __init__(self) -> None:
        self.outcomes: dict[str, Any] = {"validated at": [], "rates": []}

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.outcomes["validated at"].append(trainer.global_step)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.outcomes["rates"].append([g["lr"] for g in trainer.optimizers[0].param_groups])

    def on_fit_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.outcomes["end"] = (trainer.global_step, trainer.current_epoch)


def points(count: int) -> TensorDataset:
    x = torch.randn(count, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return TensorDataset(x, x.sum(1, keepdim=True))


@dataclass
class Bench:
    """Fit under one strategy; files go to ``folder``."""

    strategy: Any
    size: int
    folder: Path

    def job(self, *callbacks: pl.Callback, **changes: Any) -> Job:
        """Return a fit of two epochs of four batches; ``trainer`` has more options of the Trainer."""
        options = {
            "max_epochs": 2,
            "default_root_dir": self.folder,
            "log_every_n_steps": 1,
            "gradient_clip_val": None,
            **changes.pop("trainer", {}),
        }
        if any(isinstance(callback, Checkpoint) for callback in callbacks):
            options["enable_checkpointing"] = True
        plain = Job(
            Net, self.strategy, steps=-1, data=partial(points, 32), validation=partial(points, 16)
        )
        return replace(
            plain, trainer=options, callbacks=lambda: [Watch(), *callbacks], **changes
        )  # fmt: skip

    def fit(self, *callbacks: pl.Callback, **changes: Any) -> Report:
        return run_job(self.job(*callbacks, **changes), self.size)

    def trainer(self, *callbacks: pl.Callback, **changes: Any) -> pl.Trainer:
        return trainer_of(self.job(*callbacks, **changes), self.size)


def loaders(trainer: pl.Trainer) -> tuple[DataLoader, DataLoader]:
    return loader_of(points(32), 8, trainer), loader_of(points(16), 8, trainer)


Feature = Callable[[Bench], Report]


def setting(**changes: Any) -> Feature:
    """Fit with options of the Trainer."""
    job = {name: changes.pop(name) for name in ("model", "data", "steps") if name in changes}
    return lambda bench: bench.fit(trainer=changes, **job)


def with_callback(*makers: Callable[[], pl.Callback], **options: Any) -> Feature:
    return lambda bench: bench.fit(*(make() for make in makers), trainer=options)


def early_stopping(bench: Bench) -> Report:
    stopping = EarlyStopping("val_loss", patience=0, min_delta=0.3)
    report = bench.fit(stopping, trainer={"max_epochs": 6})
    report.outcomes["stopped"] = stopping.stopped_epoch
    return report


def checkpoints(bench: Bench) -> Report:
    folder = bench.folder / "monitored"
    saver = ModelCheckpoint(
        folder, "{step}-{val_loss:.4f}", monitor="val_loss", save_top_k=2, save_last=True
    )
    report = bench.fit(saver, trainer={"max_epochs": 4})
    report.outcomes["best"] = float(saver.best_model_score or 0)
    report.outcomes["names"] = sorted(path.name for path in folder.iterdir())
    return report


def resumed(bench: Bench) -> Report:
    """Stop within an epoch; a new Trainer continues."""
    model, path = partial(Net, "step"), str(bench.folder / "middle.ckpt")
    bench.fit(model=model, steps=3, save=path)
    return bench.fit(model=model, resume=path)


def evaluated(bench: Bench) -> Report:
    """Validate, fit, test and predict by one Trainer."""
    module, trainer, outcomes = Net(), bench.trainer(), dict[str, Any]()
    train, held_out = loaders(trainer)
    outcomes["before"] = trainer.validate(module, held_out, verbose=False)[0]
    trainer.fit(module, train, held_out)
    outcomes["tested"] = trainer.test(module, held_out, verbose=False)[0]
    predicted: Any = trainer.predict(module, held_out)
    total = torch.cat(predicted).sum().double()
    if getattr(train.sampler, "num_replicas", 1) > 1:
        torch.distributed.all_reduce(total)
    outcomes["predicted"] = float(total)
    return Report(outcomes=outcomes)


def fitted_again(bench: Bench) -> Report:
    """Fit the same module by the same and by another Trainer."""
    record, module = Record(), Net()
    trainer = bench.trainer(record, trainer={"max_epochs": 1})
    trainer.fit(module, *loaders(trainer))
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, *loaders(trainer))
    another = bench.trainer(record, trainer={"max_epochs": 1})
    another.fit(module, *loaders(another))
    return record.report


def averaged(bench: Bench, with_norm: bool = False) -> Report:
    record, module = Record(), Net(None, with_norm)
    averaging = StochasticWeightAveraging(swa_lrs=0.02, swa_epoch_start=2, annealing_epochs=2)
    trainer = bench.trainer(record, averaging, trainer={"max_epochs": 4})
    trainer.fit(module, *loaders(trainer))
    record.report.outcomes = trainer.validate(module, loaders(trainer)[1], verbose=False)[0]
    return record.report


def pruned(bench: Bench) -> Report:
    return bench.fit(
        ModelPruning("l1_unstructured", amount=0.3, use_lottery_ticket_hypothesis=False)
    )


def before_backward(bench: Bench) -> Report:
    losses: list[float] = []
    report = bench.fit(
        LambdaCallback(on_before_backward=lambda trainer, module, loss: losses.append(loss.item()))
    )
    report.outcomes["calls"] = bool(losses)
    return report


def finetuned(bench: Bench) -> Report:
    return bench.fit(
        BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.01, verbose=False)
    )


class NotesSummary(ModelSummary):
    def on_fit_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        summary = summarize(pl_module, 2)
        rows = zip(summary.layer_names, summary.in_sizes, summary.out_sizes, strict=True)
        pl_module.outcomes["rows"] = list(rows)


class Graphs(CSVLogger):
    """Run the module's forward pass on rank 0, as TensorBoard's logger does to draw its graph."""

    _log_graph = True

    @rank_zero_only
    def log_graph(self, model: Any, input_array: Any = None) -> None:
        with torch.no_grad():
            model.outcomes["output"] = model(model.example_input_array).flatten().tolist()


def graphed(bench: Bench) -> Report:
    report = bench.fit(trainer={"logger": Graphs(bench.folder), "max_epochs": 1})
    report.outcomes.pop("output", None)
    return report


def logged(make: Callable[[], pl.Callback]) -> Feature:
    """Fit with a callback that logs; keep the names and the number of rows of the logger's file."""

    def fit(bench: Bench) -> Report:
        logger = CSVLogger(bench.folder, "csv", version=0)
        report = bench.fit(make(), trainer={"logger": logger, "max_epochs": 1})
        metrics = report.metrics
        per_rank = metrics.get("train/device/samples_per_sec", 1.0)
        replicas = metrics.get("train/samples_per_sec", per_rank) / per_rank
        report.metrics = {n: v for n, v in metrics.items() if "loss" in n}
        report.outcomes["replicas"] = replicas
        if torch.distributed.is_initialized() and torch.distributed.get_rank():
            return report
        rows = (bench.folder / "csv" / "version_0" / "metrics.csv").read_text().splitlines()
        # Which metrics per second exist depends on the number of ranks.
        names = {name for name in rows[0].split(",") if "per_sec" not in name}
        report.outcomes["file"] = (sorted(names), len(rows))
        return report

    return fit


class FailsAtStepThree(pl.Callback):
    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 3:
            raise RuntimeError("as asked")


def excepted(bench: Bench) -> Report:
    """Continue from what is saved when a fit fails."""
    saver = OnExceptionCheckpoint(bench.folder, "failed")
    with pytest.raises(RuntimeError, match="as asked"):
        bench.fit(saver, FailsAtStepThree())
    return bench.fit(resume=str(bench.folder / "failed.ckpt"))


def rate_found(bench: Bench) -> Report:
    report = bench.fit(LearningRateFinder(1e-4, 0.3, num_training_steps=10))
    report.outcomes["searched"] = len(set(map(tuple, report.outcomes["rates"])))
    return report


FEATURES: dict[str, Feature] = {
    "limits": setting(limit_train_batches=3, limit_val_batches=1),
    "validation twice an epoch": setting(val_check_interval=0.5, num_sanity_val_steps=0),
    "validation by steps": setting(val_check_interval=3, check_val_every_n_epoch=None, steps=7),
    "accumulated": setting(accumulate_grad_batches=3),
    "accumulated by a schedule": with_callback(lambda: GradientAccumulationScheduler({0: 1, 1: 3})),
    "clipped by norm": setting(gradient_clip_val=0.05),
    "clipped by value": setting(gradient_clip_val=0.01, gradient_clip_algorithm="value"),
    "a smaller last batch": setting(data=partial(points, 28)),
    "a schedule by epoch": setting(model=partial(Net, "epoch"), max_epochs=3),
    "a plateau": setting(model=partial(Net, "plateau"), max_epochs=3),
    "overfit_batches": setting(overfit_batches=2),
    "fast_dev_run": setting(fast_dev_run=True),
    "no inference mode": setting(inference_mode=False),
    "early stopping": early_stopping,
    "checkpoints": checkpoints,
    "resumed": resumed,
    "evaluated": evaluated,
    "fitted again": fitted_again,
    "averaged": averaged,
    "finetuned": finetuned,
    "summarized": with_callback(lambda: NotesSummary(2)),
    "device statistics": logged(DeviceStatsMonitor),
    "excepted": excepted,
    "rate found": rate_found,
}
#: Features for which one process is enough.
ALONE: dict[str, Feature] = {
    "timer": with_callback(lambda: Timer("00:01:00:00")),
    "anomalies": setting(detect_anomaly=True),
    "barebones": setting(
        barebones=True,
        **dict.fromkeys(
            ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary",
             "log_every_n_steps", "default_root_dir")
        ),
    ),
    "profiled": setting(profiler="simple"),
    "profiled by torch": setting(profiler="pytorch", max_epochs=1),
    "bars": with_callback(RichProgressBar, enable_progress_bar=True),
    "a bar and a summary": setting(enable_progress_bar=True, enable_model_summary=True),
}  # fmt: skip
#: Features that need the whole model, or see the samples of a single rank, and what the layouts
#: that cannot have them say.
WHOLE: dict[str, tuple[Feature, dict[str, str]]] = {
    "pruned": (pruned, dict.fromkeys(("tp2", "pp2"), "ModelPruning needs the whole model")),
    "graphed": (graphed, dict.fromkeys(("tp2", "pp2"), r"Graphs\(log_graph=True\) cannot be used")),
    "lambdas": (before_backward, {"pp2": r"LambdaCallback.on_before_backward cannot be called"}),
    "averaged with statistics": (
        partial(averaged, with_norm=True), {"pp2": "StochasticWeightAveraging cannot be used with"},
    ),
    "throughput": (logged(lambda: ThroughputMonitor(lambda batch: len(batch[0]), window_size=2)), {}),
}  # fmt: skip
#: Features of each layout; what does not depend on how a model is divided runs on one rank alone.
CASES = {
    "dp2": (
        *("accumulated", "a smaller last batch", "early stopping", "checkpoints", "resumed"),
        *("evaluated", "finetuned", "rate found"),
    ),
    "tp2": (
        *("clipped by norm", "clipped by value", "checkpoints", "averaged", "summarized"),
        *("finetuned", "excepted"),
    ),
    "pp2": (
        *("limits", "validation by steps", "accumulated", "clipped by norm", "clipped by value"),
        *("a smaller last batch", "a plateau", "fast_dev_run", "checkpoints", "resumed"),
        *("evaluated", "fitted again", "averaged", "finetuned", "summarized", "rate found"),
    ),
}


class Numbers(Dataset):
    def __init__(self, size: int = 16, first: int = 0) -> None:
        self.size, self.first = size, first

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(float(self.first + index))


class Stream(IterableDataset):
    """Numbers without a length."""

    def __init__(self, size: int = 12) -> None:
        self.size = size

    def __iter__(self) -> Iterator[Tensor]:
        yield from (torch.tensor(float(number)) for number in range(self.size))


class SizedStream(Stream):
    def __len__(self) -> int:
        return self.size


class Backwards(Sampler):
    def __len__(self) -> int:
        return 16

    def __iter__(self) -> Iterator[int]:
        return iter(range(15, -1, -1))


class GrowingBatches(BatchSampler):
    """Give batches of one, two, three and more samples."""

    def __iter__(self) -> Iterator[list[int]]:
        indices, size = list(self.sampler), 1
        while len(indices) >= size:
            yield indices[:size]
            indices, size = indices[size:], size + 1

    def __len__(self) -> int:
        return sum(1 for _ in self)


class Reads(pl.LightningModule):
    """Keep the samples of every step, and train a number towards them."""

    def __init__(self, skips: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.skips, self.seen = skips, list[Any]()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        self.seen.append((batch_idx, as_lists(batch), self.trainer.accumulate_grad_batches))
        if self.skips and batch_idx % 2:
            return None
        parts = [(self.weight - tensor / 10).square().mean() for tensor in tensors_of(batch)]
        return torch.stack(parts).sum()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.seen.append((dataloader_idx, batch_idx, as_lists(batch)))
        self.log("checked", batch.mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([self.weight], lr=0.05)


def tensors_of(batch: Any) -> list[Tensor]:
    parts = batch.values() if isinstance(batch, dict) else batch
    if batch is None or isinstance(batch, Tensor):
        return [] if batch is None else [batch]
    return [tensor for part in parts for tensor in tensors_of(part)]


def as_lists(batch: Any) -> Any:
    if isinstance(batch, dict):
        return {name: as_lists(value) for name, value in batch.items()}
    if isinstance(batch, Tensor):
        return batch.tolist()
    return [as_lists(value) for value in batch] if isinstance(batch, Sequence) else batch


class NumbersModule(pl.LightningDataModule):
    def train_dataloader(self) -> Any:
        return {"a": DataLoader(Numbers(), 4), "b": DataLoader(Numbers(16, 100), 2)}

    def val_dataloader(self) -> Any:
        return [DataLoader(Numbers(6), 4), DataLoader(Numbers(4, 50), 2)]


def numbers(size: int = 16, batch_size: int = 4, **options: Any) -> DataLoader:
    return DataLoader(Numbers(size), batch_size, **options)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def combined(mode: str) -> CombinedLoader:
    return CombinedLoader({"long": numbers(), "short": numbers(8, 2)}, mode)


#: Function that makes the data, and options of the Trainer.
DATA: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "a smaller last batch": (lambda: numbers(14), {}),
    "drop_last": (lambda: numbers(14, drop_last=True), {}),
    "shuffled by a generator": (lambda: numbers(shuffle=True, generator=seeded()), {}),
    "a sampler": (lambda: numbers(sampler=Backwards()), {}),
    "batches that grow": (
        lambda: DataLoader(Numbers(), batch_sampler=GrowingBatches(SequentialSampler(Numbers()), 4, False)), {},
    ),
    "single samples": (lambda: DataLoader(Numbers(), batch_size=None, sampler=Backwards()), {}),
    "a stream": (lambda: DataLoader(Stream(), 4), {"val_check_interval": 2}),
    "a stream of known length": (lambda: DataLoader(SizedStream(), 4), {}),
    "a list of tensors": (lambda: [torch.arange(4.0), torch.arange(4.0) + 4], {}),
    "loaders in turn": (lambda: combined("max_size"), {}),
    "a data module": (NumbersModule, {"num_sanity_val_steps": 1}),
    "a part of the batches": (lambda: numbers(32), {"limit_train_batches": 0.5}),
    "overfit_batches": (lambda: numbers(32, shuffle=True), {"overfit_batches": 2}),
    "a schedule of accumulation": (lambda: numbers(20), {"schedule": {0: 1, 1: 2, 2: 4}, "max_epochs": 3}),
    "no distributed sampler": (lambda: numbers(shuffle=True, generator=seeded()), {"use_distributed_sampler": False}),
    "loaders made again": (numbers, {"reload_dataloaders_every_n_epochs": 1}),
}  # fmt: skip
SHUFFLED = (lambda: numbers(13, shuffle=True), dict[str, Any]())


def read(data: Any, strategy: Any, size: int = 1, skips: bool = False) -> tuple[list[Any], float]:
    """Fit two epochs; return the samples of this rank and the final weight."""
    make, options = data
    options = {"max_epochs": 2, "use_distributed_sampler": True, **options}
    schedule, module = options.pop("schedule", None), Reads(skips)
    if isinstance(strategy, dict):
        strategy = {"microbatch_size": None, "check_microbatches": True, **strategy}
    job = Job(strategy=strategy, steps=-1, trainer=options)
    callbacks = [] if schedule is None else [GradientAccumulationScheduler(schedule)]
    trainer_of(job, size, *callbacks).fit(module, make())
    return module.seen, module.weight.item()


def quiet() -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.CRITICAL)


def outcome(feature: Feature, strategy: Any, size: int, folder: Path) -> Report | str:
    """Return the report of a feature, or the message of its refusal."""
    try:
        return feature(Bench(strategy, size, folder))
    except UnsupportedError as error:
        return str(error)


def two_ranks(rank: int, size: int, folder: Path) -> dict[Any, Any]:
    quiet()
    results: dict[Any, Any] = {}
    for layout, cases in CASES.items():
        for name in cases:
            results[layout, name] = outcome(
                FEATURES[name], LAYOUTS[layout], size, folder / layout / name
            )
    for name, (feature, refused) in WHOLE.items():
        for layout in refused or ("ddp", "dp2"):
            results[layout, name] = outcome(feature, LAYOUTS[layout], size, folder / layout / name)
    for layout in ("ddp", "dp2", "tp2"):
        strategy: Any = (
            {"tp": 2, "tensor_parallel_plan": {}} if layout == "tp2" else LAYOUTS[layout]
        )
        results["data", layout] = {name: read(data, strategy, size) for name, data in DATA.items()}
        results["shuffled", layout] = read(SHUFFLED, strategy, size)
    with pytest.raises(RuntimeError) as raised:
        read((numbers, {}), {}, size, skips=True)
    results["skipped"] = str(raised.value)
    return results


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    return run_world(two_ranks, 2, tmp_path_factory.mktemp("two"))


@cache
def alone(name: str) -> Any:
    """Return the report of a feature by Lightning alone in this process."""
    quiet()
    feature = {**FEATURES, **ALONE}.get(name) or WHOLE[name][0]
    return outcome(feature, None, 1, Path(mkdtemp()))


def differences(actual: Any, expected: Any, place: str = "") -> list[str]:
    """List the places at which two nested results differ."""
    if isinstance(expected, Mapping):
        if expected.keys() != actual.keys():
            return [f"{place}: {actual.keys()} instead of {expected.keys()}"]
        pairs = [(f"{place}/{key}", actual[key], expected[key]) for key in expected]
    elif isinstance(expected, list | tuple):
        if len(actual) != len(expected):
            return [f"{place}: {actual} instead of {expected}"]
        pairs = [(f"{place}[{n}]", *p) for n, p in enumerate(zip(actual, expected, strict=True))]
    else:
        # Lightning keeps its own sums over an epoch in float32.
        near = (
            pytest.approx(expected, rel=1e-6, abs=1e-7) if isinstance(expected, float) else expected
        )
        return [] if actual == near else [f"{place}: {actual} instead of {expected}"]
    return [line for place, *pair in pairs for line in differences(*pair, place)]


def of(report: Report, *ignored: str) -> dict[str, Any]:
    values = {"losses": report.losses, "norms": report.norms, "metrics": report.metrics}
    return values | {k: v for k, v in report.outcomes.items() if k not in ignored}


def assert_same(reports: Sequence[Any], expected: Any, *ignored: str) -> None:
    for rank, report in enumerate(reports):
        assert isinstance(report, Report), report
        found = differences(of(report, *ignored), of(expected, *ignored))
        assert not found, f"rank {rank}: {found}"
    weights = {name: tensor.flatten().tolist() for name, tensor in joined(reports).items()}
    of_one = {name: tensor.flatten().tolist() for name, tensor in joined([expected]).items()}
    assert not differences(weights, of_one)


@pytest.mark.parametrize("name", [*FEATURES, *ALONE, *WHOLE])
def test_features_do_in_one_process_what_they_do_without_the_strategy(
    name: str, tmp_path: Path
) -> None:
    expected = alone(name)
    feature = {**FEATURES, **ALONE}.get(name) or WHOLE[name][0]
    checked = {"check_microbatches": True}
    if name in ("averaged with statistics", "lambdas"):
        checked["microbatch_size"] = 8
    assert_same([outcome(feature, checked, 1, tmp_path)], expected)


@pytest.mark.parametrize(("layout", "name"), [(k, name) for k, v in CASES.items() for name in v])
def test_features_do_on_two_ranks_what_they_do_in_one_process(
    ranks: list[dict[Any, Any]], layout: str, name: str
) -> None:
    # A summary of a stage has no sizes, and only rank 0 reads its files.
    ignored = ("rows", "file") if layout == "pp2" else ("file",)
    assert_same([results[layout, name] for results in ranks], alone(name), *ignored)


def test_features_that_need_the_whole_model_are_refused_or_do_what_they_do_under_ddp(
    ranks: list[dict[Any, Any]],
) -> None:
    for name, (_, refused) in WHOLE.items():
        for results in ranks:
            for layout, words in refused.items():
                with pytest.raises(UnsupportedError, match=words):
                    raise UnsupportedError(results[layout, name])
            if not refused:
                assert_same([results["dp2", name]], results["ddp", name])


def test_pruning_that_resets_weights_and_batch_size_searches_are_refused(tmp_path: Path) -> None:
    bench = Bench({}, 1, tmp_path)
    with pytest.raises(UnsupportedError, match="Use use_lottery_ticket_hypothesis=False"):
        bench.fit(ModelPruning("l1_unstructured", amount=0.5))
    with pytest.raises(ValueError, match="not supported with distributed strategies"):
        pl.tuner.Tuner(bench.trainer()).scale_batch_size(Net())


@pytest.mark.parametrize("name", DATA)
def test_ranks_read_the_samples_that_they_read_under_ddp_or_in_one_process(
    ranks: list[dict[Any, Any]], name: str
) -> None:
    quiet()
    expected = read(DATA[name], None)
    for rank in ranks:
        assert not differences(rank["data", "dp2"][name], rank["data", "ddp"][name])
        assert not differences(rank["data", "tp2"][name], expected)
    assert not differences(read(DATA[name], {}), expected)


def test_one_data_rank_shuffles_all_samples_anew_in_every_epoch(
    ranks: list[dict[Any, Any]],
) -> None:
    first, second = (rank["shuffled", "tp2"] for rank in ranks)
    assert first == second
    samples = [sample for _, batch, _ in first[0] for sample in batch]
    epochs = samples[:13], samples[13:]
    assert all(sorted(epoch) == list(range(13)) != epoch for epoch in epochs)
    assert epochs[0] != epochs[1]
    for rank in ranks:
        assert rank["shuffled", "dp2"] == rank["shuffled", "ddp"]


def test_skipped_batches_are_lightnings_on_one_device_and_refused_on_several_ranks(
    ranks: list[dict[Any, Any]],
) -> None:
    quiet()
    data = (lambda: numbers(28), {"accumulate_grad_batches": 3})
    assert not differences(read(data, {}, skips=True), read(data, None, skips=True))
    for rank in ranks:
        assert "training_step must return a loss on every rank" in rank["skipped"]
        assert "0.0 * output.sum()" in rank["skipped"]
