"""The part of `tests.faults.train` that needs torch, which is slow to import."""

from __future__ import annotations

import logging
import os
import time
import warnings
import zlib
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_megatron import GPTConfig, MegatronStrategy
from lightning_megatron.data.datamodule import TokenDataModule
from lightning_megatron.models.causal_lm import CausalLM
from tests.faults.train import LENGTH, VOCABULARY, Job, append_to_log


class FitLog(Callback):
    """Log the first step of a fit, and the exact loss and the samples of every step."""

    def __init__(self, job: Job, rank: int) -> None:
        self.job, self.rank = job, rank

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        append_to_log(self.job, self.rank, "resume", trainer.global_step, trainer.world_size)

    def on_train_batch_end(
        self, trainer: Trainer, module: Any, outputs: Any, batch: dict[str, Tensor], batch_idx: int
    ) -> None:
        loss = float(trainer.callback_metrics["train_loss"])
        samples = (zlib.crc32(tokens.numpy().tobytes()) for tokens in batch["tokens"])
        append_to_log(self.job, self.rank, "step", trainer.global_step, loss.hex(), *samples)
        time.sleep(self.job.seconds)


class SaveLoggingStrategy(MegatronStrategy):
    """Log when a save begins and when training continues."""

    job: Job
    rank: int

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        step = self.user_module.trainer.global_step
        append_to_log(self.job, self.rank, "save", step)
        super().save_checkpoint(*args, **kwargs)
        append_to_log(self.job, self.rank, "saved", step)


def fit(job: Job, rank: int) -> None:
    """Train up to the last step, and save the final state in a separate checkpoint."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    seed_everything(5, verbose=False)
    strategy = SaveLoggingStrategy(
        microbatch_size=1, async_save=job.async_save, job={"signal_check_interval": 1, "timeout": job.timeout},
    )  # fmt: skip
    strategy.job, strategy.rank = job, rank
    devices, num_nodes = job.devices, job.num_nodes
    if job.elastic:
        devices = int(os.environ["LOCAL_WORLD_SIZE"])
        num_nodes = int(os.environ["WORLD_SIZE"]) // devices
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    saver = ModelCheckpoint(job.checkpoints, every_n_train_steps=job.save_every)
    trainer = Trainer(
        accelerator="cpu", devices=devices, num_nodes=num_nodes, precision=job.precision, strategy=strategy,
        max_steps=job.steps, gradient_clip_val=1.0, callbacks=[FitLog(job, rank), saver],
        default_root_dir=job.folder, **quiet,
    )  # type: ignore[arg-type]  # fmt: skip
    config = GPTConfig.gpt2(
        vocab_size=VOCABULARY, vocab_multiple=16, max_seq_length=16, num_layers=2, hidden_size=16,
        num_heads=2, hidden_dropout=job.dropout,
    )  # fmt: skip
    module = CausalLM(config, learning_rate=0.01)
    data = TokenDataModule(
        train=str(job.root / "corpus"),
        seq_length=LENGTH,
        batch_size=job.global_batch // (devices * num_nodes),
    )
    trainer.fit(module, datamodule=data, ckpt_path="last")
    trainer.save_checkpoint(job.root / "final")
