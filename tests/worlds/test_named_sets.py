"""Named validation and test sets: each set has the mean loss of its tokens, and all sets together
that of all tokens, in every layout; several loaders of a user's module behave as in Lightning.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_megatron import CausalLM, GPTConfig, TokenDataModule
from tests.data.recorder import write_corpus
from tests.fits import Job, trainer_of
from tests.world import run_world

CONFIG = GPTConfig.llama(
    vocab_size=128, max_seq_length=8, num_layers=2, hidden_size=16, num_heads=2, ffn_hidden_size=32
)
LAYOUTS: dict[str, Any] = {
    "ddp": "ddp",
    "dp2": {"microbatch_size": None},
    "tp2": {"tp": 2, "tensor_parallel_plan": {}, "microbatch_size": None},
    "pp2": {"pp": 2},
}


def make_trainer(
    strategy: Any, size: int, folder: Path, *callbacks: Any, **options: Any
) -> Trainer:
    warnings.simplefilter("ignore")
    job = Job(
        strategy=strategy, steps=4,
        trainer={
            "logger": CSVLogger(folder, "csv", version=0), "log_every_n_steps": 1,
            "default_root_dir": folder, "gradient_clip_val": None, **options,
        },
    )  # fmt: skip
    return trainer_of(job, size, *callbacks)


def numbers_of(trainer: Trainer) -> dict[str, float]:
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def fit(paths: dict[str, Any], strategy: Any, size: int, folder: Path) -> dict[str, Any]:
    """Fit with validation after every second step, go on from step 2 with one validation batch of
    each set, test, and return the logged metrics.
    """
    module = CausalLM(CONFIG, learning_rate=1e-2, max_steps=9)
    data = TokenDataModule(**paths, seq_length=8, global_batch_size=4)
    best = ModelCheckpoint(folder, "{step}", "val_loss", save_top_k=-1)
    options: dict[str, Any] = {"val_check_interval": 2, "enable_checkpointing": True}
    trainer = make_trainer(strategy, size, folder, best, **options)
    trainer.fit(module, data)
    logged = {"fit": numbers_of(trainer), "best": {"loss": float(best.best_model_score or 0.0)}}
    limited = make_trainer(strategy, size, folder / "two", limit_val_batches=1)
    limited.fit(module, data, ckpt_path=folder / "step=2.ckpt")
    logged["limited"] = numbers_of(limited)
    trainer.test(module, data, verbose=False)
    return logged | {"test": numbers_of(trainer)}


class Block(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 8)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + super().forward(hidden).tanh()


class Loaders(LightningModule):
    """A user's module with several loaders, whose steps log different names and metrics."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.blocks = nn.Linear(4, 8), nn.ModuleList(Block() for _ in range(2))
        self.last = nn.Linear(8, 1)
        self.means = nn.ModuleList(MeanMetric() for _ in range(2))
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


