"""Checkpoint files of a training: background saves, removal of old checkpoints, and the choice of
the last checkpoint.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from lightning_megatron import CausalLM, GPTConfig
from lightning_megatron.checkpoint import (
    is_sharded_checkpoint,
    load_metadata,
    save,
    verify_checkpoint,
)
from lightning_megatron.checkpoint.save import CollectiveSave
from lightning_megatron.errors import (
    CheckpointMismatchError,
    CheckpointSaveError,
    CorruptDataError,
    UnsupportedError,
)
from lightning_megatron.strategy.checkpoints.weight_changes import only_steps_change_weights
from tests.proof.training import Tokens
from tests.strategy.checkpoint_runs import Trained, trainer_of

BEHIND: dict[str, Any] = {"async_save": True}


def fit(
    layout: dict[str, Any] | None,
    steps: int,
    callback: pl.Callback,
    resume: str | Path | None = None,
    module: Trained | None = None,
    **options: Any,
) -> tuple[pl.Trainer, Trained]:
    """Train on five batches an epoch."""
    trainer, module = (
        trainer_of(layout, 1, steps, callbacks=[callback], **options),
        module or Trained(),
    )
    trainer.fit(module, DataLoader(Tokens(), batch_size=8), ckpt_path=resume)
    return trainer, module


def every_step(folder: Path, **options: Any) -> ModelCheckpoint:
    return ModelCheckpoint(folder, "{step}", every_n_train_steps=1, **{"save_top_k": -1, **options})


def damage(checkpoint: Path) -> None:
    """Flip one bit of the tensors."""
    file = checkpoint / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("layout", [{}, BEHIND], ids=["at once", "behind training"])
def test_top_k_last_and_monitored_files_match_those_of_a_plain_lightning_run(
    layout: Any, tmp_path: Path
) -> None:
    class Watched(Trained):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log("loss", loss)
            return loss

    results, scores = [], []
    for number, strategy in enumerate((layout, None)):
        folder = tmp_path / str(number)
        saver = every_step(folder, save_top_k=2, save_last=True, monitor="loss", mode="min")
        saver.filename = "{step}-{loss:.3f}"
        _, module = fit(strategy, 5, saver, module=Watched())
        results.append((sorted(os.listdir(folder)), Path(saver.best_model_path).name))
        scores.append(float(saver.best_model_score))
        assert scores[number] == min(module.losses)
        if strategy is not None:
            assert all(is_sharded_checkpoint(folder / name) for name in os.listdir(folder))
            verify_checkpoint(saver.best_model_path)
    assert results[0] == results[1]
    # The strategy adds up the losses of four microbatches, so the last bit may differ.
    assert scores[0] == pytest.approx(scores[1], rel=1e-12)


def test_a_weights_only_checkpoint_behind_a_last_link_cannot_resume_training(
    tmp_path: Path,
) -> None:
    saver = every_step(tmp_path, save_top_k=1, save_last="link", save_weights_only=True)
    _, module = fit(BEHIND, 3, saver)
    assert sorted(os.listdir(tmp_path)) == ["last.ckpt", "step=3.ckpt"]
    assert (tmp_path / "last.ckpt").is_symlink()
    verify_checkpoint(tmp_path / "last.ckpt")
    with pytest.raises(CheckpointMismatchError, match="must hold optimizer states"):
        fit({}, 4, every_step(tmp_path / "other"), resume=tmp_path / "last.ckpt")


def test_the_previous_checkpoint_stays_until_the_next_one_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    complete_checkpoints: list[list[str]] = []
    run = CollectiveSave.run

    def run_slowly(save: CollectiveSave) -> None:
        time.sleep(0.2)
        # During a save the previous checkpoint exists and the new one is not visible.
        complete_checkpoints.append(
            sorted(name for name in os.listdir(tmp_path) if is_sharded_checkpoint(tmp_path / name))
        )
        run(save)

    monkeypatch.setattr(CollectiveSave, "run", run_slowly)
    fit(BEHIND, 3, every_step(tmp_path, save_top_k=1))
    assert complete_checkpoints == [[], ["step=1.ckpt"], ["step=2.ckpt"]]
    assert os.listdir(tmp_path) == ["step=3.ckpt"]


def test_a_failed_background_save_ends_training_and_keeps_the_previous_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    main, run = threading.get_ident(), CollectiveSave.run

    def fail_at_step_3(save: CollectiveSave) -> None:
        assert threading.get_ident() != main, "a save behind training is in a thread"
        if "step=3" in str(save.path):
            raise CheckpointSaveError(
                "every rank must write its part of a checkpoint: No space left on device"
            )
        run(save)

    monkeypatch.setattr(CollectiveSave, "run", fail_at_step_3)
    with pytest.raises(CheckpointSaveError, match="No space left on device"):
        fit(BEHIND, 40, every_step(tmp_path, save_top_k=1))
    assert os.listdir(tmp_path) == ["step=2.ckpt"]
    verify_checkpoint(tmp_path / "step=2.ckpt")


def test_background_saves_hold_the_state_of_their_step(tmp_path: Path) -> None:
    _, uninterrupted = fit(BEHIND, 5, every_step(tmp_path))
    for step in (1, 3):
        _, resumed = fit(
            {}, 5, every_step(tmp_path / f"again {step}"), resume=tmp_path / f"step={step}.ckpt"
        )
        assert resumed.losses == uninterrupted.losses[step:]


def test_last_resumes_from_the_newest_undamaged_checkpoint_of_any_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, uninterrupted = fit({}, 5, every_step(tmp_path))
    (tmp_path / ".step=9.ckpt.unfinished").mkdir()
    (tmp_path / "step=10.ckpt").mkdir()
    damage(tmp_path / "step=5.ckpt")
    with pytest.raises(CorruptDataError, match=r"step=5.ckpt/__0_0.distcp"):
        fit({}, 5, every_step(tmp_path / "new"), resume=tmp_path / "step=5.ckpt")
    with pytest.warns(match=r"skips .*step=5.ckpt/__0_0.distcp"):
        trainer, resumed = fit({}, 5, every_step(tmp_path, save_top_k=0), resume="last")
    assert trainer.ckpt_path == str(tmp_path / "step=4.ckpt")
    assert resumed.losses == uninterrupted.losses[4:]


@contextmanager
def clock_ahead(days: float) -> Iterator[None]:
    """Let the clock of saves be wrong."""
    with pytest.MonkeyPatch.context() as patch:
        now = time.time
        patch.setattr(save, "time", SimpleNamespace(time=lambda: now() + days * 86400))
        yield


@pytest.mark.parametrize("days", [-1, 0, 1])
def test_last_goes_by_the_order_of_saving_and_ignores_clocks_and_broken_links(
    tmp_path: Path, days: int
) -> None:
    with clock_ahead(days):
        fit({}, 4, every_step(tmp_path))
    # This run continues from the second step, so step 3 is saved after step 4.
    fit({}, 3, every_step(tmp_path), resume=tmp_path / "step=2.ckpt")
    (tmp_path / "last.ckpt").symlink_to("step=99.ckpt")
    trainer, _ = fit({}, 4, every_step(tmp_path, save_top_k=0), resume="last")
    assert load_metadata(str(trainer.ckpt_path))["global_step"] == 3


@pytest.mark.parametrize("layout", [{}, BEHIND], ids=["at once", "behind training"])
def test_restarts_from_the_last_checkpoint_keep_no_more_than_top_k(
    layout: Any, tmp_path: Path
) -> None:
    for steps, resume in ((2, None), (3, "last"), (5, "last")):
        fit(layout, steps, every_step(tmp_path, save_top_k=1), resume=resume)
        assert os.listdir(tmp_path) == [f"step={steps}.ckpt"]
    # As in Lightning, a checkpoint that the user names stays.
    fit(layout, 6, every_step(tmp_path, save_top_k=1), resume=tmp_path / "step=5.ckpt")
    assert sorted(os.listdir(tmp_path)) == ["step=5.ckpt", "step=6.ckpt"]


def test_last_starts_anew_without_checkpoints_and_raises_if_all_are_damaged(
    tmp_path: Path,
) -> None:
    with pytest.warns(match="finds no complete checkpoint"):
        _, module = fit({}, 2, every_step(tmp_path), resume="last")
    assert len(module.losses) == 2
    for path in list(tmp_path.iterdir()):
        damage(path)
    with (
        pytest.warns(match="skips"),
        pytest.raises(CorruptDataError, match="all 2 .* are damaged"),
    ):
        fit({}, 4, every_step(tmp_path), resume="last")


def test_last_resumes_from_lightning_files_and_skips_weights_only_checkpoints(
    tmp_path: Path,
) -> None:
    fit(None, 2, every_step(tmp_path))
    fit(
        {},
        1,
        every_step(tmp_path, save_weights_only=True, save_top_k=1, auto_insert_metric_name=False),
    )
    trainer, module = fit({}, 3, every_step(tmp_path, save_top_k=0), resume="last")
    assert trainer.ckpt_path == str(tmp_path / "step=2.ckpt")
    assert len(module.losses) == 1


def test_last_finds_checkpoints_of_an_earlier_logger_version(tmp_path: Path) -> None:
    for steps, resume, days in ((2, None, 1), (3, "last", 0), (4, "last", 0)):
        saver = ModelCheckpoint(every_n_train_steps=1)
        with clock_ahead(days):
            trainer, _ = fit({}, steps, saver, resume=resume, logger=CSVLogger(tmp_path))
        if resume is not None:
            version = f"version_{steps - 3}/checkpoints/epoch=0-step={steps - 1}.ckpt"
            assert trainer.ckpt_path == str(tmp_path / "lightning_logs" / version)
    assert "version_2" in saver.best_model_path


class UserObject:
    """Object that only unpickling can restore."""


def test_pickled_objects_are_saved_with_a_warning_and_loaded_only_on_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class SavesObject(ModelCheckpoint):
        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "thing": UserObject()}

    fit({}, 1, SavesObject(tmp_path, "{step}", every_n_train_steps=1))
    assert "thing" in caplog.text
    path = tmp_path / "step=1.ckpt"
    with pytest.raises(UnsupportedError, match=r"add_safe_globals.*weights_only=False"):
        fit({}, 2, every_step(tmp_path / "a"), resume=path)
    trainer = trainer_of({}, 1, 2, callbacks=[every_step(tmp_path / "b")])
    trainer.fit(Trained(), DataLoader(Tokens(), batch_size=8), ckpt_path=path, weights_only=False)
    assert trainer.global_step == 2
    with torch.serialization.safe_globals([UserObject]):
        fit({}, 2, every_step(tmp_path / "c"), resume=path)


def test_user_hooks_and_callbacks_count_as_changing_weights(tmp_path: Path) -> None:
    class NoHooks(pl.LightningModule):
        pass

    class ClipsWeights(pl.LightningModule):
        def on_train_batch_end(self, *_: Any) -> None:
            for parameter in self.parameters():
                parameter.data.clamp_(-1, 1)

    class InheritedHooks(CausalLM):
        """Have the hooks of the package and no others."""

    class OverridesHook(CausalLM):
        def on_validation_epoch_end(self) -> None:
            super().on_validation_epoch_end()

    class UserCallback(pl.Callback):
        pass

    trainer = trainer_of({}, 1, 1, callbacks=[every_step(tmp_path)])
    config = GPTConfig.gpt2(num_layers=1, hidden_size=16, num_heads=2)
    for unchanged in (NoHooks(), InheritedHooks(config)):
        assert only_steps_change_weights(unchanged, trainer)
    for changed in (ClipsWeights(), OverridesHook(config)):
        assert not only_steps_change_weights(changed, trainer)
    for callback in (UserCallback(), EMAWeightAveraging()):
        assert not only_steps_change_weights(NoHooks(), trainer_of({}, 1, 1, callbacks=[callback]))
