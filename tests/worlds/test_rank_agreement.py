"""Ranks that must agree end the fit where a module, a batch or a value of one of them differs, and
name what differs.
"""

from __future__ import annotations

import logging
import random
import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from math import isfinite
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_megatron import CausalLM, NonFiniteError, RankMismatchError
from tests.fits import GPT2, VOCABULARY, Job, Language, Tokens, loader_of, trainer_of
from tests.world import run_world

WEIGHT = "model.final_norm.weight"


def trainer(strategy: Any, *callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    options = {"gradient_clip_val": None, "log_every_n_steps": 1, "max_epochs": 1, **options}
    return trainer_of(Job(strategy=strategy, steps=-1, trainer=options), 2, *callbacks)


# ---- batches


class Drawn(Tokens):
    """Sequences shifted by a number that is drawn when they are read."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        shift = int(16 * random.random())
        sample = super().__getitem__(index)
        return {name: (value + shift) % VOCABULARY for name, value in sample.items()}


class Draws(pl.Callback):
    """Draw a number on rank 0 before some steps."""

    def __init__(self, *numbers: int) -> None:
        self.numbers = numbers

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_rank == 0 and batch_idx + 1 in self.numbers:
            random.random()


class OtherSample(Tokens):
    """The same sequences but for one, on rank 1."""

    def __init__(self, index: int) -> None:
        super().__init__(32, 32)
        self.index = index

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = super().__getitem__(index)
        if dist.get_rank() == 1 and index == self.index:
            sample["tokens"] = sample["tokens"].roll(1)
        return sample


def fit_on(data: Any, validation: Any = None, draws: tuple[int, ...] = (), **layout: Any) -> float:
    random.seed(5)
    runner = trainer(layout, Draws(*draws))
    runner.fit(Language(), data, validation)
    return float(runner.callback_metrics["loss"])


def check_batches() -> None:
    drawn, plain = DataLoader(Drawn(32), 4), DataLoader(Tokens(8), 4)
    assert isfinite(fit_on(drawn, drawn, tp=2))
    for numbers, args, options in (
        ("training batch 2", (drawn, None, (1,)), {"pp": 2}),
        ("training batches 5 to 6", (drawn, None, (4,)), {"replica_check_interval": 3, "tp": 2}),
        # The fit ends between two comparisons.
        ("training batches 5 to 7", (DataLoader(Drawn(28), 4), None, (4,)), {"tp": 2}),
        ("validation batch 1", (plain, DataLoader(OtherSample(0), 4)), {"pp": 2}),
        ("validation batches 5 to 7", (plain, DataLoader(OtherSample(20), 4, sampler=range(28))), {"tp": 2}),
    ):  # fmt: skip
        words = rf"rank 1 has {numbers} of its data-parallel rank="
        with pytest.raises(RankMismatchError, match=words):
            fit_on(*args, **options)


# ---- modules


class Layer(nn.Module):
    """Layer of a user, with settings in plain attributes."""

    def __init__(
        self, width: int = 8, act: Callable[..., Tensor] = F.gelu, **settings: Any
    ) -> None:
        super().__init__()
        self.linear = nn.Linear(8, width)
        self.dropout, self.act = nn.Dropout(settings.pop("dropout", 0.0)), act
        self.eps, self.sizes, self.frozen = 1e-5, (2, 4), False
        vars(self).update(settings)
        self.linear.bias.requires_grad_(not self.frozen)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += int(dist.get_rank())
        return self.dropout(self.act(self.linear(x))).sum(-1, keepdim=True) + self.eps


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
    "layer.act='relu', the others 'gelu'": {"act": F.relu},
    "layer.dropout.p=0.5, the others 0.0": {"dropout": 0.5},
    "layer.sizes[1]=5, the others 4": {"sizes": (2, 5)},
    "layer.linear.weight='(9, 8), torch.float32', the others '(8, 8), torch.float32'": {"width": 9},
    "layer.linear.bias='(8,), torch.float32, frozen', the others '(8,), torch.float32'": {"frozen": True},
}  # fmt: skip
MODELS: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "config.hidden_dropout=0.5": ({"hidden_dropout": 0.5}, {"tp": 2}),
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


# ---- values that are not finite


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
        {"overlap_gradients": False}, ("gradient", 0, 3), {"gradient_clip_val": 1.0}, 3, f"{GRADIENT} 0 (nan) was",
    ),
    "gradient of a stage": ({"pp": 2}, ("gradient", 1, 3), {}, 3, f"{GRADIENT} 1 (nan) was"),
    "weight": ({"tp": 2}, ("weight", 1, 3), {}, 3, f"batch 3 the weight {WEIGHT} of rank 1 (nan)"),
    "first weight": ({}, ("weight", 1, 0), {}, 0, f"batch 0 the weight {WEIGHT} of rank 1 (nan) was"),
    "logged at the fourth batch": (
        {}, ("loss", 1, 2), {"log_every_n_steps": 4}, 3,
        "batch 2 the loss of rank 1 (inf) was not, before any other value. At batch 3 so were",
    ),
    "logged never": ({}, ("loss", 1, 2), {"log_every_n_steps": 50}, 6, "batch 2 the loss of rank 1"),
    "not looked at": ({"check_gradients": False}, ("loss", 1, 2), {}, 6, "no error"),
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


# ---- numbers of processes


class ScalesRate(Language):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01 * self.trainer.world_size)

    def on_train_epoch_end(self) -> None:
        assert self.trainer.world_size == 2


class AsksTorch(Language):
    def on_train_start(self) -> None:
        assert dist.get_world_size() == 2
        assert dist.get_world_size(dist.group.WORLD) == 2


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
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    check_batches()
    check_modules(rank)
    return errors_of_values(), notices()


@pytest.fixture(scope="module")
def ranks() -> list[tuple[Any, Any]]:
    """Run all cases; batches and modules of one rank that differ are refused on every rank."""
    return run_world(two_ranks, 2)


def test_every_rank_names_the_rank_the_batch_and_the_value_that_is_not_finite(
    ranks: list[tuple[Any, Any]],
) -> None:
    for errors, _ in ranks:
        for name, (*_, steps, words) in VALUES.items():
            assert errors[name][0] == steps, name
            assert words in errors[name][1], name


def test_the_first_read_of_the_number_of_processes_is_named_where_ranks_share_their_data(
    ranks: list[tuple[Any, Any]],
) -> None:
    (_, first), (_, second) = ranks
    assert not any(second.values())
    for axis in ("tp", "pp"):
        for kind, function in (
            (ScalesRate, ScalesRate.configure_optimizers),
            (AsksTorch, AsksTorch.on_train_start),
        ):
            (text,) = first[kind, axis]
            line = f"test_rank_agreement.py:{function.__code__.co_firstlineno + 1}"
            assert f"{line} reads the number of" in text
            assert "The number of data-parallel ranks, which read different data, is 1" in text
            assert "Use trainer.strategy.data_parallel_size" in text
    assert first[ScalesRate, "dp"] == first[AsksTorch, "dp"] == []
