"""Checkpoints of Hugging Face models convert to folders that from_pretrained reads, and back."""

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
from lightning_megatron.cli.main import main
from lightning_megatron.errors import CheckpointMismatchError
from tests.swap import encoders, expert_models, families
from tests.world import run_world

transformers = pytest.importorskip("transformers")


FOUR_EXPERTS = {"num_local_experts": 4, "num_attention_heads": 4}

#: Case: the class of transformers that loads it, and the function that builds its model.
CASES = {
    "llama": ("AutoModelForCausalLM", families.twin_of),
    "llama with one key head": ("AutoModelForCausalLM", families.twin_of),
    "gpt2": ("AutoModelForCausalLM", families.twin_of),
    "mixtral": ("AutoModelForCausalLM", lambda case: expert_models.twin_of(case, **FOUR_EXPERTS)),
    "bert masked": ("AutoModelForMaskedLM", encoders.encoder_of),
    "roberta classes": ("AutoModelForSequenceClassification", encoders.encoder_of),
}


class Texts(Dataset):
    def __init__(self, case: str) -> None:
        self.case = case

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.randint(4, families.V, (12,), generator=torch.Generator().manual_seed(index))
        return {
            "input_ids": tokens,
            "labels": torch.tensor(index % 5) if "classes" in self.case else tokens,
        }


class FineTune(LightningModule):
    def __init__(self, folder: str | Path, case: str) -> None:
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


def data_of(case: str) -> DataLoader:
    return DataLoader(Texts(case), batch_size=4)


def fitted(layout: dict[str, int] | None, devices: int, folder: str | Path, case: str) -> Trainer:
    """Return a trainer that has trained the weights of a folder."""
    seed_everything(1, verbose=False)
    trainer = trainer_of(layout, devices)
    trainer.fit(FineTune(folder, case), data_of(case))
    return trainer


def loss_of(
    layout: dict[str, int] | None,
    devices: int,
    folder: str | Path,
    case: str,
    path: str | Path | None = None,
) -> float:
    """Return the loss of the weights of a checkpoint or a folder."""
    trainer = trainer_of(layout, devices)
    (metrics,) = trainer.validate(
        FineTune(folder, case), data_of(case), ckpt_path=path, verbose=False
    )
    return float(metrics["val_loss"])


def saved(case: str, folder: Path) -> Path:
    twin = CASES[case][1](case)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(0.1)
    twin.save_pretrained(folder)
    return folder


def tensors_of(folder: str | Path, case: str) -> dict[str, Tensor]:
    return dict(getattr(transformers, CASES[case][0]).from_pretrained(folder).state_dict())


def train_and_evaluate(
    rank: int, size: int, folder: Path, cases: list[str]
) -> dict[str, list[float]]:
    losses = {}
    for case in cases:
        initial, trained, imported = (
            folder / case / name for name in ("given", "trained.ckpt", "imported.ckpt")
        )
        training_layout, evaluation_layout = LAYOUTS.get(case, ({"tp": 2, "pp": 2}, {"tp": 2}))
        fitted(training_layout, size, initial, case).save_checkpoint(trained)
        losses[case] = [
            loss_of(evaluation_layout, size, initial, case, path) for path in (trained, imported)
        ]
        if case == "mixtral":
            plain = folder / case / "plain.ckpt"
            if rank == 0:
                consolidate(trained, plain, weights_only=True)
            torch.distributed.barrier()
            assert loss_of(evaluation_layout, size, initial, case, plain) == pytest.approx(
                losses[case][0], abs=1e-6
            )
    return losses


