"""Program that trains one configuration of a scaling study and writes the measurements.

    python -m lightning_megatron.tasks.scaling.scaling_job --case '{"hidden_size": 96, ...}' ...

Each configuration runs in a separate program, so that one that runs out of memory does not end
the others.
"""

from __future__ import annotations

import argparse
import json
import logging
import warnings
from collections.abc import Sequence

import torch
from lightning.pytorch import Trainer, seed_everything
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_megatron import CausalLM, MegatronStrategy
from lightning_megatron.tasks.scaling.measured_job import StepTimer
from lightning_megatron.tasks.scaling.scaling_cases import ScalingCase


class RandomTokens(Dataset):
    """Dataset of random token rows, the same in every run.

    Args:
        case: Configuration, which sets the length and the vocabulary of the rows.
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
