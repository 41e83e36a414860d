"""Buffers of the user's modules under dp are those of the first rank at the same moments as under
`ddp`.
"""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_megatron import MegatronStrategy, UnsupportedError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.strategy.modules.buffers import SharedBuffers, check_synchronised_norms
from tests.world import run_world


class NormalizedNet(LightningModule):
    """Have a batch norm, a buffer that is updated in place, a buffer that is replaced, and a buffer
    that never changes.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
        self.register_buffer("level", torch.zeros(1))
        self.register_buffer("late", torch.zeros(2), persistent=False)
        self.register_buffer("table", torch.arange(4.0))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        self.level.mul_(0.9).add_(x.mean().detach(), alpha=0.1)
        if self.global_step >= 2:
            self.late = self.late + x.detach().amax()
        loss = nn.functional.mse_loss(self.net(x), y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        x, y = batch
        self.log(
            "val_loss", nn.functional.mse_loss(self.net(x), y) + self.level.sum() + self.late.sum()
        )

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class RecordBuffers(Callback):
    """Record the buffers after training batches and validations."""

    def __init__(self) -> None:
        self.records: list[dict[str, Tensor]] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self.records.append({name: buffer.clone() for name, buffer in pl_module.named_buffers()})

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.on_train_batch_end(trainer, pl_module)


def fit(strategy: Any, size: int, path: Path, **options: Any) -> dict[str, Any]:
    seed_everything(1, verbose=False)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(32, 6, generator=generator, dtype=torch.float64)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    recorder, module = RecordBuffers(), NormalizedNet()
    trainer = Trainer(
        accelerator="cpu", devices=size, strategy=strategy, max_epochs=2, precision="64-true", callbacks=[recorder],
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, **options,
    )  # fmt: skip
    trainer.fit(module, DataLoader(data, batch_size=4), DataLoader(data, batch_size=4))
    trainer.save_checkpoint(path)
    return {
        "buffers": recorder.records,
        "weights": {name: value.detach().clone() for name, value in module.named_parameters()},
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "after": {name: buffer.clone() for name, buffer in module.named_buffers()},
    }


OPTIONS: dict[str, dict[str, Any]] = {
    "each batch": {},
    "accumulated": {"accumulate_grad_batches": 3},
}


def _fit_both(rank: int, size: int, folder: Path) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    results = {}
    for name, options in OPTIONS.items():
        plain = fit("ddp", size, folder / f"{name}.plain", **options)
        ours = fit(MegatronStrategy(), size, folder / f"{name}.ours", **options)
        results[name] = plain, ours
    return results


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("buffers")
    return folder, run_world(_fit_both, 2, folder)


@pytest.mark.parametrize("name", OPTIONS)
def test_buffers_weights_and_metrics_match_those_of_ddp_on_every_rank(
    worlds: Any, name: str
) -> None:
    for rank, results in enumerate(worlds[1]):
        plain, ours = results[name]
        assert len(plain["buffers"]) == len(ours["buffers"]) == 11
        for step, (expected, actual) in enumerate(
            zip(plain["buffers"], ours["buffers"], strict=True)
        ):
            for key in expected:
                torch.testing.assert_close(
                    actual[key], expected[key], msg=f"rank {rank}, step {step}: {key}"
                )
        for key, expected in plain["weights"].items():
            torch.testing.assert_close(ours["weights"][key], expected)
        # Lightning keeps its sums over an epoch in float32.
        assert ours["metrics"] == pytest.approx(plain["metrics"], rel=1e-6)
    first, second = (results[name][0]["buffers"][1]["level"] for results in worlds[1])
    assert first != second, "without a broadcast the ranks' own buffers differ"


def test_a_checkpoint_has_the_buffers_of_the_first_rank(worlds: Any) -> None:
    folder, ranks = worlds
    expected = torch.load(folder / "each batch.plain", weights_only=False)["state_dict"]
    for rank in range(2):
        for key, value in ranks[rank]["each batch"][1]["after"].items():
            if key in expected:
                torch.testing.assert_close(value, expected[key])


def test_no_buffers_are_shared_with_a_single_data_rank() -> None:
    mesh = ParallelMesh.create(ParallelLayout(1))
    shared = SharedBuffers(NormalizedNet(), mesh)
    shared.share(look=True)
    assert not shared._owners


def test_sync_batch_norm_is_refused_if_ranks_hold_copies_of_the_data() -> None:
    class FourRanks:
        size = 4

    class FakeMesh:
        data, world, tp, pp = (
            type("Data", (), {"size": 2}),
            FourRanks,
            type("Tp", (), {"size": 2}),
            FourRanks,
        )

    module = nn.Sequential(nn.SyncBatchNorm(4))
    with pytest.raises(
        UnsupportedError,
        match=r"SyncBatchNorm over all 4 ranks needs .*'0' would count",
    ):
        check_synchronised_norms(module, FakeMesh)  # type: ignore[arg-type]
