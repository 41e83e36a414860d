"""Script whose training fails on one rank in a named way:
`python -m tests.strategy.run_failure raise 3`, or `... teardown 1`.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from lightning import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_megatron import MegatronStrategy
from tests.strategy.tiny import TinyLM, loader

#: Ways in which a rank ends without an error.
ENDS: dict[str, Callable[[], object]] = {
    "os_exit": lambda: os._exit(7),
    "sys_exit": lambda: sys.exit(0),
    "sigsegv": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "interrupt": lambda: signal.raise_signal(signal.SIGINT),
}


class FailingLM(TinyLM):
    """Fail at the third batch of one rank.

    Args:
        kind: ``raise``; or ``hang``: the other ranks wait where no closed connection wakes them up;
            or the name of a hook that raises; or a way to end of ``ENDS``.
        rank: Rank that fails.
    """

    def __init__(self, kind: str, rank: int) -> None:
        super().__init__()
        self.kind, self.failing_rank = kind, rank
        if hasattr(self, kind):
            setattr(self, kind, self.fail)

    def fail(self, *args: Any, **kwargs: Any) -> None:
        if self.global_rank == self.failing_rank:
            raise ArithmeticError("the third batch is bad")

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        if (
            batch_idx == 2
            and self.kind in ("raise", "hang")
            and torch.distributed.get_rank() == self.failing_rank
        ):
            raise ArithmeticError("the third batch is bad")
        if (
            batch_idx == 2
            and torch.distributed.get_rank() == self.failing_rank
            and self.kind in ENDS
        ):
            ENDS[self.kind]()
        if batch_idx == 2 and self.kind == "hang":
            # Like a rank that waits in NCCL, this rank is not woken up by anything.
            print("waits forever", file=sys.stderr, flush=True)
            time.sleep(600)
        return super().training_step(batch, batch_idx)


def main() -> None:
    """Train until a rank fails."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    kind, rank = sys.argv[1], int(sys.argv[2])
    quiet: dict[str, Any] = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    strategy = MegatronStrategy(pp=2, microbatch_size=2)
    # One rank that waits forever shows the same as three.
    devices = 4 if rank == 3 else 2
    savers = (
        [ModelCheckpoint(tempfile.mkdtemp(dir=sys.argv[3]))] if kind == "on_save_checkpoint" else []
    )
    quiet |= {"enable_checkpointing": bool(savers), "callbacks": savers}
    trainer = Trainer(accelerator="cpu", devices=devices, strategy=strategy, max_epochs=1, **quiet)
    trainer.fit(FailingLM(kind, rank), loader(32, 4))


if __name__ == "__main__":
    # A shell starts programs in the background with this signal ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    main()