def evaluate(strategy: Any, size: int, replica: tuple[int, int], folder: Path) -> dict[str, Any]:
    def loader(num: int, seed: int) -> DataLoader:
        rows = torch.randn(num, 4, generator=torch.Generator().manual_seed(seed)).double()
        order = torch.arange(num).view(-1, replica[1], 4 // replica[1])[:, replica[0]].flatten()
        return DataLoader(rows[order], 4 // replica[1])  # type: ignore[arg-type]

    module = Loaders()
    options: dict[str, Any] = {"max_epochs": 2, "limit_val_batches": 2, "num_sanity_val_steps": 1}
    trainer = make_trainer(strategy, size, folder, max_steps=-1, **options)
    trainer.fit(module, loader(16, 0), [loader(12, 1), loader(4, 2)])
    logged: dict[str, Any] = {"fit": numbers_of(trainer), "seen": list(module.seen)}
    for name, metrics in enumerate(
        trainer.test(module, [loader(12, 1), loader(8, 2)], verbose=False)
    ):
        logged[f"test {name}"] = metrics
    return logged


def run_two(rank: int, size: int, folder: Path, paths: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for name, layout in LAYOUTS.items():
        found[name] = fit(paths, layout, size, folder / name)
        dist.barrier()
        if name == "pp2":
            layout = {**layout, "pipeline_plan": {"blocks": "blocks"}}
        replica = (rank, size) if name in ("ddp", "dp2") else (0, 1)
        found[f"{name}, loaders"] = evaluate(layout, size, replica, folder / f"loaders {name}")
        dist.barrier()
    return found


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Write corpora whose sets have different sizes and texts."""
    folder = tmp_path_factory.mktemp("corpora")
    return {
        "train": write_corpus(folder / "train", 100),
        "val": {
            "low": write_corpus(folder / "low", 50),
            "high": [write_corpus(folder / "more", 20, 60), write_corpus(folder / "most", 20, 100)],
        },
        "test": {"only": write_corpus(folder / "only", 30, 30)},
    }


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, paths: dict[str, Any]) -> list[dict[str, Any]]:
    return run_world(run_two, 2, tmp_path_factory.mktemp("two"), paths)


def test_losses_of_sets_match_one_process(tmp_path: Path, paths: Any, ranks: Any) -> None:
    alone = fit(paths, None, 1, tmp_path)
    for logged in ranks:
        for layout in LAYOUTS:
            for phase, expected in alone.items():
                assert logged[layout][phase] == pytest.approx(expected, rel=1e-10), (layout, phase)
    # Monitors and loggers get the loss of all sets.
    assert alone["best"]["loss"] == pytest.approx(alone["fit"]["val_loss"])
    rows = (tmp_path / "csv" / "version_0" / "metrics.csv").read_text().splitlines()
    names = rows[0].split(",")
    assert {"val_loss", "val_loss/low", "val_loss/high", "test_loss", "test_loss/only"} <= {*names}
    assert not [name for name in names if "_tokens" in name or "dataloader" in name]
    # The resumed run validates only the first batch of each set, which has the row of a single
    # token.
    assert alone["limited"]["val_tokens/low"] == 25.0
    assert alone["fit"]["val_tokens/low"] == 49.0
    assert alone["fit"]["val_tokens/high"] == 38.0


def test_losses_are_means_over_the_tokens_of_each_set_and_of_all_sets(
    tmp_path: Path, paths: Any
) -> None:
    module, data = CausalLM(CONFIG), TokenDataModule(**paths, seq_length=8, batch_size=3)
    trainer = make_trainer(None, 1, tmp_path)
    trainer.validate(module, data, verbose=False)
    metrics, by_set = numbers_of(trainer), {}
    for name, loader in zip(("low", "high"), data.val_dataloader(), strict=True):
        losses = []
        for batch in loader:
            logits, labels = module.model(batch["tokens"]), batch["labels"]  # type: ignore[misc]
            counted = labels != -100
            losses.append(F.cross_entropy(logits[counted], labels[counted], reduction="none"))
        by_set[name] = torch.cat(losses)
        assert metrics[f"val_loss/{name}"] == pytest.approx(by_set[name].mean().item(), rel=1e-10)
    assert {name: len(losses) for name, losses in by_set.items()} == {"low": 49, "high": 38}
    mean = torch.cat([*by_set.values()]).mean().item()
    assert metrics["val_loss"] == pytest.approx(mean, rel=1e-10)
    assert abs(metrics["val_loss/low"] - metrics["val_loss/high"]) > 1e-4


def test_loaders_of_a_users_module_have_the_semantics_of_lightning(
    tmp_path: Path, ranks: Any
) -> None:
    expected = evaluate(None, 1, (0, 1), tmp_path)
    assert expected.pop("seen") == [(0, 0), (1, 0), *[(0, 0), (0, 1), (1, 0)] * 2]
    names = {"both/dataloader_idx_0", "both/dataloader_idx_1", "own/0", "own/1"}
    names |= {"metric/dataloader_idx_0", "metric/dataloader_idx_1", "second_epoch/dataloader_idx_1"}
    assert names <= expected["fit"].keys()
    for logged in ranks:
        for layout in LAYOUTS:
            for phase, metrics in expected.items():
                actual = logged[f"{layout}, loaders"][phase]
                assert actual == pytest.approx(metrics, rel=1e-6), (layout, phase)
