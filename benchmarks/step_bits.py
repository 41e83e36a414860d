"""Losses, times and memory of deterministic trainings, to compare two checkouts of this package.

    PYTHONPATH=CHECKOUT torchrun --nproc-per-node 2 benchmarks/step_bits.py --model tiny_moe --ep 2

Attention is computed by matrix products, because the backward passes of the fast kernels sum in
another order in every run.
Each mode of CUDA graphs trains the same model for the same steps with deterministic algorithms.
The first rank prints one JSON line for each mode: a digest of the bits of all losses, the mean time
of a step in a row (ms), the reserved memory (GiB) and the time of the captures (seconds). Two
checkouts compute the same if all digests are equal; one of them is named by PYTHONPATH, and this
file may be of the other one.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import logging
import os
import tempfile
import time
import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.shapes import SHAPES
from lightning_megatron import GPT, MegatronStrategy
from lightning_megatron.models.config import GPTConfig

_GIB = 2**30
_MODES: dict[str, Any] = {
    "eager": None,
    "segments": {"mode": "segments", "on_failure": "error"},
    "full": {"mode": "full", "on_failure": "error"},
}


def math_attention() -> AbstractContextManager[Any]:
    """Compute attention by matrix products and a softmax, whose summation order is fixed."""
    # Imported here, because the package may be of a checkout that keeps these elsewhere.
    from lightning_megatron.layers.attention import core as attention_core
    from lightning_megatron.layers.attention.choose_core import CoreChoice

    choice = CoreChoice("sdpa", (SDPBackend.MATH,), False, True, "sums in one order")
    return patch.object(attention_core, "choose_core", lambda *arguments, **options: choice)


class Trained(LightningModule):
    """GPT that trains on its mean loss."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.model: GPT | None = None

    def configure_model(self) -> None:
        """Build this rank's part of the model."""
        if self.model is None:
            mesh: Any = self.device_mesh
            self.model = GPT(self.config, mesh=mesh, seed=1234)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Return the mean loss."""
        assert self.model is not None, "configure_model runs before the first step"
        return self.model(batch[0][:, :-1], batch[0][:, 1:]).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW over all parameters."""
        return torch.optim.AdamW(self.parameters(), lr=1e-4, weight_decay=0.01, fused=True)


class Observed(Callback):
    """Callback that records the losses of all steps, and times the last ones."""

    reads_gradients = False

    def __init__(self, steps: int, timed: int) -> None:
        self.losses = torch.zeros(steps)
        self.milliseconds = 0.0
        self.capture_seconds = 0.0
        self._timed = timed
        self._start = 0.0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *args: Any
    ) -> None:
        """Record the loss, and the time of the last steps."""
        loss = outputs["loss"].detach()
        if self.losses.device != loss.device:
            self.losses = self.losses.to(loss.device)
        step = trainer.global_step
        steps = len(self.losses)
        self.losses[step - 1] = loss
        if step in (steps - self._timed, steps):
            if loss.is_cuda:
                torch.cuda.synchronize()
            self.milliseconds = (time.perf_counter() - self._start) * 1000 / self._timed
            self._start = time.perf_counter()
        strategy: Any = trainer.strategy
        if step == steps and strategy.run.graphs is not None:
            self.capture_seconds = strategy.run.graphs._captures.counts.seconds


def train(args: argparse.Namespace, mode: str) -> dict[str, Any]:
    """Train in one mode, and return the figures of this rank."""
    config = SHAPES[args.model]
    if args.layers:
        config = GPTConfig(**{**vars(config), "num_layers": args.layers})
    data_ranks = int(os.environ.get("WORLD_SIZE", "1")) // (args.tp * args.pp * args.cp)
    observed = Observed(args.steps, args.timed)
    options = json.loads(args.options)
    strategy = MegatronStrategy(
        tp=args.tp, pp=args.pp, cp=args.cp, ep=args.ep, cuda_graphs=_MODES[mode], **options
    )
    trainer = Trainer(
        accelerator=args.accelerator,
        devices=int(os.environ.get("WORLD_SIZE", "1")),
        strategy=strategy,
        precision="bf16-mixed",
        deterministic="warn",
        max_steps=args.steps,
        gradient_clip_val=1.0,
        callbacks=[observed],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tempfile.gettempdir(),
    )
    if args.accelerator == "cuda":
        torch.cuda.reset_peak_memory_stats()
    shape = (args.steps * args.batch * data_ranks, config.max_seq_length + 1)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, config.vocab_size, shape, generator=generator)
    trainer.fit(Trained(config), DataLoader(TensorDataset(tokens), batch_size=args.batch))
    losses = observed.losses.cpu()
    reserved = torch.cuda.max_memory_reserved() if args.accelerator == "cuda" else 0
    return {
        "work": f"{args.model} {args.name}",
        "mode": mode,
        "losses": hashlib.sha256(losses.numpy().tobytes()).hexdigest()[:16],
        "first": float(losses[0]),
        "last": float(losses[-1]),
        "ms": round(observed.milliseconds, 2),
        "reserved_gib": round(reserved / _GIB, 3),
        "capture_s": round(observed.capture_seconds, 2),
    }


def main() -> None:
    """Train in each mode, and print the figures of the first rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny", choices=list(SHAPES))
    parser.add_argument("--name", default="")
    parser.add_argument("--layers", type=int, default=0)
    for axis in ("tp", "pp", "cp", "ep"):
        parser.add_argument(f"--{axis}", type=int, default=1)
    parser.add_argument("--options", default="{}", help="options of the strategy, as JSON")
    parser.add_argument("--modes", nargs="+", default=list(_MODES), choices=list(_MODES))
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--timed", type=int, default=30)
    parser.add_argument("--fixed-order", action="store_true", help="compare bits, not times")
    parser.add_argument("--accelerator", default="cuda")
    args = parser.parse_args()
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    for mode in args.modes:
        try:
            with math_attention() if args.fixed_order else nullcontext():
                figures = train(args, mode)
        except Exception as error:
            words = f"{type(error).__name__}: {str(error)[:400]}"
            figures = {"work": f"{args.model} {args.name}", "mode": mode, "error": words}
        if os.environ.get("RANK", "0") == "0":
            print(json.dumps(figures), flush=True)
        gc.collect()
        if args.accelerator == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
