"""Script of a user that starts the other ranks itself: `python -m tests.worlds.user_script dense`.

``dense`` and ``experts`` print the choices of a fit; the dense model overflows in its first step, and
runs as in a source tree that was never installed: the distribution's metadata cannot be found.

Other kinds fail at the third batch of rank 1: they ``raise``; or ``hang``, where the other ranks wait
and no closed connection wakes them up (``hang nowhere`` only waits); or name a hook that raises; or
a way to end of ``ENDS``; or the ``memory`` of a device with numbers of this script is full.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from lightning_megatron import GPTConfig, MegatronStrategy
from lightning_megatron.optimizer.loss_scale import DynamicLossScale
from lightning_megatron.strategy import out_of_memory
from lightning_megatron.strategy.optimization.precision import MegatronPrecision
from tests.fits import GPT2, SIZES, Job, Language, Tokens, trainer_of

ROOT = Path(__file__).parents[2]
EXPERTS: dict[str, Any] = {"num_experts": 4, "top_k": 1, "ffn_hidden_size": 16}
#: Models of the kinds that print their choices.
MODELS = {
    "dense": GPT2,
    "experts": GPTConfig.gpt2(**{**SIZES, "num_layers": 2}, mlp_bias=False, experts=EXPERTS),
}
#: Ways in which a rank ends without an error.
ENDS: dict[str, Callable[[], object]] = {
    "os_exit": lambda: os._exit(7),
    "sys_exit": lambda: sys.exit(0),
    "sigsegv": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "interrupt": lambda: signal.raise_signal(signal.SIGINT),
}
_LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
_LAUNCHERS += ("PL_GLOBAL_SEED",)


def environment(**variables: str) -> dict[str, str]:
    """Return the environment of a process that no launcher has started."""
    kept = {name: value for name, value in os.environ.items() if name not in _LAUNCHERS}
    return {**kept, "OMP_NUM_THREADS": "1", **variables}


def run_script(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run this script in a new process."""
    return subprocess.run(
        [sys.executable, "-m", "tests.worlds.user_script", *arguments],
        cwd=ROOT, env=environment(**variables), capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip


class Fails(Language):
    """Fail at the third batch of rank 1."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        if hasattr(self, kind):
            setattr(self, kind, self.fail)

    def fail(self, *args: Any, **kwargs: Any) -> None:
        if self.global_rank == 1:
            raise ArithmeticError("the third batch is bad")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 2:
            # In this step of the last stage, rank 1 counts as rank 0.
            if torch.distributed.get_rank() == 1 and self.kind in ENDS:
                ENDS[self.kind]()
            if torch.distributed.get_rank() == 1 and self.kind in ("raise", "hang"):
                raise ArithmeticError("the third batch is bad")
            if torch.distributed.get_rank() == 1 and self.kind == "memory":
                kept_by_the_user = torch.zeros(3, 2**20, dtype=torch.float64)
                raise torch.OutOfMemoryError(f"no room beside {kept_by_the_user.nbytes} bytes")
            if self.kind.startswith("hang"):
                # Like a rank that waits in NCCL, this rank is not woken up by anything.
                print("waits forever", file=sys.stderr, flush=True)
                time.sleep(600)
        return super().training_step(batch, batch_idx)


def fail(kind: str) -> None:
    """Train two stages until a rank fails."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    # A shell starts programs in the background with this signal ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    full = out_of_memory.DeviceMemory(40 * 2**20, 55 * 2**20, 2**20, 64 * 2**20)
    if kind == "memory":
        out_of_memory.device_memory = lambda device: full
    trainer = trainer_of(Job(strategy={"pp": 2}, steps=4), 2)
    trainer.fit(Fails(kind), DataLoader(Tokens(32), batch_size=8))


def show_choices(kind: str) -> None:
    """Train a few steps as a user would."""
    find = metadata.Distribution.from_name

    def hide_this_package(name: str) -> metadata.Distribution:
        if name.replace("_", "-") == "lightning-megatron":
            raise metadata.PackageNotFoundError(name)
        return find(name)

    metadata.Distribution.from_name = staticmethod(hide_this_package)  # type: ignore[method-assign]
    if kind == "dense":
        scale = DynamicLossScale(initial=2.0**40, hysteresis=1)
        plugins = [MegatronPrecision("16-mixed", scale)]
        options: Any = {"devices": 1, "plugins": plugins, "strategy": MegatronStrategy()}
    else:
        strategy = MegatronStrategy(tp=2, ep=2, etp=1)
        options = {"devices": 2, "precision": "bf16-mixed", "strategy": strategy}
    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    trainer = pl.Trainer(accelerator="cpu", max_steps=4, **quiet, **options)
    trainer.fit(Language(MODELS[kind]), DataLoader(Tokens(32), batch_size=8))


if __name__ == "__main__":
    (show_choices if sys.argv[1] in MODELS else fail)(sys.argv[1])
