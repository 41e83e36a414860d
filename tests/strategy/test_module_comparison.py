"""A module that differs on one rank is refused before anything is built on it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_megatron import CausalLM, GPTConfig, MegatronStrategy, RankMismatchError
from tests.strategy.tiny import TinyLM, loader
from tests.world import run_world


class Layer(nn.Module):
    """Layer of a user, with settings in plain attributes."""

    def __init__(
        self, width: int = 8, act: Callable[..., Tensor] = F.gelu, **settings: Any
    ) -> None:
        super().__init__()
        self.linear = nn.Linear(8, width)
        self.dropout = nn.Dropout(settings.pop("dropout", 0.0))
        self.act = act
        self.eps, self.sizes, self.frozen = 1e-5, (2, 4), False
        vars(self).update(settings)
        self.linear.bias.requires_grad_(not self.frozen)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += int(torch.distributed.get_rank())
        return self.dropout(self.act(self.linear(x))).sum(-1, keepdim=True) + self.eps


class Own(LightningModule):
    """Module without a model of this package."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.layer = Layer(**settings)
        self.started = random.random()

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(module: LightningModule, data: Any, **sizes: int) -> None:
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=MegatronStrategy(**sizes),
        max_steps=1,
        **dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False),
        enable_model_summary=False,
    )
    trainer.fit(module, data)
    trainer.fit_loop.epoch_loop.max_steps = 2
    trainer.fit(module, data)


@contextmanager
def refused(text: str) -> Iterator[pytest.ExceptionInfo[RankMismatchError]]:
    with pytest.raises(RankMismatchError) as caught:
        yield caught
    assert f"rank 1 has {text}" in str(caught.value)


def _check_differences(rank: int, size: int) -> None:
    vectors = DataLoader(TensorDataset(torch.ones(4, 8)), 2)
    own = {
        "layer.eps=0.1, the others 1e-05": {"eps": 0.1},
        "layer.act='relu', the others 'gelu'": {"act": F.relu},
        "layer.dropout.p=0.5, the others 0.0": {"dropout": 0.5},
        "layer.sizes[1]=5, the others 4": {"sizes": (2, 5)},
        "layer.linear.weight='(9, 8), torch.float32', the others '(8, 8), torch.float32'": {"width": 9},
        "layer.linear.bias='(8,), torch.float32, frozen', the others '(8,), torch.float32'": {"frozen": True},
    }  # fmt: skip
    for text, settings in own.items():
        with refused(text):
            fit(Own(**(settings if rank else {})), vectors)
    # What LightningModules keep for themselves, and what steps have changed, may differ.
    random.seed(rank)
    fit(Own(), vectors)
    gpt = {
        "config.hidden_dropout=0.5": {"hidden_dropout": 0.5},
        "config.hidden_size=32, the others 16": {"hidden_size": 32},
        "config.num_layers=3, the others 2": {"num_layers": 3},
    }
    for sizes in ({"tp": 2}, {"pp": 2}):
        for text, settings in gpt.items():
            module = TinyLM(**(settings if rank else {}))
            module.hparams.clear()
            with refused(text):
                fit(module, loader(), **sizes)
        fit(TinyLM(), loader(), **sizes)
    sizes = {"vocab_size": 32, "max_seq_length": 16, "num_layers": 2, "hidden_size": 16}
    config = GPTConfig.gpt2(**sizes, num_heads=2, norm_eps=1e-6 if rank else 1e-5)
    with refused("hparams['config']['norm_eps']='1e-06', the others '1e-05'") as error:
        fit(CausalLM(config), loader(), pp=2)
    assert "belongs into save_hyperparameters(ignore=...)" in str(error.value)


def test_the_first_difference_of_one_ranks_module_is_named_with_both_values() -> None:
    run_world(_check_differences, 2)
