"""Test that no microbatch of a replaced Hugging Face model makes the host wait for the GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_megatron import MegatronStrategy
from tests.swap.families import twin_of

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.gpu

S, BATCH, WARM = 16, 4, 2


class StrictLM(LightningModule):
    """Fine-tune a saved model; from the third batch on, waiting for the GPU raises an error."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.num_strict = 0

    def configure_model(self) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(self.folder)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        is_strict = batch_idx >= WARM
        torch.cuda.set_sync_debug_mode("error" if is_strict else "default")
        try:
            loss = self.model(**batch, use_cache=False).loss
        finally:
            torch.cuda.set_sync_debug_mode("default")
        self.num_strict += is_strict
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


@pytest.mark.parametrize("kind", ["padded", "packed"])
def test_no_microbatch_makes_the_host_wait_for_the_gpu(tmp_path, kind):
    twin: Any = twin_of("llama")
    twin.save_pretrained(tmp_path)
    rows: Any = []
    positions = torch.arange(S)
    for index in range(4 * BATCH):
        tokens = torch.randint(2, 50, (S,), generator=torch.Generator().manual_seed(index))
        row = {"input_ids": tokens, "labels": tokens}
        if kind == "padded":
            row["attention_mask"] = (positions >= index % 3).long()
            row["labels"] = tokens.masked_fill(positions <= index % 3, -100)
        else:
            row["position_ids"] = torch.cat([torch.arange(6), torch.arange(S - 6)])
        rows.append(row)
    module = StrictLM(tmp_path)
    Trainer(
        accelerator="gpu", devices=1, strategy=MegatronStrategy(microbatch_size=1, job={"check_microbatches": False}),
        max_steps=4, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(module, DataLoader(rows, batch_size=BATCH))  # fmt: skip
    assert module.num_strict == 2 * BATCH
