"""A LightningModule around a Hugging Face model trains under every layout as it does without this library."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lightning_megatron import MegatronStrategy
from lightning_megatron.swap.language_model import HuggingFaceLM
from tests.world import run_world

transformers = pytest.importorskip("transformers")

V, STEPS, BATCH, LENGTH = 61, 4, 8, 12
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp4": {},
    "tp4+sp": {"tp": 4},
    "tp2 dp2": {"tp": 2, "sequence_parallel": False},
    "tp2+sp pp2": {"tp": 2, "pp": 2},
    "pp2 vpp2 dp2": {"pp": 2, "vpp": 2},
}


class Texts(Dataset):
    """Give tokens with two of padding, on either side; every sample has as many labels, and every step the same."""

    def __len__(self) -> int:
        return STEPS * BATCH

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.randint(0, V, (LENGTH,), generator=torch.Generator().manual_seed(index % BATCH))
        places = torch.arange(LENGTH)
        mask = (places < LENGTH - 2 if index % 2 else places > 1).long()
        # What follows padding is predicted from nothing.
        labels = tokens.masked_fill((mask == 0) | (places == 2) & (mask[0] == 0), -100)
        return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


class FineTune(LightningModule):
    """Fine-tune a local folder; nothing in it knows of this library."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder, self.losses = folder, []

    def configure_model(self) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(self.folder, dtype="float32")

    def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        loss = self.model(**batch).loss
        self.log("loss", loss, sync_dist=True)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.losses.append(float(self.trainer.callback_metrics["loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=3e-3, eps=1e-4)


class InOrder(LightningDataModule):
    """Deal the samples out in order; what Lightning puts in shuffles them."""

    def train_dataloader(self) -> DataLoader:
        ranks = self.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        sampler: Any = DistributedSampler(Texts(), shuffle=False, **ranks)
        return DataLoader(Texts(), batch_size=BATCH // ranks["num_replicas"], sampler=sampler)


@dataclass(frozen=True)
class Report:
    """Hold what one training showed."""

    losses: list[float]
    is_swapped: bool
    held: int


def train(folder: str, layout: dict[str, Any] | None, devices: int) -> Report:
    """Train the steps of all data, however many ranks share it; without a layout as plain Lightning does."""
    seed_everything(1, verbose=False)
    module = FineTune(folder)
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        strategy="auto" if layout is None else MegatronStrategy(microbatch_size=1, **layout),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        gradient_clip_val=0.5,
        use_distributed_sampler=False,
    )
    trainer.fit(module, InOrder())
    return Report(module.losses, isinstance(module.model, HuggingFaceLM), sum(p.numel() for p in module.parameters()))


def train_all(rank: int, size: int, folder: str) -> dict[str, Report]:
    """Train under every layout."""
    return {name: train(folder, layout, size) for name, layout in LAYOUTS.items()}


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def folder(request: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Save a small model as Hugging Face does."""
    torch.manual_seed(0)
    if request.param == "llama":
        config = transformers.LlamaConfig(
            vocab_size=V, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=32,
        )  # fmt: skip
    else:
        config = transformers.GPT2Config(
            vocab_size=V, n_embd=32, n_layer=4, n_head=4, n_positions=32, resid_pdrop=0.0, embd_pdrop=0.0,
            attn_pdrop=0.0,
        )  # fmt: skip
    path = tmp_path_factory.mktemp("model")
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return str(path)


def test_every_layout_trains_as_hugging_face_does(folder: str) -> None:
    plain, one = train(folder, None, 1), train(folder, {}, 1)
    assert not plain.is_swapped
    assert one.is_swapped
    assert plain.losses[-1] < plain.losses[0]
    assert one.losses == pytest.approx(plain.losses, abs=1e-4)
    for rank, reports in enumerate(run_world(train_all, 4, folder)):
        for layout, report in reports.items():
            assert report.is_swapped
            assert report.losses == pytest.approx(plain.losses, abs=1e-4), f"{layout}, rank {rank}"
            assert report.held < one.held or not LAYOUTS[layout], f"{layout} keeps a part on each rank"
