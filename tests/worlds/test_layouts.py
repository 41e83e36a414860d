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
    Language,
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
#: Without stages, two microbatches per step test as much as four, with half of the messages.
HALF = {"microbatch_size": 4}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp4": {"tp": 4, "sequence_parallel": False, **HALF},
    "tp4+sp": {"tp": 4, **HALF},
    "tp2+sp dp2": {"tp": 2, **HALF},
    "pp4": {"pp": 4},
    "pp4 gpipe": {"pp": 4, "schedule": "gpipe"},
    "pp2 vpp2 dp2": {"pp": 2, "vpp": 2},
    "dp4": {"microbatch_size": 1},
    "cp2 dp2": {"cp": 2, **HALF},
    "tp2 pp2": {"tp": 2, "pp": 2, "sequence_parallel": False},
    "tp2+sp pp2": {"tp": 2, "pp": 2},
}
#: Buckets of a few hundred elements, so that every model has many.
SMALL = {"optimizer.bucket_size": 500}
LATE = SMALL | {"optimizer.overlap_parameters": True}
#: Ways to recompute, to divide the optimizer's state, to communicate and to compare microbatches.
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "selective": ("dropout", LAYOUTS["tp2 pp2"] | {"recompute": "selective"}),
    "offloaded": ("dropout", {"pp": 4, "recompute": {"offload": True}}),
    "parts": ("llama", {"tp": 2, "pp": 2, "recompute": {"parts": ["norms", "activations"]}}),
    "last layer": ("llama", LAYOUTS["tp2 pp2"] | {"recompute": {"layers": 1, "at": "last"}}),
    "compared": ("gpt2", {"tp": 2, "pp": 2, "job.check_microbatches": True}),
    "compared, dropout": ("dropout", {"pp": 2, "vpp": 2, "job.check_microbatches": True}),
    "gathered late": ("llama", LATE),
    "nothing overlaps": (
        "gpt2",
        SMALL | {"optimizer.overlap_gradients": False, "optimizer.overlap_parameters": False},
    ),
    "zb-v": ("gpt2", LATE | {"pp": 2, "vpp": 2, "schedule": "zb-v"}),
    "checked": ("gpt2", SMALL | {"pp": 2, "schedule": "zb-h1", "job.check_gradients": True}),
    "overlapped": ("llama", LATE | {"tp": 2, "linear.overlap": True}),
}
JOBS: dict[tuple[str, str], Job] = chosen(
    {(kind, name): Job(KINDS[kind], LAYOUTS[name]) for kind in KINDS for name in LAYOUTS},
    ("llama tied", "tp4+sp"),
    ("gpt2 untied", "pp2 vpp2 dp2"),
    ("post-norm", "tp2 pp2"),
    ("gemma", "tp2+sp pp2"),
    ("dropout", "dp4"),
    ("dropout", "tp2+sp dp2"),
    ("dropout", "cp2 dp2"),
)
JOBS |= {(kind, way): Job(KINDS[kind], layout) for way, (kind, layout) in WAYS.items()}

#: Layouts of eight processes with all of tensor, pipeline and data parallel ranks.
OF_EIGHT = {
    "1f1b": Job(LLAMA, {"tp": 2, "pp": 2}, steps=2),
    "dualpipe-v": Job(
        GPT2,
        {"tp": 2, "pp": 2, "vpp": 2, "schedule": "dualpipe-v", "microbatch_size": 1},
        steps=2,
    ),
}


class Plain(Module):
    """Train torch.nn layers, of which one may be unused, with a given optimizer."""

    def __init__(self, make: Callable[[Any], Any], with_spare: bool = True) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.make, self.with_spare = make, with_spare
        sizes = {"first": (6, 16), "second": (16, 6), "spare": (6, 16)}
        self.part = nn.ModuleDict({name: nn.Linear(*size) for name, size in sizes.items()}).double()

    def loss(self, batch: Any) -> Tensor:
        hidden = self.part["first"](batch[0])
        if self.with_spare:
            hidden = hidden + self.part["spare"](batch[0])
        return F.mse_loss(self.part["second"](hidden.tanh()), batch[1])

    def configure_optimizers(self) -> Any:
        return self.make(self.part.parameters())


