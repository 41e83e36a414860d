"""Program that trains one configuration of a scaling study and writes the measurements.

    python -m lightning_megatron.tasks.scaling.scaling_job --case '{"hidden_size": 96, ...}' ...

Each configuration runs in a separate program, so that one that runs out of memory does not end
the others.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from lightning_megatron import CausalLM, MegatronStrategy
from lightning_megatron.tasks.scaling.scaling_cases import ScalingCase


class StepTimer(Callback):
    """Measure the mean time of consecutive steps after warm-up steps.

    The host waits for the device only before the first and after the last measured step, so that
    steps overlap as in training. A step is an optimizer step with all its microbatches.

    Args:
        warmup: Number of steps before the measured ones (steps).
        steps: Number of measured steps (steps).
        path: JSON file that rank 0 writes after the last measured step, with
            ``seconds_per_step``, ``loss`` of that step (None if the training step returns none),
            ``peak_gib`` (None on CPUs), ``device`` and ``num_ranks``.
    """

    def __init__(self, warmup: int, steps: int, path: str) -> None:
        self._warmup = warmup
        self._steps = steps
        self._path = path
        self._done = 0
        self._start = 0.0

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._done += 1
        if self._done == self._warmup:
            self._start = _now()
        if self._done == self._warmup + self._steps:
            seconds = (_now() - self._start) / self._steps
            if trainer.is_global_zero:
                Path(self._path).write_text(json.dumps(_measured(trainer, seconds, outputs)))


def _measured(trainer: Trainer, seconds: float, outputs: Any) -> dict[str, Any]:
    has_loss = isinstance(outputs, Mapping) and outputs.get("loss") is not None
    measured: dict[str, Any] = {"seconds_per_step": seconds, "num_ranks": trainer.world_size}
    measured["loss"] = float(outputs["loss"]) if has_loss else None
    measured |= {"peak_gib": None, "device": "CPU"}
    if _on_gpu():
        measured["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        measured["device"] = torch.cuda.get_device_name()
    return measured


def _on_gpu() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()


def _now() -> float:
    if _on_gpu():
        torch.cuda.synchronize()
    return time.perf_counter()


class RandomTokens(Dataset):
    """Dataset of random token rows, the same in every run.

    Args:
        case: Configuration, which sets the length and the vocabulary of the rows.
        num_rows: Number of rows.
    """

    def __init__(self, case: ScalingCase, num_rows: int) -> None:
        self._case = case
        self._num_rows = num_rows

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        shape = (self._case.seq_length + 1,)
        tokens = torch.randint(self._case.vocab_size, shape, generator=generator)
        return {"tokens": tokens[:-1], "labels": tokens[1:]}


def main(args: Sequence[str] | None = None) -> None:
    """Train the configuration; rank 0 writes the result.

    Args:
        args: Arguments; None uses those of this process.
    """
    options = job_parser().parse_args(args)
    case = ScalingCase(**json.loads(options.case))
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    seed_everything(1234, verbose=False)
    timer = StepTimer(options.warmup, options.steps, options.result)
    num_steps = options.warmup + options.steps
    trainer = Trainer(
        accelerator=options.accelerator,
        devices=case.devices,
        precision=options.precision,
        strategy=MegatronStrategy(
            tp=case.tp, recompute=options.recompute, **json.loads(options.strategy)
        ),
        max_steps=num_steps,
        gradient_clip_val=1.0,
        callbacks=[timer],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    rows = RandomTokens(case, case.batch_size * num_steps)
    trainer.fit(CausalLM(case.config), DataLoader(rows, case.batch_size // case.dp))


def job_parser() -> argparse.ArgumentParser:
    """Build the parser of the program's options."""
    parser = argparse.ArgumentParser(prog="python -m lightning_megatron.tasks.scaling.scaling_job")
    add = parser.add_argument
    add("--case", required=True, help="the fields of ScalingCase as JSON")
    add("--result", required=True, help="JSON file that rank 0 writes")
    add("--steps", type=int, required=True, help="steps that count")
    add("--warmup", type=int, required=True, help="steps before them")
    add("--precision", required=True, help="precision of the Trainer")
    add("--accelerator", required=True, help="accelerator of the Trainer")
    add("--recompute", help="activations that are recomputed")
    add("--strategy", default="{}", help="further options of the strategy as JSON")
    return parser


if __name__ == "__main__":
    main()