TRAINED = ["llama with one key head", "gpt2", "mixtral", "bert masked", "roberta classes"]
#: The layouts in which a case is trained and evaluated, if they are not the usual ones.
LAYOUTS = {"mixtral": ({"pp": 2, "ep": 2}, {"tp": 2, "ep": 2, "etp": 1})}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a folder of every case and import it as a checkpoint."""
    path = tmp_path_factory.mktemp("cases")
    for case in TRAINED:
        import_model(saved(case, path / case / "given"), path / case / "imported.ckpt")
    return path


@pytest.fixture(scope="module")
def ranks(folders: Path) -> list[dict[str, list[float]]]:
    """Train every case on four processes, and return the losses by rank."""
    return run_world(train_and_evaluate, 4, folders, TRAINED)


@pytest.mark.parametrize("case", TRAINED)
def test_importing_and_exporting_a_folder_keeps_its_tensors(
    case: str, folders: Path, tmp_path: Path
) -> None:
    export_model(folders / case / "imported.ckpt", tmp_path / "again")
    exported = tensors_of(tmp_path / "again", case)
    assert all(
        torch.equal(tensor, exported[name])
        for name, tensor in tensors_of(folders / case / "given", case).items()
    )


@pytest.mark.parametrize("case", TRAINED)
def test_transformers_loads_the_weights_that_four_ranks_trained(
    case: str, folders: Path, ranks: Any, tmp_path: Path
) -> None:
    folder, trained, exported = (
        folders / case / "given",
        folders / case / "trained.ckpt",
        tmp_path / "exported",
    )
    main(["convert", str(trained), str(exported), "--verify"])
    before, after = tensors_of(folder, case), tensors_of(exported, case)
    assert before.keys() == after.keys()
    block_weights = [name for name in before if name.endswith(("proj.weight", "dense.weight"))]
    assert block_weights
    assert not any(torch.equal(after[name], before[name]) for name in block_weights)
    expected = [loss_of(None, 1, path, case) for path in (exported, folder)]
    for losses in ranks:
        assert losses[case] == pytest.approx(expected, abs=1e-4)
    consolidate(trained, tmp_path / "plain.ckpt", weights_only=True)
    for layout in (None, {}):
        actual = loss_of(layout, 1, folder, case, tmp_path / "plain.ckpt")
        assert actual == pytest.approx(expected[0], abs=1e-4), f"plain file, {layout}"


def test_checkpoint_files_of_plain_lightning_are_read_and_written(tmp_path: Path) -> None:
    case = "llama"
    folder, plain, ours = (
        saved(case, tmp_path / "given"),
        tmp_path / "plain.ckpt",
        tmp_path / "ours.ckpt",
    )
    fitted(None, 1, folder, case).save_checkpoint(plain)
    assert loss_of(None, 1, folder, case, plain) == pytest.approx(
        loss_of({}, 1, folder, case, plain), abs=1e-5
    )
    fitted({}, 1, folder, case).save_checkpoint(ours)
    consolidate(ours, tmp_path / "file.ckpt", weights_only=True)
    expected = loss_of({}, 1, folder, case, ours)
    assert loss_of(None, 1, folder, case, tmp_path / "file.ckpt") == pytest.approx(
        expected, abs=1e-5
    )


def test_conversion_copies_the_files_of_the_tokenizer(tmp_path: Path) -> None:
    folder = saved("llama", tmp_path / "given")
    for name in ("tokenizer.json", "tokenizer_config.json", "merges.txt", "notes.txt"):
        (folder / name).write_text(name)
    import_model(folder, tmp_path / "checkpoint")
    main(
        ["convert", str(tmp_path / "checkpoint"), str(tmp_path / "out"), "--tokenizer", str(folder)]
    )
    other_files = {
        file.name: file.read_text()
        for file in (tmp_path / "out").glob("*")
        if file.suffix != ".safetensors"
    }
    assert {name for name, text in other_files.items() if name == text} == {
        "tokenizer.json", "tokenizer_config.json", "merges.txt",
    }  # fmt: skip


def test_export_refuses_a_checkpoint_without_a_hugging_face_model(tmp_path: Path) -> None:
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=1,
        strategy=MegatronStrategy(),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Plain(), DataLoader(torch.ones(1, 2), batch_size=1))
    trainer.save_checkpoint(tmp_path / "plain.ckpt")
    with pytest.raises(CheckpointMismatchError, match=r"plain\.ckpt holds none.*consolidate"):
        export_model(tmp_path / "plain.ckpt", tmp_path / "out")


class Plain(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(batch).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_the_convert_command_refuses_invalid_paths_and_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
    for arguments, reason in (
        (
            [str(folder), str(tmp_path / "out"), "--merge"],
            "--merge is only for conversion to a Hugging Face folder",
        ),
        (
            [str(folder), str(tmp_path / "out"), "--tokenizer", str(folder)],
            "--tokenizer is only for conversion",
        ),
        (
            [str(tmp_path / "checkpoint"), str(tmp_path / "out"), "--tokenizer", str(tmp_path)],
            "files of a tokenizer",
        ),
    ):
        with pytest.raises(SystemExit):
            main(["convert", *arguments])
        assert reason in capsys.readouterr().err
    with pytest.raises(
        CheckpointMismatchError, match="'other' is not among them.*Choose 'model' with --name"
    ):
        export_model(tmp_path / "checkpoint", tmp_path / "out", name="other")
    assert not (tmp_path / "out").exists()
