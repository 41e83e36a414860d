"""What steps and hooks log, write to loggers and print is what they do with Lightning's strategies."""

from __future__ import annotations

import contextlib
import io
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.loggers import CSVLogger, Logger
from lightning.pytorch.loggers.logger import rank_zero_experiment
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_megatron import TrainingMetrics
from lightning_megatron.errors import UnsupportedError
from tests.fits import Job, loader_of, trainer_of
from tests.world import run_world

pytestmark = pytest.mark.filterwarnings("ignore")

PP: dict[str, Any] = {"pp": 2, "pipeline_plan": {"blocks": "blocks"}, "microbatch_size": 4}
#: Strategies under which all hooks log; with stages, hooks of the backward pass are refused.
LOGGED: dict[str, Any] = {
    "ddp": "ddp",
    "dp2": {},
    "tp2": {"tp": 2, "tensor_parallel_plan": {}, "microbatch_size": 4},
    "pp2": PP,
}
#: Strategies under which steps write.
WRITTEN: dict[str, Any] = {
    "tp2": {
        **{"tp": 2, "tensor_parallel_plan": {"blocks.0": "replicate"}, "microbatch_size": 1},
        "job.check_microbatches": True,
    },
    "pp2": {**PP, "microbatch_size": 1, "job.check_microbatches": True},
}
#: Options of ``log`` by name.
WAYS: dict[str, dict[str, Any]] = {
    "step": {"on_step": True, "on_epoch": False},
    "both": {"on_step": True, "on_epoch": True},
    "epoch": {"on_step": False, "on_epoch": True},
    "min": {"on_step": True, "on_epoch": True, "reduce_fx": min},
    "synced": {"on_step": True, "on_epoch": True, "sync_dist": True},
    "sum": {"on_step": False, "on_epoch": True, "reduce_fx": "sum", "sync_dist": True},
    "max": {"on_step": True, "on_epoch": True, "reduce_fx": torch.max, "sync_dist": True},
    "weighed": {"on_step": False, "on_epoch": True, "batch_size": 3, "sync_dist": True},
    "of rank 0": {"on_step": True, "on_epoch": False, "rank_zero_only": True},
}
BY_EPOCH_ONLY = (
    "on_train_start",
    "on_train_epoch_start",
    "on_train_epoch_end",
    "on_validation_epoch_start",
    "on_validation_epoch_end",
)
HOOKS = (
    "on_train_batch_start",
    "on_train_batch_end",
    "on_before_zero_grad",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_validation_batch_start",
    "on_validation_batch_end",
    *BY_EPOCH_ONLY,
)


class Block(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 8)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + torch.tanh(super().forward(hidden))


class Logs(pl.LightningModule):
    """Log the loss in every step, in every way."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.last = nn.Linear(8, 1)

    def loss(self, batch: list[Tensor]) -> Tensor:
        hidden = self.first(batch[0])
        for block in self.blocks:
            hidden = block(hidden)
        return F.mse_loss(self.last(hidden), batch[1])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        log_all(self, "training_step", loss)
        self.log_dict({"pair/a": loss, "pair/b": loss * 2}, sync_dist=True, on_epoch=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        loss = self.loss(batch)
        log_all(self, "validation_step", loss)
        if dataloader_idx == 0:
            self.log("plain", loss, add_dataloader_idx=False)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def log_all(module: Any, prefix: str, value: float | Tensor, is_epoch: bool = False) -> None:
    for way, options in WAYS.items():
        if not (is_epoch and options["on_step"]):
            module.log(f"{prefix}/{way}", value, **options)


def add_logging_hooks(owner: Any, hooks: tuple[str, ...], owner_name: str, factor: int) -> None:
    """Let an object's hooks log their number of calls times a factor that differs between ranks."""
    counts = dict.fromkeys(hooks, 0)
    for hook in hooks:

        def log_count(*args: Any, _hook: str = hook, **kwargs: Any) -> None:
            counts[_hook] += 1
            module = owner if isinstance(owner, pl.LightningModule) else args[1]
            number = float(counts[_hook] * factor)
            log_all(module, f"{owner_name}.{_hook}", number, _hook in BY_EPOCH_ONLY)

        setattr(type(owner), hook, staticmethod(log_count))


def data() -> TensorDataset:
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(2))
    return TensorDataset(x, x.sum(1, keepdim=True))


