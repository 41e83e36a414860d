"""Ranks that must agree end the fit where a module, a batch or a value of one of them differs, and
name what differs.
"""

from __future__ import annotations

import random
import re
import warnings
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_megatron import CausalLM
from lightning_megatron.errors import NonFiniteError, RankMismatchError
from tests.fits import GPT2, VOCABULARY, Job, Language, Tokens, loader_of, trainer_of
from tests.world import run_world

WEIGHT = "model.final_norm.weight"


def trainer(strategy: Any, *callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    options = {"gradient_clip_val": None, "log_every_n_steps": 1, "max_epochs": 1, **options}
    return trainer_of(Job(strategy=strategy, steps=-1, trainer=options), 2, *callbacks)


class Drawn(Tokens):
    """Sequences shifted by a number that is drawn when they are read."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        shift = int(16 * random.random())
        sample = super().__getitem__(index)
        return {name: (value + shift) % VOCABULARY for name, value in sample.items()}


class Draws(pl.Callback):
    """Draw a number on rank 0 before the fifth batch."""

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_rank == 0 and batch_idx == 3:
            random.random()


class OtherSample(Tokens):
    """The same sequences but for one, on rank 1."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = super().__getitem__(index)
        if dist.get_rank() == 1 and index == 20:
            sample["tokens"] = sample["tokens"].roll(1)
        return sample


def fit_on(data: Any, validation: Any = None, *callbacks: pl.Callback, **layout: Any) -> None:
    random.seed(5)
    trainer(layout, *callbacks).fit(Language(), data, validation)


def check_batches() -> None:
    drawn, other = DataLoader(Drawn(32), 4), DataLoader(OtherSample(32, 32), 4, sampler=range(28))
    fit_on(drawn, drawn, tp=2)
    for numbers, args, options in (
        (
            "training batches 5 to 6",
            (drawn, None, Draws()),
            {"job.replica_check_interval": 3, "tp": 2},
        ),
        # The fit ends between two comparisons.
        ("training batches 5 to 7", (DataLoader(Drawn(28), 4), None, Draws()), {"tp": 2}),
        ("validation batches 5 to 7", (DataLoader(Tokens(8), 4), other), {"pp": 2}),
    ):
        with pytest.raises(RankMismatchError, match=rf"rank 1 has {numbers} of its data-parallel"):
            fit_on(*args, **options)


class Layer(nn.Module):
    """Layer of a user, with settings in plain attributes."""

    def __init__(self, width: int = 8, frozen: bool = False, **settings: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(8, width)
        self.linear.bias.requires_grad_(not frozen)
        self.act, self.eps, self.sizes, self.calls = F.gelu, 1e-5, (2, 4), 0
        vars(self).update(settings)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += int(dist.get_rank())
        return self.act(self.linear(x)).sum(-1, keepdim=True) + self.eps


class Own(pl.LightningModule):
    """Module without a model of this package."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.layer, self.started = Layer(**settings), random.random()

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


#: Settings of rank 1, and what the error says that it has.
OWN: dict[str, dict[str, Any]] = {
    "layer.eps=0.1, the others 1e-05": {"eps": 0.1},
    "layer.sizes[1]=5, the others 4": {"sizes": (2, 5)},
    "layer.linear.weight='(9, 8), torch.float32', the others '(8, 8), torch.float32'": {"width": 9},
    "layer.linear.bias='(8,), torch.float32, frozen', the others '(8,), torch.float32'": {"frozen": True},
}  # fmt: skip
MODELS: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "config.hidden_size=64, the others 32": ({"hidden_size": 64}, {"tp": 2}),
    "config.num_layers=6, the others 4": ({"num_layers": 6}, {"pp": 2}),
}


def check_modules(rank: int) -> None:
    def refuse(text: str, module: pl.LightningModule, data: Any, **layout: Any) -> str:
        with pytest.raises(RankMismatchError, match=re.escape(f"rank 1 has {text}")) as caught:
            trainer(layout).fit(module, data)
        return str(caught.value)

    vectors = DataLoader(TensorDataset(torch.ones(4, 8).double()), 2)
    tokens = DataLoader(Tokens(4), 4)
    for text, settings in OWN.items():
        refuse(text, Own(**(settings if rank else {})), vectors)
    # What LightningModules keep for themselves, and what steps have changed, may differ.
    random.seed(rank)
    module, runner = Own(), trainer({})
    runner.fit(module, vectors)
    runner.fit_loop.max_epochs = 2
    runner.fit(module, vectors)
    for text, (changes, layout) in MODELS.items():
        refuse(text, Language(replace(GPT2, **(changes if rank else {}))), tokens, **layout)
    config = replace(GPT2, norm_eps=1e-6 if rank else 1e-5)
    text = "hparams['config']['norm_eps']='1e-06', the others '1e-05'"
    assert "save_hyperparameters(ignore=...)" in refuse(text, CausalLM(config), tokens, pp=2)


class Spoiled(Language):
    """Have a ``loss``, ``gradient`` or ``weight`` that is not finite at a batch of one rank."""

    def __init__(self, kind: str, rank: int, batch: int) -> None:
        super().__init__()
        self.place = kind, rank, batch

    def spoils(self, kind: str, batch_idx: int) -> bool:
        return (kind, dist.get_rank(), batch_idx) == self.place

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.spoils("weight", batch_idx):
            with torch.no_grad():
                self.get_parameter(WEIGHT)[1] = torch.nan

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        if self.spoils("loss", batch_idx):
            loss = loss * torch.inf
        if self.spoils("gradient", batch_idx):
            self.get_parameter(WEIGHT).register_hook(lambda gradient: gradient * torch.nan)
        return loss


GRADIENT = f"at training batch 3 the gradient {WEIGHT} of rank"
#: Strategy, place of the value, options of the Trainer; steps before the error, and its words.
VALUES: dict[str, tuple[dict[str, Any], tuple[str, int, int], dict[str, Any], int, str]] = {
    "loss": ({}, ("loss", 1, 3), {}, 3, "at training batch 3 the loss of rank 1 (inf) was not"),
    "loss of stages": (
        {"pp": 2}, ("loss", 1, 3), {}, 3, "3 the loss of rank 0 (inf), the loss of rank 1 (inf) were not",
    ),
    "gradient": ({}, ("gradient", 1, 3), {}, 3, f"{GRADIENT} 1 (nan) was"),
    "clipped gradient": (
        {"optimizer.overlap_gradients": False}, ("gradient", 0, 3), {"gradient_clip_val": 1.0}, 3, f"{GRADIENT} 0 (nan) was",
    ),
    "weight": ({"tp": 2}, ("weight", 1, 3), {}, 3, f"batch 3 the weight {WEIGHT} of rank 1 (nan)"),
    "logged at the fourth batch": (
        {}, ("loss", 1, 2), {"log_every_n_steps": 4}, 3,
        "batch 2 the loss of rank 1 (inf) was not, before any other value. At batch 3 followed",
    ),
    "logged never": ({}, ("loss", 1, 2), {"log_every_n_steps": 50}, 6, "batch 2 the loss of rank 1"),
    "not looked at": ({"job.check_gradients": False}, ("loss", 1, 2), {}, 6, "no error"),
}  # fmt: skip


def errors_of_values() -> dict[str, tuple[int, str]]:
    errors = {}
    for name, (layout, place, options, *_) in VALUES.items():
        runner, text = trainer(layout, **options, max_steps=6), "no error"
        try:
            runner.fit(Spoiled(*place), loader_of(Tokens(48), 8, runner))
        except NonFiniteError as error:
            text = str(error)
        errors[name] = runner.global_step, text
    return errors


class ScalesRate(Language):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01 * self.trainer.world_size)


class AsksTorch(Language):
    def on_train_start(self) -> None:
        assert dist.get_world_size() == 2


def notices() -> dict[tuple[type, str], list[str]]:
    """Return the warnings of fits about the number of processes."""
    original, found = dist.get_world_size, {}
    for kind in (ScalesRate, AsksTorch):
        for axis in ("tp", "pp", "dp"):
            runner = trainer({} if axis == "dp" else {axis: 2}, max_epochs=2)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                runner.fit(kind(), loader_of(Tokens(8), 8, runner))
            texts = [str(warning.message) for warning in caught]
            found[kind, axis] = [text for text in texts if "reads the number of processes" in text]
    assert dist.get_world_size is original
    return found


def two_ranks(rank: int, size: int) -> tuple[Any, Any]:
    check_batches()
    check_modules(rank)
    return errors_of_values(), notices()


@pytest.fixture(scope="module")
def ranks() -> list[tuple[Any, Any]]:
    return run_world(two_ranks, 2)


def test_every_rank_names_the_rank_the_batch_and_the_value_that_is_not_finite(ranks):
    for errors, _ in ranks:
        for name, (*_, steps, words) in VALUES.items():
            assert (errors[name][0], words in errors[name][1]) == (steps, True), name


def test_the_first_read_of_the_number_of_processes_is_named_where_ranks_share_their_data(ranks):
    (_, first), (_, second) = ranks
    assert not any(second.values())
    for kind, function in ((ScalesRate, "configure_optimizers"), (AsksTorch, "on_train_start")):
        line = getattr(kind, function).__code__.co_firstlineno + 1
        for axis in ("tp", "pp"):
            (text,) = first[kind, axis]
            assert f"test_rank_agreement.py:{line} reads the number of" in text
            assert "The number of data-parallel ranks, which read different data, is 1" in text
            assert "Use trainer.strategy.data_parallel_size" in text
    assert first[ScalesRate, "dp"] == first[AsksTorch, "dp"] == []