class TwoOptimizers(InTurns, Plain):
    """Train the layers by two optimizers."""

    def __init__(self) -> None:
        super().__init__(torch.optim.SGD)

    def configure_optimizers(self) -> Any:
        first = [*self.part["first"].parameters(), *self.part["spare"].parameters()]
        return [
            torch.optim.Adam(first, lr=0.05),
            torch.optim.SGD(self.part["second"].parameters(), lr=0.1, momentum=0.9),
        ]


class Unfreeze(pl.Callback):
    """Add a frozen layer to the optimizer after the first epoch, as Lightning's finetuning
    callbacks do.
    """

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        spare: Any = pl_module.part["spare"]
        spare.requires_grad_(trainer.current_epoch > 0)
        if trainer.current_epoch == 1:
            trainer.optimizers[0].add_param_group({"params": list(spare.parameters()), "lr": 0.02})


def unfreezing() -> list[pl.Callback]:
    return [Unfreeze()]


def adamw(parameters: Iterable[Any], few: bool = False) -> torch.optim.Optimizer:
    return torch.optim.AdamW(list(parameters)[: 4 if few else None], lr=0.05, fused=True)


def plain(kind: Any, options: Any = None, **others: Any) -> Job:
    model = partial(Plain, partial(kind, **options) if options else kind)
    return Job(model, SMALL, data=partial(Vectors, (6,), 16), **{"steps": 4, **others})


class Centred(torch.optim.AdamW):
    """AdamW without the mean of each gradient, which needs whole parameters."""

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.grad -= parameter.grad.mean()
        return super().step(closure)


class WholeParameters(Language):
    """Train a GPT whose tied table has a copy on another stage."""

    def configure_optimizers(self) -> Any:
        return Centred(self.parameters(), lr=1e-2, eps=1e-3)


OPTIMIZERS = {
    "whole parameters": Job(WholeParameters, {"pp": 2}),
    "sgd": plain(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "adafactor": plain(torch.optim.Adafactor, {"lr": 0.1}),
    "lbfgs": plain(torch.optim.LBFGS, {"lr": 0.1, "max_iter": 3}),
    "fused adamw, zero 0": replace(plain(adamw), strategy={"optimizer.zero": 0}),
    "unused": replace(plain(adamw), model=partial(Plain, adamw, with_spare=False)),
    "two optimizers": replace(plain(adamw, trainer={"gradient_clip_val": None}), model=TwoOptimizers),
    "unfrozen later": plain(
        adamw, {"few": True}, callbacks=unfreezing, steps=-1, trainer={"max_epochs": 3}
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def reports() -> dict[str, list[Report]]:
    return run_jobs_on(4, JOBS | OPTIMIZERS)


@pytest.mark.parametrize("name", JOBS, ids=", ".join)
def test_every_layout_trains_as_one_process(name: tuple[str, str], reports: Any) -> None:
    check_equal(reports[name], gpt_twin(KINDS[name[0]]))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_trains_as_one_process(name: str, reports: Any) -> None:
    check_equal(reports[name], run_job(OPTIMIZERS[name].twin()), 1e-9)


def test_tensor_pipeline_and_data_parallel_ranks_together_train_as_one_process() -> None:
    for name, found in run_jobs_on(8, OF_EIGHT).items():
        check_equal(found, gpt_twin(OF_EIGHT[name].model, steps=2))


def test_one_process_under_the_strategy_trains_as_ordinary_lightning() -> None:
    check_equal([run_job(Job(KINDS["dropout"], {}))], gpt_twin(KINDS["dropout"]))
