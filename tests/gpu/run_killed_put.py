"""Kill one rank while it puts tokens: ``python -m tests.gpu.run_killed_put cuda tokens``."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import warnings
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from lightning_megatron import ExpertClones, ExpertOptions, MegatronStrategy
from lightning_megatron.experts.transport import peer_transfer
from tests.fits import Language, Tokens
from tests.gpu.shared_gpu import is_shared, share
from tests.optimizer.fused_fits import SMALL

#: Rank that is killed, and the number of its last put (a step of two layers has four puts).
RANK, PUT = 1, 10
#: Minimum time of the put in which the rank is killed (cycles).
CYCLES = 2_000_000_000
#: Module and name of the function that puts, by accelerator and payload.
PUTS = {
    ("cuda", "tokens"): ("lightning_megatron.kernels.triton", "put_tokens"),
    ("cuda", "weights"): ("lightning_megatron.kernels.triton", "put_weights"),
    ("cpu", "tokens"): (peer_transfer.__name__, "all_gather_sequence"),
}
EXPERTS: Any = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 32}


class KilledLM(Language):
    """Kill a rank in one of its puts.

    Args:
        accelerator: Where the ranks compute.
        payload: Payload of the puts: ``tokens``, or ``weights`` of clones.
    """

    def __init__(self, accelerator: str, payload: str) -> None:
        super().__init__(replace(SMALL, experts=EXPERTS, mlp_bias=False, hidden_size=64))
        self.put_function = PUTS[accelerator, payload]

    def on_train_start(self) -> None:
        if self.global_rank != RANK:
            return
        module, name = importlib.import_module(self.put_function[0]), self.put_function[1]
        put, calls = getattr(module, name), iter(range(PUT + 1))

        def put_and_die(*args: Any) -> Any:
            if next(calls) < PUT:
                return put(*args)
            if self.device.type == "cuda":
                torch.cuda._sleep(CYCLES)
            put(*args)
            os.kill(os.getpid(), signal.SIGKILL)
            raise AssertionError("a killed process goes on")

        setattr(module, name, put_and_die)


def main() -> None:
    """Train until a rank is killed."""
    accelerator, payload = sys.argv[1:]
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if is_shared():
        share(2)
    clones = ExpertClones(1, min_rows=1) if payload == "weights" else 0
    strategy = MegatronStrategy(
        ep=2,
        job={"timeout": 60.0},
        experts=ExpertOptions(transport="one_sided", clones=clones),
    )
    trainer = Trainer(
        accelerator=accelerator,
        devices=2,
        strategy=strategy,
        precision="bf16-mixed" if accelerator == "cuda" else "32-true",
        max_steps=8,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(KilledLM(accelerator, payload), DataLoader(Tokens(64), batch_size=4))
    print("the training has ended", flush=True)


if __name__ == "__main__":
    main()
