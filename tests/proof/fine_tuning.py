"""Fine-tune local Hugging Face models under any layout, by a LightningModule that knows nothing of
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
#: What is built of a folder; an encoder's body alone has a head of the user's own.
BUILDERS = {
    "tokens": "AutoModelForCausalLM",
    "masked": "AutoModelForMaskedLM",
    "classes": "AutoModelForSequenceClassification",
    "body": "AutoModel",
}


class Texts(Dataset):
    """Give tokens with two of padding, on either side; every sample has as many labels, and every
    step the same.
    """

    def __init__(self, task: str) -> None:
        self.task = task

    def __len__(self) -> int:
        return STEPS * BATCH

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.randint(
            2, V, (LENGTH,), generator=torch.Generator().manual_seed(index % BATCH)
        )
        places = torch.arange(LENGTH)
        mask = (places < LENGTH - 2 if index % 2 else places > 1).long()
        found = {
            "input_ids": tokens.masked_fill((mask == 0) | (places == 4), 1),
            "attention_mask": mask,
        }
        if self.task in ("classes", "body"):
            return {**found, "labels": torch.tensor(index % LABELS)}
        # A decoder predicts from nothing what follows padding.
        seen = (
            (places != 2) | (mask[0] == 1)
            if self.task == "tokens"
            else (places % 3 == 0) & (places % 9 != 0)
        )
        return {**found, "labels": tokens.masked_fill((mask == 0) | ~seen, -100)}


class FineTune(LightningModule):
    """Fine-tune a local folder; nothing in it knows of this library."""

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
            seen = batch["attention_mask"].unsqueeze(-1)
            mean = (states.last_hidden_state * seen).sum(1) / seen.sum(1)
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
    """Deal the samples out in order; what Lightning puts in shuffles them."""

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
    """Return a Trainer on CPUs under a layout; without one, as ordinary Lightning trains."""
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
