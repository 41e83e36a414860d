"""What Lightning's Trainer offers does under every layout what it does in one process, and every
rank reads the samples that it reads under ``ddp``.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator, Sequence
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
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateFinder,
    ModelPruning,
    ModelSummary,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
    ThroughputMonitor,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.model_summary import summarize
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    Sampler,
    SequentialSampler,
    TensorDataset,
)

from lightning_megatron.errors import UnsupportedError
from tests.fits import Job, Module, Record, Report, joined, loader_of, run_job, trainer_of
from tests.world import run_world

pytestmark = pytest.mark.filterwarnings("ignore")

LAYOUTS: dict[str, dict[str, Any]] = {
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
    """Fit a sum."""

    def __init__(self, with_norm: bool = False) -> None:
        super().__init__()
        self.lr = 0.05
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
        return torch.optim.SGD(trained, lr=self.lr, momentum=0.5)


class Watch(pl.Callback):
    """Keep the rates of batches, the steps of validations, and where the fit ended."""

    def __init__(self) -> None:
        self.outcomes: dict[str, Any] = {"rates": [], "validated at": []}

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
    """Fit two epochs of four batches under one strategy; files go to ``folder``, and ``trainer`` has
    more options of the Trainer.
    """

    strategy: Any
    size: int
    folder: Path

    def job(self, *callbacks: pl.Callback, **changes: Any) -> Job:
        options = {
            **{"max_epochs": 2, "default_root_dir": self.folder, "log_every_n_steps": 1},
            **{"gradient_clip_val": None, **changes.pop("trainer", {})},
        }
        if any(isinstance(callback, Checkpoint) for callback in callbacks):
            options["enable_checkpointing"] = True
        changes = {"data": partial(points, 32), "validation": partial(points, 16), **changes}
        watched = lambda: [Watch(), *callbacks]  # noqa: E731
        return Job(
            Net, self.strategy, trainer=options, callbacks=watched, **{"steps": -1, **changes}
        )

    def fit(self, *callbacks: pl.Callback, **changes: Any) -> Report:
        return run_job(self.job(*callbacks, **changes), self.size)

    def trainer(self, *callbacks: pl.Callback, **changes: Any) -> pl.Trainer:
        return trainer_of(self.job(*callbacks, **changes), self.size)


def loaders(trainer: pl.Trainer) -> tuple[DataLoader, DataLoader]:
    return loader_of(points(32), 8, trainer), loader_of(points(16), 8, trainer)


Feature = Callable[[Bench], Report]


def setting(steps: int = -1, **options: Any) -> Feature:
    return lambda bench: bench.fit(trainer=options, steps=steps)


def with_callback(make: Callable[[], pl.Callback]) -> Feature:
    return lambda bench: bench.fit(make())


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
    record, module = Record(), Net(with_norm)
    averaging = StochasticWeightAveraging(swa_lrs=0.02, swa_epoch_start=2, annealing_epochs=2)
    trainer = bench.trainer(record, averaging, trainer={"max_epochs": 4})
    trainer.fit(module, *loaders(trainer))
    record.report.outcomes = trainer.validate(module, loaders(trainer)[1], verbose=False)[0]
    return record.report


class Graphs(CSVLogger):
    """Ask for the graph of the model, as TensorBoard's logger does."""

    _log_graph = True


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


def resumed(bench: Bench) -> Report:
    """Stop within an epoch; a new Trainer continues."""
    path = str(bench.folder / "middle.ckpt")
    bench.fit(steps=3, save=path)
    return bench.fit(resume=path)


class NotesSummary(ModelSummary):
    def on_fit_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        summary = summarize(pl_module, 2)
        rows = zip(summary.layer_names, summary.in_sizes, summary.out_sizes, strict=True)
        pl_module.outcomes["text"] = repr(list(rows))


def logged(make: Callable[[], pl.Callback]) -> Feature:
    """Fit with a callback that logs; keep what rank 0 writes, and how many ranks' samples it counts."""

    def fit(bench: Bench) -> Report:
        logger = CSVLogger(bench.folder, "csv", version=0)
        report = bench.fit(make(), trainer={"logger": logger, "max_epochs": 1})
        report.metrics = {name: v for name, v in report.metrics.items() if "loss" in name}
        if bench.size == 1 or torch.distributed.get_rank() == 0:
            with (bench.folder / "csv" / "version_0" / "metrics.csv").open() as file:
                rows = list(csv.DictReader(file))
            report.outcomes["text"] = repr((sorted(rows[0]), len(rows)))
            rates = "train/samples_per_sec", "train/device/samples_per_sec"
            pairs = [[float(row[rate]) for rate in rates] for row in rows if row.get(rates[0])]
            report.outcomes["ranks"] = [whole / part for whole, part in pairs]
        return report

    return fit


