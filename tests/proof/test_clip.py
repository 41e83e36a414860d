"""Tests of CLIP, whose loss couples the samples of a batch and which has two lists of blocks."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_megatron import MegatronStrategy, UnsupportedError
from tests.world import run_world

transformers = pytest.importorskip("transformers")

#: The plan that the errors of a fit with pp=2 lead to.
MLPS = {"*.mlp.fc1": "column", "*.mlp.fc2": "row"}
STAGES = {"model.vision_model.encoder.layers": "blocks", "model.text_model": "last"}


class Clip(L.LightningModule):
    """Train a small CLIP with plain Lightning code."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 2, "projection_dim": 8}
        words = {"vocab_size": 50, "max_position_embeddings": 12, "eos_token_id": 49}
        config = transformers.CLIPConfig(
            text_config={**sizes, **heads, **words, "bos_token_id": 48, "pad_token_id": 1},
            vision_config={**sizes, **heads, "image_size": 8, "patch_size": 4},
            projection_dim=8,
        )
        self.model = transformers.CLIPModel(config).double()
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.model(input_ids=batch[0], pixel_values=batch[1], return_loss=True).loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit(strategy: Any, devices: int = 1) -> list[float]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(2, 48, (12, 6), generator=generator)
    tokens[:, -1] = 49
    images = torch.randn(12, 3, 8, 8, dtype=torch.float64, generator=generator)
    module = Clip()
    trainer = L.Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, max_epochs=1, precision="64-true", logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(TensorDataset(tokens, images), batch_size=4))
    return module.losses


def _fit_on_two_processes(rank: int, size: int) -> dict[str, list[float]]:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with pytest.raises(UnsupportedError, match=r"'model.vision_model.encoder.layers': 'blocks'"):
        fit(MegatronStrategy(pp=2), size)
    only_blocks = {"model.vision_model.encoder.layers": "blocks"}
    with pytest.raises(UnsupportedError, match="'model.text_model': 'last'"):
        fit(MegatronStrategy(pp=2, pipeline_plan=only_blocks), size)
    with pytest.raises(UnsupportedError, match="mixes its samples.*microbatch_size='batch'"):
        fit(MegatronStrategy(pp=2, pipeline_plan=STAGES), size)
    return {
        "tp2": fit(MegatronStrategy(tp=2, tensor_parallel_plan=MLPS), size),
        "pp2": fit(MegatronStrategy(pp=2, pipeline_plan=STAGES, microbatch_size="batch"), size),
    }


def test_clip_with_the_plan_that_errors_name_trains_as_in_one_process() -> None:
    expected = fit("auto")
    for report in run_world(_fit_on_two_processes, 2):
        for layout, losses in report.items():
            assert losses == pytest.approx(expected, abs=1e-10), layout