def trainer(strategy: Any, size: int, *callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    options = {"log_every_n_steps": 1, "gradient_clip_val": None, **options}
    return trainer_of(Job(strategy=strategy, steps=-1, trainer=options), size, *callbacks)


def rows_of(folder: Path) -> list[dict[str, float]]:
    """Return the rows of a CSVLogger."""
    text = (folder / "csv" / "version_0" / "metrics.csv").read_text().splitlines()
    names = text[0].split(",")
    pairs = [zip(names, row.split(","), strict=True) for row in text[1:]]
    return [{name: float(value) for name, value in row if value} for row in pairs]


def log(
    strategy: Any, size: int, folder: Path, has_backward: bool = True
) -> tuple[dict[str, float], list[dict[str, float]]]:
    """Fit, and return the metrics of callbacks and the rows of the logger."""
    hooks = (*HOOKS, "on_before_backward") if has_backward else HOOKS
    module, callback = type("Everywhere", (Logs,), {})(), type("Too", (pl.Callback,), {})()
    logger = CSVLogger(folder, "csv", version=0)
    options = {"accumulate_grad_batches": 2, "max_epochs": 2, "logger": logger}
    runner = trainer(strategy, size, callback, **options)
    place = getattr(runner, "distributed_sampler_kwargs", None) or {"rank": 0}
    add_logging_hooks(module, hooks, "module", 1 + place["rank"])
    add_logging_hooks(callback, hooks, "callback", 1 + place["rank"])
    loader = loader_of(data(), 4, runner)
    runner.fit(module, loader, [loader, loader])
    metrics = {name: float(value) for name, value in runner.callback_metrics.items()}
    return metrics, rows_of(folder) if runner.is_global_zero else []


class Experiment:
    def __init__(self) -> None:
        self.rows: list[Any] = []
        self.parts = {"text": self}

    def add(self, tag: str, value: Any, step: int) -> None:
        self.rows.append((tag, value.tolist() if isinstance(value, Tensor) else value, step))

    add_text, add_scalar, add_image = add, add, add


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

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        pass

    @rank_zero_only
    def log_table(self, key: str, data: list[Any]) -> None:
        self.kept.rows.append((key, data))


class Writes(Logs):
    """Write in every way after the call of the model, and before it."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def write(self, batch: list[Tensor], loss: Tensor, name: str) -> None:
        logger: Any = self.logger
        step, experiment = self.global_step, logger.experiment
        for each in self.loggers:
            each.log_metrics({f"{name}/direct": loss.item(), "all": 2.0}, step=step)
        experiment.add_text(f"{name}/text", f"first sample {batch[1][0].item():.6f}", step)
        experiment.add_image("image", batch[0][0], step=step)
        for number in range(2):
            experiment.add_scalar(f"{name}/{number}", loss * number, step)
        experiment.parts["text"].add_text(logger.version, "item", step)
        logger.log_table("table", data=[[step, name]])
        self.print(name, step, logger.version)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.logger.experiment.add_text("before", "the model", batch_idx)
        loss = self.loss(batch)
        self.log("loss", loss)
        self.write(batch, loss, "train")
        if self.trainer.is_global_zero and self.global_rank == 0:
            with (self.folder / "lines").open("a") as file:
                file.write(f"{batch_idx} ")
        return loss

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.loss(batch)
        print("in a test")

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.logger.experiment.add_scalar("predicted", loss, batch_idx)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.write(batch, self.loss(batch), "validation")


def write(strategy: Any, size: int, folder: Path) -> dict[str, Any]:
    """Fit, predict and test, and return what the steps have written on this rank."""
    logger, module = ListLogger(), Writes(folder)
    folder.mkdir(exist_ok=True)
    options = dict.fromkeys(("limit_train_batches", "limit_val_batches"), 2)
    options |= {"num_sanity_val_steps": 0, "max_epochs": 1}
    loggers = [logger, CSVLogger(folder, "csv", version=0)]
    runner = trainer(strategy, size, logger=loggers, **options)
    loader = DataLoader(data(), 4)
    printed, tested = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed):
        runner.fit(module, loader, loader)
    runner.predict(module, loader)
    with contextlib.redirect_stdout(tested):
        runner.test(module, loader, verbose=False)
    is_first = rank_zero_only.rank == 0
    return {
        "rows": logger.kept.rows,
        "printed": printed.getvalue(),
        "tested": tested.getvalue().count("in a test"),
        "csv": rows_of(folder) if is_first else [],
        "lines": (folder / "lines").read_text().split() if is_first else [],
    }


def two_ranks(rank: int, size: int, folder: Path) -> tuple[Any, Any]:
    logged = {}
    for name, strategy in LOGGED.items():
        logged[name] = log(strategy, size, folder / name, has_backward=name != "pp2")
        dist.barrier()
    written = {name: write(layout, size, folder / f"{name} w") for name, layout in WRITTEN.items()}
    return logged, written


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Any, Any]]:
    return run_world(two_ranks, 2, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return write(None, 1, tmp_path_factory.mktemp("one"))


def assert_same_logs(actual: Any, expected: Any) -> None:
    assert len(expected[0]) > 100
    assert actual[0] == pytest.approx(expected[0], rel=1e-6)
    if actual[1]:
        assert actual[1] == [pytest.approx(row, rel=1e-6) for row in expected[1]]


def test_logs_are_those_of_ddp_or_of_one_process(ranks: list[Any], tmp_path: Path) -> None:
    whole = log(None, 1, tmp_path / "whole")
    staged = log(None, 1, tmp_path / "staged", has_backward=False)
    assert_same_logs(log({"microbatch_size": 4}, 1, tmp_path / "ours"), whole)
    for logged, _ in ranks:
        assert_same_logs(logged["dp2"], logged["ddp"])
        assert_same_logs(logged["tp2"], whole)
        assert_same_logs(logged["pp2"], staged)


def rounded(node: Any) -> Any:
    if isinstance(node, float):
        return round(node, 10)
    if isinstance(node, dict):
        return {key: rounded(value) for key, value in node.items()}
    return [rounded(value) for value in node] if isinstance(node, list | tuple) else node


@pytest.mark.parametrize("layout", WRITTEN)
def test_steps_write_to_loggers_files_and_standard_output_once_for_a_batch(ranks, expected, layout):
    first, second = (written[layout] for _, written in ranks)
    assert len(expected["rows"]) > 20
    for name in ("rows", "csv"):
        assert rounded(first[name]) == rounded(expected[name]), name
        assert second[name] == []
    assert first["printed"] == expected["printed"]
    assert "train 1 of rank 0" in first["printed"]
    assert second["printed"] == ""
    # A batch has four microbatches; the probe, which has no values, runs the line once more.
    assert first["lines"].count("1") == 4


def test_trials_print_nothing(ranks: list[Any]) -> None:
    """Four batches of four microbatches; only the last stage runs the code after the model."""
    assert [written["tp2"]["tested"] for _, written in ranks] == [16, 16]
    assert [written["pp2"]["tested"] for _, written in ranks] == [0, 16]


def test_an_unknown_reduction_raises_lightnings_error() -> None:
    class Strange(Logs):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            loss = self.loss(batch)
            self.log("strange", loss, on_epoch=True, reduce_fx=lambda values: values.median())
            return loss

    for strategy in (None, {}):
        with pytest.raises(MisconfigurationException, match="reduce_fx"):
            trainer(strategy, 1, max_epochs=1).fit(Strange(), DataLoader(data(), 4))


def test_arguments_that_cannot_be_kept_are_refused_with_their_line() -> None:
    class Unpicklable(Logs):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            loss = self.loss(batch)
            self.logger.log_metrics({"lock": threading.Lock()})
            return loss

    runner = trainer({"microbatch_size": 1}, 1, logger=ListLogger(), max_epochs=1)
    with pytest.raises(UnsupportedError, match=r"self\.logger\.log_metrics .*test_logs\.py"):
        runner.fit(Unpicklable(), DataLoader(data(), 4))


class Serviced(Logs):
    """Log by Lightning, and write text and images by the experiment of each service."""

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"depth": 2, "optimizer": {"lr": 0.05}})

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss)
        image = batch[0][0].reshape(2, 2).sigmoid()
        text = f"the first sample of batch {batch_idx}"
        for logger in self.loggers:
            kind, experiment = type(logger).__name__, logger.experiment
            if kind == "TensorBoardLogger":
                experiment.add_scalar("direct", loss, self.global_step)
                experiment.add_text("text", text, self.global_step)
                experiment.add_image("image", image, self.global_step, dataformats="HW")
            elif kind == "WandbLogger":
                experiment.log({"direct": loss.item()})
                logger.log_text("text", columns=["text"], data=[[text]])
                logger.log_image("image", [image.numpy()])
            elif kind == "MLFlowLogger":
                experiment.log_metric(logger.run_id, "direct", loss.item(), step=self.global_step)
                experiment.log_text(logger.run_id, text, f"text{self.global_step}.txt")
                pixels = (image * 255).byte().numpy()
                experiment.log_image(logger.run_id, pixels, f"image{self.global_step}.png")
        return loss


#: On four ranks, all of which read the same batches.
SERVED: dict[str, Any] = {
    "dp4": {},
    "tp2": WRITTEN["tp2"],
    "pp2": WRITTEN["pp2"],
    "tp2 pp2": {**WRITTEN["pp2"], **WRITTEN["tp2"]},
}
SERVICES = ("csv", "tensorboard", "wandb", "mlflow")
#: What is compared of every service: values of the last step, and the norm of the whole gradient.
NAMES = ("loss", "direct", "train/gradient_norm")


def logger_of(service: str, folder: Path) -> Any:
    from lightning.pytorch import loggers

    if service == "csv":
        return CSVLogger(folder, "csv")
    if service == "tensorboard":
        return loggers.TensorBoardLogger(folder)
    if service == "wandb":
        return loggers.WandbLogger(save_dir=folder, offline=True)
    return loggers.MLFlowLogger(tracking_uri=f"file:{folder}/mlruns")


def read_csv(logger: Any, folder: Path) -> tuple[int, Any]:
    last = rows_of(folder)[-1]
    hparams = (Path(logger.log_dir) / "hparams.yaml").read_text()
    return len(list((folder / "csv").iterdir())), (
        {n: last[n] for n in NAMES if n in last},
        hparams,
    )


def read_tensorboard(logger: Any, folder: Path) -> tuple[int, Any]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(logger.log_dir).Reload()
    values = {name: events.Scalars(name)[-1].value for name in NAMES}
    images = [image.encoded_image_string for image in events.Images("image")]
    texts = [
        event.tensor_proto.string_val[0].decode() for event in events.Tensors("text/text_summary")
    ]
    hparams = (Path(logger.log_dir) / "hparams.yaml").read_text()
    return len(list(folder.glob("lightning_logs/*"))), (values, images, texts, hparams)


def read_wandb(logger: Any, folder: Path) -> tuple[int, Any]:
    run = logger.experiment
    values = {name: run.summary[name] for name in NAMES}
    hparams = dict(run.config)
    run.finish()
    media = [*folder.glob("wandb/offline-run-*/files/media/*/*")]
    contents = sorted(path.read_bytes() for path in media)
    return len(list(folder.glob("wandb/offline-run-*"))), (values, contents, hparams)


def read_mlflow(logger: Any, folder: Path) -> tuple[int, Any]:
    client = logger.experiment
    runs = client.search_runs([logger.experiment_id])
    kept = [folder / "mlruns" / logger.experiment_id / logger.run_id / "artifacts"]
    files = {path.name: path.read_bytes() for path in sorted(kept[0].iterdir())}
    metrics = runs[0].data.metrics
    return len(runs), ({n: metrics[n] for n in NAMES}, files, runs[0].data.params)


READ = {
    "csv": read_csv,
    "tensorboard": read_tensorboard,
    "wandb": read_wandb,
    "mlflow": read_mlflow,
}


def served(strategy: Any, size: int, folder: Path, services: list[str]) -> dict[str, Any]:
    """Fit with all loggers; return what rank 0 has written to each of them, and how many runs."""
    folder.mkdir()
    loggers = [logger_of(service, folder) for service in services]
    runner = trainer(strategy, size, TrainingMetrics(), logger=loggers, max_epochs=1)
    runner.fit(Serviced(), DataLoader(data(), 4))
    if not runner.is_global_zero:
        # mlflow describes its folder as soon as it has a client, without any run.
        files = [path.name for path in folder.rglob("*") if path.is_file()]
        assert set(files) <= {"meta.yaml"}
        return {}
    for logger in loggers:
        logger.finalize("success")
    return {
        service: READ[service](logger, folder)
        for service, logger in zip(services, loggers, strict=True)
    }


def served_on_four_ranks(
    rank: int, size: int, folder: Path, services: list[str]
) -> dict[str, dict[str, Any]]:
    return {
        name: served(layout, size, folder / f"{name} {rank}", services)
        for name, layout in SERVED.items()
    }


@pytest.fixture(scope="module")
def served_ranks(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("served")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_SILENT", "true")
        # Its folder of files, which newer versions of mlflow open by this permission alone.
        patch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        services = ["csv", *(one for one in SERVICES[1:] if find_spec(one))]
        one = served({}, 1, folder / "one", services)
        return one, run_world(served_on_four_ranks, 4, folder, services)


@pytest.mark.extras
@pytest.mark.parametrize("service", SERVICES)
def test_loggers_get_values_texts_images_and_settings_of_one_process_in_one_run(
    service, served_ranks
):
    if service != "csv":
        pytest.importorskip(service)
    (num_runs, (values, *rest)), ranks = served_ranks[0][service], served_ranks[1]
    assert num_runs == 1
    assert {"loss", "train/gradient_norm"} <= set(values)
    for name in SERVED:
        count, (ours, *others) = ranks[0][name][service]
        assert count == 1, name
        assert ours == pytest.approx(values, rel=1e-5), name
        assert others == rest, name
        assert [rank[name] for rank in ranks[1:]] == [{}] * 3
