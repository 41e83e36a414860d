"""Make one rank hang in a named way: `python -m tests.faults.run_hang sleep 1`."""

from __future__ import annotations

import os
import signal
import sys
import time
import warnings
from typing import Any

import torch
from lightning import Trainer
from torch import Tensor

from lightning_megatron import MegatronStrategy
from tests.strategy.tiny import TinyLM, loader

#: Time that a collective may wait (seconds).
TIMEOUT = 15.0


class HangingLM(TinyLM):
    """Hang at the third batch of one rank.

    Args:
        kind: ``sleep`` in Python, or ``stop`` the process.
        rank: The rank that hangs.
    """

    def __init__(self, kind: str, rank: int) -> None:
        super().__init__()
        self.kind, self.hanging_rank = kind, rank

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        if batch_idx == 2 and torch.distributed.get_rank() == self.hanging_rank:
            if self.kind == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(600)  # the line that the report names
        return super().training_step(batch, batch_idx)


def main() -> None:
    """Train until it hangs."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    kind, rank = sys.argv[1], int(sys.argv[2])
    quiet: dict[str, Any] = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    strategy = MegatronStrategy(timeout=TIMEOUT)
    trainer = Trainer(
        accelerator="cpu",
        devices=3,
        strategy=strategy,
        max_epochs=1,
        enable_checkpointing=False,
        **quiet,
    )
    trainer.fit(HangingLM(kind, rank), loader(32, 4))


if __name__ == "__main__":
    main()
