"""Fits of a small GPT, eagerly or by graphs of the backend for the CPU."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor

from lightning_megatron import CudaGraphs, MegatronStrategy
from lightning_megatron.graphs.tape import TapeBackend
from lightning_megatron.strategy.step.run_graphs import RunGraphs
from tests.graphs.trained import counted_replays
from tests.oracles import full_weights
from tests.strategy.tiny import TinyLM, loader

#: Graphs are captured in the third step.
SEGMENTS = CudaGraphs("segments", warmup_steps=2)
FULL = CudaGraphs("full", warmup_steps=2)

_COMPARED = ("losses", "logged", "counts", "evaluated", "rows")


@dataclass
class Fit:
    """Results of a fit on this rank.

    Args:
        mode: Mode of the graphs; empty without graphs.
        losses: Losses of all steps.
        logged: Last values of all logged metrics.
        weights: Full weights at the end.
        num_graphs: Number of graphs after each step.
        counts: Number of collectives of each axis over the device's groups.
        evaluated: Losses of all validation batches.
        rows: Counts of the rows of this rank's experts in every step, by layer.
        replays: Replays of forward graphs of segments, of training and of evaluation.
    """

    mode: str = ""
    losses: list[float] = field(default_factory=list)
    logged: dict[str, float] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    num_graphs: list[int] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    evaluated: list[float] = field(default_factory=list)
    rows: list[dict[int, list[int]]] = field(default_factory=list)
    replays: dict[str, int] = field(default_factory=dict)

    def differences_from(self, expected: Fit) -> list[str]:
        """Return the names of results that are not the same bit for bit."""
        names = [name for name in _COMPARED if _differ(self, expected, name)]
        assert self.weights.keys() == expected.weights.keys(), "both fits train the same model"
        return names + [
            name
            for name, weight in self.weights.items()
            if not torch.equal(weight, expected.weights[name])
        ]


def _differ(actual: Fit, expected: Fit, name: str) -> bool:
    return bool(getattr(actual, name) != getattr(expected, name))


class Watch(Callback):
    """Record losses, rows of experts, numbers of graphs and final weights."""

    def __init__(self, fit: Fit) -> None:
        self.fit = fit

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        strategy_of(trainer).run.mixtures.count_rows()

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, *_: Any) -> None:
        self.fit.losses.append(float(outputs["loss"]))
        self.fit.num_graphs.append(num_graphs_of(trainer))
        statistics = strategy_of(trainer).expert_statistics or {}
        counts = {n: figures.rows for n, figures in statistics.items() if figures.rows is not None}
        self.fit.rows.append({layer: rows.tolist() for layer, rows in counts.items()})

    def on_validation_batch_end(
        self, trainer: Trainer, module: Any, outputs: Tensor | None, *_: Any
    ) -> None:
        # Stages without the loss have no outputs.
        self.fit.evaluated += [] if outputs is None else [float(outputs)]

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        strategy = strategy_of(trainer)
        strategy.run.state.main.wait()
        self.fit.weights = full_weights(module, strategy.mesh)
        self.fit.logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
        counts = strategy.mesh.journal.counts
        self.fit.counts = {
            axis: number for axis, number in counts.items() if not axis.endswith("_cpu")
        }


def strategy_of(trainer: Trainer) -> MegatronStrategy:
    """Return the trainer's strategy."""
    assert isinstance(trainer.strategy, MegatronStrategy)
    return trainer.strategy


def graphs_of(trainer: Trainer) -> RunGraphs | None:
    """Return the graphs of the run."""
    return strategy_of(trainer).run.graphs


def num_graphs_of(trainer: Trainer) -> int:
    """Return the number of graphs that exist now."""
    graphs = graphs_of(trainer)
    return 0 if graphs is None else graphs.num_graphs


def fit(
    graphs: CudaGraphs | None,
    devices: int = 1,
    layout: dict[str, Any] | None = None,
    *,
    model: dict[str, Any] | None = None,
    callbacks: tuple[Callback, ...] = (),
    module: TinyLM | None = None,
    ckpt_path: str | Path | None = None,
    num_samples: int = 24,
    num_evaluated: int = 8,
    **options: Any,
) -> Fit:
    """Train a few steps with validation in between."""
    seed_everything(3, verbose=False)
    result = Fit("" if graphs is None else graphs.mode)
    strategy = MegatronStrategy(
        **{"microbatch_size": 2, "check_microbatches": False, **(layout or {})},
        cuda_graphs=graphs,
    )
    if graphs is not None and options.get("accelerator") != "gpu":
        strategy._make_backend = lambda mesh: TapeBackend(mesh.launcher)
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": devices,
        "strategy": strategy,
        "precision": "64-true",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "callbacks": [Watch(result), *callbacks],
        "max_steps": 5,
        "val_check_interval": 2,
        "limit_val_batches": 1,
        "log_every_n_steps": 2,
    }
    module = module or TinyLM(**(model or {}))
    with counted_replays() as replays:
        Trainer(**{**settings, **options}).fit(
            module,
            loader(num_samples),
            loader(num_evaluated, seed=5),
            ckpt_path=ckpt_path,
            weights_only=False,
        )
    result.replays = dict(replays)
    return result
