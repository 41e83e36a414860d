"""Fine-tuning of local Hugging Face models under any layout, by a LightningModule without code for
this library.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lightning_megatron import MegatronStrategy

transformers = pytest.importorskip("transformers")

V, STEPS, BATCH, LENGTH, LABELS = 61, 4, 8, 12, 3
#: Class that loads a folder, by task; the body of an encoder gets a head of the user's module.
BUILDERS = {
    "tokens": "AutoModelForCausalLM",
    "masked": "AutoModelForMaskedLM",
    "classes": "AutoModelForSequenceClassification",
    "body": "AutoModel",
}


class Texts(Dataset):
    """Tokens with two tokens of padding at one end; all samples have equally many labels, and all
    steps have the same samples.
    """

    def __init__(self, task: str) -> None:
        self.task = task

    def __len__(self) -> int:
        return STEPS * BATCH

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.randint(
            2, V, (LENGTH,), generator=torch.Generator().manual_seed(index % BATCH)
        )
        positions = torch.arange(LENGTH)
        mask = (positions < LENGTH - 2 if index % 2 else positions > 1).long()
        sample = {
            "input_ids": tokens.masked_fill((mask == 0) | (positions == 4), 1),
            "attention_mask": mask,
        }
        if self.task in ("classes", "body"):
            return {**sample, "labels": torch.tensor(index % LABELS)}
        # A decoder has no context for the first token after padding.
        is_label = (
            (positions != 2) | (mask[0] == 1)
            if self.task == "tokens"
            else (positions % 3 == 0) & (positions % 9 != 0)
        )
        return {**sample, "labels": tokens.masked_fill((mask == 0) | ~is_label, -100)}


class FineTune(LightningModule):
    """Fine-tune a local folder, without code for this library."""

    def __init__(self, folder: str, task: str = "tokens") -> None:
        super().__init__()
        self.folder, self.task, self.losses = folder, task, []

    def configure_model(self) -> None:
        self.model = getattr(transformers, BUILDERS[self.task]).from_pretrained(
            self.folder, dtype="float32"
        )
        if self.task == "body":
            torch.manual_seed(2)
            self.own = nn.Linear(2 * self.model.config.hidden_size, LABELS)

    def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        if self.task == "body":
            labels = batch.pop("labels")
            states = self.model(**batch)
            mask = batch["attention_mask"].unsqueeze(-1)
            mean = (states.last_hidden_state * mask).sum(1) / mask.sum(1)
            loss = F.cross_entropy(self.own(torch.cat([mean, states.pooler_output], -1)), labels)
        else:
            loss = self.model(**batch).loss
        self.log("loss", loss, sync_dist=True)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.losses.append(float(self.trainer.callback_metrics["loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=3e-3, eps=1e-4)


class InOrder(LightningDataModule):
    """Give the samples in order; the sampler that Lightning inserts shuffles them."""

    def __init__(self, task: str = "tokens") -> None:
        super().__init__()
        self.task = task

    def train_dataloader(self) -> DataLoader:
        ranks = self.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        texts = Texts(self.task)
        sampler: Any = DistributedSampler(texts, shuffle=False, **ranks)
        return DataLoader(texts, batch_size=BATCH // ranks["num_replicas"], sampler=sampler)


def trainer_of(
    layout: dict[str, Any] | None, devices: int, microbatch_size: int, **options: Any
) -> Trainer:
    """Return a Trainer on CPUs with a layout; without a layout, with ordinary Lightning."""
    return Trainer(
        accelerator="cpu",
        devices=devices,
        strategy="auto"
        if layout is None
        else MegatronStrategy(**{"microbatch_size": microbatch_size, **layout}),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        gradient_clip_val=0.5,
        use_distributed_sampler=False,
        **options,
    )
