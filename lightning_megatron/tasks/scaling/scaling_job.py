"""Program that trains one configuration of a scaling study and writes the measurements.

    python -m lightning_megatron.tasks.scaling.scaling_job '{"case": {"hidden_size": 96, ...}, ...}'

Each configuration runs in a separate program, so that one that runs out of memory does not end
the others.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

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


@dataclass(frozen=True)
class ScalingJob:
    """Training of one configuration.

    Args:
        result: JSON file that rank 0 writes.
        steps: Number of measured steps (steps).
        warmup: Number of steps before them (steps).
        strategy: Options of the strategy.
    """

    case: ScalingCase
    result: str
    steps: int
    warmup: int
    precision: str
    strategy: Mapping[str, Any]

    @property
    def command(self) -> list[str]:
        """Command line of the program that runs this job."""
        return [sys.executable, "-m", __name__, json.dumps(asdict(self))]

    def run(self) -> None:
        """Train the configuration; rank 0 writes the result."""
        warnings.simplefilter("ignore")
        logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
        seed_everything(1234, verbose=False)
        num_steps = self.warmup + self.steps
        precision: Any = self.precision
        trainer = Trainer(
            accelerator="cuda" if torch.cuda.is_available() else "cpu",
            devices=self.case.devices,
            precision=precision,
            strategy=MegatronStrategy(**self.strategy),
            max_steps=num_steps,
            gradient_clip_val=1.0,
            callbacks=[StepTimer(self.warmup, self.steps, self.result)],
            logger=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=False,
        )
        rows = RandomTokens(self.case, self.case.batch_size * num_steps)
        trainer.fit(
            CausalLM(self.case.config), DataLoader(rows, self.case.batch_size // self.case.dp)
        )


if __name__ == "__main__":
    values = json.loads(sys.argv[1])
    ScalingJob(**{**values, "case": ScalingCase(**values["case"])}).run()
