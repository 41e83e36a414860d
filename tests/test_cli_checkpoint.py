"""Tests of the subcommand `checkpoint`: its output, its files and its errors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_megatron.checkpoint import (
    load_metadata,
    read_full,
    read_header,
    saved_tensors,
    verify_checkpoint,
)
from lightning_megatron.cli.main import main
from tests.proof.training import Tokens
from tests.strategy.checkpoint_runs import Trained, train, trainer_of


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train two steps and save."""
    path = tmp_path_factory.mktemp("cli") / "two"
    train({}, 1, 2, save=path)
    return path


def test_show_prints_layout_step_tensors_optimizers_and_files(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["checkpoint", "show", str(saved)])
    out = capsys.readouterr().out
    assert "step 2, epoch 1, saved 20" in out
    assert "saved by 1 rank = tp 1 x cp 1 x dp 1 x pp 1" in out
    rows = [line.split() for line in out.splitlines()]
    assert ["model.embedding.word.weight", "300", "x", "32", "float64", "76.8", "kB"] in rows
    assert ["optimizer", "0:", "group", "parameters", "hyperparameters"] in rows
    assert "lr 0.00333" in out
    assert ["exp_avg", "52", "float64", "487.9", "kB"] in rows
    assert "__0_0.distcp" in out
    main(["checkpoint", "show", "--all", str(saved)])
    assert "model.layers.3.mlp.up.weight.exp_avg_sq" in capsys.readouterr().out


def test_verify_names_the_damaged_file_and_ends_with_1(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["checkpoint", "verify", str(saved)])
    assert "as written" in capsys.readouterr().out
    file = saved / "__0_0.distcp"
    content = file.read_bytes()
    changed = bytearray(content)
    changed[len(changed) // 2] ^= 1
    file.write_bytes(changed)
    with pytest.raises(SystemExit) as ended:
        main(["checkpoint", "verify", str(saved)])
    assert ended.value.code == 1
    assert "__0_0.distcp" in capsys.readouterr().err
    file.write_bytes(content)


def test_a_consolidated_file_is_verified_shown_and_loaded(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plain.ckpt"
    main(["checkpoint", "consolidate", str(saved), str(out)])
    assert "to continue from" in capsys.readouterr().out
    main(["checkpoint", "verify", str(out)])
    main(["checkpoint", "show", str(out)])
    assert "a file of another strategy" in capsys.readouterr().out
    checkpoint = torch.load(out, weights_only=True)
    assert checkpoint["state_dict"]["model.embedding.word.weight"].shape == (384, 32)
    assert [path.name for path in tmp_path.iterdir()] == ["plain.ckpt"]
    with pytest.raises(SystemExit):
        main(["checkpoint", "consolidate", str(saved), str(out)])
    assert "must not exist yet" in capsys.readouterr().err
    main(
        [
            "checkpoint",
            "consolidate",
            str(saved),
            str(out),
            "--overwrite",
            "--weights-only",
            "--dtype",
            "bfloat16",
        ]
    )
    checkpoint = torch.load(out, weights_only=True)
    assert {tensor.dtype for tensor in checkpoint["state_dict"].values()} == {torch.bfloat16}
    assert "optimizer_states" not in checkpoint
    assert "lr_schedulers" not in checkpoint


def test_a_resharded_checkpoint_continues_like_the_original(saved: Path, tmp_path: Path) -> None:
    main(["checkpoint", "reshard", str(saved), str(tmp_path / "three"), "--files", "3"])
    verify_checkpoint(tmp_path / "three")
    assert len(list((tmp_path / "three").glob("*.distcp"))) == 3
    assert saved_tensors(tmp_path / "three") == saved_tensors(saved)
    resharded, original = read_full(tmp_path / "three"), read_full(saved)
    assert all(torch.equal(resharded[name], original[name]) for name in original)
    assert train({}, 1, 4, resume=tmp_path / "three").losses == train({}, 1, 4, resume=saved).losses


def test_reshard_writes_only_weights_in_another_dtype(saved: Path, tmp_path: Path) -> None:
    out = tmp_path / "weights"
    main(
        [
            "checkpoint",
            "reshard",
            str(saved),
            str(out),
            "--weights-only",
            "--dtype",
            "bfloat16",
            "--files",
            "2",
        ]
    )
    assert {tensor.dtype for tensor in saved_tensors(out).values()} == {torch.bfloat16}
    assert read_header(out).global_step == 2
    assert "megatron_optimizers" not in load_metadata(out)
    assert "hyper_parameters" not in load_metadata(out)
    with pytest.raises(SystemExit):
        main(["checkpoint", "reshard", str(saved), str(tmp_path / "other"), "--dtype", "bfloat16"])
    assert not (tmp_path / "other").exists()


def test_a_folder_without_checkpoint_is_refused_with_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["checkpoint", "show", str(tmp_path)])
    assert ended.value.code == 2
    assert (
        "lightning-megatron checkpoint: error: a sharded checkpoint must be a directory"
        in capsys.readouterr().err
    )


def test_python_objects_are_refused_without_the_unsafe_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class CheckpointWithPath(ModelCheckpoint):
        def state_dict(self) -> dict[str, object]:
            return {**super().state_dict(), "where": tmp_path}

    trainer = trainer_of(
        {}, 1, 1, callbacks=[CheckpointWithPath(tmp_path / "folder", save_top_k=0)]
    )
    trainer.fit(Trained(), DataLoader(Tokens(), batch_size=2))
    trainer.save_checkpoint(tmp_path / "objects")
    with pytest.raises(SystemExit):
        main(["checkpoint", "consolidate", str(tmp_path / "objects"), str(tmp_path / "out.ckpt")])
    assert "the option is --unsafe" in capsys.readouterr().err
    main(
        [
            "checkpoint",
            "consolidate",
            str(tmp_path / "objects"),
            str(tmp_path / "out.ckpt"),
            "--unsafe",
        ]
    )
    assert (tmp_path / "out.ckpt").is_file()


def test_checkpoint_command_does_not_import_lightning(saved: Path) -> None:
    code = (
        "import sys\n"
        "from lightning_megatron.cli.main import main\n"
        f"main(['checkpoint', 'show', {str(saved)!r}])\n"
        "print('lightning.pytorch' in sys.modules)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize("command", ["show", "verify"])
def test_show_and_verify_of_a_damaged_file_end_with_1(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "notes.ckpt"
    path.write_text("no checkpoint")
    with pytest.raises(SystemExit, match="^1$"):
        main(["checkpoint", command, str(path)])
    assert (
        f"checkpoint {command}: damaged: a checkpoint file must be as torch.save wrote it"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("command", ["consolidate", "reshard"])
def test_conversion_of_a_single_file_is_refused(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"state_dict": {}}, tmp_path / "plain.ckpt")
    with pytest.raises(SystemExit, match="^2$"):
        main(["checkpoint", command, str(tmp_path / "plain.ckpt"), str(tmp_path / "out")])
    assert "is already a plain file" in capsys.readouterr().err
