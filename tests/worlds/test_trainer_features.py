"""What Lightning's Trainer offers does under every layout what it does in one process, and every
rank reads the samples that it reads under ``ddp``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    Checkpoint,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateFinder,
    ModelPruning,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import CombinedLoader
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    Sampler,
    TensorDataset,
)

from lightning_megatron import UnsupportedError
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

    def test_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.log_dict({"test_loss": loss, "test_half": loss / 2}, sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.5)


class Watch(pl.Callback):
    """Keep the rates of batches, and where the fit ended."""

    def __init__(self) -> None:
        self.outcomes: dict[str, Any] = {"rates": []}

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


FEATURES: dict[str, Feature] = {
    "a smaller last batch": lambda bench: bench.fit(data=partial(points, 28)),
    "fast_dev_run": lambda bench: bench.fit(trainer={"fast_dev_run": True}),
    "evaluated": evaluated,
    "fitted again": fitted_again,
    "averaged": averaged,
    "excepted": excepted,
    "rate found": with_callback(lambda: LearningRateFinder(1e-4, 0.3, num_training_steps=10)),
}
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
    "dp2": ("a smaller last batch", "evaluated", "rate found"),
    "tp2": ("averaged", "excepted"),
    "pp2": (
        *("a smaller last batch", "fast_dev_run", "evaluated", "fitted again", "averaged"),
        "rate found",
    ),
}


class Stream(IterableDataset):
    """Numbers without a length."""

    def __iter__(self) -> Iterator[Tensor]:
        yield from torch.arange(12.0)


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
    "a sampler": (lambda: numbers(sampler=Backwards()), {}),
    "a stream": (lambda: DataLoader(Stream(), 4), {"val_check_interval": 2}),
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
        strategy = {"microbatch_size": None, "check_microbatches": True, **strategy}
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
    for layout, strategy in (
        *(("ddp", "ddp"), ("dp2", {})),
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


def assert_same(reports: Sequence[Any], expected: Any) -> None:
    for report in reports:
        assert isinstance(report, Report), report
        for name in ("losses", "norms", "metrics", "outcomes"):
            assert_close(getattr(report, name), getattr(expected, name))
    assert_close(joined(reports), joined([expected]))


@pytest.mark.parametrize("name", ALL)
def test_features_do_in_one_process_what_they_do_without_the_strategy(name, tmp_path):
    expected = alone(name)
    checked = {"check_microbatches": True}
    if name in ("averaged with statistics", "lambdas"):
        checked["microbatch_size"] = 8
    assert_same([ALL[name](Bench(checked, 1, tmp_path))], expected)


@pytest.mark.parametrize(("layout", "name"), [(k, name) for k, v in CASES.items() for name in v])
def test_features_do_on_two_ranks_what_they_do_in_one_process(ranks, layout, name):
    assert_same([results[layout, name] for results in ranks], alone(name))


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