FEATURES: dict[str, Feature] = {
    "a smaller last batch": lambda bench: bench.fit(data=partial(points, 28)),
    "fast_dev_run": setting(fast_dev_run=True),
    "evaluated": evaluated,
    "fitted again": fitted_again,
    "averaged": averaged,
    "excepted": excepted,
    "rate found": with_callback(lambda: LearningRateFinder(1e-4, 0.3, num_training_steps=10)),
    "resumed": resumed,
    "finetuned": with_callback(
        lambda: BackboneFinetuning(1, backbone_initial_lr=0.01, verbose=False)
    ),
    "summarized": with_callback(lambda: NotesSummary(2)),
    "validation by steps": setting(val_check_interval=3, check_val_every_n_epoch=None, steps=7),
    "overfit_batches": setting(overfit_batches=2),
    "accumulated by a schedule": with_callback(lambda: GradientAccumulationScheduler({0: 1, 1: 3})),
    "no inference mode": setting(inference_mode=False),
    "device statistics": logged(DeviceStatsMonitor),
    "profiled by torch": setting(profiler="pytorch", max_epochs=1),
    "barebones": setting(
        barebones=True,
        **dict.fromkeys(
            ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary",
             "log_every_n_steps", "default_root_dir")
        ),
    ),
    "throughput": logged(lambda: ThroughputMonitor(lambda batch: len(batch[0]), window_size=2)),
}  # fmt: skip
#: Features that need the whole model, and what the layouts that cannot have them say.
WHOLE: dict[str, tuple[Feature, dict[str, str]]] = {
    "pruned": (
        with_callback(partial(ModelPruning, "l1_unstructured", amount=0.3, use_lottery_ticket_hypothesis=False)),
        dict.fromkeys(("tp2", "pp2"), "ModelPruning needs the whole model"),
    ),
    "graphed": (
        lambda bench: bench.fit(trainer={"logger": Graphs(bench.folder)}),
        dict.fromkeys(("tp2", "pp2"), r"Graphs\(log_graph=True\) cannot be used"),
    ),
    "lambdas": (
        with_callback(lambda: LambdaCallback(on_before_backward=lambda *args: args[2].item())),
        {"pp2": r"LambdaCallback.on_before_backward cannot be called"},
    ),
    "averaged with statistics": (
        partial(averaged, with_norm=True), {"pp2": "StochasticWeightAveraging cannot be used with"},
    ),
}  # fmt: skip
ALL = FEATURES | {name: feature for name, (feature, _) in WHOLE.items()}
#: Features of each layout; what does not depend on how a model is divided runs on one rank alone.
CASES = {
    "dp2": ("a smaller last batch", "evaluated", "rate found", "resumed", "finetuned"),
    "tp2": ("averaged", "excepted", "summarized", "finetuned"),
    "pp2": (
        "a smaller last batch",
        "fast_dev_run",
        "evaluated",
        "fitted again",
        "averaged",
        "rate found",
        "validation by steps",
        "resumed",
        "finetuned",
        "summarized",
    ),
}


class Stream(IterableDataset):
    """Numbers without a length."""

    def __iter__(self) -> Iterator[Tensor]:
        yield from torch.arange(12.0)


class SizedStream(Stream):
    def __len__(self) -> int:
        return 12


class GrowingBatches(BatchSampler):
    """Give batches of one, two, three and more samples."""

    def __iter__(self) -> Iterator[list[int]]:
        indices, size = list(self.sampler), 1
        while len(indices) >= size:
            yield indices[:size]
            indices, size = indices[size:], size + 1

    def __len__(self) -> int:
        return sum(1 for _ in self)


class Backwards(Sampler):
    def __len__(self) -> int:
        return 16

    def __iter__(self) -> Iterator[int]:
        return iter(range(15, -1, -1))


