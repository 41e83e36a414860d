"""Train a small GPT, save it, continue it from a checkpoint, and record the losses of all steps."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from lightning_megatron import GPT, GPTConfig
from lightning_megatron.strategy.megatron_strategy import MegatronStrategy
from tests.proof.training import GLOBAL_BATCH, SEQUENCE, VOCABULARY, Tokens

_SIZES = {
    "vocab_size": VOCABULARY,
    "max_seq_length": SEQUENCE,
    "num_layers": 4,
    "hidden_size": 32,
    "num_heads": 4,
}
GPT2 = GPTConfig.gpt2(**_SIZES)
LLAMA = GPTConfig.llama(**_SIZES, num_kv_heads=2, ffn_hidden_size=48)


class Trained(pl.LightningModule):
    """Train a GPT with one parameter group with weight decay and one without, and a schedule of the
    learning rate by step.
    """

    def __init__(self, config: GPTConfig = GPT2) -> None:
        super().__init__()
        self.config, self.model = config, None
        self.losses: list[float] = []
        self.rates: list[float] = []

    def configure_model(self) -> None:
        if self.model is None:
            self.model = GPT(self.config, mesh=self.device_mesh, seed=1234)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        assert self.model is not None, "configure_model has run"
        return self.model(batch["tokens"], batch["labels"]).mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(
            float(self.trainer.strategy.reduce(outputs["loss"].clone(), reduce_op="mean"))
        )
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        decayed = [p for p in self.parameters() if p.dim() > 1]
        undecayed = [p for p in self.parameters() if p.dim() <= 1]
        groups = [
            {"params": decayed, "weight_decay": 0.1},
            {"params": undecayed, "weight_decay": 0.0},
        ]
        # A large eps keeps gradients that are zero but for rounding from becoming full steps.
        optimizer = torch.optim.AdamW(groups, lr=1e-2, eps=1e-3)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def trainer_of(
    layout: dict[str, Any] | None,
    devices: int,
    steps: int,
    callbacks: Sequence[pl.Callback] = (),
    **options: Any,
) -> pl.Trainer:
    """Return a trainer without logs; without a layout it has a strategy of Lightning."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")
    warnings.filterwarnings("ignore", message=".*ended before the epoch ended.*")
    pl.seed_everything(1234, verbose=False)
    quiet: dict[str, Any] = {
        "accelerator": "cpu",
        "precision": "64-true",
        "logger": False,
        "enable_checkpointing": any(
            isinstance(callback, pl.callbacks.ModelCheckpoint) for callback in callbacks
        ),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
        "gradient_clip_val": 1.0,
        "max_steps": steps,
    }
    # Other tests prove that the trial of microbatches leaves nothing behind.
    defaults = {"microbatch_size": 2, "check_microbatches": False}
    strategy = "auto" if layout is None else MegatronStrategy(**{**defaults, **layout})
    return pl.Trainer(
        **{**quiet, **options}, strategy=strategy, devices=devices, callbacks=list(callbacks)
    )


def train(
    layout: dict[str, Any] | None,
    devices: int,
    steps: int,
    resume: str | Path | None = None,
    save: str | Path | None = None,
    config: GPTConfig = GPT2,
    **options: Any,
) -> Trained:
    """Train up to a number of steps, from the checkpoint ``resume`` if given, and save to the path
    ``save`` if given.
    """
    trainer, module = trainer_of(layout, devices, steps, **options), Trained(config)
    sampler_options = (
        trainer.strategy.distributed_sampler_kwargs
        if layout is not None
        else {"num_replicas": 1, "rank": 0}
    )
    sampler = DistributedSampler(Tokens(), shuffle=False, **sampler_options)
    loader = DataLoader(
        Tokens(), batch_size=GLOBAL_BATCH // sampler_options["num_replicas"], sampler=sampler
    )
    trainer.fit(module, loader, ckpt_path=resume)
    if save is not None:
        trainer.save_checkpoint(save)
    return module
