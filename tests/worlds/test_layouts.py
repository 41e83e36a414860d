"""Every layout, division of the optimizer's state, recomputation and precision trains as one process
of ordinary Lightning: with the same losses, norms of gradients and final weights.

The simplest layouts are in tests/promises/test_layouts.py; here they run only with --sweeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_megatron import GPTConfig
from tests.fits import (
    GPT2,
    LLAMA,
    LLAMA_SIZES,
    SIZES,
    InTurns,
    Job,
    Module,
    Report,
    Vectors,
    check_equal,
    gpt_twin,
    run_job,
    run_jobs_on,
)
from tests.sweeps import chosen

KINDS = {
    "gpt2": GPT2,
    "gpt2 untied": GPTConfig.gpt2(**SIZES, tie_embeddings=False),
    "llama": LLAMA,
    "llama tied": GPTConfig.llama(**{**LLAMA_SIZES, "num_kv_heads": 1}, tie_embeddings=True),
    "post-norm": GPTConfig.gpt2(**SIZES, norm_position="post"),
    "gemma": GPTConfig.llama(
        **LLAMA_SIZES, activation="geglu_tanh", qk_norm=True, norm_offset=1.0,
        embedding_scale=5.7, sliding_window=5, tie_embeddings=True,
    ),
    "dropout": GPTConfig.gpt2(**SIZES, hidden_dropout=0.2, attention_dropout=0.1),
}  # fmt: skip
LAYOUTS: dict[str, dict[str, Any]] = {
    # Without stages, two microbatches per step test as much as four, with half of the messages.
    "tp4": {"tp": 4, "sequence_parallel": False, "microbatch_size": 4},
    "tp4+sp": {"tp": 4, "microbatch_size": 4},
    "tp2+sp dp2": {"tp": 2, "microbatch_size": 4},
    "pp4": {"pp": 4},
    "pp4 gpipe": {"pp": 4, "schedule": "gpipe"},
    "pp2 vpp2 dp2": {"pp": 2, "vpp": 2},
    "dp4": {"microbatch_size": 1},
    "cp2 dp2": {"cp": 2, "microbatch_size": 4},
    "tp2 pp2": {"tp": 2, "pp": 2, "sequence_parallel": False},
    "tp2+sp pp2": {"tp": 2, "pp": 2},
}
RECOMPUTED = {
    "full": "full",
    "selective": "selective",
    "parts": {"parts": ["norms", "activations"]},
    "last layer": {"layers": 1, "at": "last"},
    "offloaded": {"offload": True},
}
#: Buckets of a few hundred elements, so that every model has many.
SMALL = {"bucket_size": 500}
LATE = SMALL | {"overlap_parameters": True}
DIVISIONS: dict[str, dict[str, Any]] = {
    "dp4, many buckets": SMALL,
    "dp4, gathered beside the forward pass": LATE,
    "dp4, nothing overlaps": SMALL | {"overlap_gradients": False, "overlap_parameters": False},
    "dp4, gradients are checked": SMALL | {"check_gradients": True},
    "dp4, zero 0": SMALL | {"zero": 0},
    "dp4, whole parameters": {"optimizer_slices": "parameters"},
    "pp2 dp2, many buckets": LATE | {"pp": 2},
    "pp2 dp2, zero 0": SMALL | {"pp": 2, "zero": 0},
    "pp2 dp2, whole parameters": {"pp": 2, "optimizer_slices": "parameters"},
    "pp2 vpp2 dp2, many buckets": LATE | {"pp": 2, "vpp": 2},
    "zb-v dp2, many buckets": LATE | {"pp": 2, "vpp": 2, "schedule": "zb-v"},
    "zb-h1 dp2, gradients are checked": SMALL
    | {"pp": 2, "schedule": "zb-h1", "check_gradients": True},
    "tp2+sp dp2, overlapped": LATE | {"tp": 2, "overlap_tensor_parallel": True},
    "tp2+sp dp2, whole parameters": {"tp": 2, "optimizer_slices": "parameters"},
    "tp2+sp dp2, zero 0": SMALL | {"tp": 2, "zero": 0},
}
JOBS: dict[str, Job] = chosen(
    {f"{kind}, {name}": Job(KINDS[kind], LAYOUTS[name]) for kind in KINDS for name in LAYOUTS}
    | {
        f"{kind}, {name}, {part} recomputed": Job(KINDS[kind], LAYOUTS[name] | {"recompute": value})
        for kind in ("dropout", "llama")
        for name in ("pp4", "tp2 pp2", "tp2+sp pp2")
        for part, value in RECOMPUTED.items()
    }
    | {
        f"{kind}, {name}": Job(KINDS[kind], options)
        for kind in ("gpt2", "llama")
        for name, options in DIVISIONS.items()
    }
    # The trial of the first batch compares microbatches with the batch.
    | {
        f"{kind}, {name}, compared": Job(KINDS[kind], LAYOUTS[name] | {"check_microbatches": True})
        for kind in ("gpt2", "dropout")
        for name in LAYOUTS
    }
    | {f"gpt2, {name}, float32": Job(GPT2, LAYOUTS[name], precision="32-true") for name in LAYOUTS},
    "llama tied, tp4+sp",
    "gpt2 untied, pp2 vpp2 dp2",
    "post-norm, tp2 pp2",
    "gpt2, tp2+sp pp2, compared",
    "gemma, tp2+sp pp2",
    "dropout, dp4",
    "dropout, tp2+sp dp2",
    "dropout, cp2 dp2",
    "dropout, pp2 vpp2 dp2, compared",
    "dropout, tp2 pp2, selective recomputed",
    "dropout, pp4, offloaded recomputed",
    "llama, tp2+sp pp2, parts recomputed",
    "llama, tp2 pp2, last layer recomputed",
    "llama, dp4, gathered beside the forward pass",
    "gpt2, dp4, nothing overlaps",
    "gpt2, pp2 dp2, whole parameters",
    "gpt2, zb-v dp2, many buckets",
    "gpt2, zb-h1 dp2, gradients are checked",
    "llama, tp2+sp dp2, overlapped",
)
#: Layouts of eight processes with all of tensor, pipeline and data parallel ranks.
OF_EIGHT = {
    "1f1b": Job(LLAMA, {"tp": 2, "pp": 2}, steps=2),
    "dualpipe-v": Job(
        GPT2,
        {"tp": 2, "pp": 2, "vpp": 2, "schedule": "dualpipe-v", "microbatch_size": 1},
        steps=2,
    ),
}


class Part(nn.Module):
    """Two layers, and a spare layer that may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.spare = nn.Linear(6, 16), nn.Linear(16, 6), nn.Linear(6, 16)

    def forward(self, x: Tensor, with_spare: bool) -> Tensor:
        hidden = self.first(x) + self.spare(x) if with_spare else self.first(x)
        return self.second(hidden.tanh())


