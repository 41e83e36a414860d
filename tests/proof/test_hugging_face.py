"""A LightningModule around a Hugging Face model trains under every layout as it does without this library."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lightning_megatron import MegatronStrategy
from lightning_megatron.swap.adapter import ReplacedModel
from tests.world import run_world

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.slow

V, STEPS, BATCH, LENGTH, LABELS = 61, 4, 8, 12, 3
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp4": {},
    "tp4+sp": {"tp": 4},
    "tp2 dp2": {"tp": 2, "sequence_parallel": False},
    "tp2+sp pp2": {"tp": 2, "pp": 2},
    "pp2 vpp2 dp2": {"pp": 2, "vpp": 2},
    "tp2+sp dp2, recomputed": {"tp": 2, "zero": 0, "recompute": "full"},
}
#: What is built of a folder; an encoder's body alone has a head of the user's own.
BUILDERS = {
    "tokens": "AutoModelForCausalLM",
    "masked": "AutoModelForMaskedLM",
    "classes": "AutoModelForSequenceClassification",
    "body": "AutoModel",
}
_SIZES = {"vocab_size": V, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
_SIZES |= {"num_attention_heads": 4, "max_position_embeddings": 32}
_ENCODER = {**_SIZES, "pad_token_id": 1, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_GPT2 = {"vocab_size": V, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 32}
CONFIGS = {
    "llama": ("LlamaConfig", {**_SIZES, "num_key_value_heads": 2}),
    "gpt2": ("GPT2Config", {**_GPT2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
    "bert": ("BertConfig", {**_ENCODER, "num_labels": LABELS}),
    "roberta": ("RobertaConfig", {**_ENCODER, "num_labels": LABELS}),
}
CASES = (
    ("llama", "tokens"),
    ("gpt2", "tokens"),
    ("bert", "masked"),
    ("roberta", "masked"),
    ("bert", "classes"),
    ("roberta", "classes"),
    ("bert", "body"),
)


class Texts(Dataset):
    """Give tokens with two of padding, on either side; every sample has as many labels, and every step the same."""

    def __init__(self, task: str) -> None:
        self.task = task

    def __len__(self) -> int:
        return STEPS * BATCH

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.randint(2, V, (LENGTH,), generator=torch.Generator().manual_seed(index % BATCH))
        places = torch.arange(LENGTH)
        mask = (places < LENGTH - 2 if index % 2 else places > 1).long()
        found = {"input_ids": tokens.masked_fill((mask == 0) | (places == 4), 1), "attention_mask": mask}
        if self.task in ("classes", "body"):
            return {**found, "labels": torch.tensor(index % LABELS)}
        # A decoder predicts from nothing what follows padding.
        seen = (places != 2) | (mask[0] == 1) if self.task == "tokens" else (places % 3 == 0) & (places % 9 != 0)
        return {**found, "labels": tokens.masked_fill((mask == 0) | ~seen, -100)}


class FineTune(LightningModule):
    """Fine-tune a local folder; nothing in it knows of this library."""

    def __init__(self, folder: str, task: str = "tokens") -> None:
        super().__init__()
        self.folder, self.task, self.losses = folder, task, []

    def configure_model(self) -> None:
        self.model = getattr(transformers, BUILDERS[self.task]).from_pretrained(self.folder, dtype="float32")
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


@dataclass(frozen=True)
class Report:
    """Hold what one training showed."""

    losses: list[float]
    is_swapped: bool
    held: int


def train(folder: str, task: str, layout: dict[str, Any] | None, devices: int) -> Report:
    """Train the steps of all data, however many ranks share it; without a layout as plain Lightning does."""
    seed_everything(1, verbose=False)
    module = FineTune(folder, task)
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        strategy="auto" if layout is None else MegatronStrategy(microbatch_size=2, **layout),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        gradient_clip_val=0.5,
        use_distributed_sampler=False,
    )
    trainer.fit(module, InOrder(task))
    return Report(module.losses, isinstance(module.model, ReplacedModel), sum(p.numel() for p in module.parameters()))


def train_all(rank: int, size: int, folder: Path) -> dict[tuple[str, str], dict[str, Report]]:
    """Train every case under every layout; a head of the user's own has no stage."""
    return {
        (kind, task): {
            name: train(str(folder / kind / task), task, layout, size)
            for name, layout in LAYOUTS.items()
            if task != "body" or "pp" not in layout
        }
        for kind, task in CASES
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a small model of every case as Hugging Face does."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("models")
    for kind, task in CASES:
        name, settings = CONFIGS[kind]
        config = getattr(transformers, name)(**settings)
        getattr(transformers, BUILDERS[task]).from_config(config).save_pretrained(path / kind / task)
    return path


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[tuple[str, str], dict[str, Report]]]:
    """Train on four processes."""
    return run_world(train_all, 4, folder)


@pytest.mark.parametrize(("kind", "task"), CASES)
def test_every_layout_trains_as_hugging_face_does(kind: str, task: str, folder: Path, ranks: Any) -> None:
    given = str(folder / kind / task)
    plain, one = train(given, task, None, 1), train(given, task, {}, 1)
    assert not plain.is_swapped
    assert one.is_swapped
    assert plain.losses[-1] < plain.losses[0]
    assert one.losses == pytest.approx(plain.losses, abs=1e-4)
    for rank, reports in enumerate(ranks):
        for layout, report in reports[kind, task].items():
            assert report.is_swapped
            assert report.losses == pytest.approx(plain.losses, abs=1e-4), f"{layout}, rank {rank}"
            assert report.held < one.held or not LAYOUTS[layout], f"{layout} keeps a part on each rank"