class Reads(pl.LightningModule):
    """Keep the samples of every step, and train a number towards them."""

    def __init__(self, skips: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.skips, self.seen = skips, list[Any]()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        samples = apply_to_collection(batch, Tensor, Tensor.tolist)
        self.seen.append((batch_idx, samples, self.trainer.accumulate_grad_batches))
        if self.skips and batch_idx % 2:
            return None
        tensors: list[Tensor] = []
        apply_to_collection(batch, Tensor, tensors.append)
        return torch.stack([(self.weight - part / 10).square().mean() for part in tensors]).sum()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.seen.append((dataloader_idx, batch_idx, batch.tolist()))
        self.log("checked", batch.mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([self.weight], lr=0.05)


class NumbersModule(pl.LightningDataModule):
    def train_dataloader(self) -> Any:
        return {"a": numbers(), "b": numbers(20, 2)}

    def val_dataloader(self) -> Any:
        return [numbers(6), numbers(4, 2)]


def numbers(size: int = 16, batch_size: int | None = 4, **options: Any) -> DataLoader:
    return DataLoader(list(torch.arange(float(size))), batch_size, **options)


#: Function that makes the data, and options of the Trainer.
DATA: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "shuffled by a generator": (
        lambda: numbers(shuffle=True, generator=torch.Generator().manual_seed(7)), {},
    ),
    "no distributed sampler": (
        lambda: numbers(shuffle=True, generator=torch.Generator().manual_seed(7)), {"use_distributed_sampler": False},
    ),
    "drop_last": (lambda: numbers(14, drop_last=True), {}),
    "a sampler": (lambda: numbers(sampler=Backwards()), {}),
    "single samples": (lambda: numbers(batch_size=None, sampler=Backwards()), {}),
    "batches that grow": (lambda: numbers(batch_size=1, batch_sampler=GrowingBatches(SequentialSampler(range(16)), 4, False)), {}),
    "a stream": (lambda: DataLoader(Stream(), 4), {"val_check_interval": 2}),
    "a stream of known length": (lambda: DataLoader(SizedStream(), 4), {}),
    "a list of tensors": (lambda: [torch.arange(4.0), torch.arange(4.0) + 4], {}),
    "a part of the batches": (lambda: numbers(32), {"limit_train_batches": 0.5}),
    "overfit_batches": (lambda: numbers(32, shuffle=True), {"overfit_batches": 2}),
    "loaders made again": (numbers, {"reload_dataloaders_every_n_epochs": 1}),
    "loaders in turn": (lambda: CombinedLoader({"long": numbers(), "short": numbers(8, 2)}, "max_size"), {}),
    "a data module": (NumbersModule, {"num_sanity_val_steps": 1}),
    "a schedule of accumulation": (lambda: numbers(20), {"schedule": {0: 1, 1: 2, 2: 4}, "max_epochs": 3}),
}  # fmt: skip
SHUFFLED = (lambda: numbers(13, shuffle=True), dict[str, Any]())


def read(data: Any, strategy: Any, size: int = 1, skips: bool = False) -> tuple[list[Any], float]:
    """Fit two epochs; return the samples of this rank and the final weight."""
    make, options = data
    options = {"max_epochs": 2, "use_distributed_sampler": True, **options}
    schedule, module = options.pop("schedule", None), Reads(skips)
    if isinstance(strategy, dict):
        strategy = {"microbatch_size": None, "job.check_microbatches": True, **strategy}
    job = Job(strategy=strategy, steps=-1, trainer=options)
    callbacks = [] if schedule is None else [GradientAccumulationScheduler(schedule)]
    trainer_of(job, size, *callbacks).fit(module, make())
    return module.seen, module.weight.item()


def two_ranks(rank: int, size: int, folder: Path) -> dict[Any, Any]:
    results: dict[Any, Any] = {}
    cases = [(layout, name) for layout, names in CASES.items() for name in names]
    cases += [(layout, name) for name, (_, refused) in WHOLE.items() for layout in refused]
    for layout, name in cases:
        bench = Bench(LAYOUTS[layout], size, folder / layout / name)
        try:
            results[layout, name] = ALL[name](bench)
        except UnsupportedError as error:
            results[layout, name] = str(error)
    for layout, strategy in (("ddp", "ddp"), ("dp2", {})):
        results[layout, "throughput"] = ALL["throughput"](Bench(strategy, size, folder / layout))
    for layout, strategy in (
        ("ddp", "ddp"),
        ("dp2", {}),
        ("tp2", {"tp": 2, "tensor_parallel_plan": {}}),
    ):
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
    return ALL[name](Bench(None, 1, Path(mkdtemp())))


def assert_close(actual: Any, expected: Any) -> None:
    # Lightning keeps its own sums over an epoch in float32.
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-7)


