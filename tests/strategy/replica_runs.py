"""Fits of small modules by Lightning alone or under MegatronStrategy."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_megatron import MegatronStrategy
from tests.oracles import full_weights

STEPS, BATCH, V, LENGTH = 3, 4, 61, 9


@dataclass
class Outcome:
    """Results of a run, or the error that ended it."""

    losses: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    error: str = ""
    is_cut: bool = False


class Regress(LightningModule):
    """Fit a network to random vectors."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.losses = make().double(), []
        self.weights: dict[str, Tensor] = {}

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        loss = F.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.losses.append(float(self.trainer.callback_metrics["loss"]))

    def on_train_end(self) -> None:
        strategy = self.trainer.strategy
        if isinstance(strategy, MegatronStrategy):
            strategy.run.state.main.wait()
            self.weights = full_weights(self, strategy.mesh)
        else:
            self.weights = {name: p.detach().clone() for name, p in self.named_parameters()}

    def configure_optimizers(self) -> Any:
        # A large eps keeps gradients that are zero but for rounding from becoming full steps.
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3)


class Predict(Regress):
    """Train a language model on random tokens."""

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        logits = self.net(input_ids=batch[0]).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[0][:, 1:].flatten())
        self.log("loss", loss, sync_dist=True)
        return loss


def run(
    module: Regress,
    devices: int = 1,
    layout: dict[str, Any] | None = None,
    steps: int = STEPS,
    **options: Any,
) -> Outcome:
    """Train a few steps; without a layout by Lightning alone on one device."""
    seed_everything(1, verbose=False)
    num_model_ranks = prod((layout or {}).get(axis, 1) for axis in ("tp", "pp", "cp"))
    num_data_ranks = 1 if layout is None else devices // num_model_ranks
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        strategy="auto"
        if layout is None
        else MegatronStrategy(**{"microbatch_size": BATCH // num_data_ranks, **layout}),
        precision="64-true",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        max_steps=steps,
        **options,
    )
    try:
        trainer.fit(module, Batches(module, num_data_ranks, steps))
    except (ValueError, RuntimeError, AssertionError) as error:
        notes = getattr(error, "__notes__", [])
        return Outcome(error=" ".join([f"{type(error).__name__}: {error}", *notes]))
    return Outcome(module.losses, module.weights)


class Batches(DataLoader):
    """Give every data-parallel rank its part of the same batches."""

    def __init__(self, module: Regress, num_data_ranks: int, steps: int = STEPS) -> None:
        generator = torch.Generator().manual_seed(3)
        if isinstance(module, Predict):
            data: Any = TensorDataset(
                torch.randint(2, V, (steps * BATCH, LENGTH), generator=generator)
            )
        else:
            inputs = torch.randn(steps * BATCH, 6, 8, generator=generator, dtype=torch.float64)
            data = TensorDataset(inputs, inputs.flip(-1).tanh())
        rank = torch.distributed.get_rank() if num_data_ranks > 1 else 0
        size = BATCH // num_data_ranks
        batches: Iterable[list[int]] = [
            list(range(step * BATCH + rank * size, step * BATCH + (rank + 1) * size))
            for step in range(steps)
        ]
        super().__init__(data, batch_sampler=batches)
