"""Tests of named validation and test sets: each set has the mean loss of its tokens, and all sets
together that of all tokens, in every layout.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_megatron import CausalLM, GPTConfig, MegatronStrategy, TokenDataModule
from tests.data.recorder import write_corpus
from tests.strategy.log_cases import Block
from tests.world import run_world

CONFIG = GPTConfig.llama(
    vocab_size=128, max_seq_length=8, num_layers=2, hidden_size=16, num_heads=2, ffn_hidden_size=32
)
LAYOUTS: dict[str, Callable[[], Any]] = {
    "ddp": lambda: "ddp",
    "dp2": MegatronStrategy,
    "tp2": lambda: MegatronStrategy(tp=2, tensor_parallel_plan={}),
    "pp2": lambda: MegatronStrategy(pp=2, microbatch_size=2),
}


def write_corpora(folder: Path) -> dict[str, Any]:
    """Write corpora whose sets have different sizes and texts."""
    return {
        "train": write_corpus(folder / "train", 100),
        "val": {
            "low": write_corpus(folder / "low", 50),
            "high": [write_corpus(folder / "more", 20, 60), write_corpus(folder / "most", 20, 100)],
        },
        "test": {"only": write_corpus(folder / "only", 30, 30)},
    }


def trainer_of(strategy: Callable[[], Any], devices: int, folder: Path, **options: Any) -> Trainer:
    seed_everything(1, verbose=False)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.CRITICAL)
    quiet: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False}
    quiet |= {"log_every_n_steps": 1, "logger": CSVLogger(folder, "csv", version=0)}
    return Trainer(
        **{**quiet, **options},
        accelerator="cpu",
        devices=devices,
        strategy=strategy(),
        precision="64-true",
        use_distributed_sampler=False,
        default_root_dir=folder,
    )


def fit(
    paths: dict[str, Any], strategy: Callable[[], Any], devices: int, folder: Path
) -> dict[str, Any]:
    """Fit with validation after every second step, test, and return the logged metrics."""
    module = CausalLM(CONFIG, learning_rate=1e-2, max_steps=9)
    data = TokenDataModule(**paths, seq_length=8, global_batch_size=4)
    best = ModelCheckpoint(folder, "{step}", "val_loss", save_top_k=-1)
    trainer = trainer_of(
        strategy, devices, folder, max_steps=4, val_check_interval=2, callbacks=[best]
    )
    trainer.fit(module, data)
    logged = {"fit": logged_numbers(trainer), "best": float(best.best_model_score or math.nan)}
    limited = trainer_of(strategy, devices, folder / "two", max_steps=4, limit_val_batches=1)
    limited.fit(module, data, ckpt_path=folder / "step=2.ckpt")
    logged["limited"] = logged_numbers(limited)
    trainer.test(module, data, verbose=False)
    logged["test"] = logged_numbers(trainer)
    if trainer.is_global_zero:
        logged["rows"] = (folder / "csv" / "version_0" / "metrics.csv").read_text().splitlines()[0]
    return logged


def logged_numbers(trainer: Trainer) -> dict[str, float]:
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def fit_all(rank: int, size: int, folder: Path, paths: dict[str, Any]) -> dict[str, Any]:
    logged = {}
    for name, strategy in LAYOUTS.items():
        logged[name] = fit(paths, strategy, size, folder / name)
        dist.barrier()
    return logged


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return write_corpora(tmp_path_factory.mktemp("corpora"))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, paths: dict[str, Any]) -> dict[str, Any]:
    return fit(paths, lambda: "auto", 1, tmp_path_factory.mktemp("alone"))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, paths: dict[str, Any]) -> list[dict[str, Any]]:
    return run_world(fit_all, 2, tmp_path_factory.mktemp("two"), paths)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_of_sets_match_one_process(
    alone: dict[str, Any], ranks: list[dict[str, Any]], layout: str
) -> None:
    for logged in ranks:
        for phase in ("fit", "limited", "test"):
            assert logged[layout][phase] == pytest.approx(alone[phase], rel=1e-10)
        assert logged[layout]["best"] == pytest.approx(alone["best"], rel=1e-10)


def test_losses_are_means_over_the_tokens_of_each_set_and_of_all_sets(
    tmp_path: Path, paths: dict[str, Any]
) -> None:
    module = CausalLM(CONFIG)
    data = TokenDataModule(**paths, seq_length=8, batch_size=3)
    trainer = trainer_of(lambda: "auto", 1, tmp_path)
    trainer.validate(module, data, verbose=False)
    losses_by_set = {}
    for name, loader in zip(("low", "high"), data.val_dataloader(), strict=True):
        losses = []
        for batch in loader:
            logits = module.model(batch["tokens"])
            labels = batch["labels"]
            losses.append(
                F.cross_entropy(logits[labels != -100], labels[labels != -100], reduction="none")
            )
        losses_by_set[name] = torch.cat(losses)
    assert {name: len(token_losses) for name, token_losses in losses_by_set.items()} == {
        "low": 49,
        "high": 38,
    }
    metrics = logged_numbers(trainer)
    for name, token_losses in losses_by_set.items():
        assert metrics[f"val_loss/{name}"] == pytest.approx(token_losses.mean().item(), rel=1e-10)
    assert metrics["val_loss"] == pytest.approx(
        torch.cat([*losses_by_set.values()]).mean().item(), rel=1e-10
    )
    assert abs(metrics["val_loss/low"] - metrics["val_loss/high"]) > 1e-4


def test_monitors_and_loggers_get_the_loss_of_all_sets(alone: dict[str, Any]) -> None:
    assert alone["best"] == pytest.approx(alone["fit"]["val_loss"])
    names = alone["rows"].split(",")
    assert {"val_loss", "val_loss/low", "val_loss/high", "test_loss", "test_loss/only"} <= set(
        names
    )
    assert not [name for name in names if "_tokens" in name or "dataloader" in name]
    # The resumed run validates only the first batch of each set, which has the row of a single
    # token.
    assert alone["limited"]["val_tokens/low"] == 25.0
    assert alone["fit"]["val_tokens/low"] == 49.0
    assert alone["fit"]["val_tokens/high"] == 38.0


class Loaders(LightningModule):
    """A user's module with several loaders, whose steps log different names and metrics."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first = torch.nn.Linear(4, 8)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(2))
        self.last = torch.nn.Linear(8, 1)
        self.means = torch.nn.ModuleList(MeanMetric() for _ in range(2))
        self.seen: list[tuple[int, int]] = []

    def loss(self, batch: Tensor) -> Tensor:
        hidden = self.first(batch)
        for block in self.blocks:
            hidden = block(hidden)
        return (self.last(hidden) ** 2).mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        loss = self.loss(batch)
        self.log("both", loss, sync_dist=True)
        self.log(f"own/{dataloader_idx}", loss, add_dataloader_idx=False, sync_dist=True)
        if dataloader_idx == 1:
            self.log("second", loss * 2, on_step=True, on_epoch=True, sync_dist=True)
        self.means[dataloader_idx].update(loss, len(batch))
        self.log("metric", self.means[dataloader_idx], on_epoch=True)

    def test_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.validation_step(batch, batch_idx, dataloader_idx)

    def on_validation_batch_end(
        self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.seen.append((dataloader_idx, batch_idx))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def evaluate(
    strategy: Callable[[], Any], devices: int, replica: tuple[int, int], folder: Path
) -> dict[str, Any]:
    def loader(num: int, seed: int) -> DataLoader:
        rows = torch.randn(num, 4, generator=torch.Generator().manual_seed(seed)).double()
        order = torch.arange(num).view(-1, replica[1], 4 // replica[1])[:, replica[0]].flatten()
        return DataLoader(rows[order], 4 // replica[1])  # type: ignore[arg-type]

    module = Loaders()
    options: dict[str, Any] = {"max_epochs": 2, "limit_val_batches": 2, "num_sanity_val_steps": 1}
    trainer = trainer_of(strategy, devices, folder, enable_checkpointing=False, **options)
    trainer.fit(module, loader(16, 0), [loader(12, 1), loader(4, 2)])
    logged = {"fit": logged_numbers(trainer), "seen": list(module.seen)}
    logged["tests"] = trainer.test(module, [loader(12, 1), loader(8, 2)], verbose=False)
    return logged


def by_blocks() -> MegatronStrategy:
    return MegatronStrategy(pp=2, pipeline_plan={"blocks": "blocks"}, microbatch_size=2)


def evaluate_all(rank: int, size: int, folder: Path) -> dict[str, Any]:
    logged = {}
    for name, strategy in LAYOUTS.items():
        chosen = by_blocks if name == "pp2" else strategy
        replica = (rank, size) if name in ("ddp", "dp2") else (0, 1)
        logged[name] = evaluate(chosen, size, replica, folder / name)
        dist.barrier()
    return logged


def test_loaders_of_a_users_module_have_the_semantics_of_lightning(tmp_path: Path) -> None:
    expected = evaluate(lambda: "auto", 1, (0, 1), tmp_path / "auto")
    assert expected["seen"] == [(0, 0), (1, 0), *[(0, 0), (0, 1), (1, 0)] * 2]
    names = {"both/dataloader_idx_0", "both/dataloader_idx_1", "own/0", "own/1"}
    names |= {"metric/dataloader_idx_0", "metric/dataloader_idx_1", "second_epoch/dataloader_idx_1"}
    assert names <= expected["fit"].keys()
    for logged in run_world(evaluate_all, 2, tmp_path):
        for layout in LAYOUTS:
            assert logged[layout]["seen"] == expected["seen"], layout
            assert logged[layout]["fit"] == pytest.approx(expected["fit"], rel=1e-6), layout
            for actual_metrics, expected_metrics in zip(
                logged[layout]["tests"], expected["tests"], strict=True
            ):
                assert actual_metrics == pytest.approx(expected_metrics, rel=1e-6), layout
