"""Cases of Trainer features, and their results under several strategies."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from lightning import Trainer, seed_everything
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_megatron import MegatronStrategy
from tests.strategy.tiny import Stream, TinyLM, loader


class StepRecord(Callback):
    """Record the steps of validations, and the losses and learning rates of batches."""

    def __init__(self) -> None:
        self.val_steps: list[int] = []
        self.batch_losses: list[float] = []
        self.rates: list[float] = []

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        self.val_steps.append(trainer.global_step)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.batch_losses.append(float(outputs["loss"]))
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])


class Bench:
    """Make trainers of one kind.

    Args:
        devices: Number of processes.
        strategy: None, ``ddp``, or arguments of MegatronStrategy.
        folder: Folder of the checkpoints.
        compares: Whether a fit under MegatronStrategy first compares the microbatches of a batch
            with the full batch.
    """

    def __init__(self, devices: int, strategy: Any, folder: Path, compares: bool) -> None:
        self.devices, self.strategy, self.folder = devices, strategy, folder
        self.compares = compares
        sizes = strategy if isinstance(strategy, dict) else {}
        self.num_data = devices // (sizes.get("tp", 1) * sizes.get("pp", 1))

    def trainer(self, **options: Any) -> Trainer:
        """Return a trainer on the CPU without logger, progress bar and summary."""
        seed_everything(3, verbose=False)
        strategy = self.strategy
        if isinstance(strategy, dict):
            strategy = MegatronStrategy(**strategy, check_microbatches=self.compares)
        quiet: dict[str, Any] = {
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
        }
        quiet |= {
            "enable_model_summary": False,
            "accelerator": "cpu",
            "log_every_n_steps": 1,
            "max_epochs": 2,
            "precision": "64-true",
        }
        quiet |= {"use_distributed_sampler": self.num_data > 1, "callbacks": [StepRecord()]}
        return Trainer(**{**quiet, **options}, strategy=strategy or "auto", devices=self.devices)

    def loaders(self, batch_size: int = 4, num_samples: int = 16) -> tuple[DataLoader, DataLoader]:
        """Return loaders of training and validation data; together, all data-parallel ranks get the
        same batches for every number of ranks.
        """
        return loader(num_samples, batch_size // self.num_data), loader(
            8, 4 // self.num_data, seed=2
        )


def outcome(trainer: Trainer, model: TinyLM) -> dict[str, Any]:
    """Return the results that must not depend on the strategy."""
    record = next(callback for callback in trainer.callbacks if isinstance(callback, StepRecord))
    metrics = {
        name: float(value) for name, value in trainer.callback_metrics.items() if name != "largest"
    }
    metrics.pop("count", None)
    return {
        "global_step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "metrics": metrics,
        "val_steps": record.val_steps,
        "losses": record.batch_losses,
        "rates": record.rates,
        "hooks": {name: model.hooks.count(name) for name in set(model.hooks)},
    }


def fit(
    bench: Bench,
    model: TinyLM | None = None,
    batch_size: int = 4,
    num_samples: int = 16,
    **options: Any,
) -> Any:
    """Fit a model, and return its results."""
    model = model or TinyLM()
    trainer = bench.trainer(**options)
    trainer.fit(model, *bench.loaders(batch_size, num_samples))
    return outcome(trainer, model)


def early_stopping(bench: Bench) -> Any:
    stopping = EarlyStopping("val_loss", patience=0, min_delta=0.3)
    return {
        **fit(bench, callbacks=[StepRecord(), stopping], max_epochs=6),
        "stopped": stopping.stopped_epoch,
    }


def checkpoints(bench: Bench) -> Any:
    folder = bench.folder / "monitored"
    saver = ModelCheckpoint(
        folder, "{step}-{val_loss:.4f}", monitor="val_loss", save_top_k=2, save_last=True
    )
    result = fit(bench, callbacks=[StepRecord(), saver], enable_checkpointing=True, max_epochs=4)
    return {
        **result,
        "best": float(saver.best_model_score),
        "names": sorted(path.name for path in folder.iterdir()),
    }


def resume(bench: Bench) -> Any:
    path = bench.folder / "middle.ckpt"
    trainer, model = bench.trainer(max_steps=3, gradient_clip_val=0.5), TinyLM()
    trainer.fit(model, *bench.loaders())
    trainer.save_checkpoint(path)
    resumed_model, trainer = TinyLM(), bench.trainer(max_epochs=2, gradient_clip_val=0.5)
    trainer.fit(resumed_model, *bench.loaders(), ckpt_path=path)
    result = outcome(trainer, resumed_model)
    # The second trainer has a new callback, so the results are those of the resumed steps alone.
    validated = bench.trainer().validate(
        TinyLM(), bench.loaders()[1], ckpt_path=path, verbose=False
    )
    return {**result, "validated": validated}


def evaluation(bench: Bench) -> Any:
    model, trainer = TinyLM(), bench.trainer(max_epochs=1)
    validated = trainer.validate(model, bench.loaders()[1], verbose=False)
    trainer.fit(model, *bench.loaders())
    tested = trainer.test(model, bench.loaders()[1], verbose=False)
    predicted = trainer.predict(model, bench.loaders()[1])
    tokens = [int(batch.sum()) for batch in predicted]
    return {
        **outcome(trainer, model),
        "validated": validated,
        "tested": tested,
        "predicted": tokens,
    }


def second_fit(bench: Bench) -> Any:
    model, trainer = TinyLM(), bench.trainer(max_epochs=1)
    trainer.fit(model, *bench.loaders())
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, *bench.loaders())
    first = outcome(trainer, model)
    again = bench.trainer(max_epochs=1)
    again.fit(model, *bench.loaders())
    return {"first": first, "again": outcome(again, model)}


def iterable(bench: Bench) -> Any:
    model, trainer = TinyLM(), bench.trainer(max_epochs=2, val_check_interval=3)
    rank = trainer.strategy.distributed_sampler_kwargs["rank"] if bench.num_data > 1 else 0
    data = DataLoader(Stream(rank, bench.num_data), batch_size=4 // bench.num_data)
    trainer.fit(model, data, bench.loaders()[1])
    return outcome(trainer, model)


def continue_others(bench: Bench) -> Any:
    """Continue from the checkpoints of other strategies and layouts, Lightning's files included."""
    results = {}
    for path in sorted(bench.folder.parent.glob("*/middle.ckpt")):
        validated = bench.trainer().validate(
            TinyLM(), bench.loaders()[1], ckpt_path=path, verbose=False
        )
        results[path.parent.name] = {"validated": validated}
        if path.is_dir():
            trainer, model = bench.trainer(max_epochs=2, gradient_clip_val=0.5), TinyLM()
            trainer.fit(model, *bench.loaders(), ckpt_path=path)
            results[path.parent.name] |= outcome(trainer, model)
    return results


