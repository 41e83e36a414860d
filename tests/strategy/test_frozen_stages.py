"""A pipeline stage on which nothing is trained, against one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_megatron import MegatronStrategy
from tests.oracles import assert_equal
from tests.swap.families import V
from tests.swap.test_language_models import exact_twin
from tests.world import run_world

pytest.importorskip("transformers")

TOKENS = torch.randint(0, V, (4, 8), generator=torch.Generator().manual_seed(0))


class HeadOnly(L.LightningModule):
    """Train the head of a model alone, as scripts do: by a list of the parameters that require gradients."""

    def __init__(self, trains: str) -> None:
        super().__init__()
        self.trains, self.losses = trains, []

    def configure_model(self) -> None:
        torch.manual_seed(1)
        self.model = exact_twin("llama")
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(self.trains in name)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        logits = self.model(input_ids=batch).logits
        # Hugging Face computes the loss in float32.
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(self.trainer.callback_metrics["loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([one for one in self.parameters() if one.requires_grad], lr=1e-2)


def fit(strategy: Any, trains: str, folder: str) -> list[float]:
    module = HeadOnly(trains)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2 if isinstance(strategy, MegatronStrategy) else 1,
        strategy=strategy,
        max_steps=3,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=True,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(module, DataLoader(TOKENS, batch_size=4))
    return module.losses


def train(rank: int, size: int, folder: str) -> dict[str, list[float]]:
    strategies = {trains: MegatronStrategy(pp=2, microbatch_size=4) for trains in ("lm_head", "layers.0")}
    found = {trains: fit(strategy, trains, folder) for trains, strategy in strategies.items()}
    with pytest.raises(ValueError, match=r"an optimizer must have parameters on some pipeline stage"):
        fit(MegatronStrategy(pp=2, microbatch_size=4), "nothing", folder)
    return found


def test_stages_that_train_nothing_have_optimizers_without_complaint(tmp_path: Path) -> None:
    everywhere = run_world(train, 2, str(tmp_path / "cut"))
    for trains, losses in everywhere[0].items():
        expected = fit("auto", trains, str(tmp_path / "whole"))
        assert expected[0] > expected[-1]
        for step, (one, other) in enumerate(zip(losses, expected, strict=True)):
            assert_equal(torch.tensor(one), torch.tensor(other), f"{trains}, step {step}", 1e-6)