class Plain(Module):
    """Train torch.nn layers, of which one may be unused, with a given optimizer."""

    def __init__(self, make: Callable[[Any], Any], with_spare: bool = True) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.make, self.with_spare, self.part = make, with_spare, Part().double()

    def loss(self, batch: Any) -> Tensor:
        return F.mse_loss(self.part(batch[0], self.with_spare), batch[1])

    def configure_optimizers(self) -> Any:
        return self.make(self.part.parameters())


class TwoOptimizers(InTurns, Plain):
    """Train the layers by two optimizers."""

    def __init__(self) -> None:
        super().__init__(torch.optim.SGD)

    def configure_optimizers(self) -> Any:
        first = [*self.part.first.parameters(), *self.part.spare.parameters()]
        return [
            torch.optim.Adam(first, lr=0.05),
            torch.optim.SGD(self.part.second.parameters(), lr=0.1, momentum=0.9),
        ]


class Unfreeze(pl.Callback):
    """Add a frozen layer to the optimizer after the first epoch, as Lightning's finetuning
    callbacks do.
    """

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        spare: Any = pl_module.part.spare
        spare.requires_grad_(trainer.current_epoch > 0)
        if trainer.current_epoch == 1:
            trainer.optimizers[0].add_param_group({"params": list(spare.parameters()), "lr": 0.02})


def unfreezing() -> list[pl.Callback]:
    return [Unfreeze()]


def adamw(parameters: Iterable[Any], few: bool = False) -> torch.optim.Optimizer:
    return torch.optim.AdamW(list(parameters)[: 4 if few else None], lr=0.05, fused=True)


def plain(model: Callable[[], pl.LightningModule], **options: Any) -> Job:
    return Job(model, SMALL, data=partial(Vectors, (6,), 16), **{"steps": 4, **options})


OPTIMIZERS = {
    "sgd": plain(
        partial(Plain, partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1))
    ),
    "adagrad": plain(partial(Plain, partial(torch.optim.Adagrad, lr=0.1))),
    "adafactor": plain(partial(Plain, partial(torch.optim.Adafactor, lr=0.1))),
    "lbfgs": plain(partial(Plain, partial(torch.optim.LBFGS, lr=0.1, max_iter=3))),
    "fused adamw, zero 0": replace(plain(partial(Plain, adamw)), strategy={"zero": 0}),
    "unused": plain(partial(Plain, adamw, with_spare=False)),
    "two optimizers": plain(TwoOptimizers, trainer={"gradient_clip_val": None}),
    "unfrozen later": plain(
        partial(Plain, partial(adamw, few=True)),
        callbacks=unfreezing,
        steps=-1,
        trainer={"max_epochs": 3},
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def reports() -> dict[str, list[Report]]:
    return run_jobs_on(4, JOBS | OPTIMIZERS)


@pytest.mark.parametrize("name", JOBS)
def test_every_layout_trains_as_one_process(name: str, reports: Any) -> None:
    precision = JOBS[name].precision
    tolerance = 1e-10 if precision == "64-true" else 1e-5
    check_equal(reports[name], gpt_twin(KINDS[name.split(",")[0]], precision=precision), tolerance)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_trains_as_one_process(name: str, reports: Any) -> None:
    check_equal(reports[name], run_job(OPTIMIZERS[name].twin()), 1e-9)


def test_tensor_pipeline_and_data_parallel_ranks_together_train_as_one_process() -> None:
    for name, found in run_jobs_on(8, OF_EIGHT).items():
        check_equal(found, gpt_twin(OF_EIGHT[name].model, steps=2))


def test_one_process_under_the_strategy_trains_as_ordinary_lightning() -> None:
    check_equal([run_job(Job(KINDS["dropout"], {}))], gpt_twin(KINDS["dropout"]))
