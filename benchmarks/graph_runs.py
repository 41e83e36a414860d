"""Trainings in this process with a mode of CUDA graphs, and callbacks that observe them."""

from __future__ import annotations

import gc
import logging
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.graphs import mode_of
from benchmarks.shapes import Tokens, Trained
from benchmarks.step_trace import digest, own_slices, strategy_of
from lightning_megatron import MegatronStrategy
from lightning_megatron.graphs.cuda import private_pools
from lightning_megatron.models.config import GPTConfig
from tests.tape import TapeBackend


class Validated(Trained):
    """GPT that trains on its mean loss, and has a validation step."""

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Return the mean loss."""
        return self.training_step(batch, batch_idx)


def train(
    config: GPTConfig,
    mode: str,
    callbacks: Sequence[Callback],
    steps: int,
    accelerator: str,
    *,
    batch: int = 1,
    epoch: int = 0,
    validates_every: int = 0,
    checkpoint: Path | None = None,
) -> None:
    """Train on one device in this process, with one sample per microbatch.

    Args:
        config: Configuration of the model.
        mode: Name of a mode of ``benchmarks.graphs``.
        callbacks: Callbacks that measure.
        steps: Number of the last step.
        accelerator: ``cuda`` or ``cpu``, where graphs run on the backend for the CPU.
        batch: Samples per step (samples).
        epoch: Steps per epoch; 0 means one epoch of all steps (steps).
        validates_every: Steps between validations; 0 means no validation (steps).
        checkpoint: Checkpoint from which the training resumes.
    """
    strategy = _strategy_of(mode, accelerator)
    trainer = Trainer(
        accelerator=accelerator,
        devices=1,
        strategy=strategy,
        precision="bf16-mixed",
        max_steps=steps,
        gradient_clip_val=1.0,
        callbacks=list(callbacks),
        val_check_interval=validates_every or None,
        check_val_every_n_epoch=None if validates_every else 1,
        limit_val_batches=4 if validates_every else 0,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tempfile.gettempdir(),
    )
    try:
        _fit(trainer, config, batch, epoch or steps, bool(validates_every), checkpoint)
    finally:
        for callback in callbacks:
            # Lightning adds methods of the module to callbacks, which would keep the module alive.
            vars(callback).pop("log", None)
            vars(callback).pop("log_dict", None)
        del trainer, strategy
        gc.collect()
        if accelerator == "cuda":
            torch.cuda.empty_cache()


def _strategy_of(mode: str, accelerator: str) -> MegatronStrategy:
    graphs: Any = mode_of(mode)[2]
    if graphs is not None:
        # A failed capture must not be measured as if it were a replay.
        fields = {"mode": graphs} if isinstance(graphs, str) else graphs
        graphs = {"on_failure": "error", **fields}
    strategy = MegatronStrategy(cuda_graphs=graphs, microbatch_size=1)
    if graphs is not None and accelerator == "cpu":
        strategy._make_backend = lambda mesh: TapeBackend(mesh.launcher)
    return strategy


def _fit(
    trainer: Trainer,
    config: GPTConfig,
    batch: int,
    steps: int,
    validates: bool,
    checkpoint: Path | None,
) -> None:
    on_gpu = trainer.strategy.root_device.type == "cuda"
    options: dict[str, Any] = {"batch_size": batch, "pin_memory": on_gpu}
    training_data = DataLoader(Tokens(config, steps * batch), **options)
    validation_data = DataLoader(Tokens(config, 4 * batch), **options)
    trainer.fit(
        Validated(config, forced_balance=True),
        training_data,
        validation_data if validates else None,
        ckpt_path=checkpoint,
        weights_only=False,
    )


def be_quiet() -> None:
    """Suppress warnings and log messages of trainings."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Bits(Callback):
    """Callback that records losses of all steps, and parameter digests and memory at validations.

    Args:
        steps: Number of steps of the whole training.
    """

    #: The callback digests main parameters and reads no gradients.
    reads_gradients = False

    def __init__(self, steps: int) -> None:
        #: Validation losses, and digests of all parameters after each validation.
        self.evaluated: list[float] = []
        self.digests: list[list[int]] = []
        #: Allocated memory, and used memory of the device, by step (bytes).
        self.in_use: dict[int, int] = {}
        self.taken: dict[int, int] = {}
        #: Maximum number of graphs so far.
        self.num_graphs = 0
        self._losses: Tensor | None = None
        self._steps = steps

    @property
    def losses(self) -> list[float]:
        """Return the losses of all steps."""
        return [] if self._losses is None else self._losses.tolist()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *args: Any
    ) -> None:
        """Record the loss."""
        loss = outputs["loss"].detach()
        if self._losses is None:
            # One tensor for all steps, because a new tensor per step would look like a leak.
            self._losses = torch.zeros(self._steps, device=loss.device)
        self._losses[trainer.global_step - 1] = loss
        graphs = strategy_of(trainer).run.graphs
        self.num_graphs = max(self.num_graphs, 0 if graphs is None else graphs.num_graphs)

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *args: Any
    ) -> None:
        """Record the validation loss."""
        self.evaluated.append(float(outputs))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record digests of the parameters, and the memory."""
        digests = [digest(part.main.detach()) for _, part in own_slices(trainer)]
        self.digests.append(torch.stack(digests).tolist())
        if trainer.strategy.root_device.type == "cuda":
            torch.cuda.synchronize()
            free, total = torch.cuda.mem_get_info()
            self.in_use[trainer.global_step] = torch.cuda.memory_allocated()
            self.taken[trainer.global_step] = total - free

    def differences_from(self, expected: Bits) -> dict[str, int]:
        """Return the number of the first value that differs in bits, by kind of value."""
        pairs: dict[str, tuple[Sequence[Any], Sequence[Any]]] = {
            "losses": (self.losses, expected.losses),
            "validation losses": (self.evaluated, expected.evaluated),
            "parameters": (self.digests, expected.digests),
        }
        differences = {}
        for name, values in pairs.items():
            equal = [left == right for left, right in zip(*values, strict=True)]
            if not all(equal):
                differences[name] = equal.index(False) + 1
        return differences


class SaveAt(Callback):
    """Callback that saves a checkpoint after a step.

    Args:
        step: Number of the step.
        path: Path of the checkpoint.
    """

    def __init__(self, step: int, path: Path) -> None:
        self.step = step
        self.path = path

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """Save the checkpoint after the step."""
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


class NoWaits(Callback):
    """Callback that makes steps raise if the host waits for the device.

    Args:
        first: Number of the step before the first checked one.
    """

    #: The callback reads no gradients.
    reads_gradients = False

    def __init__(self, first: int) -> None:
        self.first = first
        #: Number of checked steps.
        self.num_steps = 0

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        """Make waits of the host raise in this step."""
        if trainer.global_step >= self.first and _is_on_gpu(trainer):
            torch.cuda.set_sync_debug_mode("error")

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """Permit waits between steps."""
        if _is_on_gpu(trainer):
            torch.cuda.set_sync_debug_mode("default")
        self.num_steps += trainer.global_step > self.first

    def on_exception(self, trainer: Trainer, *args: Any) -> None:
        """Permit waits after an error."""
        if _is_on_gpu(trainer):
            torch.cuda.set_sync_debug_mode("default")


class Peak(Callback):
    """Callback that records the peak of torch's allocator, and the size of the graphs' pools."""

    #: The callback reads no gradients.
    reads_gradients = False

    def __init__(self) -> None:
        #: Peaks of allocated and reserved memory, and size of the pools (bytes).
        self.in_use = 0
        self.reserved = 0
        self.pools = 0

    def on_train_start(self, trainer: Trainer, *args: Any) -> None:
        """Reset the peak of earlier trainings."""
        if _is_on_gpu(trainer):
            torch.cuda.reset_peak_memory_stats()

    def on_train_end(self, trainer: Trainer, *args: Any) -> None:
        """Record the figures."""
        if _is_on_gpu(trainer):
            self.in_use = torch.cuda.max_memory_allocated()
            self.reserved = torch.cuda.max_memory_reserved()
            self.pools = sum(private_pools(trainer.strategy.root_device).values())


def _is_on_gpu(trainer: Trainer) -> bool:
    return bool(trainer.strategy.root_device.type == "cuda")
