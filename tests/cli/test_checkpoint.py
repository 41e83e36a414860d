"""The command ``checkpoint``: its output, its files and its errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_megatron.checkpoint import load_metadata, read_full, saved_tensors, verify_checkpoint
from tests.fits import Job, run_job


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train two steps and save."""
    path = tmp_path_factory.mktemp("cli") / "two"
    run_job(Job(strategy={}, steps=2, save=str(path)))
    return path


def test_show_prints_layout_step_tensors_optimizers_and_files(saved, printed):
    out = printed("checkpoint show", saved)
    assert "step 2, epoch 1, saved 20" in out
    assert "saved by 1 rank = tp 1 x cp 1 x dp 1 x pp 1" in out
    rows = [line.split() for line in out.splitlines()]
    assert ["model.embedding.word.weight", "300", "x", "32", "float64", "76.8", "kB"] in rows
    assert "lr 0.00333" in out
    assert ["exp_avg", "52", "float64", "487.9", "kB"] in rows
    assert "model.layers.3.mlp.up.weight.exp_avg_sq" in printed("checkpoint show --all", saved)


def test_verify_names_the_damaged_file_and_ends_with_1(saved, printed, refused):
    assert "as written" in printed("checkpoint verify", saved)
    file = saved / "__0_0.distcp"
    content = file.read_bytes()
    changed = bytearray(content)
    changed[len(changed) // 2] ^= 1
    file.write_bytes(changed)
    assert "__0_0.distcp" in refused("checkpoint verify", saved, code=1)
    file.write_bytes(content)


def test_a_consolidated_file_is_verified_shown_and_loaded(saved, tmp_path, printed, refused):
    out = tmp_path / "plain.ckpt"
    assert "to continue from" in printed("checkpoint consolidate", saved, out)
    printed("checkpoint verify", out)
    assert "a file of another strategy" in printed("checkpoint show", out)
    checkpoint = torch.load(out, weights_only=True)
    assert checkpoint["state_dict"]["model.embedding.word.weight"].shape == (384, 32)
    assert "must not exist yet" in refused("checkpoint consolidate", saved, out)
    printed("checkpoint consolidate --overwrite --weights-only --dtype bfloat16", saved, out)
    checkpoint = torch.load(out, weights_only=True)
    assert {tensor.dtype for tensor in checkpoint["state_dict"].values()} == {torch.bfloat16}
    assert not {"optimizer_states", "lr_schedulers"} & checkpoint.keys()


def test_a_resharded_checkpoint_has_the_same_tensors_or_only_weights_in_another_dtype(
    saved, tmp_path, printed, refused
):
    out, weights = tmp_path / "three", tmp_path / "weights"
    printed("checkpoint reshard --files 3", saved, out)
    verify_checkpoint(out)
    assert len(list(out.glob("*.distcp"))) == 3
    assert saved_tensors(out) == saved_tensors(saved)
    resharded, original = read_full(out), read_full(saved)
    assert all(torch.equal(resharded[name], original[name]) for name in original)
    losses = [run_job(Job(strategy={}, resume=str(path))).losses for path in (out, saved)]
    assert losses[0] == losses[1] != []
    printed("checkpoint reshard --weights-only --dtype bfloat16", saved, weights)
    assert {tensor.dtype for tensor in saved_tensors(weights).values()} == {torch.bfloat16}
    assert not {"megatron_optimizers", "hyper_parameters"} & load_metadata(weights).keys()
    refused("checkpoint reshard --dtype bfloat16", saved, tmp_path / "other")


class Place(pl.Callback):
    """Callback whose state is not plain data."""

    def state_dict(self) -> dict[str, Any]:
        return {"where": Path("somewhere")}


def test_python_objects_are_refused_without_the_unsafe_option(tmp_path, printed, refused):
    saved, out = tmp_path / "objects", tmp_path / "out.ckpt"
    run_job(Job(strategy={}, steps=1, callbacks=lambda: [Place()], save=str(saved)))
    assert "the option is --unsafe" in refused("checkpoint consolidate", saved, out)
    printed("checkpoint consolidate --unsafe", saved, out)
    assert out.is_file()


def test_what_is_no_checkpoint_is_refused(tmp_path, refused):
    assert "a sharded checkpoint must be a directory" in refused("checkpoint show", tmp_path)
    notes, plain = tmp_path / "notes.ckpt", tmp_path / "plain.ckpt"
    notes.write_text("no checkpoint")
    assert "error: a checkpoint file must be" in refused("checkpoint show", notes, code=1)
    torch.save({"state_dict": {}}, plain)
    message = refused("checkpoint consolidate", plain, tmp_path / "out")
    assert "is already a plain file" in message
