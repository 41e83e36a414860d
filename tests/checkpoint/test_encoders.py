"""Checkpoints of Hugging Face encoders become folders and files of plain Lightning, and those become checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_megatron import MegatronStrategy
from lightning_megatron.checkpoint.consolidate import consolidate
from lightning_megatron.checkpoint.hugging_face import export_model, import_model
from lightning_megatron.cli import main
from tests.swap.encoders import CASES, V, encoder_of
from tests.world import run_world

transformers = pytest.importorskip("transformers")


class Texts(Dataset):
    def __init__(self, case: str) -> None:
        self.case = case

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.randint(4, V, (12,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens if "masked" in self.case else torch.tensor(index % 5)}


class FineTune(LightningModule):
    def __init__(self, folder: str, case: str) -> None:
        super().__init__()
        self.folder, self.case = folder, case

    def configure_model(self) -> None:
        self.model = getattr(transformers, CASES[self.case][0]).from_pretrained(self.folder)

    def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        return self.model(**batch).loss

    def validation_step(self, batch: dict[str, Tensor], _: int) -> None:
        self.log("val_loss", self.model(**batch).loss, sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def trainer_of(layout: dict[str, int] | None, devices: int) -> Trainer:
    return Trainer(
        accelerator="cpu",
        devices=devices,
        strategy="auto" if layout is None else MegatronStrategy(**layout),
        max_steps=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def loss_of(layout: dict[str, int] | None, devices: int, folder: str, case: str, path: str | None = None) -> float:
    """Return the loss of the weights of a checkpoint, or of a folder."""
    data = DataLoader(Texts(case), batch_size=4)
    trainer = trainer_of(layout, devices)
    (found,) = trainer.validate(FineTune(folder, case), data, ckpt_path=path, verbose=False)
    return float(found["val_loss"])


def train_and_evaluate(rank: int, size: int, folder: str, case: str, imported: str, out: str) -> list[float]:
    seed_everything(1, verbose=False)
    trainer = trainer_of({"tp": 2, "pp": 2}, size)
    trainer.fit(FineTune(folder, case), DataLoader(Texts(case), batch_size=4))
    trainer.save_checkpoint(out)
    return [loss_of({"tp": 2}, size, folder, case, path) for path in (out, imported)]


@pytest.mark.parametrize("case", ["bert masked", "roberta classes"])
def test_what_four_ranks_have_trained_is_what_transformers_loads(case: str, tmp_path: Path) -> None:
    encoder_of(case).save_pretrained(tmp_path / "given")
    folder, imported, trained, exported, plain = (
        str(tmp_path / name) for name in ("given", "imported.ckpt", "trained.ckpt", "exported", "plain.ckpt")
    )
    import_model(folder, imported)
    export_model(imported, tmp_path / "again")
    kind = getattr(transformers, CASES[case][0])
    before, again = kind.from_pretrained(folder).state_dict(), kind.from_pretrained(tmp_path / "again").state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in before.items())
    every_rank = run_world(train_and_evaluate, 4, folder, case, imported, trained)
    main(["convert", trained, exported, "--verify"])
    after = kind.from_pretrained(exported).state_dict()
    assert before.keys() == after.keys()
    assert not any(torch.equal(after[name], before[name]) for name in before if name.endswith("dense.weight"))
    expected = [loss_of(None, 1, path, case) for path in (exported, folder)]
    for losses in every_rank:
        assert losses == pytest.approx(expected, abs=1e-4)
    consolidate(trained, plain, weights_only=True)
    for layout in (None, {}):
        assert loss_of(layout, 1, folder, case, plain) == pytest.approx(expected[0], abs=1e-4), f"plain file, {layout}"
