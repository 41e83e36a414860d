"""Communication in a step reaches the ranks with different data in every layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_megatron import MegatronStrategy
from lightning_megatron.plan.layout import ParallelLayout
from tests.world import run_world

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2 tp2": {"tp": 2, "tensor_parallel_plan": {"first": "column_gather"}},
    "dp2 pp2": {"pp": 2},
}
BATCH = 8


class Block(nn.Linear):
    """Add a layer to its input."""

    def __init__(self) -> None:
        super().__init__(8, 8)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + torch.tanh(super().forward(hidden))


class Contrast(LightningModule):
    """Contrast each sample with all samples of the batch, including those of other ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[dict[str, Any]] = []
        self.losses: list[float] = []

    def configure_model(self) -> None:
        torch.manual_seed(3)
        self.first = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.last = nn.Linear(8, 5)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        strategy = self.trainer.strategy
        strategy.barrier("before the model")
        early = self.all_gather(batch[0][:, 0])
        hidden = self.first(batch[0])
        for block in self.blocks:
            hidden = block(hidden)
        features = F.normalize(self.last(hidden), dim=-1)
        gathered_values = self.all_gather(
            {"features": features, "also": [features.detach(), 2]}, sync_grads=True
        )
        strategy.barrier("after the model")
        all_features = gathered_values["features"].flatten(0, -2)
        targets = torch.arange(len(all_features))
        loss = F.cross_entropy(all_features @ all_features.roll(1, 0).t() / 0.3, targets)
        total = strategy.reduce(features.detach().sum(), reduce_op="sum")
        received = strategy.broadcast({"from": float(batch[0][0, 0])})["from"]
        agreed = strategy.reduce_boolean_decision(bool(batch[0][0, 0] > 0), all=False)
        gathered = gathered_values["also"][1].flatten().tolist()
        self.records.append(
            {
                "early": early.flatten().tolist(),
                "total": float(total),
                "received": received,
                "agreed": agreed,
            }
        )
        self.records[-1]["numbers"] = (gathered_values["also"][0].flatten(0, -2).shape[0], gathered)
        self.log("loss", loss, sync_dist=True)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.losses.append(float(self.trainer.callback_metrics["loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.2)


def train(strategy: Any, data_rank: int = 0, num_data: int = 1, devices: int = 1) -> Contrast:
    seed_everything(1, verbose=False)
    x = torch.randn(4 * BATCH, 6, generator=torch.Generator().manual_seed(2))
    order = torch.arange(len(x)).view(4, num_data, -1)[:, data_rank].flatten()
    module = Contrast()
    options: dict[str, Any] = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        precision="64-true",
        max_epochs=1,
        enable_checkpointing=False,
        use_distributed_sampler=False,
        **options,
    )
    trainer.fit(module, DataLoader(TensorDataset(x[order]), batch_size=BATCH // num_data))
    return module


def four_ranks(rank: int, size: int) -> dict[str, tuple[int, list[float], list[dict[str, Any]]]]:
    results = {}
    for name, sizes in LAYOUTS.items():
        plan = {"pipeline_plan": {"blocks": "blocks"}} if "pp" in sizes else {}
        schedule = {"microbatch_size": BATCH // 2}
        layout = ParallelLayout(size, tp=sizes.get("tp", 1), pp=sizes.get("pp", 1))
        data_rank = layout.coordinates(rank)["dp"]
        module = train(MegatronStrategy(**sizes, **plan, **schedule), data_rank, 2, size)
        results[name] = data_rank, module.losses, module.records
    return results


@pytest.fixture(scope="module")
def results_of_ranks() -> list[dict[str, Any]]:
    return run_world(four_ranks, 4)


@pytest.fixture(scope="module")
def single_device() -> Contrast:
    return train("auto")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gathered_features_train_as_the_full_batch_on_one_device(
    results_of_ranks: list[dict[str, Any]], single_device: Contrast, layout: str
) -> None:
    for results in results_of_ranks:
        assert results[layout][1] == pytest.approx(single_device.losses, abs=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_step_gathers_reduces_and_broadcasts_over_data_ranks(
    results_of_ranks: list[dict[str, Any]], single_device: Contrast, layout: str
) -> None:
    records_of_ranks = [results[layout][2] for results in results_of_ranks if results[layout][2]]
    assert len(records_of_ranks) >= 2
    for records in records_of_ranks:
        assert len(records) == len(single_device.records)
        for actual, expected in zip(records, single_device.records, strict=True):
            assert actual["early"] == pytest.approx(expected["early"])
            assert actual["total"] == pytest.approx(expected["total"])
            assert actual["received"] == expected["received"]
            assert actual["agreed"] == (
                expected["early"][0] > 0 or expected["early"][BATCH // 2] > 0
            )
            assert actual["numbers"] == (BATCH, [2, 2])
    assert single_device.records[0]["numbers"] == (BATCH, [2])