def numbers_of(results: Any) -> Any:
    return (
        {k: v for k, v in results.items() if k != "text"} if isinstance(results, dict) else results
    )


def assert_same(reports: Sequence[Any], expected: Any) -> None:
    for report in reports:
        assert isinstance(report, Report), report
        assert report.outcomes.get("text") == expected.outcomes.get("text")
        for name in ("losses", "norms", "metrics", "outcomes"):
            assert_close(numbers_of(getattr(report, name)), numbers_of(getattr(expected, name)))
    assert_close(joined(reports), joined([expected]))


@pytest.mark.parametrize("name", ALL)
def test_features_do_in_one_process_what_they_do_without_the_strategy(name, tmp_path):
    expected = alone(name)
    checked = {"job.check_microbatches": True}
    if name in ("averaged with statistics", "lambdas"):
        checked["microbatch_size"] = 8
    assert_same([ALL[name](Bench(checked, 1, tmp_path))], expected)


@pytest.mark.parametrize(("layout", "name"), [(k, name) for k, v in CASES.items() for name in v])
def test_features_do_on_two_ranks_what_they_do_in_one_process(ranks, layout, name):
    reports = [alone(name), *(results[layout, name] for results in ranks)]
    if (layout, name) == ("pp2", "summarized"):
        # A summary of a stage has no sizes.
        reports = [replace(report, outcomes=report.outcomes | {"text": ""}) for report in reports]
    assert_same(reports[1:], reports[0])


def test_throughput_is_that_of_ddp(ranks):
    for results in ranks:
        assert_same([results["dp2", "throughput"]], results["ddp", "throughput"])
    counted = ranks[0]["dp2", "throughput"].outcomes["ranks"]
    assert counted == pytest.approx([2.0] * len(counted))
    assert counted


def test_features_that_need_the_whole_model_are_refused(ranks):
    for name, (_, refused) in WHOLE.items():
        for layout, words in refused.items():
            assert all(re.search(words, str(results[layout, name])) for results in ranks), name


def test_pruning_that_resets_weights_and_batch_size_searches_are_refused(tmp_path: Path) -> None:
    bench = Bench({}, 1, tmp_path)
    with pytest.raises(UnsupportedError, match="Use use_lottery_ticket_hypothesis=False"):
        bench.fit(ModelPruning("l1_unstructured", amount=0.5))
    with pytest.raises(ValueError, match="not supported with distributed strategies"):
        pl.tuner.Tuner(bench.trainer()).scale_batch_size(Net())


@pytest.mark.parametrize("name", DATA)
def test_ranks_read_the_samples_that_they_read_under_ddp_or_in_one_process(ranks, name):
    expected = read(DATA[name], None)
    for rank in ranks:
        assert_close(rank["data", "dp2"][name], rank["data", "ddp"][name])
        assert_close(rank["data", "tp2"][name], expected)
    assert_close(read(DATA[name], {}), expected)


def test_one_data_rank_shuffles_all_samples_anew_in_every_epoch(ranks):
    first, second = (rank["shuffled", "tp2"] for rank in ranks)
    assert first == second
    samples = [sample for _, batch, _ in first[0] for sample in batch]
    epochs = samples[:13], samples[13:]
    assert all(sorted(epoch) == list(range(13)) != epoch for epoch in epochs)
    assert epochs[0] != epochs[1]
    for rank in ranks:
        assert rank["shuffled", "dp2"] == rank["shuffled", "ddp"]


def test_skipped_batches_are_lightnings_on_one_device_and_refused_on_several_ranks(ranks):
    data = (lambda: numbers(28), {"accumulate_grad_batches": 3})
    assert_close(read(data, {}, skips=True), read(data, None, skips=True))
    for rank in ranks:
        assert "training_step must return a loss on every rank" in rank["skipped"]
        assert "0.0 * output.sum()" in rank["skipped"]
