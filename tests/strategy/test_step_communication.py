"""A step's own communication goes over the ranks that read different data, in every layout, and
never waits forever.
"""

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

LAYOUTS: dict[str, dict[str, int]] = {"dp2 tp2": {"tp": 2}, "dp2 pp2": {"pp": 2}}
BATCH = 8


class Block(nn.Linear):
    """Add a layer to its input."""

    def __init__(self) -> None:
        super().__init__(8, 8)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + torch.tanh(super().forward(hidden))


class Contrast(LightningModule):
    """Tell each sample from all others of the batch, those of other ranks included."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[dict[str, Any]] = []
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
        everything = self.all_gather(
            {"features": features, "also": [features.detach(), 2]}, sync_grads=True
        )
        strategy.barrier("after the model")
        others = everything["features"].flatten(0, -2)
        targets = torch.arange(len(others))
        loss = F.cross_entropy(others @ others.roll(1, 0).t() / 0.3, targets)
        total = strategy.reduce(features.detach().sum(), reduce_op="sum")
        told = strategy.broadcast({"from": float(batch[0][0, 0])})["from"]
        agreed = strategy.reduce_boolean_decision(bool(batch[0][0, 0] > 0), all=False)
        gathered = everything["also"][1].flatten().tolist()
        self.seen.append(
            {
                "early": early.flatten().tolist(),
                "total": float(total),
                "told": told,
                "agreed": agreed,
            }
        )
        self.seen[-1]["numbers"] = (everything["also"][0].flatten(0, -2).shape[0], gathered)
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
    found = {}
    for name, sizes in LAYOUTS.items():
        plan = {"pipeline_plan": {"blocks": "blocks"}} if "pp" in sizes else {}
        schedule = {"microbatch_size": BATCH // 2}
        layout = ParallelLayout(size, tp=sizes.get("tp", 1), pp=sizes.get("pp", 1))
        data_rank = layout.coordinates(rank)["dp"]
        module = train(MegatronStrategy(**sizes, **plan, **schedule), data_rank, 2, size)
        found[name] = data_rank, module.losses, module.seen
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_world(four_ranks, 4)


@pytest.fixture(scope="module")
def one() -> Contrast:
    return train("auto")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gathered_features_train_as_the_whole_batch_on_one_device(
    ranks: list[dict[str, Any]], one: Contrast, layout: str
) -> None:
    for found in ranks:
        assert found[layout][1] == pytest.approx(one.losses, abs=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_gathers_reduces_and_broadcasts_over_data_ranks(
    ranks: list[dict[str, Any]], one: Contrast, layout: str
) -> None:
    saw = [found[layout][2] for found in ranks if found[layout][2]]
    assert len(saw) >= 2
    for seen in saw:
        assert len(seen) == len(one.seen)
        for ours, whole in zip(seen, one.seen, strict=True):
            assert ours["early"] == pytest.approx(whole["early"])
            assert ours["total"] == pytest.approx(whole["total"])
            assert ours["told"] == whole["told"]
            assert ours["agreed"] == (whole["early"][0] > 0 or whole["early"][BATCH // 2] > 0)
            assert ours["numbers"] == (BATCH, [2, 2])
    assert one.seen[0]["numbers"] == (BATCH, [2])
