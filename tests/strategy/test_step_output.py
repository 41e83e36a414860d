"""Steps write to loggers and to standard output as in one process, whatever the layout."""

from __future__ import annotations

import contextlib
import io
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger, Logger
from lightning.pytorch.loggers.logger import rank_zero_experiment
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_megatron import MegatronStrategy
from lightning_megatron.errors import UnsupportedError
from lightning_megatron.strategy.logs.log_record import Recorder
from lightning_megatron.strategy.logs.output_calls import OutputCalls, Target
from lightning_megatron.strategy.logs.step_output import StepOutput
from tests.strategy.log_cases import Logs, make_loader
from tests.world import run_world

LAYOUTS: dict[str, Callable[[], Any]] = {
    "tp2": lambda: MegatronStrategy(
        tp=2, tensor_parallel_plan={"blocks.0": "replicate"}, microbatch_size=1
    ),
    "pp2": lambda: MegatronStrategy(pp=2, pipeline_plan={"blocks": "blocks"}, microbatch_size=1),
}


class Experiment:
    def __init__(self) -> None:
        self.rows: list[Any] = []
        self.summary: dict[str, Any] = {}
        self.parts = {"text": self}

    def add_text(self, tag: str, text: str, step: int) -> None:
        self.rows.append((tag, text, step))

    def add_scalar(self, tag: str, value: Tensor, step: int) -> None:
        self.rows.append((tag, float(value), step))

    def add_image(self, tag: str, image: Tensor, step: int) -> None:
        self.rows.append((tag, image.tolist(), step))


class ListLogger(Logger):
    """Logger that keeps what it gets on rank 0."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = Experiment()

    @property
    def name(self) -> str:
        return "list"

    @property
    def version(self) -> str:
        return f"of rank {rank_zero_only.rank}"

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        return self.kept

    @rank_zero_only
    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.kept.rows.append((dict(metrics), step))

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self.kept.rows.append(("parameters", params))

    @rank_zero_only
    def log_table(self, key: str, data: list[Any]) -> None:
        self.kept.rows.append((key, data))


@rank_zero_only
def write_line(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


class Writes(Logs):
    """Write in every way after the call of the model, and before it."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def write(self, batch: list[Tensor], loss: Tensor, name: str) -> None:
        assert isinstance(self.logger, ListLogger)
        step = self.global_step
        for logger in self.loggers:
            logger.log_metrics({f"{name}/direct": loss.item(), "all": 2.0}, step=step)
        experiment = self.logger.experiment
        experiment.add_text(f"{name}/text", f"first sample {batch[1][0].item():.6f}", step)
        experiment.add_image("image", batch[0][0], step=step)
        for number in range(2):
            experiment.add_scalar(f"{name}/{number}", loss * number, step)
        experiment.parts["text"].add_text(self.logger.version, "item", step)
        experiment.summary["version"] = self.logger.version
        self.logger.log_table("table", data=[[step, name]])
        self.print(name, step, self.logger.version)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.logger.experiment.add_text("before", "the model", batch_idx)
        loss = self.loss(batch)
        self.log("loss", loss)
        self.write(batch, loss, "train")
        if self.trainer.is_global_zero and self.global_rank == 0:
            write_line(self.folder / "lines", f"{batch_idx} ")
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.write(batch, self.loss(batch), "validation")

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.loss(batch)
        print("in a test")

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.logger.experiment.add_scalar("predicted", loss, batch_idx)
        return loss


def outcome(strategy: Any, devices: int, folder: Path) -> dict[str, Any]:
    """Fit, test and predict, and return what a step has written on this rank."""
    warnings.simplefilter("ignore")
    seed_everything(1, verbose=False)
    logger = ListLogger()
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        precision="64-true",
        max_epochs=1,
        limit_train_batches=2,
        limit_val_batches=2,
        enable_checkpointing=False,
        use_distributed_sampler=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        logger=[logger, CSVLogger(folder, "csv", version=0)],
    )
    module = Writes(folder)
    folder.mkdir(exist_ok=True)
    loader: DataLoader = make_loader((0, 1))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        trainer.fit(module, loader, loader)
    after_fit = len(logger.kept.rows)
    trainer.predict(module, loader)
    tested = io.StringIO()
    with contextlib.redirect_stdout(tested):
        trainer.test(module, loader, verbose=False)
    csv = folder / "csv" / "version_0" / "metrics.csv"
    return {
        "rows": logger.kept.rows[:after_fit],
        "predicted": logger.kept.rows[after_fit:],
        "summary": logger.kept.summary,
        "printed": printed.getvalue(),
        "tested": tested.getvalue().count("in a test"),
        "csv": csv.read_text() if rank_zero_only.rank == 0 else "",
        "lines": (folder / "lines").read_text() if rank_zero_only.rank == 0 else "",
        "left": [name for name in ("print", "log") if name in vars(module)],
        "kind": type(logger) is ListLogger,
    }


