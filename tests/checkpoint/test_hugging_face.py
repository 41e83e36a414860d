"""Checkpoints of Hugging Face models become folders that from_pretrained reads, and folders become checkpoints."""

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
from lightning_megatron.errors import CheckpointMismatchError, UnsupportedError
from tests.swap.families import V, twin_of
from tests.world import run_world

transformers = pytest.importorskip("transformers")


class Texts(Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.randint(0, V, (12,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


class FineTune(LightningModule):
    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder

    def configure_model(self) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(self.folder)

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


def saved(case: str, folder: Path) -> Path:
    twin = twin_of(case)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(0.1)
    twin.save_pretrained(folder)
    return folder


def tensors_of(folder: str | Path) -> dict[str, Tensor]:
    return dict(transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict())


def train_and_evaluate(rank: int, size: int, folder: str, imported: str, out: str) -> list[float]:
    seed_everything(1, verbose=False)
    trainer = trainer_of({"tp": 2, "pp": 2}, size)
    trainer.fit(FineTune(folder), DataLoader(Texts(), batch_size=4))
    trainer.save_checkpoint(out)
    losses = []
    for path in (out, imported):
        trainer = trainer_of({"tp": 2}, size)
        (found,) = trainer.validate(FineTune(folder), DataLoader(Texts(), batch_size=4), ckpt_path=path, verbose=False)
        losses.append(found["val_loss"])
    return losses


@pytest.mark.parametrize("case", ["llama with one key head", "gpt2"])
def test_what_four_ranks_have_trained_is_what_transformers_loads(case: str, tmp_path: Path) -> None:
    folder = saved(case, tmp_path / "given")
    imported, trained, exported = (str(tmp_path / name) for name in ("imported.ckpt", "trained.ckpt", "exported"))
    import_model(folder, imported)
    export_model(imported, tmp_path / "again")
    again = tensors_of(tmp_path / "again")
    assert all(torch.equal(tensor, again[name]) for name, tensor in tensors_of(folder).items())
    every_rank = run_world(train_and_evaluate, 4, str(folder), imported, trained)
    main(["convert", trained, exported, "--verify"])
    before, after = tensors_of(folder), tensors_of(exported)
    assert before.keys() == after.keys()
    assert not any(torch.equal(after[name], before[name]) for name in before if name.endswith("proj.weight"))
    expected = []
    for path in (exported, folder):
        (found,) = trainer_of(None, 1).validate(FineTune(str(path)), DataLoader(Texts(), batch_size=4), verbose=False)
        expected.append(found["val_loss"])
    for losses in every_rank:
        assert losses == pytest.approx(expected, abs=1e-4)


def test_files_of_plain_lightning_are_read_and_written(tmp_path: Path) -> None:
    folder, plain, ours = saved("llama", tmp_path / "given"), tmp_path / "plain.ckpt", str(tmp_path / "ours.ckpt")
    other = saved("llama", tmp_path / "other")
    seed_everything(1, verbose=False)
    trainer = trainer_of(None, 1)
    trainer.fit(FineTune(str(folder)), DataLoader(Texts(), batch_size=4))
    trainer.save_checkpoint(plain)
    losses = []
    for layout in (None, {}):
        trainer = trainer_of(layout, 1)
        data = DataLoader(Texts(), batch_size=4)
        (found,) = trainer.validate(FineTune(str(other)), data, ckpt_path=plain, verbose=False)
        losses.append(found["val_loss"])
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    with pytest.raises(UnsupportedError, match="its optimizer numbers the parameters"):
        trainer_of({}, 1).fit(FineTune(str(other)), data, ckpt_path=plain)
    trainer = trainer_of({}, 1)
    trainer.fit(FineTune(str(folder)), data)
    trainer.save_checkpoint(ours)
    with pytest.raises(UnsupportedError, match="Add --weights-only"):
        consolidate(ours, tmp_path / "file.ckpt")
    consolidate(ours, tmp_path / "file.ckpt", weights_only=True)
    losses = []
    for layout, path in ((None, tmp_path / "file.ckpt"), ({}, ours)):
        (found,) = trainer_of(layout, 1).validate(FineTune(str(other)), data, ckpt_path=path, verbose=False)
        losses.append(found["val_loss"])
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_the_command_refuses_what_it_cannot_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = saved("llama", tmp_path / "given")
    for arguments, reason in (
        ([str(folder), str(folder)], "must not exist yet"),
        ([str(tmp_path / "nothing"), str(tmp_path / "out")], "local folder"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["convert", *arguments])
        assert ended.value.code == 2
        assert reason in capsys.readouterr().err
    import_model(folder, tmp_path / "checkpoint")
    with pytest.raises(CheckpointMismatchError, match="'other' is none of them: 'model'"):
        export_model(tmp_path / "checkpoint", tmp_path / "out", name="other")
    assert not (tmp_path / "out").exists()