CASES: dict[str, Callable[[Bench], Any]] = {
    "plain": fit,
    "limits": lambda bench: fit(bench, limit_train_batches=3, limit_val_batches=1),
    "val_check_interval": lambda bench: fit(bench, val_check_interval=0.5, num_sanity_val_steps=0),
    "val_check_by_step": lambda bench: fit(
        bench, val_check_interval=3, check_val_every_n_epoch=None, max_steps=7
    ),
    "accumulate": lambda bench: fit(bench, accumulate_grad_batches=3),
    "clip_norm": lambda bench: fit(bench, gradient_clip_val=0.05),
    "clip_value": lambda bench: fit(
        bench, gradient_clip_val=0.001, gradient_clip_algorithm="value"
    ),
    "last_batch_smaller": lambda bench: fit(bench, num_samples=14),
    "epoch_schedule": lambda bench: fit(bench, TinyLM("epoch"), max_epochs=4),
    "plateau": lambda bench: fit(bench, TinyLM("plateau"), max_epochs=3),
    "overfit_batches": lambda bench: fit(bench, overfit_batches=2),
    "fast_dev_run": lambda bench: fit(bench, fast_dev_run=True),
    "early_stopping": early_stopping,
    "checkpoints": checkpoints,
    "resume": resume,
    "evaluation": evaluation,
    "second_fit": second_fit,
    "iterable": iterable,
}
EXTRA_CASES = {"continue_others": continue_others}
#: Cases whose fits first compare microbatches with the full batch. They cover each source of
#: batches; the fits of all other cases take the same batches to the same steps.
COMPARED = {
    "plain",
    "limits",
    "accumulate",
    "last_batch_smaller",
    "overfit_batches",
    "resume",
    "evaluation",
    "iterable",
}


def run_cases(
    rank: int, size: int, folder: Path, cases: Iterable[str], strategies: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Return the results of this rank, by strategy and case.

    Args:
        rank: Rank of this process in the world that ``run_world`` has started.
        size: Number of ranks.
        folder: Folder of the checkpoints.
        cases: Names of cases.
        strategies: By name: None for the Trainer's own, ``ddp``, or arguments of MegatronStrategy.
    """
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    functions = CASES | EXTRA_CASES
    return {
        name: {
            case: functions[case](Bench(size, strategy, folder / name, case in COMPARED))
            for case in cases
        }
        for name, strategy in strategies.items()
    }
