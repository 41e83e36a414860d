"""Fits that set the routing, so that each rank's experts need a chosen number of rows."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor

from lightning_megatron import MegatronStrategy
from lightning_megatron.experts.layer import MixtureOfExperts
from lightning_megatron.experts.routing.router import Routing
from lightning_megatron.groups.mesh import ParallelMesh
from tests.oracles import full_weights
from tests.strategy.tiny import TinyLM, loader

#: Tokens of a microbatch. With two choices each, an even share is 128 rows.
TOKENS = 64
EXPERTS = {
    "num_experts": 4,
    "top_k": 2,
    "ffn_hidden_size": 8,
    "scoring": "sigmoid",
    "expert_bias": True,
    "expert_bias_rate": 0.01,
    "aux_loss": 0.01,
    "aux_loss_scope": "global",
    "jitter": 0.01,
}
#: Rows that rank 0 gets above an even share, by kind of step, step, microbatch and layer; with a
#: negative number rank 1 gets them.
Excess = dict[tuple[str, int, int, int], int]


@dataclass
class Record:
    """Results of a fit on this rank, and the number of steps that it ran again."""

    losses: list[float] = field(default_factory=list)
    logged: dict[str, float] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    loads: list[dict[int, list[int]]] = field(default_factory=list)
    rows: list[dict[int, list[int]]] = field(default_factory=list)
    attributes: list[Any] = field(default_factory=list)
    generators: list[Any] = field(default_factory=list)
    num_failures: int = 0
    factor: float | None = None
    warnings: list[str] = field(default_factory=list)

    def differences_from(self, expected: Record) -> list[str]:
        """Return the names of results that are not the same bit for bit."""
        plain = ("losses", "logged", "loads", "rows", "attributes", "generators")
        names = [name for name in plain if getattr(self, name) != getattr(expected, name)]
        for name in ("weights", "buffers"):
            actual_tensors, expected_tensors = getattr(self, name), getattr(expected, name)
            assert actual_tensors.keys() == expected_tensors.keys(), (
                "both fits train the same model"
            )
            names += [
                key
                for key, tensor in actual_tensors.items()
                if not torch.equal(tensor, expected_tensors[key])
            ]
        return names


class Watched(TinyLM):
    """A module whose steps change everything that a repeated step must find unchanged."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.calls = 0
        self.losses: list[float] = []
        self.register_buffer("drawn", torch.zeros((), dtype=torch.float64))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        labels = batch.pop("labels")
        self.calls += 1
        noise = torch.rand((), dtype=torch.float64) + random.random()
        assert isinstance(self.drawn, Tensor)
        self.drawn += noise
        output = super().training_step({"tokens": batch["tokens"], "labels": labels}, batch_idx)
        self.losses.append(float(output["loss"]))
        return {**output, "loss": output["loss"] * (1.0 + 0.01 * noise)}

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.hooks.append("zero_grad")


class Watch(Callback):
    """Set the routing, and record the results of the fit."""

    def __init__(self, record: Record, excess: Excess) -> None:
        self.record, self.excess = record, excess
        self.is_validating = False

    def on_fit_start(self, trainer: Trainer, module: LightningModule) -> None:
        mesh = strategy_of(trainer).mesh
        layers = [part for part in module.modules() if isinstance(part, MixtureOfExperts)]
        first = mesh.pp.rank * len(layers)
        for number, layer in enumerate(layers, first):
            layer.router.register_forward_hook(self._hook(mesh, number))

    def _hook(self, mesh: ParallelMesh, layer: int) -> Callable[..., Routing]:
        def choose(router: Any, args: Any, routing: Routing) -> Routing:
            position = mesh.random.position
            kind = "val" if self.is_validating else "train"
            place = (kind, position.step, position.microbatch // mesh.dp.size, layer)
            extra = self.excess.get(place, 0)
            return replace(routing, experts=choices(routing.experts, extra, mesh))

        return choose

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        strategy_of(trainer).run.mixtures.count_rows()

    def on_validation_start(self, *_: Any) -> None:
        self.is_validating = True

    def on_validation_end(self, *_: Any) -> None:
        self.is_validating = False

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, *_: Any) -> None:
        self.record.losses.append(float(outputs["loss"]))
        statistics = strategy_of(trainer).expert_statistics or {}
        self.record.loads.append({n: figures.load.tolist() for n, figures in statistics.items()})
        rows = {n: figures.rows for n, figures in statistics.items() if figures.rows is not None}
        assert rows or not statistics, "ranks share the experts"
        self.record.rows.append({n: counts.tolist() for n, counts in rows.items()})

    def on_train_end(self, trainer: Trainer, module: Any) -> None:
        strategy, record = strategy_of(trainer), self.record
        strategy.run.state.main.wait()
        record.weights = full_weights(module, strategy.mesh)
        record.buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
        record.logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
        record.attributes = [module.calls, list(module.losses), list(module.hooks)]
        record.generators = [torch.get_rng_state().tolist(), random.getstate()]
        limited = strategy.run.steps._runner.limited_rows
        if limited is not None:
            record.num_failures = limited.num_failures
            record.factor = limited.factor


def choices(chosen: Tensor, extra: int, mesh: ParallelMesh) -> Tensor:
    """Choose two of four experts for each token, so that rank 0 of two gets ``extra`` more rows."""
    result = torch.empty_like(chosen)
    rank = mesh.ep.rank
    result[:] = torch.tensor([[0, 1], [2, 3]])[rank]
    # One or both choices of each moved token go to experts of the peer rank.
    num_moved = abs(extra) if (extra > 0) == (rank == 1) else 0
    peer_experts = torch.tensor([[2, 3], [0, 1]])[rank]
    flat = result.view(-1)
    for token in range(min(num_moved, TOKENS)):
        flat[2 * token] = peer_experts[0]
    for token in range(max(num_moved - TOKENS, 0)):
        flat[2 * token + 1] = peer_experts[1]
    return result


def strategy_of(trainer: Trainer) -> MegatronStrategy:
    """Return the trainer's strategy."""
    assert isinstance(trainer.strategy, MegatronStrategy)
    return trainer.strategy


def fit(
    rows: float | None,
    excess: Excess,
    devices: int = 2,
    *,
    ckpt_path: str | Path | None = None,
    saves: str | Path | None = None,
    trainer: dict[str, Any] | None = None,
    kind: type[Watched] = Watched,
    **layout: Any,
) -> Record:
    """Train four steps of two microbatches on each data-parallel rank; validate after two steps."""
    seed_everything(3, verbose=False)
    record = Record()
    sizes: dict[str, Any] = {"ep": 2, "expert_transport": "one_sided", "microbatch_size": 8}
    strategy = MegatronStrategy(
        **{**sizes, "check_microbatches": False, "bucket_size": 500, **layout}, expert_rows=rows
    )
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": devices,
        "strategy": strategy,
        "precision": "64-true",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "callbacks": [Watch(record, excess)],
        "max_steps": 4,
        "val_check_interval": 2,
        "limit_val_batches": 1,
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 2,
        **(trainer or {}),
    }
    module = kind(
        mlp_bias=False, ffn_hidden_size=16, hidden_dropout=0.1, experts=EXPERTS, schedule=None
    )
    runner = Trainer(**settings)
    data = loader(256, 16), loader(32, 16, seed=5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        runner.fit(module, *data, ckpt_path=ckpt_path, weights_only=False)
        if saves is not None:
            runner.save_checkpoint(saves)
    texts = [str(warning.message) for warning in caught]
    record.warnings = [text for text in texts if text.startswith("experts: ")]
    return record