def two_ranks(rank: int, size: int, folder: Path) -> dict[str, Any]:
    return {name: outcome(layout(), size, folder / name) for name, layout in LAYOUTS.items()}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return outcome("auto", 1, tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_world(two_ranks, 2, tmp_path_factory.mktemp("two"))


def rounded(node: Any) -> Any:
    if isinstance(node, float):
        return round(node, 10)
    if isinstance(node, dict):
        return {key: rounded(value) for key, value in node.items()}
    return [rounded(value) for value in node] if isinstance(node, list | tuple) else node


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loggers_get_the_calls_of_steps_as_often_as_in_one_process(
    of_ranks: list[dict[str, Any]], expected: dict[str, Any], layout: str
) -> None:
    first, second = (results[layout] for results in of_ranks)
    assert len(expected["rows"]) > 20
    assert rounded(first["rows"]) == rounded(expected["rows"])
    assert rounded(first["predicted"]) == rounded(expected["predicted"])
    assert first["summary"] == expected["summary"] == {"version": "of rank 0"}
    assert second["rows"] == second["predicted"] == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_print_of_the_module_writes_once_for_a_batch(
    of_ranks: list[dict[str, Any]], expected: dict[str, Any], layout: str
) -> None:
    first, second = (results[layout] for results in of_ranks)
    assert first["printed"] == expected["printed"]
    assert "train 1 of rank 0" in first["printed"]
    assert second["printed"] == ""
    assert first["left"] == []
    assert first["kind"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_files_of_loggers_are_those_of_one_process(
    of_ranks: list[dict[str, Any]], expected: dict[str, Any], layout: str
) -> None:
    def rows(text: str) -> list[Any]:
        return [
            [round(float(cell), 10) if cell else None for cell in line.split(",")]
            for line in text.splitlines()[1:]
        ]

    assert rows(of_ranks[0][layout]["csv"]) == rows(expected["csv"])
    assert len(rows(expected["csv"])) > 2


def test_code_for_rank_zero_runs_once_for_each_microbatch(of_ranks: list[dict[str, Any]]) -> None:
    """A batch has four microbatches; the probe, which has no values, runs the line once more."""
    lines = {layout: of_ranks[0][layout]["lines"].split() for layout in LAYOUTS}
    assert lines["pp2"].count("1") == lines["tp2"].count("1") == 4


def test_trials_print_nothing(of_ranks: list[dict[str, Any]]) -> None:
    """Four batches of four microbatches; only the last stage runs the code after the model."""
    assert [results["tp2"]["tested"] for results in of_ranks] == [16, 16]
    assert [results["pp2"]["tested"] for results in of_ranks] == [0, 16]


class Unpicklable(Logs):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.logger.log_metrics({"lock": threading.Lock()})
        return loss


def test_arguments_that_cannot_be_kept_are_refused_with_their_line() -> None:
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        strategy=MegatronStrategy(microbatch_size=1),
        max_epochs=1,
        logger=ListLogger(),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with pytest.raises(UnsupportedError, match=r"self\.logger\.log_metrics .*test_step_output\.py"):
        trainer.fit(Unpicklable(), make_loader((0, 1)))


def test_a_value_that_differs_between_microbatches_is_averaged_over_their_samples() -> None:
    calls = OutputCalls()
    module = Logs()
    for run, (size, value) in enumerate([(3, 1.0), (1, 5.0)]):
        metrics = {"value": value, "tensor": torch.tensor([value]), "step": 7, "text": f"{run}"}
        calls.keep(Target(0, ()), ((metrics,), {"step": 7}), module, run, size)
    (merged,) = calls.merged(None)
    assert merged.args == ({"value": 2.0, "tensor": torch.tensor([2.0]), "step": 7, "text": "0"},)
    assert merged.kwargs == {"step": 7}
    (by_tokens,) = calls.merged([1, 3])
    assert by_tokens.args[0]["value"] == 4.0


class RunError(Exception):
    """Error of a package whose run exists on rank 0 only."""

    __module__ = "wandb.errors"


def test_an_error_in_code_for_rank_zero_says_which_rank_has_run_it() -> None:
    strategy = MegatronStrategy()
    trainer = SimpleNamespace(strategy=strategy, loggers=[])
    module: Any = SimpleNamespace(trainer=trainer)
    mesh: Any = SimpleNamespace(pp=SimpleNamespace(size=2, ranks=(7, 0)), rank=0)
    executor: Any = SimpleNamespace(is_probe=False, is_repeated=False)

    def fail(error: Exception) -> None:
        with StepOutput(mesh).of(module, Recorder(), executor):
            assert strategy.global_rank == rank_zero_only.rank == 7
            raise error

    def notes_of(error: Exception) -> str:
        with pytest.raises(type(error)):
            fail(error)
        assert strategy.global_rank == rank_zero_only.rank == 0
        return " ".join(error.__notes__)

    assert "Rank 0 counts as rank 7 in this step" in notes_of(AttributeError("writer"))
    assert "Use self.logger.experiment.log(...)" in notes_of(RunError("call init first"))
