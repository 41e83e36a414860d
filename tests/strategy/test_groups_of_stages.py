"""Pipeline stages with different parameter groups either resume correctly or are refused."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_megatron import CheckpointMismatchError, MegatronStrategy, UnsupportedError
from tests.world import run_world


class LayeredModel(L.LightningModule):
    """A model whose learning rates grow with depth, in groups by layer or by parameter."""

    def __init__(self, case: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.case = case
        self.first = nn.Linear(4, 8, bias=False)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.last = nn.Linear(8, 3, bias=False)
        self.losses: list[float] = []
        self.double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.first(batch[0])
        for block in self.blocks:
            hidden = torch.tanh(block(hidden))
        return nn.functional.cross_entropy(self.last(hidden), batch[1])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def depth_of(self, name: str) -> int:
        if name.startswith("blocks"):
            return 1 + int(name.split(".")[1])
        return 0 if name.startswith("first") else 3

    def configure_optimizers(self) -> Any:
        named = list(self.named_parameters())
        if self.case == "by parameter":
            # Each stage has three parameters, so the numbers of groups are equal.
            groups = [{"params": [weight], "depth": self.depth_of(name)} for name, weight in named]
        else:
            groups = [
                {"params": [weight for name, weight in named if self.depth_of(name) == depth]}
                | {"depth": depth}
                for depth in range(4)
            ]
        for group in groups:
            group["lr"] = 0.1 * 0.5 ** (3 - group.pop("depth"))
        optimizer = torch.optim.AdamW(groups)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def fit(strategy: Any, case: str, folder: str, path: str | None = None, saves: bool = False) -> Any:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(16, 4, dtype=torch.float64, generator=generator)
    data = TensorDataset(x, torch.randint(3, (16,), generator=generator))
    module = LayeredModel(case)
    trainer = L.Trainer(
        accelerator="cpu", devices=1 if strategy == "auto" else 2, strategy=strategy, precision="64-true",
        max_epochs=1 if path is None else 2, logger=False, enable_checkpointing=saves,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(module, DataLoader(data, batch_size=4), ckpt_path=path)
    return module.losses, trainer


def two_stages() -> MegatronStrategy:
    return MegatronStrategy(pp=2, microbatch_size=2, pipeline_plan={"blocks": "blocks"})


def losses_with_resumption(strategy: Any, case: str, folder: str) -> list[float]:
    """Return the losses of a fit and of a second fit that resumes from its checkpoint."""
    losses, trainer = fit(strategy(), case, folder)
    path = f"{folder}/one.ckpt"
    trainer.save_checkpoint(path)
    return losses + fit(strategy(), case, folder, path)[0]


def run_two_stages(rank: int, size: int, folder: str) -> list[float]:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with pytest.raises(UnsupportedError, match=r"'initial_lr' of group 0 .* is \[0.0125, 0.05\]"):
        fit(two_stages(), "by parameter", folder, saves=True)
    _, trainer = fit(two_stages(), "by parameter", folder)
    with pytest.raises(CheckpointMismatchError, match="the same hyperparameters on all pipeline"):
        trainer.save_checkpoint(f"{folder}/not.ckpt")
    return losses_with_resumption(two_stages, "by layer", folder)


def test_groups_by_layer_resume_like_one_process_and_groups_by_parameter_are_refused(
    tmp_path: Path,
) -> None:
    expected = losses_with_resumption(lambda: "auto", "by layer", str(tmp_path / "one"))
    for losses in run_world(run_two_stages, 2, str(tmp_path / "two")):
        assert losses == pytest.approx(expected, abs=1e-10)
